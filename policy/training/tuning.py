"""Tuning of the rules on recorded training requests: one key after the other.

Every contender starts from its own section. For each key of its grid all values are tried, the
others held, and the fastest is kept; the present one stays where nothing is faster, so that a
tuned rule is never slower than it was on these requests. After the last key the round begins anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract import NONE
from .benchmark import fixed_contenders
from .benchmark_replay import ReplayPool
from .contenders import Contender
from .tuned_schedule import schedules
from .tuning_config import TuningConfig

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """A section that was tried.

    Attributes:
        contender: Its name.
        change: What was changed of the section that was best before; empty for the start.
        section: What decided.
        speedups: Speed over none by scenario.
    """

    contender: str
    change: str
    section: Section
    speedups: Mapping[str, float]

    @property
    def score(self) -> float:
        """Geometric mean of the speedups."""
        return math.prod(self.speedups.values()) ** (1 / len(self.speedups))


@dataclass
class Tuning:
    """A contender's search.

    Attributes:
        trials: In order; the first is the start.
    """

    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """The fastest; of equals the earliest."""
        return max(self.trials, key=lambda trial: trial.score)


class Judge:
    """Replays sections on training requests, each only once.

    Args:
        pool: Replays.
        num_repeats: Of every scenario.
    """

    def __init__(self, pool: ReplayPool, num_repeats: int) -> None:
        self._pool = pool
        self._num_repeats = num_repeats
        self._tok_per_s: dict[str, dict[str, float]] = {}

    def serve(self, contenders: Iterable[Contender]) -> None:
        """Replay those that are new."""
        new = {one.section for one in contenders} - set(self._tok_per_s)
        if not new:
            return
        results = self._pool.replay(
            [Contender(section, section) for section in sorted(new)], "train", self._num_repeats
        )
        for section in new:
            self._tok_per_s[section] = {
                scenario: results.tok_per_s(scenario, section) for scenario in results.scenarios
            }

    def speedups(self, contender: Contender) -> dict[str, float]:
        """Speed over none by scenario, of a contender that was served; so must none be."""
        none = self._tok_per_s[Contender.fixed(NONE).section]
        return {
            scenario: tok_per_s / none[scenario]
            for scenario, tok_per_s in self._tok_per_s[contender.section].items()
        }


def tune(config: TuningConfig) -> dict[str, Tuning]:
    """Search every contender's parameters.

    Returns:
        The searches by contender.

    Raises:
        DraftgymError: If the traces, their prices, or a section cannot be used.
    """
    tunings = {name: Tuning() for name in config.contenders}
    fixed = fixed_contenders(config.benchmark())

    def try_out(proposals: Iterable[tuple[str, str, Section]]) -> None:
        named = [
            (name, change, section, Contender.of(name, section))
            for name, change, section in proposals
            if section not in [trial.section for trial in tunings[name].trials]
        ]
        judge.serve(contender for *_, contender in named)
        for name, change, section, contender in named:
            trial = Trial(name, change, section, judge.speedups(contender))
            tunings[name].trials.append(trial)

    with ReplayPool(config.benchmark(), "train") as pool:
        judge = Judge(pool, config.num_repeats)
        judge.serve(fixed)
        try_out((name, "", section) for name, section in config.contenders.items())
        try_out(
            (name, f"best fixed lengths of {drafter}", {**section, **schedule})
            for name, section in config.contenders.items()
            if section.get("name") == "batch_schedule"
            for drafter, schedule in schedules(config, judge.speedups).items()
        )
        for _ in range(config.num_rounds):
            before = {name: tuning.best for name, tuning in tunings.items()}
            for turn in range(max(map(len, config.grids.values()), default=0)):
                try_out(_proposals(config.grids, tunings, turn))
            if before == {name: tuning.best for name, tuning in tunings.items()}:
                break
    return tunings


def _proposals(
    grids: Mapping[str, Mapping[str, tuple[Any, ...]]], tunings: Mapping[str, Tuning], turn: int
) -> Iterator[tuple[str, str, Section]]:
    """The values of every contender's key whose turn it is."""
    for name, grid in grids.items():
        for key in list(grid)[turn : turn + 1]:
            for value in grid[key]:
                section = _changed(tunings[name].best.section, key.split("."), value)
                yield name, f"{key}={json.dumps(value)}", section


def _changed(section: Section, path: list[str], value: Any) -> dict[str, Any]:
    """A copy with another value at a path of keys."""
    key, *rest = path
    return {**section, key: _changed(section.get(key, {}), rest, value) if rest else value}
