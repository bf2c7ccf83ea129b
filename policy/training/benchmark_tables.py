"""What the runs of a benchmark say: a cell per scenario and contender, and a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from envs.served import Served

from ..contract import NONE
from .benchmark import BEST_FIXED, Results
from .bootstrap import SpeedRatio, speed_ratio


@dataclass(frozen=True)
class BenchmarkCell:
    """A contender in a scenario.

    Attributes:
        scenario: Its name.
        contender: Its name.
        tok_per_s: Output tokens per second of busy engine time.
        over_none: Speed over no speculation.
        over_best_fixed: Speed over the scenario's best fixed setting.
        regret_s: Seconds behind the best fixed setting in hindsight, on the same requests.
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
        over_single_fixed: Geometric mean of its speeds over the best single fixed setting.
        verdicts: Scenarios ahead of, tied with and behind the scenario's best fixed setting.
    """

    contender: str
    over_none: float
    worst_over_none: float
    worst_scenario: str
    over_single_fixed: float
    verdicts: Counter[str]


def cells_of(results: Results, hindsight: Sequence[str], seed: int) -> list[BenchmarkCell]:
    """Every contender in every scenario.

    Args:
        results: The runs; `none` and `best_fixed` must be among the contenders.
        hindsight: Contenders whose fastest is the best in hindsight.
        seed: Of the intervals.
    """
    cells = []
    for scenario in results.scenarios:
        fewest_s = min(_seconds(results.runs[scenario, name]) for name in hindsight)
        none, best = (results.work(scenario, name) for name in (NONE, BEST_FIXED))
        for contender in results.contenders:
            runs, work = results.runs[scenario, contender], results.work(scenario, contender)
            cells.append(
                BenchmarkCell(
                    scenario,
                    contender,
                    results.tok_per_s(scenario, contender),
                    speed_ratio(work, none, seed),
                    speed_ratio(work, best, seed),
                    _seconds(runs) - fewest_s,
                    _percentiles_ms([r.time_to_first_token_s for s in runs for r in s.requests]),
                    _percentiles_ms([r.time_per_output_token_s for s in runs for r in s.requests]),
                    _acceptance_rate(runs),
                    sum(run.decision_s for run in runs) / _seconds(runs),
                )
            )
    return cells


def summarise(cells: Sequence[BenchmarkCell], single_fixed: str | None) -> list[Summary]:
    """Every contender over all scenarios.

    Args:
        cells: Of `cells_of`.
        single_fixed: Contender that is the best single fixed setting; None if it was not
            measured.
    """
    speeds = {(cell.scenario, cell.contender): cell.tok_per_s for cell in cells}
    summaries = []
    for contender in dict.fromkeys(cell.contender for cell in cells):
        own = [cell for cell in cells if cell.contender == contender]
        worst = min(own, key=lambda cell: cell.over_none.ratio)
        over_single = math.nan
        if single_fixed is not None:
            over_single = _geometric_mean(
                [cell.tok_per_s / speeds[cell.scenario, single_fixed] for cell in own]
            )
        summaries.append(
            Summary(
                contender,
                _geometric_mean([cell.over_none.ratio for cell in own]),
                worst.over_none.ratio,
                worst.scenario,
                over_single,
                Counter(cell.over_best_fixed.verdict for cell in own),
            )
        )
    return summaries


def rank_agreement(
    traced: Sequence[BenchmarkCell], lived: Sequence[BenchmarkCell]
) -> dict[str, float]:
    """Spearman's rank correlation of the contenders' speedups on traces and live, by scenario."""
    on_traces = {(cell.scenario, cell.contender): cell.over_none.ratio for cell in traced}
    agreement = {}
    for scenario in dict.fromkeys(cell.scenario for cell in lived):
        pairs = [
            (on_traces[cell.scenario, cell.contender], cell.over_none.ratio)
            for cell in lived
            if cell.scenario == scenario and (scenario, cell.contender) in on_traces
        ]
        if len(pairs) > 2:
            agreement[scenario] = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    return agreement


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
