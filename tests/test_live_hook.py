"""The hook on live vLLM: lossless, obedient, never stale, and nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from envs.next_tokens import next_logprobs
from envs.workload import WorkloadRequest
from policy.baselines.fixed import FixedController
from policy.baselines.random import RandomController
from policy.contract import MODEL_DRAFTERS
from policy.training.losslessness import compare_outputs

from . import live
from .sampled import NUM_BRANCHES, Sampling, sample

NONE, NGRAM, EAGLE3 = 0, 1, 2


def test_random_drafters_and_lengths_per_request_leave_greedy_output_identical(
    engine, plain_outputs, requests_of_128_tokens
):
    engine.hook.controller = RandomController(engine.contract)
    before = engine.hook.num_accepted_tokens.copy()
    outputs = engine.generate(requests_of_128_tokens, concurrency=8)
    accepted = engine.hook.num_accepted_tokens - before
    assert len(outputs) == 32
    assert outputs == plain_outputs
    assert accepted["ngram"] > 50
    assert accepted["eagle3"] > 200


def test_every_row_gets_the_drafter_and_length_it_was_given(engine):
    requests = live.make_requests(6, max_tokens=40)
    actions = np.array([[NONE, 0], [EAGLE3, 1], [EAGLE3, 4], [NGRAM, 8], [NGRAM, 2], [EAGLE3, 2]])
    drafted = []

    class PerRequest:
        def decide(self, record, observation):
            if drafted:
                previous = drafted[-1]
                for row, req_id in enumerate(record.req_ids):
                    if req_id in previous:
                        drafter, length = previous[req_id]
                        assert record.num_draft_tokens[row] <= length
                        assert record.num_accepted_tokens[row] <= record.num_draft_tokens[row]
                        if record.num_draft_tokens[row]:
                            assert record.drafter[row] == drafter
                        exact = drafter == EAGLE3 and record.num_context_tokens[row] < 100
                        if exact and record.num_emitted_tokens[row]:
                            assert record.num_draft_tokens[row] in (length, 0)
            chosen = [actions[int(req_id.split("-")[1])] for req_id in record.req_ids]
            drafted.append(dict(zip(record.req_ids, map(tuple, chosen), strict=True)))
            return np.array(chosen)

    engine.hook.controller = PerRequest()
    engine.generate(requests, concurrency=8)
    assert len(drafted) > 10


@pytest.mark.parametrize("stretch", [1, 10, 50])
def test_the_model_drafter_drafts_the_same_after_a_stretch_without_it(engine, stretch):
    """S2: whatever was used before, it drafts as if it had read every step at once."""
    requests = live.make_requests(1, max_tokens=56)
    model, drafts, resumed = engine.hook._model, {}, {}

    class ReadingEveryStep:
        def decide(self, record, observation):
            tokens = model.draft(engine.hook._engine_rows, 3).token_ids
            drafts[int(record.num_context_tokens[0])] = tokens[0].tolist()
            return np.array([[NONE, 0]])

    class Alternating:
        steps = 0

        def decide(self, record, observation):
            self.steps += 1
            if self.steps % (stretch + 1):
                return np.array([[NONE, 0]])
            assert record.model_states["eagle3"].num_pending_tokens[0] >= min(stretch, 2)
            tokens = model.draft(engine.hook._engine_rows, 3).token_ids
            resumed[int(record.num_context_tokens[0])] = tokens[0].tolist()
            return np.array([[NONE, 0]])

    for controller in (ReadingEveryStep(), Alternating()):
        engine.hook.controller = controller
        engine.generate(requests, concurrency=8)
    assert len(resumed) >= 1
    assert resumed == {context: drafts[context] for context in resumed}


def test_requests_that_share_a_prefix_and_come_together_all_get_the_drafter(engine):
    """The first of them computes the prefix in the very step in which the others find it cached."""
    engine.llm_engine.reset_prefix_cache()
    shared = live.make_requests(1, max_tokens=8)[0].prompt_token_ids * 2
    requests = [
        WorkloadRequest(f"shared-{tail}", (*shared, 100 + tail, 200), 8, 0.0, "test")
        for tail in range(4)
    ]
    controller = live.ScriptedController([(EAGLE3, 2)] * 8)
    engine.hook.controller = controller
    engine.generate(requests, concurrency=4)
    assert controller.records[0].num_rows == 4
    assert controller.records[1].model_states["eagle3"].fresh.all()
    assert (controller.records[2].drafter == EAGLE3).all()


def test_probing_changes_neither_outputs_nor_later_drafts(engine, plain_outputs):
    """A probe drafts with every drafter at full length and leaves no trace of it."""
    hook, requests = engine.hook, live.make_requests(4, max_tokens=32)
    engine.read_prompts([request.prompt_token_ids for request in requests])
    probes = []

    class EveryThirdStepPlain:
        def __init__(self, probing):
            self.probing, self.history = probing, []

        def decide(self, record, observation):
            survival = record.model_states["eagle3"].survival
            done = record.drafter, record.num_draft_tokens, record.num_accepted_tokens, survival
            self.history.append([values.tolist() for values in done])
            step = len(self.history)
            if step % 3 == 0 and self.probing:
                probes.append(hook.probe())
            return np.array([[[EAGLE3, 3], [NGRAM, 4], [NONE, 0]][(step - 1) % 3]])

    histories = []
    for probing in (False, True):
        engine.hook.controller = controller = EveryThirdStepPlain(probing)
        outputs = engine.generate(requests, concurrency=4)
        assert outputs == {name: plain_outputs[name][:32] for name in outputs}
        histories.append(controller.history)
    for without, probed in zip(*histories, strict=True):
        assert without[:3] == probed[:3]
        np.testing.assert_allclose(without[3], probed[3], rtol=1e-4)
    assert len(probes) > 3
    for probe in probes:
        for tokens, survival, margin in zip(
            probe["eagle3"].token_ids, probe["eagle3"].survival, probe["eagle3"].margin, strict=True
        ):
            assert len(tokens) == 4  # whatever the request may still emit
            assert (np.diff(survival) <= 0).all()
            assert ((survival > 0) & (survival <= 1) & (margin >= 0)).all()
        assert all(len(tokens) <= 8 for tokens in probe["ngram"].token_ids)
        assert np.isnan(probe["ngram"].survival).all()
    assert any(tokens for probe in probes for tokens in probe["ngram"].token_ids)


@pytest.mark.parametrize(("drafter", "length"), [("none", 0), ("ngram", 8), ("eagle3", 4)])
def test_drafts_stop_at_the_end_of_the_context(engine, drafter, length):
    """S5: generation runs up to the very last token of the model's context."""
    (request,) = live.make_requests(1, max_tokens=1)
    room = 24
    filler = (request.prompt_token_ids * 20)[: live.MODEL.max_model_len - room]
    engine.hook.controller = FixedController(engine.contract, drafter, length)
    outputs = engine.generate([WorkloadRequest("long", filler, 10_000, 0.0, "test")], concurrency=8)
    assert 0 < len(outputs["long"]) <= room


def test_no_request_is_drafted_beyond_the_tokens_it_may_still_emit(engine):
    engine.hook.controller = FixedController(engine.contract, "eagle3", 4)
    before = engine.hook.num_draft_tokens["eagle3"]
    engine.generate(live.make_requests(4, max_tokens=2), concurrency=8)
    # The prompt's own step emits the first of two tokens: nothing is left to draft for.
    assert engine.hook.num_draft_tokens["eagle3"] == before


def test_sampled_tokens_are_distributed_as_without_speculation(engine, plain_continuations):
    """Random drafts change no probability.

    A faithful sampler fails this once in 500 changes of the seeds; the seeds are fixed.
    """
    engine.hook.controller = RandomController(engine.contract)
    before = engine.hook.num_draft_tokens.copy()
    ways = [Sampling(), Sampling(temperature=0.7, top_k=NUM_BRANCHES)]
    outputs = sample(engine, plain_continuations.prompt, ways, num_samples=256)
    drafted = engine.hook.num_draft_tokens - before
    assert min(drafted[name] for name in engine.contract.proposers) > 100
    for way, sampled in zip(ways, outputs, strict=True):
        assert plain_continuations.p_value(sampled, way) > 0.001


def test_differences_of_outputs_are_told_with_their_logits(engine, plain_outputs):
    """S10: how near a tie the target was where outputs part."""
    requests = live.make_requests(3, max_tokens=128)
    plain = {one.request_id: plain_outputs[one.request_id] for one in requests}
    same = compare_outputs(engine, requests, plain, plain)
    assert (same.num_identical, same.gaps) == (3, ())
    other = {**plain, "request-1": [*plain["request-1"][:5], -1]}
    result = compare_outputs(engine, requests, plain, other)
    assert result.num_identical == 2
    assert result.num_tokens - result.num_agreeing_tokens == len(plain["request-1"]) - 5
    (found,) = next_logprobs(engine, [[*requests[1].prompt_token_ids, *plain["request-1"][:5]]], 2)
    assert next(iter(found)) == plain["request-1"][5]
    (first, second), (gap,) = found.values(), result.gaps
    assert gap == pytest.approx(first - second, abs=1e-3)
    assert gap > 0
    assert result.describe().endswith(f"at most {gap:.3g} nats apart")


def test_ended_and_aborted_requests_leave_nothing_behind(engine):
    """S14: no state of a request outlives it, in any drafter."""
    engine.hook.controller = FixedController(engine.contract, "eagle3", 2)
    prompts = live.make_requests(8, max_tokens=64)
    for round_number in range(5):
        for request in prompts:
            name = f"{round_number}-{request.request_id}"
            engine.add(WorkloadRequest(name, request.prompt_token_ids, 64, 0.0, "test"))
        for _ in range(3):
            engine.llm_engine.step()
        engine.abort_all()
    engine.generate(prompts[:1], concurrency=8)
    engine.generate(prompts[1:2], concurrency=8)
    hook = engine.hook
    assert len(hook._known_req_ids) <= 1
    assert len(hook._token_drafters["ngram"]._pledges) <= 1
    assert len(hook._model._backlogs) <= 1


def test_the_records_add_up(engine):
    """Every emitted token is in a record, and its parts agree."""
    controller = live.ScriptedController([(EAGLE3, 3), (NGRAM, 4), (NONE, 0)] * 40)
    engine.hook.controller = controller
    outputs = engine.generate(live.make_requests(4, max_tokens=32), concurrency=4)
    emitted = sum(int(record.num_emitted_tokens.sum()) for record in controller.records)
    received = sum(len(tokens) for tokens in outputs.values())
    assert received <= emitted <= received + 4 * 5  # a stop may cut the last step's tokens
    for record in controller.records:
        assert (record.num_emitted_tokens == record.num_accepted_tokens + 1).all()
        assert ((record.drafter > 0) == (record.num_draft_tokens > 0)).all()
        survival = record.model_states["eagle3"].survival
        is_model = record.drafter == engine.contract.drafters.index(MODEL_DRAFTERS[0])
        assert (np.isfinite(survival).sum(axis=1)[is_model] > 0).all()
        assert np.isnan(survival[~is_model]).all()


def test_a_policy_that_fails_in_service_falls_back_and_loses_nothing(engine, plain_outputs):
    from policy.controllers import SafeController

    class Broken:
        def decide(self, record, observation):
            raise FloatingPointError("not a number")

    guarded = engine.hook.controller = SafeController(Broken(), engine.contract, fallback=(2, 2))
    requests = live.make_requests(2, max_tokens=32)
    outputs = engine.generate(requests, concurrency=8)
    assert outputs == {name: plain_outputs[name][:32] for name in outputs}
    assert guarded.num_fallbacks["FloatingPointError"] > 5


def test_a_drafter_that_fails_in_service_costs_drafts_and_no_request(engine, plain_outputs):
    hook = engine.hook
    propose = hook._model._propose
    calls = []

    def failing(rows, length):
        calls.append(length)
        if len(calls) % 3 == 0:
            raise RuntimeError("the drafter broke")
        return propose(rows, length)

    hook.controller = FixedController(engine.contract, "eagle3", 2)
    hook._is_serving, hook._model._propose = True, failing
    try:
        requests = live.make_requests(4, max_tokens=24)
        outputs = engine.generate(requests, concurrency=4)
    finally:
        hook._is_serving, hook._model._propose = False, propose
    assert outputs == {name: plain_outputs[name][:24] for name in outputs}
    assert hook.num_faults["RuntimeError"] == len(calls) // 3 > 0
