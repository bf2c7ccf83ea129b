"""The paper's claims, each set beside this study's numbers.

The paper: "Speculative Decoding: Performance or Illusion?", arXiv 2601.11580, and its authors' page
specdecode-bench.github.io. A claim is confirmed or not by a stated rule, never by eye; where the
study lacks what the rule needs, it is not testable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import study_rules
from .study_results import StudyResults
from .study_rules import CHAIN, MUCH, Judged, Outcome


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        paper: What the paper says.
        rule: What would confirm it here.
        outcome: Whether it did.
        evidence: This study's numbers.
    """

    paper: str
    rule: str
    outcome: Outcome
    evidence: str


_CLAIMS: tuple[tuple[str, str, Callable[[StudyResults], Judged]], ...] = (
    (
        "Gains shrink as the batch grows (1.96x at 1 for Llama-3-70B; 1.21x at 128 for "
        "Llama-3.1-8B on GSM8K, EAGLE).",
        f"drafts of {CHAIN} gain less at the highest load than at the least, in each data "
        "set and for each drafter",
        study_rules.gains_shrink,
    ),
    (
        "Speculation consistently improves throughput, batch 1 to 128.",
        f"drafts of {CHAIN} are at least as fast as no speculation everywhere",
        study_rules.always_helps,
    ),
    (
        "Verification takes 42 to 95 % of the time.",
        "its live share lies within these bounds for every setting that drafts",
        study_rules.verification_dominates,
    ),
    (
        "Sampling, rejection included, takes less than 1.7 %.",
        "its live share stays below for every setting that drafts",
        study_rules.sampling_is_negligible,
    ),
    (
        "n-gram takes no memory of the accelerator, EAGLE less than 10 % of weights and of "
        "KV cache per token.",
        "the live engine's model drafter stays below 10 % of both",
        study_rules.memory_is_small,
    ),
    (
        "Acceptance varies over the positions of an output.",
        f"the best stretch of outputs brings {MUCH} times the tokens per step of the "
        "worst, in most data sets, for each drafter",
        study_rules.positions_differ,
    ),
    (
        "Requests of one data set differ; EAGLE is steady, n-gram comes in bursts "
        "(InstructCoder on Llama-3-70B, spans of a step: EAGLE 2.7 to 7.4, n-gram 1.1 to "
        "15.0 tokens, 5th to 95th percentile).",
        "the 95th percentile of requests over the 5th is higher for n-gram in each data set",
        study_rules.requests_differ,
    ),
    (
        "Data sets differ, each drafter has its niche.",
        f"the median request of the best data set brings {MUCH} times that of the worst, "
        "for each drafter",
        study_rules.data_sets_differ,
    ),
    (
        "n-gram loses on most workloads and wins on code editing.",
        "with the best draft length of each, at the least load, it is faster than the "
        "model drafter on code editing and slower on the other data sets",
        study_rules.ngram_wins_editing,
    ),
    (
        "Above an overlap of about 0.6 (BLEU-4) n-gram is faster than EAGLE at every batch size.",
        "there is a break-even overlap at every load",
        study_rules.overlap_decides,
    ),
    (
        "An oracle of the draft length is far ahead of fixed lengths (InstructCoder, "
        "n-gram, batch 1: about 2.75x against 2.1x).",
        f"at the least load it is {MUCH} times the best fixed length, in most data sets, "
        "for each drafter",
        study_rules.oracle_is_ahead,
    ),
    (
        "That gap widens with the batch.",
        "the ratio is higher at the highest load than at the least, in most data sets, for "
        "each drafter",
        study_rules.gap_widens,
    ),
    (
        "Choosing n-gram or EAGLE at every position reaches up to 4.9x on InstructCoder "
        "(batch 1), against about 2.2x for one drafter.",
        f"with the winner paid, it is {MUCH} times the best single oracle in some data set",
        study_rules.combination_wins,
    ),
    (
        "Batch effects are larger for larger targets; draft models excel there; trees beat "
        "chains at batch 1 only; reasoning gains like the rest; MTP 1.3 to 1.8x.",
        "other targets, drafters and engines",
        lambda _: (
            "not testable",
            "one target, and no drafts but chains of these drafters",
        ),
    ),
)
"""What the paper says, what would confirm it here, and who judges."""


def judge_claims(results: StudyResults) -> list[Claim]:
    """Every claim of the paper that concerns the measurements of a study."""
    claims = []
    for paper, rule, judge in _CLAIMS:
        outcome, evidence = judge(results)
        claims.append(Claim(paper, rule, outcome, evidence))
    return claims


def outcomes(claims: Sequence[Claim]) -> str:
    """How many claims came out how."""
    counts = Counter(claim.outcome for claim in claims)
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
