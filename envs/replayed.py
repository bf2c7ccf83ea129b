"""Replayed environments from plain settings: trace files, cost model, drafters, workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from policy.contract import Contract
from policy.cost_model import CostModel, read_cost_model
from policy.errors import ConfigError

from .draft_env import DraftEnv, EpisodeConfig
from .draft_vec_env import DraftVecEnv
from .live import REPOSITORY, DraftersConfig, ModelConfig
from .ngram_traces import with_ngram_matches
from .prompts.prompt import Split
from .request_vec_env import RequestVecEnv
from .reward import RewardConfig
from .simulator_state import TraceEngineConfig
from .trace_engine import TraceEngine
from .trace_workload import TraceWorkload
from .traces import read_traces
from .workload import WorkloadConfig

DEFAULT_TRACE = REPOSITORY / "checkpoints" / "traces" / "smollm2-135m-cpu"


@dataclass(frozen=True)
class TraceConfig:
    """What is replayed, and how much of it at once.

    Attributes:
        files: Trace files that `scripts/collect.py` or `scripts/import_traces.py` wrote.
        cost_model: JSON file with the step times, as collected beside the traces.
        kinds: Weight of each recorded kind; null takes all equally.
        num_envs: Engines that are stepped at once, where decisions are made for the batch.
        seats_per_load: Requests in flight over the engines of each load, at least, where every
            request decides for itself.
        num_threads: Threads that step them; null takes one per processor.
        num_kv_blocks: KV-cache blocks of the engine that the traces stand for.
        prompts_are_cached: Whether prompts lie in the prefix cache, as they soon do in training.
        has_prefill: False replays decoding alone: prompts cost nothing.
    """

    files: tuple[str, ...] = (f"{DEFAULT_TRACE}.parquet",)
    cost_model: str = f"{DEFAULT_TRACE}.json"
    kinds: Mapping[str, float] | None = None
    num_envs: int = 64
    seats_per_load: int = 128
    num_threads: int | None = None
    num_kv_blocks: int = 1400
    prompts_are_cached: bool = True
    has_prefill: bool = True

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("trace.files is empty; name at least one trace file.")
        for name in ("num_envs", "seats_per_load", "num_kv_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trace.{name} is {getattr(self, name)}; make it 1 or more.")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(
                f"trace.num_threads is {self.num_threads}; make it 1 or more, or null."
            )


@dataclass(frozen=True)
class Replayed:
    """Everything an environment on traces is made of."""

    workload: TraceWorkload
    cost_model: CostModel
    contract: Contract
    engine: TraceEngineConfig

    @classmethod
    def read(
        cls,
        trace: TraceConfig,
        model: ModelConfig,
        drafters: DraftersConfig,
        workload: WorkloadConfig,
        split: Split = "train",
    ) -> Replayed:
        """Read the files and check that they fit.

        Args:
            trace: What is replayed.
            model: The engine that is simulated; its target is the traces'.
            drafters: Drafters to choose from, at most those recorded. What n-gram drafts is
                computed for its settings, whatever those of the recording were.
            workload: Loads and output lengths; the kinds are those of `trace`.
            split: `train` or `eval` requests.

        Raises:
            TraceError: If a file is damaged, or lacks a drafter or a length.
            ConfigError: If the cost model is missing, or the workload asks for more than the
                engine or the traces have.
        """
        settings = drafters.settings
        traces = with_ngram_matches(
            read_traces(*map(Path, trace.files)).of_split(split),
            settings.ngram_min_match,
            settings.ngram_max_match,
        )
        if max(workload.concurrency) > model.max_num_seqs:
            raise ConfigError(
                f"A load of {max(workload.concurrency)} requests exceeds max_num_seqs "
                f"{model.max_num_seqs}; raise model.max_num_seqs or lower workload.concurrency."
            )
        return cls(
            TraceWorkload(
                traces,
                workload.concurrency,
                workload.output_tokens,
                trace.kinds,
                workload.first_wave_min_fraction,
            ),
            read_cost_model(Path(trace.cost_model)),
            traces.contract(drafters.max_lengths, cutoffs=drafters.cutoffs),
            TraceEngineConfig(
                max_num_seqs=model.max_num_seqs,
                max_model_len=model.max_model_len,
                max_num_batched_tokens=model.max_num_batched_tokens,
                num_kv_blocks=trace.num_kv_blocks,
                block_size=model.block_size,
                prompts_are_cached=trace.prompts_are_cached,
                has_prefill=trace.has_prefill,
                dormant_after=settings.dormant_after,
                max_pending_tokens=settings.max_pending_tokens,
                combination_min_match=settings.combination_min_match,
            ),
        )

    def env(
        self, episode: EpisodeConfig, reward: RewardConfig, render_mode: str | None = None
    ) -> DraftEnv:
        """One engine as a Gymnasium environment."""
        return DraftEnv(
            lambda: TraceEngine(self.workload.traces, self.cost_model, self.contract, self.engine),
            self.workload,
            episode,
            reward,
            render_mode,
            cost_model=self.cost_model,
            references=self.workload.references(self.cost_model),
        )

    def vec_env(
        self, episode: EpisodeConfig, num_envs: int, num_threads: int | None = None, seed: int = 0
    ) -> DraftVecEnv:
        """Many engines as one vectorised environment."""
        return DraftVecEnv(
            self.workload,
            self.cost_model,
            self.contract,
            self.engine,
            episode,
            num_envs,
            seed,
            num_threads,
        )

    def request_vec_env(
        self, seats_per_load: int, num_threads: int | None = None, seed: int = 0
    ) -> RequestVecEnv:
        """The requests of many engines as one vectorised environment."""
        return RequestVecEnv(
            self.workload,
            self.cost_model,
            replace(self.contract, granularity="request"),
            self.engine,
            seats_per_load,
            seed,
            num_threads,
        )
