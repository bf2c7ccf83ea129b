"""The sentences of a benchmark's report."""

from __future__ import annotations

from .benchmark import BestFixed, Results
from .benchmark_agreement import agreement
from .benchmark_config import BenchmarkConfig


def benchmark_notes(
    config: BenchmarkConfig, best: BestFixed, traced: Results, lived: Results | None
) -> list[str]:
    """What a reader must know, and how far traces and live vLLM agree.

    Args:
        config: The benchmark.
        best: The best fixed settings, chosen on training requests.
        traced: Runs on traces.
        lived: Runs on live vLLM, if there are any.
    """
    notes = [
        "Speed is output tokens per second of busy engine time; intervals are 95 %, by a paired "
        "bootstrap over requests and repeats; one that holds 1 is a tie.",
        "Best fixed settings, chosen on recorded training requests: "
        + ", ".join(f"{one.name} ({scenario})" for scenario, one in best.by_scenario.items())
        + f"; best single one: {best.overall.name}, which also stands for the best of a scenario "
        "that was not replayed.",
        "The oracle knows at every step which draft tokens will be accepted and takes what brings "
        "the most tokens per second in that step. Its pricing is if_it_wins: a drafter is paid "
        "where it drafts. Fractions are speedups over no speculation, one over the other.",
        "Regret is against the fastest fixed setting that served the scenario; on live vLLM few "
        "of them do.",
    ]
    if only_live := [name for name in config.scenarios if name not in traced.scenarios]:
        notes.append(
            "Not replayed, since the traces were recorded at another temperature: "
            f"{', '.join(only_live)}."
        )
    if lived is not None:
        agreed = agreement(traced, lived, config.seed)
        notes.append(
            "Traces and live vLLM: rank correlation (Spearman) of the contenders' speeds, which "
            "is noise where they tie; and of the pairs of contenders that differ live beyond the "
            "interval, how many come in the same order on traces: "
            + "; ".join(f"{scenario} {found}" for scenario, found in agreed.items())
            + f"; in all {sum(found.num_alike for found in agreed.values())} of "
            f"{sum(found.num_pairs for found in agreed.values())} pairs."
        )
    return notes
