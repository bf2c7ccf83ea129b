"""Callbacks: what a training logs, when it saves, and how it ends."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from tqdm import tqdm

from ..contract import NONE
from .checkpoint import begin_episode, save_checkpoint


class ThroughputCallback(BaseCallback):
    """Logs tokens per second, speedup, acceptance and action shares, with a progress bar.

    Args:
        drafters: Names by action index.
        total_timesteps: Env steps of the whole training, for the bar.
    """

    def __init__(self, drafters: tuple[str, ...], total_timesteps: int) -> None:
        super().__init__()
        self._drafters = drafters
        self._total_timesteps = total_timesteps
        self._bar: Any = None
        self._forget()

    def _on_training_start(self) -> None:
        self._bar = tqdm(
            total=self._total_timesteps, initial=self.num_timesteps, unit="step", desc="training"
        )

    def _on_step(self) -> bool:
        for action, info in zip(self.locals["actions"], self.locals["infos"], strict=True):
            if "engine_error" in info:
                self._num_engine_failures += 1
                continue
            self._tokens += info["num_tokens"]
            self._seconds += info["step_time_s"]
            self._speedups.append((info["concurrency"], info["speedup"], info["charged_time_s"]))
            drafter = self._drafters[action[0]] if action[1] else NONE
            self._actions[drafter] += 1
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


class ObservationRecorder(BaseCallback):
    """Keeps observations of the training, for the parity check of the export.

    Args:
        capacity: Most observations kept; the latest stay.
    """

    def __init__(self, capacity: int = 2048) -> None:
        super().__init__()
        self._capacity = capacity
        self._rollouts: list[np.ndarray] = []

    @property
    def observations(self) -> np.ndarray:
        """Recorded observations, float32 `[n, fields]`."""
        return np.concatenate(self._rollouts)[-self._capacity :]

    def _on_training_start(self) -> None:
        # A run that was resumed at its end takes no step; there is still something to compare on.
        self._rollouts.append(np.array(cast(PPO, self.model)._last_obs, np.float32))

    def _on_step(self) -> bool:
        observations = np.array(self.locals["new_obs"], np.float32)
        self._rollouts.append(observations)
        del self._rollouts[: -math.ceil(self._capacity / len(observations))]
        return True


class CheckpointCallback(BaseCallback):
    """Saves a checkpoint every so many env steps, after the update that follows.

    A new episode then begins, as in a run that is resumed from the checkpoint.

    Args:
        folder: Where the checkpoints go.
        every: Env steps between two.
        run_state: What else a resumed run needs, JSON-ready.
    """

    def __init__(self, folder: Path, every: int, run_state: dict[str, Any]) -> None:
        super().__init__()
        self._folder = folder
        self._every = every
        self._run_state = run_state
        self._saved_at = 0

    def _on_training_start(self) -> None:
        self._saved_at = self.num_timesteps

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.num_timesteps - self._saved_at >= self._every:
            self.save()
            begin_episode(cast(PPO, self.model))

    def save(self) -> Path:
        """Save now and return the checkpoint's folder."""
        self._saved_at = self.num_timesteps
        return save_checkpoint(self._folder, cast(PPO, self.model), self._run_state)


class StopCallback(BaseCallback):
    """Ends the training on SIGINT, SIGTERM or after a time limit, at the next env step.

    A second signal does what it would do without this callback, should a step not return.

    Args:
        max_minutes: Wall-clock limit; None for none.
    """

    def __init__(self, max_minutes: float | None) -> None:
        super().__init__()
        self.interrupted = False
        self._max_minutes = max_minutes
        self._handlers: dict[int, Any] = {}

    def _on_training_start(self) -> None:
        self._began_s = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._interrupt)

    def _on_step(self) -> bool:
        minutes = (time.monotonic() - self._began_s) / 60
        out_of_time = self._max_minutes is not None and minutes >= self._max_minutes
        return not (self.interrupted or out_of_time)

    def _on_training_end(self) -> None:
        self.restore_signals()

    def restore_signals(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self.restore_signals()
