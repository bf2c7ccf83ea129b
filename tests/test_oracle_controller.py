"""The oracle decides with hindsight: it drafts what is accepted, and nothing fixed is faster."""

from __future__ import annotations

import numpy as np
import pytest

from envs.oracle_controller import OracleController
from envs.scenario import Arrivals, Phase, Scenario
from envs.simulator_state import TraceEngineConfig
from envs.trace_engine import TraceEngine
from envs.trace_workload import TraceWorkload
from policy.baselines.fixed import FixedController

from .synthetic_traces import PRICES_S, make_cost_model, make_traces

TRACES = make_traces(num_requests=24)
ENGINE = TraceEngine(TRACES, make_cost_model(), TRACES.contract(), TraceEngineConfig(8))


class Watching:
    def __init__(self, inner):
        self.inner, self.records, self.actions = inner, [], []

    def decide(self, record, observation):
        self.records.append(record)
        self.actions.append(self.inner.decide(record, observation))
        return self.actions[-1]


def serve(controller, scenario):
    requests = TraceWorkload(TRACES, (1,), 40).requests(3, scenario.slots())
    return ENGINE.serve(Arrivals(scenario, requests, 3), controller)


def oracle():
    return Watching(OracleController(TRACES, make_cost_model(), TRACES.contract()))


@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_no_fixed_setting_is_faster(concurrency):
    scenario = Scenario((Phase(24, concurrency),))
    fastest = min(
        serve(FixedController(TRACES.contract(), drafter, length), scenario).busy_s
        for drafter, length in (
            ("none", 0),
            ("ngram", 2),
            ("ngram", 8),
            ("eagle3", 1),
            ("eagle3", 4),
        )
    )
    assert serve(oracle(), scenario).busy_s < 0.95 * fastest


def test_all_that_is_verified_is_accepted():
    served = serve(oracle(), Scenario((Phase(24, 6),)))
    assert served.num_draft_tokens == served.num_accepted_tokens
    assert min(served.num_draft_tokens.values()) > 20


def test_alone_it_takes_the_most_tokens_per_second_of_every_step():
    """By trying every draft of both drafters, priced by hand."""
    watching = oracle()
    serve(watching, Scenario((Phase(12, 1),)))
    prompts = dict(zip(TRACES.request_ids, TRACES.prompts, strict=True))
    num_decided = 0
    for record, action in zip(watching.records, watching.actions, strict=True):
        name = record.req_ids[0].rsplit("-", 2)[0]
        request = TRACES.request_ids.index(name)
        outputs = int(record.num_context_tokens[0]) - len(prompts[name])
        left = len(TRACES.outputs(request)) - outputs
        if left <= 0:
            continue
        at = TRACES.starts[request] + outputs
        step_s = PRICES_S["num_engine_steps"] + PRICES_S["num_verified_tokens"]
        step_s += PRICES_S["num_context_tokens"] * record.num_context_tokens[0]
        rates = {(0, 0): 1 / step_s}
        for drafter, (pass_s, token_s) in {"ngram": (0, 0), "eagle3": (0.004, 0.0002)}.items():
            accepted = int(TRACES.drafters[drafter].num_accepted_tokens[at])
            length = min(accepted, left - 1)
            if length:
                price_s = step_s + length * (PRICES_S["num_verified_tokens"] + pass_s + token_s)
                rates[TRACES.contract().drafters.index(drafter), length] = (1 + length) / price_s
        best = max(rates.values())
        assert rates[tuple(action[0].tolist())] == pytest.approx(best)
        num_decided += len(rates) > 1
    assert num_decided > 50


def test_what_it_knows_of_a_request_is_by_its_recorded_name():
    watching = oracle()
    serve(watching, Scenario((Phase(8, 8),)))
    assert all(
        action.shape == (record.num_rows, 2)
        for record, action in zip(watching.records, watching.actions, strict=True)
    )
    assert len({name for record in watching.records for name in record.req_ids}) == 8
    assert np.concatenate(watching.actions)[:, 1].max() > 3
