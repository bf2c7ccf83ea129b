"""Pictures of a benchmark: speedups, a time line of a changing load, acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from envs.served import Served

from .benchmark_tables import BenchmarkCell
from .figures import blank_figure

_MARKERS = "osD^v<>PpX"
_COLORS = ("#12355b", "#d1730f", "#2a8a57", "#a4508b", "#6f9fd0", "#7a5c3e", "#c23b3b", "#5b5b9e")
_GREY = "#c4c4c4"
_BELOW = "outside lower center"
"""Legends lie outside the axes, where they cover no point."""


def draw_speedups(
    path: Path,
    cells: Sequence[BenchmarkCell],
    concurrency: Mapping[str, int],
    main: Sequence[str],
    title: str,
) -> None:
    """Speed over no speculation: against the batch, and in scenarios whose load changes.

    Args:
        path: The PNG.
        cells: Of `cells_of`.
        concurrency: Requests in flight of the scenarios at a constant load, by name.
        main: Contenders in colour, with their intervals; the others are thin and grey.
        title: Heading.
    """
    figure = blank_figure(620)
    at_load = [cell for cell in cells if cell.scenario in concurrency]
    changing = [cell for cell in cells if cell.scenario not in concurrency]
    panels = [part for part in (at_load, changing) if part]
    widths = (3, 2)[: len(panels)]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    for panel, part in zip(axes, panels, strict=True):
        if part is at_load:
            positions = {name: float(np.log2(load)) for name, load in concurrency.items()}
            labels = {name: str(load) for name, load in concurrency.items()}
            panel.set_xlabel("requests in flight")
        else:
            positions = {one.scenario: 0.0 for one in part}
            positions = {name: float(index) for index, name in enumerate(positions)}
            labels = {name: name for name in positions}
        _draw_speedups(panel, part, positions, main, is_line=part is at_load)
        shown = {cell.scenario: None for cell in part}
        panel.set_xticks([positions[name] for name in shown], [labels[name] for name in shown])
        panel.xaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("tokens per second over no speculation")
    figure.suptitle(title, fontweight="bold")
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc=_BELOW, ncols=3, frameon=False)
    figure.savefig(path)


def _draw_speedups(
    axes: Any,
    cells: Sequence[BenchmarkCell],
    positions: Mapping[str, float],
    main: Sequence[str],
    *,
    is_line: bool,
) -> None:
    others = [name for name in dict.fromkeys(one.contender for one in cells) if name not in main]
    for name in others:
        own = [cell for cell in cells if cell.contender == name]
        axes.plot(
            [positions[cell.scenario] for cell in own],
            [cell.over_none.ratio for cell in own],
            color=_GREY,
            linewidth=0.8 if is_line else 0,
            marker="_",
            label="other contenders",
            zorder=1,
        )
    for index, name in enumerate(main):
        own = [cell for cell in cells if cell.contender == name]
        spread = (0.4 if is_line else 0.7) / len(main)  # keeps the intervals apart
        shift = (index - (len(main) - 1) / 2) * spread
        ratios = [cell.over_none for cell in own]
        bars = [[one.ratio - one.low, one.high - one.ratio] for one in ratios]
        axes.errorbar(
            [positions[cell.scenario] + shift for cell in own],
            [one.ratio for one in ratios],
            yerr=np.maximum(np.reshape(bars, (-1, 2)).T, 0),
            color=_COLORS[index % len(_COLORS)],
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle="-" if is_line else "none",
            linewidth=1.4,
            markersize=5,
            elinewidth=0.9,
            capsize=1.5,
            label=name,
            zorder=3,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_timeline(path: Path, served: Served, drafters: Sequence[str], title: str) -> None:
    """Requests, tokens per second, and beneath them the drafters and lengths chosen.

    Args:
        path: The PNG.
        served: A run.
        drafters: Names of the contract's drafters.
        title: Heading.
    """
    figure = blank_figure(760)
    load, speed, share, length = figure.subplots(4, 1, sharex=True)
    steps = served.steps
    load.step(steps["end_s"], steps["num_running_reqs"], color=_COLORS[0], where="pre")
    load.set_ylabel("running\nrequests")
    bins = np.linspace(0, steps["end_s"][-1], 60)
    tokens, _ = np.histogram(steps["end_s"], bins, weights=steps["num_tokens"])
    speed.stairs(tokens / np.diff(bins), bins, color=_COLORS[0])
    speed.set_ylabel("tokens\nper second")
    num_steps, _ = np.histogram(steps["end_s"], bins)
    top = np.zeros(len(bins) - 1)
    for index, drafter in enumerate(drafters):
        of_it = steps[steps["drafter"] == index]
        color = _COLORS[index] if index else _GREY
        chosen, _ = np.histogram(of_it["end_s"], bins)
        height = 100 * chosen / np.maximum(num_steps, 1)
        share.bar(bins[:-1], height, np.diff(bins), top, align="edge", color=color, label=drafter)
        top += height
        if index:
            length.scatter(
                of_it["end_s"], of_it["num_draft_tokens"], s=9, color=color, alpha=0.5, linewidth=0
            )
    share.set_ylabel("steps with\neach drafter, %")
    length.set_ylabel("draft tokens\nper request")
    length.set_ylim(bottom=0)
    length.set_xlabel("engine time, seconds")
    figure.suptitle(title, fontweight="bold")
    figure.legend(
        *share.get_legend_handles_labels(), loc=_BELOW, ncols=len(drafters), frameon=False
    )
    figure.savefig(path)


def draw_acceptance(path: Path, shares: Mapping[str, Sequence[float]], title: str) -> None:
    """Accepted share of the draft tokens at each position of a draft.

    Args:
        path: The PNG.
        shares: By series, position after position.
        title: Heading.
    """
    figure = blank_figure(480)
    axes = figure.subplots()
    for index, (name, values) in enumerate(shares.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=_COLORS[index % len(_COLORS)],
            marker=_MARKERS[index % len(_MARKERS)],
            label=name,
        )
    axes.set_xticks(range(1, max(map(len, shares.values())) + 1))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted share")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontweight="bold")
    figure.legend(loc=_BELOW, ncols=2, frameon=False)
    figure.savefig(path)
