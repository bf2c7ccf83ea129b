"""Baseline `random`: another drafter and length for every request at every step.

Of no use for speed, but every drafter, length and mixture of them is exercised: what holds under
it (lossless output, obeyed lengths) holds under any policy.
"""

from __future__ import annotations

import numpy as np

from ..contract import Contract
from ..step import StepRecord


class RandomController:
    """Uniform over the action table, for each request on its own.

    Args:
        contract: The action table.
        seed: Seed of the choices.
    """

    def __init__(self, contract: Contract, seed: int = 0) -> None:
        self._contract = contract
        self._generator = np.random.default_rng(seed)

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Draw an action for every row."""
        sizes = self._contract.action_nvec
        return self._generator.integers(0, sizes, (record.num_rows, len(sizes)))
