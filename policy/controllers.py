"""Controllers decide the action at every engine step: the policy, a baseline, PPO in training."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

import numpy as np
import torch

from .artifact import PolicyArtifact
from .contract import Contract
from .errors import ContractError
from .step import StepRecord

logger = logging.getLogger(__name__)


class Controller(Protocol):
    """Anything that decides how the next engine step speculates."""

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Choose the action after a step.

        Args:
            record: The step just done.
            observation: Its observation, float32 `[rows, fields]`.

        Returns:
            Integers `[1, 2]` (one action for the batch) or `[record.num_rows, 2]`: drafter index
            and number of draft tokens; or with a third column, the number of a cutoff, where the
            contract has some.
        """
        ...


def judges_drafts(controller: Controller | None) -> bool:
    """Whether a controller may shorten drafts once they are made; see `admitted_lengths`.

    A controller that guards another one has a property of this name that asks the other.
    """
    return getattr(controller, "judges_drafts", hasattr(controller, "admit"))


def admitted_lengths(
    controller: Controller | None, record: StepRecord, drafts: np.ndarray, survival: np.ndarray
) -> np.ndarray | None:
    """How many tokens of each draft a controller lets through to verification.

    A controller that judges drafts once they are made has a method
    `admit(record, drafts, survival)` with these arguments; others let everything through.

    Args:
        controller: May judge drafts.
        record: The step before the drafts.
        drafts: Drafter and length of each row's draft, int64 `[rows, 2]`; `(0, 0)` without one.
        survival: Probability that each token survives, as far as its drafter knows it, float32
            `[rows, max length]`; NaN elsewhere.

    Returns:
        Tokens admitted, int64 `[rows]`; None where all are.
    """
    if not judges_drafts(controller):
        return None
    lengths: np.ndarray | None = controller.admit(record, drafts, survival)  # type: ignore[union-attr]
    return lengths


class PolicyController:
    """The exported policy.

    Args:
        artifact: A loaded `policy.pt`.
    """

    def __init__(self, artifact: PolicyArtifact) -> None:
        self.artifact = artifact

    @torch.inference_mode()
    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Apply the policy to every observation row."""
        actions: np.ndarray = self.artifact.module(torch.from_numpy(observation)).numpy()
        return actions


class SafeController:
    """Keeps serving alive: whatever goes wrong in a decision, a static action takes its place.

    Args:
        inner: The controller to guard.
        contract: The action table.
        fallback: The static action.

    Attributes:
        num_fallbacks: Decisions that failed, by the type of the error.
    """

    def __init__(
        self, inner: Controller, contract: Contract, fallback: tuple[int, int] = (0, 0)
    ) -> None:
        self.inner = inner
        self.num_fallbacks: Counter[str] = Counter()
        self._contract = contract
        self._fallback = np.array([contract.canonical_action(fallback)], np.int64)

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Decide with the guarded controller, or fall back and say so once per reason."""
        try:
            actions = np.asarray(self.inner.decide(record, observation))
            if actions.ndim != 2 or len(actions) not in (1, record.num_rows):
                raise ContractError(
                    f"The controller gave actions of shape {list(actions.shape)}; give one row, or "
                    f"{record.num_rows}."
                )
            return self._contract.canonical_actions(actions)
        except Exception as error:  # a fault of the policy must never reach a request
            self._note(error)
            return self._fallback

    @property
    def judges_drafts(self) -> bool:
        """Whether the guarded controller does."""
        return judges_drafts(self.inner)

    def admit(
        self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray
    ) -> np.ndarray | None:
        """Let the guarded controller shorten drafts; none are where it fails."""
        try:
            lengths = admitted_lengths(self.inner, record, drafts, survival)
            if lengths is None:
                return None
            lengths = np.asarray(lengths)
            is_whole = lengths.dtype.kind == "i"
            if not is_whole or lengths.shape != (record.num_rows,) or (lengths < 0).any():
                raise ContractError(
                    f"The controller admitted {lengths.tolist()}; give a whole number >= 0 for "
                    f"each of {record.num_rows} rows."
                )
        except Exception as error:  # see `decide`
            self._note(error)
            return None
        return lengths

    def _note(self, error: Exception) -> None:
        reason = type(error).__name__
        if not self.num_fallbacks[reason]:
            logger.exception("A drafting decision failed; using the static setting instead.")
        self.num_fallbacks[reason] += 1
