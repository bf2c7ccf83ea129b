"""Headroom: what speculation could bring on some traces, in speedups over no speculation.

The best fixed settings and the oracles, by requests in flight; and, at one request in flight, how
much the choices behind such figures matter. Best fixed lengths are chosen with hindsight, per
number of requests in flight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from policy.contract import MAX_TOKEN_DRAFT_LENGTH
from policy.cost_model import CostModel, read_cost_model
from policy.errors import ConfigError, TraceError

from .closed_loop import seconds_alone, tokens_per_s
from .draft_options import Options, fixed_options
from .oracles import Pricing, exact_options, optimal_s
from .rule_speed import rule_tokens_per_s
from .traces import Traces, concatenate, read_traces

_SHORT_LENGTH = 5
"""A usual longest draft, to set beside the configured one."""

_PUBLISHED = {
    "instructcoder": {
        "fixed ngram, 5": "2.1",
        "ngram oracle": "2.65-2.75",
        "combined, as_published": "4.9-5.1",
        "combined, if_it_wins": "4.5",
        "combined, both_draft": "4.0",
    }
}
"""Figures for Llama-3.1-8B on an H100, one request in flight, by data set."""


@dataclass(frozen=True)
class HeadroomConfig:
    """What to measure.

    Attributes:
        traces: A trace file, or a folder of them; each file has its own tables.
        cost_model: A cost model's JSON file.
        concurrency: Requests in flight.
        max_length: Longest draft in tokens, if so long ones were recorded.
        first_position: Output position of a request's first step: 0 counts a step for the first
            token, as the published figures do; 1 does not, since it comes with the prompt.
        min_tokens_per_slot: Tokens that each of the requests in flight stands for at least; fewer
            leave the late parts of long outputs out.
        seed: Seed of the order in which requests come.
        rules: Rules to measure beside the oracles, by name, each as the plugin's `baseline` takes
            it with an own `granularity`; they are served at the loads only.
        split: `train` or `eval` requests only; null takes all.
        max_output_tokens: Requests with longer outputs are left out; null takes all.
        together: Whether there are tables of all files together, too.
    """

    traces: str | None
    cost_model: str
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    max_length: int = MAX_TOKEN_DRAFT_LENGTH
    first_position: int = 0
    min_tokens_per_slot: int = 2**17
    seed: int = 0
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    split: str | None = None
    max_output_tokens: int | None = None
    together: bool = False

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("TRACES is missing; give a trace file, or a folder of them.")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError("concurrency must name loads of 1 or more; correct it.")
        if not 1 <= self.max_length <= MAX_TOKEN_DRAFT_LENGTH:
            raise ConfigError(
                f"max_length is {self.max_length}; make it 1 to {MAX_TOKEN_DRAFT_LENGTH}."
            )
        if self.first_position not in (0, 1) or self.min_tokens_per_slot < 1:
            raise ConfigError(
                f"first_position {self.first_position} and min_tokens_per_slot "
                f"{self.min_tokens_per_slot} make no sense; use 0 or 1, and 1 or more."
            )
        if self.rules and self.first_position:
            raise ConfigError("Rules take a step for the first token; set first_position=0.")


@dataclass(frozen=True)
class Headroom:
    """The tables of one trace file; figures are speedups, as text.

    Attributes:
        name: Name of the file.
        by_load: Setting or oracle -> a figure for each number of requests in flight.
        by_choice: Choice -> setting or oracle -> its figure, at one request in flight.
    """

    name: str
    by_load: Mapping[str, Mapping[str, str]]
    by_choice: Mapping[str, Mapping[str, str]]

    def describe(self) -> str:
        """Both tables as Markdown."""
        loads = _table("requests in flight", self.by_load)
        choices = _table("at one request in flight", self.by_choice)
        return f"## {self.name}\n\n{loads}\n\n{choices}"


def measure_headroom(config: HeadroomConfig) -> tuple[Headroom, ...]:
    """Measure every trace file.

    Raises:
        TraceError: If there is none, or one is damaged or holds single tokens only.
        ConfigError: If the cost model cannot be read.
    """
    cost_model = read_cost_model(Path(config.cost_model).expanduser())
    source = Path(str(config.traces)).expanduser()
    paths = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not paths:
        raise TraceError(
            f"There is no .parquet file in {source}; collect or import traces, and name their "
            "folder."
        )
    files = {path: _selected(path, config) for path in paths}
    if config.together and len(files) > 1:
        files[Path("all files")] = concatenate([*files.values()])
    cells = [(path, load) for path in files for load in config.concurrency]
    by_load: dict[Path, dict[int, dict[str, str]]] = {path: {} for path in files}
    for path, load in tqdm(cells, desc="measuring", unit="cell", delay=2):
        by_load[path][load] = _at_load(files[path], cost_model, load, config)
    return tuple(
        Headroom(
            name=path.stem,
            by_load=_transposed({str(load): column for load, column in by_load[path].items()}),
            by_choice=_by_choice(traces, misaligned_requests(path), cost_model, config),
        )
        for path, traces in files.items()
    )


def _selected(path: Path, config: HeadroomConfig) -> Traces:
    """A file's requests, as far as they are asked for."""
    traces = read_traces(path)
    if config.split is not None:
        traces = traces.of_split(config.split)
    if config.max_output_tokens is not None:
        traces = traces.select(np.flatnonzero(traces.num_output_tokens <= config.max_output_tokens))
    if not traces.num_requests or traces.num_output_tokens.max() < 2:
        raise TraceError(f"{path} holds no output of two tokens; collect longer ones.")
    return traces


def _at_load(
    traces: Traces, cost_model: CostModel, load: int, config: HeadroomConfig
) -> dict[str, str]:
    """Setting or oracle -> its speedup, at one number of requests in flight."""

    def rate(options: Options) -> float:
        return tokens_per_s(
            traces,
            options,
            cost_model,
            load,
            first_position=config.first_position,
            min_tokens_per_slot=config.min_tokens_per_slot,
            seed=config.seed,
        )

    plain = rate(fixed_options(traces))
    figures = {}
    for drafter in traces.drafters:
        best, length = max(
            (rate(fixed_options(traces, drafter, length)), length)
            for length in range(1, _longest(traces, drafter, config.max_length) + 1)
        )
        figures[f"best fixed {drafter} (length)"] = f"{best / plain:.2f} ({length})"
    for name, options in _oracles(traces, config.max_length).items():
        figures[name] = f"{rate(options) / plain:.2f}"
    for name, section in config.rules.items():
        speed = rule_tokens_per_s(
            traces,
            section,
            cost_model,
            load,
            max_length=config.max_length,
            min_tokens_per_slot=config.min_tokens_per_slot,
            seed=config.seed,
        )
        figures[name] = f"{speed / plain:.2f}"
    return figures


def _longest(traces: Traces, drafter: str, max_length: int) -> int:
    return min(max_length, traces.header.max_lengths[drafter])


def _oracles(traces: Traces, max_length: int) -> dict[str, Options]:
    """The oracles of each drafter and, in every pricing, of all of them."""
    drafters = tuple(traces.drafters)
    oracles = {
        f"{drafter} oracle": exact_options(traces, (drafter,), max_length) for drafter in drafters
    }
    for pricing in get_args(Pricing) if len(drafters) > 1 else ():
        oracles[f"combined, {pricing}"] = exact_options(traces, drafters, max_length, pricing)
    return oracles


def _by_choice(
    traces: Traces, misaligned: frozenset[str], cost_model: CostModel, config: HeadroomConfig
) -> dict[str, dict[str, str]]:
    """The figures at one request in flight under each choice behind them."""
    length, first = config.max_length, config.first_position
    short = min(_SHORT_LENGTH, length)
    totals, means = _alone(traces, cost_model, length, first)
    choices = {f"total times, drafts up to {length}": totals, "mean of requests' speedups": means}
    aligned = [i for i, name in enumerate(traces.request_ids) if name not in misaligned]
    if 0 < len(aligned) < traces.num_requests:
        choices["total times of aligned requests"], _ = _alone(
            traces.select(aligned), cost_model, length, first
        )
    choices[f"first token {'without' if first == 0 else 'with'} a step"], _ = _alone(
        traces, cost_model, length, 1 - first
    )
    choices[f"drafts up to {short}"], _ = _alone(traces, cost_model, short, first)
    table = {
        choice: {name: f"{figure:.2f}" for name, figure in figures.items()}
        for choice, figures in choices.items()
    }
    if published := _PUBLISHED.get(traces.kinds[0]):
        table["published"] = {name: published.get(name, "") for name in totals}
    return table


def _alone(
    traces: Traces, cost_model: CostModel, max_length: int, first_position: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Speedups of total times, and means of the requests' speedups."""

    def seconds(options: Options) -> np.ndarray:
        return seconds_alone(traces, options, cost_model, first_position=first_position)

    plain = seconds(fixed_options(traces))
    times = {}
    for drafter in traces.drafters:
        length = _longest(traces, drafter, min(_SHORT_LENGTH, max_length))
        times[f"fixed {drafter}, {length}"] = seconds(fixed_options(traces, drafter, length))
    oracles = _oracles(traces, max_length)
    times |= {name: seconds(options) for name, options in oracles.items()}
    best = exact_options(traces, tuple(traces.drafters), max_length)
    times["optimum"] = optimal_s(traces, best, cost_model, first_position=first_position)
    served = plain > 0
    totals = {name: float(plain.sum() / time.sum()) for name, time in times.items()}
    means = {name: float((plain[served] / time[served]).mean()) for name, time in times.items()}
    return totals, means


def misaligned_requests(path: Path) -> frozenset[str]:
    """Requests that the import found misaligned; none where nothing was imported."""
    provenance = path.with_suffix(".json")
    if not provenance.exists():
        return frozenset()
    try:
        return frozenset(json.loads(provenance.read_text()).get("misaligned_request_ids", ()))
    except (OSError, ValueError) as error:
        raise TraceError(f"{provenance} is damaged; collect or import it again.") from error


def _transposed(columns: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    rows = next(iter(columns.values()))
    return {row: {name: column[row] for name, column in columns.items()} for row in rows}


def _table(corner: str, rows: Mapping[str, Mapping[str, str]]) -> str:
    """Rows of named cells as an aligned Markdown table."""
    header = [corner, *next(iter(rows.values()))]
    lines = [header, *([name, *cells.values()] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"
        for line in [lines[0], rule, *lines[1:]]
    )
