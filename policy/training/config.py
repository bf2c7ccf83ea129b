"""Everything `scripts/train.py` can be told, as one validated dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from envs.draft_env import EpisodeConfig
from envs.live import DraftersConfig, ModelConfig
from envs.reward import RewardConfig
from envs.workload import WorkloadConfig

from ..errors import ConfigError


@dataclass(frozen=True)
class PpoConfig:
    """PPO's settings; names and meanings are stable-baselines3's.

    Attributes:
        total_timesteps: Env steps (decisions) of the whole training.
        max_minutes: Wall-clock limit; null for none. The training ends at whichever comes first.
        n_steps: Env steps per rollout.
        batch_size: Minibatch of an update.
        n_epochs: Passes over a rollout.
        learning_rate: Adam's.
        gamma: Discount per env step.
        gae_lambda: Of generalised advantage estimation.
        clip_range: Of the policy ratio.
        ent_coef: Weight of the entropy bonus.
        vf_coef: Weight of the value loss.
        max_grad_norm: Gradient clipping.
        length_prior: By how much the untrained log-odds of a draft length fall per token, so
            that training starts near no speculation instead of with long drafts at every load.
        hidden_layers: Widths of the policy's and, separately, the value network's layers.
    """

    total_timesteps: int
    max_minutes: float | None = None
    n_steps: int = 64
    batch_size: int = 32
    n_epochs: int = 10
    learning_rate: float = 1e-3
    gamma: float = 0.5
    gae_lambda: float = 0.9
    length_prior: float = 0.35
    clip_range: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    hidden_layers: tuple[int, ...] = (64, 64)

    def __post_init__(self) -> None:
        for name in ("total_timesteps", "n_steps", "batch_size", "n_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ppo.{name} is {getattr(self, name)}; make it 1 or more.")
        if self.batch_size > self.n_steps or self.n_steps % self.batch_size:
            raise ConfigError(
                f"ppo.n_steps {self.n_steps} is not a multiple of ppo.batch_size "
                f"{self.batch_size}; change one of them."
            )
        if not 0 <= self.gamma <= 1 or not 0 <= self.gae_lambda <= 1:
            raise ConfigError("ppo.gamma and ppo.gae_lambda must lie in 0..1.")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ConfigError("ppo.max_minutes must be above 0, or null for no limit.")


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go, beside the terminal and `progress.csv`.

    Attributes:
        name: `wandb`, `tensorboard` or `none`.
        project: wandb's project.
        entity: wandb's entity; null for the account's own.
        mode: `auto` is online with a login and offline without one; or `online`, `offline`.
        group: wandb's group, shared by the jobs of a multirun.
        tags: wandb's tags.
    """

    name: Literal["wandb", "tensorboard", "none"] = "none"
    project: str = "draftgym"
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = "auto"
    group: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompareConfig:
    """The comparison after training, on held-out prompts.

    Attributes:
        enabled: Whether to compare at all.
        concurrency: Requests in flight, one cell each.
        num_repeats: Interleaved repeats of every cell.
        tokens_per_req: Output tokens per request in flight and repeat.
        min_tokens: Least output tokens of a block.
        tuning_tokens_per_req: The same on training prompts, to choose the best fixed settings.
        max_prompts_per_kind: Prompts of each kind and split, kept in both engines' prefix caches.
        ngram_lengths: Lengths among which the best fixed n-gram is chosen.
        model_lengths: Lengths among which the best fixed model drafter is chosen.
    """

    enabled: bool = True
    concurrency: tuple[int, ...] = (1, 4, 16, 32)
    num_repeats: int = 3
    tokens_per_req: int = 16
    min_tokens: int = 64
    tuning_tokens_per_req: int = 8
    max_prompts_per_kind: int = 8
    ngram_lengths: tuple[int, ...] = (2, 8)
    model_lengths: tuple[int, ...] = (1, 2, 3)

    def __post_init__(self) -> None:
        if self.num_repeats < 1 or self.tokens_per_req < 1 or self.min_tokens < 1:
            raise ConfigError("compare's repeats and tokens must be 1 or more.")


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
        model: Target model and engine.
        drafters: Drafters to choose from.
        env: What an episode is.
        workload: Requests and loads.
        reward: How steps are charged.
        ppo: The learner.
        logger: Where metrics go.
        compare: The comparison at the end.
        seed: Seed of everything random.
        checkpoint_every: Env steps between checkpoints.
        resume: Folder of a checkpoint to go on from; null starts anew.
        output_dir: Folder of the run.
    """

    model: ModelConfig
    drafters: DraftersConfig
    env: EpisodeConfig
    workload: WorkloadConfig
    reward: RewardConfig
    ppo: PpoConfig
    logger: LoggerConfig
    compare: CompareConfig
    seed: int = 0
    checkpoint_every: int = 512
    resume: str | None = None
    output_dir: str = "outputs"

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise ConfigError("checkpoint_every must be 1 or more.")
        most = max((*self.workload.concurrency, *self.compare.concurrency))
        if most > self.model.max_num_seqs:
            raise ConfigError(
                f"A load of {most} requests exceeds model.max_num_seqs {self.model.max_num_seqs}; "
                "raise it or lower workload.concurrency and compare.concurrency."
            )


Resolved = dict[str, Any]
"""The configuration as plain containers, for provenance and loggers."""
