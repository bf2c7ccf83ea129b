"""Ratios of speeds with paired bootstrap intervals over requests and repeats.

Every policy serves the same requests in every repeat. A resample draws repeats with replacement
and, within each, requests; both sides are judged on the very same draw. A request counts with its
tokens and its share of the engine's time (`ServedRequest.engine_s`), so that the whole is the sum
of its requests.

Example:
    Both sides serve two requests of ten tokens; ours takes half the time for each.

    >>> ours = [(np.array([10.0, 10.0]), np.array([1.0, 1.0]))]
    >>> theirs = [(np.array([10.0, 10.0]), np.array([2.0, 2.0]))]
    >>> ratio = speed_ratio(ours, theirs, seed=0)
    >>> print(ratio, ratio.verdict)
    2.00 [2.00, 2.00] ahead
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from envs.served import Served

NUM_RESAMPLES = 1000
CONFIDENCE = 0.95

Work = tuple[np.ndarray, np.ndarray]
"""Tokens and seconds of each request of a run, float64 `[requests]`."""


@dataclass(frozen=True)
class SpeedRatio:
    """How much faster one side is.

    Attributes:
        ratio: Its tokens per second over the other's.
        low: Lower end of the 95 % interval.
        high: Upper end.
    """

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        """The ratio and its interval."""
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def verdict(self) -> Literal["ahead", "tie", "behind"]:
        """What the interval says: one that holds 1 is a tie."""
        if self.low > 1:
            return "ahead"
        return "behind" if self.high < 1 else "tie"


def work_of(served: Served) -> Work:
    """Tokens and seconds of a run, request by request."""
    return (
        np.array([request.num_output_tokens for request in served.requests], np.float64),
        np.array([request.engine_s for request in served.requests], np.float64),
    )


def speed_ratio(ours: Sequence[Work], theirs: Sequence[Work], seed: int) -> SpeedRatio:
    """Compare two sides.

    Args:
        ours: Runs of one side, one per repeat.
        theirs: Runs of the other over the same requests in the same repeats.
        seed: Of the resamples.

    Raises:
        ValueError: If the sides did not serve the same numbers of requests.
    """
    sums = np.zeros((4, NUM_RESAMPLES))
    totals = np.zeros(4)
    runs = [np.stack([*our, *their]) for our, their in zip(ours, theirs, strict=True)]
    for columns, drawn in zip(runs, _draws(seed, tuple(len(run.T) for run in runs)), strict=True):
        sums += columns @ drawn.T
        totals += columns.sum(axis=1)
    ratios = sums[0] / sums[1] * sums[3] / sums[2]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return SpeedRatio(float(totals[0] / totals[1] * totals[3] / totals[2]), float(low), float(high))


@functools.lru_cache(maxsize=4)
def _draws(seed: int, num_requests: tuple[int, ...]) -> list[np.ndarray]:
    """How often each request of each repeat is drawn, int64 `[resamples, requests]` a repeat.

    The same for all pairs of sides that served the same numbers of requests.
    """
    generator = np.random.default_rng(seed)
    num_repeats = len(num_requests)
    shares = np.full(num_repeats, 1 / num_repeats)
    repeats = generator.multinomial(num_repeats, shares, NUM_RESAMPLES)
    return [
        generator.multinomial(repeats[:, index] * count, np.full(count, 1 / count))
        for index, count in enumerate(num_requests)
    ]
