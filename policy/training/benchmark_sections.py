"""The tables of a benchmark's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..contract import NONE
from .benchmark import BEST_FIXED, BEST_SINGLE_FIXED
from .benchmark_page import Table
from .benchmark_tables import BenchmarkCell, Summary


def summary_tables(where: str, shown: Sequence[str], summaries: Sequence[Summary]) -> list[Table]:
    """Every contender over all scenarios: means, the worst cell, cells won, tied and lost.

    Args:
        where: `traces` or `live`.
        shown: Contenders, in order.
        summaries: Of `summarise`.
    """
    by_name = {one.contender: one for one in summaries}
    own = [by_name[name] for name in shown]
    rivals = {
        NONE: "no speculation",
        BEST_FIXED: "best fixed of the cell",
        BEST_SINGLE_FIXED: "best single fixed",
    }
    speeds = [
        [
            one.contender,
            f"{one.over_none:.3f}",
            f"{one.worst_over_none:.3f} ({one.worst_scenario})",
            f"{one.over_best_fixed:.3f}",
            f"{one.over_single_fixed:.3f}",
        ]
        for one in own
    ]
    verdicts = [
        [
            one.contender,
            *("{ahead}, {tie}, {behind}".format_map(one.verdicts[rival]) for rival in rivals),
        ]
        for one in own
    ]
    heads = ["contender", "over none", "worst cell", "over best fixed", "over best single fixed"]
    return [
        (f"Geometric means of the speed over all scenarios, {where}", [heads, *speeds]),
        (
            f"Cells won, tied, lost, {where}",
            [["contender", *(f"against {rival}" for rival in rivals.values())], *verdicts],
        ),
    ]


def cell_tables(where: str, shown: Sequence[str], cells: Sequence[BenchmarkCell]) -> list[Table]:
    """A table for each measure, contenders by scenarios.

    Args:
        where: `traces` or `live`.
        shown: Contenders, in order.
        cells: Of `cells_of`.
    """
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    by_name = {(cell.scenario, cell.contender): cell for cell in cells}
    entries: dict[str, Callable[[BenchmarkCell], str]] = {
        "Speed over no speculation": lambda cell: str(cell.over_none),
        "Speed over the best fixed setting of the cell": lambda cell: str(cell.over_best_fixed),
        "Speed over the best single fixed setting": lambda cell: str(cell.over_single_fixed),
        "Fraction of the greedy oracle's speed, pricing if_it_wins": lambda cell: _percent(
            cell.fraction_of_oracle
        ),
        "Output tokens per second": lambda cell: f"{cell.tok_per_s:.1f}",
        "Regret against the best fixed setting in hindsight, s": lambda cell: (
            f"{cell.regret_s:.1f}"
        ),
        "Time per output token p50 / p99, ms": lambda cell: "{:.0f} / {:.0f}".format(
            *cell.time_per_output_token_ms
        ),
        "Time to first token p50 / p99, ms": lambda cell: "{:.0f} / {:.0f}".format(
            *cell.time_to_first_token_ms
        ),
        "Accepted share of draft tokens": lambda cell: _percent(cell.acceptance_rate),
        "Decisions' share of engine time": lambda cell: f"{cell.decision_share:.1%}",
    }
    if all(math.isnan(cell.fraction_of_oracle) for cell in cells):
        del entries["Fraction of the greedy oracle's speed, pricing if_it_wins"]
    return [
        (
            f"{heading}, {where}",
            [
                ["contender", *scenarios],
                *([name, *(entry(by_name[at, name]) for at in scenarios)] for name in shown),
            ],
        )
        for heading, entry in entries.items()
    ]


def acceptance_table(where: str, shares: Mapping[str, Sequence[float]]) -> Table:
    """Accepted share of the draft tokens at each position, a row for each series."""
    longest = max(map(len, shares.values()))
    rows = [
        [name, *map(_percent, values), *[""] * (longest - len(values))]
        for name, values in shares.items()
    ]
    heads = ["draft", *map(str, range(1, longest + 1))]
    return f"Accepted share of draft tokens by position in the draft, {where}", [heads, *rows]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"
