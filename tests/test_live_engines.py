"""Live engines of their own kind beside each other: vLLM's own drafting, and a tiny KV cache.

One process holds one engine at a time, so these tests start and close their own.
"""

from __future__ import annotations

import pytest

from policy.baselines.fixed import FixedController
from policy.baselines.random import RandomController

from . import live


def test_the_model_drafter_accepts_what_vllms_own_eagle_accepts(plain_outputs):
    requests = live.make_requests(8, max_tokens=32)
    hooked = live.make_engine()
    try:
        hooked.hook.controller = FixedController(hooked.contract, "eagle3", 3)
        outputs = hooked.generate(requests, concurrency=8)
        accepted = hooked.hook.num_accepted_tokens["eagle3"]
        drafted = hooked.hook.num_draft_tokens["eagle3"]
    finally:
        hooked.close()
    assert outputs == {name: plain_outputs[name][:32] for name in outputs}

    own = live.make_unhooked_engine(num_speculative_tokens=3)
    counts = {"drafted": 0, "accepted": 0}
    make_stats = own._core.scheduler.make_spec_decoding_stats

    def count(stats, num_draft_tokens, num_accepted_tokens, **rest):
        counts["drafted"] += num_draft_tokens
        counts["accepted"] += num_accepted_tokens
        return make_stats(
            stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            **rest,
        )

    own._core.scheduler.make_spec_decoding_stats = count
    try:
        outputs = own.generate(requests, concurrency=8)
    finally:
        own.close()
    assert outputs == {name: plain_outputs[name][:32] for name in outputs}
    # vLLM's own also drafts beyond a request's last token, so rates are compared, not counts.
    assert accepted / drafted == pytest.approx(counts["accepted"] / counts["drafted"], rel=0.08)


def test_preempted_requests_come_back_and_end_as_without_speculation(plain_outputs):
    """S13: a KV cache too small for the batch preempts requests in mid-generation."""
    requests = live.make_requests(8, max_tokens=96)
    kv_bytes_per_token = 30 * 2 * 3 * 64 * 4 + 2 * 3 * 64 * 4
    engine = live.make_engine(kv_cache_memory_bytes=kv_bytes_per_token * 1000)
    try:
        engine.hook.controller = RandomController(engine.contract, seed=2)
        preempted = []
        schedule = engine._core.scheduler._preempt_request
        engine._core.scheduler._preempt_request = lambda request, *args, **rest: (
            preempted.append(request.request_id),
            schedule(request, *args, **rest),
        )[1]
        outputs = engine.generate(requests, concurrency=8)
    finally:
        engine.close()
    assert preempted
    assert outputs == {name: plain_outputs[name][:96] for name in outputs}
