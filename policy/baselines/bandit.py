"""Baseline `bandit`: learns from use alone which drafter and length is fastest at each load.

An arm is a drafter with a length, judged by all tokens over all seconds that it has brought and
taken in the present bucket of loads. Seconds are the cost model's, not a clock's, so that every
rank of a tensor-parallel engine decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..contract import Contract
from ..cost_model import CostModel, shape_of
from ..errors import ConfigError
from ..step import StepRecord
from .drafters import token_drafters


@dataclass(frozen=True)
class BanditConfig:
    """How arms are tried.

    Attributes:
        cost_model: A cost model's JSON file (`scripts/collect.py`).
        method: `ucb` takes the highest upper bound, `thompson` the highest draw.
        exploration: Width of the bound or of the draws, as a share of no speculation's speed for
            an arm used once.
        seed: Of the draws.
    """

    cost_model: str
    method: Literal["ucb", "thompson"] = "ucb"
    exploration: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.exploration >= 0:
            raise ConfigError(f"exploration is {self.exploration}; make it 0 or more.")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; make it 0 or more.")


class BanditController:
    """One bandit for each power of two of running requests.

    Args:
        contract: The action table.
        cost_model: Prices a step.
        config: How arms are tried.
    """

    def __init__(self, contract: Contract, cost_model: CostModel, config: BanditConfig) -> None:
        self._contract = contract
        self._cost_model = cost_model
        self._config = config
        self._generator = np.random.default_rng(config.seed)
        self._tokens = token_drafters(contract)
        self._arms = np.array(
            [
                (0, 0),
                *(
                    (drafter, length)
                    for drafter, longest in enumerate(contract.max_lengths)
                    for length in range(1, 1 + longest)
                ),
            ]
        )
        self._sums: dict[int, np.ndarray] = {}
        self._last: tuple[int, int] | None = None

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Learn from the last arm's step and pull the next."""
        if self._last is not None:
            bucket, arm = self._last
            self._sums[bucket][:, arm] += 1, record.num_emitted_tokens.sum(), self._seconds(record)
        bucket = record.num_running_reqs.bit_length()
        sums = self._sums.setdefault(bucket, np.zeros((3, len(self._arms))))
        arm = self._next_arm(*sums)
        self._last = bucket, arm
        return self._arms[[arm]]

    def _next_arm(self, pulls: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> int:
        """Arms never pulled come first, in the order of the table."""
        if not pulls.all():
            return int(pulls.argmin())
        rates = tokens / seconds
        width = self._config.exploration * rates[0] / np.sqrt(pulls)
        if self._config.method == "ucb":
            return int((rates + width * np.sqrt(np.log(pulls.sum()))).argmax())
        return int(self._generator.normal(rates, width).argmax())

    def _seconds(self, record: StepRecord) -> float:
        """Expected time of the step, look-ups included."""
        shape = shape_of(record, self._contract)
        seconds = self._cost_model.expected_s(shape)
        if np.isin(record.drafter, self._tokens).any():
            seconds += self._cost_model.look_up_s(shape)
        return seconds
