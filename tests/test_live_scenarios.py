"""Scenarios on live vLLM, and drafts that a controller shortens once they are made."""

from __future__ import annotations

import json

import numpy as np
import pytest

from envs.scenario import Arrivals, Phase, Scenario
from policy.baselines.build import build_baseline
from policy.controllers import SafeController

from . import live
from .synthetic_traces import make_cost_model

STEPS = Scenario((Phase(2, concurrency=1), Phase(4, concurrency=4), Phase(2, concurrency=1)))
OPEN_LOOP = Scenario((Phase(5, request_rate_per_s=3.0),))
SAMPLED = Scenario((Phase(8, concurrency=4),), temperature=0.7)


def serve(engine, scenario):
    workload = live.make_workload(output_tokens=16, max_prompts_per_kind=2)
    requests = list(workload.requests(1, scenario.slots()))
    return requests, engine.serve_scenario(Arrivals(scenario, iter(requests), seed=1))


@pytest.mark.parametrize("scenario", [STEPS, OPEN_LOOP], ids=["steps", "open loop"])
def test_every_request_is_served_to_its_end_whoever_decides(engine, scenario):
    served = []
    for section in ({"name": "fixed"}, {"name": "random", "seed": 2}):
        engine.hook.controller = build_baseline(engine.contract, section)
        requests, run = serve(engine, scenario)
        served.append([(one.request_id, one.num_output_tokens) for one in run.requests])
        assert [name for name, _ in served[-1]] == [one.request_id for one in requests]
        assert all(
            0 < one.num_output_tokens <= request.max_tokens
            for one, request in zip(run.requests, requests, strict=True)
        )
        assert sum(one.engine_s for one in run.requests) == pytest.approx(run.busy_s)
        assert all(one.arrival_s < one.first_token_s <= one.finish_s for one in run.requests)
        assert run.steps["num_tokens"].sum() == run.num_tokens
        assert run.steps["num_running_reqs"].max() <= (
            scenario.max_concurrency or scenario.num_requests
        )
    assert served[0] == served[1]
    assert run.num_drafts.keys() == {"ngram", "eagle3"}


class Watching:
    """Drafts with EAGLE, or as told, and keeps the records."""

    def __init__(self, action):
        self.action, self.records = action, []

    def decide(self, record, observation):
        self.records.append(record)
        return np.array([self.action])


def test_requests_are_sampled_at_the_temperature_of_the_scenario(engine):
    watching = Watching((2, 4))
    engine.hook.controller = SafeController(watching, engine.contract)
    requests, run = serve(engine, SAMPLED)
    assert not engine.hook.controller.num_fallbacks
    assert {request.temperature for request in requests} == {0.7}
    for record in watching.records:
        np.testing.assert_array_equal(record.temperature, np.float32(0.7))
    assert [one.request_id for one in run.requests] == [one.request_id for one in requests]
    assert all(
        0 < one.num_output_tokens <= request.max_tokens
        for one, request in zip(run.requests, requests, strict=True)
    )
    assert 0 < run.num_accepted_tokens["eagle3"] < run.num_draft_tokens["eagle3"]
    drafted = run.num_draft_tokens_per_pos["eagle3"]
    accepted = run.num_accepted_tokens_per_pos["eagle3"]
    assert len(drafted) == len(accepted) == 4
    assert (np.diff(accepted) <= 0).all()
    assert (accepted <= drafted).all()


def test_sampled_outputs_are_not_the_greedy_ones(engine):
    workload = live.make_workload(output_tokens=16, max_prompts_per_kind=2)
    outputs = {}
    for temperature in (0.0, 0.7):
        scenario = Scenario((Phase(8, concurrency=8),), temperature)
        engine.hook.controller = build_baseline(engine.contract, {"name": "fixed"})
        requests = list(workload.requests(1, scenario.slots()))
        outputs[temperature] = engine.generate(requests, concurrency=8)
    assert outputs[0.0].keys() == outputs[0.7].keys()
    assert outputs[0.0] != outputs[0.7]


class Cutting:
    """Drafts in full with EAGLE and lets one token of each draft through."""

    def __init__(self):
        self.survival, self.drafts, self.verified = [], [], []

    def decide(self, record, observation):
        self.verified.append(record.num_draft_tokens)
        return np.array([[2, 4]])

    def admit(self, record, drafts, survival):
        self.drafts.append(drafts)
        self.survival.append(survival)
        return np.minimum(drafts[:, 1], 1)


def test_cut_drafts_are_made_in_full_and_verified_in_part(
    engine, requests_of_128_tokens, plain_outputs
):
    cutting = Cutting()
    engine.hook.controller = SafeController(cutting, engine.contract)
    requests = requests_of_128_tokens[:8]
    outputs = engine.generate(requests, concurrency=4)
    assert outputs == {one.request_id: plain_outputs[one.request_id] for one in requests}
    assert not engine.hook.controller.num_fallbacks
    assert max(drafts[:, 1].max() for drafts in cutting.drafts) == 4
    assert max(lengths.max() for lengths in cutting.verified) == 1
    for drafts, survival in zip(cutting.drafts, cutting.survival, strict=True):
        is_drafted = np.arange(survival.shape[1]) < drafts[:, 1:]
        np.testing.assert_array_equal(np.isnan(survival), ~is_drafted)
        assert (survival[is_drafted] <= 1).all()


def test_adaptive_verification_changes_no_output(
    engine, requests_of_128_tokens, plain_outputs, tmp_path
):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"cost_model": make_cost_model().state_dict()}))
    section = {"name": "adaptive_verification", "cost_model": str(path), "min_match_length": 3}
    rule = build_baseline(engine.contract, section)
    engine.hook.controller = SafeController(rule, engine.contract)
    requests = requests_of_128_tokens[8:16]
    outputs = engine.generate(requests, concurrency=4)
    assert outputs == {one.request_id: plain_outputs[one.request_id] for one in requests}
    assert not engine.hook.controller.num_fallbacks
