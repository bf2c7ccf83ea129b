"""Many replayed engines at once do what as many single environments do, and what SB3 expects."""

import json
import re

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecEnv

from envs.draft_env import DraftEnv, EpisodeConfig
from envs.draft_vec_env import DraftVecEnv
from envs.reward import RewardConfig
from envs.simulator_state import TraceEngineConfig
from envs.trace_engine import TraceEngine
from envs.trace_workload import TraceWorkload
from policy.cost_model import CostModel
from policy.errors import ConfigError, TraceError

from .synthetic_traces import PRICES_S, make_cost_model, make_traces

TRACES = make_traces(num_requests=30, output_tokens=48, seed=2)
WORKLOAD = TraceWorkload(TRACES, (1, 2, 4, 8), 40, {"code": 2.0, "chat": 1.0})
COST_MODEL = CostModel.from_weights(PRICES_S, token_draft_share=0.05)
EPISODE = EpisodeConfig(work_tokens_per_req=16, max_episode_steps=12)


@pytest.fixture
def make_vec_env():
    """Makes environments that are closed after the test."""
    made = []

    def make(num_envs=4, seed=5, num_threads=2, workload=WORKLOAD, lengths=None, **settings):
        vec_env = DraftVecEnv(
            workload,
            COST_MODEL,
            workload.traces.contract(lengths),
            TraceEngineConfig(**settings),
            EPISODE,
            num_envs,
            seed,
            num_threads,
        )
        made.append(vec_env)
        return vec_env

    yield make
    for vec_env in made:
        vec_env.close()


def make_env(lengths=None, **settings):
    return DraftEnv(
        lambda: TraceEngine(
            TRACES, COST_MODEL, TRACES.contract(lengths), TraceEngineConfig(**settings)
        ),
        WORKLOAD,
        EPISODE,
        RewardConfig("measured"),
        cost_model=COST_MODEL,
        references=WORKLOAD.references(COST_MODEL),
    )


def random_actions(rng, vec_env):
    return rng.integers(0, vec_env.contract.action_nvec, (vec_env.num_envs, 2))


def rollout(vec_env, steps=60, seed=0):
    """Everything a learner sees under random actions, wall time left out."""
    rng = np.random.default_rng(seed)
    seen = [(vec_env.reset(), [dict(info) for info in vec_env.reset_infos])]
    for _ in range(steps):
        seen.append(vec_env.step(random_actions(rng, vec_env)))
        for info in seen[-1][-1]:
            info.get("episode", {}).pop("t", None)
    return seen


def assert_same_rollouts(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for values, same in zip(one[:-1], other[:-1], strict=True):
            np.testing.assert_array_equal(values, same)
        for info, same in zip(one[-1], other[-1], strict=True):
            np.testing.assert_equal(info, same)


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        (None, {}),
        (None, {"prompts_are_cached": False, "max_num_batched_tokens": 60, "max_num_seqs": 8}),
        (None, {"dormant_after": 3, "max_pending_tokens": 8}),
        ({"ngram": 5}, {"has_prefill": False}),
        (
            {"ngram": 8, "eagle3": 4, "ngram_else_eagle3": 6, "longest_expected": 5},
            {"combination_min_match": 4, "dormant_after": 3, "max_pending_tokens": 8},
        ),
    ],
    ids=["roomy", "crowded", "dormant", "ngram", "combined"],
)
def test_each_engine_is_a_single_environment(make_vec_env, lengths, settings):
    vec_env = make_vec_env(lengths=lengths, **settings)
    envs = [make_env(lengths, **settings) for _ in range(vec_env.num_envs)]
    rng = np.random.default_rng(1)
    observations = vec_env.reset()
    for env, observation, info in zip(envs, observations, vec_env.reset_infos, strict=True):
        same, same_info = env.reset(options={"episode_seed": info["episode_seed"]})
        np.testing.assert_array_equal(observation, same)
        assert info == same_info
    ends = []
    for _ in range(150):
        actions = random_actions(rng, vec_env)
        observations, rewards, dones, infos = vec_env.step(actions)
        for e, env in enumerate(envs):
            same, reward, terminated, truncated, same_info = env.step(actions[e])
            info = dict(infos[e])
            assert rewards[e] == pytest.approx(reward, rel=1e-5, abs=1e-6)
            assert dones[e] == (terminated or truncated)
            if dones[e]:
                np.testing.assert_array_equal(info.pop("terminal_observation"), same)
                assert info.pop("TimeLimit.truncated") == truncated
                info.pop("episode")
                ends.append(truncated)
                begun = vec_env.reset_infos[e]
                same, again = env.reset(options={"episode_seed": begun["episode_seed"]})
                assert begun == again
            np.testing.assert_array_equal(observations[e], same)
            assert info.keys() == same_info.keys()
            for name, value in same_info.items():
                if isinstance(value, float):
                    assert info[name] == pytest.approx(value, rel=1e-6), name
                else:
                    assert info[name] == value, name
    assert 0 < np.mean(ends) < 1, "some episodes ended by their work, some by their length"


@pytest.mark.parametrize("num_threads", [1, 3, 16, None])
def test_threads_change_nothing(make_vec_env, num_threads):
    ours = make_vec_env(num_envs=5, num_threads=num_threads)
    assert_same_rollouts(rollout(ours), rollout(make_vec_env(num_envs=5, num_threads=2)))


def test_a_seed_gives_the_same_and_engines_of_their_own(make_vec_env):
    first, again, other = (rollout(make_vec_env(seed=seed)) for seed in (5, 5, 6))
    assert_same_rollouts(first, again)
    with pytest.raises(AssertionError):
        assert_same_rollouts(first, other)
    seeds = [info["episode_seed"] for _, infos in (first[0], other[0]) for info in infos]
    # Engine e of seed s is seeded s + e, as every VecEnv does it.
    assert len(set(seeds)) == 5
    assert seeds[1:4] == seeds[4:7]
    assert len({observation.tobytes() for observation in first[-1][0]}) == 4


def test_seeding_takes_effect_at_the_next_reset_and_only_there(make_vec_env):
    vec_env, fresh = make_vec_env(), make_vec_env(seed=9)
    vec_env.reset()
    vec_env.seed(9)
    vec_env.reset()
    fresh.reset()
    assert vec_env.reset_infos == fresh.reset_infos
    vec_env.reset()
    assert vec_env.reset_infos != fresh.reset_infos


@pytest.mark.parametrize("settings", [{}, {"dormant_after": 3, "max_pending_tokens": 8}])
def test_a_resumed_environment_goes_on_as_one_that_never_stopped(make_vec_env, settings):
    vec_env = make_vec_env(**settings)
    rng = np.random.default_rng(3)
    vec_env.reset()
    for _ in range(40):
        actions = random_actions(rng, vec_env)
        actions[:2] = 0  # their drafter falls asleep
        vec_env.step(actions)
    saved = json.loads(json.dumps(vec_env.state_dict()))
    unbroken = rollout(vec_env)
    resumed = make_vec_env(seed=77, **settings)
    resumed.load_state_dict(saved)
    resumed._reset_seeds()  # as `restore` does: the saved generators, not the seed, decide
    assert_same_rollouts(rollout(resumed), unbroken)


def test_it_keeps_stable_baselines3s_contract(make_vec_env):
    vec_env = make_vec_env()
    assert isinstance(vec_env, VecEnv)
    contract = vec_env.contract
    assert vec_env.observation_space == gymnasium.spaces.Box(contract.low, contract.high)
    assert vec_env.action_space == gymnasium.spaces.MultiDiscrete(contract.action_nvec)
    rng = np.random.default_rng(4)
    observations = vec_env.reset()
    assert (observations.shape, observations.dtype) == ((4, len(contract.fields)), np.float32)
    returns, lengths, num_episodes = np.zeros(4), np.zeros(4, int), 0
    for _ in range(120):
        before = observations.copy()
        kept = observations
        observations, rewards, dones, infos = vec_env.step(random_actions(rng, vec_env))
        np.testing.assert_array_equal(kept, before, err_msg="a learner's observations were changed")
        assert (rewards.shape, rewards.dtype, dones.dtype) == ((4,), np.float32, np.bool_)
        returns, lengths = returns + rewards, lengths + 1
        for e, info in enumerate(infos):
            assert vec_env.observation_space.contains(observations[e])
            assert info["reward"] == rewards[e]
            assert dones[e] == ("terminal_observation" in info) == ("episode" in info)
            if dones[e]:
                assert (
                    info["TimeLimit.truncated"] == (lengths[e] == EPISODE.max_episode_steps)
                    or not info["TimeLimit.truncated"]
                )
                assert vec_env.observation_space.contains(info["terminal_observation"])
                assert info["episode"]["r"] == pytest.approx(returns[e], abs=1e-4)
                assert info["episode"]["l"] == lengths[e] <= EPISODE.max_episode_steps
                assert info["episode"]["t"] >= 0
                assert isinstance(info["TimeLimit.truncated"], bool)
                returns[e] = lengths[e] = 0
                num_episodes += 1
    assert num_episodes > 20
    assert vec_env.get_attr("contract", [0, 2]) == [contract, contract]
    assert vec_env.env_is_wrapped(gymnasium.Wrapper) == [False] * 4
    assert vec_env.env_method("state_dict", indices=1) == [vec_env.state_dict()]
    vec_env.set_attr("render_mode", None)


def test_engine_steps_are_counted(make_vec_env):
    vec_env = make_vec_env(prompts_are_cached=False, max_num_batched_tokens=30)
    vec_env.reset()
    rng, counts = np.random.default_rng(0), []
    for _ in range(120):
        vec_env.step(random_actions(rng, vec_env))
        counts.append(vec_env.num_engine_steps)
    assert min(counts) == 4
    assert max(counts) > 4, "long prompts are read in steps of their own"


def refused(error, act, *arguments, **keywords):
    """The sentence that refuses; it ends with what to do."""
    with pytest.raises(error) as refusal:
        act(*arguments, **keywords)
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


def test_what_it_cannot_do_is_refused(make_vec_env):
    said = refused(ConfigError, make_vec_env, max_num_seqs=7)
    assert "A load of 8 requests exceeds max_num_seqs 7" in said
    assert "num_envs is 0" in refused(ConfigError, make_vec_env, num_envs=0)
    assert "up to 4 tokens, not 5" in refused(TraceError, make_vec_env, lengths={"eagle3": 5})
    said = refused(
        ConfigError,
        DraftVecEnv,
        WORKLOAD,
        make_cost_model(),
        TRACES.contract(granularity="request"),
        TraceEngineConfig(),
        EPISODE,
        2,
    )
    assert "granularity" in said


def test_a_workload_that_was_not_recorded_is_refused():
    said = refused(ConfigError, TraceWorkload, TRACES, (1,), 40, {"code": 1.0, "poetry": 1.0})
    assert "'poetry'; choose from chat, code" in said
    for kinds in ({}, {"code": 0.0}, {"code": 2.0, "chat": -1.0}):
        assert "weight" in refused(ConfigError, TraceWorkload, TRACES, (1,), 40, kinds)
    assert "hold 48 output tokens" in refused(ConfigError, TraceWorkload, TRACES, (1,), 49)


@pytest.mark.parametrize("action", [(3, 1), (-1, 1), (0, 9), (1, -1)])
def test_an_action_outside_the_table_never_reaches_compiled_code(make_vec_env, action):
    vec_env = make_vec_env()
    vec_env.reset()
    actions = np.zeros((4, 2), int)
    actions[2] = action
    refused(gymnasium.error.InvalidAction, vec_env.step, actions)
    vec_env.step(np.zeros((4, 2), int))
