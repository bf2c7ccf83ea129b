"""Baseline `fixed`: one drafter and one length at every step; `none` is no speculation."""

from __future__ import annotations

import numpy as np

from ..contract import Contract
from ..errors import ContractError
from ..step import StepRecord


class FixedController:
    """Always the same action.

    Args:
        contract: The action table.
        drafter: Name of the drafter.
        num_speculative_tokens: Draft length; clipped to the drafter's maximum.

    Raises:
        ContractError: If the engine has no such drafter.
    """

    def __init__(self, contract: Contract, drafter: str, num_speculative_tokens: int = 0) -> None:
        if drafter not in contract.drafters:
            raise ContractError(
                f"The engine has no drafter '{drafter}'; choose from "
                f"{', '.join(contract.drafters)}."
            )
        action = contract.canonical_action(
            (contract.drafters.index(drafter), num_speculative_tokens)
        )
        self.actions = np.array([action], np.int64)

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Return the fixed action for the whole batch."""
        return self.actions
