"""A start for PPO: the network first learns to decide as a rule does.

A request's draft shares the model drafter's passes with the drafts of others, so that from a random
start nobody drafts with it because nobody else does. A rule that prices the whole step begins on
the right side of such a threshold; PPO goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn
from tqdm import tqdm

from envs.replayed import Replayed
from envs.trace_engine import TraceEngine
from envs.workload import ClosedLoop, Episode, endless_slots

from ..baselines.build import build_baseline
from ..contract import Contract
from ..errors import ConfigError

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 64
"""Decisions at each load before any is copied: the rule must first see what drafts are worth."""


@dataclass(frozen=True)
class ImitationConfig:
    """Whom to imitate, and for how long.

    Attributes:
        rule: A `baseline` section as the plugin takes it, such as `{name: goodput, …}`.
        rows_per_load: Decisions copied at each load.
        epochs: Passes over them.
        batch_size: Decisions of an update.
        learning_rate: Adam's, at the beginning; it falls to 0.
        critic_rollouts: PPO's first rollouts, in which only the value network learns: until it
            knows what the rule's decisions are worth, PPO would unlearn them.
    """

    rule: Mapping[str, Any] = field(default_factory=dict)
    rows_per_load: int = 30_000
    epochs: int = 8
    batch_size: int = 2048
    learning_rate: float = 2e-3
    critic_rollouts: int = 8

    def __post_init__(self) -> None:
        for name in ("rows_per_load", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"imitate.{name} is {getattr(self, name)}; make it 1 or more.")
        if self.critic_rollouts < 0:
            raise ConfigError(
                f"imitate.critic_rollouts is {self.critic_rollouts}; make it 0 or more."
            )
        if not self.learning_rate > 0:
            raise ConfigError(
                f"imitate.learning_rate is {self.learning_rate}; make it more than 0."
            )


def imitate(model: PPO, replayed: Replayed, contract: Contract, config: ImitationConfig) -> float:
    """Teach PPO's actor a rule's decisions on training requests.

    Args:
        model: PPO built by `build_ppo`.
        replayed: Requests, prices and loads to decide on.
        contract: The policy's.
        config: Whom to imitate.

    Returns:
        Share of the rule's decisions that the actor then takes, in [0, 1].

    Raises:
        ConfigError: If the rule does not exist or does not fit the contract.
    """
    observations, actions = _decisions(replayed, contract, config)
    actor = model.policy
    parameters = actor_parameters(model)
    optimizer = torch.optim.Adam(parameters, config.learning_rate)
    num_updates = config.epochs * -(-len(actions) // config.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_updates)
    agreed = torch.tensor(0)
    for _ in tqdm(range(config.epochs), desc="imitating", unit="epoch"):
        agreed.zero_()
        for batch in torch.randperm(len(actions)).split(config.batch_size):
            features = actor.pi_features_extractor(observations[batch])
            logits = actor.action_net(actor.mlp_extractor.forward_actor(features))
            loss = nn.functional.cross_entropy(logits, actions[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            agreed += (logits.argmax(dim=1) == actions[batch]).sum()
    share = float(agreed) / len(actions)
    logger.info("The actor takes %.0f %% of the rule's decisions.", 100 * share)
    return share


def actor_parameters(model: PPO) -> list[nn.Parameter]:
    """What decides, without what values."""
    policy = model.policy
    return [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]


class CriticFirst(BaseCallback):
    """Lets only the value network learn in the first rollouts.

    Args:
        num_rollouts: How many.
    """

    def __init__(self, num_rollouts: int) -> None:
        super().__init__()
        self._rollouts_left = num_rollouts

    def _on_training_start(self) -> None:
        self._let_actor_learn(self._rollouts_left == 0)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self._rollouts_left == 0:
            self._let_actor_learn(True)
        self._rollouts_left -= 1

    def _on_training_end(self) -> None:
        self._let_actor_learn(True)

    def _let_actor_learn(self, learns: bool) -> None:
        for parameter in actor_parameters(cast(PPO, self.model)):
            parameter.requires_grad_(learns)


def _decisions(
    replayed: Replayed, contract: Contract, config: ImitationConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rule sees and does at every load: observations, and actions by number."""
    loads = sorted(set(replayed.workload.mix.concurrency.tolist()))
    numbers = {tuple(pair): number for number, pair in enumerate(contract.action_table.tolist())}
    engine = TraceEngine(replayed.workload.traces, replayed.cost_model, contract, replayed.engine)
    observations, actions = [], []
    with tqdm(total=config.rows_per_load * len(loads), desc="watching the rule", unit="row") as bar:
        for load in loads:
            num_rows = 0
            for rows, choices in _watch(engine, replayed, contract, config, load):
                observations.append(rows)
                actions += [numbers[tuple(choice)] for choice in choices]
                num_rows += len(rows)
                bar.update(len(rows))
                if num_rows >= config.rows_per_load:
                    break
    return torch.from_numpy(np.concatenate(observations)), torch.tensor(actions)


def _watch(
    engine: TraceEngine, replayed: Replayed, contract: Contract, config: ImitationConfig, load: int
) -> Iterator[tuple[np.ndarray, list[list[int]]]]:
    """The rule at one load, step by step: observation rows and what it chooses for each."""
    rule = build_baseline(contract, config.rule)
    requests = replayed.workload.requests(load, endless_slots(load))
    step = engine.reset(Episode(load, requests, ClosedLoop(load)))
    num_steps = 0
    while True:
        choices = np.asarray(rule.decide(step.record, step.observation))
        if num_steps >= _WARM_UP_STEPS:
            chosen = contract.canonical_actions(choices)
            chosen = np.broadcast_to(chosen, (len(step.observation), chosen.shape[1]))
            yield step.observation, chosen.tolist()
        step = engine.step(choices)
        num_steps += 1
