"""Callbacks: what a training keeps, when it saves, and how it ends."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from .checkpoint import begin_episode, save_checkpoint


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
