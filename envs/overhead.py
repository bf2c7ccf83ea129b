"""What hook, policy and bookkeeping cost: steps with them and without, on the same requests.

The policy decides in shadow mode, so that the action applied is always no draft, and every few
steps its hook is taken out, which leaves the same action hard-wired. Both kinds of steps compute
the same, one after the other, so that a machine that drifts slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from policy.artifact import load_policy
from policy.errors import ConfigError

from .live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from .vllm_engine import VllmEngine
from .workload import Workload, WorkloadConfig, WorkloadRequest

_RUNNER_METHODS = ("propose_draft_token_ids", "take_draft_token_ids")
_SCHEDULER_METHODS = ("schedule", "update_draft_token_ids", "make_stats")


@dataclass(frozen=True)
class Overhead:
    """What was measured at one load.

    Attributes:
        num_requests: Requests in flight.
        step_ms: Median step without the hook.
        hook_ms: Median time inside the hook's method per step: recording, observing, deciding,
            looking every request up in its context, counting.
        ratio: Median over pairs of blocks of the time with the hook over that without.
        quartiles: Of the same ratios.
    """

    num_requests: int
    step_ms: float
    hook_ms: float
    ratio: float
    quartiles: tuple[float, float]

    def describe(self) -> str:
        """One row of a table."""
        low, high = self.quartiles
        return (
            f"{self.num_requests:>8} {self.step_ms:>9.1f} {self.hook_ms:>9.3f} "
            f"{self.hook_ms / self.step_ms:>7.2%}   {self.ratio:.4f} [{low:.4f}, {high:.4f}]"
        )


HEADER = "requests   step ms   hook ms   share   with / without [quartiles]"


def measure_overhead(
    policy: Path, num_requests: tuple[int, ...], num_pairs: int, steps_per_block: int
) -> Iterator[Overhead]:
    """Measure at each load on one engine.

    Args:
        policy: An exported policy with the drafters n-gram and, perhaps, a model.
        num_requests: Loads.
        num_pairs: Pairs of blocks at each load.
        steps_per_block: Steps of a block; the first is not counted.

    Yields:
        One result per load.

    Raises:
        ConfigError: If a number is too small to measure with.
    """
    if min(num_requests, default=0) < 1 or num_pairs < 1 or steps_per_block < 2:
        raise ConfigError("Give loads and pairs of 1 or more, and 2 steps a block or more.")
    contract = load_policy(policy).contract
    lengths = dict(zip(contract.drafters[1:], contract.max_lengths[1:], strict=True))
    model = ModelConfig(max_num_seqs=max(num_requests), max_model_len=512)
    section = {"path": str(policy), "shadow": True, "decision_budget_ms": 0}
    engine = VllmEngine(engine_config(model, DraftersConfig(lengths), section))
    prompts = Workload(
        WorkloadConfig(
            kinds={"code": 1.0, "edit": 1.0, "maths": 1.0},
            concurrency=(1,),
            output_tokens=384,
            max_prompt_tokens=96,
        ),
        "eval",
        load_tokenizer(model),
    )
    try:
        for count in num_requests:
            stream = prompts.episode(0).requests
            requests = [replace(next(stream), request_id=f"{count}-{i}") for i in range(count)]
            yield _measure(engine, requests, num_pairs, steps_per_block)
    finally:
        engine.close()


def _measure(
    engine: VllmEngine, requests: list[WorkloadRequest], num_pairs: int, num_steps: int
) -> Overhead:
    engine.abort_all()
    for request in requests:
        engine.add(replace(request, max_tokens=384))
    while engine.hook.last_record is None or engine.hook.last_record.num_rows < len(requests):
        engine.llm_engine.step()
    with_hook: list[float] = []
    without: list[float] = []
    inside: list[float] = []
    timed = _timed(engine.runner.take_draft_token_ids, inside)
    engine.runner.take_draft_token_ids = timed
    try:
        for _ in range(num_pairs):
            with_hook.append(_time_block(engine, num_steps))
            with _hard_wired(engine):
                without.append(_time_block(engine, num_steps))
    finally:
        engine.runner.take_draft_token_ids = timed.__wrapped__  # type: ignore[attr-defined]
    ratios = np.array(with_hook) / np.array(without)
    low, high = np.quantile(ratios, [0.25, 0.75])
    return Overhead(
        num_requests=len(requests),
        step_ms=float(np.median(without)) * 1e3,
        hook_ms=float(np.median(inside)) * 1e3,
        ratio=float(np.median(ratios)),
        quartiles=(float(low), float(high)),
    )


def _time_block(engine: VllmEngine, num_steps: int) -> float:
    """Median seconds of a step; the first, which may still settle, is left out."""
    seconds = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        engine.llm_engine.step()
        seconds.append(time.perf_counter() - started_s)
    return float(np.median(seconds[1:]))


def _timed(method: Callable[[], Any], seconds: list[float]) -> Callable[[], Any]:
    def timed() -> Any:
        started_s = time.perf_counter()
        result = method()
        seconds.append(time.perf_counter() - started_s)
        return result

    timed.__wrapped__ = method  # type: ignore[attr-defined]
    return timed


@contextmanager
def _hard_wired(engine: VllmEngine) -> Iterator[None]:
    """Take the hook out of runner and scheduler: nothing is ever drafted."""
    runner, scheduler = engine.runner, engine._core.scheduler
    taken = [
        (owner, name, vars(owner).pop(name))
        for owner, names in ((runner, _RUNNER_METHODS), (scheduler, _SCHEDULER_METHODS))
        for name in names
    ]
    runner.propose_draft_token_ids = lambda *_: [[] for _ in range(runner.input_batch.num_reqs)]
    runner.take_draft_token_ids = lambda: None
    try:
        yield
    finally:
        for owner, name, method in taken:
            setattr(owner, name, method)
