"""Everything `scripts/evaluate.py` can be told, as one validated dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.live import DraftersConfig, ModelConfig
from envs.replayed import TraceConfig
from envs.scenario import Scenario
from envs.workload import WorkloadConfig

from ..contract import NONE
from ..errors import ConfigError
from .config import LoggerConfig
from .contenders import PLAIN, VLLM


@dataclass(frozen=True)
class LiveConfig:
    """The part that is measured on live vLLM.

    Attributes:
        scenarios: Names of the scenarios that are served.
        contenders: Names of the contenders; `best_fixed` is added.
        num_repeats: Times that each is served, with other requests each time; they take turns.
        request_share: Share of each phase's requests, so that a run takes seconds.
        output_tokens: Token limit of a request.
        max_prompts_per_kind: Prompts of each split, kept in the prefix cache.
    """

    scenarios: tuple[str, ...]
    contenders: tuple[str, ...]
    num_repeats: int = 3
    request_share: float = 0.25
    output_tokens: int = 48
    max_prompts_per_kind: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.request_share <= 1:
            raise ConfigError(f"live.request_share is {self.request_share}; make it 0 to 1.")
        if self.num_repeats < 1 or self.output_tokens < 2:
            raise ConfigError("live needs num_repeats >= 1 and output_tokens >= 2; raise them.")


@dataclass(frozen=True)
class BenchmarkConfig:
    """A benchmark.

    Attributes:
        model: The target model and its engine.
        drafters: What the contenders choose from.
        workload: Prompts and lengths.
        scenarios: Load and data over time, by name.
        contenders: What decides, by name: a policy (`{path: …}`), a rule as the plugin's
            `baseline` takes it, either with a `granularity` of its own; or vLLM without a drafting
            policy, `plain` or with a speculative_config of its own (`{vllm: …}`), live only.
        fixed_lengths: Draft lengths of the fixed settings, by drafter. The best of them is chosen
            on recorded training requests.
        trace: What is replayed.
        live: What is measured live; null for none.
        logger: Where tables and pictures go, beside the report.
        num_repeats: Times that each scenario is replayed, with other requests each time.
        seed: Of requests, arrivals and intervals.
        output_dir: Where the report goes.
        num_processes: Processes that replay.
    """

    model: ModelConfig
    drafters: DraftersConfig
    workload: WorkloadConfig
    scenarios: Mapping[str, Scenario]
    contenders: Mapping[str, Any]
    fixed_lengths: Mapping[str, tuple[int, ...]]
    trace: TraceConfig
    live: LiveConfig | None
    logger: LoggerConfig
    output_dir: str
    num_repeats: int = 4
    seed: int = 0
    num_processes: int = 2

    def __post_init__(self) -> None:
        if not self.scenarios or self.num_repeats < 1 or self.num_processes < 1:
            raise ConfigError(
                "A benchmark needs a scenario, a repeat and a process; give at least one of each."
            )
        for name, section in self.contenders.items():
            if section != PLAIN and not isinstance(section, Mapping):
                raise ConfigError(
                    f"contenders.{name} is {section!r}; make it a section such as "
                    "{name: goodput, cost_model: …} or {path: policy.pt}, or 'plain'."
                )
            if VLLM in section and not (len(section) == 1 and isinstance(section[VLLM], Mapping)):
                raise ConfigError(
                    f"contenders.{name} is {dict(section)!r}; make it {{vllm: …}} with a "
                    "speculative_config of vLLM and nothing beside it."
                )
        for drafter in self.fixed_lengths:
            if drafter not in self.drafters.max_lengths:
                raise ConfigError(
                    f"fixed_lengths names '{drafter}', which is no drafter here; remove it "
                    f"(~fixed_lengths.{drafter}) or add it to drafters.max_lengths."
                )
        for name, scenario in self.scenarios.items():
            if scenario.max_concurrency > self.model.max_num_seqs:
                raise ConfigError(
                    f"Scenario '{name}' has {scenario.max_concurrency} requests in flight; raise "
                    f"model.max_num_seqs from {self.model.max_num_seqs}."
                )
        if self.live is not None:
            self._check_known("scenario", self.live.scenarios, self.scenarios)
            self._check_known("contender", self.live.contenders, self.contenders)
            if NONE not in self.live.contenders:
                raise ConfigError("live.contenders lacks 'none', which speeds are set against.")

    @property
    def policies(self) -> list[str]:
        """Contenders that are exported policies."""
        return [
            name
            for name, section in self.contenders.items()
            if isinstance(section, Mapping) and "path" in section
        ]

    def _check_known(self, what: str, names: tuple[str, ...], known: Mapping[str, Any]) -> None:
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"live.{what}s names '{name}', which is no {what}; choose from "
                    f"{', '.join(known)}."
                )
