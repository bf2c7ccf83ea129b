"""The environment on live vLLM, and its agreement with the plugin."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

import envs.registration
from envs.draft_env import DraftEnv, EpisodeConfig
from envs.reward import RewardConfig
from policy.errors import ConfigError, EngineError

from . import live

EPISODE = EpisodeConfig(work_tokens_per_req=12, calibration_steps=4)


@pytest.fixture
def env(engine):
    return _make_env(engine)


def _make_env(engine, episode=EPISODE, **workload):
    engine.hook.controller = None
    workload = {"concurrency": (1, 4), "output_tokens": 24, **workload}
    env = DraftEnv(
        lambda: engine, live.make_workload(**workload), episode, RewardConfig(), render_mode="ansi"
    )
    env.close = lambda: None  # the engine is shared
    return env


def test_it_passes_gymnasiums_and_stable_baselines3s_checks(env):
    """T5: without a warning."""
    env.spec = gymnasium.spec("draftgym/VllmDraft-v0")  # says that times, so rewards, vary
    check_env(env, skip_render_check=True, skip_close_check=True)
    check_env_of_sb3(env)


def test_an_episode_is_a_fixed_amount_of_work(env):
    _, info = env.reset(seed=3)
    tokens, terminated = 0, False
    while not terminated:
        _, _, terminated, truncated, step_info = env.step(np.array([2, 2]))
        tokens += step_info["num_tokens"]
        assert not truncated
    work = EPISODE.work_tokens_per_req * info["concurrency"]
    assert work <= tokens < work + 5 * info["concurrency"]


def test_an_episode_is_truncated_at_its_step_limit(engine):
    env = _make_env(engine, EpisodeConfig(max_episode_steps=3, calibration_steps=2))
    env.reset(seed=1)
    ends = [env.step(np.array([0, 0]))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_seed_gives_the_same_prompts_load_and_observations(engine):
    def rollout():
        env = _make_env(engine)
        observations = [env.reset(seed=7)[0]]
        for action in [(2, 3), (1, 8), (0, 0), (2, 1)]:
            observations.append(env.step(np.array(action))[0])
        return env._concurrency, np.stack(observations)

    (load, first), (same_load, second) = rollout(), rollout()
    assert load == same_load
    # What the cache and the model drafter's past leave in the observation may differ: the first
    # rollout computed prompts that the second found cached.
    stable = [
        index
        for index, name in enumerate(engine.contract.field_names)
        if name not in ("kv_cache_usage", "num_prefill_tokens_log2", "eagle3_pending_tokens_log2")
        and not _is_history(name)
    ]
    np.testing.assert_array_equal(first[:, stable], second[:, stable])


def _is_history(name):
    parts = ("acceptance", "since", "top1", "expected", "counterfactual", "draft_share", "match")
    return any(part in name for part in parts) or "on_offer" in name


def test_the_reward_is_its_terms_and_none_is_worth_nothing(engine):
    env = _make_env(engine, EpisodeConfig(work_tokens_per_req=12, calibration_steps=20))
    env.reset(seed=5)
    rewards = []
    for _ in range(8):
        _, reward, terminated, _, info = env.step(np.array([0, 0]))
        assert reward == pytest.approx(info["reward_tokens"] - info["reward_time"])
        rewards.append(reward)
        if terminated:
            break
    assert abs(np.median(rewards)) < 0.5


def test_render_tells_the_step(env):
    env.reset(seed=5)
    env.step(np.array([2, 3]))
    env.step(np.array([2, 3]))
    assert "eagle3" in env.render()
    assert "tokens in" in env.render()


def test_actions_outside_the_space_and_early_steps_are_refused(engine):
    env = _make_env(engine)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.array([0, 0]))
    env.reset(seed=1)
    with pytest.raises(gymnasium.error.InvalidAction):
        env.step(np.array([9, 0]))


def test_it_sees_bit_for_bit_what_the_plugin_computes(engine):
    """Same requests, same actions: once decided by the environment's caller, once in the hook."""
    actions = [(2, 3), (1, 8), (0, 0), (2, 1), (2, 4), (1, 2), (0, 0), (0, 0), (2, 2)] * 6
    workload = live.make_workload(concurrency=(4,), output_tokens=20)

    def episode():
        return workload.episode(11)

    _fresh_history(engine)
    engine.hook.controller = None
    seen = [engine.reset(episode()).observation]
    for action in actions:
        seen.append(engine.step(np.array([action])).observation)

    _fresh_history(engine)
    controller = engine.hook.controller = live.ScriptedController(actions)
    engine.serve(episode(), num_tokens=400)
    served = controller.observations
    count = len(seen)
    assert len(served) >= count
    np.testing.assert_array_equal(np.concatenate(seen[:count]), np.concatenate(served[:count]))


def _fresh_history(engine):
    """Bring engine and hook to the same past: no requests, no cache, no observations."""
    engine.hook.controller = None
    engine.abort_all()
    engine.llm_engine.reset_prefix_cache()
    hook = engine.hook
    hook.pending = None
    hook._builder.reset()
    hook._forget(frozenset(hook._known_req_ids))
    hook._known_req_ids.clear()
    hook._model._holes.clear()


def test_an_engine_failure_truncates_and_the_next_reset_brings_a_fresh_engine(engine):
    """T3: an engine that dies costs an episode, not the training."""
    engines = []

    class Failing:
        """The shared engine, failing at its third step the first time."""

        contract = engine.contract

        def __init__(self):
            engines.append(self)
            self.steps = 0
            self.closed = False

        def reset(self, episode):
            return engine.reset(episode)

        def step(self, actions):
            self.steps += 1
            if len(engines) == 1 and self.steps == 7:
                raise RuntimeError("the worker died")
            return engine.step(actions)

        def close(self):
            self.closed = True

    engine.hook.controller = None
    workload = live.make_workload(concurrency=(2,), output_tokens=24)
    env = DraftEnv(Failing, workload, EPISODE, RewardConfig())
    env.reset(seed=0)
    for _ in range(3):
        observation, reward, terminated, truncated, info = env.step(np.array([0, 0]))
        if truncated:
            break
    assert truncated
    assert not terminated
    assert reward == 0
    assert isinstance(info["engine_error"], EngineError)
    assert "the worker died" in str(info["engine_error"])
    assert env.observation_space.contains(observation)
    assert engines[0].closed
    env.reset(seed=1)
    assert len(engines) == 2
    assert "engine_error" not in env.step(np.array([0, 0]))[4]


def test_it_is_registered_and_refuses_wrong_settings_before_an_engine_starts():
    assert "draftgym/VllmDraft-v0" in gymnasium.registry
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        gymnasium.make("draftgym/VllmDraft-v0", model={"max_num_seq": 4})
    with pytest.raises(ConfigError, match="exceeds max_num_seqs"):
        envs.registration.make_vllm_draft_env(model={"max_num_seqs": 4})
