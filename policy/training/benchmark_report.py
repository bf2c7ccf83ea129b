"""The benchmark's report: `report.md`, one-file `report.html`, `report.json` and pictures."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact import load_policy
from ..contract import NONE
from .benchmark import BEST_FIXED, BEST_SINGLE_FIXED, BestFixed, Results, fixed_contenders
from .benchmark_config import BenchmarkConfig
from .benchmark_figures import draw_acceptance, draw_speedups, draw_timeline
from .benchmark_notes import benchmark_notes
from .benchmark_page import Table, aligned, markdown, one_page
from .benchmark_sections import acceptance_table, cell_tables, summary_tables
from .benchmark_tables import BenchmarkCell, Summary, acceptance_per_pos, cells_of, summarise
from .config import Resolved
from .contenders import ORACLE, Contender
from .hardware import describe_hardware
from .heat_map import draw_heat_map
from .report import without_nan

TIMELINE_SCENARIO = "steps"
_NUM_RULES_IN_COLOUR = 3


@dataclass(frozen=True)
class BenchmarkReport:
    """A written report.

    Attributes:
        tables: Headings and rows.
        pictures: The PNGs.
        summaries: Every contender over all scenarios, by where it served.
        text: Tables and notes for the terminal.
    """

    tables: list[Table]
    pictures: list[Path]
    summaries: dict[str, list[Summary]]
    text: str


@dataclass(frozen=True)
class _Part:
    """The runs on traces, or the live ones.

    Attributes:
        where: `traces` or `live`.
        results: The runs.
        cells: Of the runs.
        shown: Contenders in the tables.
    """

    where: str
    results: Results
    cells: list[BenchmarkCell]
    shown: list[str]


def write_benchmark_report(
    config: BenchmarkConfig,
    resolved: Resolved,
    best: BestFixed,
    traced: Results,
    lived: Results | None,
    observations: Mapping[str, np.ndarray],
) -> BenchmarkReport:
    """Write the report into the benchmark's folder, replacing an earlier one.

    Args:
        config: The benchmark.
        resolved: The same as plain containers.
        best: The best fixed settings, chosen on training requests.
        traced: Runs on traces.
        lived: Runs on live vLLM, if there are any.
        observations: What each policy observed on traces, float32 `[rows, fields]`.
    """
    folder = Path(config.output_dir)
    parts = [_part("traces", config, traced)]
    if lived is not None:
        parts.append(_part("live", config, lived))
    tables, pictures, summaries = [], [], {}
    stored: dict[str, Any] = {}
    for part in parts:
        summaries[part.where] = summarise(part.cells)
        main = _main_contenders(config, summaries[part.where])
        acceptance = _acceptance(config, part, main[-1])
        tables += summary_tables(part.where, part.shown, summaries[part.where])
        tables += cell_tables(part.where, part.shown, part.cells)
        if acceptance:
            tables.append(acceptance_table(part.where, acceptance))
        pictures += _draw(folder, config, part, main, acceptance)
        stored[part.where] = [asdict(cell) for cell in part.cells]
    for name, rows in observations.items():
        artifact = load_policy(Path(config.contenders[name]["path"]))
        pictures.append(folder / f"heat-map-{name}.png")
        draw_heat_map(
            pictures[-1], artifact, rows, f"What '{name}' chooses, all else at its median"
        )
    notes = benchmark_notes(config, best, traced, lived)
    hardware = describe_hardware()
    text = "\n\n".join(f"{heading}\n{aligned(rows)}" for heading, rows in tables)
    text += "\n\n" + "\n".join(notes) + f"\n\nReport: {folder / 'report.html'}"
    notes += ["Command: `" + shlex.join(sys.argv) + "`", "Machine: " + json.dumps(hardware)]
    stored |= {"notes": notes, "hardware": hardware, "config": resolved}
    (folder / "report.json").write_text(json.dumps(without_nan(stored), indent=1) + "\n")
    (folder / "report.md").write_text(markdown(tables, pictures, notes))
    (folder / "report.html").write_text(one_page(tables, pictures, notes))
    return BenchmarkReport(tables, pictures, summaries, text)


def _part(where: str, config: BenchmarkConfig, results: Results) -> _Part:
    """Cells of the runs; every fixed setting that served is a candidate in hindsight."""
    fixed = {one.name for one in fixed_contenders(config)} | {BEST_FIXED, BEST_SINGLE_FIXED}
    fixed |= {
        name for name, section in config.contenders.items() if Contender.of(name, section).is_fixed
    }
    served = results.contenders
    hindsight = [name for name in served if name in fixed]
    shown = [NONE, BEST_FIXED, BEST_SINGLE_FIXED]
    shown += [name for name in config.contenders if name in served and name != NONE]
    shown += [ORACLE] if ORACLE in served else []
    return _Part(where, results, cells_of(results, hindsight, config.seed), shown)


def _main_contenders(config: BenchmarkConfig, summaries: Sequence[Summary]) -> list[str]:
    """The best fixed settings, the fastest rules, and the policies, the first of them last."""
    over_none = {one.contender: one.over_none for one in summaries}
    policies = [name for name in config.policies if name in over_none]
    rules = [name for name in config.contenders if name in over_none]
    rules = [name for name in rules if name not in (NONE, *policies)]
    fastest = sorted(rules, key=lambda name: over_none[name])[-_NUM_RULES_IN_COLOUR:]
    return [BEST_FIXED, *fastest, *reversed(policies)]


def _acceptance(config: BenchmarkConfig, part: _Part, chosen_by: str) -> dict[str, list[float]]:
    """Accepted shares by position of every draft, where it was made, and of the drafts chosen."""
    longest = {one.name.split(":")[0]: one.name for one in fixed_contenders(config)}
    series = {}
    for name in [*longest.values(), chosen_by]:
        if name not in part.results.contenders:
            continue
        how = f"chosen by {name}" if name == chosen_by else f"every draft of {name}"
        for drafter, shares in acceptance_per_pos(part.results, name).items():
            series[f"{drafter}, {how}"] = shares
    return series


def _draw(
    folder: Path,
    config: BenchmarkConfig,
    part: _Part,
    main: Sequence[str],
    acceptance: Mapping[str, Sequence[float]],
) -> list[Path]:
    """The pictures of a part; the time line is the last main contender's."""
    where, results = part.where, part.results
    scenarios = {name: config.scenarios[name] for name in results.scenarios}
    loads = {
        name: load
        for name, scenario in sorted(scenarios.items(), key=lambda item: item[1].max_concurrency)
        if (load := scenario.constant_concurrency) is not None
    }
    named = set(part.shown) - {NONE, BEST_SINGLE_FIXED, ORACLE}
    paths = [folder / f"speedups-{where}.png"]
    cells = [cell for cell in part.cells if cell.contender in named]
    draw_speedups(paths[0], cells, loads, main, f"Speed over no speculation, {where}")
    name = main[-1]
    if (TIMELINE_SCENARIO, name) in results.runs:
        paths.append(folder / f"timeline-{where}.png")
        drafters = [NONE, *config.drafters.max_lengths]
        served = results.runs[TIMELINE_SCENARIO, name][0]
        draw_timeline(paths[-1], served, drafters, f"'{name}' under a changing load, {where}")
    if acceptance:
        paths.append(folder / f"acceptance-{where}.png")
        draw_acceptance(paths[-1], acceptance, f"Acceptance by position of the draft, {where}")
    return paths
