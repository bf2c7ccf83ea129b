"""What is exported decides as the trained actor does, near-ties included."""

import json

import numpy as np
import pytest
import torch

from policy.artifact import load_policy
from policy.errors import ArtifactError
from policy.training import export
from policy.training.config import PpoConfig
from policy.training.export import export_policy
from policy.training.ppo import build_ppo, make_vec_env, to_module

from .table_engine import CONTRACT, make_env
from .table_engine import one_thread as one_thread

TABLE = CONTRACT.action_table


@pytest.fixture(scope="module")
def vec_env():
    return make_vec_env(make_env())


def make_learner(vec_env, seed, **settings):
    settings = {"hidden_layers": (16, 16), "n_steps": 64, "batch_size": 32, **settings}
    model = build_ppo(vec_env, PpoConfig(total_timesteps=128, length_prior=0.0, **settings), seed)
    with torch.no_grad():
        model.policy.action_net.weight.mul_(50)  # decisions that vary
    return model


def observations_of(count, seed=0):
    share = np.random.default_rng(seed).random((count, len(CONTRACT.fields)))
    span = CONTRACT.high.astype(np.float64) - CONTRACT.low
    return (CONTRACT.low + share * span).astype(np.float32)


def decide(module, observations):
    with torch.inference_mode():
        return module(torch.from_numpy(observations)).numpy()


def gap_of_the_two_likeliest(model, observations):
    """The gap between the two largest log-probabilities."""
    observation, _ = model.policy.obs_to_tensor(observations)
    with torch.inference_mode():
        logits = model.policy.get_distribution(observation).distribution.logits
    first, second = logits.topk(2, dim=1).values.T
    return (first - second).numpy()


def test_a_trained_actor_is_exported_with_its_decisions_and_its_history(vec_env, tmp_path):
    model = make_learner(vec_env, seed=0)
    model.learn(128)
    observations = observations_of(1000)
    path = tmp_path / "policy.pt"
    provenance = {"command": "train", "num_timesteps": 128}
    sha256 = export_policy(model, CONTRACT, path, observations=observations, provenance=provenance)
    assert json.loads(path.with_suffix(".json").read_text())["provenance"] == provenance
    loaded = load_policy(path)
    assert (loaded.sha256, loaded.contract) == (sha256, CONTRACT)
    clear = gap_of_the_two_likeliest(model, observations) > 1e-5
    assert clear.mean() > 0.99
    ours = decide(loaded.module, observations)
    theirs, _ = model.predict(observations, deterministic=True)
    assert len(np.unique(theirs)) > 1, "the decisions do not vary"
    np.testing.assert_array_equal(ours[clear], TABLE[theirs][clear])


def test_observations_out_of_their_bounds_are_clipped_alike(vec_env):
    model = make_learner(vec_env, seed=1)
    observations = observations_of(1000)
    columns = np.arange(1000) % len(CONTRACT.fields)
    observations[np.arange(1000), columns] += 1000
    clear = gap_of_the_two_likeliest(model, observations) > 1e-5
    theirs, _ = model.predict(observations, deterministic=True)
    ours = decide(to_module(model, CONTRACT), observations)
    np.testing.assert_array_equal(ours[clear], TABLE[theirs][clear])


def test_a_near_tie_does_not_stop_the_export(vec_env, tmp_path):
    """stable-baselines3 decides by probabilities, in which a last bit of the logits is lost."""
    model, path = make_learner(vec_env, seed=0), tmp_path / "policy.pt"
    with torch.no_grad():
        model.policy.action_net.weight.zero_()
        model.policy.action_net.bias.fill_(0.1)
        model.policy.action_net.bias[2] = float(np.nextafter(np.float32(0.1), np.float32(1)))
    observations = observations_of(20)
    theirs, _ = model.predict(observations, deterministic=True)
    assert (theirs == 0).all()
    export_policy(model, CONTRACT, path, observations=observations, provenance={})
    assert (decide(load_policy(path).module, observations) == TABLE[2]).all()


def test_an_actor_that_was_changed_after_the_copy_is_not_exported(vec_env, tmp_path, monkeypatch):
    model = make_learner(vec_env, seed=2)

    def copied_before_a_change(model, contract):
        module = to_module(model, contract)
        with torch.no_grad():
            model.policy.action_net.weight.mul_(-1)
        return module

    monkeypatch.setattr(export, "to_module", copied_before_a_change)
    with pytest.raises(ArtifactError, match="differ on"):
        export_policy(
            model,
            CONTRACT,
            tmp_path / "policy.pt",
            observations=observations_of(50),
            provenance={},
        )
    assert list(tmp_path.iterdir()) == []
