"""Helpers of the live tests: small engines, prompts, and generation to the end."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envs.live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from envs.vllm_engine import VllmEngine
from envs.workload import Workload, WorkloadConfig, WorkloadRequest
from policy.serving.config import DrafterSettings
from policy.step import StepRecord

MODEL = ModelConfig(
    dtype="float32", max_num_seqs=8, max_model_len=640, kv_cache_memory_bytes=1 << 30
)
DRAFTERS = DraftersConfig(max_lengths={"ngram": 8, "eagle3": 4})
HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None
"""Whether `make suffix` was run."""
EVERY_DRAFTER = DraftersConfig(
    max_lengths={
        "ngram": 8,
        **({"suffix": 12} if HAS_SUFFIX else {}),
        "eagle3": 4,
        "ngram_else_eagle3": 8,
        **({"suffix_else_eagle3": 10} if HAS_SUFFIX else {}),
        "longest_expected": 6,
    },
    cutoffs=(0.3, 0.6),
    settings=DrafterSettings(suffix_max_cached_requests=0),
)
KINDS = {"code": 1.0, "edit": 1.0, "maths": 1.0, "chat": 1.0}


def make_engine(
    drafting_policy: dict[str, Any] | None = None,
    drafters: DraftersConfig = DRAFTERS,
    **model: Any,
) -> VllmEngine:
    """A hooked live engine; by default the caller decides."""
    settings = ModelConfig(**{**vars(MODEL), **model})
    return VllmEngine(engine_config(settings, drafters, drafting_policy))


def make_unhooked_engine(num_speculative_tokens: int) -> VllmEngine:
    """vLLM with its own EAGLE-3 drafting and no drafting policy."""
    config = engine_config(MODEL, DRAFTERS)
    speculative = {
        **(config.speculative_config or {}),
        "num_speculative_tokens": num_speculative_tokens,
    }
    return VllmEngine(replace(config, speculative_config=speculative, drafting_policy=None))


def make_workload(**settings: Any) -> Workload:
    """Prompts for tests: a few of each kind."""
    config = WorkloadConfig(
        **{
            "kinds": KINDS,
            "concurrency": (4,),
            "output_tokens": 128,
            "max_prompts_per_kind": 8,
            "max_prompt_tokens": 320,
            **settings,
        }
    )
    return Workload(config, "train", load_tokenizer(MODEL))


def make_requests(count: int, max_tokens: int) -> list[WorkloadRequest]:
    """Different prompts of every kind, greedy, all of one length."""
    stream = itertools.islice(make_workload().episode(0).requests, count)
    return [
        replace(request, request_id=f"request-{index}", max_tokens=max_tokens)
        for index, request in enumerate(stream)
    ]


class ScriptedController:
    """One action per decision from a list, then none; keeps what it saw."""

    def __init__(self, actions: Sequence[tuple[int, int]]) -> None:
        self._actions = list(actions)
        self.observations: list[np.ndarray] = []
        self.records: list[StepRecord] = []

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        index = len(self.observations)
        self.observations.append(observation.copy())
        self.records.append(record)
        action = self._actions[index] if index < len(self._actions) else (0, 0)
        return np.array([action])
