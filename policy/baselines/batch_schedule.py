"""Baseline `batch_schedule`: a draft length for each number of running requests.

The rule of vLLM's `num_speculative_tokens_per_batch_size`
(`vllm.v1.spec_decode.dynamic.utils.build_dynamic_sd_schedule_lookup`), for any drafter.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ..contract import Contract
from ..errors import ConfigError
from ..step import StepRecord
from .drafters import drafter_index


@dataclass(frozen=True)
class BatchScheduleConfig:
    """A schedule.

    Attributes:
        drafter: Who drafts.
        schedule: `(first, last, length)`: draft length from the first to the last number of
            running requests. The first range begins at 1; gaps, and what lies beyond the last
            range, take the length of the range before.
    """

    drafter: str
    schedule: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        end = 0
        for first, last, length in self.schedule:
            if not end < first <= last or length < 0:
                raise ConfigError(
                    f"schedule has the range ({first}, {last}, {length}); give ascending ranges "
                    "that do not overlap, with lengths of 0 or more."
                )
            end = last
        if not self.schedule or self.schedule[0][0] != 1:
            raise ConfigError("schedule must begin at 1 running request; add a first range.")


class BatchScheduleController:
    """Looks the length up.

    Args:
        contract: The action table.
        config: The schedule.

    Raises:
        ConfigError: If the engine has no such drafter.
    """

    def __init__(self, contract: Contract, config: BatchScheduleConfig) -> None:
        drafter = drafter_index(contract, config.drafter)
        self._firsts = [first for first, _, _ in config.schedule]
        self._actions = np.array(
            [contract.canonical_action((drafter, length)) for _, _, length in config.schedule]
        )

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """The action for the requests that ran in the step, as vLLM's scheduler takes it."""
        index = bisect_right(self._firsts, record.num_running_reqs) - 1
        return self._actions[[max(index, 0)]]
