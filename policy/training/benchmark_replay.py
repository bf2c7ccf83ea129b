"""The benchmark on traces: every contender serves the same requests of every scenario."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from envs.oracle_controller import OracleController
from envs.prompts.prompt import Split
from envs.replayed import Replayed
from envs.scenario import Arrivals
from envs.served import Served
from envs.trace_engine import TraceEngine

from ..contract import Granularity
from ..controllers import Controller
from ..errors import ConfigError
from ..step import StepRecord
from .benchmark import Results
from .benchmark_config import BenchmarkConfig
from .contenders import Contender

_TRAIN_SEED_OFFSET = 10_000


class ReplayPool:
    """Processes that replay; each compiles the simulator once, whatever it replays.

    Args:
        config: The benchmark.
        split: Whose requests are read at once, to refuse here what cannot be used.

    Attributes:
        scenarios: Those that can be replayed: at the temperature of the traces.

    Raises:
        DraftgymError: If the traces or their prices cannot be used, or fit no scenario.
    """

    def __init__(self, config: BenchmarkConfig, split: Split = "eval") -> None:
        replayed = _read(config, split)  # refused here, before any work is done
        temperature = replayed.workload.traces.header.temperature
        self.scenarios = [
            name
            for name, scenario in config.scenarios.items()
            if scenario.temperature in (None, temperature)
        ]
        if not self.scenarios:
            raise ConfigError(
                f"The traces were recorded at temperature {temperature}, and no scenario is served "
                "at it; add one to scenarios."
            )
        self._contract = replayed.contract
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
            DraftgymError: If a contender cannot be used.
        """
        for contender in contenders:
            if not contender.is_oracle:
                contender.controller(self._contract)
        results: dict[tuple[str, int], list[Served]] = {}
        futures = {
            self._pool.submit(_serve, split, name, repeat, contenders): (name, repeat)
            for name in self.scenarios
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
                for name in self.scenarios
                for index, contender in enumerate(contenders)
            }
        )

    def observations(self, contender: Contender, scenario: str) -> np.ndarray:
        """What a contender observes in a scenario, float32 `[rows, fields]`."""
        return self._pool.submit(_observe, contender, scenario).result()


class _Observer:
    """Lets another controller decide, and keeps what it saw."""

    def __init__(self, inner: Controller) -> None:
        self.rows: list[np.ndarray] = []
        self._inner = inner

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        self.rows.append(observation)
        return self._inner.decide(record, observation)


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
    """This process's engine that observes the batch, or each request too."""
    replayed = _replayed(split)
    contract = replace(replayed.contract, granularity=granularity)
    return TraceEngine(replayed.workload.traces, replayed.cost_model, contract, replayed.engine)


def _arrivals(split: Split, scenario_name: str, repeat: int) -> Arrivals:
    assert _config is not None
    scenario = _config.scenarios[scenario_name]
    seed = _config.seed + repeat + _TRAIN_SEED_OFFSET * (split == "train")
    requests = _replayed(split).workload.requests(seed, scenario.slots())
    return Arrivals(scenario, requests, seed)


def _controller(split: Split, contender: Contender) -> Controller:
    replayed = _replayed(split)
    if contender.is_oracle:
        return OracleController(replayed.workload.traces, replayed.cost_model, replayed.contract)
    return contender.controller(replayed.contract)


def _serve(
    split: Split, scenario: str, repeat: int, contenders: Sequence[Contender]
) -> list[Served]:
    """One scenario and repeat, in a process of the pool, by every contender."""
    return [
        _engine(split, contender.granularity).serve(
            _arrivals(split, scenario, repeat), _controller(split, contender)
        )
        for contender in contenders
    ]


def _observe(contender: Contender, scenario: str) -> np.ndarray:
    """What a contender observes, in a process of the pool."""
    engine = _engine("eval", contender.granularity)
    observer = _Observer(_controller("eval", contender))
    engine.serve(_arrivals("eval", scenario, 0), observer)
    return np.concatenate(observer.rows)
