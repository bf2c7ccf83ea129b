"""A training logs what happened, stops when told to, and always leaves a checkpoint."""

import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import KVWriter, Logger

from policy.errors import EngineError
from policy.training import train
from policy.training.callbacks import ObservationRecorder
from policy.training.checkpoint import find_checkpoint
from policy.training.config import PpoConfig
from policy.training.ppo import build_ppo, make_vec_env
from policy.training.throughput import ThroughputCallback

from .table_engine import CONTRACT, TableEngine, make_env
from .table_engine import one_thread as one_thread

SETTINGS = {"n_steps": 64, "batch_size": 32, "n_epochs": 1, "hidden_layers": (8,)}


class TroubledEngine(TableEngine):
    """Something happens in the middle of one engine step, counted over all episodes."""

    def __init__(self, happens_at, trouble):
        self.steps_left, self.trouble = happens_at, trouble

    def step(self, actions):
        self.steps_left -= 1
        if self.steps_left == 0:
            self.trouble()
        return super().step(actions)


class Memory(KVWriter):
    """Keeps what is logged."""

    def __init__(self):
        self.dumps = []

    def write(self, key_values, key_excluded, step=0):
        self.dumps.append(dict(key_values))

    def close(self):
        pass


class InfoKeeper(BaseCallback):
    """Keeps actions and infos, for the figures to be computed again."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def _on_step(self):
        self.steps.append((self.locals["actions"][0].copy(), self.locals["infos"][0]))
        return True


def make_learner(make_engine=TableEngine, **settings):
    config = PpoConfig(total_timesteps=256, **{**SETTINGS, **settings})
    return build_ppo(make_vec_env(make_env(make_engine)), config, seed=0)


def learn(model, folder, total_timesteps=256, max_minutes=None, every=64):
    """The learning of a run, as `train` calls it; whether a signal ended it."""
    config = SimpleNamespace(
        ppo=SimpleNamespace(total_timesteps=total_timesteps, max_minutes=max_minutes),
        checkpoint_every=every,
        imitate=None,
        counterfactual=None,
    )
    tracking = SimpleNamespace(run_id="abc")
    recorder = ObservationRecorder()
    return train._learn(config, {}, folder, model, model.env, recorder, tracking)


def logged_training(model, steps=64):
    memory, keeper = Memory(), InfoKeeper()
    model.set_logger(Logger(None, [memory]))
    model.learn(steps, CallbackList([ThroughputCallback(CONTRACT, steps), keeper]))
    return memory.dumps[-1], keeper.steps


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_step_and_leaves_a_checkpoint(number, tmp_path):
    before = signal.getsignal(number)
    engine = TroubledEngine(100, lambda: signal.raise_signal(number))
    model = make_learner(lambda: engine)
    assert learn(model, tmp_path)
    steps_taken = model.num_timesteps
    assert engine.steps_left == 0, "it went on after the signal"
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.state["num_timesteps"] == steps_taken < 256
    assert checkpoint.run_state == {"run_id": "abc", "config": {}}
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_a_step_that_does_not_return(tmp_path):
    before = signal.getsignal(signal.SIGINT)  # a worker of pytest-xdist ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def hang():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal was ignored")

    model = make_learner(lambda: TroubledEngine(100, hang))
    try:
        with pytest.raises(KeyboardInterrupt):
            learn(model, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert find_checkpoint(tmp_path).state["num_timesteps"] == model.num_timesteps > 0


def test_a_time_limit_ends_the_training_without_an_interrupt(tmp_path):
    model = make_learner()
    assert not learn(model, tmp_path, max_minutes=1e-9)
    assert find_checkpoint(tmp_path).state["num_timesteps"] == model.num_timesteps == 1


def test_an_engine_that_cannot_be_mended_leaves_a_checkpoint(tmp_path):
    def fail():
        raise RuntimeError("out of memory")

    engines = [TroubledEngine(100, fail), *(TroubledEngine(1, fail) for _ in range(9))]
    model = make_learner(lambda: engines.pop(0))
    with pytest.raises(EngineError, match="failed 3 times in a row"):
        learn(model, tmp_path)
    assert find_checkpoint(tmp_path).state["num_timesteps"] == model.num_timesteps > 64


def test_an_engine_that_is_replaced_is_counted_and_the_training_goes_on(tmp_path):
    def fail():
        raise RuntimeError("out of memory")

    engines = [TroubledEngine(30, fail), TableEngine()]
    logged, steps = logged_training(make_learner(lambda: engines.pop(0)))
    assert logged["engine/failures"] == 1
    assert sum("engine_error" in info for _, info in steps) == 1
    assert len(steps) == 64
    assert engines == []


def test_checkpoints_come_when_they_are_due(tmp_path):
    assert not learn(make_learner(), tmp_path, total_timesteps=320, every=128)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000128", "step_00000256", "step_00000320"]


def test_the_logged_figures_are_those_of_the_rollout():
    logged, steps = logged_training(make_learner(length_prior=0.0))
    infos = [info for _, info in steps]
    tokens = sum(info["num_tokens"] for info in infos)
    seconds = sum(info["step_time_s"] for info in infos)
    assert logged["throughput/tok_per_s"] == pytest.approx(tokens / seconds)
    charged = np.array([info["charged_time_s"] for info in infos])
    speedups = np.array([info["speedup"] for info in infos])
    loads = np.array([info["concurrency"] for info in infos])
    speedup = (speedups * charged).sum() / charged.sum()
    assert logged["throughput/speedup_over_none"] == pytest.approx(speedup)
    for load in set(loads):
        here = loads == load
        speedup = (speedups * charged)[here].sum() / charged[here].sum()
        assert logged[f"throughput/speedup_at_{load}"] == pytest.approx(speedup)
    taken = [CONTRACT.action_table[action][0] for action, _ in steps]
    for index, drafter in enumerate(CONTRACT.drafters):
        assert logged[f"actions/share_{drafter}"] == pytest.approx(taken.count(index) / 64)
    for drafter in ("ngram", "eagle3"):
        drafted, accepted = np.sum([info["acceptance"][drafter] for info in infos], axis=0)
        assert logged[f"acceptance/{drafter}"] == pytest.approx(accepted / drafted)


def test_without_any_draft_every_figure_is_finite():
    """M3: no rate of nothing."""
    logged, _ = logged_training(make_learner(length_prior=1000.0))
    assert logged["actions/share_none"] == 1
    assert not [key for key in logged if key.startswith("acceptance/")]
    ours = {key: value for key, value in logged.items() if not key.startswith("time/")}
    assert all(math.isfinite(value) for value in ours.values())
    assert logged["throughput/speedup_over_none"] == pytest.approx(1, abs=0.05)


def test_the_latest_observations_are_recorded():
    model, recorder, keeper = make_learner(), ObservationRecorder(capacity=40), InfoKeeper()
    model.learn(64, CallbackList([recorder, keeper]))
    assert recorder.observations.shape == (40, len(CONTRACT.fields))
    assert recorder.observations.dtype == np.float32
    np.testing.assert_array_equal(recorder.observations[-1], model._last_obs[0])


def test_a_run_that_was_resumed_at_its_end_has_an_observation_to_compare_on():
    model, recorder = make_learner(), ObservationRecorder()
    model.num_timesteps = 256
    model.learn(0, recorder, reset_num_timesteps=False)
    assert recorder.observations.shape == (1, len(CONTRACT.fields))
