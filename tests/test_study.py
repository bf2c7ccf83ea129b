"""The study's configuration, claims, pictures and report."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from policy.config import from_mapping
from policy.errors import ConfigError
from policy.training.study import run_study
from policy.training.study_claims import judge_claims, outcomes
from policy.training.study_config import StudyConfig
from policy.training.study_overlap import OverlapCell
from policy.training.study_sections import (
    acceptance_section,
    oracle_section,
    overlap_section,
    speedup_sections,
    stage_section,
)
from policy.training.study_speedups import FIXED, Speedups
from policy.training.study_verdict import verdict_section

from .study_results import DATA_SETS, LOADS, figure, make_results
from .synthetic_traces import make_traces

ROOT = Path(__file__).resolve().parent.parent
H100 = ROOT / "checkpoints" / "cost_models" / "llama3.1-8b-h100.json"
OmegaConf.register_new_resolver("repository", lambda: str(ROOT), replace=True)


@functools.cache
def composed(*overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = compose("study", overrides=["output_dir=somewhere", *overrides])
    return OmegaConf.to_container(settings, resolve=True)


def build(*overrides):
    return from_mapping(StudyConfig, composed(*overrides), where="")


@pytest.mark.parametrize("traces", ["smollm2", "published"])
def test_every_set_of_traces_composes_and_hides_no_key(traces):
    settings, config = composed(f"traces={traces}"), build(f"traces={traces}")
    for section in ("traces", "live"):
        names = [spec.name for spec in dataclasses.fields(getattr(config, section))]
        assert names == list(settings[section])
    assert set(settings) == {spec.name for spec in dataclasses.fields(StudyConfig)}


def test_quick_looks_at_few_loads_and_tokens():
    config = build("quick=true", "traces=published")
    quick = config.quickened()
    assert quick.traces.concurrency == (1, 16, 128)
    assert quick.live.concurrency == (1, 32)
    assert quick.live.tokens_per_request < config.live.tokens_per_request
    assert quick.live.num_repeats < config.live.num_repeats
    assert replace(quick, traces=config.traces, live=config.live) == config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["~traces", "live=null"], "A study needs traces or live; leave one of them in."),
        (["traces.concurrency=[4,1]"], "traces.concurrency is [4, 1]; list ascending"),
        (["traces.overlap_length=0"], "traces.overlap_length is 0; make it 1 to 16."),
        (["traces.files=[]"], "traces.files is empty; name a trace file"),
        (["live.concurrency=[64]"], "raise model.max_num_seqs from 32 or lower it."),
        (["live.lengths.eagle3=[9]"], "raise drafters.max_lengths.eagle3 or lower it."),
        (["live.num_repeats=0"], "live.num_repeats, tokens_per_request and min_tokens must"),
        (["+traces.chain=1"], "Unknown key 'chain' in traces; did you mean 'chains'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_named_with_its_mend(overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        build(*overrides)
    assert sentence in str(refused.value)


def outcome_of(results, paper):
    (claim,) = [claim for claim in judge_claims(results) if claim.paper.startswith(paper)]
    return claim.outcome


CLAIMS = [
    "Gains shrink",
    "Speculation consistently",
    "Verification takes",
    "Sampling",
    "n-gram takes no memory",
    "Acceptance varies",
    "Requests of one",
    "Data sets differ",
    "n-gram loses on most",
    "Above an overlap",
    "An oracle of",
    "That gap",
    "Choosing n-gram",
]


def test_all_claims_hold_of_an_engine_like_the_papers():
    results = make_results()
    assert {name: outcome_of(results, name) for name in CLAIMS} == dict.fromkeys(
        CLAIMS, "confirmed"
    )
    assert outcomes(judge_claims(results)) == "13 confirmed, 1 not testable"


def changed(results, speedup_of):
    return replace(
        results,
        speedups=Speedups(replace(row, speedup=speedup_of(row)) for row in results.speedups),
    )


def is_fixed(row, drafter="ngram", load=LOADS[-1]):
    return (row.setting, row.drafter, row.num_running_reqs) == (FIXED, drafter, load)


def with_share(results, stage, share):
    rows = [replace(row, share=share) if row.stage == stage else row for row in results.stages]
    return replace(results, stages=rows)


def without_bursts(results):
    spreads = [
        replace(one, p5=2.0, p95=2.2) if one.drafter == "ngram" else one for one in results.spreads
    ]
    return replace(results, spreads=spreads)


def flat(results):
    rows = [replace(row, tokens_per_step=2.0) for row in results.stretches]
    spreads = [replace(one, median=2.0) for one in results.spreads]
    return replace(results, stretches=rows, spreads=spreads)


@pytest.mark.parametrize(
    ("paper", "change"),
    [
        ("Gains shrink", lambda one: changed(one, lambda row: 3 if is_fixed(row) else 2)),
        ("Speculation consist", lambda one: changed(one, lambda row: 0.9 if is_fixed(row) else 2)),
        ("Verification takes", lambda one: with_share(one, "verification", 0.4)),
        ("Verification takes", lambda one: with_share(one, "verification", 0.96)),
        ("Sampling", lambda one: with_share(one, "sampling", 0.02)),
        (
            "n-gram takes no",
            lambda one: replace(one, memory=replace(one.memory, drafter_kv_bytes_per_token=51)),
        ),
        ("Acceptance varies", flat),
        ("Requests of one", without_bursts),
        ("Data sets differ", flat),
        (
            "n-gram loses on",
            lambda one: changed(one, lambda row: 3 if is_fixed(row, load=1) else row.speedup),
        ),
        (
            "Above an overlap",
            lambda one: replace(
                one, overlap_cells=[*one.overlap_cells, OverlapCell(0.8, 0.9, 0.9, 3, 8, 0.9)]
            ),
        ),
        ("An oracle of", lambda one: changed(one, lambda row: 2)),
        ("That gap", lambda one: changed(one, lambda row: 2)),
        ("Choosing n-gram", lambda one: changed(one, lambda row: 2)),
    ],
)
def test_a_claim_is_not_confirmed_where_the_numbers_say_otherwise(paper, change):
    assert outcome_of(change(make_results()), paper) == "not confirmed"


def test_what_was_not_measured_is_not_testable():
    results = make_results(stages=[], memory=None, overlap_cells=[])
    for paper in ("Verification takes", "Sampling", "n-gram takes no", "Above an overlap"):
        assert outcome_of(results, paper) == "not testable"
    live = Speedups(
        figure("all", load, FIXED, drafter, 3, 1.5 / load, "held_out", "live")
        for load in LOADS
        for drafter in ("ngram", "eagle3")
    )
    results = make_results(
        speedups=live, kinds=(), model_drafter=None, stretches=[], spreads=[], overlap_cells=[]
    )
    told = {claim.paper: claim.outcome for claim in judge_claims(results)}
    assert outcome_of(results, "Gains shrink") == "confirmed"  # live figures take their place
    assert sum(outcome == "not testable" for outcome in told.values()) == 9


def test_the_verdict_names_the_best_setting_of_each_load():
    results = make_results()
    verdict = verdict_section(results, judge_claims(results))
    questions, table = verdict.tables
    (advice,) = [row[1] for row in questions if row[0].startswith("Which")]
    assert advice == "At 1 to 8 requests in flight use eagle3, 3 tokens: 2.00 to 1.50 times no " + (
        "speculation."
    )
    assert table[1][:3] == ["1", "eagle3, 3 tokens", "2.00"]
    assert table[1][-4:] == ["2.00", "3.00", "1.50", "67%"]
    slow = changed(results, lambda row: 1.01 if row.setting == FIXED else row.speedup)
    questions, table = verdict_section(slow, judge_claims(slow)).tables
    assert "serve without speculation" in questions[1][1]
    assert table[1][1] == "no speculation"


@pytest.fixture
def drawn(monkeypatch):
    """Figures in the order they were saved."""
    figures = []
    save = Figure.savefig

    def keep(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_every_axis_of_every_picture_is_labelled_and_legends_are_whole(drawn, tmp_path):
    results = make_results()
    sections = [
        *speedup_sections(tmp_path, results, (1, 3)),
        stage_section(tmp_path, results),
        acceptance_section(tmp_path, results),
        overlap_section(tmp_path, results),
        oracle_section(tmp_path, results),
    ]
    pictures = [path for section in sections for path in section.pictures]
    assert len(pictures) == len(drawn) == 8
    for path, figure_ in zip(pictures, drawn, strict=True):
        assert matplotlib.image.imread(path).shape[1] == 1200
        shown = [axes for axes in figure_.axes if axes.get_visible()]
        has_y_label = bool(figure_.get_supylabel()) or any(axes.get_ylabel() for axes in shown)
        assert has_y_label, path.name
        maps = [axes for axes in shown if axes.get_label() != "<colorbar>"]
        assert all(axes.get_xlabel() for axes in maps), path.name
        for legend in figure_.legends:
            box = legend.get_window_extent()
            assert figure_.bbox.x0 <= box.x0, path.name
            assert box.x1 <= figure_.bbox.x1, path.name
            assert all(not box.overlaps(axes.get_window_extent()) for axes in maps), path.name


def test_a_study_of_traces_writes_one_page_that_needs_no_network(tmp_path):
    make_traces(num_requests=24, kinds=DATA_SETS).write(tmp_path / "traces" / "a.parquet")
    (tmp_path / "traces" / "a.timings.parquet").write_bytes(b"no trace")
    settings = composed("live=null") | {"output_dir": str(tmp_path / "out")}
    settings["traces"] = settings["traces"] | {
        "files": [str(tmp_path / "traces")],
        "cost_model": str(H100),
        "policy": None,
        "concurrency": [1, 4],
        "min_tokens_per_slot": 50,
    }
    said = run_study(from_mapping(StudyConfig, settings, where=""))
    out = tmp_path / "out"
    page, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert not re.search(r"(src|href)=['\"](?!data:)", page)
    pictures = {path.name for path in out.glob("*.png")}
    assert set(re.findall(r"!\[.*?\]\((.*?)\)", markdown)) == pictures
    assert page.count("<img ") == len(pictures)
    for heading in ("The verdict", "The paper's claims", "How far from optimal"):
        assert f"## {heading}\n" in markdown
        assert heading.replace("'", "&#x27;") in page
    assert str(ROOT) not in markdown
    assert "At 1" in said
    tables = {path.stem for path in out.glob("*.parquet")}
    assert tables == {path.stem for path in out.glob("*.csv")}
    assert {"speedups", "acceptance", "overlap", "claims"} <= tables
