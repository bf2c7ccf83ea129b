"""Tuning of the rules: what is tried, on which requests, and what becomes of the result."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from envs.replayed import Replayed
from envs.scenario import Arrivals
from envs.trace_engine import TraceEngine
from policy.config import from_mapping
from policy.contract import Contract
from policy.errors import ConfigError
from policy.training import tuning
from policy.training.benchmark_config import BenchmarkConfig
from policy.training.contenders import Contender
from policy.training.tuned_schedule import schedules
from policy.training.tuning_config import TuningConfig
from policy.training.tuning_report import prepare_files

from .synthetic_traces import make_cost_model, make_traces

ROOT = Path(__file__).parents[1]
OmegaConf.register_new_resolver("repository", lambda: str(ROOT), replace=True)


def composed(name, *overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = compose(name, overrides=["output_dir=somewhere", *overrides])
    return OmegaConf.to_container(settings, resolve=True)


def config_of(*overrides):
    return from_mapping(TuningConfig, composed("tune_baselines", *overrides), where="")


class FakePool:
    """Replays nothing: speeds come from a function of section and scenario."""

    def __init__(self, config, tok_per_s):
        self.scenarios = list(config.scenarios)
        self.tok_per_s_of = tok_per_s
        self.served = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def replay(self, contenders, split, num_repeats):
        assert split == "train"
        self.served += [contender.name for contender in contenders]
        return self

    def tok_per_s(self, scenario, name):
        return self.tok_per_s_of(json.loads(name), scenario)


def tuned_with(monkeypatch, config, tok_per_s):
    pools = []

    def open_pool(benchmark, split):
        assert split == "train"
        pools.append(FakePool(benchmark, tok_per_s))
        return pools[-1]

    monkeypatch.setattr(tuning, "ReplayPool", open_pool)
    return tuning.tune(config), pools[0]


@pytest.mark.parametrize(("num_rounds", "decay", "score"), [(1, 0.99, 1.12), (2, 0.9, 1.25)])
def test_every_key_is_searched_round_after_round(monkeypatch, num_rounds, decay, score):
    gains = {(0.9, 1): 5, (0.99, 1): 9, (0.99, 2): 12, (0.9, 2): 25}

    def tok_per_s(section, scenario):
        if section["name"] != "goodput":
            return 100.0
        at = section.get("acceptance", {}).get("decay"), section.get("probe_after_steps", 1)
        return 100.0 + gains.get(at, 0)

    config = config_of(
        "~grids",
        "+grids={goodput: {acceptance.decay: [0.9, 0.99], probe_after_steps: [1, 2]}}",
        f"num_rounds={num_rounds}",
    )
    found, pool = tuned_with(monkeypatch, config, tok_per_s)
    best = found["goodput"].best
    assert best.score == pytest.approx(score)
    assert best.section["acceptance"] == {"decay": decay}
    assert (best.section["probe_after_steps"], best.section["match_length_table"]) == (2, False)
    assert found["goodput"].trials[0].section == config.contenders["goodput"]
    assert found["bandit_ucb"].best is found["bandit_ucb"].trials[0]
    assert len(set(pool.served)) == len(pool.served)


def test_what_is_not_faster_changes_nothing(monkeypatch):
    found, _ = tuned_with(monkeypatch, config_of(), lambda section, scenario: 7.0)
    sections = config_of().contenders
    assert {name: one.best.section for name, one in found.items()} == sections
    assert all(one.best.score == 1 for one in found.values())


def test_a_score_is_the_geometric_mean_over_scenarios():
    trial = tuning.Trial("a", "", {}, {"one": 2.0, "two": 0.5, "three": 27.0})
    assert trial.score == pytest.approx(3)


def test_a_schedule_takes_the_best_fixed_length_of_each_load():
    best = {"constant_1": 8, "constant_4": 4, "constant_16": 2, "constant_32": 0}

    def speedups(contender):
        section = json.loads(contender.section)
        length = section["num_speculative_tokens"]
        is_ngram = section["drafter"] in ("ngram", "none")
        return {name: 2.0 if is_ngram and length == best[name] else 1.0 for name in best}

    made = schedules(config_of(), speedups)
    assert made["ngram"]["schedule"] == [[1, 2, 8], [3, 8, 4], [9, 22, 2], [23, 32, 0]]
    # Of equals the shortest: nothing tells for EAGLE, and none is best at the highest load.
    assert made["eagle3"]["schedule"] == [[1, 2, 0], [3, 8, 0], [9, 22, 0], [23, 32, 0]]
    phases = "{phases: [{concurrency: 1, num_requests: 2}, {concurrency: 4, num_requests: 8}]}"
    of_two_loads = config_of("~scenarios", f"+scenarios={{steps: {phases}}}")
    assert schedules(of_two_loads, speedups) == {}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["+grids.godput={a: [1]}"], "no contender; did you mean 'goodput'?"),
        (["+grids.none={length: []}"], "grids.none.length is empty; give values to try."),
        (["num_rounds=0"], "num_rounds is 0; make it 1 or more."),
    ],
)
def test_what_makes_no_sense_is_one_sentence(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        config_of(*overrides)


def test_a_place_that_cannot_be_written_to_is_refused_before_the_search(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot write to .*; name another place\."):
        prepare_files(config_of(f"out={tmp_path}/file/mine.yaml"))


def contender_names(*overrides):
    config = from_mapping(BenchmarkConfig, composed("evaluate", *overrides), where="")
    return list(config.contenders)


def test_the_benchmark_takes_tuned_rules_and_its_overrides_still_work():
    names = contender_names()
    assert names == contender_names("contenders=default")
    assert contender_names("+contenders.mine={path: policy.pt}") == [*names, "mine"]
    assert contender_names("~contenders.bandit_ucb") == [n for n in names if n != "bandit_ucb"]
    config = composed("evaluate", "trace.cost_model=prices.json")
    assert config["contenders"]["goodput"]["cost_model"] == "prices.json"


@pytest.mark.parametrize("option", ["default", "tuned"])
def test_every_contender_that_ships_can_be_built(option):
    drafters = composed("evaluate")["drafters"]["max_lengths"]
    contract = Contract(("none", *drafters), (0, *drafters.values()))
    for name, section in composed("evaluate", f"contenders={option}")["contenders"].items():
        contender = Contender.of(name, section)
        if contender.is_unhooked:
            assert contender.speculative_config
        elif "path" in section:
            contender.controller(replace(contract, max_lengths=(0, 8, 4)))
        else:
            contender.controller(contract)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Traces, the same without their evaluation requests, and prices."""
    folder = tmp_path_factory.mktemp("recorded")
    traces = make_traces(num_requests=24)
    traces.write(folder / "all.parquet")
    traces.of_split("train").write(folder / "train.parquet")
    model = {"cost_model": make_cost_model().state_dict()}
    (folder / "prices.json").write_text(json.dumps(model))
    return folder


def small(recorded, file, folder):
    """Overrides of a search that takes seconds."""
    return [
        f"trace.files=[{recorded / file}]",
        f"trace.cost_model={recorded / 'prices.json'}",
        *(f"out={folder}/mine.yaml", f"output_dir={folder}", f"hydra.run.dir={folder}"),
        *("workload.output_tokens=40", "num_processes=1", "num_rounds=1"),
        *("~scenarios.constant_4", "~scenarios.constant_16", "~scenarios.constant_32"),
        "scenarios.constant_1.phases=[{concurrency: 1, num_requests: 6}]",
        "+scenarios.constant_8={phases: [{concurrency: 8, num_requests: 16}]}",
        "+contenders.bandit_ucb.exploration=0.5",
        "~grids",
        "+grids={goodput: {acceptance.decay: [0.9, 0.99]}, bandit_ucb: {exploration: [0.05]}}",
    ]


@pytest.fixture(scope="module")
def by_script(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "tune_baselines.py"),
            *small(recorded, "all.parquet", folder),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, folder


def test_the_script_leaves_contenders_and_a_table_of_all_trials(by_script):
    said, folder = by_script
    tuned = OmegaConf.to_container(OmegaConf.load(folder / "mine.yaml"))
    assert list(tuned) == list(config_of().contenders)
    assert tuned["goodput"]["cost_model"] == "${trace.cost_model}"
    table = (folder / "tuning.md").read_text()
    for tried in ("exploration=0.05", "best fixed lengths of ngram", "acceptance.decay=0.99"):
        assert tried in table
    assert "Every trial:" in said


def test_no_evaluation_request_is_read(by_script, recorded, tmp_path):
    """Without them in the file, the same is tried with the same results to the last digit."""
    _, folder = by_script
    overrides = [one for one in small(recorded, "train.parquet", tmp_path) if "hydra" not in one]
    config = config_of(*overrides)
    found = tuning.tune(config)
    tuned = OmegaConf.to_container(OmegaConf.load(folder / "mine.yaml"))
    for name, section in tuned.items():
        best = {**found[name].best.section}
        if "cost_model" in best:
            best["cost_model"] = "${trace.cost_model}"
        assert json.loads(json.dumps(best)) == section
    table = (folder / "tuning.md").read_text()
    for one in found.values():
        for trial in one.trials:
            assert f"| {trial.score:.4f} |" in table


def test_a_tuned_rule_is_at_least_as_fast_on_the_training_requests(by_script, recorded, tmp_path):
    _, folder = by_script
    overrides = [one for one in small(recorded, "all.parquet", tmp_path) if "hydra" not in one]
    config = config_of(*overrides)
    replayed = Replayed.read(config.trace, config.model, config.drafters, config.workload, "train")
    engine = TraceEngine(
        replayed.workload.traces, replayed.cost_model, replayed.contract, replayed.engine
    )
    tuned = OmegaConf.to_container(OmegaConf.load(folder / "mine.yaml"))

    def score(section):
        rates = []
        for scenario in config.scenarios.values():
            requests = replayed.workload.requests(10_000, scenario.slots())
            controller = Contender.of("", section).controller(engine.contract)
            served = engine.serve(Arrivals(scenario, requests, 10_000), controller)
            rates.append(served.num_tokens / served.busy_s)
        return math.sqrt(math.prod(rates))

    gains = []
    for name, section in config.contenders.items():
        ours = dict(tuned[name])
        if "cost_model" in ours:
            ours["cost_model"] = config.trace.cost_model
        gains.append(score(ours) / score(section))
    assert min(gains) >= 1 - 1e-9
    assert max(gains) > 1
