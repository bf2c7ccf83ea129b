"""Scenarios: how load and data change over a run, the same for every policy.

A scenario is a list of phases. A phase is a number of requests, sent either so that a constant
number of them is in flight (closed loop) or at random times of a given rate (open loop). Phases
follow each other by requests sent, not by time: a faster policy meets the same requests in the
same order, only sooner. Steps, ramps, bursts and shifts of the data are all lists of phases.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policy.errors import ConfigError

from .workload import Slot, WorkloadRequest


@dataclass(frozen=True)
class Phase:
    """A stretch of a scenario. Give exactly one of `concurrency` and `request_rate_per_s`.

    Attributes:
        num_requests: Requests sent in the phase.
        concurrency: Requests in flight; each that ends is replaced by the next one.
        request_rate_per_s: Mean rate of Poisson arrivals, in requests per second of engine time.
        kinds: Weight of each prompt kind; None takes the workload's.

    Raises:
        ConfigError: A value is out of range, or the two loads are given both or neither.
    """

    num_requests: int
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    kinds: Mapping[str, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigError(f"num_requests is {self.num_requests}; make it 1 or more.")
        if (self.concurrency is None) == (self.request_rate_per_s is None):
            raise ConfigError(
                "A phase needs either concurrency or request_rate_per_s; give exactly one."
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; make it 1 or more.")
        rate = self.request_rate_per_s
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"request_rate_per_s is {rate}; make it a number above 0.")


@dataclass(frozen=True)
class Scenario:
    """Phases, one after the other.

    Attributes:
        phases: In order.
        temperature: Sampling temperature of every request; None takes the workload's.

    Raises:
        ConfigError: If there is no phase, or the temperature is out of range.
    """

    phases: tuple[Phase, ...]
    temperature: float | None = None

    def __post_init__(self) -> None:
        if not self.phases:
            raise ConfigError("A scenario has no phases; give it at least one.")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; make it 0 or more, or null.")

    @property
    def num_requests(self) -> int:
        """Requests of a run."""
        return sum(phase.num_requests for phase in self.phases)

    @property
    def max_concurrency(self) -> int:
        """Most requests that a closed loop has in flight; 0 without one."""
        return max(phase.concurrency or 0 for phase in self.phases)

    @property
    def constant_concurrency(self) -> int | None:
        """Requests in flight where load, data and temperature are the usual ones throughout."""
        phase = self.phases[0]
        is_usual = len(self.phases) == 1 and phase.kinds is None and self.temperature is None
        return phase.concurrency if is_usual else None

    def slots(self) -> Iterator[Slot]:
        """What each request is drawn from, in order.

        The first requests of a closed loop start together, so their lengths are staggered; see
        `Workload.episode`.
        """
        for phase in self.phases:
            for index in range(phase.num_requests):
                is_first_wave = index < (phase.concurrency or 0)
                yield Slot(phase.kinds, is_first_wave, self.temperature)


class Arrival(NamedTuple):
    """A request and when it came, in seconds of engine time."""

    request: WorkloadRequest
    arrival_s: float


class Arrivals:
    """The requests of one run of a scenario: taken once, in order, when they are due.

    Args:
        scenario: Says when.
        requests: One for each slot of the scenario.
        seed: Of the open loop's times.
    """

    def __init__(self, scenario: Scenario, requests: Iterator[WorkloadRequest], seed: int) -> None:
        self._gaps = random.Random(f"arrivals {seed}")
        self._requests = requests
        self._phases = itertools.chain.from_iterable(
            itertools.repeat(phase, phase.num_requests) for phase in scenario.phases
        )
        self._phase = next(self._phases, None)
        self._due_s = self._gap_s()

    @property
    def are_over(self) -> bool:
        """Whether every request was taken."""
        return self._phase is None

    def take_due(self, num_unfinished_reqs: int, now_s: float) -> list[Arrival]:
        """Take the requests that are due.

        Args:
            num_unfinished_reqs: Requests that were taken and have not ended.
            now_s: Engine time since the run began.
        """
        due: list[Arrival] = []
        while self._phase is not None:
            limit = self._phase.concurrency
            if limit is None:
                if self._due_s > now_s:
                    break
                due.append(Arrival(next(self._requests), self._due_s))
                sent_s = self._due_s
            else:
                if num_unfinished_reqs + len(due) >= limit:
                    break
                due.append(Arrival(next(self._requests), now_s))
                sent_s = now_s
            self._phase = next(self._phases, None)
            self._due_s = sent_s + self._gap_s()
        return due

    def next_s(self) -> float:
        """When the next request of an open loop comes; an idle engine may skip to there."""
        return self._due_s

    def _gap_s(self) -> float:
        if self._phase is None or self._phase.request_rate_per_s is None:
            return 0.0
        return self._gaps.expovariate(self._phase.request_rate_per_s)
