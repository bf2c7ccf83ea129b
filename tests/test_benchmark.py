"""The benchmark's verdicts, and `scripts/evaluate.py` on traces."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.scenario import Phase, Scenario
from envs.served import STEP, Served, ServedRequest
from policy.training.benchmark import BEST_FIXED, Results, choose_fixed
from policy.training.benchmark_live import shortened
from policy.training.benchmark_tables import cells_of, rank_agreement, summarise
from policy.training.contenders import Contender

from .synthetic_traces import make_cost_model, make_traces

ROOT = Path(__file__).parents[1]


def run(seconds, num_requests=20, seed=0):
    """A run whose requests take `seconds` each, give or take."""
    noise = np.random.default_rng(seed).lognormal(0, 0.05, num_requests)
    requests = tuple(
        ServedRequest(str(i), "code", 0.0, 0.5, 0.5 + 9 * s, 10, s)
        for i, s in enumerate(seconds * noise)
    )
    busy_s = float(seconds * noise.sum())
    return Served(requests, np.zeros(3, STEP), busy_s, 0.1 * busy_s, {}, {"n": 10}, {"n": 4})


def results(speeds):
    """Runs of contenders in two scenarios; `speeds` is seconds per request of each."""
    return Results(
        {
            (scenario, name): [run(factor * seconds, seed=10 * repeat) for repeat in range(3)]
            for scenario, factor in (("one", 1.0), ("two", 3.0))
            for name, seconds in speeds.items()
        }
    )


SPEEDS = {"none": 2.0, "fast": 1.0, "slow": 2.5, BEST_FIXED: 1.5}


def test_cells_say_who_is_faster_by_how_much():
    cells = {
        (cell.scenario, cell.contender): cell
        for cell in cells_of(results(SPEEDS), ["none", BEST_FIXED], seed=0)
    }
    fast, slow = cells["two", "fast"], cells["one", "slow"]
    assert fast.over_none.ratio == pytest.approx(2)
    assert fast.over_best_fixed.ratio == pytest.approx(1.5)
    assert fast.over_best_fixed.verdict == "ahead"
    assert slow.over_none.verdict == slow.over_best_fixed.verdict == "behind"
    assert fast.tok_per_s == pytest.approx(10 / 3, rel=0.1)
    best = cells["one", BEST_FIXED]
    assert best.regret_s == 0
    assert slow.regret_s == pytest.approx(best.regret_s + 60 * 1.0, rel=0.1)
    assert best.over_best_fixed.verdict == "tie"
    assert best.acceptance_rate == 0.4
    assert best.decision_share == pytest.approx(0.1)
    assert best.time_to_first_token_ms == (500, 500)


def test_swapping_two_labels_swaps_their_results():
    swapped = {**SPEEDS, "fast": SPEEDS["slow"], "slow": SPEEDS["fast"]}
    first, second = (
        {
            (cell.scenario, cell.contender): cell
            for cell in cells_of(results(speeds), ["none"], seed=0)
        }
        for speeds in (SPEEDS, swapped)
    )
    for scenario in ("one", "two"):
        for name, other in (("fast", "slow"), ("slow", "fast")):
            assert replace(second[scenario, other], contender=name) == first[scenario, name]


def test_the_summary_names_the_worst_scenario():
    cells = cells_of(results(SPEEDS), ["none"], seed=0)
    slow = next(one for one in summarise(cells, BEST_FIXED) if one.contender == "slow")
    assert slow.over_none == pytest.approx(0.8)
    assert slow.worst_over_none == pytest.approx(0.8)
    assert slow.worst_scenario in ("one", "two")
    assert slow.over_single_fixed == pytest.approx(0.6)
    assert slow.verdicts == {"behind": 2}
    assert math.isnan(summarise(cells, None)[0].over_single_fixed)


def test_ranks_agree_or_not():
    cells = cells_of(results(SPEEDS), ["none"], seed=0)
    reverse = cells_of(results({**SPEEDS, "fast": 9.0, "slow": 1.0}), ["none"], seed=0)
    assert rank_agreement(cells, cells) == {"one": 1, "two": 1}
    assert all(value < 0 for value in rank_agreement(cells, reverse).values())


def test_the_best_fixed_setting_is_chosen_by_scenario_and_overall():
    candidates = [Contender.fixed("none"), Contender.fixed("ngram", 4), Contender.fixed("ngram", 8)]
    chosen = choose_fixed(
        Results(
            {
                (scenario, name): [run(seconds)]
                for scenario, speeds in {
                    "one": {"none": 2.0, "ngram:4": 1.0, "ngram:8": 0.9},
                    "two": {"none": 2.0, "ngram:4": 1.9, "ngram:8": 4.0},
                }.items()
                for name, seconds in speeds.items()
            }
        ),
        candidates,
    )
    assert {at: one.name for at, one in chosen.by_scenario.items()} == {
        "one": "ngram:8",
        "two": "ngram:4",
    }
    assert chosen.overall.name == "ngram:4"


def test_plain_vllm_is_a_contender_without_a_section():
    assert Contender.of("vllm", "plain").is_plain
    assert not Contender.fixed("none").is_plain


def test_a_shortened_scenario_still_reaches_its_loads():
    scenario = Scenario((Phase(100, 32), Phase(40, 2), Phase(40, request_rate_per_s=1.0)))
    short = shortened(scenario, 0.1)
    assert [phase.num_requests for phase in short.phases] == [32, 4, 4]
    assert [phase.concurrency for phase in short.phases] == [32, 2, None]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    make_traces(num_requests=24).write(folder / "traces.parquet")
    model = {"cost_model": make_cost_model().state_dict()}
    (folder / "prices.json").write_text(json.dumps(model))
    return folder


def evaluate(recorded, folder, *overrides):
    return subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "evaluate.py", "live=null"),
            f"trace.files=[{recorded / 'traces.parquet'}]",
            f"trace.cost_model={recorded / 'prices.json'}",
            *(f"output_dir={folder}", f"hydra.run.dir={folder}"),
            *("workload.output_tokens=40", "num_repeats=2", "num_processes=1"),
            *(f"~workload/scenario@scenarios.{name}" for name in ("ramp", "bursts", "shift")),
            "~scenarios.constant_32",
            "~contenders.policy",
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder.parent,
    )


def test_the_script_leaves_a_report_that_needs_no_network(recorded, tmp_path):
    folder = tmp_path / "run"
    done = evaluate(recorded, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_text())
    cells = {(cell["scenario"], cell["contender"]): cell for cell in report["traces"]}
    for scenario in ("constant_1", "constant_16", "steps", "poisson"):
        assert cells[scenario, "none"]["over_none"]["ratio"] == 1
        for rule in ("goodput_by_match_per_request", "adaptive_verification", "bandit_ucb"):
            assert 0.3 < cells[scenario, rule]["over_none"]["ratio"] < 10
    best = max(cells["constant_1", name]["tok_per_s"] for name in ("ngram:8", "eagle3:4", "none"))
    assert cells["constant_1", "goodput_by_match"]["tok_per_s"] > 0.9 * best
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "goodput_by_match_per_request" in (folder / "report.md").read_text()
    assert (folder / "timeline-traces.png").stat().st_size > 10_000
    assert "Over all scenarios, traces" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["contenders.goodput.name=godput"], "Unknown baseline 'godput'; did you mean 'goodput'?"),
        (["+contenders.mine=5"], "contenders.mine is 5; make it a section"),
        (["~drafters.max_lengths.eagle3"], "remove it (~fixed_lengths.eagle3)"),
        (["model.max_num_seqs=8"], "requests in flight; raise model.max_num_seqs from 8"),
        (["trace.files=[nowhere.parquet]"], "nowhere.parquet"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(recorded, tmp_path, overrides, sentence):
    done = evaluate(recorded, tmp_path / "run", *overrides)
    assert done.returncode == 1
    assert sentence in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
