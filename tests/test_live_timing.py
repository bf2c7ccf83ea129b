"""A small grid of timed steps on live vLLM: every row says what its action made the engine do."""

from __future__ import annotations

import numpy as np
import pytest

import envs.timing
from envs.cost_fit import expected_s, fit_cost_model
from envs.timing import TimingConfig, TimingJob, collect_timings, merge_timings
from envs.workload import WorkloadConfig
from policy.cost_model import FEATURES

from . import live

GRID = TimingConfig(
    loads=(1, 4),
    token_lengths=(4,),
    model_lengths=(1, 4),
    contexts=(0, 256),
    steps_per_action=4,
    repeats=1,
    prompts_per_kind=1,
)
ACTIONS = [(0, 0), (1, 4), (2, 1), (2, 4)]
JOB = TimingJob(
    live.MODEL,
    live.DRAFTERS,
    WorkloadConfig(
        kinds=live.KINDS,
        concurrency=GRID.loads,
        output_tokens=128,
        max_prompt_tokens=320,
        first_wave_min_fraction=1,  # no request ends in a visit, so no draft is cut short
    ),
    GRID,
)


class Shared:
    """The module's engine, which outlives the timing run."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def close(self):
        pass


@pytest.fixture(scope="module")
def timings(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("timings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs.timing, "VllmEngine", lambda config: Shared(engine))
        collect_timings(JOB, folder)
    return merge_timings(JOB, folder)


def work(timings, feature):
    return timings.features[:, FEATURES.index(feature)]


def actions(timings):
    """Drafter and length of every step, int `[steps, 2]`."""
    return np.array(ACTIONS)[timings.cell // len(GRID.contexts) % len(ACTIONS)]


def decoding(timings):
    """Steps of one engine step without prompt tokens."""
    return (work(timings, "num_prefill_tokens") == 0) & (work(timings, "num_engine_steps") == 1)


def test_every_cell_is_timed_and_most_steps_only_decode(timings):
    assert JOB.actions == ACTIONS
    cells, counts = np.unique(timings.cell, return_counts=True)
    assert len(cells) == len(GRID.loads) * len(ACTIONS) * len(GRID.contexts)
    assert (counts == GRID.steps_per_action).all()
    assert decoding(timings).mean() > 0.75
    assert (timings.num_running_reqs[decoding(timings)] == timings.load[decoding(timings)]).all()


def test_the_work_of_a_step_is_that_of_its_action(timings):
    steps = timings.select(decoding(timings))
    drafter, length = actions(steps).T
    verified, running = work(steps, "num_verified_tokens"), steps.num_running_reqs
    assert (verified[drafter == 0] == running[drafter == 0]).all()
    assert (verified >= running).all()
    assert (verified <= running * (1 + length)).all()
    passes, is_model = work(steps, "num_draft_passes"), drafter == 2
    np.testing.assert_array_equal(passes[is_model], length[is_model])
    np.testing.assert_array_equal(work(steps, "num_model_drafts"), is_model)
    assert (work(steps, "num_draft_pass_tokens") >= passes).all()
    # The model drafter reads new prompts even where it isn't chosen: once in a visit, at its start.
    read, is_first = passes[~is_model], np.diff(steps.visit, prepend=-1)[~is_model] > 0
    assert (read[is_first] <= 1).all()
    assert (read[~is_first] == 0).all()


def test_prompts_are_filled_up_to_the_context(timings):
    steps = timings.select(decoding(timings))
    per_req = work(steps, "num_context_tokens") / steps.num_running_reqs
    filled = steps.cell % len(GRID.contexts) == 1
    assert per_req[filled].min() > 256
    assert np.median(per_req[~filled]) < np.median(per_req[filled])


def test_times_are_seconds_that_a_cost_model_can_be_fitted_to(timings):
    assert (timings.step_time_s > 1e-4).all()
    drafter, length = actions(timings).T
    light = timings.step_time_s[(timings.load == 1) & (drafter == 0)]
    heavy = timings.step_time_s[(timings.load == 4) & (length == 4) & (drafter == 2)]
    assert np.median(light) < np.median(heavy)
    error = expected_s(fit_cost_model(timings, GRID.loads), timings) / timings.step_time_s - 1
    assert np.median(np.abs(error)) < 0.5
