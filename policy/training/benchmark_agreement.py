"""Whether contenders come in the same order on traces and live."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from scipy.stats import spearmanr

from .benchmark import Results
from .bootstrap import speed_ratio


@dataclass(frozen=True)
class Agreement:
    """How far traces and live agree on the order of the contenders of a scenario.

    Attributes:
        rank_correlation: Spearman's, of the speeds of all contenders; where contenders tie, their
            ranks are noise.
        num_pairs: Pairs of contenders of which one is faster live, beyond the interval.
        num_alike: Of those, pairs that come in the same order on traces.
    """

    rank_correlation: float
    num_pairs: int
    num_alike: int

    def __str__(self) -> str:
        """Both measures in words."""
        return f"{self.rank_correlation:.2f}, {self.num_alike} of {self.num_pairs}"


def agreement(traced: Results, lived: Results, seed: int) -> dict[str, Agreement]:
    """The agreement in each scenario that at least three contenders served on both.

    Args:
        traced: Runs on traces.
        lived: Runs on live vLLM.
        seed: Of the intervals.
    """
    found = {}
    for scenario in lived.scenarios:
        names = [
            name
            for name in lived.contenders
            if (scenario, name) in traced.runs and (scenario, name) in lived.runs
        ]
        if len(names) < 3:
            continue
        on_traces = {name: traced.tok_per_s(scenario, name) for name in names}
        live = {name: lived.tok_per_s(scenario, name) for name in names}
        is_alike = []
        for one, other in itertools.combinations(names, 2):
            works = lived.work(scenario, one), lived.work(scenario, other)
            if speed_ratio(*works, seed).verdict != "tie":
                is_alike.append((on_traces[one] > on_traces[other]) == (live[one] > live[other]))
        correlation = spearmanr([on_traces[name] for name in names], [*live.values()]).statistic
        found[scenario] = Agreement(float(correlation), len(is_alike), sum(is_alike))
    return found
