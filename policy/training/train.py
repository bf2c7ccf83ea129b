"""One training run: live environment, PPO, export, comparison."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.vec_env import VecEnv

from envs.live import make_live_env
from envs.replayed import Replayed
from envs.request_vec_env import RequestVecEnv

from .callbacks import CheckpointCallback, ObservationRecorder, StopCallback
from .checkpoint import Checkpoint, find_checkpoint, restore, start_from
from .comparison import best_settings, compare, compare_settings
from .config import PretrainConfig, Resolved, TrainConfig
from .counterfactual import CounterfactualAdvantages
from .evaluate import Evaluation, evaluate
from .export import export_policy
from .hardware import describe_hardware
from .imitation import CriticFirst, imitate
from .measurement import count_actions
from .ppo import Environment, build_ppo, make_vec_env, unwrapped
from .report import format_table, write_report
from .throughput import RequestThroughputCallback, ThroughputCallback
from .tracking import Tracking

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind.

    Attributes:
        folder: The run's folder.
        policy: The exported policy.
        interrupted: Whether a signal ended the training.
    """

    folder: Path
    policy: Path
    interrupted: bool


def train(config: TrainConfig, resolved: Resolved) -> TrainResult:
    """Train, export and compare.

    Args:
        config: The run.
        resolved: The same as plain containers, kept beside every checkpoint and in `policy.json`.

    Returns:
        Where everything lies.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.pretrain is not None and not config.resume:
        first = train(_pretraining(config, config.pretrain), resolved)
        if first.interrupted:
            return first
        config = replace(config, start_from=str(first.folder))
    checkpoint = find_checkpoint(Path(config.resume)) if config.resume else None
    tracking = Tracking(
        config.logger, folder, resolved, checkpoint.run_state["run_id"] if checkpoint else None
    )
    exit_code = 1
    try:
        result = _train_and_export(config, resolved, folder, checkpoint, tracking)
        if config.compare.enabled and not result.interrupted:
            evaluation = evaluate(config, result.policy, folder / "untrained" / "policy.pt", folder)
            _report(evaluation, folder, tracking)
        exit_code = 0
        return result
    finally:
        tracking.finish(exit_code)


def _pretraining(config: TrainConfig, pretrain: PretrainConfig) -> TrainConfig:
    """The run that comes first: in a folder of its own, without a comparison."""
    return replace(
        config,
        env=pretrain.env,
        ppo=pretrain.ppo,
        checkpoint_every=pretrain.checkpoint_every,
        compare=replace(config.compare, enabled=False),
        pretrain=None,
        output_dir=str(Path(config.output_dir) / "pretrain"),
    )


def _train_and_export(
    config: TrainConfig,
    resolved: Resolved,
    folder: Path,
    checkpoint: Checkpoint | None,
    tracking: Tracking,
) -> TrainResult:
    replayed = _read_traces(config)
    vec_env = _make_vec_env(config, replayed)
    env = unwrapped(vec_env)
    try:
        model = build_ppo(vec_env, config.ppo, config.seed)
        if config.start_from:
            start_from(find_checkpoint(Path(config.start_from)), model)
        model.set_logger(tracking.sb3_logger)
        _export(model, env, folder / "untrained" / "policy.pt", _probes(env), config, resolved)
        if checkpoint is not None:
            restore(checkpoint, model)
        elif config.imitate is not None and replayed is not None:
            imitate(model, replayed, env.contract, config.imitate)
        recorder = ObservationRecorder()
        interrupted = _learn(config, resolved, folder, model, vec_env, recorder, tracking)
        policy = folder / "policy.pt"
        _export(model, env, policy, recorder.observations, config, resolved)
        tracking.log_policy(policy)
        return TrainResult(folder, policy, interrupted)
    finally:
        vec_env.close()


def _read_traces(config: TrainConfig) -> Replayed | None:
    """What is replayed; None on live vLLM."""
    if config.env.trace is None:
        return None
    return Replayed.read(config.env.trace, config.model, config.drafters, config.workload)


def _make_vec_env(config: TrainConfig, replayed: Replayed | None) -> VecEnv:
    """Live vLLM, or on traces many engines or all their requests."""
    trace = config.env.trace
    if trace is None or replayed is None:
        return make_vec_env(
            make_live_env(
                config.model,
                config.drafters,
                config.workload,
                config.env,
                config.reward,
                seed=config.seed,
            )
        )
    if config.env.granularity == "request":
        return replayed.request_vec_env(trace.seats_per_load, trace.num_threads, config.seed)
    return replayed.vec_env(config.env, trace.num_envs, trace.num_threads, config.seed)


def _learn(
    config: TrainConfig,
    resolved: Resolved,
    folder: Path,
    model: PPO,
    vec_env: VecEnv,
    recorder: ObservationRecorder,
    tracking: Tracking,
) -> bool:
    """Learn to the end, or to a signal; whatever ends it, a checkpoint remains."""
    run_state = {"run_id": tracking.run_id, "config": resolved}
    saver = CheckpointCallback(folder / "checkpoints", config.checkpoint_every, run_state)
    stopper = StopCallback(config.ppo.max_minutes)
    steps_left = config.ppo.total_timesteps - model.num_timesteps
    callbacks = [_throughput_callback(config, vec_env), recorder, saver, stopper]
    if config.imitate is not None and model.num_timesteps == 0:
        callbacks.append(CriticFirst(config.imitate.critic_rollouts))
    env = unwrapped(vec_env)
    if config.counterfactual is not None and isinstance(env, RequestVecEnv):
        callbacks.append(CounterfactualAdvantages(env, config.counterfactual))
    try:
        model.learn(
            max(0, steps_left), CallbackList(callbacks), log_interval=1, reset_num_timesteps=False
        )
    finally:
        stopper.restore_signals()
        if model.num_timesteps:
            logger.info("Saved %s.", saver.save())
    return stopper.interrupted


def _throughput_callback(config: TrainConfig, vec_env: VecEnv) -> BaseCallback:
    env = unwrapped(vec_env)
    if isinstance(env, RequestVecEnv):
        return RequestThroughputCallback(env, config.ppo.total_timesteps)
    return ThroughputCallback(env.contract, config.ppo.total_timesteps)


def _export(
    model: PPO,
    env: Environment,
    path: Path,
    observations: np.ndarray,
    config: TrainConfig,
    resolved: Resolved,
) -> None:
    provenance = {
        "command": shlex.join(sys.argv),
        "num_timesteps": model.num_timesteps,
        "config": resolved,
        "hardware": describe_hardware(),
    }
    export_policy(
        model,
        env.contract,
        path,
        observations=observations,
        provenance=provenance,
        drafter_settings=vars(config.drafters.settings),
    )


def _probes(env: Environment) -> np.ndarray:
    """Observations between the bounds, to compare an untrained network on."""
    generator = np.random.default_rng(0)
    low, high = env.contract.low, env.contract.high
    return (low + generator.random((256, len(low))) * (high - low)).astype(np.float32)


def _report(evaluation: Evaluation, folder: Path, tracking: Tracking) -> None:
    measurements = evaluation.measurements
    cells = compare(measurements)
    fixed = best_settings(cells, list(evaluation.details))
    comparisons = [
        compare_settings(measurements, "policy", "none"),
        compare_settings(measurements, "policy", "policy_untrained"),
        compare_settings(
            measurements, "policy", fixed, against_name="the best fixed setting of each load"
        ),
        compare_settings(measurements, "none_hooked", "none"),
    ]
    paths = write_report(
        folder,
        cells,
        comparisons,
        title="Speculative decoding on live vLLM: the trained policy against fixed settings",
        hardware=describe_hardware(),
        command=shlex.join(sys.argv),
        notes=(
            "Held-out prompts; settings interleaved within each repeat; measured time only.",
            "Prompts lie in the prefix cache of both engines: the figures are those of decoding.",
            "`none` is vLLM without speculation configured, `none_hooked` the plugin's engine "
            "with `none` chosen at every step.",
        ),
        details=evaluation.details,
        action_counts=count_actions(measurements),
    )
    print(format_table(cells))
    print(f"\nReport: {paths.markdown}")
    stored = json.loads(paths.json.read_text())["cells"]
    rows = [list(stored[0]), *(list(cell.values()) for cell in stored)]
    tracking.log_report({"comparison": rows}, {"comparison_figure": paths.figure})


def describe(result: TrainResult) -> str:
    """The run's end in one line."""
    if result.interrupted:
        return f"Interrupted and saved; go on with resume={result.folder}."
    return f"Policy: {result.policy}"
