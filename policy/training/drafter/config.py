"""Everything `scripts/train_drafter.py` can be told, as one validated dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field

from envs.live import DEFAULT_HEAD, ModelConfig
from envs.workload import WorkloadConfig
from policy.errors import ConfigError

from .acceptance import AcceptanceConfig
from .fit import FitConfig
from .text import TextConfig


@dataclass(frozen=True)
class DrafterConfig:
    """How a head is made.

    Attributes:
        model: Target model and the engine that writes the text.
        workload: Kinds of prompts and lengths; the training split is written on, the other one
            measured on.
        text: What the target writes.
        fit: How the head is fitted.
        acceptance: What is measured at the end; null leaves it out.
        aux_layers: Number of target layers after which the head reads; vLLM's own choice for a
            target of n layers is 2, n / 2, n - 3.
        draft_vocab_size: Tokens that the head can draft.
        compare_with: Another head's folder, measured in the same run; null for none.
        out: Folder of everything; the head itself goes to `OUT/head`.
    """

    model: ModelConfig
    workload: WorkloadConfig
    text: TextConfig = field(default_factory=TextConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    acceptance: AcceptanceConfig | None = field(default_factory=AcceptanceConfig)
    aux_layers: tuple[int, ...] = (2, 15, 27)
    draft_vocab_size: int = 8192
    compare_with: str | None = str(DEFAULT_HEAD)
    out: str = "outputs/drafter"

    def __post_init__(self) -> None:
        if not self.aux_layers or min(self.aux_layers) < 1:
            raise ConfigError(f"aux_layers is {list(self.aux_layers)}; list numbers of at least 1.")
        if self.draft_vocab_size < 1:
            raise ConfigError(f"draft_vocab_size is {self.draft_vocab_size}; make it 1 or more.")
