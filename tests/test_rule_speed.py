"""Rules in the closed loop of the headroom tables, against fixed settings and published traces."""

import pytest

from envs.closed_loop import tokens_per_s
from envs.draft_options import fixed_options
from envs.headroom import HeadroomConfig
from envs.rule_speed import rule_tokens_per_s
from policy.errors import ConfigError

from .published import ROOT, run_script
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


def test_the_script_measures_rules_beside_the_oracles(tmp_path):
    make_traces(num_requests=6, output_tokens=12).write(tmp_path / "a.parquet")
    done = run_script(
        "headroom.py",
        *(f"TRACES={tmp_path}", "concurrency=[1,3]", "min_tokens_per_slot=20", "max_length=4"),
        '+rules.mine={name: goodput, cost_model: "${cost_model}", granularity: request}',
        *("split=train", "max_output_tokens=12", "together=true"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| mine")]
    figures = [float(cell) for cell in row.split("|")[2:-1]]
    assert len(figures) == 2
    assert all(0.5 < figure < 5 for figure in figures)


def test_rules_take_a_step_for_the_first_token():
    with pytest.raises(ConfigError, match=r"set first_position=0\."):
        HeadroomConfig("a", str(H100), first_position=1, rules={"a": {"name": "fixed"}})
