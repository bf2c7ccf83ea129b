"""The clock on a live engine's stages, and what its drafters take of the memory."""

from __future__ import annotations

import pytest

from envs.stage_clock import STAGES
from policy.baselines.fixed import FixedController

from . import live

NUM_TOKENS = 48
KV_BYTES_PER_LAYER = 2 * 3 * 64 * 4
"""Keys and values of three heads of 64 numbers in float32."""


@pytest.fixture(scope="module")
def clocked():
    """An engine of its own: the clock stays on it."""
    engine = live.make_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def blocks(clocked):
    """A served block of each setting on the same requests, timed by stage."""
    engine, workload = clocked, live.make_workload(max_prompts_per_kind=2)
    engine.read_prompts(workload.prompts())
    assert engine.serve(workload.episode(0, 4), NUM_TOKENS).stages_s == {}
    engine.time_stages()
    engine.time_stages()  # a second clock would charge everything twice
    served = {}
    for drafter, length in (("none", 0), ("ngram", 4), ("eagle3", 4)):
        engine.hook.controller = FixedController(engine.contract, drafter, length)
        served[drafter] = engine.serve(workload.episode(0, 4), NUM_TOKENS)
    return served


def test_stages_add_up_to_the_step_time(blocks):
    for block in blocks.values():
        assert set(block.stages_s) == set(STAGES)
        assert min(block.stages_s.values()) >= 0
        covered = sum(block.stages_s.values()) / block.seconds
        assert 0.97 <= covered <= 1.0001


def test_each_stage_takes_what_it_must(blocks):
    shares = {
        drafter: {stage: spent / block.seconds for stage, spent in block.stages_s.items()}
        for drafter, block in blocks.items()
    }
    assert shares["none"]["drafting"] < shares["eagle3"]["drafting"]
    assert shares["ngram"]["drafting"] < shares["eagle3"]["drafting"]
    for own in shares.values():
        assert own["verification"] > 0.3
        assert own["verification"] == max(own.values())
        assert own["sampling"] > 0
        assert own["deciding"] > 0


def test_only_the_model_drafter_takes_memory(clocked):
    memory = clocked.memory()
    assert memory.target_kv_bytes_per_token == 30 * KV_BYTES_PER_LAYER
    assert memory.drafter_kv_bytes_per_token == KV_BYTES_PER_LAYER
    assert memory.target_weight_bytes == pytest.approx(4 * 134.5e6, rel=0.01)  # float32
    assert 0 < memory.drafter_weight_bytes < 0.2 * memory.target_weight_bytes
