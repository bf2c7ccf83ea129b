"""Scenarios served on traces: every request to its end, whoever decides."""

from __future__ import annotations

import numpy as np
import pytest

from envs.scenario import Arrivals, Phase, Scenario
from envs.simulator_state import TraceEngineConfig
from envs.trace_engine import TraceEngine
from envs.trace_workload import TraceWorkload
from policy.baselines.fixed import FixedController
from policy.baselines.random import RandomController
from policy.errors import ConfigError

from .synthetic_traces import make_cost_model, make_traces

TRACES = make_traces(num_requests=24)
SCENARIO = Scenario((Phase(4, concurrency=2), Phase(12, concurrency=6), Phase(3, concurrency=1)))


class Watching:
    """Lets another controller decide, and keeps the records."""

    def __init__(self, inner):
        self.inner, self.records = inner, []

    def decide(self, record, observation):
        self.records.append(record)
        return self.inner.decide(record, observation)


class Cutting(Watching):
    """Admits at most one token of each draft."""

    def __init__(self, inner):
        super().__init__(inner)
        self.drafts, self.survival = [], []

    def admit(self, record, drafts, survival):
        self.drafts.append(drafts)
        self.survival.append(survival)
        return np.minimum(drafts[:, 1], 1)


@pytest.fixture(scope="module")
def trace_engine():
    return TraceEngine(TRACES, make_cost_model(), TRACES.contract(), TraceEngineConfig(8))


def serve(engine, controller, scenario=SCENARIO, seed=3):
    workload = TraceWorkload(TRACES, (1,), 40)
    return engine.serve(
        Arrivals(scenario, workload.requests(seed, scenario.slots()), seed), controller
    )


def test_what_was_served_before_makes_no_difference(trace_engine):
    contract = trace_engine.contract
    first = serve(trace_engine, FixedController(contract, "none"))
    serve(trace_engine, FixedController(contract, "eagle3", 3))
    again = serve(trace_engine, FixedController(contract, "none"))
    assert again.busy_s == first.busy_s
    np.testing.assert_array_equal(again.steps, first.steps)


def test_every_policy_serves_the_same_requests_to_their_ends(trace_engine):
    contract = trace_engine.contract
    runs = [
        serve(trace_engine, controller)
        for controller in (
            FixedController(contract, "none"),
            FixedController(contract, "ngram", 8),
            RandomController(contract, seed=1),
        )
    ]
    expected = [(request.request_id, request.num_output_tokens) for request in runs[0].requests]
    assert len(expected) == SCENARIO.num_requests
    for run in runs:
        assert [(r.request_id, r.num_output_tokens) for r in run.requests] == expected
        assert sum(request.engine_s for request in run.requests) == pytest.approx(run.busy_s)
        assert run.steps["num_tokens"].sum() == run.num_tokens
        assert run.steps["num_running_reqs"].max() == 6
        assert all(r.arrival_s <= r.first_token_s <= r.finish_s for r in run.requests)
    assert runs[0].num_drafts == {}
    assert runs[1].busy_s < runs[0].busy_s


def test_controllers_hear_of_requests_that_ended(trace_engine):
    watching = Watching(FixedController(trace_engine.contract, "none"))
    served = serve(trace_engine, watching, seed=4)
    told = [name for record in watching.records for name in record.finished_req_ids]
    ended = {request.request_id for request in served.requests}
    assert len(told) == len(set(told))
    assert ended - set(told) == {max(served.requests, key=lambda one: one.finish_s).request_id}


def test_the_time_of_a_run_is_that_of_its_steps(trace_engine):
    served = serve(trace_engine, FixedController(trace_engine.contract, "none"))
    steps = served.steps
    assert served.busy_s == pytest.approx(steps["end_s"][-1])  # a closed loop never idles
    assert (np.diff(steps["end_s"]) > 0).all()


def test_requests_beyond_the_engine_wait_and_are_told(trace_engine):
    watching = Watching(FixedController(trace_engine.contract, "none"))
    served = serve(trace_engine, watching, Scenario((Phase(20, concurrency=20),)))
    assert served.steps["num_running_reqs"].max() == 8
    assert max(record.num_waiting_reqs for record in watching.records) == 12
    assert len(served.requests) == 20
    assert all(request.num_output_tokens for request in served.requests)


def test_an_idle_engine_skips_to_the_next_request(trace_engine):
    scenario = Scenario((Phase(6, request_rate_per_s=0.001),))
    served = serve(trace_engine, FixedController(trace_engine.contract, "none"), scenario)
    assert served.steps["end_s"][-1] > 100 * served.busy_s
    gaps = np.diff([request.arrival_s for request in served.requests])
    assert (gaps > 0).all()
    assert all(request.time_to_first_token_s < 1 for request in served.requests)


def test_drafts_that_are_cut_are_paid_but_not_verified(trace_engine):
    contract = trace_engine.contract
    whole, cutting = (
        Watching(FixedController(contract, "eagle3", 4)),
        Cutting(FixedController(contract, "eagle3", 4)),
    )
    serve(trace_engine, whole)
    served = serve(trace_engine, cutting)
    assert max(record.num_draft_tokens.max() for record in whole.records) == 4
    assert max(record.num_draft_tokens.max() for record in cutting.records) == 1
    assert max(record.num_draft_passes for record in cutting.records) == 4
    assert served.num_draft_tokens["eagle3"] == served.num_drafts["eagle3"]
    for drafts, survival in zip(cutting.drafts, cutting.survival, strict=True):
        is_drafted = np.arange(survival.shape[1]) < drafts[:, 1:]
        np.testing.assert_array_equal(np.isnan(survival), ~is_drafted)


def test_cutting_all_is_no_speculation_but_for_its_price(trace_engine):
    class Nothing(Cutting):
        def admit(self, record, drafts, survival):
            return np.zeros(record.num_rows, np.int64)

    served = serve(trace_engine, Nothing(FixedController(trace_engine.contract, "eagle3", 2)))
    plain = serve(trace_engine, FixedController(trace_engine.contract, "none"))
    assert served.num_drafts == {}
    assert len(served.steps) == len(plain.steps)
    assert served.busy_s > plain.busy_s


def test_another_temperature_than_the_traces_is_refused(trace_engine):
    none = FixedController(trace_engine.contract, "none")
    recorded = serve(trace_engine, none, Scenario((Phase(3, 2),), temperature=0.0))
    assert len(recorded.requests) == 3
    with pytest.raises(ConfigError, match=r"recorded at temperature 0\.0, not 0\.7; serve"):
        serve(trace_engine, none, Scenario((Phase(3, 2),), temperature=0.7))


def test_kinds_of_a_phase_are_drawn_and_unknown_ones_refused(trace_engine):
    def kinds(weights):
        scenario = Scenario((Phase(8, concurrency=2, kinds=weights),))
        served = serve(trace_engine, FixedController(trace_engine.contract, "none"), scenario)
        return {request.kind for request in served.requests}

    assert kinds({"chat": 1.0}) == {"chat"}
    assert kinds(None) == {"chat", "code"}
    with pytest.raises(ConfigError, match="no request of kind 'poems'; choose from chat, code"):
        kinds({"poems": 1.0})
