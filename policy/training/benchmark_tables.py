"""What the runs of a benchmark say: a cell per scenario and contender, and a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envs.served import Served

from ..contract import NONE
from .benchmark import BEST_FIXED, BEST_SINGLE_FIXED, Results
from .bootstrap import SpeedRatio, speed_ratio
from .contenders import ORACLE


@dataclass(frozen=True)
class BenchmarkCell:
    """A contender in a scenario.

    Attributes:
        scenario: Its name.
        contender: Its name.
        tok_per_s: Output tokens per second of busy engine time.
        over_none: Speed over no speculation.
        over_best_fixed: Speed over the scenario's best fixed setting.
        over_single_fixed: Speed over the best single fixed setting of all scenarios.
        fraction_of_oracle: `over_none` over that of the greedy oracle, whose drafters are paid
            where they draft (`if_it_wins`); NaN where no oracle served.
        regret_s: Seconds behind the best fixed setting in hindsight, on the same requests;
            negative ahead of it.
        time_to_first_token_ms: Median and 99th percentile.
        time_per_output_token_ms: Median and 99th percentile.
        acceptance_rate: Accepted share of the draft tokens; NaN without drafts.
        decision_share: Time of decisions over engine time; on traces, the time that a decision
            really took over the replayed engine's.
    """

    scenario: str
    contender: str
    tok_per_s: float
    over_none: SpeedRatio
    over_best_fixed: SpeedRatio
    over_single_fixed: SpeedRatio
    fraction_of_oracle: float
    regret_s: float
    time_to_first_token_ms: tuple[float, float]
    time_per_output_token_ms: tuple[float, float]
    acceptance_rate: float
    decision_share: float


@dataclass(frozen=True)
class Summary:
    """A contender over all scenarios.

    Attributes:
        contender: Its name.
        over_none: Geometric mean of its speeds over no speculation.
        worst_over_none: The smallest of them, and
        worst_scenario: where.
        over_best_fixed: Geometric mean of its speeds over each scenario's best fixed setting.
        over_single_fixed: Geometric mean of its speeds over the best single fixed setting.
        verdicts: Scenarios in which it is ahead, tied and behind, by whom it is set against.
    """

    contender: str
    over_none: float
    worst_over_none: float
    worst_scenario: str
    over_best_fixed: float
    over_single_fixed: float
    verdicts: Mapping[str, Counter[str]]


def cells_of(results: Results, hindsight: Sequence[str], seed: int) -> list[BenchmarkCell]:
    """Every contender in every scenario.

    Args:
        results: The runs; `none`, `best_fixed` and `best_single_fixed` must be among the
            contenders.
        hindsight: Fixed settings; in each scenario the fastest is the best in hindsight.
        seed: Of the intervals.
    """
    cells = []
    for scenario in results.scenarios:
        fewest_s = min(_seconds(results.runs[scenario, name]) for name in hindsight)
        none, best, single = (
            results.work(scenario, name) for name in (NONE, BEST_FIXED, BEST_SINGLE_FIXED)
        )
        speeds = {name: results.tok_per_s(scenario, name) for name in results.contenders}
        for contender in results.contenders:
            runs, work = results.runs[scenario, contender], results.work(scenario, contender)
            cells.append(
                BenchmarkCell(
                    scenario,
                    contender,
                    speeds[contender],
                    speed_ratio(work, none, seed),
                    speed_ratio(work, best, seed),
                    speed_ratio(work, single, seed),
                    speeds[contender] / speeds.get(ORACLE, math.nan),
                    _seconds(runs) - fewest_s,
                    _percentiles_ms([r.time_to_first_token_s for s in runs for r in s.requests]),
                    _percentiles_ms([r.time_per_output_token_s for s in runs for r in s.requests]),
                    _acceptance_rate(runs),
                    sum(run.decision_s for run in runs) / _seconds(runs),
                )
            )
    return cells


def summarise(cells: Sequence[BenchmarkCell]) -> list[Summary]:
    """Every contender over all scenarios."""
    summaries = []
    for contender in dict.fromkeys(cell.contender for cell in cells):
        own = [cell for cell in cells if cell.contender == contender]
        worst = min(own, key=lambda cell: cell.over_none.ratio)
        over = {
            NONE: [cell.over_none for cell in own],
            BEST_FIXED: [cell.over_best_fixed for cell in own],
            BEST_SINGLE_FIXED: [cell.over_single_fixed for cell in own],
        }
        means = {
            rival: _geometric_mean([ratio.ratio for ratio in ratios])
            for rival, ratios in over.items()
        }
        summaries.append(
            Summary(
                contender,
                means[NONE],
                worst.over_none.ratio,
                worst.scenario,
                means[BEST_FIXED],
                means[BEST_SINGLE_FIXED],
                {
                    rival: Counter(ratio.verdict for ratio in ratios)
                    for rival, ratios in over.items()
                },
            )
        )
    return summaries


def acceptance_per_pos(results: Results, contender: str) -> dict[str, list[float]]:
    """Accepted share of the draft tokens at each position, by drafter, over all its runs."""
    drafted: dict[str, np.ndarray] = {}
    accepted: dict[str, np.ndarray] = {}
    for (_, name), runs in results.runs.items():
        for run in runs if name == contender else ():
            for totals, counts in (
                (drafted, run.num_draft_tokens_per_pos),
                (accepted, run.num_accepted_tokens_per_pos),
            ):
                for drafter, per_pos in counts.items():
                    totals[drafter] = _added(totals.get(drafter, np.zeros(0, np.int64)), per_pos)
    return {drafter: (accepted[drafter] / drafted[drafter]).tolist() for drafter in drafted}


def _added(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of counts, the shorter ones continued by zeros."""
    total = np.zeros(max(len(one), len(other)), np.int64)
    total[: len(one)] += one
    total[: len(other)] += other
    return total


def _seconds(runs: Sequence[Served]) -> float:
    return sum(run.busy_s for run in runs)


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    if np.isnan(seconds).all():
        return math.nan, math.nan
    median, high = np.nanpercentile(seconds, [50, 99]) * 1e3
    return float(median), float(high)


def _acceptance_rate(runs: Sequence[Served]) -> float:
    drafted = sum(sum(run.num_draft_tokens.values()) for run in runs)
    accepted = sum(sum(run.num_accepted_tokens.values()) for run in runs)
    return accepted / drafted if drafted else math.nan


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))
