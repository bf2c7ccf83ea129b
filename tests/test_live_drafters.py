"""Every drafter and combination on live vLLM: lossless, obedient, up to the end of the context."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from envs.workload import WorkloadRequest
from policy.baselines.fixed import FixedController

from . import live

NUM_TOKENS = 48
every_drafter = pytest.mark.parametrize("drafter", live.EVERY_DRAFTER.max_lengths)
needs_suffix = pytest.mark.skipif(not live.HAS_SUFFIX, reason="`make suffix` was not run")


@pytest.fixture(scope="module")
def engine(plain_outputs):
    """An engine with every drafter; the KV cache is too small for eight of the requests."""
    kv_bytes_per_token = 30 * 2 * 3 * 64 * 4 + 2 * 3 * 64 * 4
    engine = live.make_engine(
        drafters=live.EVERY_DRAFTER, kv_cache_memory_bytes=kv_bytes_per_token * 1000
    )
    yield engine
    engine.close()


@pytest.fixture
def preempted(engine, monkeypatch):
    """Requests that the scheduler preempts during the test."""
    names, scheduler = [], engine._core.scheduler
    preempt = scheduler._preempt_request

    def count(request, *args, **rest):
        names.append(request.request_id)
        return preempt(request, *args, **rest)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    return names


def members_of(contract, drafter):
    """Names of the drafters that may draft where one is chosen."""
    return contract.members(drafter) if contract.is_combination(drafter) else (drafter,)


class Obeyed:
    """Passes decisions of a controller on, and holds every record against them."""

    def __init__(self, inner, contract):
        self.inner, self.contract = inner, contract
        self.asked, self.used, self.mixed = {}, Counter(), 0

    def decide(self, record, observation):
        names = self.contract.drafters
        for row, req_id in enumerate(record.req_ids):
            drafted = int(record.num_draft_tokens[row])
            drafter, length, *_ = self.asked.get(req_id, (0, 0))
            member = names[record.drafter[row]]
            assert drafted <= length
            assert drafted <= self.contract.max_lengths[record.drafter[row]]
            assert not drafted or member in members_of(self.contract, names[drafter])
            self.used[names[drafter], member, length if drafted == length else None] += 1
        self.mixed += len(set(record.drafter.tolist())) == 1 + len(self.contract.proposers)
        actions = self.contract.canonical_actions(self.inner.decide(record, observation))
        actions = np.broadcast_to(actions, (record.num_rows, actions.shape[1]))
        self.asked = dict(zip(record.req_ids, map(tuple, actions.tolist()), strict=True))
        return actions


def serve(engine, controller, requests):
    engine.hook.controller = watch = Obeyed(controller, engine.contract)
    return engine.generate(requests, concurrency=8), watch


@every_drafter
def test_greedy_output_is_identical_with_any_drafter(engine, plain_outputs, drafter):
    controller = FixedController(engine.contract, drafter, 16)
    before = engine.hook.num_accepted_tokens.copy()
    outputs, watch = serve(engine, controller, live.make_requests(6, max_tokens=NUM_TOKENS))
    accepted = engine.hook.num_accepted_tokens - before
    assert outputs == {name: plain_outputs[name][:NUM_TOKENS] for name in outputs}
    assert accepted.total() > 10
    assert accepted.keys() <= set(members_of(engine.contract, drafter))
    if engine.contract.is_combination(drafter):
        used = {member for chosen, member, _ in watch.used if chosen == drafter}
        assert len(used - {"none"}) > 1, "a combination that always takes the same is none"


@every_drafter
def test_every_length_is_obeyed(engine, plain_outputs, drafter):
    index = engine.contract.drafters.index(drafter)
    longest = engine.contract.max_lengths[index]
    steps = iter(range(10_000))

    class Cycling:
        def decide(self, record, observation):
            lengths = (np.arange(record.num_rows) + next(steps)) % (longest + 1)
            return np.stack([np.full(record.num_rows, index), lengths], axis=1)

    outputs, watch = serve(engine, Cycling(), live.make_requests(6, max_tokens=NUM_TOKENS))
    assert outputs == {name: plain_outputs[name][:NUM_TOKENS] for name in outputs}
    assert {1, 2, 3, 4} <= {length for chosen, _, length in watch.used if chosen == drafter}


@every_drafter
def test_drafts_stop_at_the_end_of_the_context(engine, drafter):
    (request,) = live.make_requests(1, max_tokens=1)
    room = 24
    filler = (request.prompt_token_ids * 20)[: live.MODEL.max_model_len - room]
    controller = FixedController(engine.contract, drafter, 16)
    request = WorkloadRequest("long", filler, 10_000, 0.0, "test")
    outputs, _ = serve(engine, controller, [request])
    assert 0 < len(outputs["long"]) <= room


def test_a_batch_in_which_every_request_uses_another_drafter(engine, plain_outputs, preempted):
    """Requests are preempted meanwhile; the suffix trees hold what a new one would."""
    checked = Counter()

    class AnotherForEachRow:
        step = 0

        def decide(self, record, observation):
            if live.HAS_SUFFIX:
                checked.update(compare_trees(engine, record))
            self.step += 1
            rows = np.arange(record.num_rows)
            drafters = (rows + self.step) % len(engine.contract.drafters)
            return np.stack([drafters, 1 + (rows * 3 + self.step) % 12], axis=1)

    before = engine.hook.num_accepted_tokens.copy()
    requests = live.make_requests(8, max_tokens=96)
    outputs, watch = serve(engine, AnotherForEachRow(), requests)
    accepted = engine.hook.num_accepted_tokens - before
    assert outputs == {name: plain_outputs[name][:96] for name in outputs}
    assert preempted
    assert watch.mixed > 2
    assert min(accepted[name] for name in engine.contract.proposers) > 5
    assert not live.HAS_SUFFIX or checked[True] > 50


def compare_trees(engine, record):
    """Hold each request's suffix offer against that of a tree made anew; whether there was one."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    batch, offer, found_any = engine.runner.input_batch, record.token_offers["suffix"], []
    for row, at in enumerate(engine.hook._engine_rows):
        num_prompt = batch.num_prompt_tokens[at]
        context = batch.token_ids_cpu[at, : record.num_context_tokens[row]]
        fresh = SuffixDecodingCache(live.EVERY_DRAFTER.settings.suffix_max_tree_depth, 0)
        fresh.start_request("a", context[:num_prompt])
        fresh.add_active_response("a", context[num_prompt:])
        found = fresh.speculate("a", context, max_spec_tokens=16)
        length = min(12, len(found.token_ids))
        assert offer.num_draft_tokens[row] == length
        expected = np.float32(found.probs[:length])
        np.testing.assert_array_equal(offer.survival[row, :length], expected)
        found_any.append(length > 0)
    return found_any


@needs_suffix
def test_ended_and_aborted_requests_leave_no_tree_behind(engine):
    suffix = engine.hook._token_drafters["suffix"]
    engine.hook.controller = FixedController(engine.contract, "suffix", 4)
    prompts = live.make_requests(6, max_tokens=64)
    for round_number in range(3):
        for request in prompts:
            name = f"{round_number}-{request.request_id}"
            engine.add(WorkloadRequest(name, request.prompt_token_ids, 64, 0.0, "test"))
        for _ in range(3):
            engine.llm_engine.step()
        engine.abort_all()
    engine.generate(live.make_requests(2, max_tokens=4)[1:], concurrency=8)
    assert len(suffix._num_read) <= 1
    assert len(suffix._cache.active_requests) <= 1
    assert len(suffix._pledges) <= 1
