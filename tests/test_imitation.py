"""The network learns a rule's decisions; PPO then begins with the value network alone."""

import re

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

from envs.replayed import Replayed
from envs.simulator_state import TraceEngineConfig
from envs.trace_workload import TraceWorkload
from policy.errors import ConfigError
from policy.training import imitation
from policy.training.config import PpoConfig
from policy.training.imitation import CriticFirst, ImitationConfig, actor_parameters, imitate
from policy.training.ppo import build_ppo, to_module

from .synthetic_traces import make_cost_model, make_traces
from .table_engine import one_thread as one_thread

TRACES = make_traces(num_requests=16, output_tokens=48)
REPLAYED = Replayed(
    TraceWorkload(TRACES, (1, 4), 40), make_cost_model(), TRACES.contract(), TraceEngineConfig()
)
CONTRACT = TRACES.contract(granularity="request")
PPO = PpoConfig(total_timesteps=1, n_steps=8, batch_size=64, n_epochs=1, hidden_layers=(32,))
RULE = {"name": "match_else_model", "min_match_length": 3, "token_length": 5, "model_length": 2}


@pytest.fixture
def vec_env():
    made = REPLAYED.request_vec_env(8, num_threads=1)
    yield made
    made.close()


def test_the_actor_decides_as_the_rule_where_it_has_not_been(vec_env):
    model = build_ppo(vec_env, PPO, seed=0)
    config = ImitationConfig(RULE, 4000, epochs=40, batch_size=256, learning_rate=0.01)
    share = imitate(model, REPLAYED, CONTRACT, config)
    module, names = to_module(model, CONTRACT), CONTRACT.field_names
    observations = vec_env.reset()
    agreed = []
    for _ in range(60):
        rows = observations[(observations != CONTRACT.low).any(axis=1)]
        with torch.inference_mode():
            actions = module(torch.from_numpy(rows)).numpy()
        matched = rows[:, names.index("request_ngram_match_length")] >= 3
        ours = np.where(matched[:, None], (1, 5), (2, 2))
        agreed.append((actions == ours).all(axis=1).mean())
        observations, *_ = vec_env.step(np.resize([[1, 3], [2, 1], [0, 0]], (vec_env.num_envs, 2)))
    assert np.mean(agreed) > 0.95
    assert share == pytest.approx(np.mean(agreed), abs=0.05)


def test_copied_decisions_are_those_the_rule_would_make(monkeypatch):
    """A rule that goes by the observation: every copied pair can be checked from its row."""

    class ByMatch:
        def decide(self, record, observation):
            matched = observation[:, CONTRACT.field_names.index("request_ngram_match_length")]
            return np.where(matched[:, None] >= 3, (1, 7), (0, 0))

    monkeypatch.setattr(imitation, "build_baseline", lambda contract, section: ByMatch())
    config = ImitationConfig({"name": "any"}, rows_per_load=300)
    observations, actions = imitation._decisions(REPLAYED, CONTRACT, config)
    assert observations.shape == (len(actions), len(CONTRACT.fields))
    pairs = CONTRACT.action_table[actions.numpy()]
    np.testing.assert_array_equal(pairs, ByMatch().decide(None, observations.numpy()))
    assert 0.05 < (pairs[:, 0] == 1).mean() < 0.95
    loads, counts = np.unique(np.round(2 ** observations[:, 0].numpy()) - 1, return_counts=True)
    assert loads.max() == 4
    assert counts[loads == 1] >= 300


class Rollouts(BaseCallback):
    """Keeps the actor's and the value network's parameters at the beginning of each rollout."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        policy = self.model.policy
        actor = torch.cat([value.detach().flatten() for value in actor_parameters(self.model)])
        critic = torch.cat(
            [value.detach().flatten().clone() for value in policy.value_net.parameters()]
        )
        self.kept.append((actor.clone(), critic))


@pytest.mark.parametrize("num_rollouts", [0, 2])
def test_the_value_network_learns_first(vec_env, num_rollouts):
    model, keeper = build_ppo(vec_env, PPO, seed=0), Rollouts()
    steps = 5 * PPO.n_steps * vec_env.num_envs
    model.learn(steps, CallbackList([CriticFirst(num_rollouts), keeper]))
    actors, critics = zip(*keeper.kept, strict=True)
    assert len(actors) == 5
    for rollout in range(4):
        is_frozen = rollout < num_rollouts
        assert torch.equal(actors[rollout], actors[rollout + 1]) == is_frozen
        assert not torch.equal(critics[rollout], critics[rollout + 1])
    assert all(parameter.requires_grad for parameter in actor_parameters(model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows_per_load": 0}, "rows_per_load is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"critic_rollouts": -1}, "critic_rollouts is -1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(changes, said):
    with pytest.raises(ConfigError) as refusal:
        ImitationConfig(RULE, **changes)
    assert said in str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", str(refusal.value))


def test_an_unknown_rule_is_refused(vec_env):
    model = build_ppo(vec_env, PPO, seed=0)
    with pytest.raises(ConfigError, match="Unknown baseline 'godput'"):
        imitate(model, REPLAYED, CONTRACT, ImitationConfig({"name": "godput"}))
