"""Baseline `ema_tiers`: SGLang's adaptive draft length, a ladder of lengths for each load.

The mean number of accepted tokens is averaged exponentially; every few steps the length goes one
rung down if the average has fallen to what the rung below would bring anyway, or one up if nearly
all of the present length is accepted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..contract import Contract
from ..errors import ConfigError
from ..step import StepRecord
from .drafters import drafter_index


@dataclass(frozen=True)
class EmaTiersConfig:
    """The ladders and when to climb.

    Attributes:
        drafter: Who drafts.
        tiers: Lengths to choose from, ascending, by the smallest number of running requests
            that they are for.
        decay: Weight that the average keeps at each step with drafts.
        warm_up_steps: Steps before the first change.
        interval_steps: Steps between changes.
        down_hysteresis_alone: Added to the threshold downwards below the second load, and
        down_hysteresis: at higher ones.
        up_hysteresis: Added to the threshold upwards.
    """

    drafter: str
    tiers: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"1": (1, 3, 5, 7), "8": (0, 1, 3), "32": (0, 1), "64": (0,)},
        hash=False,
    )
    decay: float = 0.8
    warm_up_steps: int = 10
    interval_steps: int = 5
    down_hysteresis_alone: float = -0.25
    down_hysteresis: float = 0.0
    up_hysteresis: float = 0.0

    def __post_init__(self) -> None:
        loads = [int(load) if str(load).isdecimal() else 0 for load in self.tiers]
        if not loads or loads[0] != 1 or sorted(set(loads)) != loads:
            raise ConfigError(
                f"tiers are for the loads {', '.join(map(str, self.tiers))}; begin at 1 and ascend."
            )
        for load, lengths in self.tiers.items():
            if not lengths or sorted(set(lengths)) != list(lengths) or lengths[0] < 0:
                raise ConfigError(
                    f"tiers.{load} is {list(lengths)}; give ascending lengths of 0 or more."
                )
        if not 0 <= self.decay < 1 or self.warm_up_steps < 0 or self.interval_steps < 1:
            raise ConfigError(
                "ema_tiers needs 0 <= decay < 1, warm_up_steps >= 0 and interval_steps >= 1; "
                "correct them."
            )


class EmaTiersController:
    """Climbs up and down.

    Args:
        contract: The action table.
        config: The ladders.

    Raises:
        ConfigError: If the engine has no such drafter.
    """

    def __init__(self, contract: Contract, config: EmaTiersConfig) -> None:
        self._config = config
        self._drafter = drafter_index(contract, config.drafter)
        longest = contract.max_lengths[self._drafter]
        self._loads = [int(load) for load in config.tiers]
        self._tiers = [
            sorted({min(length, longest) for length in lengths})
            for lengths in config.tiers.values()
        ]
        self._length = self._tiers[0][0]
        self._ema = float(self._length)
        self._num_steps = 0

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Average, and climb when it is time."""
        index = max(bisect_right(self._loads, record.num_running_reqs) - 1, 0)
        tier = self._tiers[index]
        num_drafts, _, num_accepted = record.verified(self._drafter)
        if num_drafts:
            decay = self._config.decay
            self._ema = decay * self._ema + (1 - decay) * num_accepted / num_drafts
        self._num_steps += 1
        at = max(bisect_right(tier, self._length) - 1, 0)
        since = self._num_steps - self._config.warm_up_steps
        if since >= 0 and since % self._config.interval_steps == 0:
            at = self._climb(tier, at, is_alone=index == 0)
        self._length = tier[at]
        return np.array([(self._drafter, self._length) if self._length else (0, 0)])

    def _climb(self, tier: list[int], at: int, *, is_alone: bool) -> int:
        """The next rung."""
        config = self._config
        if at > 0:
            hysteresis = config.down_hysteresis_alone if is_alone else config.down_hysteresis
            below = tier[at - 1] - 0.5 if tier[at - 1] else 0.5
            if self._ema <= below + hysteresis:
                return at - 1
        if at + 1 < len(tier) and self._ema > tier[at] - 0.5 + config.up_hysteresis:
            return at + 1
        return at
