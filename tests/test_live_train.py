"""The whole way on live vLLM: train, export, compare; resume; stop by a signal."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from policy.artifact import load_policy

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "experiment=quick",
    "ppo.n_steps=32",
    "ppo.max_minutes=null",
    "workload.concurrency=[1,2]",
    "workload.output_tokens=32",
    "workload.max_prompts_per_kind=2",
    "model.max_num_seqs=4",
    "model.kv_cache_memory_bytes=1073741824",
    "env.work_tokens_per_req=12",
    "env.calibration_steps=4",
    "compare.concurrency=[1,2]",
    "compare.min_tokens=16",
    "compare.tokens_per_req=8",
)
CELL_KEYS = {
    *("setting", "concurrency", "tokens", "seconds"),
    *("tok_per_s", "speedup", "ci_low", "ci_high"),
}


def command(folder: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "scripts" / "train.py"), *SMALL),
        *(f"hydra.run.dir={folder}", *overrides),
    ]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *overrides),
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
        cwd=folder.parent,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "run"
    result = run(folder, "ppo.total_timesteps=64")
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, result


def test_a_run_leaves_a_policy_that_says_where_it_comes_from(trained):
    folder, _ = trained
    artifact = load_policy(folder / "policy.pt")
    described = json.loads((folder / "policy.json").read_text())
    assert described["sha256"] == artifact.sha256
    assert described["provenance"]["num_timesteps"] == 64
    assert described["provenance"]["config"]["ppo"]["total_timesteps"] == 64
    assert artifact.contract.drafters == ("none", "ngram", "eagle3")
    untrained = load_policy(folder / "untrained" / "policy.pt")
    assert untrained.contract == artifact.contract
    assert untrained.sha256 != artifact.sha256


def test_a_run_ends_with_a_comparison_against_no_speculation(trained):
    """M1: of an engine without speculation configured."""
    folder, result = trained
    report = json.loads((folder / "report.json").read_text())
    cells = {(cell["setting"], cell["concurrency"]): cell for cell in report["cells"]}
    settings = {
        *("none", "none_hooked", "ngram_fixed", "eagle3_fixed"),
        *("policy_untrained", "policy"),
    }
    assert cells.keys() == {(setting, load) for setting in settings for load in (1, 2)}
    for cell in cells.values():
        assert cell.keys() >= CELL_KEYS
        assert cell["tok_per_s"] == pytest.approx(cell["tokens"] / cell["seconds"])
        assert 0.1 < cell["speedup"] < 10
    assert cells["none", 1]["speedup"] == 1
    assert cells["eagle3_fixed", 1]["draft_acceptance_rate"] > 0.1
    assert cells["none_hooked", 1]["draft_acceptance_rate"] is None
    assert (folder / "report.png").stat().st_size > 10_000
    assert "eagle3_fixed" in result.stdout
    assert "policy" in (folder / "report.md").read_text()


def test_metrics_are_finite_and_tell_speed_and_actions(trained):
    folder, _ = trained
    with (folder / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for row in rows:
        assert float(row["throughput/tok_per_s"]) > 1
        assert 0.1 < float(row["throughput/speedup_over_none"]) < 10
        shares = [float(row[f"actions/share_{drafter}"]) for drafter in ("none", "ngram", "eagle3")]
        assert sum(shares) == pytest.approx(1)
        assert all(math.isfinite(float(value)) for value in row.values() if value)


def test_a_run_goes_on_from_its_checkpoint(trained, tmp_path):
    folder, _ = trained
    result = run(
        tmp_path / "resumed", f"resume={folder}", "ppo.total_timesteps=96", "compare.enabled=false"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    described = json.loads((tmp_path / "resumed" / "policy.json").read_text())
    assert described["provenance"]["num_timesteps"] == 96
    with (tmp_path / "resumed" / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["time/total_timesteps"]) for row in rows] == [96]


def test_an_interrupt_saves_and_ends_cleanly(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, "ppo.total_timesteps=100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        began = time.monotonic()
        while not (folder / "progress.csv").exists() or not (
            (folder / "progress.csv").read_text().count("\n") > 1
        ):
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() - began < 180
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    assert f"resume={folder}" in output
    assert "Traceback" not in output
    assert list((folder / "checkpoints").glob("step_*"))
    assert load_policy(folder / "policy.pt")


def test_settings_that_cannot_work_end_with_one_sentence(tmp_path):
    result = run(tmp_path / "run", "workload.concurrency=[64]")
    assert result.returncode == 1
    assert "raise" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_the_policy_decides_alike_in_training_and_from_the_file(trained):
    """The exported module against stable-baselines3's actor, rebuilt from the checkpoint."""
    from stable_baselines3 import PPO

    folder, _ = trained
    artifact = load_policy(folder / "policy.pt")
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    model = PPO.load(checkpoint / "model.zip", device="cpu")
    contract = artifact.contract
    generator = np.random.default_rng(1)
    rows = contract.low + generator.random((500, len(contract.low))) * (
        contract.high - contract.low
    )
    rows = rows.astype(np.float32)
    import torch

    with torch.inference_mode():
        ours = artifact.module(torch.from_numpy(rows)).numpy()
    numbers, _ = model.predict(rows, deterministic=True)
    np.testing.assert_array_equal(ours, contract.action_table[numbers])
