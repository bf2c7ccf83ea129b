"""The report of a benchmark that was served on traces and live."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from envs.live import DraftersConfig, ModelConfig
from envs.replayed import TraceConfig
from envs.scenario import Phase, Scenario
from envs.served import STEP, Served, ServedRequest
from envs.workload import WorkloadConfig
from policy.errors import ConfigError
from policy.training.benchmark import (
    BEST_FIXED,
    BEST_SINGLE_FIXED,
    BestFixed,
    Results,
    name_best_fixed,
)
from policy.training.benchmark_config import BenchmarkConfig, LiveConfig
from policy.training.benchmark_report import write_benchmark_report
from policy.training.config import LoggerConfig
from policy.training.contenders import Contender

RULE = {"name": "ema_tiers", "drafter": "eagle3"}
SCENARIOS = {
    "constant_4": Scenario((Phase(20, 4),)),
    "steps": Scenario((Phase(10, 1), Phase(10, 4))),
    "sampled": Scenario((Phase(20, 4),), temperature=0.7),
}
TRACED = {"none": 2.0, "ngram:2": 1.5, "ngram:8": 1.4, "slow": 1.8, "fast": 1.0, "oracle": 0.8}
LIVED = {"none": 2.1, "slow": 2.4, "fast": 1.1, BEST_FIXED: 1.5, "vllm_schedule": 1.2}


def make_config(folder, **changes):
    settings = {
        "model": ModelConfig(),
        "drafters": DraftersConfig(),
        "workload": WorkloadConfig({"code": 1.0}, (1,)),
        "scenarios": SCENARIOS,
        "contenders": {
            "none": {"name": "fixed", "drafter": "none"},
            "slow": RULE,
            "fast": RULE,
            "vllm_schedule": {"vllm": {"method": "ngram", "num_speculative_tokens": 4}},
        },
        "fixed_lengths": {"ngram": (2, 8)},
        "trace": TraceConfig(),
        "live": LiveConfig(("constant_4", "sampled"), ("none", "slow", "fast", "vllm_schedule")),
        "logger": LoggerConfig(),
        "output_dir": str(folder),
    }
    return BenchmarkConfig(**{**settings, **changes})


def run(seconds, seed):
    noise = np.random.default_rng(seed).lognormal(0, 0.02, 20)
    requests = tuple(
        ServedRequest(str(i), "code", 0.0, 0.5, 0.5 + 9 * s, 10, s)
        for i, s in enumerate(seconds * noise)
    )
    steps = np.zeros(40, STEP)
    steps["end_s"] = np.arange(1, 41)
    steps["num_running_reqs"], steps["num_tokens"], steps["drafter"] = 4, 5, 1
    counts = {"ngram": np.array([10, 6])}, {"ngram": np.array([5, 2])}
    return Served(requests, steps, float(seconds * noise.sum()), 0.01, *counts)


def results(scenarios, speeds):
    return Results(
        {
            (scenario, name): [run(seconds, 10 * repeat + len(name)) for repeat in range(3)]
            for scenario in scenarios
            for name, seconds in speeds.items()
        }
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    ngram = Contender.fixed("ngram", 2)
    best = BestFixed({"constant_4": Contender.fixed("ngram", 8), "steps": ngram}, ngram)
    traced = results(["constant_4", "steps"], TRACED)
    name_best_fixed(traced, best)
    lived = results(["constant_4", "sampled"], LIVED)
    for scenario in lived.scenarios:
        lived.runs[scenario, BEST_SINGLE_FIXED] = lived.runs[scenario, BEST_FIXED]
    report = write_benchmark_report(make_config(folder), {}, best, traced, lived, {})
    return folder, report, dict(report.tables)


def column(table, head):
    """A column of a table, by contender."""
    index = table[0].index(head)
    return {row[0]: row[index] for row in table[1:]}


def test_the_live_part_has_its_own_tables_and_no_oracle(written):
    _, _, tables = written
    fraction = "Fraction of the greedy oracle's speed, pricing if_it_wins"
    assert f"{fraction}, traces" in tables
    assert f"{fraction}, live" not in tables
    share = column(tables[f"{fraction}, traces"], "constant_4")
    assert (share["oracle"], share["fast"], share["none"]) == ("100%", "80%", "40%")
    assert column(tables["Cells won, tied, lost, live"], "against no speculation") == {
        "none": "0, 2, 0",
        BEST_FIXED: "2, 0, 0",
        BEST_SINGLE_FIXED: "2, 0, 0",
        "slow": "0, 0, 2",
        "fast": "2, 0, 0",
        "vllm_schedule": "2, 0, 0",
    }


def test_regret_on_live_vllm_is_against_fixed_settings_alone(written):
    _, _, tables = written
    regret = column(
        tables["Regret against the best fixed setting in hindsight, s, live"], "sampled"
    )
    assert regret[BEST_FIXED] == "0.0"
    assert float(regret["none"]) == pytest.approx(60 * (2.1 - 1.5), rel=0.05)
    assert float(regret["fast"]) == pytest.approx(60 * (1.1 - 1.5), rel=0.05)
    regret = column(
        tables["Regret against the best fixed setting in hindsight, s, traces"], "constant_4"
    )
    assert regret[BEST_FIXED] == "0.0"
    assert float(regret[BEST_SINGLE_FIXED]) == pytest.approx(60 * 0.1, rel=0.15)


def test_the_notes_say_what_was_left_out_and_how_far_traces_agree(written):
    folder, report, _ = written
    text = (folder / "report.md").read_text()
    assert "recorded at another temperature: sampled." in text
    # Of none, slow, fast and best_fixed, which both served, `slow` alone changes its place; both
    # roles of the fixed setting tie live.
    assert "in all 8 of 9 pairs." in text
    assert report.summaries.keys() == {"traces", "live"}
    stored = json.loads((folder / "report.json").read_text())
    assert {cell["scenario"] for cell in stored["live"]} == {"constant_4", "sampled"}


def test_every_picture_of_both_parts_is_in_the_one_page(written):
    folder, report, _ = written
    assert {path.stem for path in report.pictures} == {
        *("speedups-traces", "speedups-live"),
        *("acceptance-traces", "acceptance-live", "timeline-traces"),
    }
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(report.pictures)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"contenders": {"none": RULE, "own": {"vllm": {}, "name": "x"}}}, "nothing beside it"),
        ({"live": LiveConfig(("steps",), ("slow",))}, "live.contenders lacks 'none'"),
        ({"live": LiveConfig(("nowhere",), ("none",))}, "no scenario"),
        ({"model": replace(ModelConfig(), max_num_seqs=2)}, "raise model.max_num_seqs from 2"),
    ],
)
def test_senseless_benchmarks_are_refused(tmp_path, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_config(tmp_path, **changes)
