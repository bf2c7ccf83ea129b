"""Who takes part in a benchmark: no speculation, fixed settings, rules, policies."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact import load_policy
from ..baselines.build import build_baseline
from ..contract import NONE, Contract, Granularity
from ..controllers import (
    Controller,
    PolicyController,
    SafeController,
    admitted_lengths,
    judges_drafts,
)
from ..errors import ConfigError
from ..step import StepRecord

PLAIN = "plain"
ORACLE = "oracle"
VLLM = "vllm"


@dataclass(frozen=True)
class Contender:
    """One way to decide.

    Attributes:
        name: In the report.
        section: JSON of what decides: `{"path": "policy.pt"}`, the plugin's `baseline` section,
            either with an own `granularity`; or vLLM without a drafting policy: `plain`, and
            `{"vllm": {…}}` with this speculative_config of its own; or `oracle`, on traces.
    """

    name: str
    section: str

    @classmethod
    def of(cls, name: str, section: Mapping[str, Any] | str) -> Contender:
        """A contender from its section of the configuration."""
        plain = section if isinstance(section, str) else dict(section)
        return cls(name, json.dumps(plain))  # order matters to `ema_tiers`

    @classmethod
    def fixed(cls, drafter: str, num_speculative_tokens: int = 0) -> Contender:
        """A fixed setting."""
        name = drafter if drafter == NONE else f"{drafter}:{num_speculative_tokens}"
        section = {"name": "fixed", "drafter": drafter}
        return cls.of(name, {**section, "num_speculative_tokens": num_speculative_tokens})

    @classmethod
    def oracle(cls) -> Contender:
        """The best choice of every step, with hindsight; see `envs.oracle_controller`."""
        return cls.of(ORACLE, ORACLE)

    @property
    def is_oracle(self) -> bool:
        """Whether it decides with hindsight."""
        return self.section == json.dumps(ORACLE)

    @property
    def is_fixed(self) -> bool:
        """Whether it is one setting for every step."""
        section = json.loads(self.section)
        return isinstance(section, dict) and section.get("name") == "fixed"

    @property
    def is_unhooked(self) -> bool:
        """Whether it needs an engine without a drafting policy."""
        section = json.loads(self.section)
        return section == PLAIN or VLLM in section

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """What an engine without a drafting policy is started with; None: no speculation."""
        section = json.loads(self.section)
        return None if section == PLAIN else section[VLLM]

    @property
    def granularity(self) -> Granularity:
        """Whether it decides for the batch, on whose observation, or for each request on its own.

        Raises:
            ArtifactError: If it is a policy that cannot be used.
        """
        section = json.loads(self.section)
        if "path" in section:
            return load_policy(Path(section["path"])).contract.granularity
        return "batch" if self.is_oracle else section.get("granularity", "batch")

    def controller(self, contract: Contract) -> Controller:
        """What decides, on an engine of this contract.

        Raises:
            ConfigError: If the rule does not exist or does not fit the engine.
            ArtifactError: If the policy cannot be used.
        """
        section = json.loads(self.section)
        granularity = section.pop("granularity", contract.granularity)
        if "path" in section:
            if len(section) > 1:
                raise ConfigError(f"{self.name} has more than a path; remove the rest.")
            artifact = load_policy(Path(section["path"]))
            theirs = replace(artifact.contract, granularity=contract.granularity)
            if theirs != contract:
                raise ConfigError(
                    f"{self.name} chooses from {_described(artifact.contract)}, the engine has "
                    f"{_described(contract)}; make drafters.max_lengths and "
                    "drafters.cutoffs the policy's."
                )
            return SafeController(PolicyController(artifact), contract)
        return build_baseline(replace(contract, granularity=granularity), section)


def _described(contract: Contract) -> str:
    pairs = zip(contract.drafters[1:], contract.max_lengths[1:], strict=True)
    described = ", ".join(f"{drafter} up to {length}" for drafter, length in pairs)
    return f"{described}, cutoffs {list(contract.cutoffs)}" if contract.cutoffs else described


class TimedController:
    """Measures how long decisions take.

    Args:
        inner: Decides.

    Attributes:
        decision_s: Time of all decisions.
    """

    def __init__(self, inner: Controller) -> None:
        self.decision_s = 0.0
        self._inner = inner

    @property
    def judges_drafts(self) -> bool:
        """Whether the inner controller does."""
        return judges_drafts(self._inner)

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Decide as the inner controller does."""
        began_s = time.perf_counter()
        actions = self._inner.decide(record, observation)
        self.decision_s += time.perf_counter() - began_s
        return actions

    def admit(
        self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray
    ) -> np.ndarray | None:
        """Judge drafts as the inner controller does."""
        began_s = time.perf_counter()
        lengths = admitted_lengths(self._inner, record, drafts, survival)
        self.decision_s += time.perf_counter() - began_s
        return lengths
