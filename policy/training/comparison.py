"""Which setting is faster: every one against the baseline, and any two against each other.

A speed ratio is total tokens per second over the other side's, at one concurrency, over repeats
that both sides served with the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .measurement import Measurement, MeasurementError, group_runs, pair_runs, tok_per_s
from .statistics import Ratio, Verdict, log_ratios, ratio_interval, total_ratio, verdict


@dataclass(frozen=True)
class Cell:
    """One setting at one concurrency against the baseline.

    Attributes:
        setting: Name of what was measured.
        concurrency: Requests in flight.
        tokens: Output tokens of all repeats.
        seconds: Time of all repeats.
        tok_per_s: Output tokens per second over all repeats.
        speedup: `tok_per_s` over the baseline's.
        ci_low: Lower end of the speedup's 95 % interval; NaN with one repeat.
        ci_high: Upper end.
        num_repeats: Paired repeats.
        draft_acceptance_rate: Accepted share of the draft tokens; None if nothing was drafted.
        mean_acceptance_length: Tokens per draft, bonus token included; None if nothing was
            drafted or drafts were not counted.
    """

    setting: str
    concurrency: int
    tokens: int
    seconds: float
    tok_per_s: float
    speedup: float
    ci_low: float
    ci_high: float
    num_repeats: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None

    @property
    def verdict(self) -> Verdict:
        """What the interval says against the baseline."""
        return verdict(self.ci_low, self.ci_high)


@dataclass(frozen=True)
class Comparison:
    """Two settings at every concurrency both were measured at, and overall.

    Attributes:
        setting: The setting judged.
        against: What it is judged against, in words.
        ratios: One per concurrency, rising.
        overall: Geometric mean over the concurrencies.
    """

    setting: str
    against: str
    ratios: tuple[Ratio, ...]
    overall: Ratio


def compare(measurements: Iterable[Measurement], baseline: str = "none") -> list[Cell]:
    """Every setting at every concurrency against the baseline.

    Args:
        measurements: Runs of all settings.
        baseline: Setting whose speedup is 1.

    Returns:
        Cells by rising concurrency; within one, settings in the order they were measured first.

    Raises:
        MeasurementError: If the baseline is missing or repeats are not paired.
    """
    runs = group_runs(measurements)
    cells = []
    for setting, concurrency in sorted(runs, key=lambda key: key[1]):
        pairs = pair_runs(runs, setting, baseline, concurrency)
        ci_low, ci_high = ratio_interval(list(log_ratios(pairs).values()))
        ours = [pair[0] for pair in pairs.values()]
        cells.append(
            Cell(
                setting,
                concurrency,
                tokens=sum(run.num_tokens for run in ours),
                seconds=sum(run.seconds for run in ours),
                tok_per_s=tok_per_s(ours),
                speedup=total_ratio(pairs),
                ci_low=ci_low,
                ci_high=ci_high,
                num_repeats=len(ours),
                draft_acceptance_rate=_draft_acceptance_rate(ours),
                mean_acceptance_length=_mean_acceptance_length(ours),
            )
        )
    return cells


def best_settings(cells: Iterable[Cell], candidates: Collection[str]) -> dict[int, str]:
    """The fastest of the candidates at each concurrency, as measured."""
    best: dict[int, Cell] = {}
    for cell in cells:
        leader = best.get(cell.concurrency)
        if cell.setting in candidates and (leader is None or cell.tok_per_s > leader.tok_per_s):
            best[cell.concurrency] = cell
    return {concurrency: cell.setting for concurrency, cell in best.items()}


def compare_settings(
    measurements: Iterable[Measurement],
    setting: str,
    against: str | Mapping[int, str],
    *,
    against_name: str = "the best of each concurrency",
) -> Comparison:
    """One setting against another, at each concurrency and overall.

    The overall interval takes each repeat as one sample: the mean of its log ratios over the
    concurrencies, so that a disturbance of a whole repeat is not counted as several.

    Args:
        measurements: Runs of both settings.
        setting: The setting judged.
        against: The other one, or the other one at each concurrency (see `best_settings`).
        against_name: How to call `against` where it differs from cell to cell.

    Raises:
        MeasurementError: If they share no concurrency, no repeat at every concurrency, or the
            repeats of a concurrency are not paired.
    """
    runs = group_runs(measurements)
    measured = sorted(concurrency for name, concurrency in runs if name == setting)
    if isinstance(against, str):
        against_name = against
        opponents = {at: against for at in measured if (against, at) in runs}
    else:
        opponents = {at: against[at] for at in measured if at in against}
    pairs = {at: pair_runs(runs, setting, name, at) for at, name in opponents.items()}
    if not pairs:
        raise MeasurementError(
            f"'{setting}' and '{against_name}' were measured at no concurrency in common; measure "
            "both side by side."
        )
    logs = {at: log_ratios(paired) for at, paired in pairs.items()}
    ratios = tuple(
        Ratio(
            at,
            opponents[at],
            total_ratio(pairs[at]),
            *ratio_interval(list(logs[at].values())),
            num_repeats=len(logs[at]),
        )
        for at in pairs
    )
    repeats = set.intersection(*(set(by_repeat) for by_repeat in logs.values()))
    if not repeats:
        raise MeasurementError(
            f"No repeat of '{setting}' was measured at every concurrency; number the repeats alike."
        )
    means = [
        math.fsum(by_repeat[repeat] for by_repeat in logs.values()) / len(logs)
        for repeat in sorted(repeats)
    ]
    overall = Ratio(
        None,
        against_name,
        math.exp(math.fsum(math.log(ratio.ratio) for ratio in ratios) / len(ratios)),
        *ratio_interval(means),
        num_repeats=len(means),
    )
    return Comparison(setting, against_name, ratios, overall)


def _draft_acceptance_rate(runs: Collection[Measurement]) -> float | None:
    num_draft_tokens = sum(run.num_draft_tokens for run in runs)
    if not num_draft_tokens:
        return None
    return sum(run.num_accepted_tokens for run in runs) / num_draft_tokens


def _mean_acceptance_length(runs: Collection[Measurement]) -> float | None:
    counts = [run.num_drafts for run in runs if run.num_drafts is not None]
    if len(counts) < len(runs) or not sum(counts):
        return None
    return 1 + sum(run.num_accepted_tokens for run in runs) / sum(counts)
