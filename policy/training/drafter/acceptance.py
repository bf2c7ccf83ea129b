"""Stage 5: how many of a head's draft tokens live vLLM accepts, by kind and draft position."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from envs.live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from envs.vllm_engine import VllmEngine
from envs.workload import Workload, WorkloadConfig
from policy.errors import ConfigError

from ...baselines.fixed import FixedController
from ...contract import Contract
from ...step import StepRecord

DRAFTER = "eagle3"


@dataclass(frozen=True)
class AcceptanceConfig:
    """What is measured.

    Attributes:
        kinds: Kinds of prompts, each measured alone.
        prompts_per_kind: Held-out prompts of each kind, all in flight at once.
        output_tokens: Output tokens of each, at most; a request ends at its end-of-text token.
        num_speculative_tokens: Draft tokens of every step.
    """

    kinds: tuple[str, ...] = ("code", "edit", "chat", "maths")
    prompts_per_kind: int = 16
    output_tokens: int = 128
    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ConfigError("acceptance.kinds is empty; name at least one prompt kind.")
        for name in ("prompts_per_kind", "output_tokens", "num_speculative_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"acceptance.{name} is {getattr(self, name)}; make it 1 or more.")


@dataclass(frozen=True)
class Acceptance:
    """What became of a head's drafts.

    Attributes:
        num_drafts: Drafts that were verified.
        num_accepted_per_pos: Those accepted up to each position.
    """

    num_drafts: int
    num_accepted_per_pos: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """Share of the drafts accepted up to each position."""
        return [accepted / self.num_drafts for accepted in self.num_accepted_per_pos]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step emits on average, the bonus token included."""
        return 1 + sum(self.shares)


def measure_acceptance(
    head: Path, config: AcceptanceConfig, model: ModelConfig, workload: WorkloadConfig
) -> dict[str, Acceptance]:
    """Serve held-out prompts greedily, every step drafting with the head.

    Args:
        head: An exported head.
        config: What is measured.
        model: The target model.
        workload: Limit of the prompts' lengths.

    Returns:
        By kind.
    """
    model = replace(model, max_num_seqs=config.prompts_per_kind)
    drafters = DraftersConfig({DRAFTER: config.num_speculative_tokens}, str(head))
    prompts = Workload(
        replace(
            workload,
            kinds=dict.fromkeys(config.kinds, 1.0),
            output_tokens=config.output_tokens,
            max_prompts_per_kind=config.prompts_per_kind,
            temperature=0.0,
        ),
        "eval",
        load_tokenizer(model),
    ).every_request()
    measured = {}
    with closing(VllmEngine(engine_config(model, drafters))) as engine:
        for kind in config.kinds:
            counter = AcceptanceCounter(engine.contract, config.num_speculative_tokens)
            engine.hook.controller = counter
            engine.generate([p for p in prompts if p.kind == kind], model.max_num_seqs)
            measured[kind] = counter.acceptance()
    return measured


def mean_over_kinds(measured: Mapping[str, Acceptance]) -> float:
    """Mean acceptance length over the mix, every kind weighing the same."""
    return float(np.mean([kind.mean_acceptance_length for kind in measured.values()]))


class AcceptanceCounter(FixedController):
    """Always drafts with the head, and counts what was accepted.

    Args:
        contract: The engine's.
        num_speculative_tokens: Draft tokens of every step.
    """

    def __init__(self, contract: Contract, num_speculative_tokens: int) -> None:
        super().__init__(contract, DRAFTER, num_speculative_tokens)
        self._accepted = np.zeros(num_speculative_tokens, np.int64)
        self._num_drafts = 0

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Count the step that was, and draft again."""
        accepted = record.num_accepted_tokens[record.num_draft_tokens > 0]
        self._num_drafts += len(accepted)
        self._accepted += (accepted[:, None] > np.arange(len(self._accepted))).sum(axis=0)
        return super().decide(record, observation)

    def acceptance(self) -> Acceptance:
        """What was counted so far."""
        return Acceptance(self._num_drafts, tuple(int(count) for count in self._accepted))
