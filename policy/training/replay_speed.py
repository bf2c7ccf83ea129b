"""How fast traces are replayed, and learnt from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import Logger
from tqdm import tqdm

from envs.draft_env import EpisodeConfig
from envs.draft_vec_env import DraftVecEnv
from envs.simulator_state import TraceEngineConfig
from envs.trace_workload import TraceWorkload
from envs.traces import read_traces
from policy.cost_model import read_cost_model

from .callbacks import ObservationRecorder
from .config import PpoConfig
from .ppo import build_ppo
from .throughput import ThroughputCallback

_SECONDS_PER_REPEAT = 1.0
_PPO_LOADS = (1, 1, 1, 4, 4, 16, 32)
_PPO_ENVS = 256
"""Engines, and PPO's settings below, are those of `conf/env/trace.yaml`."""


def measure_replay_speed(
    traces: Path,
    cost_model: Path,
    num_requests: tuple[int, ...],
    num_envs: tuple[int, ...],
    num_threads: int | None,
    num_repeats: int,
) -> str:
    """Measure and return two tables as text.

    Args:
        traces: A trace file.
        cost_model: Its step times.
        num_requests: Requests in flight, one column each.
        num_envs: Engines stepped at once, one row each.
        num_threads: Threads that step them; None takes one per processor.
        num_repeats: Repeats of each cell; the cells take turns.
    """

    def make(loads: tuple[int, ...], envs: int) -> DraftVecEnv:
        recorded = read_traces(traces).of_split("train")
        return DraftVecEnv(
            TraceWorkload(recorded, loads, recorded.header.output_tokens),
            read_cost_model(cost_model),
            recorded.contract(),
            TraceEngineConfig(max_num_seqs=max(loads), max_model_len=recorded.header.max_model_len),
            EpisodeConfig(),
            envs,
            num_threads=num_threads,
        )

    cells = {(envs, load): make((load,), envs) for envs in num_envs for load in num_requests}
    speeds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for vec_env in cells.values():
        vec_env.reset()
        _engine_steps_per_s(vec_env, seconds=0)
    for _ in tqdm(range(num_repeats), desc="simulator", unit="round"):
        for cell, vec_env in cells.items():
            speeds[cell].append(_engine_steps_per_s(vec_env, _SECONDS_PER_REPEAT))
    lines = ["Engine steps per second of the simulator, random actions: median [lowest, highest]"]
    lines.append("| engines | " + " | ".join(f"{load} requests" for load in num_requests) + " |")
    lines.append("|---" * (1 + len(num_requests)) + "|")
    for envs in num_envs:
        row = [_spread(speeds[envs, load]) for load in num_requests]
        lines.append(f"| {envs} | " + " | ".join(row) + " |")
    learning = _learning_speeds(make(_PPO_LOADS, _PPO_ENVS), num_repeats)
    lines += [
        "",
        f"Env steps per second with PPO learning ({_PPO_ENVS} engines, loads "
        f"{', '.join(map(str, sorted(set(_PPO_LOADS))))}): {_spread(learning)}",
    ]
    return "\n".join(lines)


def _engine_steps_per_s(vec_env: DraftVecEnv, seconds: float) -> float:
    generator = np.random.default_rng(0)
    num_steps = 0
    spent_s = 0.0
    while True:
        actions = generator.integers(
            0, vec_env.contract.action_nvec, (vec_env.num_envs, len(vec_env.contract.action_nvec))
        )
        vec_env.step_async(actions)
        began_s = time.perf_counter()
        vec_env.step_engines()
        spent_s += time.perf_counter() - began_s
        num_steps += vec_env.num_engine_steps
        if spent_s >= seconds:
            return num_steps / spent_s


def _learning_speeds(vec_env: DraftVecEnv, num_repeats: int) -> list[float]:
    """Env steps per second of whole rollouts with their updates, callbacks included."""
    config = PpoConfig(
        total_timesteps=1, n_steps=32, batch_size=4096, n_epochs=4, gamma=0.99, gae_lambda=0.95
    )
    torch.manual_seed(0)
    model = build_ppo(vec_env, config, seed=0)
    model.set_logger(Logger(None, []))
    num_steps = 8 * config.n_steps * vec_env.num_envs

    def learn() -> None:
        callbacks = CallbackList(
            [ThroughputCallback(vec_env.contract, num_steps), ObservationRecorder()]
        )
        model.learn(num_steps, callbacks)

    learn()
    return [num_steps / _seconds_of(learn) for _ in range(num_repeats)]


def _seconds_of(function: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def _spread(values: list[float]) -> str:
    return f"{np.median(values):,.0f} [{min(values):,.0f}, {max(values):,.0f}]"
