"""The rules by which a study's numbers confirm the paper's claims, or do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ..contract import MAX_TOKEN_DRAFT_LENGTH, NONE
from .study_acceptance import curve
from .study_data import NGRAM
from .study_live import PLAIN
from .study_overlap import break_even, in_words
from .study_results import StudyResults
from .study_speedups import COMBINED, FIXED, ORACLE_LENGTH, Speedups

CHAIN = 3
"""The paper's draft length."""
SHORT = 5
"""The longest draft length that the paper sets beside its oracle."""
MUCH = 1.1
"""A ratio from which on two figures are told to differ."""
Outcome = Literal["confirmed", "not confirmed", "not testable"]
Judged = tuple[Outcome, str]
"""Outcome, and the numbers that led to it."""
_UNTRACED: Judged = ("not testable", "no traces in this study")
_NOT_LIVE: Judged = ("not testable", "needs a live engine")


def _outcome(is_confirmed: bool) -> Outcome:
    return "confirmed" if is_confirmed else "not confirmed"


def _chains(results: StudyResults) -> Speedups:
    """Fixed settings of the paper's length (or the nearest there is), on all requests or live."""
    rows = results.speedups.where(setting=FIXED)
    return rows.where(where="traces", requests="all") or rows.where(where="live")


def _ends(results: StudyResults) -> Iterator[tuple[str, float, float]]:
    """Name of each data set and drafter, with its speedups at the least and the highest load."""
    rows = _chains(results).where(num_speculative_tokens=CHAIN)
    loads = rows.values("num_running_reqs")
    for data_set in rows.values("data_set"):
        for drafter in rows.values("drafter"):
            line = rows.where(data_set=data_set, drafter=drafter)
            first, last = (line.where(num_running_reqs=load)[0] for load in (loads[0], loads[-1]))
            yield f"{data_set} {drafter}", first.speedup, last.speedup


def gains_shrink(results: StudyResults) -> Judged:
    """Whether every gain is smaller at the highest load than at the least."""
    ends = list(_ends(results))
    shrink = [name for name, first, last in ends if last < first]
    loads = _chains(results).values("num_running_reqs")
    told = "; ".join(f"{name} {first:.2f} to {last:.2f}" for name, first, last in ends)
    return (
        _outcome(len(shrink) == len(ends)),
        f"{len(shrink)} of {len(ends)} shrink from {loads[0]} to {loads[-1]} requests: {told}",
    )


def always_helps(results: StudyResults) -> Judged:
    """Whether no cell is slower than no speculation."""
    rows = _chains(results).where(num_speculative_tokens=CHAIN)
    worst = min(rows, key=lambda row: row.speedup)
    losing = sum(row.speedup < 1 for row in rows)
    return _outcome(not losing), (
        f"{losing} of {len(rows)} cells below 1; worst {worst.speedup:.2f} ({worst.data_set}, "
        f"{worst.drafter}, {worst.num_running_reqs} requests)"
    )


def live_shares(results: StudyResults, stage: str) -> list[tuple[float, str]]:
    """A stage's share for every live setting that drafts, the least first."""
    return sorted(
        (row.share, f"{row.setting} at {row.num_running_reqs}")
        for row in results.stages
        if row.stage == stage and row.setting not in (PLAIN, NONE)
    )


def verification_dominates(results: StudyResults) -> Judged:
    """Whether verification's live share lies within the paper's bounds."""
    shares = live_shares(results, "verification")
    if not shares:
        return _NOT_LIVE
    (low, least), (high, most) = shares[0], shares[-1]
    return _outcome(low >= 0.42 and high <= 0.95), (
        f"{low:.0%} ({least} requests) to {high:.0%} ({most})"
    )


def sampling_is_negligible(results: StudyResults) -> Judged:
    """Whether sampling's live share stays below the paper's bound."""
    shares = live_shares(results, "sampling")
    if not shares:
        return _NOT_LIVE
    return _outcome(shares[-1][0] < 0.017), (
        f"{shares[0][0]:.1%} to {shares[-1][0]:.1%} ({shares[-1][1]} requests)"
    )


def memory_is_small(results: StudyResults) -> Judged:
    """Whether the model drafter takes less than a tenth of weights and KV cache."""
    memory = results.memory
    if memory is None:
        return _NOT_LIVE
    weights = memory.drafter_weight_bytes / memory.target_weight_bytes
    kv_cache = memory.drafter_kv_bytes_per_token / memory.target_kv_bytes_per_token
    return _outcome(max(weights, kv_cache) < 0.1), (
        f"model drafter {weights:.1%} of the weights, {kv_cache:.1%} of the KV cache per token; "
        "n-gram loads nothing"
    )


def _each_drafter(results: StudyResults) -> list[str]:
    return list(dict.fromkeys(row.drafter for row in results.stretches))


def _most(ratios: dict[str, dict[str, float]], is_met: Callable[[float], bool]) -> bool:
    """Whether a rule is met in more than half of the data sets, for each drafter."""
    return all(
        sum(map(is_met, by_set.values())) > len(by_set) / 2 for by_set in ratios.values() if by_set
    )


def _told(ratios: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{drafter}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in by_set.items())
        for drafter, by_set in ratios.items()
    )


def positions_differ(results: StudyResults) -> Judged:
    """Whether stretches of the outputs differ."""
    if not results.stretches:
        return _UNTRACED
    ratios: dict[str, dict[str, float]] = {}
    for drafter in _each_drafter(results):
        for data_set in results.kinds:
            _, means = curve(results.stretches, data_set, drafter, min_requests=20)
            if len(means) > 1:
                ratio = float(means.max() / means.min())
                ratios.setdefault(drafter, {})[data_set] = ratio
    return _outcome(_most(ratios, lambda ratio: ratio >= MUCH)), (
        f"best stretch over worst: {_told(ratios)}"
    )


def requests_differ(results: StudyResults) -> Judged:
    """Whether n-gram's requests are spread wider than the model drafter's."""
    model = results.model_drafter
    spread = {(one.data_set, one.drafter): one for one in results.spreads}
    if model is None or not spread:
        return _UNTRACED
    wider = [
        spread[name, NGRAM].p95 / spread[name, NGRAM].p5
        > spread[name, model].p95 / spread[name, model].p5
        for name in results.kinds
    ]
    told = "; ".join(
        f"{one.data_set} {one.drafter} {one.p5:.1f} to {one.p95:.1f}" for one in results.spreads
    )
    return _outcome(all(wider)), f"mean tokens per step of a request: {told}"


def data_sets_differ(results: StudyResults) -> Judged:
    """Whether the median requests of data sets differ."""
    if len(results.kinds) < 2 or not results.spreads:
        return _UNTRACED
    told, ratios = [], []
    for drafter in _each_drafter(results):
        own = sorted(
            (one for one in results.spreads if one.drafter == drafter), key=lambda one: one.median
        )
        ratios.append(own[-1].median / own[0].median)
        told.append(
            f"{drafter}: median {own[0].median:.2f} ({own[0].data_set}) to {own[-1].median:.2f} "
            f"({own[-1].data_set})"
        )
    return _outcome(min(ratios) >= MUCH), "; ".join(told)


def _traced(results: StudyResults) -> Speedups:
    return results.speedups.where(where="traces", requests="all")


def ngram_wins_editing(results: StudyResults) -> Judged:
    """Whether n-gram is the faster one on code editing, and only there."""
    model, rows = results.model_drafter, _traced(results).where(setting=FIXED)
    editing = [name for name in results.kinds if name in results.code_editing]
    if model is None or not editing or not rows:
        return "not testable", "no data set of code editing, or no two drafters, in the traces"
    least = rows.values("num_running_reqs")[0]
    ratios = {
        name: rows.best(drafter=NGRAM, data_set=name, num_running_reqs=least).speedup
        / rows.best(drafter=model, data_set=name, num_running_reqs=least).speedup
        for name in results.kinds
    }
    is_met = all((ratio > 1) == (name in editing) for name, ratio in ratios.items())
    told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return _outcome(is_met), f"n-gram over {model} at {least}: {told}"


def overlap_decides(results: StudyResults) -> Judged:
    """Whether there is a break-even overlap at every load."""
    loads = sorted({cell.num_running_reqs for cell in results.overlap_cells})
    if not loads:
        return "not testable", "no two drafters in the traces"
    points = {load: break_even(results.overlap_cells, load) for load in loads}
    model = str(results.model_drafter)
    told = "; ".join(f"{load}: {in_words(point, model)}" for load, point in points.items())
    return _outcome(None not in points.values()), f"break-even by requests in flight: {told}"


def _gaps(
    results: StudyResults, load_index: int, longest: int = MAX_TOKEN_DRAFT_LENGTH
) -> dict[str, dict[str, float]]:
    """Oracle length over best fixed length up to the longest, by drafter and data set."""
    rows = _traced(results)
    ratios: dict[str, dict[str, float]] = {}
    for drafter in rows.where(setting=ORACLE_LENGTH).values("drafter"):
        for data_set in results.kinds:
            load = rows.values("num_running_reqs")[load_index]
            cell = rows.where(drafter=drafter, data_set=data_set, num_running_reqs=load)
            oracle = cell.best(setting=ORACLE_LENGTH).speedup
            # A fixed setting may be no speculation, the oracle's least.
            fixed = max(
                1.0,
                *(
                    row.speedup
                    for row in cell.where(setting=FIXED)
                    if row.num_speculative_tokens <= longest
                ),
            )
            ratios.setdefault(drafter, {})[data_set] = oracle / fixed
    return ratios


def oracle_is_ahead(results: StudyResults) -> Judged:
    """Whether an oracle of the length is far ahead of the best fixed one."""
    ratios = _gaps(results, 0)
    if not ratios:
        return _UNTRACED
    return _outcome(_most(ratios, lambda ratio: ratio >= MUCH)), (
        f"oracle over best fixed length: {_told(ratios)} (over the best of up to {SHORT} tokens: "
        f"{_told(_gaps(results, 0, SHORT))})"
    )


def gap_widens(results: StudyResults) -> Judged:
    """Whether it is further ahead at the highest load."""
    least, highest = _gaps(results, 0), _gaps(results, -1)
    if not least:
        return _UNTRACED
    grown = {
        drafter: {name: highest[drafter][name] / ratio for name, ratio in by_set.items()}
        for drafter, by_set in least.items()
    }
    return _outcome(_most(grown, lambda ratio: ratio > 1)), (
        f"oracle over best fixed length at the highest load: {_told(highest)}"
    )


def combination_wins(results: StudyResults) -> Judged:
    """Whether choosing the drafter beats the best single oracle."""
    rows = _traced(results)
    if not rows.where(setting=COMBINED):
        return "not testable", "no two drafters in the traces"
    least = rows.values("num_running_reqs")[0]
    told, gains = [], []
    for data_set in results.kinds:
        cell = rows.where(data_set=data_set, num_running_reqs=least)
        single = cell.best(setting=ORACLE_LENGTH).speedup
        speeds = {row.drafter: row.speedup for row in cell.where(setting=COMBINED)}
        gains.append(speeds["if_it_wins"] / single)
        told.append(
            f"{data_set} {speeds['if_it_wins']:.2f} against {single:.2f} (both drafting "
            f"{speeds['both_draft']:.2f}, as the paper prices it {speeds['as_published']:.2f})"
        )
    return _outcome(max(gains) >= MUCH), f"at {least}: " + "; ".join(told)
