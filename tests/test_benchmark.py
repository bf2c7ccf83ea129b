"""The benchmark's verdicts, and `scripts/evaluate.py` on traces."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.scenario import Phase, Scenario
from envs.served import STEP, Served, ServedRequest
from policy.training.benchmark import (
    BEST_FIXED,
    BEST_SINGLE_FIXED,
    BestFixed,
    Results,
    choose_fixed,
    name_best_fixed,
)
from policy.training.benchmark_agreement import agreement
from policy.training.benchmark_live import shortened
from policy.training.benchmark_tables import acceptance_per_pos, cells_of, summarise
from policy.training.contenders import ORACLE, Contender

from .synthetic_traces import make_cost_model, make_traces
from .test_live_plugin import export
from .wandb_file import read_run

ROOT = Path(__file__).parents[1]


def run(seconds, num_requests=20, seed=0):
    """A run whose requests take `seconds` each, give or take."""
    noise = np.random.default_rng(seed).lognormal(0, 0.05, num_requests)
    requests = tuple(
        ServedRequest(str(i), "code", 0.0, 0.5, 0.5 + 9 * s, 10, s)
        for i, s in enumerate(seconds * noise)
    )
    busy_s = float(seconds * noise.sum())
    drafted, accepted = {"n": np.array([6, 4])}, {"n": np.array([3, 1])}
    return Served(requests, np.zeros(3, STEP), busy_s, 0.1 * busy_s, drafted, accepted)


def results(speeds):
    """Runs of contenders in two scenarios; `speeds` is seconds per request of each."""
    return Results(
        {
            (scenario, name): [run(factor * seconds, seed=10 * repeat) for repeat in range(3)]
            for scenario, factor in (("one", 1.0), ("two", 3.0))
            for name, seconds in speeds.items()
        }
    )


SPEEDS = {
    "none": 2.0,
    "fast": 1.0,
    "slow": 2.5,
    BEST_FIXED: 1.5,
    BEST_SINGLE_FIXED: 1.6,
    ORACLE: 0.8,
}


def test_cells_say_who_is_faster_by_how_much():
    cells = {
        (cell.scenario, cell.contender): cell
        for cell in cells_of(results(SPEEDS), ["none", BEST_FIXED], seed=0)
    }
    fast, slow = cells["two", "fast"], cells["one", "slow"]
    assert fast.over_none.ratio == pytest.approx(2)
    assert fast.over_best_fixed.ratio == pytest.approx(1.5)
    assert fast.over_best_fixed.verdict == "ahead"
    assert fast.over_single_fixed.ratio == pytest.approx(1.6)
    assert fast.fraction_of_oracle == pytest.approx(0.8)
    assert slow.fraction_of_oracle == pytest.approx(0.8 / 2.5)
    assert fast.regret_s == pytest.approx(-60 * 3 * 0.5, rel=0.1)  # ahead of the best fixed one
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
    slow = next(one for one in summarise(cells) if one.contender == "slow")
    assert slow.over_none == pytest.approx(0.8)
    assert slow.worst_over_none == pytest.approx(0.8)
    assert slow.worst_scenario in ("one", "two")
    assert slow.over_best_fixed == pytest.approx(0.6)
    assert slow.over_single_fixed == pytest.approx(1.6 / 2.5)
    assert slow.verdicts == {
        rival: {"behind": 2} for rival in ("none", BEST_FIXED, BEST_SINGLE_FIXED)
    }
    best = next(one for one in summarise(cells) if one.contender == BEST_FIXED)
    assert best.verdicts[BEST_FIXED] == {"tie": 2}
    assert best.verdicts[BEST_SINGLE_FIXED] == {"ahead": 2}


def test_without_an_oracle_there_is_no_fraction_of_it():
    speeds = {name: seconds for name, seconds in SPEEDS.items() if name != ORACLE}
    cells = cells_of(results(speeds), ["none"], seed=0)
    assert all(math.isnan(cell.fraction_of_oracle) for cell in cells)


def test_ranks_and_pairs_agree_or_not():
    traced = results(SPEEDS)
    same = agreement(traced, traced, seed=0)["one"]
    assert (same.rank_correlation, same.num_pairs, same.num_alike) == (1, 15, 15)
    # Two that swap places: of the six pairs of four contenders, theirs alone changes its order.
    four = {name: SPEEDS[name] for name in ("none", "fast", "slow", BEST_FIXED)}
    swapped = agreement(results(four), results({**four, "none": 2.5, "slow": 2.0}), 0)["two"]
    assert (swapped.num_pairs, swapped.num_alike) == (6, 5)
    assert swapped.rank_correlation == pytest.approx(0.8)
    assert str(swapped) == "0.80, 5 of 6"


def test_pairs_that_tie_live_are_left_out_whatever_their_ranks():
    traced = results({"none": 2.0, "one": 1.0, "other": 1.1})
    lived = Results(
        {
            ("one", name): [run(seconds, seed=10 * repeat + seed) for repeat in range(3)]
            for seed, (name, seconds) in enumerate({"none": 2.0, "one": 1.0, "other": 1.0}.items())
        }
    )
    found = agreement(traced, lived, seed=0)
    assert found.keys() == {"one"}
    assert (found["one"].num_pairs, found["one"].num_alike) == (2, 2)


def test_acceptance_by_position_adds_up_all_runs():
    one, other = run(1.0), run(1.0)
    longer = {"n": np.array([4, 4, 2])}, {"n": np.array([4, 1, 1])}
    other = replace(
        other, num_draft_tokens_per_pos=longer[0], num_accepted_tokens_per_pos=longer[1]
    )
    runs = Results({("a", "x"): [one], ("b", "x"): [other], ("a", "y"): [one]})
    assert acceptance_per_pos(runs, "x") == {"n": [7 / 10, 2 / 8, 1 / 2]}
    assert other.num_drafts == {"n": 4}
    assert other.num_draft_tokens == {"n": 10}


def test_a_fixed_setting_takes_part_in_both_its_roles():
    ngram, eagle = Contender.fixed("ngram", 4), Contender.fixed("eagle3", 2)
    runs = Results(
        {
            (scenario, one.name): [run(seconds)]
            for scenario in ("a", "b")
            for one, seconds in ((ngram, 1.0), (eagle, 2.0))
        }
    )
    name_best_fixed(runs, BestFixed({"a": eagle}, overall=ngram))
    assert runs.runs["a", BEST_FIXED] is runs.runs["a", "eagle3:2"]
    assert runs.runs["b", BEST_FIXED] is runs.runs["b", "ngram:4"]
    assert runs.runs["a", BEST_SINGLE_FIXED] is runs.runs["a", "ngram:4"]


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
    plain = Contender.of("vllm", "plain")
    assert plain.is_unhooked
    assert plain.speculative_config is None
    own = Contender.of("own", {"vllm": {"method": "ngram", "num_speculative_tokens": 3}})
    assert own.is_unhooked
    assert own.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert not Contender.fixed("none").is_unhooked
    assert not Contender.oracle().is_unhooked
    assert Contender.fixed("none").is_fixed
    assert not plain.is_fixed
    assert not Contender.of("policy", {"path": "policy.pt"}).is_fixed


def test_a_shortened_scenario_still_reaches_its_loads():
    scenario = Scenario((Phase(100, 32), Phase(40, 2), Phase(40, request_rate_per_s=1.0)), 0.7)
    short = shortened(scenario, 0.1)
    assert short.temperature == 0.7
    assert [phase.num_requests for phase in short.phases] == [32, 4, 4]
    assert [phase.concurrency for phase in short.phases] == [32, 2, None]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    make_traces(num_requests=24).write(folder / "traces.parquet")
    model = {"cost_model": make_cost_model().state_dict()}
    (folder / "prices.json").write_text(json.dumps(model))
    export(folder / "policy.pt")
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
            *(f"~scenarios.constant_{load}" for load in (2, 8, 32, 64)),
            f"contenders.policy.path={recorded / 'policy.pt'}",
            *("logger.mode=offline", *overrides),
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
    assert {scenario for scenario, _ in cells} == {
        *(f"constant_{load}" for load in (1, 4, 16)),
        *("steps", "poisson"),  # not `sampled`: the traces are greedy
    }
    for scenario in ("constant_1", "constant_16", "steps", "poisson"):
        assert cells[scenario, "none"]["over_none"]["ratio"] == 1
        fractions = {
            name: cell["fraction_of_oracle"] for (at, name), cell in cells.items() if at == scenario
        }
        assert max(fractions.values()) == fractions["oracle"] == 1
        for rule in ("goodput_by_match_per_request", "adaptive_verification", "bandit_ucb"):
            assert 0.3 < cells[scenario, rule]["over_none"]["ratio"] < 10
    best = max(cells["constant_1", name]["tok_per_s"] for name in ("ngram:8", "eagle3:4", "none"))
    assert cells["constant_1", "goodput_by_match"]["tok_per_s"] > 0.9 * best
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    text = (folder / "report.md").read_text()
    assert "goodput_by_match_per_request" in text
    assert "recorded at another temperature: sampled." in text
    pictures = ["speedups-traces", "timeline-traces", "acceptance-traces", "heat-map-policy"]
    for name in pictures:
        assert (folder / f"{name}.png").stat().st_size > 10_000
        assert f"![{name}]({name}.png)" in text
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "Cells won, tied, lost, traces" in done.stdout
    check_wandb(folder, text, pictures)


def check_wandb(folder, text, pictures):
    """Every table and picture of the report lies in the offline run, and the summaries."""
    (offline,) = folder.glob("wandb/offline-run-*")
    logged = read_run(offline)
    assert logged["exit_code"] == 0
    history = {key: value for row in logged["history"] for key, value in row.items()}
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    headings.remove("Notes")
    assert "Fraction of the greedy oracle's speed, pricing if_it_wins, traces" in headings
    for heading in headings:
        key = re.sub("[^a-z0-9]+", "_", heading.lower()) + "/path"
        table = json.loads((offline / "files" / history[key]).read_text())
        section = text.split(f"## {heading}\n\n")[1].split("\n\n")[0].splitlines()
        rows = [line.strip("| ").split(" | ") for line in section if not line.startswith("|---")]
        assert table["columns"] == rows[0]
        assert [[cell.strip() for cell in row if cell] for row in table["data"]] == [
            [cell.strip() for cell in row if cell.strip()] for row in rows[1:]
        ]
    for name in pictures:
        stored = offline / "files" / history[f"{name}/path"]
        assert stored.read_bytes() == (folder / f"{name}.png").read_bytes()
    assert history["traces/none/over_none"] == 1
    assert history["traces/policy/worst_over_none"] > 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["contenders.goodput.name=godput"], "Unknown baseline 'godput'; did you mean 'goodput'?"),
        (["+contenders.mine=5"], "contenders.mine is 5; make it a section"),
        (["contenders.vllm_schedule.vllm=3"], "with a speculative_config of vLLM"),
        (["+scenarios.constant_1.temperature=-1"], "temperature is -1"),
        (["+contenders.mine={path: nowhere.pt}"], "No policy at nowhere.pt"),
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
