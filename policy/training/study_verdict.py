"""The verdict: which setting to use at which load, and what a trained policy would add."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract import NONE
from .study_claims import Claim, outcomes
from .study_data import ALL
from .study_page import Section
from .study_results import StudyResults
from .study_rules import live_shares
from .study_speedups import COMBINED, FIXED, ORACLE_LENGTH, POLICY, Speedup, Speedups

_PAPER_SETTING = (
    "EAGLE-3 is the all-round choice; gains shrink with the batch, expect less than the 3x to 4x "
    "of one request."
)
_PAPER_KINDS = "n-gram on code editing and wherever outputs copy prompts; it loses elsewhere."
_PAPER_TIME = "Verification 42 to 95 %, sampling below 1.7 %."
_PAPER_POSSIBLE = "4.9x on InstructCoder at batch 1, with n-gram's price for every draft."
_PAPER_TRAINING = "Not tried: a light predictor that chooses the drafter is left to others."
WORTH_IT = 1.02
"""Speed over no speculation below which none is advised."""
_POLICY_COLUMNS = [
    "best fixed (held-out)",
    "policy (held-out)",
    "policy over fixed",
    "of the oracle",
]


def verdict_section(results: StudyResults, claims: Sequence[Claim]) -> Section:
    """The page that answers: use what, when, and is it worth training?"""
    where = "traces" if results.kinds else "live"
    requests = "all" if results.kinds else "held_out"
    rows = results.speedups.where(where=where, requests=requests)
    pooled = _pooled(rows)
    questions = [
        ["question", "here", "the paper"],
        ["Which setting at which load?", _advice(pooled.where(setting=FIXED)), _PAPER_SETTING],
        ["And for traffic of one kind?", _by_data_set(rows, pooled), _PAPER_KINDS],
        ["Where does the time go?", _where_time_goes(results), _PAPER_TIME],
        ["What would be possible?", _possible(results), _PAPER_POSSIBLE],
        ["Is it worth training a policy?", _worth_training(results), _PAPER_TRAINING],
    ]
    sentence = (
        f"Of the paper's claims: {outcomes(claims)}. Best lengths are chosen with hindsight, for "
        "each load by itself."
    )
    return Section("The verdict", [sentence], [questions, _table(results, pooled)])


def claims_section(claims: Sequence[Claim]) -> Section:
    """Every claim with its rule and numbers."""
    rows = [["the paper says", "outcome", "this study's numbers", "confirmed if"]]
    rows += [[claim.paper, claim.outcome, claim.evidence, claim.rule] for claim in claims]
    return Section("The paper's claims", [], [rows])


def named(row: Speedup) -> str:
    """A fixed setting in words."""
    tokens = row.num_speculative_tokens
    return f"{row.drafter}, {tokens} token{'s' * (tokens > 1)}"


def _pooled(rows: Speedups) -> Speedups:
    """Those of all data sets together, or of the only one."""
    names = rows.values("data_set")
    return rows.where(data_set=ALL if ALL in names else names[0])


def _best(rows: Speedups, load: int) -> Speedup:
    """The fastest fixed setting that drafts."""
    drafting = Speedups(row for row in rows if row.num_speculative_tokens)
    return drafting.best(num_running_reqs=load, setting=FIXED)


def _advice(fixed: Speedups) -> str:
    """One sentence for each stretch of loads with the same drafter."""
    groups: list[list[Speedup]] = []
    for load in fixed.values("num_running_reqs"):
        best = _best(fixed, load)
        if groups and _use(groups[-1][-1]) == _use(best):
            groups[-1].append(best)
        else:
            groups.append([best])
    sentences = []
    for group in groups:
        first, last = group[0], group[-1]
        loads = str(first.num_running_reqs)
        if len(group) > 1:
            loads += f" to {last.num_running_reqs}"
        if _use(first) == NONE:
            said = f"serve without speculation: the best draft reaches {last.speedup:.2f}."
        else:
            lengths = sorted({row.num_speculative_tokens for row in group})
            tokens = " to ".join(str(length) for length in dict.fromkeys((lengths[0], lengths[-1])))
            speeds = " to ".join(f"{row.speedup:.2f}" for row in dict.fromkeys((first, last)))
            plural = "s" * (tokens != "1")
            said = f"use {first.drafter}, {tokens} token{plural}: {speeds} times no speculation."
        sentences.append(f"At {loads} requests in flight {said}")
    return " ".join(sentences)


def _use(best: Speedup) -> str:
    return best.drafter if best.speedup >= WORTH_IT else NONE


def _by_data_set(rows: Speedups, pooled: Speedups) -> str:
    """The best setting of each data set, at the least load."""
    load = rows.values("num_running_reqs")[0]
    others = [
        _best(rows.where(data_set=name), load)
        for name in rows.values("data_set")
        if name != pooled[0].data_set
    ]
    if not others:
        return "Not measured: there is one data set."
    told = "; ".join(f"{row.data_set}: {named(row)} ({row.speedup:.2f})" for row in others)
    return f"The best at {load} in flight: {told}."


def _where_time_goes(results: StudyResults) -> str:
    """Shares of the settings that draft."""
    told = []
    for stage in ("verification", "drafting", "sampling", "deciding", "overhead"):
        if shares := [share for share, _ in live_shares(results, stage)]:
            told.append(f"{stage} {shares[0]:.0%} to {shares[-1]:.0%}")
    return "; ".join(told) + "." if told else "Not measured: no live engine in this study."


def _possible(results: StudyResults) -> str:
    """The oracle combination at the least and the highest load."""
    rows = results.speedups.where(where="traces", requests="all")
    combined = rows.where(setting=COMBINED, drafter="if_it_wins")
    if not combined:
        return "Not measured: no traces of two drafters in this study."
    loads = combined.values("num_running_reqs")
    told = "; ".join(
        f"{data_set} {first.speedup:.2f} to {last.speedup:.2f}"
        for data_set in combined.values("data_set")
        for first, last in [
            [
                combined.where(data_set=data_set, num_running_reqs=load)[0]
                for load in (loads[0], loads[-1])
            ]
        ]
    )
    return f"The oracle combination (the winner is paid), {loads[0]} to {loads[-1]}: {told}."


def _worth_training(results: StudyResults) -> str:
    held_out = results.speedups.where(requests="held_out", where="traces")
    if not held_out.where(setting=POLICY):
        return "Not measured: no policy was judged."
    pooled = _pooled(held_out)
    policy = pooled.where(setting=POLICY)
    gains = {
        row.num_running_reqs: row.speedup / _fixed_speed(pooled, row.num_running_reqs)
        for row in policy
    }
    told = ", ".join(f"{gain:.2f} at {load}" for load, gain in gains.items())
    single = pooled.where(setting=FIXED)
    overall = max(
        (
            single.where(drafter=row.drafter, num_speculative_tokens=row.num_speculative_tokens)
            for row in single.where(num_running_reqs=policy[0].num_running_reqs)
        ),
        key=_mean,
    )
    ahead = _mean(policy) / max(1.0, _mean(overall))
    behind = [str(load) for load, gain in gains.items() if gain < 0.99]
    losing = f" It is behind at {', '.join(behind)}." if behind else ""
    answer = "adds to" if ahead > 1.01 else ("ties with" if ahead > 0.99 else "falls behind")
    return (
        "On held-out requests the shipped policy, over the best fixed setting "
        f"of each load: {told}. Over the best single setting for all loads "
        f"({named(overall[0])}) it reaches {ahead:.2f} (geometric mean): it {answer} that setting."
        + losing
    )


def _mean(rows: Sequence[Speedup]) -> float:
    """Geometric mean."""
    product = 1.0
    for row in rows:
        product *= row.speedup
    return product ** (1 / len(rows))


def _fixed_speed(rows: Speedups, load: int) -> float:
    """Of the best fixed setting, which may be none."""
    return max(1.0, _best(rows, load).speedup)


def _table(results: StudyResults, pooled: Speedups) -> list[list[str]]:
    """A row for each load: what to use, and what oracle and policy reach."""
    traced = results.speedups.where(where="traces")
    live = results.speedups.where(where="live")
    held_out = traced.where(requests="held_out")
    has_policy, has_oracle = bool(held_out.where(setting=POLICY)), bool(results.kinds)
    header = ["requests in flight", "use", "speed over none"]
    header += ["best oracle length", "oracle combination"] * has_oracle
    header += _POLICY_COLUMNS * has_policy
    header += ["live: best fixed"] * bool(live and results.kinds)
    rows = [header]
    for load in pooled.values("num_running_reqs"):
        best, cell = _best(pooled, load), pooled.where(num_running_reqs=load)
        use = named(best) if _use(best) != NONE else "no speculation"
        row = [str(load), use, f"{max(1.0, best.speedup):.2f}"]
        if has_oracle:
            row.append(f"{cell.best(setting=ORACLE_LENGTH).speedup:.2f}")
            combined = cell.where(setting=COMBINED, drafter="if_it_wins")
            row.append(f"{combined[0].speedup:.2f}" if combined else "–")
        if has_policy:
            row += _policy_cells(_pooled(held_out).where(num_running_reqs=load), load)
        if live and results.kinds:
            at = _pooled(live).where(num_running_reqs=load)
            measured = _best(at, load) if at else None
            row.append(f"{named(measured)}: {measured}" if measured else "–")
        rows.append(row)
    return rows


def _policy_cells(held_out: Speedups, load: int) -> list[str]:
    fixed, policy = _fixed_speed(held_out, load), held_out.where(setting=POLICY)[0].speedup
    oracle = held_out.where(setting=COMBINED, drafter="if_it_wins") or held_out.where(
        setting=ORACLE_LENGTH
    )
    of_it = policy / oracle.best().speedup
    return [f"{fixed:.2f}", f"{policy:.2f}", f"{policy / fixed:.2f}", f"{of_it:.0%}"]
