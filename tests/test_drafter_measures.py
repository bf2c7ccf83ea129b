"""The report of the drafters: its figures against a slow count, its files, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from envs.live import DraftersConfig
from policy.cost_model import StepShape
from policy.errors import ConfigError, TraceError
from policy.serving.config import DrafterSettings
from policy.training.drafter_measures import DrafterMeasuresConfig, measure_drafters
from policy.training.drafter_report import prepare_folder, write_drafter_report
from policy.training.study_data import ALL

from .synthetic_traces import make_cost_model, make_traces, with_suffix

ROOT = Path(__file__).parents[1]


def config_of(folder, traces, **changes):
    """A config over traces written to a folder, with the match lengths of their recording."""
    traces.write(folder / "traces.parquet")
    prices = folder / "prices.json"
    prices.write_text(json.dumps({"cost_model": make_cost_model().state_dict()}))
    given = {
        "files": (str(folder / "traces.parquet"),),
        "cost_model": str(prices),
        "drafters": DraftersConfig(settings=DrafterSettings(ngram_min_match=2, ngram_max_match=4)),
        "output_dir": str(folder / "report"),
        "concurrency": (1, 8),
    }
    return DrafterMeasuresConfig(**{**given, **changes})


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    traces = with_suffix(make_traces(num_requests=60, kinds=("code", "chat", "maths")))
    config = config_of(tmp_path_factory.mktemp("drafters"), traces)
    return traces.of_split("eval"), config, measure_drafters(config)


def test_shares_are_those_of_a_slow_count(measured):
    traces, _, measures = measured
    assert {row.data_set for row in measures.positions} == {"code", "chat", "maths", ALL}
    checked = 0
    for row in measures.positions:
        trace, index = traces.drafters[row.drafter], row.draft_position - 1
        steps = [
            i
            for request in range(traces.num_requests)
            if row.data_set in (traces.kinds[request], ALL)
            for i in range(traces.starts[request] + 1, traces.starts[request + 1])
        ]
        offered = [i for i in steps if trace.num_draft_tokens[i] > index]
        reached = [i for i in offered if trace.num_accepted_tokens[i] >= index]
        accepted = [i for i in reached if trace.num_accepted_tokens[i] > index]
        assert row.num_drafts == len(reached)
        assert row.offered.value == pytest.approx(len(offered) / len(steps))
        if len(reached) < 50:
            assert math.isnan(row.conditional.value)
            continue
        checked += 1
        assert row.conditional.value == pytest.approx(len(accepted) / len(reached))
        assert row.survival.value == pytest.approx(len(accepted) / len(offered))
        assert row.conditional.low <= row.conditional.value <= row.conditional.high
    assert checked > 10


def test_match_lengths_count_every_draft_once(measured):
    traces, _, measures = measured
    for drafter in ("ngram", "suffix"):
        rows = [row for row in measures.match_lengths if row.drafter == drafter]
        trace = traces.drafters[drafter]
        assert sum(row.num_drafts for row in rows) == np.count_nonzero(trace.num_draft_tokens)
        accepted = sum(row.mean_accepted_tokens * row.num_drafts for row in rows)
        assert accepted == pytest.approx(trace.num_accepted_tokens.sum())
    assert "eagle3" not in {row.drafter for row in measures.match_lengths}


def test_costs_are_those_of_the_cost_model(measured):
    traces, _, measures = measured
    prices = make_cost_model()
    prompt = np.median([len(prompt) for prompt in traces.prompts])
    context = 8 * int(prompt + np.median(traces.num_output_tokens) / 2)
    plain_s = prices.expected_s(StepShape(8, num_verified_tokens=8, num_context_tokens=context))
    costs = {
        (row.drafter, row.num_draft_tokens): row.cost
        for row in measures.step_costs
        if row.concurrency == 8
    }
    verified_s = prices.expected_s(
        StepShape(8, num_verified_tokens=8 * 9, num_context_tokens=context)
    )
    assert costs["ngram", 8] == pytest.approx(verified_s / plain_s)
    accepted = traces.drafters["eagle3"].num_accepted_tokens.mean()
    eagle_s = prices.expected_s(
        StepShape(
            8,
            num_verified_tokens=8 * 5,
            num_context_tokens=context,
            num_draft_passes=4,
            num_draft_pass_tokens=round(8 * (accepted + 4)),
        )
    )
    assert costs["eagle3", 4] == pytest.approx(eagle_s / plain_s)


def test_the_report_holds_every_table_and_picture(measured):
    _, config, measures = measured
    prepare_folder(config)
    text = write_drafter_report(config, measures)
    folder = Path(config.output_dir)
    for heading in ("Acceptance by position", "Confidence", "match length", "Cost of a step"):
        assert heading in text
        assert heading in (folder / "report.md").read_text()
        assert heading in (folder / "report.html").read_text()
    for picture in ("acceptance.png", "reliability.png"):
        assert (folder / picture).stat().st_size > 10_000
    table = pq.read_table(folder / "confidences.parquet")
    assert table.num_rows == len(measures.confidences)
    assert table["calibrated_auc"].to_pylist() == [row.auc for row in measures.confidences]


def test_traces_without_both_splits_are_refused(tmp_path):
    traces = make_traces()
    for split, message in (("train", "no request of the eval split"), ("eval", "no training")):
        folder = tmp_path / split
        folder.mkdir()
        config = config_of(folder, traces.of_split(split))
        with pytest.raises(TraceError, match=message):
            measure_drafters(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"files": ()}, "files is empty"), ({"concurrency": (0,)}, "1 request or more")],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, make_traces(), **changes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("files=[nowhere.parquet]", "There is no trace file nowhere.parquet"),
        ("sead=1", "did you mean 'seed'"),
        ("output_dir=/dev/null/report", "Cannot write to /dev/null/report"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, override, message):
    command = [sys.executable, str(ROOT / "scripts" / "measure_drafters.py"), override]
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
