"""A vLLM engine in a process of its own, which serves blocks of requests and measures them.

Two engines (with and without speculation) cannot live in one process, and an engine that just
trained should not be measured: each gets a fresh process. The policy runs through the plugin as
in production; other settings take its place in the same engine.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from envs.engine import EngineConfig, ServedBlock
from envs.engine_memory import EngineMemory
from envs.live import ModelConfig, load_tokenizer
from envs.prompts.prompt import Split
from envs.scenario import Arrivals, Scenario
from envs.served import Served
from envs.vllm_engine import VllmEngine
from envs.workload import Workload, WorkloadConfig

from ..artifact import load_policy
from ..baselines.fixed import FixedController
from ..contract import NONE
from ..controllers import Controller, PolicyController, SafeController
from ..errors import EngineError
from .contenders import Contender, TimedController


@dataclass(frozen=True)
class Setting:
    """Something to measure.

    Attributes:
        name: Its name in the report.
        policy: An exported policy that decides; or
        drafter: the drafter of a fixed setting, with
        length: its draft length.
        hooked: Whether it runs in the engine with the plugin.
    """

    name: str
    policy: Path | None = None
    drafter: str = NONE
    length: int = 0
    hooked: bool = True


@dataclass(frozen=True)
class Block:
    """What to serve.

    Attributes:
        split: Prompts of `train` or `eval`.
        seed: Episode of the workload.
        concurrency: Requests in flight.
        num_tokens: Output tokens that end the block.
        kinds: Kinds of its prompts; None for all of the workload's.
        times_stages: Whether to tell how long each stage of the steps took.
    """

    split: Split
    seed: int
    concurrency: int
    num_tokens: int
    kinds: tuple[str, ...] | None = None
    times_stages: bool = False


@dataclass(frozen=True)
class BlockResult:
    """A served block, with the hook's counts over it."""

    served: ServedBlock
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    actions: dict[str, int]


@dataclass(frozen=True)
class ScenarioBlock:
    """A scenario to serve to its end.

    Attributes:
        split: Prompts of `train` or `eval`.
        seed: Of the requests and their arrivals.
        scenario: Load and data over time.
    """

    split: Split
    seed: int
    scenario: Scenario


MEMORY = "memory"
"""Asks for the engine's memory."""
SPLITS: tuple[Split, ...] = ("train", "eval")


class EngineProcess:
    """Handle of an engine in a process of its own.

    Args:
        engine: How vLLM is started.
        model: The target model, for its tokenizer.
        workload: Requests; its concurrency is given per block.
        log: File for everything the process prints.

    The process starts at once and the first call waits for it, so that several start together.
    """

    def __init__(
        self, engine: EngineConfig, model: ModelConfig, workload: WorkloadConfig, log: Path
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = log
        self._process = context.Process(
            target=_run, args=(theirs, engine, model, workload, log), daemon=True
        )
        self._process.start()
        theirs.close()
        self._is_ready = False

    def read_prompts(self, split: Split) -> None:
        """Bring the prompts of a split into the engine's prefix cache."""
        self._call(split)

    def memory(self) -> EngineMemory:
        """What target and model drafter take of the memory."""
        memory: EngineMemory = self._call(MEMORY)
        return memory

    def serve(self, setting: Setting, block: Block) -> BlockResult:
        """Serve a block under a setting."""
        result: BlockResult = self._call((setting, block))
        return result

    def serve_scenario(self, contender: Contender, block: ScenarioBlock) -> Served:
        """Serve a scenario, a contender deciding."""
        served: Served = self._call((contender, block))
        return served

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, message: Any) -> Any:
        if not self._is_ready:
            self._receive()
            self._is_ready = True
        try:
            self._pipe.send(message)
        except OSError as error:
            raise EngineError(f"The measured engine ended; see {self._log}.") from error
        return self._receive()

    def _receive(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineError(f"The measured engine ended; see {self._log}.") from error
        if failed:
            raise EngineError(f"The measured engine failed ({value}); see {self._log}.")
        return value


def _run(
    pipe: Connection, engine: EngineConfig, model: ModelConfig, workload: WorkloadConfig, log: Path
) -> None:
    """Body of the process: start the engine, then answer until told to end."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        server = _Server(VllmEngine(engine), model, workload)
        pipe.send((False, None))
        while (message := pipe.recv()) is not None:
            if message in SPLITS:
                server.read_prompts(cast(Split, message))
                pipe.send((False, None))
            elif message == MEMORY:
                pipe.send((False, server.memory()))
            elif isinstance(message[0], Contender):
                pipe.send((False, server.serve_scenario(*message)))
            else:
                pipe.send((False, server.serve(*message)))
    except EOFError:
        return
    except Exception as error:  # reported to the parent, whatever it is
        traceback.print_exc()
        pipe.send((True, f"{type(error).__name__}: {error}"))


class _Server:
    """The engine, its workloads, and the controllers that take turns."""

    def __init__(self, engine: VllmEngine, model: ModelConfig, workload: WorkloadConfig) -> None:
        self._engine = engine
        tokenizer = load_tokenizer(model)
        self._workloads = {split: Workload(workload, split, tokenizer) for split in SPLITS}
        self._controllers: dict[Setting, Controller] = {}

    def read_prompts(self, split: Split) -> None:
        self._engine.read_prompts(self._workloads[split].prompts())

    def memory(self) -> EngineMemory:
        return self._engine.memory()

    def serve(self, setting: Setting, block: Block) -> BlockResult:
        hook = self._engine.hook
        if hook is not None:
            if setting not in self._controllers:
                self._controllers[setting] = self._controller(setting)
            hook.controller = self._controllers[setting]
        before = self._counts()
        if block.times_stages:
            self._engine.time_stages()
        kinds = None if block.kinds is None else dict.fromkeys(block.kinds, 1.0)
        episode = self._workloads[block.split].episode(block.seed, block.concurrency, kinds)
        served = self._engine.serve(episode, block.num_tokens)
        after = self._counts()
        spent = [new - old for new, old in zip(after, before, strict=True)]
        drafts, draft_tokens, accepted, actions = spent
        return BlockResult(
            served,
            drafts.total(),
            draft_tokens.total(),
            accepted.total(),
            {f"{drafter}:{length}": count for (drafter, length), count in actions.items()},
        )

    def serve_scenario(self, contender: Contender, block: ScenarioBlock) -> Served:
        """A fresh controller serves, so that no run learns from another one's requests."""
        hook, controller = self._engine.hook, None
        if hook is not None:
            controller = TimedController(contender.controller(self._engine.contract))
            hook.hand_over(controller, contender.granularity)
        requests = self._workloads[block.split].requests(block.seed, block.scenario.slots())
        served = self._engine.serve_scenario(Arrivals(block.scenario, requests, block.seed))
        return replace(served, decision_s=controller.decision_s) if controller else served

    def _controller(self, setting: Setting) -> Controller:
        contract = self._engine.contract
        if setting.policy is None:
            return FixedController(contract, setting.drafter, setting.length)
        return SafeController(PolicyController(load_policy(setting.policy)), contract)

    def _counts(self) -> tuple[Counter[Any], ...]:
        hook = self._engine.hook
        if hook is None:
            return Counter(), Counter(), Counter(), Counter()
        return (
            Counter(hook.num_drafts),
            Counter(hook.num_draft_tokens),
            Counter(hook.num_accepted_tokens),
            Counter(hook.num_decisions),
        )
