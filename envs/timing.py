"""Timing live steps over a grid of loads, drafters, draft lengths and contexts.

A file is one parquet table, one row per step between two decisions:

| column | type | meaning |
|---|---|---|
| `cell` | int32 | load, action and context |
| `visit` | int32 | one stretch of steps in a cell; the machine's speed differs between visits |
| `load` | int32 | requests in flight |
| `num_running_reqs` | int32 | requests in the step |
| `num_engine_steps`, …, `num_draft_context_tokens` | int64 | the step's shape, see `StepShape` |
| `step_time_s` | double | measured seconds |
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from policy.contract import MODEL_DRAFTERS, Contract
from policy.errors import ConfigError, TraceError

from .cost_model import FEATURES
from .vllm_engine import VllmEngine
from .workload import ClosedLoop, Episode, Workload, WorkloadRequest


@dataclass(frozen=True)
class TimingConfig:
    """The grid.

    Attributes:
        loads: Requests in flight.
        token_lengths: Draft lengths of token drafters.
        model_lengths: Draft lengths of the model drafter.
        contexts: Tokens to which prompts are filled up; 0 leaves them as they are.
        steps_per_cell: Steps that are timed in a cell and repeat.
        repeats: Times that every cell is visited, in another order each time.
        prompts_per_kind: Prompts in use, few enough to stay in the prefix cache.
    """

    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    token_lengths: tuple[int, ...] = (2, 8)
    model_lengths: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (0, 512)
    steps_per_cell: int = 12
    repeats: int = 3
    prompts_per_kind: int = 4

    def __post_init__(self) -> None:
        for name in ("loads", "token_lengths", "model_lengths", "contexts"):
            values, least = getattr(self, name), 0 if name == "contexts" else 1
            if not values or min(values) < least:
                raise ConfigError(
                    f"timing.{name} is {list(values)}; list whole numbers of {least} or more."
                )
        for name in ("steps_per_cell", "repeats", "prompts_per_kind"):
            if getattr(self, name) < 1:
                raise ConfigError(f"timing.{name} is {getattr(self, name)}; make it 1 or more.")

    def actions(self, contract: Contract) -> list[tuple[int, int]]:
        """No speculation, and every drafter at every length of the grid."""
        actions = {(0, 0)}
        for index, drafter in enumerate(contract.drafters[1:], start=1):
            lengths = self.model_lengths if drafter in MODEL_DRAFTERS else self.token_lengths
            actions |= {contract.canonical_action((index, length)) for length in lengths}
        return sorted(actions)


@dataclass(frozen=True)
class Timings:
    """Timed steps, one entry each.

    Attributes:
        cell: Load, action and context, int32 `[steps]`.
        visit: One stretch of steps in a cell, int32 `[steps]`.
        load: Requests in flight, int32 `[steps]`.
        num_running_reqs: Requests in the step, int32 `[steps]`.
        features: Work in the order of `FEATURES`, float64 `[steps, FEATURES]`.
        step_time_s: Measured seconds, float64 `[steps]`.
    """

    cell: np.ndarray
    visit: np.ndarray
    load: np.ndarray
    num_running_reqs: np.ndarray
    features: np.ndarray
    step_time_s: np.ndarray

    def __len__(self) -> int:
        return len(self.cell)

    def select(self, steps: np.ndarray) -> Timings:
        """Some of the steps."""
        return Timings(**{name: values[steps] for name, values in vars(self).items()})


def run_timings(engine: VllmEngine, workload: Workload, config: TimingConfig, seed: int) -> Timings:
    """Time the grid on a live engine whose decisions are left to the caller.

    Args:
        engine: The engine.
        workload: Prompts.
        config: The grid.
        seed: Order of the cells.
    """
    grid = list(itertools.product(config.loads, config.actions(engine.contract), config.contexts))
    engine.read_prompts(
        [_filled(prompt, workload, c) for c in config.contexts for prompt in workload.prompts()]
    )
    visits = [cell for _ in range(config.repeats) for cell in range(len(grid))]
    random.Random(seed).shuffle(visits)
    rows: list[tuple[int, int, int, int, list[float], float]] = []
    for visit, cell in enumerate(tqdm(visits, desc="timing", unit="cell")):
        load, action, context = grid[cell]
        episode = _episode(workload, seed + visit, load, context)
        engine.reset(episode)
        for _ in range(config.steps_per_cell):
            step = engine.step(np.array([action]))
            work = step.shape.features().tolist()
            rows.append((cell, visit, load, step.shape.num_running_reqs, work, step.step_time_s))
    engine.abort_all()
    cells, numbers, loads, running, features, seconds = zip(*rows, strict=True)
    return Timings(
        np.array(cells, np.int32),
        np.array(numbers, np.int32),
        np.array(loads, np.int32),
        np.array(running, np.int32),
        np.array(features, np.float64),
        np.array(seconds, np.float64),
    )


def write_timings(timings: Timings, path: Path) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "cell": timings.cell,
            "visit": timings.visit,
            "load": timings.load,
            "num_running_reqs": timings.num_running_reqs,
            **{
                name: timings.features[:, index].astype(np.int64)
                for index, name in enumerate(FEATURES)
            },
            "step_time_s": timings.step_time_s,
        }
    )
    unfinished = path.with_name(path.name + ".partial")
    pq.write_table(table, unfinished, compression="zstd")
    unfinished.replace(path)


def read_timings(path: Path) -> Timings:
    """Read what `write_timings` wrote.

    Raises:
        TraceError: If the file is missing, cut off, or of other columns.
    """
    try:
        table = pq.read_table(path)
        return Timings(
            table["cell"].to_numpy(),
            table["visit"].to_numpy(),
            table["load"].to_numpy(),
            table["num_running_reqs"].to_numpy(),
            np.stack([table[name].to_numpy() for name in FEATURES], axis=1).astype(np.float64),
            table["step_time_s"].to_numpy(),
        )
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise TraceError(f"{path} is no whole file of timings; remove it and time anew.") from error


def _episode(workload: Workload, seed: int, load: int, context: int) -> Episode:
    """An endless stream of a workload's requests at a load, prompts filled up to a context."""
    episode = workload.episode(seed, load)
    return Episode(load, _fill(episode.requests, workload, context), ClosedLoop(load))


def _fill(
    requests: Iterator[WorkloadRequest], workload: Workload, context: int
) -> Iterator[WorkloadRequest]:
    for request in requests:
        yield WorkloadRequest(
            request.request_id,
            _filled(request.prompt_token_ids, workload, context),
            request.max_tokens,
            request.temperature,
            request.kind,
        )


def _filled(prompt: tuple[int, ...], workload: Workload, context: int) -> tuple[int, ...]:
    """The prompt behind others of the workload, `context` tokens in all."""
    missing = context - len(prompt)
    if missing <= 0:
        return prompt
    others = itertools.chain.from_iterable(itertools.cycle(workload.prompts()))
    return (*itertools.islice(others, missing), *prompt)
