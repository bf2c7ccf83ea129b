"""Who decides in a server: the policy or rule, guarded, for all requests, some, or for show."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np

from ..artifact import PolicyArtifact
from ..baselines.build import build_baseline
from ..baselines.fixed import FixedController
from ..contract import Contract
from ..controllers import Controller, PolicyController, SafeController, judges_drafts
from ..step import StepRecord
from .config import DraftingPolicyConfig
from .reload import ReloadedPolicy

RELOAD_INTERVAL_S = 2.0


class Deployment:
    """Lets a guarded controller decide, and a static setting where it may not.

    Args:
        guarded: Decides, and falls back to the static setting.
        contract: The action table.
        static: The static setting.
        canary: Share of the requests that `guarded` decides for, chosen by a hash of the request
            id that is the same in every process.
        shadow: Whether `guarded` decides for show only.
        policy: The policy inside `guarded`, for telling which one it is; None for a rule.

    Attributes:
        num_shadow_decisions: Decisions taken for show, by drafter and length.
        num_switches: Decisions applied that differ from those of the step before, of the batch or,
            where requests are decided for, of the same request.
    """

    def __init__(
        self,
        guarded: SafeController,
        contract: Contract,
        static: tuple[int, ...],
        *,
        canary: float = 1.0,
        shadow: bool = False,
        policy: PolicyController | ReloadedPolicy | None = None,
    ) -> None:
        self.guarded = guarded
        self.policy = policy
        self.num_shadow_decisions: Counter[tuple[str, int]] = Counter()
        self.num_switches = 0
        self._latest: dict[str, list[int]] = {}
        self._contract = contract
        self._static = np.array([contract.canonical_action(static)], np.int64)
        self._canary = canary
        self._shadow = shadow

    @property
    def mode(self) -> str:
        """`shadow`, `canary` or `full`."""
        return "shadow" if self._shadow else "canary" if self._canary < 1 else "full"

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Decide, and apply it to the requests it is meant for."""
        actions = self._decide(record, observation)
        self._count_switches(record, actions)
        return actions

    def _decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        actions = self.guarded.decide(record, observation)
        if self._shadow:
            for drafter, length in actions[:, :2].tolist():
                self.num_shadow_decisions[self._contract.drafters[drafter], length] += 1
            return self._static
        if self._canary >= 1:
            return actions
        return np.where(self._in_canary(record)[:, None], actions, self._static)

    def _count_switches(self, record: StepRecord, actions: np.ndarray) -> None:
        # A rule may answer for every request under a contract of the batch, too.
        is_per_request = self._contract.granularity == "request" or len(actions) > 1
        names = record.req_ids if is_per_request and not self._shadow else ("batch",)
        rows = np.broadcast_to(actions, (len(names), actions.shape[1]))  # a fallback is one row
        latest = dict(zip(names, rows.tolist(), strict=True))
        self.num_switches += sum(
            action != self._latest.get(name, action) for name, action in latest.items()
        )
        self._latest = latest

    @property
    def judges_drafts(self) -> bool:
        """Whether the guarded controller may shorten drafts."""
        return not self._shadow and judges_drafts(self.guarded)

    def admit(
        self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray
    ) -> np.ndarray | None:
        """Let the guarded controller shorten the drafts of its own requests."""
        lengths = self.guarded.admit(record, drafts, survival)
        if lengths is None or self._canary >= 1:
            return lengths
        return np.where(self._in_canary(record), lengths, drafts[:, 1])

    def _in_canary(self, record: StepRecord) -> np.ndarray:
        """Which requests the controller decides for, bool `[rows]`."""
        hashes = [zlib.crc32(req_id.encode()) for req_id in record.req_ids]
        return np.array(hashes) < self._canary * 2**32


def deploy(
    config: DraftingPolicyConfig, contract: Contract, artifact: PolicyArtifact | None
) -> Deployment:
    """The controller that a server's configuration describes.

    Args:
        config: Says who decides, for whom.
        contract: Observation and action table.
        artifact: The loaded policy; None for a rule.

    Raises:
        DraftgymError: If the rule or the static setting does not fit the contract.
    """
    static = _static_action(config, contract)
    policy: PolicyController | ReloadedPolicy | None = None
    if artifact is not None:
        policy = ReloadedPolicy(artifact) if config.reload else PolicyController(artifact)
    decider: Controller = policy or build_baseline(contract, config.baseline or {})
    budget_s = config.decision_budget_ms / 1e3 or None
    return Deployment(
        SafeController(decider, contract, static, budget_s),
        contract,
        static,
        canary=config.canary,
        shadow=config.shadow,
        policy=policy,
    )


def _static_action(config: DraftingPolicyConfig, contract: Contract) -> tuple[int, ...]:
    return tuple(FixedController(contract, *config.fallback).actions[0].tolist())
