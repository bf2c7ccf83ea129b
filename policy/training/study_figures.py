"""Pictures of a study as lines, bars and boxes: each drafter has its own marker and dashes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from envs.stage_clock import STAGES

from ..contract import NONE
from .figures import blank_figure
from .study_acceptance import AcceptedStretch, curve
from .study_live import UNCOVERED, StageShare
from .study_speedups import COMBINED, FIXED, OPTIMUM, ORACLE_LENGTH, POLICY, Speedups

_DASHES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP"
_HUES = ("Blues", "Oranges", "Greens", "Purples")
_BELOW = "outside lower center"
_STAGE_LOOKS = {  # colour, hatch: told apart in grey
    "verification": ("#f0b46a", ""),
    "drafting": ("#12355b", ""),
    "sampling": ("#ffffff", "xxxx"),
    "deciding": ("#8fbfa8", "////"),
    "overhead": ("#c9c9c9", "...."),
    UNCOVERED: ("#000000", ""),
}
_LOAD_LABEL = "requests in flight"


def draw_chains(path: Path, rows: Speedups, chains: Sequence[int], title: str) -> None:
    """Speed of fixed settings against the load: a panel for each data set, darker for longer.

    Args:
        path: The PNG.
        rows: Of one source.
        chains: Draft lengths to show.
        title: Heading.
    """
    fixed = rows.where(setting=FIXED)
    drafters = Speedups(row for row in fixed if row.num_speculative_tokens).values("drafter")
    figure, panels = _panels(fixed.values("data_set"))
    for data_set, axes in panels:
        for index, drafter in enumerate(drafters):
            own = fixed.where(data_set=data_set, drafter=drafter)
            lengths = [n for n in own.values("num_speculative_tokens") if n in chains]
            for rank, length in enumerate(lengths):
                axes.plot(
                    *_line(own.where(num_speculative_tokens=length)),
                    color=colormaps[_HUES[index % 4]](0.4 + 0.55 * (rank + 1) / len(lengths)),
                    linestyle=_DASHES[index % 4],
                    marker=_MARKERS[index % 6],
                    markersize=3 + 1.3 * rank,
                    label=f"{drafter}, {length} token{'s' * (length > 1)}",
                )
        if undrafted := fixed.where(data_set=data_set, drafter=NONE):
            look = {"color": "#8a8a8a", "linestyle": ":", "marker": "x"}
            axes.plot(*_line(undrafted), **look, label="hook without drafts")
        _finish_load_axes(axes, fixed.values("num_running_reqs"))
    _save(figure, path, title, "speed over no speculation\n(ratio of tokens per second)")


def _line(rows: Speedups) -> tuple[list[int], list[float]]:
    """Loads and speedups."""
    return [row.num_running_reqs for row in rows], [row.speedup for row in rows]


def draw_oracles(path: Path, rows: Speedups, policy: Speedups, title: str) -> None:
    """Best fixed lengths, oracles and the policy against the load, a panel for each data set.

    Args:
        path: The PNG.
        rows: On traces, of all requests.
        policy: The policy's, and the best fixed settings of the same held-out requests; may be
            empty.
        title: Heading.
    """
    figure, panels = _panels(rows.values("data_set"))
    for data_set, axes in panels:
        for index, (label, line) in enumerate(_oracle_lines(rows.where(data_set=data_set))):
            axes.plot(
                *zip(*line, strict=True),
                label=label,
                color=("#12355b", "#d1730f", "#12355b", "#d1730f", "#2a8a57", "#7fbf9f")[index % 6],
                linestyle=("-", "-", ":", ":", "--", "-.")[index % 6],
                marker=_MARKERS[index % 6],
                markersize=4.5,
            )
        for row in rows.where(data_set=data_set, setting=OPTIMUM):
            axes.plot([1], [row.speedup], "k*", markersize=10, label="optimum at 1 request")
        own = policy.where(data_set=data_set, setting=POLICY)
        axes.plot(
            *_line(own),
            color="black",
            marker="x",
            linewidth=2,
            label="shipped policy (held-out)" if own else "",
        )
        _finish_load_axes(axes, rows.values("num_running_reqs"))
    _save(figure, path, title, "speed over no speculation\n(ratio of tokens per second)")


def _oracle_lines(rows: Speedups) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    loads = rows.values("num_running_reqs")
    drafters = rows.where(setting=ORACLE_LENGTH).values("drafter")
    for drafter in drafters:
        yield (
            f"best fixed {drafter}",
            [
                (n, rows.best(setting=FIXED, drafter=drafter, num_running_reqs=n).speedup)
                for n in loads
            ],
        )
    for setting, name, label in [
        *((ORACLE_LENGTH, drafter, f"oracle length, {drafter}") for drafter in drafters),
        (COMBINED, "if_it_wins", "oracle combination, winner pays"),
        (COMBINED, "both_draft", "oracle combination, both draft"),
    ]:
        if line := rows.where(setting=setting, drafter=name):
            yield label, [(row.num_running_reqs, row.speedup) for row in line]


def draw_curves(path: Path, rows: Sequence[AcceptedStretch], title: str) -> None:
    """Tokens per step along the output: a panel for each data set, a line for each drafter."""
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    figure, panels = _panels(list(dict.fromkeys(row.data_set for row in rows)))
    for data_set, axes in panels:
        for index, drafter in enumerate(drafters):
            axes.plot(
                *curve(rows, data_set, drafter),
                color=colormaps[_HUES[index % 4]](0.8),
                linestyle=_DASHES[index % 4],
                marker=_MARKERS[index % 6],
                markersize=3.5,
                label=drafter,
            )
        axes.set_xlabel("position in the output (tokens)")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=1)
    _save(figure, path, title, "tokens per step\n(accepted and bonus)")


def draw_boxes(path: Path, means: Mapping[tuple[str, str], np.ndarray], title: str) -> None:
    """Requests' mean tokens per step by data set and drafter: box, median, 5th and 95th percentile.

    Args:
        path: The PNG.
        means: Result of `request_means`.
        title: Heading.
    """
    figure = blank_figure(520)
    axes = figure.subplots()
    data_sets = sorted({kind for kind, _ in means})
    drafters = list(dict.fromkeys(drafter for _, drafter in means))
    width = 0.7 / len(drafters)
    for index, drafter in enumerate(drafters):
        at = np.arange(len(data_sets)) + (index - (len(drafters) - 1) / 2) * width
        boxes = axes.boxplot(
            [means[kind, drafter] for kind in data_sets],
            positions=at,
            widths=0.85 * width,
            whis=(5, 95),
            showfliers=False,
            patch_artist=True,
            medianprops={"color": "black", "linewidth": 1.6},
            label=drafter,
        )
        for box in boxes["boxes"]:
            box.set(
                facecolor=colormaps[_HUES[index % 4]](0.45), hatch=("", "////", "....")[index % 3]
            )
    axes.set_xticks(range(len(data_sets)), data_sets)
    axes.set_xlabel("data set")
    axes.grid(axis="y", alpha=0.3)
    _label(figure)
    _save(
        figure, path, title, "mean tokens per step of a request\n(whiskers: 5th to 95th percentile)"
    )


def draw_stages(path: Path, rows: Sequence[StageShare], title: str) -> None:
    """Shares of the step time as stacked bars: a panel for each load, a bar for each setting."""
    loads = list(dict.fromkeys(row.num_running_reqs for row in rows))
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = blank_figure(420 + 22 * len(settings))
    panels = figure.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    for axes, load in zip(panels, loads, strict=True):
        shares = {
            (row.setting, row.stage): row.share for row in rows if row.num_running_reqs == load
        }
        left = np.zeros(len(settings))
        for stage in (
            "verification",
            *(name for name in STAGES if name != "verification"),
            UNCOVERED,
        ):
            color, hatch = _STAGE_LOOKS[stage]
            widths = [100 * max(shares.get((setting, stage), 0), 0) for setting in settings]
            bars = axes.barh(
                settings,
                widths,
                left=left,
                color=color,
                hatch=hatch,
                edgecolor="#555555",
                linewidth=0.4,
                label=stage,
                height=0.75,
            )
            if stage == "verification":
                axes.bar_label(
                    bars, [f"{width:.0f}" for width in widths], label_type="center", fontsize=8
                )
            left += widths
        axes.set_title(f"{load} in flight", fontsize=10)
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the step time (%)")
    panels[0].invert_yaxis()
    panels[0].set_ylabel("setting (drafter:draft tokens)")
    figure.suptitle(title, fontweight="bold")
    _label(figure)
    figure.savefig(path)


def _panels(names: Sequence[Any]) -> tuple[Figure, list[tuple[Any, Any]]]:
    """A figure with a titled panel for each name, at most three in a row."""
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = -(-len(names) // columns)
    figure = blank_figure(150 + 310 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=False).ravel()
    for name, panel in itertools.zip_longest(names, axes):
        if name is None:
            panel.set_visible(False)
        else:
            panel.set_title(name, fontsize=11)
            panel.spines[["top", "right"]].set_visible(False)
    return figure, list(zip(names, axes, strict=False))


def _finish_load_axes(axes: Any, loads: Sequence[int]) -> None:
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(_LOAD_LABEL)
    axes.grid(axis="y", alpha=0.3)


def _save(figure: Figure, path: Path, title: str, y_label: str) -> None:
    figure.suptitle(title, fontweight="bold")
    figure.supylabel(y_label, fontsize=11)
    if not figure.legends:
        _label(figure)
    figure.savefig(path)


def _label(figure: Figure) -> None:
    """One legend of all panels, below them."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if label
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc=_BELOW,
        ncols=min(len(handles), 4),
        frameon=False,
        handlelength=3.5,
    )
