"""PPO on a `DraftEnv`: stable-baselines3's, with the contract's own normalisation inside."""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from torch import nn

from envs.draft_env import DraftEnv
from envs.draft_vec_env import DraftVecEnv
from envs.request_vec_env import RequestVecEnv

from ..contract import Contract
from ..module import PolicyModule, normalise
from .config import PpoConfig


class ContractNormaliser(BaseFeaturesExtractor):
    """Maps observations from their field bounds to [-1, 1]; nothing is learnt or averaged.

    The bounds come from the observation space, so there are no statistics that could be lost
    between training and serving.
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, observation_space: gymnasium.spaces.Box) -> None:
        super().__init__(observation_space, features_dim=observation_space.shape[0])
        self.register_buffer("low", torch.from_numpy(observation_space.low))
        self.register_buffer("high", torch.from_numpy(observation_space.high))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Clip and scale, float32 `[rows, fields]`."""
        return normalise(observation, self.low, self.high)


class ActionTable(VecEnvWrapper):
    """Lets PPO choose among the contract's canonical actions, by their number.

    A pair of independent choices could not prefer long n-gram drafts and short ones of a model at
    once, and would spend its exploration on pairs that mean the same.

    Args:
        venv: Environments whose actions are `(drafter, num_speculative_tokens)`.
    """

    def __init__(self, venv: VecEnv) -> None:
        self.table = unwrapped(venv).contract.action_table
        super().__init__(venv, action_space=gymnasium.spaces.Discrete(len(self.table)))

    def step_async(self, actions: np.ndarray) -> None:
        """Take the numbers of the actions, int `[num_envs]`."""
        self.venv.step_async(self.table[actions])

    def step_wait(self) -> VecEnvStepReturn:
        """What the environments return."""
        return self.venv.step_wait()

    def reset(self) -> VecEnvObs:
        """The environments' first observations."""
        return self.venv.reset()


Environment = DraftEnv | DraftVecEnv | RequestVecEnv
"""What PPO steps: one live engine, many replayed ones, or all their requests."""


def make_vec_env(env: DraftEnv) -> DummyVecEnv:
    """One environment as stable-baselines3 wants it, with episode returns recorded."""
    return DummyVecEnv([lambda: Monitor(env)])


def unwrapped(vec_env: VecEnv) -> Environment:
    """Our environment inside what PPO steps."""
    if isinstance(vec_env, VecEnvWrapper):
        return unwrapped(vec_env.venv)
    if isinstance(vec_env, DraftVecEnv | RequestVecEnv):
        return vec_env
    return cast(DraftEnv, cast(DummyVecEnv, vec_env).envs[0].unwrapped)


def build_ppo(vec_env: VecEnv, config: PpoConfig, seed: int) -> PPO:
    """A new, untrained PPO.

    Args:
        vec_env: Environments with the contract's spaces; PPO sees them as an `ActionTable`.
        config: PPO's settings.
        seed: Seeds the networks, the action sampling and the environments.
    """
    choices = ActionTable(vec_env)
    model = PPO(
        "MlpPolicy",
        choices,
        learning_rate=_learning_rate(config),
        n_steps=config.n_steps,
        batch_size=config.batch_size,
        n_epochs=config.n_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_range,
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef,
        max_grad_norm=config.max_grad_norm,
        policy_kwargs=policy_kwargs(config),
        seed=seed,
        device="cpu",
    )
    lengths = torch.from_numpy(choices.table[:, 1])
    cast(nn.Linear, model.policy.action_net).bias.data -= config.length_prior * lengths
    return model


def _learning_rate(config: PpoConfig) -> float | LinearSchedule:
    if config.final_learning_rate is None:
        return config.learning_rate
    return LinearSchedule(config.learning_rate, config.final_learning_rate, end_fraction=1.0)


def policy_kwargs(config: PpoConfig) -> dict[str, Any]:
    """Arguments of the actor-critic: the normaliser and separate tanh networks."""
    layers = list(config.hidden_layers)
    return {
        "features_extractor_class": ContractNormaliser,
        "net_arch": {"pi": layers, "vf": layers},
        "activation_fn": nn.Tanh,
    }


def to_module(model: PPO, contract: Contract) -> PolicyModule:
    """The actor of a trained PPO as the module that is exported.

    Args:
        model: PPO built by `build_ppo`.
        contract: The contract it was trained on.
    """
    actor = model.policy.mlp_extractor.policy_net
    linears = [layer for layer in actor if isinstance(layer, nn.Linear)]
    module = PolicyModule(
        torch.from_numpy(contract.low),
        torch.from_numpy(contract.high),
        [layer.out_features for layer in linears],
        torch.from_numpy(contract.action_table),
    )
    module.hidden.load_state_dict(actor.state_dict())
    module.action.load_state_dict(model.policy.action_net.state_dict())
    return module.eval()
