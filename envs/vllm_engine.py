"""The live engine: vLLM in this process, driven one decision at a time through the hook.

The loop is a closed one: as many requests as the episode's load says are in flight, a finished
one is replaced by the next of the stream. Steps without a request to decide for (prefill only)
are advanced, not decided.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policy.contract import Contract
from policy.cost_model import NO_WORK, StepShape, shape_of
from policy.errors import DraftgymError, EngineError
from policy.step import StepRecord

from .engine import NO_SPECULATION, EngineConfig, EngineStep, ServedBlock
from .scenario import Arrivals
from .served import Ledger, Served
from .workload import Episode, WorkloadRequest


@dataclass
class _Progress:
    """What happened between two decisions, named as in `EngineStep`."""

    num_tokens: int = 0
    step_time_s: float = 0.0
    num_finished_reqs: int = 0
    num_engine_steps: int = 0
    shape: StepShape = NO_WORK


@dataclass(frozen=True)
class ProbedStep:
    """One engine step without speculation, and what every drafter would draft after it.

    Attributes:
        emitted: New tokens by request.
        finished: Requests that the step ended, with their last tokens in `emitted`.
        req_ids: Request of each row of the probes.
        probes: What each drafter would draft; empty where no request awaits a decision.
        hook: The hook, still at the decision.
    """

    emitted: dict[str, list[int]]
    finished: frozenset[str]
    req_ids: tuple[str, ...]
    probes: dict[str, Any]
    hook: Any


class VllmEngine:
    """A live vLLM engine in this process.

    Args:
        config: How vLLM is started.

    Raises:
        EngineError: If vLLM cannot be started with this configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        # The hook must be reachable, so the engine core runs in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from policy.serving.plugin import register

        register()
        _let_vllm_pass_llvmlite()
        self.config = config
        try:
            self.llm_engine = LLMEngine.from_engine_args(EngineArgs(**config.engine_args()))
        except DraftgymError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM could not start with model {config.model} ({error}); check the model and "
                "the engine settings."
            ) from error
        self._core = self.llm_engine.engine_core.engine_core
        self._unfinished: dict[str, str] = {}  # our request id -> the engine's own
        self._episode: Episode | None = None
        self._episode_time_s = 0.0

    @property
    def runner(self) -> Any:
        """The model runner of vLLM."""
        return self._core.model_executor.driver_worker.worker.model_runner

    @property
    def hook(self) -> Any:
        """The production hook; None where no drafting policy is configured."""
        return getattr(self.runner, "draftgym", None)

    @property
    def contract(self) -> Contract:
        """The hook's contract."""
        contract: Contract = self.hook.contract
        return contract

    def reset(self, episode: Episode) -> EngineStep:
        """Abort what runs, admit the episode's first requests, go to the first decision."""
        self.abort_all()
        self._episode = episode
        self._episode_time_s = 0.0
        return self._advance_to_decision(_Progress())

    def step(self, actions: np.ndarray) -> EngineStep:
        """Draft as decided, verify, and go on to the next decision.

        Args:
            actions: As the contract's, integers `[1, …]` or `[rows, …]`.
        """
        progress = _Progress()
        self._draft(actions, progress)
        self._step_engine(progress)
        return self._advance_to_decision(progress)

    def generate(
        self, requests: Sequence[WorkloadRequest], concurrency: int
    ) -> dict[str, list[int]]:
        """Serve requests to their ends, the engine deciding for itself.

        Args:
            requests: What to serve, in order.
            concurrency: Requests in flight.

        Returns:
            Output token ids by request id.
        """
        self.abort_all()
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        waiting = deque(requests)
        while waiting or self._unfinished:
            while waiting and len(self._unfinished) < concurrency:
                self.add(waiting.popleft())
            for request_id, token_ids in self._step_engine(_Progress()).items():
                outputs[request_id] += token_ids
        return outputs

    def probe(self, requests: Iterable[WorkloadRequest], concurrency: int) -> Iterator[ProbedStep]:
        """Serve requests to their ends without speculation, probing every drafter at each step.

        One request at most is admitted in a step: of several that share an uncached prefix, the
        model drafter could at first draft for one only.

        Args:
            requests: What to serve, in order.
            concurrency: Requests in flight.

        Yields:
            What each engine step brought.
        """
        self.abort_all()
        waiting = deque(requests)
        while waiting or self._unfinished:
            if waiting and len(self._unfinished) < concurrency:
                self.add(waiting.popleft())
            before = {internal: request_id for request_id, internal in self._unfinished.items()}
            emitted = self._step_engine(_Progress())
            finished = frozenset(before.values()) - self._unfinished.keys()
            decision = self.hook.pending
            if decision is None:
                yield ProbedStep(emitted, finished, (), {}, self.hook)
                continue
            req_ids = tuple(before[internal] for internal in decision.record.req_ids)
            yield ProbedStep(emitted, finished, req_ids, self.hook.probe(), self.hook)
            self._draft(NO_SPECULATION, _Progress())

    def read_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Bring prompts into the prefix cache, so that later blocks do not pay for them."""
        self.abort_all()
        for index, prompt in enumerate(prompts):
            self.add(WorkloadRequest(f"warm-up-{index}", prompt, 1, 0.0, "warm-up"))
        while self._unfinished:
            self._step_engine(_Progress())
            if self.hook is not None and self.hook.pending is not None:
                self._draft(NO_SPECULATION, _Progress())  # lets the model drafter read them too

    def serve(self, episode: Episode, num_tokens: int) -> ServedBlock:
        """Let the engine decide for itself, as in production, and measure it.

        The first requests' prompts are computed before the clock starts: in a closed loop at a
        steady load, prompts arrive as requests end.

        Args:
            episode: Load and requests.
            num_tokens: Output tokens after which the block ends.
        """
        self.abort_all()
        warm_up, block = _Progress(), _Progress()
        for request in episode.take_due(0, 0.0):
            self.add(request)
        waiting = set(self._unfinished)
        while waiting:
            waiting -= self._step_engine(warm_up).keys()
        while block.num_tokens < num_tokens:
            for request in episode.take_due(len(self._unfinished), block.step_time_s):
                self.add(request)
            self._step_engine(block)
        self.abort_all()
        return ServedBlock(block.num_tokens, block.step_time_s, block.num_engine_steps)

    def serve_scenario(self, arrivals: Arrivals) -> Served:
        """Serve a scenario to its end, the engine deciding for itself, as in production.

        Times are engine time: the clock stands while no step runs, and an engine without
        requests skips to the next one instead of sleeping.

        Args:
            arrivals: The scenario's requests.
        """
        self.abort_all()
        hook = self.hook
        ledger = Ledger(hook.contract if hook else None)
        while (due := ledger.take_due(arrivals)) is not None:
            for request in due:
                self.add(request)
            progress, before = _Progress(), set(self._unfinished)
            emitted = self._step_engine(progress)
            ledger.note_step(
                progress.step_time_s,
                {name: len(token_ids) for name, token_ids in emitted.items() if token_ids},
                before - self._unfinished.keys(),
                hook.last_record if hook else None,
            )
        return ledger.close(decision_s=0.0)

    def abort_all(self) -> None:
        """End every request in flight."""
        if self._unfinished:
            self.llm_engine.abort_request(list(self._unfinished))
            self._unfinished.clear()

    def add(self, request: WorkloadRequest) -> None:
        """Admit a request."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._unfinished[request.request_id] = self.llm_engine.add_request(
            request.request_id,
            tokens_input(list(request.prompt_token_ids)),
            SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
            ),
        )

    def close(self) -> None:
        """Free the engine."""
        self.abort_all()
        self.llm_engine.engine_core.shutdown()

    def _advance_to_decision(self, progress: _Progress) -> EngineStep:
        """Admit due requests and step the engine until a live request awaits a decision."""
        assert self._episode is not None
        while True:
            for request in self._episode.take_due(len(self._unfinished), self._episode_time_s):
                self.add(request)
            decision = self.hook.pending
            if decision is not None and self._is_live(decision.record):
                return EngineStep(
                    decision.record,
                    decision.observation,
                    progress.num_tokens,
                    progress.step_time_s,
                    progress.num_finished_reqs,
                    progress.shape,
                )
            if decision is not None:
                self._draft(NO_SPECULATION, progress)
            self._step_engine(progress)

    def _is_live(self, record: StepRecord) -> bool:
        """Whether a request of the record is unfinished; the worker cannot know yet."""
        return not set(self._unfinished.values()).isdisjoint(record.req_ids)

    def _draft(self, actions: np.ndarray, progress: _Progress) -> None:
        began_s = time.perf_counter()
        self._core.scheduler.update_draft_token_ids(self.hook.draft(actions))
        self._count_time(time.perf_counter() - began_s, progress)

    def _step_engine(self, progress: _Progress) -> dict[str, list[int]]:
        """Run one engine step and return the new tokens by request id."""
        began_s = time.perf_counter()
        outputs = self.llm_engine.step()
        self._count_time(time.perf_counter() - began_s, progress)
        progress.num_engine_steps += 1
        if self.hook is not None:
            progress.shape = progress.shape.followed_by(
                shape_of(self.hook.last_record, self.contract)
            )
        emitted = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        progress.num_tokens += sum(len(token_ids) for token_ids in emitted.values())
        for output in outputs:
            if output.finished:
                self._unfinished.pop(output.request_id, None)
                progress.num_finished_reqs += 1
        return emitted

    def _count_time(self, seconds: float, progress: _Progress) -> None:
        progress.step_time_s += seconds
        self._episode_time_s += seconds


def _let_vllm_pass_llvmlite() -> None:
    """Let an engine start in a process that has imported numba, as a second engine's always has.

    vLLM 0.32's CPU platform looks into `vars()` of every object of every module
    (`vllm.triton_utils.dispatcher._rebind_kernels`); llvmlite's library object answers
    `__dict__` with a wrapped C symbol, on which that scan fails.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    library = type(ffi.lib)
    look_up = library.__getattr__
    if getattr(look_up, "_passes_dunders", False):
        return

    def look_up_symbol(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return look_up(self, name)

    look_up_symbol._passes_dunders = True  # type: ignore[attr-defined]
    library.__getattr__ = look_up_symbol
