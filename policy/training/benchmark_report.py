"""The benchmark's report: `report.md`, one-file `report.html`, `report.json` and pictures."""

from __future__ import annotations

import base64
import html
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..contract import NONE
from .benchmark import BEST_FIXED, BestFixed, Results, fixed_contenders
from .benchmark_config import BenchmarkConfig
from .benchmark_figures import draw_speedups, draw_timeline
from .benchmark_tables import BenchmarkCell, Summary, cells_of, rank_agreement, summarise
from .config import Resolved
from .hardware import describe_hardware
from .report import without_nan

TIMELINE_SCENARIO = "steps"

Table = tuple[str, list[list[str]]]
"""A heading, and rows of which the first names the columns."""


def write_benchmark_report(
    folder: Path,
    config: BenchmarkConfig,
    resolved: Resolved,
    best: BestFixed,
    traced: Results,
    lived: Results | None,
) -> str:
    """Write the report, replacing an earlier one, and return its tables as text."""
    fixed = [contender.name for contender in fixed_contenders(config)]
    traced_cells = cells_of(traced, fixed, config.seed)
    shown = [NONE, BEST_FIXED, *(name for name in config.contenders if name != NONE)]
    tables = _tables("traces", traced_cells, shown, best.overall.name)
    pictures = [_speedups(folder, traced_cells, shown, "traces")]
    stored: dict[str, Any] = {"traces": [asdict(cell) for cell in traced_cells]}
    notes = [
        "Speed is output tokens per second of busy engine time; intervals are 95 %, by a paired "
        "bootstrap over requests and repeats; one that holds 1 is a tie.",
        "Best fixed settings, chosen on recorded training requests: "
        + ", ".join(f"{one.name} ({scenario})" for scenario, one in best.by_scenario.items())
        + f"; best single one: {best.overall.name}.",
    ]
    if lived is not None:
        lived_cells = cells_of(lived, lived.contenders, config.seed)
        names = [NONE, BEST_FIXED]
        names += [name for name in lived.contenders if name not in names]
        tables += _tables("live vLLM", lived_cells, names, None)
        pictures.append(_speedups(folder, lived_cells, names, "live vLLM"))
        agreement = rank_agreement(traced_cells, lived_cells)
        notes.append(
            "Rank correlation (Spearman) of the speedups on traces and live: "
            + ", ".join(f"{name} {value:.2f}" for name, value in agreement.items())
            + "."
        )
        stored |= {"live": [asdict(cell) for cell in lived_cells], "rank_agreement": agreement}
    pictures += _timelines(folder, config, traced, lived)
    hardware = describe_hardware()
    notes.append("Command: `" + shlex.join(sys.argv) + "`")
    notes.append("Machine: " + json.dumps(hardware))
    stored |= {"notes": notes, "hardware": hardware, "config": resolved}
    (folder / "report.json").write_text(json.dumps(without_nan(stored), indent=1) + "\n")
    (folder / "report.md").write_text(_markdown(tables, pictures, notes))
    (folder / "report.html").write_text(_html(tables, pictures, notes))
    text = "\n\n".join(f"{heading}\n{_aligned(rows)}" for heading, rows in tables)
    return f"{text}\n\n" + "\n".join(notes[1:-2]) + f"\n\nReport: {folder / 'report.html'}"


def _speedups(
    folder: Path, cells: Sequence[BenchmarkCell], shown: Sequence[str], where: str
) -> Path:
    path = folder / f"speedups-{where.split()[0]}.png"
    draw_speedups(path, cells, [name for name in shown if name != NONE], f"Speed on {where}")
    return path


def _timelines(
    folder: Path, config: BenchmarkConfig, traced: Results, lived: Results | None
) -> list[Path]:
    """The changing load under the first policy, or else the first rule, live if measured."""
    by_path = [name for name, section in config.contenders.items() if "path" in section]
    name = next(iter([*by_path, *(name for name in config.contenders if name != NONE)]), None)
    drafters = [NONE, *config.drafters.max_lengths]
    paths = []
    for results, where in ((traced, "traces"), (lived, "live vLLM")):
        if results is not None and name and (TIMELINE_SCENARIO, name) in results.runs:
            path = folder / f"timeline-{where.split()[0]}.png"
            served = results.runs[TIMELINE_SCENARIO, name][0]
            draw_timeline(path, served, drafters, f"{name} under a changing load, {where}")
            paths.append(path)
    return paths


def _tables(
    where: str, cells: Sequence[BenchmarkCell], shown: Sequence[str], single_fixed: str | None
) -> list[Table]:
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    by_name = {(cell.scenario, cell.contender): cell for cell in cells}

    def table(heading: str, entry: Any) -> Table:
        rows = [[name, *(entry(by_name[at, name]) for at in scenarios)] for name in shown]
        return f"{heading}, {where}", [["", *scenarios], *rows]

    return [
        table("Speed over no speculation", lambda cell: str(cell.over_none)),
        table("Speed over the best fixed setting", lambda cell: str(cell.over_best_fixed)),
        table("Output tokens per second", lambda cell: f"{cell.tok_per_s:.1f}"),
        table("Regret against the best fixed in hindsight, s", lambda cell: f"{cell.regret_s:.1f}"),
        table(
            "Time per output token p50 / p99, ms",
            lambda cell: "{:.0f} / {:.0f}".format(*cell.time_per_output_token_ms),
        ),
        table(
            "Time to first token p50 / p99, ms",
            lambda cell: "{:.0f} / {:.0f}".format(*cell.time_to_first_token_ms),
        ),
        table("Accepted share of draft tokens", lambda cell: _percent(cell.acceptance_rate)),
        table("Decisions' share of engine time", lambda cell: f"{cell.decision_share:.1%}"),
        (
            f"Over all scenarios, {where}",
            [
                [
                    "",
                    "over none",
                    "worst scenario",
                    "over best single fixed",
                    "ahead, tied, behind",
                ],
                *(
                    _summary(one)
                    for one in summarise(cells, single_fixed)
                    if one.contender in shown
                ),
            ],
        ),
    ]


def _summary(summary: Summary) -> list[str]:
    verdicts = summary.verdicts
    single = summary.over_single_fixed
    return [
        summary.contender,
        f"{summary.over_none:.3f}",
        f"{summary.worst_over_none:.3f} ({summary.worst_scenario})",
        "-" if math.isnan(single) else f"{single:.3f}",
        f"{verdicts['ahead']}, {verdicts['tie']}, {verdicts['behind']}",
    ]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _markdown(tables: Sequence[Table], pictures: Sequence[Path], notes: Sequence[str]) -> str:
    parts = ["# Benchmark", *(f"![{path.stem}]({path.name})" for path in pictures)]
    for heading, rows in tables:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|---" * len(rows[0]) + "|")
        parts += [f"## {heading}", "\n".join(lines)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def _html(tables: Sequence[Table], pictures: Sequence[Path], notes: Sequence[str]) -> str:
    """Everything in one file that needs no network."""
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Benchmark</title>",
        "<style>body{font:14px sans-serif;margin:2em;max-width:1200px}table{border-collapse:"
        "collapse}td,th{border:1px solid #ccc;padding:3px 8px;text-align:right}"
        "td:first-child{text-align:left}img{max-width:100%}</style><h1>Benchmark</h1>",
    ]
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f"<img alt='{path.stem}' src='data:image/png;base64,{data}'>")
    for heading, rows in tables:
        parts.append(f"<h2>{html.escape(heading)}</h2><table>")
        for index, row in enumerate(rows):
            tag = "td" if index else "th"
            cells = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</table>")
    parts.append("<h2>Notes</h2><ul>")
    parts += [f"<li>{html.escape(note)}</li>" for note in notes]
    return "\n".join(parts) + "</ul>\n"
