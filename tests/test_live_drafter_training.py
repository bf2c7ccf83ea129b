"""A minute-sized head, made end to end by the script and loaded by live vLLM."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "train_drafter.py"


def train(folder, *overrides):
    return subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "drafter_training=quick",
            f"out={folder}",
            f"compare_with={folder}/untrained",
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
        cwd=folder.parent,
    )


def shares(counts):
    """Share of a head's drafts accepted up to each position."""
    return [accepted / counts["num_drafts"] for accepted in counts["num_accepted_per_pos"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "out"
    result = train(folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, result


def test_the_head_that_was_made_drafts_far_better_than_an_untrained_one(trained):
    folder, _ = trained
    described = json.loads((folder / "head" / "drafter.json").read_text())["acceptance"]
    first, second = shares(described["new"]["maths"])
    assert described["new"]["maths"]["num_drafts"] > 100
    assert first > shares(described["compared"]["maths"])[0] + 0.15
    assert 0 < second < first


def test_the_head_says_where_it_comes_from(trained):
    folder, result = trained
    described = json.loads((folder / "head" / "drafter.json").read_text())
    weights = (folder / "head" / "model.safetensors").read_bytes()
    assert described["sha256"] == hashlib.sha256(weights).hexdigest()
    assert "drafter_training=quick" in described["command"]
    assert described["config"]["draft_vocab_size"] == 2048
    assert described["hardware"]["versions"]["vllm"]
    assert str(ROOT) not in json.dumps(described)
    table = (folder / "head" / "acceptance.md").read_text()
    assert "| maths | new |" in table
    assert table.strip() in result.stdout


def test_a_second_run_has_nothing_left_to_do_and_other_settings_are_refused(trained):
    folder, _ = trained
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = train(folder)
    assert again.returncode == 0, again.stderr[-3000:]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before
    refused = train(folder, "fit.epochs=7")
    assert refused.returncode == 1
    assert "other settings" in refused.stderr.strip().splitlines()[-1]
    assert "Traceback" not in refused.stderr
