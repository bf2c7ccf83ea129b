"""vLLM's own schedule of draft lengths and the rule `batch_schedule`: the same decisions."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from envs.live import DraftersConfig, engine_config
from envs.scenario import Phase, Scenario
from envs.vllm_engine import VllmEngine
from envs.workload import WorkloadConfig
from policy.baselines.build import build_baseline
from policy.training.bootstrap import speed_ratio, work_of
from policy.training.contenders import Contender
from policy.training.engine_process import EngineProcess, ScenarioBlock

from . import live

SCHEDULE = [[1, 1, 7], [2, 3, 5], [4, 6, 2], [7, 8, 1]]
RULE = Contender.of("rule", {"name": "batch_schedule", "drafter": "ngram", "schedule": SCHEDULE})
VLLM = Contender.of(
    "vllm",
    {
        "vllm": {
            "method": "ngram",
            "num_speculative_tokens": 8,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 16,
            "num_speculative_tokens_per_batch_size": SCHEDULE,
        }
    },
)
HOOKED = engine_config(live.MODEL, DraftersConfig(max_lengths={"ngram": 8}, model=None))
UNHOOKED = replace(engine_config(live.MODEL, None), speculative_config=VLLM.speculative_config)


def serve(config, requests):
    """Outputs, and for every step the draft tokens that are verified of each request.

    The hook drafts nothing beyond a request's token limit; vLLM does, to no avail, so its drafts
    count as far as they could be emitted.
    """
    engine = VllmEngine(config)
    if engine.hook is not None:
        engine.hook.controller = build_baseline(
            engine.contract, {"name": "batch_schedule", "drafter": "ngram", "schedule": SCHEDULE}
        )
    scheduler = engine._core.scheduler
    schedule, steps = scheduler.schedule, []

    def note(*arguments, **options):
        output = schedule(*arguments, **options)
        verified = []
        for name in sorted(output.num_scheduled_tokens):  # as the requests are numbered
            request = scheduler.requests[name]
            room = request.max_tokens - request.num_output_tokens - 1
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            verified.append(min(drafted, room) if request.num_output_tokens else 0)
        steps.append(verified)
        return output

    scheduler.schedule = note
    try:
        return engine.generate(requests, concurrency=8), steps
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")  # vLLM's
def test_both_verify_as_many_draft_tokens_in_every_step():
    requests = [
        replace(request, max_tokens=16 * (1 + index))
        for index, request in enumerate(live.make_requests(8, max_tokens=128))
    ]
    ours, our_steps = serve(HOOKED, requests)
    theirs, their_steps = serve(UNHOOKED, requests)
    assert ours == theirs
    assert our_steps == their_steps
    longest = {}
    for step in our_steps:
        longest[len(step)] = max(longest.get(len(step), 0), *step)
    assert longest.keys() == set(range(1, 9))
    for num_requests, length in longest.items():
        allowed = next(k for first, last, k in SCHEDULE if first <= num_requests <= last)
        before = next(
            k for first, last, k in SCHEDULE if first <= num_requests + 1 <= last or k == 1
        )
        assert length <= max(allowed, before)
    assert longest[1] > 5
    assert longest[2] > 2


@pytest.mark.alone
def test_they_tie_in_speed(tmp_path):
    workload = WorkloadConfig(
        live.KINDS, (8,), output_tokens=48, max_prompts_per_kind=2, max_prompt_tokens=320
    )
    scenario = Scenario((Phase(8, concurrency=8), Phase(4, concurrency=1)))
    runs = {RULE: [], VLLM: []}
    with (
        closing(EngineProcess(HOOKED, live.MODEL, workload, tmp_path / "hooked.log")) as hooked,
        closing(EngineProcess(UNHOOKED, live.MODEL, workload, tmp_path / "vllm.log")) as unhooked,
    ):
        for repeat in range(-1, 4):
            for one, engine in ((RULE, hooked), (VLLM, unhooked)):
                block = ScenarioBlock("train", max(repeat, 0), scenario)
                served = engine.serve_scenario(one, block)
                if repeat >= 0:  # the first is to warm up
                    runs[one].append(work_of(served))
    ratio = speed_ratio(runs[RULE], runs[VLLM], seed=0)
    assert ratio.verdict == "tie" or 0.95 < ratio.ratio < 1.05
    assert 0.85 < ratio.ratio < 1.15
