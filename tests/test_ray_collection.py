"""Collecting over Ray: workers that die are replaced, and the result is that of one process."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from envs.collection import CollectionJob, begin, collect_shard, merge
from envs.launcher import LauncherConfig
from envs.ray_collection import collect_on_ray
from envs.ray_workers import MAX_ATTEMPTS, cores_per_worker, run_shares
from envs.workload import WorkloadConfig
from policy.errors import ConfigError, EngineError, TraceError

from . import live, ray_shares

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"
)
JOB = CollectionJob(
    replace(live.MODEL, max_num_seqs=4, max_model_len=512, kv_cache_memory_bytes=256 << 20),
    live.DRAFTERS,
    WorkloadConfig(
        kinds={"code": 1.0, "maths": 1.0},
        concurrency=(2,),
        output_tokens=16,
        max_prompts_per_kind=3,
        max_prompt_tokens=320,
    ),
    splits=("train",),
    concurrency=2,
    requests_per_part=1,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray cluster of two cores, which the shares of all tests that ask for it share."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    threads = os.environ.pop("OMP_NUM_THREADS", None)  # Ray leaves a number that was given alone
    import ray

    ray.init(
        "local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False
    )
    yield ray
    ray.shutdown()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads


def test_without_ray_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'`pip install "draftgym\[ray\]"`, or use launcher=loc'):
        run_shares(partial(ray_shares.note, tmp_path), tmp_path, 2)


@pytest.mark.parametrize(
    ("node_cores", "num_workers", "cores"),
    [([2], 2, 1), ([16], 1, 16), ([16], 3, 5), ([16, 4], 2, 8), ([0, 8], 2, 4), ([2], 5, 1)],
)
def test_workers_share_the_cores(node_cores, num_workers, cores):
    assert cores_per_worker(node_cores, num_workers) == cores


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"name": "slurm"}, "'local' or 'ray'"), ({"num_workers": 0}, "num_workers is 0; make it 1")],
)
def test_a_senseless_launcher_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LauncherConfig(**settings)


@needs_ray
def test_each_share_has_a_process_of_its_own_with_its_part_of_the_cores(cluster, tmp_path):
    for _ in range(2):
        run_shares(partial(ray_shares.note, tmp_path), tmp_path, 1)
    notes = list(tmp_path.glob("0-of-1-*.done"))
    assert len(notes) == 2  # they are named by process
    assert {path.read_text() for path in notes} == {"2"}


@needs_ray
def test_the_share_of_a_dead_worker_is_done_by_another(cluster, tmp_path, capsys):
    polls = []
    run_shares(partial(ray_shares.die_once, tmp_path), tmp_path, 2, on_poll=lambda: polls.append(1))
    assert sorted(path.name[:6] for path in tmp_path.glob("*.done")) == ["0-of-2", "1-of-2"]
    assert polls
    assert re.search(r"Worker 2 of 2 died \(\w+\); its share is gone on", capsys.readouterr().err)
    assert (tmp_path / "worker-001-of-002.log").read_text().count("Worker 2 of 2 is process") == 2


@needs_ray
def test_a_share_that_always_kills_its_worker_is_given_up(cluster, tmp_path):
    with pytest.raises(EngineError, match=r"died 3 times \(\w+\); see .*worker-000-of-001\.log\.$"):
        run_shares(partial(ray_shares.die_always, tmp_path), tmp_path, 1)
    assert len((tmp_path / "deaths").read_text()) == MAX_ATTEMPTS == 3


@needs_ray
@pytest.mark.parametrize(
    ("share", "error", "sentence", "logged"),
    [
        (ray_shares.refuse, TraceError, "^Share 0 of .* makes no sense; mend it.$", "TraceError"),
        (ray_shares.fail, EngineError, r"failed \(ZeroDiv.*: no such number\); see ", "in fail"),
    ],
)
def test_a_share_that_fails_is_not_tried_again(cluster, tmp_path, share, error, sentence, logged):
    with pytest.raises(error, match=sentence):
        run_shares(partial(share, tmp_path), tmp_path, 1)
    log = (tmp_path / "worker-000-of-001.log").read_text()
    assert log.count("is process") == 1
    assert logged in log


@needs_ray
def test_a_folder_that_workers_do_not_see_is_named(cluster, tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(EngineError, match=r"could not begin \(FileNotFound.*missing.*share .*mis"):
        run_shares(partial(ray_shares.note, tmp_path), missing, 1)


@needs_ray
def test_no_cluster_at_an_address_is_one_sentence(tmp_path):
    import ray

    ray.shutdown()  # of the other tests, if it runs
    with pytest.raises(EngineError, match=r"^No Ray cluster can be joined at 127\.0\.0\.1:1 \("):
        run_shares(partial(ray_shares.note, tmp_path), tmp_path, 1, "127.0.0.1:1")


@needs_ray
def test_two_workers_one_killed_midway_record_what_one_process_records(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # three engines share two cores
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    begin(JOB, alone)
    begin(JOB, shared)
    one_process = multiprocessing.get_context("spawn").Process(
        target=collect_shard, args=(JOB, alone)
    )
    one_process.start()
    killed = []
    killer = threading.Thread(target=kill_after_first_part, args=(shared, killed), daemon=True)
    killer.start()
    collect_on_ray(JOB, shared, num_workers=2)
    one_process.join()
    assert killed
    assert "its share is gone on with" in capsys.readouterr().err
    log = next(path for path in shared.glob("*.log") if f"process {killed[0]} " in path.read_text())
    assert log.read_text().count("is process") == 2
    expected, merged = merge(JOB, alone), merge(JOB, shared)
    assert expected.num_requests == 6
    assert merged.request_ids == expected.request_ids
    np.testing.assert_array_equal(merged.output_token_ids, expected.output_token_ids)
    for name, drafter in expected.drafters.items():
        for part in ("num_draft_tokens", "num_accepted_tokens"):
            np.testing.assert_array_equal(
                getattr(merged.drafters[name], part), getattr(drafter, part)
            )
    np.testing.assert_allclose(
        merged.drafters["eagle3"].survival, expected.drafters["eagle3"].survival, atol=1e-4
    )


def kill_after_first_part(folder, killed):
    """Kill the worker that writes the first part, by the process that its log names."""
    while not (parts := list(folder.glob("*.parquet"))):
        time.sleep(0.01)
    log = folder / f"worker-{parts[0].name[:10]}.log"
    process = int(re.search(r"is process (\d+) on", log.read_text())[1])
    os.kill(process, signal.SIGKILL)
    killed.append(process)
