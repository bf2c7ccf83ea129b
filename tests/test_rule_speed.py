"""Rules in the closed loop of the headroom tables, against fixed settings and published traces."""

from dataclasses import replace

import pytest

from envs.closed_loop import tokens_per_s
from envs.draft_options import fixed_options
from envs.headroom import HeadroomConfig, measure_headroom
from envs.rule_speed import rule_tokens_per_s
from envs.trace_import import ImportConfig, import_published
from envs.traces import read_traces
from policy.cost_model import read_cost_model
from policy.errors import ConfigError

from .published import FOLDER, ROOT, needs_published_traces
from .synthetic_traces import make_cost_model, make_traces

H100 = ROOT / "checkpoints" / "cost_models" / "llama3.1-8b-h100.json"


@pytest.mark.parametrize("load", [1, 4])
@pytest.mark.parametrize(("drafter", "length"), [("none", 0), ("ngram", 3), ("eagle3", 2)])
def test_a_fixed_rule_is_as_fast_as_the_fixed_setting(drafter, length, load):
    """Two simulators of their own; drafts beyond an end, and what EAGLE reads, differ a little."""
    traces, cost_model = make_traces(num_requests=16), make_cost_model()
    section = {"name": "fixed", "drafter": drafter, "num_speculative_tokens": length}
    longest = max(length, 1)
    rule = rule_tokens_per_s(
        traces, section, cost_model, load, max_length=longest, min_tokens_per_slot=500, seed=3
    )
    setting = tokens_per_s(
        traces,
        fixed_options(traces, drafter, length),
        cost_model,
        load,
        first_position=0,
        min_tokens_per_slot=500,
        seed=3,
    )
    assert rule == pytest.approx(setting, rel=0.02)


def test_rules_stand_beside_the_oracles(tmp_path):
    for seed, name in enumerate("ab"):
        traces = make_traces(num_requests=6, output_tokens=12, seed=seed)
        renamed = tuple(f"{name}-{request_id}" for request_id in traces.request_ids)
        replace(traces, request_ids=renamed).write(tmp_path / f"{name}.parquet")
    measured = measure_headroom(
        HeadroomConfig(
            str(tmp_path),
            str(H100),
            concurrency=(1, 3),
            max_length=4,
            min_tokens_per_slot=20,
            rules={
                "none": {"name": "fixed"},
                "mine": {"name": "goodput", "cost_model": str(H100), "granularity": "request"},
            },
            split="train",
            max_output_tokens=12,
            together=True,
        )
    )
    assert [headroom.name for headroom in measured] == ["a", "b", "all files"]
    for headroom in measured:
        assert set(headroom.by_load["none"].values()) <= {"0.99", "1.00", "1.01"}
        assert all(0.5 < float(figure) < 5 for figure in headroom.by_load["mine"].values())


def test_rules_take_a_step_for_the_first_token():
    with pytest.raises(ConfigError, match=r"set first_position=0\."):
        HeadroomConfig("a", str(H100), first_position=1, rules={"a": {"name": "fixed"}})


@needs_published_traces
@pytest.mark.parametrize(
    ("load", "speedup"), [(1, 2.13), (8, 1.90), (32, 1.60), (64, 1.42), (128, 1.25)]
)
def test_goodput_reaches_what_an_independent_simulation_found(gsm8k, load, speedup):
    """Of Llama-3.1-8B on an H100, aligned requests, decoding alone, drafts of up to 8 tokens."""
    cost_model = read_cost_model(H100)
    section = {"name": "goodput", "cost_model": str(H100), "granularity": "request"}
    rule = rule_tokens_per_s(
        gsm8k, section, cost_model, load, max_length=8, min_tokens_per_slot=2048
    )
    none = tokens_per_s(
        gsm8k,
        fixed_options(gsm8k),
        cost_model,
        load,
        first_position=0,
        min_tokens_per_slot=2048,
    )
    assert rule / none == pytest.approx(speedup, rel=0.03)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    (source,) = FOLDER.glob("*_gsm8k.jsonl.gz")
    config = ImportConfig(str(source), str(folder), "a-model", 8192, 131072, misaligned="drop")
    (imported,) = import_published(config)
    return read_traces(imported.path)
