"""The benchmark on traces: every contender serves the same requests of every scenario."""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from envs.prompts.prompt import Split
from envs.replayed import Replayed
from envs.scenario import Arrivals
from envs.served import Served
from envs.trace_engine import TraceEngine

from ..contract import NONE, Granularity
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
        overall: The one with the highest geometric mean of speeds over the scenarios.
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


class ReplayPool:
    """Processes that replay; each compiles the simulator once, whatever it replays.

    Args:
        config: The benchmark.
    """

    def __init__(self, config: BenchmarkConfig) -> None:
        self._config = config
        self._pool = ProcessPoolExecutor(
            config.num_processes, multiprocessing.get_context("spawn"), _keep, (config,)
        )

    def __enter__(self) -> ReplayPool:
        """Use it in a `with` statement, which ends the processes."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)

    def replay(self, contenders: Sequence[Contender], split: Split, num_repeats: int) -> Results:
        """Serve every scenario with every contender on traces.

        Args:
            contenders: Who serves; names must differ.
            split: Requests recorded for training or for evaluation.
            num_repeats: Times, with other requests each time.

        Raises:
            DraftgymError: If the traces, their prices, or a contender cannot be used.
        """
        contract = _read(self._config, split).contract  # refused here, before any work is done
        for contender in contenders:
            contender.controller(contract)
        names = self._config.scenarios
        results: dict[tuple[str, int], list[Served]] = {}
        futures = {
            self._pool.submit(_serve, split, name, repeat, contenders): (name, repeat)
            for name in names
            for repeat in range(num_repeats)
        }
        for future in tqdm(
            as_completed(futures), total=len(futures), desc=f"traces ({split})", unit="run"
        ):
            results[futures[future]] = future.result()
        return Results(
            {
                (name, contender.name): [
                    results[name, repeat][index] for repeat in range(num_repeats)
                ]
                for name in names
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
        return math.prod(
            results.tok_per_s(scenario, name) / results.tok_per_s(scenario, NONE)
            for scenario in results.scenarios
        )

    return BestFixed(by_scenario, by_name[max(by_name, key=product)])


_config: BenchmarkConfig | None = None
"""What a process of the pool replays."""


def _keep(config: BenchmarkConfig) -> None:
    global _config
    _config = config


def _read(config: BenchmarkConfig, split: Split) -> Replayed:
    return Replayed.read(config.trace, config.model, config.drafters, config.workload, split)


@functools.cache
def _replayed(split: Split) -> Replayed:
    """This process's requests of a split, and what they are replayed with."""
    assert _config is not None
    return _read(_config, split)


@functools.cache
def _engine(split: Split, granularity: Granularity) -> TraceEngine:
    """This process's engine that observes the batch, or each request."""
    replayed = _replayed(split)
    contract = replace(replayed.contract, granularity=granularity)
    return TraceEngine(replayed.workload.traces, replayed.cost_model, contract, replayed.engine)


def _serve(
    split: Split, scenario_name: str, repeat: int, contenders: Sequence[Contender]
) -> list[Served]:
    """One scenario and repeat, in a process of the pool, by every contender."""
    assert _config is not None
    workload = _replayed(split).workload
    scenario = _config.scenarios[scenario_name]
    seed = _config.seed + repeat + _TRAIN_SEED_OFFSET * (split == "train")
    served = []
    for contender in contenders:
        arrivals = Arrivals(scenario, workload.requests(seed, scenario.slots()), seed)
        engine = _engine(split, contender.granularity)
        served.append(engine.serve(arrivals, contender.controller(engine.contract)))
    return served
