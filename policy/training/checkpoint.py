"""Checkpoints: the learner, the generators and the machine's measured speed, written atomically."""

from __future__ import annotations

import base64
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from stable_baselines3 import PPO

from envs.draft_env import DraftEnv

from ..errors import ConfigError

_MODEL_FILE = "model.zip"
_STATE_FILE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A saved training.

    Attributes:
        folder: Where it lies.
        state: The JSON beside the model.
    """

    folder: Path
    state: dict[str, Any]

    @property
    def run_state(self) -> dict[str, Any]:
        """What the run saved of itself, such as wandb's run id."""
        return cast(dict[str, Any], self.state["run"])


def save_checkpoint(folder: Path, model: PPO, run_state: dict[str, Any]) -> Path:
    """Write a checkpoint folder; a killed save leaves the earlier ones whole.

    Args:
        folder: Parent of the checkpoints.
        model: The learner.
        run_state: What the run saves of itself, JSON-ready.
    """
    target = folder / f"step_{model.num_timesteps:08d}"
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save(partial / _MODEL_FILE)
    env = _env_of(model)
    state = {
        "num_timesteps": model.num_timesteps,
        "env": env.state_dict(),
        "env_generator": env.np_random.bit_generator.state,
        "torch_generator": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "run": run_state,
    }
    (partial / _STATE_FILE).write_text(json.dumps(state))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def find_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint folder, or the latest one of a run's folder.

    Raises:
        ConfigError: If there is none, or it is damaged.
    """
    candidates = [path, *sorted(path.glob("step_*[0-9]")), *sorted(path.glob("*/step_*[0-9]"))]
    complete = [folder for folder in candidates if (folder / _STATE_FILE).is_file()]
    if not complete:
        raise ConfigError(
            f"No checkpoint at {path}; give a run's folder or one of its checkpoints/step_… "
            "folders as resume=PATH."
        )
    folder = complete[-1]
    try:
        return Checkpoint(folder, json.loads((folder / _STATE_FILE).read_text()))
    except ValueError as error:
        raise ConfigError(
            f"The checkpoint {folder} is damaged ({error}); resume from an earlier one."
        ) from error


def restore(checkpoint: Checkpoint, model: PPO) -> None:
    """Bring a freshly built learner to a checkpoint's state.

    Args:
        checkpoint: What was saved.
        model: PPO built by `build_ppo` on the new environment.

    Raises:
        ConfigError: If the checkpoint is of another observation, action or network.
    """
    try:
        model.set_parameters(str(checkpoint.folder / _MODEL_FILE), exact_match=True, device="cpu")
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The checkpoint {checkpoint.folder} is of another network or contract; resume with "
            f"the settings it was trained with ({str(error).splitlines()[0]})."
        ) from error
    model.num_timesteps = checkpoint.state["num_timesteps"]
    env = _env_of(model)
    env.load_state_dict(checkpoint.state["env"])
    env.np_random = np.random.default_rng()
    env.np_random.bit_generator.state = checkpoint.state["env_generator"]
    generator = np.frombuffer(base64.b64decode(checkpoint.state["torch_generator"]), np.uint8)
    torch.set_rng_state(torch.from_numpy(generator.copy()))
    random.seed(checkpoint.state["num_timesteps"])


def _env_of(model: PPO) -> DraftEnv:
    vec_env = model.get_env()
    assert vec_env is not None
    return cast(DraftEnv, vec_env.envs[0].unwrapped)  # type: ignore[attr-defined]
