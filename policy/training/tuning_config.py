"""Everything `scripts/tune_baselines.py` can be told, as one validated dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.live import DraftersConfig, ModelConfig
from envs.replayed import TraceConfig
from envs.scenario import Scenario
from envs.workload import WorkloadConfig

from ..errors import ConfigError, hint
from .benchmark_config import BenchmarkConfig
from .config import LoggerConfig


@dataclass(frozen=True)
class TuningConfig:
    """A search for the rules' parameters.

    Attributes:
        model: The engine that the traces stand for.
        drafters: What the rules choose from.
        workload: Lengths; the requests are the recorded ones.
        scenarios: What is served; the aim is the geometric mean of their speeds over none.
        contenders: Where the search starts, as `scripts/evaluate.py` takes them.
        grids: Values that are tried, by contender and key; `acceptance.decay` is a key within a
            section. Contenders without a grid stay as they are, but for `batch_schedule`.
        fixed_lengths: Draft lengths by drafter of which a `batch_schedule` is made.
        trace: What is replayed.
        out: YAML file of the tuned contenders.
        output_dir: Where the table of all trials goes.
        num_rounds: Times that all keys are gone through, at most.
        num_repeats: Times that each scenario is replayed, with other requests each time.
        num_processes: Processes that replay.
        seed: Of requests and arrivals.
    """

    model: ModelConfig
    drafters: DraftersConfig
    workload: WorkloadConfig
    scenarios: Mapping[str, Scenario]
    contenders: Mapping[str, Mapping[str, Any]]
    grids: Mapping[str, Mapping[str, tuple[Any, ...]]]
    fixed_lengths: Mapping[str, tuple[int, ...]]
    trace: TraceConfig
    out: str
    output_dir: str
    num_rounds: int = 2
    num_repeats: int = 1
    num_processes: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_rounds < 1:
            raise ConfigError(f"num_rounds is {self.num_rounds}; make it 1 or more.")
        for name, grid in self.grids.items():
            if name not in self.contenders:
                raise ConfigError(
                    f"grids names '{name}', which is no contender; {hint(name, self.contenders)}"
                )
            for key, values in grid.items():
                if not values:
                    raise ConfigError(f"grids.{name}.{key} is empty; give values to try.")
        self.benchmark()

    def benchmark(self) -> BenchmarkConfig:
        """The same as a benchmark on traces alone."""
        return BenchmarkConfig(
            model=self.model,
            drafters=self.drafters,
            workload=self.workload,
            scenarios=self.scenarios,
            contenders=self.contenders,
            fixed_lengths=self.fixed_lengths,
            trace=self.trace,
            live=None,
            logger=LoggerConfig(),
            output_dir=self.output_dir,
            num_repeats=self.num_repeats,
            seed=self.seed,
            num_processes=self.num_processes,
        )
