"""Advantages that a recording knows, where PPO would estimate them from what happened by chance.

What a draft gains is small beside what luck gives and takes: told only of the actions it took, PPO
adds nothing to the rule it imitated. A recording tells what every action would have brought each
request beside the others' decisions, so that the advantage of the one taken is known exactly, but
for what it leaves the request to do later. That is accounted for by the price of time: a request
in a stretch where drafts are good loses more by a slow step than one where they are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from envs.request_vec_env import RequestVecEnv
from envs.row_worth import Worth

from ..errors import ConfigError


@dataclass(frozen=True)
class CounterfactualConfig:
    """What a request's time is worth.

    Its price is that of its next decisions, tokens over plain steps, drawn towards its load's.

    Attributes:
        decay: Weight of each later decision beside the one before it, in [0, 1].
        prior_steps: Plain steps at the price of its load that count beside them.
    """

    decay: float = 0.9
    prior_steps: float = 8.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"counterfactual.decay is {self.decay}; make it 0 to 1.")
        if not 0 < self.prior_steps < math.inf:
            raise ConfigError(
                f"counterfactual.prior_steps is {self.prior_steps}; make it more than 0."
            )


def advantages(
    worths: list[Worth],
    dones: np.ndarray,
    actions: np.ndarray,
    probabilities: np.ndarray,
    config: CounterfactualConfig,
) -> np.ndarray:
    """What each action taken earned beyond what the policy earns on average there.

    Args:
        worths: Of every step.
        dones: Whether a request ended in the step, bool `[steps, requests]`.
        actions: Number of the action taken, int64 `[steps, requests]`.
        probabilities: Of every action, `[steps, requests, actions]`.
        config: What time is worth.

    Returns:
        In tokens, float64 `[steps, requests]`.
    """
    result = np.zeros(dones.shape)
    tokens, plain_steps = np.zeros((2, dones.shape[1]))
    for step in reversed(range(len(worths))):
        worth, taken = worths[step], actions[step][:, None]
        decay = config.decay * ~dones[step]
        tokens = np.take_along_axis(worth.tokens, taken, 1)[:, 0] + decay * tokens
        plain_steps = np.take_along_axis(worth.plain_steps, taken, 1)[:, 0] + decay * plain_steps
        price = (tokens + config.prior_steps * worth.price) / (plain_steps + config.prior_steps)
        earned = worth.tokens - price[:, None] * worth.plain_steps
        average = (probabilities[step] * earned).sum(axis=1)
        result[step] = np.take_along_axis(earned, taken, 1)[:, 0] - average
    return result


class CounterfactualAdvantages(BaseCallback):
    """Gives PPO these advantages at the end of each rollout.

    Args:
        vec_env: Knows what every action would have been worth.
        config: What time is worth.
    """

    def __init__(self, vec_env: RequestVecEnv, config: CounterfactualConfig) -> None:
        super().__init__()
        self._vec_env = vec_env
        self._config = config

    def _on_rollout_start(self) -> None:
        self._worths: list[Worth] = []
        self._dones: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self._worths.append(self._vec_env.worth())
        self._dones.append(self.locals["dones"].copy())
        return True

    def _on_rollout_end(self) -> None:
        model = cast(PPO, self.model)
        buffer = model.rollout_buffer
        with torch.no_grad():
            observed = torch.from_numpy(buffer.observations.reshape(-1, *buffer.obs_shape))
            choice = model.policy.get_distribution(observed).distribution
        probabilities = cast(torch.distributions.Categorical, choice).probs.numpy()
        buffer.advantages[:] = advantages(
            self._worths,
            np.array(self._dones),
            buffer.actions[..., 0].astype(np.int64),
            probabilities.reshape(*buffer.advantages.shape, -1),
            self._config,
        )
