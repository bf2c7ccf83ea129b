"""The `drafting_policy` section of vLLM's `--additional-config`, validated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ..config import from_mapping
from ..contract import ELSE, NONE, Contract, Granularity
from ..errors import ConfigError

CONFIG_KEY = "drafting_policy"
POLICY_VARIABLE = "DRAFTGYM_POLICY"


@dataclass(frozen=True)
class DrafterSettings:
    """How the drafters work.

    Attributes:
        ngram_min_match: Shortest match, in tokens, that the n-gram drafter offers.
        ngram_max_match: Longest match, in tokens, that it looks for.
        dormant_after: Engine steps without a model draft after which the model drafter stops
            reading prompts.
        max_pending_tokens: Tokens of a request that may wait for the model drafter.
        suffix_max_tree_depth: Longest match and draft together, in tokens, of the suffix drafter.
        suffix_max_cached_requests: Requests whose responses it drafts from for others; 0 for none.
        suffix_max_spec_factor: Most tokens that it drafts per token of the match.
        suffix_min_token_prob: Survival below which its drafts end.
        combination_min_match: Shortest match, in tokens, with which a combination such as
            `ngram_else_eagle3` takes its token drafter.
    """

    ngram_min_match: int = 2
    ngram_max_match: int = 16
    dormant_after: int = 512
    max_pending_tokens: int = 1024
    suffix_max_tree_depth: int = 24
    suffix_max_cached_requests: int = 10_000
    suffix_max_spec_factor: float = 1.0
    suffix_min_token_prob: float = 0.1
    combination_min_match: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_min_match <= self.ngram_max_match:
            raise ConfigError(
                f"The n-gram match bounds {self.ngram_min_match}..{self.ngram_max_match} are not "
                "in order; give 1 <= ngram_min_match <= ngram_max_match."
            )
        if self.suffix_max_tree_depth < 2 or self.suffix_max_cached_requests < 0:
            raise ConfigError(
                f"suffix_max_tree_depth {self.suffix_max_tree_depth} or suffix_max_cached_requests "
                f"{self.suffix_max_cached_requests} is too small; give >= 2 and >= 0."
            )
        if not (self.suffix_max_spec_factor > 0 and 0 <= self.suffix_min_token_prob <= 1):
            raise ConfigError(
                f"suffix_max_spec_factor {self.suffix_max_spec_factor} or suffix_min_token_prob "
                f"{self.suffix_min_token_prob} is out of range; give > 0 and 0..1."
            )
        if self.combination_min_match < 1:
            raise ConfigError(
                f"combination_min_match is {self.combination_min_match}; make it 1 or more."
            )
        if self.dormant_after < 0 or self.max_pending_tokens < 0:
            raise ConfigError("dormant_after and max_pending_tokens must be 0 or more.")


@dataclass(frozen=True)
class DraftingPolicyConfig:
    """What a user writes under `drafting_policy`.

    Exactly one of `path`, `baseline` and `external` says who decides.

    Attributes:
        path: An exported `policy.pt`.
        sha256: Hash the file must have; default: the one in `policy.json` beside it.
        baseline: A rule instead of a policy, such as
            `{"name": "fixed", "drafter": "ngram", "num_speculative_tokens": 4}`.
        external: The caller decides through the hook; used by the training environment.
        drafters: Longest draft per drafter, needed without a policy: `{"ngram": 8, "eagle3": 4}`.
        granularity: `batch` or `request`, without a policy.
        cutoffs: Survival probabilities that actions choose from, without a policy; see `Contract`.
        fallback: Static `(drafter, length)` used when a decision fails, for requests outside the
            canary share, and in shadow mode.
        strict: Whether a policy that cannot be used stops the start-up.
        decision_budget_ms: Milliseconds that a decision may take; a later one is not used, and the
            static setting serves for a while. 0 sets no limit.
        shadow: Decide and count, but apply the static setting.
        canary: Share of the requests that the policy decides for, in 0..1; the others get the
            static setting.
        reload: Take a new file at `path` into use, without a restart.
        settings: How the drafters work, as far as it differs from the policy's training, or without
            a policy from the defaults; the keys are those of `DrafterSettings`.
    """

    path: str | None = None
    sha256: str | None = None
    baseline: Mapping[str, Any] | None = None
    external: bool = False
    drafters: Mapping[str, int] = field(default_factory=dict)
    granularity: Granularity = "batch"
    cutoffs: tuple[float, ...] = ()
    fallback: tuple[str, int] = ("none", 0)
    strict: bool = True
    decision_budget_ms: float = 50.0
    shadow: bool = False
    canary: float = 1.0
    reload: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        deciders = [self.path is not None, self.baseline is not None, self.external]
        if sum(deciders) != 1:
            raise ConfigError(
                f"Give exactly one of 'path', 'baseline' and 'external' in {CONFIG_KEY}."
            )
        if self.path is None and not self.drafters:
            raise ConfigError(
                f"Without a policy, {CONFIG_KEY} needs 'drafters', such as "
                '{"ngram": 8, "eagle3": 4}.'
            )
        if self.path is not None and self.drafters:
            raise ConfigError(
                f"A policy brings its own drafters; remove 'drafters' from {CONFIG_KEY}."
            )
        if not 0 <= self.canary <= 1 or not self.decision_budget_ms >= 0:
            raise ConfigError(
                f"canary {self.canary:g} or decision_budget_ms {self.decision_budget_ms:g} is out "
                "of range; give 0..1 and >= 0."
            )
        if self.reload and (self.path is None or self.sha256 is not None):
            raise ConfigError(
                "Only a policy can be reloaded, and a pinned sha256 allows no other file; give "
                "'path' without 'sha256', or remove 'reload'."
            )
        self.drafter_settings()

    def drafter_settings(self, trained_with: Mapping[str, Any] | None = None) -> DrafterSettings:
        """How the drafters work.

        Args:
            trained_with: The settings that a policy carries.

        Raises:
            ConfigError: If a setting is unknown or does not fit.
        """
        settings = {**(trained_with or {}), **self.settings}
        return from_mapping(DrafterSettings, settings, f"{CONFIG_KEY}.settings")

    def contract(self) -> Contract:
        """The contract of these drafters, for a rule or the caller; a policy brings its own."""
        drafters, lengths = tuple(self.drafters), tuple(self.drafters.values())
        return Contract((NONE, *drafters), (0, *lengths), self.granularity, self.cutoffs)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> DraftingPolicyConfig | None:
        """Read the section, or the environment variable; None where neither is given.

        Args:
            additional_config: vLLM's `additional_config`, a mapping or an opaque object.

        Raises:
            ConfigError: If a key is unknown or a value does not fit.
        """
        section = None
        if isinstance(additional_config, Mapping):
            section = additional_config.get(CONFIG_KEY)
        if section is None and (path := os.environ.get(POLICY_VARIABLE)):
            section = {"path": path}
        return None if section is None else from_mapping(cls, section, CONFIG_KEY)


def check_settings(contract: Contract, settings: DrafterSettings) -> None:
    """Refuse drafters that cannot work here or as set, before an engine starts.

    Raises:
        ConfigError: If the optional package of a drafter is missing, or a combination waits for
            matches that its token drafter never looks for.
    """
    if "suffix" in contract.drafters and find_spec("arctic_inference") is None:
        raise ConfigError(
            "The drafter 'suffix' needs the package arctic-inference; build it with `make suffix`, "
            "or leave 'suffix' out of the drafters."
        )
    longest = {
        "ngram": settings.ngram_max_match,
        "suffix": settings.suffix_max_tree_depth - 1,
    }
    for name in contract.drafters:
        token, joined, _ = name.partition(ELSE)
        if joined and settings.combination_min_match > longest[token]:
            raise ConfigError(
                f"'{name}' waits for matches of {settings.combination_min_match} tokens and "
                f"'{token}' looks for {longest[token]} at most; lower combination_min_match."
            )
