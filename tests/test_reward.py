"""The reward ranks as total time does, and PPO on it learns what costs least in the long run."""

import doctest
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import envs.reward
from envs.reward import LoadReference, RewardConfig, step_reward
from policy.errors import ConfigError
from policy.training.config import PpoConfig
from policy.training.ppo import build_ppo

from .table_engine import one_thread as one_thread

ONE_TOKEN_A_SECOND = LoadReference(tok_per_s=1.0, step_time_s=1.0)

WAKE_UP = {
    ("asleep", 0): ((1, 1.0), "asleep"),
    ("asleep", 1): ((1, 2.5), "awake"),  # the model drafter must first read the context
    ("awake", 0): ((1, 1.0), "asleep"),
    ("awake", 1): ((3, 1.5), "awake"),
}
"""(state, action) -> (tokens, seconds), next state. Action 0 is no speculation, 1 is to draft."""

COPY_SPAN = {
    ("copying", 0): ((2, 1.0), "half copied"),
    ("copying", 1): ((4, 1.8), "after a spent span"),
    ("half copied", 0): ((1, 1.0), "copied"),
    ("half copied", 1): ((5, 1.0), "copied"),
    ("copied", 0): ((1, 1.0), "copying"),
    ("copied", 1): ((1, 1.4), "copying"),
    ("after a spent span", 0): ((1, 1.0), "copied"),
    ("after a spent span", 1): ((1, 1.4), "copied"),
}
"""A long draft at once gets more tokens a second now; it spends the span that pays more later."""

DEARER_DRAFTER = {("any", 0): ((3, 1.8), "any"), ("any", 1): ((3, 1.4), "any")}
"""Two drafters with the same acceptance, the first of which takes longer."""


class TableEnv(gymnasium.Env):
    """A fixed amount of work on an engine that is a table."""

    contract = SimpleNamespace(action_table=np.array([[0, 0], [1, 0]]))

    def __init__(self, table, work_tokens=24):
        self.table, self.work_tokens = table, work_tokens
        self.states = list(dict.fromkeys(state for state, _ in table))
        self.observation_space = gymnasium.spaces.Box(0, 1, (len(self.states),), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([2, 1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.work_left, self.total_s = self.states[0], self.work_tokens, 0.0
        return self.observation(), {}

    def step(self, action):
        (tokens, seconds), self.state = self.table[self.state, int(action[0])]
        tokens = min(tokens, self.work_left)
        self.work_left -= tokens
        self.total_s += seconds
        reward = step_reward(tokens, seconds, ONE_TOKEN_A_SECOND).reward
        return self.observation(), reward, self.work_left == 0, False, {}

    def observation(self):
        return np.array([state == self.state for state in self.states], np.float32)


def total_s(table, choose):
    """Seconds of a whole episode, added up without the reward."""
    env = TableEnv(table)
    observation, _ = env.reset()
    done = False
    while not done:
        observation, _, done, _, _ = env.step(choose(env.state, observation))
    return env.total_s


def greedy(table, by):
    """The policy that takes what looks best in the step at hand."""
    return lambda state, observation: (
        max((0, 1), key=lambda action: by(*table[state, action][0])),
        0,
    )


def best_total_s(table):
    """The least time there is: dynamic programming over state and work left."""
    env, best = TableEnv(table), {}
    for work_left in range(1, env.work_tokens + 1):
        for state in env.states:
            best[state, work_left] = min(
                seconds + best.get((after, work_left - tokens), 0.0)
                for (tokens, seconds), after in (table[state, action] for action in (0, 1))
            )
    return best[env.states[0], env.work_tokens]


def learnt(table, seed=0, **settings):
    """The deterministic policy of a trained PPO."""
    config = PpoConfig(
        **{
            **{"total_timesteps": 4096, "n_steps": 256, "batch_size": 64, "n_epochs": 6},
            **{"gamma": 0.99, "gae_lambda": 0.95, "learning_rate": 5e-3, "hidden_layers": (16,)},
            **settings,
        }
    )
    model = build_ppo(DummyVecEnv([lambda: Monitor(TableEnv(table))]), config, seed)
    model.learn(config.total_timesteps)
    table = TableEnv.contract.action_table
    return lambda state, observation: table[model.predict(observation, deterministic=True)[0]]


def step_reward_of(tokens, seconds):
    return step_reward(tokens, seconds, ONE_TOKEN_A_SECOND).reward


def tokens_per_second(tokens, seconds):
    return tokens / seconds


@pytest.mark.parametrize("table", [WAKE_UP, COPY_SPAN], ids=["wake-up", "copy span"])
@pytest.mark.parametrize("by", [step_reward_of, tokens_per_second])
def test_the_choice_that_is_best_in_each_step_is_not_best_in_total(table, by):
    assert total_s(table, greedy(table, by)) > 1.1 * best_total_s(table)


@pytest.mark.parametrize("table", [WAKE_UP, COPY_SPAN], ids=["wake-up", "copy span"])
def test_ppo_learns_the_choice_that_takes_least_time_in_total(table):
    assert total_s(table, learnt(table)) == pytest.approx(best_total_s(table))


def test_ppo_learns_the_cheaper_of_two_drafters_with_equal_acceptance():
    assert DEARER_DRAFTER["any", 0][0][0] == DEARER_DRAFTER["any", 1][0][0]
    best = learnt(DEARER_DRAFTER, total_timesteps=2048)
    assert total_s(DEARER_DRAFTER, best) == pytest.approx(best_total_s(DEARER_DRAFTER))


def test_ppo_without_a_future_stays_with_the_greedy_choice():
    """The toy is one where looking ahead decides: the same learner fails with a discount of 0."""
    blind = total_s(WAKE_UP, learnt(WAKE_UP, gamma=0.0, total_timesteps=2048))
    assert blind == pytest.approx(total_s(WAKE_UP, greedy(WAKE_UP, step_reward_of)))


def random_trajectory(rng, work):
    """(tokens, seconds) of steps that emit `work` tokens."""
    steps = []
    while work:
        tokens = int(rng.integers(0, min(work, 9) + 1))
        steps.append((tokens, float(rng.uniform(0.001, 0.5))))
        work -= tokens
    return steps


def test_returns_rank_trajectories_of_equal_work_exactly_as_their_total_time():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        work = int(rng.integers(1, 60))
        reference = LoadReference(*(10 ** rng.uniform(-3, 4, 2)))
        one, other = random_trajectory(rng, work), random_trajectory(rng, work)
        returns = [
            sum(step_reward(tokens, seconds, reference).reward for tokens, seconds in steps)
            for steps in (one, other)
        ]
        times_s = [sum(seconds for _, seconds in steps) for steps in (one, other)]
        saved = (times_s[1] - times_s[0]) / reference.step_time_s
        assert returns[0] - returns[1] == pytest.approx(saved, rel=1e-6, abs=1e-9 * abs(returns[0]))


def test_no_speculation_earns_nothing_and_a_saved_step_earns_one():
    reference = LoadReference(tok_per_s=160.0, step_time_s=0.05)
    assert step_reward(8, 0.05, reference).reward == pytest.approx(0)
    assert step_reward(16, 0.05, reference).reward == pytest.approx(1)
    terms = step_reward(12, 0.08, reference)
    assert (terms.tokens, terms.time) == pytest.approx((1.5, 1.6))
    assert terms.reward == terms.tokens - terms.time


def test_an_unknown_source_of_time_is_refused():
    with pytest.raises(ConfigError, match=r"^time_source is 'guess'; make it 'expected' or"):
        RewardConfig(time_source="guess")


def test_the_example_in_the_docstring_holds():
    results = doctest.testmod(envs.reward)
    assert results.attempted > 0
    assert results.failed == 0
