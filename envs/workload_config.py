"""What a workload asks of the engine, checked at the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policy.errors import ConfigError

from .prompts.loading import FILE_KIND, KINDS, check_kinds


@dataclass(frozen=True)
class WorkloadConfig:
    """What is asked of the engine, and how much at once.

    Attributes:
        kinds: Weight of each prompt kind, as in `{"code": 2, "chat": 1}`; a request is of a kind
            with probability weight / sum of weights, and a weight of 0 leaves the kind out.
        concurrency: Numbers of requests in flight; each episode draws one of them.
        output_tokens: `max_tokens` of a request, in tokens.
        temperature: Sampling temperature of every request; 0 is greedy.
        prompt_files: Paths for the kind `file`; their formats are in `envs.prompts.user_file`.
        max_prompt_tokens: Longer prompts are dropped; tokens, chat template included.
        max_prompts_per_kind: Prompts kept of each kind; more (of a large file) are subsampled.
        first_wave_min_fraction: Smallest share of `output_tokens` that a request of the first
            wave asks for, see `Workload.episode`; 1 switches the staggering off.

    Raises:
        ConfigError: A value is unknown or out of range.
    """

    kinds: Mapping[str, float] = field(hash=False)
    concurrency: tuple[int, ...]
    output_tokens: int = 256
    temperature: float = 0.0
    prompt_files: tuple[str, ...] = ()
    max_prompt_tokens: int = 512
    max_prompts_per_kind: int = 2000
    first_wave_min_fraction: float = 0.25

    def __post_init__(self) -> None:
        """Check every value; bring the kinds into the order of `KINDS`."""
        check_kinds(self.kinds)
        for kind, weight in self.kinds.items():
            _check_number(f"kinds.{kind}", weight)
        used = {kind: float(self.kinds[kind]) for kind in KINDS if self.kinds.get(kind)}
        if not used:
            raise ConfigError("No prompt kind has a weight; give one of kinds a weight above 0.")
        if not self.concurrency:
            raise ConfigError("concurrency is empty; name at least one number of requests.")
        for value in self.concurrency:
            _check_count("concurrency", value)
        for name in ("output_tokens", "max_prompt_tokens", "max_prompts_per_kind"):
            _check_count(name, getattr(self, name))
        _check_number("temperature", self.temperature)
        _check_number("first_wave_min_fraction", self.first_wave_min_fraction, high=1)
        if (FILE_KIND in used) != bool(self.prompt_files):
            raise ConfigError(
                f"prompt_files and a weight for the kind {FILE_KIND!r} go together; give both or "
                "neither of them."
            )
        object.__setattr__(self, "kinds", used)
        object.__setattr__(self, "concurrency", tuple(self.concurrency))
        object.__setattr__(self, "prompt_files", tuple(self.prompt_files))


def _check_number(name: str, value: Any, high: float = math.inf) -> None:
    number = isinstance(value, int | float) and math.isfinite(value)
    if not number or not 0 <= value <= high:
        allowed = "a number of at least 0" if high == math.inf else f"a number from 0 to {high}"
        raise ConfigError(f"{name} is {value!r}; make it {allowed}.")


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; make it a whole number of at least 1.")
