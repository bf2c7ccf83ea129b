"""What an engine is to the environment: how it is started, what a decision brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from policy.contract import Contract
from policy.cost_model import StepShape
from policy.serving.config import CONFIG_KEY
from policy.step import StepRecord

from .workload import Episode

NO_SPECULATION = np.zeros((1, 2), np.int64)


class Engine(Protocol):
    """What the environment needs of an engine, live or replayed."""

    @property
    def contract(self) -> Contract:
        """Observation and action table."""
        ...

    def reset(self, episode: Episode) -> EngineStep:
        """Begin an episode and go to its first decision."""
        ...

    def step(self, actions: np.ndarray) -> EngineStep:
        """Act and go to the next decision."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


@dataclass(frozen=True)
class EngineConfig:
    """How vLLM is started.

    Attributes:
        model: Folder or id of the target model.
        speculative_config: vLLM's own section; None starts an engine without speculation.
        drafting_policy: draftgym's section of `additional_config`; needs a speculative_config.
        max_num_seqs: Largest number of requests in an engine step.
        max_model_len: Longest context in tokens.
        max_num_batched_tokens: Most tokens in an engine step.
        kv_cache_memory_bytes: Memory for the KV cache; None leaves it to vLLM.
        block_size: Tokens of a KV-cache block, the unit in which prompts are cached.
        dtype: Weights and activations.
        enforce_eager: Skip compilation: starts in seconds, runs slower.
        enable_prefix_caching: Reuse the KV cache of equal prompt beginnings.
        seed: vLLM's sampling seed.
    """

    model: str
    speculative_config: Mapping[str, Any] | None = None
    drafting_policy: Mapping[str, Any] | None = None
    max_num_seqs: int = 32
    max_model_len: int = 1024
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = 2 << 30
    block_size: int = 32
    dtype: str = "bfloat16"
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    seed: int = 0

    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's `EngineArgs`."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": self.enable_prefix_caching,
            "seed": self.seed,
            "async_scheduling": False,
            "disable_log_stats": True,
        }
        if self.speculative_config is not None:
            arguments["speculative_config"] = dict(self.speculative_config)
        if self.drafting_policy is not None:
            arguments["additional_config"] = {CONFIG_KEY: dict(self.drafting_policy)}
        return arguments


@dataclass(frozen=True)
class EngineStep:
    """What one call of `reset` or `step` brought.

    Attributes:
        record: The engine step before the next decision.
        observation: Its observation, float32 `[rows, fields]`.
        num_tokens: Output tokens emitted since the last decision.
        step_time_s: Engine time since the last decision: drafting, verifying, prefill steps.
        num_finished_reqs: Requests that ended since the last decision.
        shape: What was computed since the last decision; one engine step unless prefills came
            between.
    """

    record: StepRecord
    observation: np.ndarray
    num_tokens: int
    step_time_s: float
    num_finished_reqs: int
    shape: StepShape


@dataclass(frozen=True)
class ServedBlock:
    """A stretch of serving in which the engine decided for itself.

    Attributes:
        num_tokens: Output tokens emitted.
        seconds: Engine time they took.
        num_steps: Engine steps.
        stages_s: Part of it by stage, see `envs.stage_clock`; empty without a clock.
    """

    num_tokens: int
    seconds: float
    num_steps: int
    stages_s: Mapping[str, float] = field(default_factory=dict)
