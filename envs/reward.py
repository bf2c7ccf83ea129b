"""The reward: time saved against no speculation, in steps of no speculation. Pure.

A user wants tokens per second, so a return must rank policies exactly as the total time for the
same tokens does. With a fixed amount of work and no discount

    sum(tokens / reference_tok_per_s - step_time_s) = work / reference_tok_per_s - total_time_s,

whatever the policy: the token term telescopes (potential-based shaping), so the reference changes
the variance, not the ranking. Dividing by the reference step time makes loads comparable: 0 is no
speculation, +1 is one whole step of no speculation saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policy.errors import ConfigError


@dataclass(frozen=True)
class RewardConfig:
    """How a step's time is charged.

    Attributes:
        time_source: `expected` charges the cost model's time for the step's shape, `measured`
            the measured time less what prompt tokens took; both appear in `info`.
    """

    time_source: Literal["expected", "measured"] = "expected"

    def __post_init__(self) -> None:
        if self.time_source not in ("expected", "measured"):
            raise ConfigError(
                f"time_source is '{self.time_source}'; make it 'expected' or 'measured'."
            )


@dataclass(frozen=True)
class LoadReference:
    """No speculation at one load, measured on this machine.

    Attributes:
        tok_per_s: Output tokens per second.
        step_time_s: Seconds per engine step.
    """

    tok_per_s: float
    step_time_s: float


@dataclass(frozen=True)
class RewardTerms:
    """A step's reward and what it is made of.

    Attributes:
        tokens: Steps of no speculation that the tokens would have taken.
        time: Steps of no speculation that passed.
    """

    tokens: float
    time: float

    @property
    def reward(self) -> float:
        """Steps of no speculation saved."""
        return self.tokens - self.time


def step_reward(num_tokens: int, step_time_s: float, reference: LoadReference) -> RewardTerms:
    """Reward of one decision.

    Args:
        num_tokens: Output tokens since the last decision.
        step_time_s: Seconds charged for them.
        reference: No speculation at this load.

    Example:
        >>> reference = LoadReference(tok_per_s=40.0, step_time_s=0.025)
        >>> step_reward(1, 0.025, reference).reward
        0.0
        >>> round(step_reward(3, 0.035, reference).reward, 9)
        1.6
    """
    return RewardTerms(
        tokens=num_tokens / reference.tok_per_s / reference.step_time_s,
        time=step_time_s / reference.step_time_s,
    )
