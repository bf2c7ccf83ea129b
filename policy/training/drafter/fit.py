"""Stage 3: fit the head to what the target computed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from policy.errors import ConfigError

from ..atomic import replace_atomically
from .cores import one_thread_a_core
from .head import DraftHead
from .objective import Teacher, accepted_shares, unrolled_loss
from .schedule import in_batches, learning_rate_share, positions_at, shuffled
from .target_states import StatesFolder
from .unroll import TargetStates

_ROWS_AT_ONCE = 512  # their logits over the draft vocabulary just fit a processor's cache


@dataclass(frozen=True)
class FitConfig:
    """How the head is fitted.

    Attributes:
        epochs: Passes over the text.
        rows_per_step: Draft starts of an optimiser step, at least.
        num_positions: Draft tokens in a row at the end of training; it begins with one.
        position_decay: Weight of a draft position over that of the one before it.
        greedy_share: Weight of the target's greedy token in the labels; the rest is its
            distribution. 1 is what greedy verification asks for, 0 is distillation.
        muon_learning_rate: Of the layer's matrices and of `fc`; falls to 0 linearly.
        adam_learning_rate: Of the rest; falls to 0 linearly.
        warmup_share: Share of the steps over which both rise from 0.
        num_validation_samples: Samples that are kept out of training, of the first pass.
        steps_per_check: Steps between two validations, each of which saves what there is.
        seed: Order of the samples.
    """

    epochs: int = 4
    rows_per_step: int = 1024
    num_positions: int = 4
    position_decay: float = 0.8
    greedy_share: float = 0.5
    muon_learning_rate: float = 3e-3
    adam_learning_rate: float = 1e-3
    warmup_share: float = 0.05
    num_validation_samples: int = 48
    steps_per_check: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "rows_per_step", "num_positions", "steps_per_check"):
            if getattr(self, name) < 1:
                raise ConfigError(f"fit.{name} is {getattr(self, name)}; make it 1 or more.")
        for name in ("position_decay", "greedy_share", "warmup_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"fit.{name} is {getattr(self, name)}; make it 0 to 1.")
        for name in ("muon_learning_rate", "adam_learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"fit.{name} is {getattr(self, name)}; make it more than 0.")


def fit_head(
    config: FitConfig, head: DraftHead, teacher: Teacher, states: StatesFolder, checkpoint: Path
) -> list[float]:
    """Train a head in place, going on where a killed run has left its checkpoint.

    Args:
        config: How.
        head: Where training starts.
        teacher: Labels.
        states: Samples; the first ones are kept for validation.
        checkpoint: Written at each validation.

    Returns:
        Share of validation drafts accepted up to each position.

    Raises:
        ConfigError: If validation leaves no samples to train on.
    """
    if config.num_validation_samples >= len(states):
        raise ConfigError(
            f"The text has {len(states)} samples and validation takes "
            f"{config.num_validation_samples}; lower fit.num_validation_samples."
        )
    validation = [states[number] for number in range(config.num_validation_samples)]
    steps = _steps(config, states)
    optimisers = _optimisers(config, head)
    done, shares = 0, [0.0] * config.num_positions
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        head.load_state_dict(saved["head"])
        for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        done, shares = saved["done"], saved["shares"]
    with (
        one_thread_a_core() as threads,
        tqdm(total=len(steps), initial=done, unit="step", desc="fitting the head") as bar,
    ):
        for number in range(done, len(steps)):
            progress = number / len(steps)
            samples = [states[one] for one in steps[number]]
            num_positions = positions_at(progress, config.num_positions)
            loss = _gradients(threads, config, head, teacher, samples, num_positions)
            _update(optimisers, learning_rate_share(progress, config.warmup_share))
            bar.update()
            if (number + 1) % config.steps_per_check == 0 or number + 1 == len(steps):
                with torch.autocast("cpu", torch.bfloat16):
                    shares = accepted_shares(head, teacher, validation, config.num_positions)
                _save(checkpoint, head, optimisers, number + 1, shares)
                length = 1 + sum(shares)
                bar.set_postfix_str(f"loss {loss:.3f}, mean acceptance length {length:.3f}")
    return shares


def _gradients(
    threads: Executor,
    config: FitConfig,
    head: DraftHead,
    teacher: Teacher,
    samples: Sequence[TargetStates],
    num_positions: int,
) -> float:
    """Add up the gradients of some samples; returns the loss per draft start."""
    num_starts = sum(sample.num_starts for sample in samples)

    def share_of_loss(some: list[TargetStates]) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = unrolled_loss(head, teacher, some, num_positions, config.position_decay)
        share = loss / num_starts
        share.backward()  # torch locks each sum of gradients
        return share.item()

    return sum(threads.map(share_of_loss, _few_at_once(samples)))


def _few_at_once(samples: Sequence[TargetStates]) -> list[list[TargetStates]]:
    num_starts = [sample.num_starts for sample in samples]
    groups = in_batches(range(len(samples)), num_starts, _ROWS_AT_ONCE)
    return [[samples[number] for number in group] for group in groups]


def _update(optimisers: Sequence[torch.optim.Optimizer], share_of_rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * share_of_rate
        nn.utils.clip_grad_norm_([p for g in optimiser.param_groups for p in g["params"]], 1.0)
        optimiser.step()
        optimiser.zero_grad()


def _steps(config: FitConfig, states: StatesFolder) -> list[list[int]]:
    """The samples of every optimiser step, the same in every run."""
    num_starts = states.num_starts()
    trained_on = range(config.num_validation_samples, len(states))
    return [
        step
        for order in shuffled(trained_on, config.epochs, config.seed)
        for step in in_batches(order, num_starts, config.rows_per_step)
    ]


def _optimisers(config: FitConfig, head: DraftHead) -> list[torch.optim.Optimizer]:
    """Muon for the layer's matrices and `fc`, AdamW for the rest."""
    matrices = [head.fc.weight, *(p for p in head.midlayer.parameters() if p.ndim == 2)]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in head.parameters() if id(parameter) not in chosen]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices,
            lr=config.muon_learning_rate,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=config.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return optimisers


def _save(
    path: Path,
    head: DraftHead,
    optimisers: Sequence[torch.optim.Optimizer],
    done: int,
    shares: list[float],
) -> None:
    saved: dict[str, Any] = {
        "head": head.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "done": done,
        "shares": shares,
    }
    with replace_atomically(path) as unfinished:
        torch.save(saved, unfinished)
