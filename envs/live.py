"""Live environments from plain settings: target model, drafters, workload, episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from policy.contract import MODEL_DRAFTERS, NONE, Contract
from policy.errors import ConfigError
from policy.serving.config import DrafterSettings, check_settings

from .draft_env import DraftEnv, EpisodeConfig
from .engine import EngineConfig
from .prompts.prompt import Split
from .reward import RewardConfig
from .target_model import DEFAULT_TARGET_MODEL, prepare_target_model
from .vllm_engine import VllmEngine
from .workload import Workload, WorkloadConfig

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_HEAD = REPOSITORY / "checkpoints" / "smollm2-135m-eagle3"


@dataclass(frozen=True)
class ModelConfig:
    """The target model and its engine.

    Attributes:
        target: `smollm2-135m-instruct` (the default, ships with a package), a folder, or a
            Hugging Face id.
        dtype: `auto` takes bfloat16 where the processor computes in it, else float32.
        max_num_seqs: Largest number of requests in an engine step.
        max_model_len: Longest context in tokens.
        max_num_batched_tokens: Most tokens in an engine step.
        kv_cache_memory_bytes: Memory for the KV cache; null leaves it to vLLM.
        block_size: Tokens of a KV-cache block; vLLM's own default on a CPU is 128, in which few
            prompts are found again.
        enforce_eager: Skip compilation: starts in seconds, runs slower.
        enable_prefix_caching: Reuse the KV cache of equal prompt beginnings.
    """

    target: str = DEFAULT_TARGET_MODEL
    dtype: str = "auto"
    max_num_seqs: int = 32
    max_model_len: int = 1024
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = 2 << 30
    block_size: int = 32
    enforce_eager: bool = True
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; make it 1 or more.")


@dataclass(frozen=True)
class DraftersConfig:
    """Which drafters the policy chooses from.

    Attributes:
        max_lengths: Longest draft per drafter, `none` left out: `{"ngram": 8, "eagle3": 4}`.
        model: Folder or id of the model drafter's weights; null without a model drafter.
        cutoffs: Survival probabilities that actions choose from; empty: drafts are not cut.
        settings: How the drafters work.
    """

    max_lengths: Mapping[str, int] = field(default_factory=lambda: {"ngram": 8, "eagle3": 4})
    model: str | None = str(DEFAULT_HEAD)
    cutoffs: tuple[float, ...] = ()
    settings: DrafterSettings = field(default_factory=DrafterSettings)

    def __post_init__(self) -> None:
        if not self.max_lengths:
            raise ConfigError("drafters.max_lengths is empty; name at least one drafter.")
        self.contract()
        if self.model_drafter is not None and self.model is None:
            raise ConfigError(
                f"drafters.model is missing; give the weights of '{self.model_drafter}'."
            )

    def contract(self) -> Contract:
        """The drafters as a contract of batch granularity."""
        names, lengths = (NONE, *self.max_lengths), (0, *self.max_lengths.values())
        return Contract(names, lengths, cutoffs=self.cutoffs)

    @property
    def model_drafter(self) -> str | None:
        """The drafter that runs a model, if any."""
        return next((name for name in self.max_lengths if name in MODEL_DRAFTERS), None)

    def speculative_config(self) -> dict[str, Any]:
        """The section of vLLM for these drafters."""
        longest = max(self.max_lengths.values())
        if self.model_drafter is None:
            return {"method": "ngram", "num_speculative_tokens": longest}
        config: dict[str, Any] = {
            "method": self.model_drafter,
            "model": self.model,
            "num_speculative_tokens": longest,
        }
        if self.model_drafter != "draft_model":
            # vLLM recomputes the last cached block of every prompt for EAGLE-like drafters, which
            # costs up to a quarter of the speed where prompts are cached and outputs are short.
            # The drafter loses at most one position's accuracy without it, and no output changes.
            config["disable_eagle_block_drop"] = True
        return config


def engine_config(
    model: ModelConfig,
    drafters: DraftersConfig | None,
    drafting_policy: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """How vLLM is started for a model with these drafters, or without speculation.

    Args:
        model: The target model.
        drafters: None starts an engine without speculation.
        drafting_policy: draftgym's section; None lets the caller decide through the hook.

    Raises:
        ConfigError: If a drafter cannot work here or as set.
    """
    if drafters is not None:
        check_settings(drafters.contract(), drafters.settings)
    policy = drafting_policy or {"external": True}
    if drafters is not None and "path" not in policy:
        policy = {
            **policy,
            "drafters": dict(drafters.max_lengths),
            "cutoffs": list(drafters.cutoffs),
        }
    if drafters is not None:
        policy = {**policy, "settings": vars(drafters.settings)}
    return EngineConfig(
        model=prepare_target_model(model.target),
        speculative_config=drafters.speculative_config() if drafters else None,
        drafting_policy=policy if drafters else None,
        max_num_seqs=model.max_num_seqs,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=model.max_num_batched_tokens,
        kv_cache_memory_bytes=model.kv_cache_memory_bytes,
        block_size=model.block_size,
        dtype=best_dtype() if model.dtype == "auto" else model.dtype,
        enforce_eager=model.enforce_eager,
        enable_prefix_caching=model.enable_prefix_caching,
    )


def best_dtype() -> str:
    """bfloat16 where the machine computes in it, else float32.

    A processor without AVX-512 emulates bfloat16 matrix products: measured 35 times slower than
    float32 on one with AVX2 only.
    """
    import torch

    if torch.cuda.is_available():
        return "auto"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "bfloat16" if "avx512" in flags or "asimd" in flags else "float32"


def load_tokenizer(model: ModelConfig) -> Any:
    """The target model's tokenizer.

    Raises:
        ConfigError: If the model comes without a chat template.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_target_model(model.target))
    if not tokenizer.chat_template:
        raise ConfigError(f"{model.target} has no chat template; choose an instruction model.")
    return tokenizer


def make_live_env(
    model: ModelConfig,
    drafters: DraftersConfig,
    workload: WorkloadConfig,
    episode: EpisodeConfig,
    reward: RewardConfig,
    *,
    split: Split = "train",
    seed: int = 0,
    render_mode: str | None = None,
) -> DraftEnv:
    """A `DraftEnv` on live vLLM.

    Args:
        model: Target model and engine.
        drafters: Drafters to choose from.
        workload: Requests and loads; no load may exceed `model.max_num_seqs`.
        episode: What an episode is.
        reward: How steps are charged.
        split: `train` or `eval`; the prompts of the two are disjoint.
        seed: Seeds NumPy's and torch's global generators after the engine, which sets its own.
        render_mode: None or `ansi`.
    """
    if max(workload.concurrency) > model.max_num_seqs:
        raise ConfigError(
            f"A load of {max(workload.concurrency)} requests exceeds max_num_seqs "
            f"{model.max_num_seqs}; raise model.max_num_seqs or lower workload.concurrency."
        )
    config = engine_config(model, drafters)
    requests = Workload(workload, split, load_tokenizer(model))
    env = DraftEnv(lambda: VllmEngine(config), requests, episode, reward, render_mode)
    _seed_globals(seed)
    return env


def _seed_globals(seed: int) -> None:
    import random

    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
