"""Registers `draftgym/VllmDraft-v0` and `draftgym/TraceDraft-v0` for `gymnasium.make`.

Example:
    import envs.registration
    env = gymnasium.make("draftgym/VllmDraft-v0", model={"max_num_seqs": 8})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from policy.config import from_mapping

from .draft_env import DraftEnv, EpisodeConfig
from .live import DraftersConfig, ModelConfig, make_live_env
from .prompts.prompt import Split
from .replayed import Replayed, TraceConfig
from .reward import RewardConfig
from .workload import WorkloadConfig

DEFAULT_KINDS = {"code": 1.0, "edit": 1.0, "maths": 1.0, "summary": 1.0, "chat": 1.0}


def make_vllm_draft_env(
    *,
    model: Mapping[str, Any] | None = None,
    drafters: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    episode: Mapping[str, Any] | None = None,
    reward: Mapping[str, Any] | None = None,
    split: Split = "train",
    seed: int = 0,
    render_mode: str | None = None,
) -> DraftEnv:
    """Build the live environment from plain mappings.

    Args:
        model: Settings of `ModelConfig`.
        drafters: Settings of `DraftersConfig`.
        workload: Settings of `WorkloadConfig`.
        episode: Settings of `EpisodeConfig`.
        reward: Settings of `RewardConfig`.
        split: `train` or `eval`.
        seed: Seed of the global generators.
        render_mode: None or `ansi`.
    """
    requests: dict[str, Any] = {"kinds": DEFAULT_KINDS, "concurrency": _DEFAULT_LOADS}
    return make_live_env(
        from_mapping(ModelConfig, model or {}, "model"),
        from_mapping(DraftersConfig, drafters or {}, "drafters"),
        from_mapping(WorkloadConfig, {**requests, **(workload or {})}, "workload"),
        from_mapping(EpisodeConfig, episode or {}, "episode"),
        from_mapping(RewardConfig, reward or {}, "reward"),
        split=split,
        seed=seed,
        render_mode=render_mode,
    )


def make_trace_draft_env(
    *,
    trace: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    drafters: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    episode: Mapping[str, Any] | None = None,
    reward: Mapping[str, Any] | None = None,
    split: Split = "train",
    render_mode: str | None = None,
) -> DraftEnv:
    """Build the replayed environment from plain mappings.

    Args:
        trace: Settings of `TraceConfig`.
        model: Settings of `ModelConfig`: the engine that is simulated.
        drafters: Settings of `DraftersConfig`.
        workload: Settings of `WorkloadConfig`; the kinds are those of `trace`.
        episode: Settings of `EpisodeConfig`.
        reward: Settings of `RewardConfig`.
        split: `train` or `eval`.
        render_mode: None or `ansi`.
    """
    requests: dict[str, Any] = {
        "kinds": DEFAULT_KINDS,
        "concurrency": _DEFAULT_LOADS,
        "output_tokens": 64,
    }
    return Replayed.read(
        from_mapping(TraceConfig, trace or {}, "trace"),
        from_mapping(ModelConfig, model or {}, "model"),
        from_mapping(DraftersConfig, drafters or {}, "drafters"),
        from_mapping(WorkloadConfig, {**requests, **(workload or {})}, "workload"),
        split,
    ).env(
        from_mapping(EpisodeConfig, episode or {}, "episode"),
        from_mapping(RewardConfig, reward or {}, "reward"),
        render_mode,
    )


_DEFAULT_LOADS: Sequence[int] = (1, 2, 4, 8, 16, 32)

if "draftgym/VllmDraft-v0" not in gymnasium.registry:
    gymnasium.register(
        "draftgym/VllmDraft-v0",
        entry_point="envs.registration:make_vllm_draft_env",
        nondeterministic=True,  # step times are measured
    )

if "draftgym/TraceDraft-v0" not in gymnasium.registry:
    gymnasium.register(
        "draftgym/TraceDraft-v0",
        entry_point="envs.registration:make_trace_draft_env",
        nondeterministic=True,  # what is remembered of past acceptance outlives an episode
    )
