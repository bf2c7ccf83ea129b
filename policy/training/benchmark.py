"""What a benchmark's runs are, and which fixed settings its contenders are judged against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from envs.served import Served

from ..contract import NONE
from .benchmark_config import BenchmarkConfig
from .bootstrap import Work, work_of
from .contenders import Contender

BEST_FIXED = "best_fixed"
BEST_SINGLE_FIXED = "best_single_fixed"


@dataclass
class Results:
    """Runs by scenario and contender, in the order of the repeats.

    Attributes:
        runs: `(scenario, contender)` -> a run for each repeat.
    """

    runs: dict[tuple[str, str], list[Served]] = field(default_factory=dict)

    def work(self, scenario: str, contender: str) -> list[Work]:
        """Tokens and seconds of the runs, request by request."""
        return [work_of(served) for served in self.runs[scenario, contender]]

    def tok_per_s(self, scenario: str, contender: str) -> float:
        """Output tokens per second of busy engine time, over all repeats."""
        runs = self.runs[scenario, contender]
        return sum(run.num_tokens for run in runs) / sum(run.busy_s for run in runs)

    @property
    def scenarios(self) -> list[str]:
        """Names in order."""
        return list(dict.fromkeys(scenario for scenario, _ in self.runs))

    @property
    def contenders(self) -> list[str]:
        """Names in order."""
        return list(dict.fromkeys(contender for _, contender in self.runs))


@dataclass(frozen=True)
class BestFixed:
    """Fixed settings chosen on training requests.

    Attributes:
        by_scenario: The fastest in each scenario.
        overall: The one with the highest geometric mean of speeds over the scenarios.
    """

    by_scenario: dict[str, Contender]
    overall: Contender

    def at(self, scenario: str) -> Contender:
        """The fastest in a scenario; the best single one where none was chosen for it."""
        return self.by_scenario.get(scenario, self.overall)


def fixed_contenders(config: BenchmarkConfig) -> list[Contender]:
    """No speculation, and every drafter and length of the configuration."""
    return [
        Contender.fixed(NONE),
        *(
            Contender.fixed(drafter, length)
            for drafter, lengths in config.fixed_lengths.items()
            for length in sorted(
                {min(length, config.drafters.max_lengths[drafter]) for length in lengths}
            )
        ),
    ]


def choose_fixed(results: Results, candidates: Sequence[Contender]) -> BestFixed:
    """The fastest fixed settings of a benchmark on training requests."""
    by_name = {contender.name: contender for contender in candidates}
    by_scenario = {
        scenario: by_name[max(by_name, key=lambda name: results.tok_per_s(scenario, name))]
        for scenario in results.scenarios
    }

    def product(name: str) -> float:
        return math.prod(
            results.tok_per_s(scenario, name) / results.tok_per_s(scenario, NONE)
            for scenario in results.scenarios
        )

    return BestFixed(by_scenario, by_name[max(by_name, key=product)])


def name_best_fixed(results: Results, best: BestFixed) -> None:
    """Let the chosen fixed settings take part under the names of their roles."""
    for scenario in results.scenarios:
        for role, one in ((BEST_FIXED, best.at(scenario)), (BEST_SINGLE_FIXED, best.overall)):
            results.runs[scenario, role] = results.runs[scenario, one.name]
