"""Timing live steps over a grid of loads, drafters, draft lengths and contexts.

The grid is walked in visits, each a stretch of steps at one load and context in which every
action of the grid comes up, in random order: whatever else the machine does meanwhile slows all
actions alike. Each finished visit lies in one part file of the job's folder, so that a killed run
is gone on with.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from policy.contract import MODEL_DRAFTERS, Contract
from policy.errors import ConfigError

from .live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from .step_timings import Timings, read_timings, write_timings
from .vllm_engine import VllmEngine
from .workload import ClosedLoop, Episode, Workload, WorkloadConfig, WorkloadRequest


@dataclass(frozen=True)
class TimingConfig:
    """The grid.

    Attributes:
        loads: Requests in flight.
        token_lengths: Draft lengths of token drafters.
        model_lengths: Draft lengths of the model drafter.
        contexts: Tokens to which prompts are filled up; 0 leaves them as they are.
        steps_per_action: Steps that are timed of every action in a visit.
        repeats: Visits of every load and context, in another order each time.
        prompts_per_kind: Prompts in use, few enough to stay in the prefix cache.
    """

    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    token_lengths: tuple[int, ...] = (2, 8)
    model_lengths: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (0, 512)
    steps_per_action: int = 3
    repeats: int = 8
    prompts_per_kind: int = 4

    def __post_init__(self) -> None:
        for name in ("loads", "token_lengths", "model_lengths", "contexts"):
            values, least = getattr(self, name), 0 if name == "contexts" else 1
            if not values or min(values) < least:
                raise ConfigError(
                    f"timing.{name} is {list(values)}; list whole numbers of {least} or more."
                )
        for name in ("steps_per_action", "repeats", "prompts_per_kind"):
            if getattr(self, name) < 1:
                raise ConfigError(f"timing.{name} is {getattr(self, name)}; make it 1 or more.")

    def actions(self, contract: Contract) -> list[tuple[int, int]]:
        """No speculation, and every drafter but combinations at every length of the grid."""
        actions = {(0, 0)}
        for index, drafter in enumerate(contract.proposers, start=1):
            lengths = self.model_lengths if drafter in MODEL_DRAFTERS else self.token_lengths
            longest = contract.max_lengths[index]
            actions |= {(index, min(length, longest)) for length in lengths}
        return sorted(actions)


@dataclass(frozen=True)
class TimingJob:
    """What is timed.

    Attributes:
        model: Target model and engine.
        drafters: Drafters and their longest drafts.
        workload: Prompts and output tokens.
        grid: Loads, actions and contexts.
        seed: Order of the visits and of their steps, and the prompts they use.
    """

    model: ModelConfig
    drafters: DraftersConfig
    workload: WorkloadConfig
    grid: TimingConfig
    seed: int = 0

    def __post_init__(self) -> None:
        if (load := max(self.grid.loads)) > self.model.max_num_seqs:
            raise ConfigError(
                f"timing.loads go up to {load} requests; raise model.max_num_seqs from "
                f"{self.model.max_num_seqs} or lower them."
            )
        longest = max(self.grid.contexts) + self.workload.output_tokens
        if longest > self.model.max_model_len:
            raise ConfigError(
                f"timing.contexts and workload.output_tokens make requests of {longest} tokens; "
                f"raise model.max_model_len from {self.model.max_model_len} or lower them."
            )

    @property
    def actions(self) -> list[tuple[int, int]]:
        """Every action of the grid."""
        return self.grid.actions(self.drafters.contract())

    def visits(self) -> list[tuple[int, int]]:
        """Load and context of every visit, in their order."""
        grid = self.grid
        visits = list(itertools.product(grid.loads, grid.contexts)) * grid.repeats
        random.Random(self.seed).shuffle(visits)
        return visits


def collect_timings(job: TimingJob, folder: Path) -> None:
    """Time the visits that no part holds yet.

    Args:
        job: What is timed.
        folder: Where the parts go; the caller has claimed it.
    """
    visits = job.visits()
    left = [visit for visit in range(len(visits)) if not _part(folder, visit).exists()]
    if not left:
        return
    config = replace(job.workload, max_prompts_per_kind=job.grid.prompts_per_kind)
    workload = Workload(config, "train", load_tokenizer(job.model))
    with (
        closing(VllmEngine(engine_config(job.model, job.drafters))) as engine,
        tqdm(
            total=len(visits), initial=len(visits) - len(left), unit="visit", desc="timing"
        ) as bar,
    ):
        prompts = itertools.product(job.grid.contexts, workload.prompts())
        engine.read_prompts([_filled(prompt, workload, context) for context, prompt in prompts])
        for visit in left:
            write_timings(_time_visit(engine, workload, job, visit), _part(folder, visit))
            bar.update()


def merge_timings(job: TimingJob, folder: Path) -> Timings:
    """All visits as one.

    Raises:
        TraceError: If a visit is missing.
    """
    return read_timings(*(_part(folder, visit) for visit in range(len(job.visits()))))


def _part(folder: Path, visit: int) -> Path:
    return folder / f"{visit:05}.parquet"


def _time_visit(engine: VllmEngine, workload: Workload, job: TimingJob, visit: int) -> Timings:
    load, context = job.visits()[visit]
    cells = list(itertools.product(job.grid.loads, job.actions, job.grid.contexts))
    actions = job.actions * job.grid.steps_per_action
    random.Random(f"{job.seed} {visit}").shuffle(actions)
    episode = workload.episode(job.seed + visit, load)
    requests = _fill(episode.requests, workload, context)
    engine.reset(Episode(load, requests, ClosedLoop(load)))
    steps = [engine.step(np.array([action])) for action in actions]
    engine.abort_all()
    return Timings(
        cell=np.array([cells.index((load, action, context)) for action in actions], np.int32),
        visit=np.full(len(steps), visit, np.int32),
        load=np.full(len(steps), load, np.int32),
        num_running_reqs=np.array([step.shape.num_running_reqs for step in steps], np.int32),
        features=np.array([step.shape.features() for step in steps]),
        step_time_s=np.array([step.step_time_s for step in steps]),
    )


def _fill(
    requests: Iterator[WorkloadRequest], workload: Workload, context: int
) -> Iterator[WorkloadRequest]:
    """The same requests, their prompts filled up to a context."""
    for request in requests:
        prompt = _filled(request.prompt_token_ids, workload, context)
        yield replace(request, prompt_token_ids=prompt)


def _filled(prompt: tuple[int, ...], workload: Workload, context: int) -> tuple[int, ...]:
    """The prompt behind others of the workload, `context` tokens in all."""
    missing = context - len(prompt)
    if missing <= 0:
        return prompt
    others = itertools.chain.from_iterable(itertools.cycle(workload.prompts()))
    return (*itertools.islice(others, missing), *prompt)
