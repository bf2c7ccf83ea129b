"""The report of a comparison: `report.json` for programs, `report.md` and `report.png` to read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..contract import NONE
from .comparison import Cell, Comparison
from .figures import draw_report
from .statistics import Ratio


@dataclass(frozen=True)
class ReportPaths:
    """Where the report lies.

    Attributes:
        json: Every figure, hardware, versions and command.
        markdown: The same to read.
        figure: The picture the markdown shows.
    """

    json: Path
    markdown: Path
    figure: Path


def write_report(
    folder: Path,
    cells: Sequence[Cell],
    comparisons: Sequence[Comparison],
    *,
    title: str,
    hardware: Mapping[str, Any],
    command: str,
    notes: Sequence[str] = (),
    details: Mapping[str, str] | None = None,
    action_counts: Mapping[int, Mapping[str, int]] | None = None,
    baseline: str = NONE,
) -> ReportPaths:
    """Write the three files, replacing those of an earlier report.

    Args:
        folder: Where to; created if missing.
        cells: Result of `compare`.
        comparisons: Results of `compare_settings`.
        title: Heading of the report and the picture.
        hardware: Result of `describe_hardware`.
        command: The command that measured this.
        notes: Sentences a reader must know, such as how prompts were split.
        details: What a setting's name leaves open, such as its draft length, by setting.
        action_counts: Result of `count_actions` for the policy, by concurrency.
        baseline: Setting that `Cell.speedup` refers to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(folder / "report.json", folder / "report.md", folder / "report.png")
    stored = {
        "title": title,
        "baseline": baseline,
        "cells": [asdict(cell) for cell in cells],
        "comparisons": [_describe_comparison(comparison) for comparison in comparisons],
        "settings": dict(details or {}),
        "policy_actions": action_counts or {},
        "hardware": {name: value for name, value in hardware.items() if name != "versions"},
        "versions": hardware.get("versions", {}),
        "command": command,
        "notes": list(notes),
    }
    text = json.dumps(without_nan(stored), indent=2, allow_nan=False)
    paths.json.write_text(text + "\n", encoding="utf-8")
    draw_report(paths.figure, cells, action_counts or {}, title=title, baseline=baseline)
    sections = [
        f"# {title}",
        f"![Speedup against concurrency, and the actions of the policy]({paths.figure.name})",
        f"Output tokens per second, and **speedup** over `{baseline}` with its 95 % interval over "
        "paired repeats, by concurrent requests. An interval that contains 1 is a tie.",
        _markdown_table(cells),
        _bullets(f"`{setting}`: {detail}" for setting, detail in (details or {}).items()),
        "## Comparisons" if comparisons else "",
        *(_comparison_text(comparison) for comparison in comparisons),
        "## Conditions",
        _bullets(notes),
        f"Hardware: {_list_values(stored['hardware'])}",
        f"Versions: {_list_values(stored['versions'])}",
        f"```sh\n{command}\n```",
    ]
    paths.markdown.write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")
    return paths


def format_table(cells: Sequence[Cell], baseline: str = NONE) -> str:
    """The cells as aligned plain text, with a line of verdicts per setting."""
    header = ("concurrency", "setting", "tok/s", "speedup", "95 % interval", "accepted", "length")
    rows = [header]
    for cell in cells:
        rate, length = cell.draft_acceptance_rate, cell.mean_acceptance_length
        rows.append(
            (
                str(cell.concurrency),
                cell.setting,
                f"{cell.tok_per_s:.1f}",
                f"{cell.speedup:.2f}",
                _interval(cell),
                "-" if rate is None else f"{rate:.0%}",
                "-" if length is None else f"{length:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for index, row in enumerate(rows):
        if index and row[0] != rows[index - 1][0]:
            lines.append("")
        lines.append(
            "  ".join(
                text.ljust(width) if column == 1 else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
    lines += ["", f"Against {baseline}:"]
    for setting in _settings(cells):
        if setting != baseline:
            own = [cell for cell in cells if cell.setting == setting]
            lines.append(f"  {setting.ljust(widths[1])}  {_count_verdicts(own)}")
    return "\n".join(lines)


def _settings(cells: Iterable[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.setting for cell in cells))


def _interval(result: Cell | Ratio, digits: int = 2) -> str:
    if math.isnan(result.ci_low):
        return "[one repeat]"
    return f"[{result.ci_low:.{digits}f}, {result.ci_high:.{digits}f}]"


def _count_verdicts(results: Iterable[Cell | Ratio]) -> str:
    """Such as `2 ahead, 1 tied, 0 behind`."""
    counts = Counter(result.verdict for result in results)
    text = f"{counts['ahead']} ahead, {counts['tie']} tied, {counts['behind']} behind"
    return text + (f", {counts['undecided']} undecided" if counts["undecided"] else "")


def _markdown_table(cells: Sequence[Cell]) -> str:
    """Rows are settings, columns concurrencies."""
    concurrencies = sorted({cell.concurrency for cell in cells})
    entries = {
        (cell.setting, cell.concurrency): f"{cell.tok_per_s:.1f}, **{cell.speedup:.2f}** "
        + _interval(cell)
        for cell in cells
    }
    lines = [
        "| setting | " + " | ".join(map(str, concurrencies)) + " |",
        "|---|" + "---|" * len(concurrencies),
    ]
    for setting in _settings(cells):
        row = [entries.get((setting, at), "not measured") for at in concurrencies]
        lines.append(f"| `{setting}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _comparison_text(comparison: Comparison) -> str:
    """A comparison in plain words."""
    head = (
        f"**{comparison.setting}** against **{comparison.against}**: "
        f"{_count_verdicts(comparison.ratios)}; overall {_ratio_text(comparison.overall)}."
    )
    lines = []
    for ratio in comparison.ratios:
        other = "" if ratio.against == comparison.against else f", against `{ratio.against}`"
        lines.append(f"{ratio.concurrency} concurrent{other}: {_ratio_text(ratio)}")
    return f"{head}\n\n{_bullets(lines)}"


def _ratio_text(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f} {_interval(ratio, 3)}, {ratio.verdict}"


def _describe_comparison(comparison: Comparison) -> dict[str, Any]:
    """A JSON-ready description with the verdicts."""
    return asdict(comparison) | {
        "ratios": [asdict(ratio) | {"verdict": ratio.verdict} for ratio in comparison.ratios],
        "overall": asdict(comparison.overall) | {"verdict": comparison.overall.verdict},
    }


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _list_values(values: Mapping[str, Any]) -> str:
    """Such as `cpu AMD EPYC, gpu none`."""
    return ", ".join(
        f"{name} {'none' if value is None else value}" for name, value in values.items()
    )


def without_nan(value: Any) -> Any:
    """The value with null where a float is not finite, which JSON cannot say."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
