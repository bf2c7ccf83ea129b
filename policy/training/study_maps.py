"""Maps of a study. Their colours grow lighter all the way, so that they can be read in grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .figures import blank_figure
from .study_acceptance import NUM_BINS, AcceptedStretch
from .study_overlap import EDGES, Overlap, OverlapCell

_COLORS = "cividis"
MAX_REQUESTS = 60
"""Rows of a map: more could not be told apart."""


def draw_acceptance_map(path: Path, rows: Sequence[AcceptedStretch], title: str) -> None:
    """Tokens per step by request and position: drafters below each other, data sets in columns."""
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    most = float(np.percentile([row.tokens_per_step for row in rows], 97))
    _draw_maps(
        path,
        rows,
        [(drafter, None) for drafter in drafters],
        (1, most),
        f"tokens per step (lightest: {most:.0f} or more)",
        title,
    )


def draw_difference_map(
    path: Path, rows: Sequence[AcceptedStretch], first: str, second: str, title: str
) -> None:
    """How many tokens more a step brings with one drafter than with the other.

    Args:
        path: The PNG.
        rows: Result of `stretches`.
        first: Lighter where this drafter brings more,
        second: darker where this one does.
        title: Heading.
    """
    _draw_maps(
        path,
        rows,
        [(first, second)],
        (-4, 4),
        f"tokens per step, {first} less {second}\n(dark: {second} brings more, light: {first})",
        title,
    )


def _draw_maps(
    path: Path,
    rows: Sequence[AcceptedStretch],
    maps: Sequence[tuple[str, str | None]],
    limits: tuple[float, float],
    scale: str,
    title: str,
) -> None:
    """Maps below each other, each of a drafter or of what it brings more than another one."""
    data_sets = list(dict.fromkeys(row.data_set for row in rows))
    figure = blank_figure(170 + 300 * len(maps))
    grid = figure.subplots(len(maps), len(data_sets), squeeze=False)
    for column, data_set in enumerate(data_sets):
        own = [row for row in rows if row.data_set == data_set]
        grids, width = grids_of(own)
        for line, (drafter, other) in enumerate(maps):
            axes = grid[line, column]
            values = grids[drafter] if other is None else grids[drafter] - grids[other]
            name = drafter if other is None else f"{drafter} less {other}"
            image = axes.imshow(
                values,
                aspect="auto",
                interpolation="nearest",
                cmap=_COLORS,
                vmin=limits[0],
                vmax=limits[1],
                extent=(0, width * values.shape[1], len(values), 0),
            )
            axes.set_facecolor("white")
            axes.set_title(f"{data_set}: {name}", fontsize=10)
            axes.set_xlabel("output position (tokens)", fontsize=9)
            axes.tick_params(labelsize=8)
            if not column:
                axes.set_ylabel("requests, shortest output first")
    figure.colorbar(image, ax=grid, label=scale, shrink=0.8)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path)


def grids_of(rows: Sequence[AcceptedStretch]) -> tuple[dict[str, np.ndarray], int]:
    """Tokens per step by drafter, float64 `[requests, stretches]`, and the width of a stretch.

    At most `MAX_REQUESTS` requests, spread evenly over the lengths of their outputs; NaN beyond an
    output's end.
    """
    lengths: dict[str, int] = {}
    for row in rows:
        end = row.first_position + row.num_positions
        lengths[row.request_id] = max(lengths.get(row.request_id, 0), end)
    ordered = sorted(lengths, key=lambda name: lengths[name])
    kept = np.linspace(0, len(ordered) - 1, min(MAX_REQUESTS, len(ordered))).round().astype(int)
    place = {ordered[at]: index for index, at in enumerate(kept)}
    firsts = sorted({row.first_position for row in rows})
    width = firsts[1] - firsts[0] if len(firsts) > 1 else 1
    columns = min(firsts[-1] // width + 1, NUM_BINS)
    grids = {
        drafter: np.full((len(place), columns), np.nan)
        for drafter in dict.fromkeys(row.drafter for row in rows)
    }
    for row in rows:
        if (index := place.get(row.request_id)) is not None:
            grids[row.drafter][index, row.first_position // width] = row.tokens_per_step
    return grids, width


def draw_overlap(
    path: Path,
    rows: Sequence[Overlap],
    cells: Sequence[OverlapCell],
    model_drafter: str,
    title: str,
) -> None:
    """Overlap against the ratio of speeds: every request alone, and groups at every load.

    Args:
        path: The PNG.
        rows: Requests.
        cells: Groups.
        model_drafter: The drafter that n-gram is set against.
        title: Heading.
    """
    figure = blank_figure(560)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    ratio = f"speed of ngram over that of {model_drafter} (ratio)"
    for index, data_set in enumerate(dict.fromkeys(row.data_set for row in rows)):
        own = [row for row in rows if row.data_set == data_set]
        left.scatter(
            [row.bleu4 for row in own],
            [row.ratio_alone for row in own],
            s=16,
            marker="oxs^+D"[index % 6],
            linewidths=0.9,
            alpha=0.7,
            label=data_set,
        )
    left.axhline(1, color="black", linewidth=0.9)
    left.set_yscale("log", base=2)
    ticks = [tick for tick in (0.5, 0.7, 1, 1.4, 2, 2.8) if _within(rows, tick)]
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.set_xlabel("overlap of prompt and output (BLEU-4, 0 to 1)")
    left.set_ylabel(ratio)
    left.set_title("each request, served alone", fontsize=11)
    left.grid(alpha=0.3)
    left.legend(fontsize=9)
    _draw_cells(figure, right, cells, ratio)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path)


def _within(rows: Sequence[Overlap], tick: float) -> bool:
    ratios = [row.ratio_alone for row in rows]
    return 0.9 * min(ratios) <= tick <= 1.1 * max(ratios)


def _draw_cells(figure: Figure, axes: Any, cells: Sequence[OverlapCell], label: str) -> None:
    """Overlap by load; every cell carries its number, so that no colour need be read."""
    loads = sorted({cell.num_running_reqs for cell in cells})
    grid = np.full((len(loads), len(EDGES) - 1), np.nan)
    for cell in cells:
        grid[loads.index(cell.num_running_reqs), EDGES.index(cell.low)] = cell.ratio
    image = axes.imshow(
        np.log2(grid),
        cmap=_COLORS,
        vmin=-1,
        vmax=1,
        aspect="auto",
        origin="lower",
        extent=(0, 1, -0.5, len(loads) - 0.5),
    )
    for (line, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            axes.text(
                EDGES[column] + 0.05,
                line,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if value < 1 else "black",
                fontweight="bold" if value > 1 else "normal",
            )
    axes.set_xticks(EDGES)
    axes.set_yticks(range(len(loads)), map(str, loads))
    axes.set_xlabel("overlap of prompt and output (BLEU-4, 0 to 1)")
    axes.set_ylabel("requests in flight")
    axes.set_title("requests of similar overlap together (bold: ngram is faster)", fontsize=11)
    bar = figure.colorbar(image, ax=axes, label=label, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.ax.set_yticklabels(["0.5", "0.71", "1", "1.41", "2"])
