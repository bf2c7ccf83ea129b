"""The report's picture: speedup against concurrency, and the actions the policy took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..contract import NONE
from .comparison import Cell

WIDTH_PX, HEIGHT_PX, DPI = 1200, 560, 100
MAX_ACTIONS = 9
"""Actions shown by length; the rarest beyond them are merged per drafter."""

_POLICY_LINE = ("#12355b", "o", "-")
_LINES = (  # colour, marker, line: told apart in grey by the last two
    ("#8a8a8a", "x", ":"),
    ("#d1730f", "s", "--"),
    ("#2a8a57", "^", "-."),
    ("#6f9fd0", "D", (0, (1, 1))),
    ("#a4508b", "v", (0, (5, 1, 1, 1, 1, 1))),
    ("#7a5c3e", "P", (0, (8, 3))),
)
_NONE_COLOR = "#f2f2f2"
_HUES = ("Blues", "Oranges", "Greens", "Purples")
_HATCHES = ("", "///", "...", "xxx")


def draw_report(
    path: Path,
    cells: Sequence[Cell],
    action_counts: Mapping[int, Mapping[str, int]],
    *,
    title: str,
    baseline: str = NONE,
) -> None:
    """Write the picture as a PNG of `WIDTH_PX` by `HEIGHT_PX` pixels.

    Args:
        path: The PNG.
        cells: Every setting at every concurrency; the baseline is the line at 1.
        action_counts: Engine steps per action of the policy, by concurrency; without any the
            second panel is left out.
        title: Heading.
        baseline: Setting that `Cell.speedup` refers to.
    """
    figure = blank_figure(HEIGHT_PX)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    if action_counts:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_actions(right, action_counts)
    else:
        left = figure.subplots()
    _draw_speedups(left, cells, baseline)
    figure.savefig(path, dpi=DPI)


def blank_figure(height_px: int) -> Figure:
    """A figure of the report's width that makes room for everything in it."""
    figure = Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_speedups(axes: Any, cells: Sequence[Cell], baseline: str) -> None:
    """One line per setting with the 95 % interval at each concurrency."""
    settings = [name for name in dict.fromkeys(cell.setting for cell in cells) if name != baseline]
    lines = iter(_LINES * (1 + len(settings) // len(_LINES)))
    axes.axhline(1, color="black", linewidth=1.2, label=f"{baseline} (baseline)")
    for index, setting in enumerate(settings):
        is_policy = setting == "policy"
        color, marker, line = _POLICY_LINE if is_policy else next(lines)
        own = [cell for cell in cells if cell.setting == setting]
        shift = 2 ** (0.07 * (index - (len(settings) - 1) / 2))  # keeps the intervals apart
        axes.errorbar(
            [cell.concurrency * shift for cell in own],
            [cell.speedup for cell in own],
            yerr=_error_bars(own),
            label=setting,
            color=color,
            marker=marker,
            linestyle=line,
            linewidth=2.6 if is_policy else 1.6,
            markersize=8 if is_policy else 6.5,
            elinewidth=1.2,
            capsize=3,
            zorder=4 if is_policy else 3,
        )
    _limit_to_points(axes, cells)
    axes.set_xscale("log", base=2)
    ticks = sorted({cell.concurrency for cell in cells})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    axes.set_xlabel("concurrent requests", fontsize=11)
    over = "no speculation" if baseline == NONE else baseline
    axes.set_ylabel(f"speedup over {over}\n(ratio of tokens per second)", fontsize=11)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Speed (bars: 95 % interval over paired repeats)", fontsize=11)
    if settings:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, handlelength=4
        )


def _error_bars(cells: Sequence[Cell]) -> np.ndarray:
    """Lengths of the bars below and above each point, `[2, cells]`; NaN draws none."""
    lengths = [[cell.speedup - cell.ci_low, cell.ci_high - cell.speedup] for cell in cells]
    return np.maximum(np.array(lengths), 0).T


def _limit_to_points(axes: Any, cells: Sequence[Cell]) -> None:
    """Show every interval, unless a wild one would squeeze the points together."""
    speedups = np.array([1.0, *(cell.speedup for cell in cells)])
    room = max(0.1, 0.6 * np.ptp(speedups))
    low = np.nanmin([*speedups, *(cell.ci_low for cell in cells)])
    high = np.nanmax([*speedups, *(cell.ci_high for cell in cells)])
    axes.set_ylim(
        max(0, low - 0.03, speedups.min() - room), min(high + 0.03, speedups.max() + room)
    )


def _draw_actions(axes: Any, action_counts: Mapping[int, Mapping[str, int]]) -> None:
    """Stacked shares of the actions, a bar per concurrency: hue by drafter, shade by length."""
    counts = _merge_rare(action_counts)
    actions = sorted({action for taken in counts.values() for action in taken}, key=_order)
    looks = _looks(actions)
    tops = dict.fromkeys(counts, 0.0)
    for action in actions:
        shares = [100 * taken[action] / (sum(taken.values()) or 1) for taken in counts.values()]
        color, hatch = looks[action]
        bars = axes.bar(
            range(len(counts)),
            shares,
            bottom=list(tops.values()),
            width=0.72,
            color=color,
            hatch=hatch,
            edgecolor="#b5b5b5" if color == _NONE_COLOR else "white",
            label=NONE if action.startswith(f"{NONE}:") else action.replace(":", " "),
        )
        names = [f"{share:.0f}" if share >= 6 else "" for share in shares]
        axes.bar_label(
            bars,
            names,
            label_type="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
        )
        tops = {at: top + share for (at, top), share in zip(tops.items(), shares, strict=True)}
    axes.set_xticks(range(len(counts)), [str(at) for at in counts])
    axes.set_ylim(0, 100)
    axes.set_xlabel("concurrent requests", fontsize=11)
    axes.set_ylabel("share of engine steps (%)", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Actions of the policy (drafter, draft tokens)", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _merge_rare(action_counts: Mapping[int, Mapping[str, int]]) -> dict[int, Counter[str]]:
    """Counts in which all but the most frequent actions are named `drafter:other`."""
    shares: dict[str, float] = {}
    for taken in action_counts.values():
        for action, count in taken.items():
            share = count / (sum(taken.values()) or 1)
            shares[action] = shares.get(action, 0) + share
    kept = sorted(shares, key=lambda action: shares[action], reverse=True)[:MAX_ACTIONS]
    merged: dict[int, Counter[str]] = {}
    for at in sorted(action_counts):
        merged[at] = Counter()
        for action, count in action_counts[at].items():
            merged[at][action if action in kept else f"{action.split(':')[0]}:other"] += count
    return merged


def _order(action: str) -> tuple[bool, str, float]:
    """`none` first, then by drafter and rising length."""
    drafter, _, length = action.partition(":")
    return drafter != NONE, drafter, float(length) if length.isdigit() else float("inf")


def _looks(actions: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Colour and hatch by action."""
    drafters = list(dict.fromkeys(action.partition(":")[0] for action in actions))
    looks: dict[str, tuple[Any, str]] = {}
    for drafter in drafters:
        own = [action for action in actions if action.partition(":")[0] == drafter]
        for index, action in enumerate(own):
            if drafter == NONE:
                looks[action] = (_NONE_COLOR, "")
                continue
            number = (drafters.index(drafter) - (NONE in drafters)) % len(_HUES)
            shade = 0.4 + 0.45 * (index / (len(own) - 1) if len(own) > 1 else 0.5)
            looks[action] = (colormaps[_HUES[number]](shade), _HATCHES[number])
    return looks
