"""Where the time of live engine steps goes: a clock on the engine's own methods.

Methods of the instances at work are wrapped, classes stay untouched. Wrapped methods call each
other, so each is charged only what its inner ones do not take: the stages add up to what the
outermost calls took. What no wrapped method covers is left over, and tells how complete this is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

STAGES = ("drafting", "verification", "sampling", "deciding", "overhead")
"""drafting: look-ups, and the model drafter's passes and what they read. verification: the target's
forward pass and logits, prompts included. sampling: of the target, rejection included. deciding:
draftgym's record, observation and controller. overhead: scheduling, batch preparation, output."""


class StageClock:
    """Adds up the time of each stage.

    Args:
        settle: Called before the clock is read; waits for a device that computes asynchronously.

    Attributes:
        seconds: Time of each stage so far.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._settle = settle
        self._stages: list[str] = []
        self._since_s = 0.0

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Charge a method of an object to a stage, from now on."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(stage)
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, name, timed)

    def _enter(self, stage: str) -> None:
        self._charge()
        self._stages.append(stage)

    def _leave(self) -> None:
        self._charge()
        self._stages.pop()

    def _charge(self) -> None:
        """Charge the time since the last change to the stage at work."""
        self._settle()
        now_s = time.perf_counter()
        if self._stages:
            self.seconds[self._stages[-1]] += now_s - self._since_s
        self._since_s = now_s


def clock_engine(llm_engine: Any, runner: Any, hook: Any) -> StageClock:
    """Put a clock on a live engine of vLLM 0.32 in this process.

    Args:
        llm_engine: vLLM's `LLMEngine`.
        runner: Its model runner.
        hook: draftgym's hook; None without one.
    """
    clock = StageClock(_settle_of(runner))
    core = llm_engine.engine_core.engine_core
    for owner, name in _overhead(llm_engine, core, runner):
        clock.wrap(owner, name, "overhead")
    clock.wrap(runner, "_model_forward", "verification")
    clock.wrap(runner.model, "compute_logits", "verification")
    clock.wrap(runner, "_sample", "sampling")
    if hook is not None:
        clock.wrap(runner, "take_draft_token_ids", "deciding")
        for owner, name in hook.drafting_methods():
            clock.wrap(owner, name, "drafting")
    return clock


def _overhead(llm_engine: Any, core: Any, runner: Any) -> Iterator[tuple[Any, str]]:
    """Methods that take a step around the target's pass, the outermost first."""
    yield core, "step_fn"
    yield core, "post_step"
    yield core.scheduler, "schedule"
    yield core.scheduler, "update_from_output"
    yield runner, "execute_model"
    yield runner, "sample_tokens"
    yield llm_engine.output_processor, "process_outputs"


def _settle_of(runner: Any) -> Callable[[], None]:
    """Waits for a GPU; nothing to wait for on a CPU."""
    if runner.device.type == "cpu":
        return lambda: None
    import torch

    return torch.accelerator.synchronize
