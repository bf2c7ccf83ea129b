"""The grid of timed steps: what it holds, its parts, resuming."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

import envs.timing
from envs.live import DraftersConfig, ModelConfig
from envs.part_files import claim
from envs.timing import TimingConfig, TimingJob, collect_timings, merge_timings
from envs.workload import Episode, WorkloadConfig, WorkloadRequest
from policy.contract import Contract
from policy.cost_model import StepShape
from policy.errors import ConfigError, TraceError

GRID = TimingConfig(
    loads=(1, 4),
    token_lengths=(2, 8),
    model_lengths=(1, 4),
    contexts=(0, 40),
    steps_per_action=2,
    repeats=3,
)
JOB = TimingJob(
    ModelConfig(),
    DraftersConfig(max_lengths={"ngram": 16, "eagle3": 4}),
    WorkloadConfig(kinds={"code": 1.0}, concurrency=(1,), output_tokens=16),
    GRID,
)
NUM_VISITS = 2 * 2 * 3


class Engine:
    """Takes as many seconds as a step has tokens; dies at a given visit."""

    visits: ClassVar[list[tuple[int, int]]] = []  # load and shortest prompt of each, in order
    dies_at: ClassVar[int | None] = None

    def __init__(self, config):
        self._load = 0

    def read_prompts(self, prompts):
        assert {len(prompt) for prompt in prompts} == {10, 40}

    def reset(self, episode):
        if len(self.visits) == self.dies_at:
            raise KeyboardInterrupt
        requests = episode.take_due(0, 0.0)
        self._load = len(requests)
        self.visits.append((self._load, min(len(r.prompt_token_ids) for r in requests)))

    def step(self, actions):
        tokens = self._load * (1 + int(actions[0, 1]))
        shape = StepShape(num_running_reqs=self._load, num_verified_tokens=tokens)
        return SimpleNamespace(shape=shape, step_time_s=float(tokens))

    def abort_all(self):
        pass

    def close(self):
        pass


class Prompts:
    def __init__(self, config, split, tokenizer):
        assert split == "train"
        assert config.max_prompts_per_kind == GRID.prompts_per_kind

    def prompts(self):
        return [(1,) * 10]

    def episode(self, seed, concurrency):
        requests = iter(WorkloadRequest(f"{i}", (1,) * 10, 16, 0.0, "code") for i in range(99))
        return Episode(concurrency, requests, None)


@pytest.fixture(autouse=True)
def timed_from_memory(monkeypatch):
    monkeypatch.setattr(Engine, "visits", [])
    monkeypatch.setattr(Engine, "dies_at", None)
    monkeypatch.setattr(envs.timing, "VllmEngine", Engine)
    monkeypatch.setattr(envs.timing, "engine_config", lambda model, drafters: None)
    monkeypatch.setattr(envs.timing, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(envs.timing, "Workload", Prompts)


def test_the_grid_holds_every_drafter_and_no_speculation():
    contract = Contract(("none", "ngram", "eagle3"), (0, 16, 4))
    config = TimingConfig(token_lengths=(2, 8), model_lengths=(1, 4, 8))
    assert config.actions(contract) == [(0, 0), (1, 2), (1, 8), (2, 1), (2, 4)]


def test_every_load_context_and_action_is_timed_as_often_as_said(tmp_path):
    collect_timings(JOB, tmp_path)
    timings = merge_timings(JOB, tmp_path)
    assert Counter(Engine.visits) == dict.fromkeys([(1, 10), (1, 40), (4, 10), (4, 40)], 3)
    assert len(timings) == NUM_VISITS * 5 * 2
    assert set(Counter(timings.cell.tolist()).values()) == {3 * 2}
    assert len(set(timings.cell.tolist())) == 2 * 5 * 2
    for cell in np.unique(timings.cell):  # one load and one action each
        here = timings.cell == cell
        assert len(np.unique(timings.load[here])) == len(np.unique(timings.step_time_s[here])) == 1
    np.testing.assert_array_equal(np.unique(timings.visit), np.arange(NUM_VISITS))


def test_visits_and_actions_come_in_random_order(tmp_path):
    collect_timings(JOB, tmp_path)
    timings = merge_timings(JOB, tmp_path)
    assert JOB.visits() != sorted(JOB.visits())
    assert JOB.visits() != replace(JOB, seed=1).visits()
    orders = {tuple(timings.cell[timings.visit == visit] // 2 % 5) for visit in range(NUM_VISITS)}
    assert len(orders) > NUM_VISITS // 2


@pytest.mark.parametrize("dies_at", [0, 1, 7, NUM_VISITS - 1])
def test_a_killed_run_goes_on_with_the_visits_that_are_left(tmp_path, monkeypatch, dies_at):
    monkeypatch.setattr(Engine, "dies_at", dies_at)
    with pytest.raises(KeyboardInterrupt):
        collect_timings(JOB, tmp_path)
    with pytest.raises(TraceError, match="no whole file of timings"):
        merge_timings(JOB, tmp_path)
    monkeypatch.setattr(Engine, "dies_at", None)
    collect_timings(JOB, tmp_path)
    assert len(Engine.visits) == NUM_VISITS
    assert len(merge_timings(JOB, tmp_path)) == NUM_VISITS * 5 * 2


def test_a_finished_run_starts_no_engine(tmp_path, monkeypatch):
    collect_timings(JOB, tmp_path)
    monkeypatch.setattr(envs.timing, "VllmEngine", None)
    collect_timings(JOB, tmp_path)


def test_a_folder_belongs_to_its_settings(tmp_path):
    claim(tmp_path / "parts", {"loads": [1, 2]})
    claim(tmp_path / "parts", {"loads": (1, 2)})
    with pytest.raises(TraceError, match="other settings; collect with those, name another file"):
        claim(tmp_path / "parts", {"loads": [1, 4]})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loads": ()}, "timing.loads is"),
        ({"loads": (0,)}, "timing.loads is"),
        ({"contexts": (-1,)}, "list whole numbers of 0 or more"),
        ({"repeats": 0}, "timing.repeats is 0"),
        ({"loads": (64,)}, "go up to 64 requests; raise model.max_num_seqs from 32"),
        ({"contexts": (1020,)}, "requests of 1036 tokens; raise model.max_model_len from 1024"),
    ],
)
def test_a_senseless_grid_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(JOB, grid=TimingConfig(**settings))
