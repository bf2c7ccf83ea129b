"""Pictures of a benchmark: speedups by scenario, and a time line of a changing load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from envs.served import Served

from .benchmark_tables import BenchmarkCell
from .figures import DPI, WIDTH_PX

_MARKERS = "os^Dv<>Pp*hX"
_COLORS = ("#12355b", "#d1730f", "#2a8a57", "#a4508b", "#6f9fd0", "#7a5c3e")


def draw_speedups(
    path: Path, cells: Sequence[BenchmarkCell], contenders: Sequence[str], title: str
) -> None:
    """Speedup over no speculation with its interval, scenario by scenario.

    Args:
        path: The PNG.
        cells: Of `cells_of`.
        contenders: Those shown.
        title: Heading.
    """
    figure = _figure(520)
    axes = figure.subplots()
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    width = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        own = [cell for cell in cells if cell.contender == contender]
        at = [scenarios.index(cell.scenario) + (index + 0.5) * width - 0.4 for cell in own]
        ratios = np.array([cell.over_none.ratio for cell in own])
        below = ratios - [cell.over_none.low for cell in own]
        above = [cell.over_none.high for cell in own] - ratios
        axes.errorbar(
            at,
            ratios,
            yerr=np.maximum([below, above], 0),
            fmt=_MARKERS[index % len(_MARKERS)],
            color=_COLORS[index % len(_COLORS)],
            label=contender,
            capsize=2,
            markersize=5,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(scenarios)), scenarios)
    axes.set_ylabel("tokens per second over no speculation")
    axes.set_title(title, fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4, fontsize=8)
    figure.savefig(path)


def draw_timeline(path: Path, served: Served, drafters: Sequence[str], title: str) -> None:
    """Requests, tokens per second, and beneath them the drafter and length chosen.

    Args:
        path: The PNG.
        served: A run.
        drafters: Names of the contract's drafters.
        title: Heading.
    """
    figure = _figure(640)
    load, speed, choice = figure.subplots(3, 1, sharex=True)
    steps = served.steps
    load.step(steps["end_s"], steps["num_running_reqs"], color=_COLORS[0], where="pre")
    load.set_ylabel("running requests")
    load.set_title(title, fontweight="bold")
    bins = np.linspace(0, steps["end_s"][-1], 60)
    tokens, _ = np.histogram(steps["end_s"], bins, weights=steps["num_tokens"])
    speed.stairs(tokens / np.diff(bins), bins, color=_COLORS[0])
    speed.set_ylabel("tokens per second")
    for index, drafter in enumerate(drafters):
        of_it = steps[steps["drafter"] == index]
        choice.scatter(
            of_it["end_s"],
            of_it["num_draft_tokens"],
            s=14,
            marker=_MARKERS[index],
            color=_COLORS[index],
            label=drafter,
            alpha=0.6,
        )
    choice.set_ylabel("draft tokens per request")
    choice.set_xlabel("engine time, seconds")
    choice.legend(ncols=len(drafters), fontsize=8)
    figure.savefig(path)


def _figure(height_px: int) -> Figure:
    figure = Figure((WIDTH_PX / DPI, height_px / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
