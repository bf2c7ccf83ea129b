"""Everything `scripts/train.py` can be told, as one validated dataclass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envs.draft_env import EpisodeConfig
from envs.live import DraftersConfig, ModelConfig
from envs.replayed import TraceConfig
from envs.request_vec_env import engine_loads
from envs.reward import RewardConfig
from envs.workload import WorkloadConfig

from ..contract import Granularity
from ..errors import ConfigError
from .counterfactual import CounterfactualConfig
from .imitation import ImitationConfig


@dataclass(frozen=True)
class EnvConfig(EpisodeConfig):
    """What is stepped.

    Attributes:
        trace: What is replayed; null steps live vLLM.
        granularity: `batch` decides once for all requests of a step, `request` for each of them;
            the latter is trained on traces.
    """

    trace: TraceConfig | None = None
    granularity: Granularity = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.granularity == "request" and self.trace is None:
            raise ConfigError(
                "Decisions for each request are trained on traces; add env=trace or make "
                "env.granularity 'batch'."
            )

    def num_envs(self, loads: Sequence[int]) -> int:
        """Environments that PPO steps at once; live vLLM is one.

        Args:
            loads: Of the workload.
        """
        if self.trace is None:
            return 1
        if self.granularity == "request":
            return sum(engine_loads(loads, self.trace.seats_per_load))
        return self.trace.num_envs


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
        final_learning_rate: It falls to this, linearly, over all env steps; null keeps it.
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
    final_learning_rate: float | None = None
    gamma: float = 0.9
    gae_lambda: float = 0.9
    length_prior: float = 0.35
    clip_range: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    hidden_layers: tuple[int, ...] = (64, 64)

    def __post_init__(self) -> None:
        _check_least("ppo", self, 1, ("total_timesteps", "n_steps", "n_epochs"))
        _check_least("ppo", self, 2, ("batch_size",))  # advantages are normalised within it
        _check_least("ppo", self, 0, ("ent_coef", "vf_coef", "length_prior"))
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"ppo.{name} is {getattr(self, name)}; make it 0 to 1.")
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"ppo.{name} is {getattr(self, name)}; make it more than 0.")
        if self.final_learning_rate is not None and self.final_learning_rate < 0:
            raise ConfigError(
                f"ppo.final_learning_rate is {self.final_learning_rate}; make it 0 or more, or "
                "null to keep the rate."
            )
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ConfigError(
                f"ppo.max_minutes is {self.max_minutes}; make it more than 0, or null for no limit."
            )
        if not all(width >= 1 for width in self.hidden_layers):
            raise ConfigError(
                f"ppo.hidden_layers is {list(self.hidden_layers)}; make every width 1 or more."
            )


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
        output_tokens: Output tokens of a request, at most; few, so that a block covers many
            prompts.
        tuning_tokens_per_req: The same on training prompts, to choose the best fixed settings.
        max_prompts_per_kind: Prompts of each kind and split, kept in both engines' prefix caches.
        ngram_lengths: Lengths among which the best fixed n-gram is chosen.
        model_lengths: Lengths among which the best fixed model drafter is chosen.
    """

    enabled: bool = True
    concurrency: tuple[int, ...] = (1, 4, 16, 32)
    num_repeats: int = 4
    tokens_per_req: int = 16
    min_tokens: int = 96
    output_tokens: int = 32
    tuning_tokens_per_req: int = 8
    max_prompts_per_kind: int = 8
    ngram_lengths: tuple[int, ...] = (2, 8)
    model_lengths: tuple[int, ...] = (1, 2, 3)

    def __post_init__(self) -> None:
        counts = ("num_repeats", "tokens_per_req", "min_tokens", "tuning_tokens_per_req")
        _check_least("compare", self, 1, (*counts, "output_tokens", "max_prompts_per_kind"))
        for name in ("concurrency", "ngram_lengths", "model_lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ConfigError(
                    f"compare.{name} is {list(values)}; list whole numbers of 1 or more."
                )


@dataclass(frozen=True)
class PretrainConfig:
    """A training before the training, such as one on traces before one on live vLLM.

    Attributes:
        env: What is stepped.
        ppo: The learner; its networks must be the later one's.
        checkpoint_every: Env steps between checkpoints.
    """

    env: EnvConfig
    ppo: PpoConfig
    checkpoint_every: int = 500_000


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
        start_from: Folder of a checkpoint whose weights a new training begins with.
        imitate: A rule whose decisions the network learns first; null begins at random.
        counterfactual: Advantages from what every action would have earned; null estimates them
            from what was done (GAE).
        pretrain: A training on other environments that comes first and gives the weights.
        output_dir: Folder of the run.
    """

    model: ModelConfig
    drafters: DraftersConfig
    env: EnvConfig
    workload: WorkloadConfig
    reward: RewardConfig
    ppo: PpoConfig
    logger: LoggerConfig
    compare: CompareConfig
    seed: int = 0
    checkpoint_every: int = 512
    resume: str | None = None
    start_from: str | None = None
    imitate: ImitationConfig | None = None
    counterfactual: CounterfactualConfig | None = None
    pretrain: PretrainConfig | None = None
    output_dir: str = "outputs"

    def __post_init__(self) -> None:
        num_envs = self.env.num_envs(self.workload.concurrency)
        rollout = self.ppo.n_steps * num_envs
        if rollout % self.ppo.batch_size:
            raise ConfigError(
                f"A rollout of {rollout} steps (ppo.n_steps {self.ppo.n_steps} in "
                f"{num_envs} environments) is not a multiple of ppo.batch_size "
                f"{self.ppo.batch_size}; change one of them."
            )
        if self.resume and self.start_from:
            raise ConfigError("resume goes on with a run and start_from begins one; give one.")
        if self.imitate is not None and self.env.trace is None:
            raise ConfigError("A rule is imitated on traces; add env=trace or make imitate null.")
        if self.imitate is not None and self.start_from:
            raise ConfigError("imitate and start_from both give the first weights; keep one.")
        if self.counterfactual is not None and self.env.granularity != "request":
            raise ConfigError(
                "What every action would have earned is known for each request on traces; add "
                "env.granularity=request or make counterfactual null."
            )
        if self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; make it 1 or more.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; make it 0 to {2**32 - 1}.")
        compared = self.compare.concurrency if self.compare.enabled else ()
        most = max((*self.workload.concurrency, *compared))
        if most > self.model.max_num_seqs:
            raise ConfigError(
                f"A load of {most} requests exceeds model.max_num_seqs {self.model.max_num_seqs}; "
                "raise it or lower workload.concurrency and compare.concurrency."
            )


def _check_least(section: str, config: Any, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not least <= value < math.inf:
            raise ConfigError(f"{section}.{name} is {value}; make it {least} or more.")


Resolved = dict[str, Any]
"""The configuration as plain containers, for provenance and loggers."""
