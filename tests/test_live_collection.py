"""`scripts/collect.py` on live vLLM: killed midway, gone on, and complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from envs.traces import read_traces
from policy.cost_model import read_cost_model

ROOT = Path(__file__).parents[1]
SETTINGS = (
    *("model.dtype=float32", "model.max_num_seqs=4", "model.kv_cache_memory_bytes=536870912"),
    *("model.max_model_len=512", "workload.kinds={edit: 0, summary: 0, chat: 0}"),
    *("workload.max_prompts_per_kind=3", "workload.output_tokens=12"),
    *("record.concurrency=2", "record.requests_per_part=2"),
)
TIMING = (
    *("timing.loads=[1,4]", "timing.contexts=[0]", "timing.model_lengths=[2]"),
    *("timing.token_lengths=[4]", "timing.steps_per_action=3", "timing.repeats=4"),
)


def start(out, *more):
    command = [sys.executable, ROOT / "scripts" / "collect.py", f"out={out}", *SETTINGS, *more]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "traces"
    return out, finish(start(out, *TIMING))


def test_a_collection_leaves_traces_timings_and_a_cost_model_with_their_provenance(whole):
    out, output = whole
    traces = read_traces(Path(f"{out}.parquet"))
    assert 8 < traces.num_requests <= 12  # a prompt that is too long is left out
    assert sorted(set(traces.kinds)) == ["code", "maths"]
    assert sorted(set(traces.splits)) == ["eval", "train"]
    assert (traces.num_output_tokens <= 12).all()
    provenance = json.loads(Path(f"{out}.json").read_text())
    assert provenance["num_requests"] == traces.num_requests
    assert provenance["config"]["workload"]["output_tokens"] == 12
    assert read_cost_model(Path(f"{out}.json")).weights_s.sum() > 0
    assert "held-out steps" in output
    assert "eagle3: drafts at" in output


def test_a_killed_collection_goes_on_without_losing_or_doubling_a_request(whole, tmp_path):
    out = tmp_path / "traces"
    parts = Path(f"{out}.parts")
    process = start(out, "timing=null")
    while not list(parts.glob("*.parquet")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    kept = {path: path.read_bytes() for path in parts.glob("*.parquet")}
    assert not Path(f"{out}.parquet").exists()
    refused = start(out, "timing=null", "workload.output_tokens=13")
    output, _ = refused.communicate(timeout=120)
    assert refused.returncode == 1
    assert "other settings" in output
    finish(start(out, "timing=null"))
    assert all(path.read_bytes() == content for path, content in kept.items())
    in_parts = [read_traces(path).num_requests for path in parts.glob("*.parquet")]
    resumed, uninterrupted = (
        read_traces(Path(f"{out}.parquet")),
        read_traces(Path(f"{whole[0]}.parquet")),
    )
    assert resumed.request_ids == uninterrupted.request_ids
    assert sum(in_parts) == resumed.num_requests
    np.testing.assert_array_equal(resumed.output_token_ids, uninterrupted.output_token_ids)
    for name, drafter in uninterrupted.drafters.items():
        for part in ("num_draft_tokens", "num_accepted_tokens"):
            differs = getattr(resumed.drafters[name], part) != getattr(drafter, part)
            assert differs.mean() < 0.01  # near-ties, and who shared a step with whom
