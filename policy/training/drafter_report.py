"""A report of the drafters: a page, its pictures, and the figures as tidy tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.confidence import reliability

from ..errors import ConfigError
from .benchmark_page import aligned
from .drafter_measures import (
    UNKNOWN,
    Confidence,
    DrafterMeasures,
    DrafterMeasuresConfig,
    MatchLength,
    Position,
    StepCost,
)
from .figures import DPI, blank_figure
from .study_data import ALL
from .study_files import write_tidy
from .study_page import Section, as_html, as_markdown

_TITLE = "Drafters"
_SHOWN = 4
"""Draft positions in the tables; the files hold all."""
_MARKERS = "osD^vP"


@dataclass(frozen=True)
class _PositionRow:
    drafter: str
    data_set: str
    draft_position: int
    num_drafts: int
    offered: float
    survival: float
    conditional: float
    conditional_low: float
    conditional_high: float


@dataclass(frozen=True)
class _ConfidenceRow:
    drafter: str
    draft_position: int
    num_drafts: int
    raw_auc: float
    raw_calibration_error: float
    calibrated_auc: float
    calibration_error: float


def prepare_folder(config: DrafterMeasuresConfig) -> None:
    """Make the report's folder before anything is measured.

    Raises:
        ConfigError: If it cannot be made.
    """
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Cannot write to {config.output_dir} ({error.strerror}); name another output_dir."
        ) from error


def write_drafter_report(config: DrafterMeasuresConfig, measures: DrafterMeasures) -> str:
    """Write the report.

    Args:
        config: Says where, and what was measured.
        measures: The figures.

    Returns:
        The main tables as text, and where the report lies.
    """
    folder = Path(config.output_dir)
    acceptance, confidence = folder / "acceptance.png", folder / "reliability.png"
    _draw_acceptance(acceptance, measures.positions)
    _draw_reliability(confidence, measures.confidences)
    sections = _sections(measures, acceptance, confidence)
    (folder / "report.md").write_text(as_markdown(_TITLE, sections), encoding="utf-8")
    (folder / "report.html").write_text(as_html(_TITLE, sections), encoding="utf-8")
    write_tidy(folder, "positions", [_position_row(row) for row in measures.positions])
    write_tidy(folder, "confidences", [_confidence_row(row) for row in measures.confidences])
    write_tidy(folder, "match-lengths", measures.match_lengths)
    write_tidy(folder, "step-costs", measures.step_costs)
    shown = [
        f"{section.heading}\n{aligned(table)}" for section in sections for table in section.tables
    ]
    return "\n\n".join([*shown, f"Report: {folder / 'report.html'}"])


def _sections(
    measures: DrafterMeasures, acceptance_png: Path, reliability_png: Path
) -> list[Section]:
    return [
        Section(
            "Acceptance by position in the draft",
            [
                "Held-out requests; in brackets 95 % intervals over requests. `offered`: output "
                "positions at which there is a draft so long, of all. `given those before`: drafts "
                "whose token here is accepted, of those whose earlier tokens were.",
            ],
            [_position_table(measures.positions)],
            [acceptance_png],
        ),
        Section(
            "Confidence",
            [
                "How well acceptance of a token is foretold, given that those before it were "
                "accepted, on held-out requests. `raw` is the drafter's own figure: conditional "
                "survival, or the match length. `calibrated` is an online logistic regression for "
                "each drafter and position that has learnt from all earlier requests. AUC: 0.5 "
                "tells nothing, 1 everything; error: mean gap between foretold and seen "
                "acceptance.",
            ],
            [_confidence_table(measures.confidences)],
            [reliability_png],
        ),
        Section(
            "Acceptance by match length",
            ["Every draft of a token drafter, by the tokens of the match behind it."],
            [_match_length_table(measures.match_lengths)],
        ),
        Section(
            "Cost of a step",
            [
                "Steps in which every request has a draft of this many tokens, in steps without "
                "drafts at the same load, by the cost model. What a step emits must grow by more "
                "for the draft to pay.",
            ],
            [_cost_table(measures.step_costs)],
        ),
    ]


def _position_table(rows: Sequence[Position]) -> list[list[str]]:
    header = ["drafter", "requests", "token", "offered", "all up to here", "given those before"]
    return [header] + [
        [
            row.drafter,
            row.data_set,
            str(row.draft_position),
            *map(str, (row.offered, row.survival, row.conditional)),
        ]
        for row in rows
        if row.draft_position <= _SHOWN and not math.isnan(row.conditional.value)
    ]


def _confidence_table(rows: Sequence[Confidence]) -> list[list[str]]:
    header = [
        "drafter",
        "token",
        "drafts",
        "raw AUC",
        "raw error",
        "calibrated AUC",
        "calibrated error",
    ]
    return [header] + [
        [
            row.drafter,
            str(row.draft_position),
            f"{len(row.forecasts.is_accepted):,}",
            *(_number(value, 3) for value in (row.raw_auc, row.raw_error, row.auc, row.error)),
        ]
        for row in rows
        if row.draft_position <= _SHOWN
    ]


def _match_length_table(rows: Sequence[MatchLength]) -> list[list[str]]:
    header = ["drafter", "match", "drafts", "first token accepted", "tokens accepted"]
    return [header] + [
        [
            row.drafter,
            str(row.match_length),
            f"{row.num_drafts:,}",
            f"{row.first_accepted:.2f}",
            f"{row.mean_accepted_tokens:.2f}",
        ]
        for row in rows
    ]


def _cost_table(rows: Sequence[StepCost]) -> list[list[str]]:
    loads = list(dict.fromkeys(row.concurrency for row in rows))
    table = [["drafter", "tokens", *map(str, loads)]]
    for drafter, length in dict.fromkeys((row.drafter, row.num_draft_tokens) for row in rows):
        own = [row for row in rows if (row.drafter, row.num_draft_tokens) == (drafter, length)]
        table.append([drafter, str(length), *(f"{row.cost:.2f}" for row in own)])
    return table


def _number(value: float, digits: int) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.{digits}f}"


def _position_row(row: Position) -> _PositionRow:
    conditional = row.conditional
    return _PositionRow(
        row.drafter,
        row.data_set,
        row.draft_position,
        row.num_drafts,
        row.offered.value,
        row.survival.value,
        conditional.value,
        conditional.low,
        conditional.high,
    )


def _confidence_row(row: Confidence) -> _ConfidenceRow:
    return _ConfidenceRow(
        row.drafter,
        row.draft_position,
        len(row.forecasts.is_accepted),
        row.raw_auc,
        row.raw_error,
        row.auc,
        row.error,
    )


def _draw_acceptance(path: Path, rows: Sequence[Position]) -> None:
    """Conditional acceptance along the draft, a panel for each drafter, a line for each kind."""
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    figure = blank_figure(460)
    panels = figure.subplots(1, len(drafters), squeeze=False, sharey=True)[0]
    for drafter, axes in zip(drafters, panels, strict=True):
        kinds = dict.fromkeys(row.data_set for row in rows)
        for index, kind in enumerate(kinds):
            own = [
                row
                for row in rows
                if (row.drafter, row.data_set) == (drafter, kind)
                and not math.isnan(row.conditional.value)
            ]
            values = [row.conditional.value for row in own]
            axes.errorbar(
                [row.draft_position + 0.04 * index for row in own],
                values,
                yerr=[
                    [max(0.0, row.conditional.value - row.conditional.low) for row in own],
                    [max(0.0, row.conditional.high - row.conditional.value) for row in own],
                ],
                label=kind,
                marker=_MARKERS[index % len(_MARKERS)],
                linewidth=2.5 if kind == ALL else 1,
                color="black" if kind == ALL else None,
                capsize=2,
                markersize=4,
            )
        axes.set_title(drafter)
        axes.set_xlabel("token of the draft")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accepted, given those before")
    panels[-1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=DPI)


def _draw_reliability(path: Path, rows: Iterable[Confidence]) -> None:
    """Foretold against seen acceptance of the first token, raw and calibrated."""
    first = [row for row in rows if row.draft_position == 1]
    figure = blank_figure(460)
    panels: Any = figure.subplots(1, max(1, len(first)), squeeze=False, sharey=True)[0]
    for row, axes in zip(first, panels, strict=False):
        axes.plot([0, 1], [0, 1], color="#8a8a8a", linewidth=1, linestyle=":")
        lines = [("calibrated", row.forecasts.calibrated, "#12355b", "o")]
        if not math.isnan(row.raw_error):
            lines.append(("raw", row.forecasts.raw, "#d1730f", "s"))
        for label, probabilities, color, marker in lines:
            foretold, seen, _ = reliability(probabilities, row.forecasts.is_accepted)
            axes.plot(foretold, seen, label=label, color=color, marker=marker)
        axes.set_title(f"{row.drafter}, first token")
        axes.set_xlabel("foretold acceptance")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seen acceptance")
    figure.savefig(path, dpi=DPI)
