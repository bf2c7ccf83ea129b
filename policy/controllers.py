"""Controllers decide the action at every engine step: the policy, a baseline, PPO in training."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Protocol

import numpy as np
import torch

from .artifact import PolicyArtifact
from .contract import Contract
from .errors import ContractError, SlowDecisionError
from .step import StepRecord

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 1024
"""Most engine steps for which a controller that is late is not asked."""


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
        for num_rows in (1, 1, 1, 2, 2):  # TorchScript compiles in its first calls: ~0.1 s
            self._forward(np.repeat(artifact.contract.low[None], num_rows, axis=0))

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Apply the policy to every observation row."""
        return self._forward(observation)

    @torch.inference_mode()
    def _forward(self, observation: np.ndarray) -> np.ndarray:
        actions: np.ndarray = self.artifact.module(torch.from_numpy(observation)).numpy()
        return actions


class SafeController:
    """Keeps serving alive: whatever goes wrong in a decision, a static action takes its place.

    A decision cannot be interrupted. One that takes longer than its budget is not used, and the
    controller is not asked again for a step, then for twice as many each time it is late, until it
    is in time: a controller that got slow costs ever less.

    Args:
        inner: The controller to guard.
        contract: The action table.
        fallback: The static action.
        budget_s: Seconds that a decision may take; None for any number.

    Attributes:
        num_fallbacks: Decisions that failed, by the type of the error.
    """

    def __init__(
        self,
        inner: Controller,
        contract: Contract,
        fallback: tuple[int, ...] = (0, 0),
        budget_s: float | None = None,
    ) -> None:
        self.inner = inner
        self.num_fallbacks: Counter[str] = Counter()
        self._contract = contract
        self._fallback = np.array([contract.canonical_action(fallback)], np.int64)
        self._budget_s = np.inf if budget_s is None else budget_s
        self._pause = 0
        self._steps_to_pause = 0
        self._is_paused = False
        self._is_late = False

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Decide with the guarded controller, or fall back and say so once per reason."""
        self._is_paused = self._steps_to_pause > 0
        if self._is_paused:
            self._steps_to_pause -= 1
            self.num_fallbacks[SlowDecisionError.__name__] += 1
            return self._fallback
        self._pause *= self._is_late
        self._is_late = False
        started_s = time.perf_counter()
        try:
            if not np.isfinite(observation).all():
                raise ContractError("The observation is not finite; see which drafter damages it.")
            actions = np.asarray(self.inner.decide(record, observation))
            if actions.ndim != 2 or len(actions) not in (1, record.num_rows):
                raise ContractError(
                    f"The controller gave actions of shape {list(actions.shape)}; give one row, or "
                    f"{record.num_rows}."
                )
            actions = self._contract.canonical_actions(actions)
            self._check_time(time.perf_counter() - started_s)
        except Exception as error:  # a fault of the policy must never reach a request
            self._note(error)
            return self._fallback
        return actions

    @property
    def judges_drafts(self) -> bool:
        """Whether the guarded controller does."""
        return judges_drafts(self.inner)

    def admit(
        self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray
    ) -> np.ndarray | None:
        """Let the guarded controller shorten drafts; none are where it fails."""
        if self._is_paused:
            return None
        started_s = time.perf_counter()
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
            self._check_time(time.perf_counter() - started_s)
        except Exception as error:  # see `decide`
            self._note(error)
            return None
        return lengths

    def _check_time(self, seconds: float) -> None:
        """Pause a controller that was late, for longer where it was late the last time too."""
        if seconds <= self._budget_s:
            return
        self._is_late = True
        self._pause = min(max(1, 2 * self._pause), LONGEST_PAUSE)
        self._steps_to_pause = self._pause
        raise SlowDecisionError(
            f"A decision took {seconds * 1e3:.1f} ms and may take {self._budget_s * 1e3:g} ms; "
            "find what keeps it waiting, or raise decision_budget_ms."
        )

    def _note(self, error: Exception) -> None:
        reason = type(error).__name__
        if not self.num_fallbacks[reason]:
            logger.exception("A drafting decision failed; using the static setting instead.")
        self.num_fallbacks[reason] += 1
