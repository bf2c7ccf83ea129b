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
from stable_baselines3.common.save_util import load_from_zip_file

from ..errors import ConfigError
from .ppo import Environment, unwrapped

_MODEL_FILE = "model.zip"
_STATE_FILE = "state.json"
_STATE_KEYS = {"num_timesteps", "num_updates", "env", "generators", "run"}


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
    partial, replaced = target.with_suffix(".partial"), target.with_suffix(".replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save(partial / _MODEL_FILE)
    env = _env_of(model)
    state = {
        "num_timesteps": model.num_timesteps,
        "num_updates": model._n_updates,
        "env": env.state_dict(),
        "generators": _generator_states(),
        "run": run_state,
    }
    (partial / _STATE_FILE).write_text(json.dumps(state))
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def begin_episode(model: PPO) -> None:
    """Leave the running episode for a new one.

    A resumed run begins with a new episode; the run that saved does the same after saving, so
    that both go on alike.
    """
    assert model.env is not None
    model._last_obs = model.env.reset()  # type: ignore[assignment]
    model._last_episode_starts = np.ones(model.env.num_envs, bool)


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
        state = json.loads((folder / _STATE_FILE).read_text())
        missing = _STATE_KEYS - set(state)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder, error) from error
    if missing:
        raise _damaged(folder, f"without {', '.join(sorted(missing))}")
    return Checkpoint(folder, state)


def restore(checkpoint: Checkpoint, model: PPO) -> None:
    """Bring a freshly built learner to a checkpoint's state.

    Args:
        checkpoint: What was saved.
        model: PPO built by `build_ppo` on the new environment.

    Raises:
        ConfigError: If the checkpoint is damaged, or of another observation, action or network.
    """
    folder, state, env = checkpoint.folder, checkpoint.state, _env_of(model)
    _set_parameters(checkpoint, model)
    try:
        model.num_timesteps, model._n_updates = state["num_timesteps"], state["num_updates"]
        env.load_state_dict(state["env"])
        _restore_generators(state["generators"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from error
    assert model.env is not None
    model.env.unwrapped._reset_seeds()  # or the first reset would seed the environment anew


def start_from(checkpoint: Checkpoint, model: PPO) -> None:
    """Give a new learner the weights of a checkpoint, and nothing else of it.

    Args:
        checkpoint: Of a training on the same contract, on traces or live.
        model: PPO built by `build_ppo`.

    Raises:
        ConfigError: If the checkpoint is damaged, or of another observation, action or network.
    """
    optimizer = model.policy.optimizer
    untouched = optimizer.state_dict()
    _set_parameters(checkpoint, model)
    optimizer.load_state_dict(untouched)


def _set_parameters(checkpoint: Checkpoint, model: PPO) -> None:
    folder = checkpoint.folder
    try:
        _, parameters, _ = load_from_zip_file(folder / _MODEL_FILE, load_data=False, device="cpu")
    except Exception as error:  # what a damaged archive raises depends on the damaged byte
        raise _damaged(folder, error) from error
    if set(parameters) != set(model.get_parameters()):
        raise _damaged(folder, f"{_MODEL_FILE} is not whole")
    try:
        model.set_parameters(parameters, exact_match=True, device="cpu")
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The checkpoint {folder} is of another network or contract; go on with the settings "
            f"it was trained with ({_one_line(error)})."
        ) from error


def _generator_states() -> dict[str, Any]:
    """The global sources of randomness, JSON-ready; the environment saves its own."""
    name, key, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(key).tolist(), *rest],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def _restore_generators(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch_state = np.frombuffer(base64.b64decode(states["torch"]), np.uint8)
    torch.set_rng_state(torch.from_numpy(torch_state.copy()))


def _damaged(folder: Path, why: Exception | str) -> ConfigError:
    return ConfigError(
        f"The checkpoint {folder} is damaged ({_one_line(why)}); resume from an earlier one."
    )


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__


def _env_of(model: PPO) -> Environment:
    vec_env = model.get_env()
    assert vec_env is not None
    return unwrapped(vec_env)
