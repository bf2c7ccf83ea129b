"""The benchmark on traces: every contender serves the same requests of every scenario."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tqdm import tqdm

from envs.prompts.prompt import Split
from envs.replayed import Replayed
from envs.scenario import Arrivals
from envs.served import Served
from envs.trace_engine import TraceEngine

from ..contract import NONE
from .benchmark_config import BenchmarkConfig
from .bootstrap import Work, work_of
from .contenders import Contender

BEST_FIXED = "best_fixed"
_TRAIN_SEED_OFFSET = 10_000


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
        overall: The one with the best worst-to-best balance: the highest geometric mean of
            speeds over the scenarios.
    """

    by_scenario: dict[str, Contender]
    overall: Contender


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


def replay(
    config: BenchmarkConfig, contenders: Sequence[Contender], split: Split, num_repeats: int
) -> Results:
    """Serve every scenario with every contender on traces.

    Args:
        config: The benchmark.
        contenders: Who serves; names must differ.
        split: Requests recorded for training or for evaluation.
        num_repeats: Times, with other requests each time.

    Raises:
        DraftgymError: If the traces, their prices, or a contender cannot be used.
    """
    replayed = _read(config, split)  # here first: a process of the pool could only die of it
    for contender in contenders:
        contender.controller(replayed.contract)
    jobs = [(scenario, repeat) for scenario in config.scenarios for repeat in range(num_repeats)]
    results: dict[tuple[str, int], list[Served]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(config.num_processes, len(jobs)), context, _begin_process, (config, split)
    ) as pool:
        futures = {
            pool.submit(_replay_job, scenario, repeat, contenders): (scenario, repeat)
            for scenario, repeat in jobs
        }
        for future in tqdm(
            as_completed(futures), total=len(jobs), desc=f"traces ({split})", unit="run"
        ):
            results[futures[future]] = future.result()
    return Results(
        {
            (scenario, contender.name): [
                results[scenario, repeat][index] for repeat in range(num_repeats)
            ]
            for scenario in config.scenarios
            for index, contender in enumerate(contenders)
        }
    )


def choose_fixed(results: Results, candidates: Sequence[Contender]) -> BestFixed:
    """The fastest fixed settings of a benchmark on training requests."""
    by_name = {contender.name: contender for contender in candidates}
    by_scenario = {
        scenario: by_name[max(by_name, key=lambda name: results.tok_per_s(scenario, name))]
        for scenario in results.scenarios
    }

    def product(name: str) -> float:
        product = 1.0
        for scenario in results.scenarios:
            product *= results.tok_per_s(scenario, name) / results.tok_per_s(scenario, NONE)
        return product

    return BestFixed(by_scenario, by_name[max(by_name, key=product)])


_state: tuple[BenchmarkConfig, Replayed, TraceEngine, int] | None = None
"""What a process of the pool keeps between its jobs."""


def _read(config: BenchmarkConfig, split: Split) -> Replayed:
    return Replayed.read(config.trace, config.model, config.drafters, config.workload, split)


def _begin_process(config: BenchmarkConfig, split: Split) -> None:
    global _state
    replayed = _read(config, split)
    engine = TraceEngine(
        replayed.workload.traces, replayed.cost_model, replayed.contract, replayed.engine
    )
    _state = config, replayed, engine, config.seed + _TRAIN_SEED_OFFSET * (split == "train")


def _replay_job(scenario_name: str, repeat: int, contenders: Sequence[Contender]) -> list[Served]:
    assert _state is not None
    config, replayed, engine, first_seed = _state
    scenario, seed = config.scenarios[scenario_name], first_seed + repeat
    served = []
    for contender in contenders:
        requests = replayed.workload.requests(seed, scenario.slots())
        controller = contender.controller(engine.contract)
        served.append(engine.serve(Arrivals(scenario, requests, seed), controller))
    return served
