"""What an exported policy reaches on held-out requests, in the closed loop of the oracles.

The simulator compiles for most of a minute, so this runs in a process of its own beside the rest.
"""

from __future__ import annotations

from pathlib import Path

import torch

from envs.closed_loop import tokens_per_s
from envs.draft_options import fixed_options
from envs.rule_speed import controller_tokens_per_s
from envs.traces import Traces
from policy.cost_model import CostModel

from ..artifact import load_policy
from ..controllers import PolicyController, SafeController
from ..errors import TraceError
from .study_config import TraceStudyConfig
from .study_data import StudyTraces
from .study_speedups import POLICY, Speedup


def measure_policy(config: TraceStudyConfig, seed: int) -> list[Speedup]:
    """The policy's speed over no speculation, on every data set at every load.

    Args:
        config: The policy, the traces and the loads.
        seed: Of the order of the requests.

    Raises:
        TraceError: If there is no held-out request, or a drafter or a length was not recorded.
        ArtifactError: If the policy cannot be used.
    """
    torch.set_num_threads(1)
    study = StudyTraces.read(config.files, config.cost_model)
    held_out = study.held_out()
    if not held_out:
        raise TraceError(
            "The traces hold no request of the eval split to judge the policy on; collect some or "
            "set traces.policy=null."
        )
    return [
        Speedup(
            "traces",
            "held_out",
            name,
            load,
            POLICY,
            "",
            0,
            _speedup(traces, study.cost_model, load, config, seed),
        )
        for name, traces in held_out.items()
        for load in config.concurrency
    ]


def _speedup(
    traces: Traces, cost_model: CostModel, load: int, config: TraceStudyConfig, seed: int
) -> float:
    artifact = load_policy(Path(str(config.policy)).expanduser())
    speed = controller_tokens_per_s(
        traces,
        SafeController(PolicyController(artifact), artifact.contract),
        artifact.contract,
        cost_model,
        load,
        min_tokens_per_slot=config.min_tokens_per_slot,
        seed=seed,
    )
    plain = tokens_per_s(
        traces,
        fixed_options(traces),
        cost_model,
        load,
        first_position=0,
        min_tokens_per_slot=config.min_tokens_per_slot,
        seed=seed,
    )
    return speed / plain
