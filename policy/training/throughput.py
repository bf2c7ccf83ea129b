"""Callbacks that log how fast a training's engines are and what they do, with a progress bar."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from tqdm import tqdm

from envs.request_vec_env import RequestVecEnv

from ..contract import Contract


class ThroughputCallback(BaseCallback):
    """Logs tokens per second, speedup, acceptance and action shares, with a progress bar.

    Args:
        contract: Names the drafters.
        total_timesteps: Env steps of the whole training, for the bar.
    """

    def __init__(self, contract: Contract, total_timesteps: int) -> None:
        super().__init__()
        self._drafters = contract.drafters
        self._table = contract.action_table
        self._total_timesteps = total_timesteps
        self._bar: Any = None
        self._forget()

    def _on_training_start(self) -> None:
        self._bar = tqdm(
            total=self._total_timesteps, initial=self.num_timesteps, unit="step", desc="training"
        )

    def _on_step(self) -> bool:
        actions = self._table[self.locals["actions"]]
        for action, info in zip(actions, self.locals["infos"], strict=True):
            if "engine_error" in info:
                self._num_engine_failures += 1
                continue
            self._tokens += info["num_tokens"]
            self._seconds += info["step_time_s"]
            self._speedups.append((info["concurrency"], info["speedup"], info["charged_time_s"]))
            self._actions[self._drafters[action[0]]] += 1
            for drafter, (drafted, accepted) in info["acceptance"].items():
                self._drafted[drafter] += drafted
                self._accepted[drafter] += accepted
        self._bar.update(self.num_timesteps - self._bar.n)
        return True

    def _on_rollout_end(self) -> None:
        if not self._speedups:
            return
        loads, speedups, seconds = (
            np.array(column) for column in zip(*self._speedups, strict=True)
        )
        speedup = float(np.average(speedups, weights=seconds))
        tok_per_s = self._tokens / self._seconds
        self.logger.record("throughput/tok_per_s", tok_per_s)
        self.logger.record("throughput/speedup_over_none", speedup)
        for load in np.unique(loads):
            here = loads == load
            self.logger.record(
                f"throughput/speedup_at_{load}",
                float(np.average(speedups[here], weights=seconds[here])),
            )
        num_actions = sum(self._actions.values())
        for drafter in self._drafters:
            self.logger.record(f"actions/share_{drafter}", self._actions[drafter] / num_actions)
            if self._drafted[drafter]:
                self.logger.record(
                    f"acceptance/{drafter}", self._accepted[drafter] / self._drafted[drafter]
                )
        self.logger.record("engine/failures", self._num_engine_failures)
        self._bar.set_postfix_str(f"{tok_per_s:.0f} tok/s, {speedup:.2f}x no speculation")
        self._forget()

    def _on_training_end(self) -> None:
        self._bar.close()

    def _forget(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._speedups: list[tuple[int, float, float]] = []
        self._actions: Counter[str] = Counter()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._num_engine_failures = 0


class RequestThroughputCallback(BaseCallback):
    """The same where every request decides for itself; time is priced by the speed it measures.

    Args:
        vec_env: Keeps count of its engines' tokens and time.
        total_timesteps: Env steps of the whole training, for the bar.
    """

    def __init__(self, vec_env: RequestVecEnv, total_timesteps: int) -> None:
        super().__init__()
        self._vec_env = vec_env
        self._total_timesteps = total_timesteps
        self._bar: Any = None
        self._num_actions = np.zeros(len(vec_env.contract.action_table), np.int64)

    def _on_training_start(self) -> None:
        self._bar = tqdm(
            total=self._total_timesteps, initial=self.num_timesteps, unit="step", desc="training"
        )

    def _on_step(self) -> bool:
        self._num_actions += np.bincount(self.locals["actions"], minlength=len(self._num_actions))
        self._bar.update(self.num_timesteps - self._bar.n)
        return True

    def _on_rollout_end(self) -> None:
        contract, references = self._vec_env.contract, self._vec_env.references
        reference_s = total_s = 0.0
        speedups: dict[int, float] = {}
        for load, (num_tokens, charged_s) in self._vec_env.take_throughput().items():
            plain_s = num_tokens / references[load].tok_per_s
            speedups[load] = plain_s / charged_s
            self.logger.record(f"throughput/speedup_at_{load}", speedups[load])
            reference_s += plain_s
            total_s += charged_s
        self._vec_env.set_prices(speedups)
        self.logger.record("throughput/speedup_over_none", reference_s / total_s)
        for index, drafter in enumerate(contract.drafters):
            chosen = self._num_actions[contract.action_table[:, 0] == index].sum()
            self.logger.record(f"actions/share_{drafter}", chosen / self._num_actions.sum())
        self._bar.set_postfix_str(f"{reference_s / total_s:.2f}x no speculation")
        self._num_actions[:] = 0

    def _on_training_end(self) -> None:
        self._bar.close()
