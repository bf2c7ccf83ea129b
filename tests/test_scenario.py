"""Scenarios: what comes when, the same for every policy."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy.stats import kstest

from envs.scenario import Arrivals, Phase, Scenario
from envs.workload import WorkloadRequest
from policy.config import from_mapping
from policy.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "conf" / "workload" / "scenario"


def requests():
    for index in itertools.count():
        yield WorkloadRequest(str(index), (1, 2), 8, 0.0, "code")


def names(arrivals):
    return [int(arrival.request.request_id) for arrival in arrivals]


def test_a_closed_loop_fills_up_and_changes_its_load_by_requests_sent():
    scenario = Scenario((Phase(3, concurrency=2), Phase(4, concurrency=3), Phase(1, concurrency=1)))
    arrivals = Arrivals(scenario, requests(), seed=0)
    assert names(arrivals.take_due(0, 0.0)) == [0, 1]
    assert names(arrivals.take_due(2, 1.0)) == []
    # Request 2 is the first phase's last one; the next phase at once allows a third.
    assert names(arrivals.take_due(1, 2.0)) == [2, 3]
    assert names(arrivals.take_due(0, 3.0)) == [4, 5, 6]
    assert not arrivals.are_over
    assert names(arrivals.take_due(1, 4.0)) == []
    (last,) = arrivals.take_due(0, 5.0)
    assert (last.request.request_id, last.arrival_s) == ("7", 5.0)
    assert arrivals.are_over
    assert arrivals.take_due(0, 6.0) == []


def test_poisson_arrivals_are_exponential_seeded_and_blind_to_the_engines_speed():
    scenario = Scenario((Phase(2000, request_rate_per_s=4.0),))

    def times(seed, step_s):
        arrivals, now_s, times = Arrivals(scenario, requests(), seed), 0.0, []
        while not arrivals.are_over:
            times += [arrival.arrival_s for arrival in arrivals.take_due(7, now_s)]
            now_s += step_s
        return times

    gaps = np.diff([0.0, *times(1, 0.5)])
    assert kstest(gaps, "expon", args=(0, 1 / 4)).pvalue > 0.01
    assert times(1, 0.5) == times(1, 31.0)
    assert times(1, 0.5) != times(2, 0.5)


def test_an_open_loop_says_when_its_next_request_comes():
    arrivals = Arrivals(Scenario((Phase(1, 1), Phase(2, request_rate_per_s=1.0))), requests(), 0)
    assert names(arrivals.take_due(0, 10.0)) == [0]
    assert arrivals.take_due(0, 10.0) == []
    due_s = arrivals.next_s()
    assert due_s > 10
    (arrival,) = arrivals.take_due(5, due_s)
    assert arrival.arrival_s == due_s


def test_slots_stagger_what_starts_together_and_carry_the_phases_kinds():
    scenario = Scenario((Phase(3, 2), Phase(2, request_rate_per_s=1.0, kinds={"chat": 1.0})))
    slots = list(scenario.slots())
    assert [slot.is_first_wave for slot in slots] == [True, True, False, False, False]
    assert [slot.kinds for slot in slots] == [None] * 3 + [{"chat": 1.0}] * 2
    assert (scenario.num_requests, scenario.max_concurrency) == (5, 2)
    assert {slot.temperature for slot in slots} == {None}
    sampled = Scenario((Phase(3, 2),), temperature=0.7)
    assert [slot.temperature for slot in sampled.slots()] == [0.7] * 3


def test_a_constant_load_is_one_phase_of_the_usual_requests():
    assert Scenario((Phase(8, 4),)).constant_concurrency == 4
    for other in (
        Scenario((Phase(8, 4), Phase(8, 4))),
        Scenario((Phase(8, request_rate_per_s=1.0),)),
        Scenario((Phase(8, 4, kinds={"chat": 1.0}),)),
        Scenario((Phase(8, 4),), temperature=0.7),
    ):
        assert other.constant_concurrency is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Scenario(()), "has no phases; give it at least one"),
        (lambda: Scenario((Phase(1, 1),), -0.1), "temperature is -0.1; make it 0 or more"),
        (lambda: Phase(0, concurrency=1), "num_requests is 0; make it 1"),
        (lambda: Phase(1), "give exactly one"),
        (lambda: Phase(1, concurrency=1, request_rate_per_s=1.0), "give exactly one"),
        (lambda: Phase(1, concurrency=0), "concurrency is 0; make it 1"),
        (lambda: Phase(1, request_rate_per_s=0.0), "request_rate_per_s is 0.0; make it a number"),
    ],
)
def test_senseless_scenarios_are_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_scenario_is_one(path):
    scenario = from_mapping(Scenario, OmegaConf.to_container(OmegaConf.load(path)), path.stem)
    assert 1 <= scenario.max_concurrency <= 32 or path.stem == "poisson"
    assert scenario.num_requests >= 10
