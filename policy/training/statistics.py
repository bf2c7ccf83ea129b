"""The interval of a ratio measured in paired repeats, and what it says.

The 95 % interval is Student's, on the logarithms of the repeats' ratios: what changes from
repeat to repeat for both sides alike (the requests, a slow hour of the machine) cancels.

Example:
    >>> low, high = ratio_interval([0.09, 0.10, 0.11])
    >>> f"{low:.3f} {high:.3f} {verdict(low, high)}"
    '1.078 1.133 ahead'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .measurement import Pair, tok_per_s

CONFIDENCE = 0.95

Verdict = Literal["ahead", "tie", "behind", "undecided"]


def student_t_coverage(angle: float, num_degrees: int) -> float:
    """Probability that a Student-t variate lies within `±sqrt(num_degrees) * tan(angle)`.

    Exact for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Args:
        angle: In radians, 0 to pi / 2.
        num_degrees: Degrees of freedom, at least 1.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = num_degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for index in range(1, num_degrees // 2 + 1):
        total += term
        term *= cosine**2 * (2 * index - 1 + odd) / (2 * index + odd)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def student_t_quantile(num_degrees: int) -> float:
    """Half-width of the two-sided 95 % Student-t interval, in standard errors.

    Args:
        num_degrees: Degrees of freedom, at least 1.

    Example:
        >>> round(student_t_quantile(2), 3)
        4.303
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halvings: past the precision of a float
        middle = (low + high) / 2
        if student_t_coverage(middle, num_degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.sqrt(num_degrees) * math.tan(low)


def ratio_interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a ratio.

    Args:
        log_ratios: Natural logarithm of the ratio in each repeat.

    Returns:
        Lower and upper end; NaN both where there are fewer than two repeats.
    """
    count = len(log_ratios)
    if count < 2:
        return math.nan, math.nan
    mean = math.fsum(log_ratios) / count
    variance = math.fsum((value - mean) ** 2 for value in log_ratios) / (count - 1)
    half_width = student_t_quantile(count - 1) * math.sqrt(variance / count)
    return math.exp(mean - half_width), math.exp(mean + half_width)


def verdict(ci_low: float, ci_high: float) -> Verdict:
    """What an interval says: `tie` if it contains 1, `undecided` if there is none.

    Args:
        ci_low: Lower end of the ratio's interval.
        ci_high: Upper end.
    """
    if math.isnan(ci_low) or math.isnan(ci_high):
        return "undecided"
    if ci_low > 1:
        return "ahead"
    return "behind" if ci_high < 1 else "tie"


@dataclass(frozen=True)
class Ratio:
    """Speed of one setting over another's.

    Attributes:
        concurrency: Requests in flight; None for the geometric mean over all.
        against: The other setting.
        ratio: Tokens per second over the other's.
        ci_low: Lower end of the ratio's 95 % interval; NaN with one repeat.
        ci_high: Upper end.
        num_repeats: Paired repeats.
    """

    concurrency: int | None
    against: str
    ratio: float
    ci_low: float
    ci_high: float
    num_repeats: int

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        return verdict(self.ci_low, self.ci_high)


def log_ratios(pairs: Mapping[int, Pair]) -> dict[int, float]:
    """Natural logarithm of the speed ratio of each pair, by repeat."""
    return {
        repeat: math.log(ours.tok_per_s / theirs.tok_per_s)
        for repeat, (ours, theirs) in pairs.items()
    }


def total_ratio(pairs: Mapping[int, Pair]) -> float:
    """Total tokens per second of the first sides over that of the second sides."""
    ours, theirs = zip(*pairs.values(), strict=True)
    return tok_per_s(ours) / tok_per_s(theirs)
