"""Acceptance by position in the output, by request and by data set, from traces.

Acceptance is told as tokens per step: what a step would emit, accepted and bonus token, if the
drafter drafted the longest recorded draft at this position (`mean_acceptance_length` in vLLM's
words, averaged over all positions, not only those at which some run of steps would have stopped).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envs.traces import Traces

NUM_BINS = 32
"""Stretches of output positions at most."""


@dataclass(frozen=True)
class AcceptedStretch:
    """One request over a stretch of its output.

    Attributes:
        data_set: Kind of the request.
        request_id: Its name.
        drafter: Whose drafts.
        first_position: Output position at which the stretch begins, in tokens.
        num_positions: Positions in it.
        tokens_per_step: Mean tokens of a step, accepted and bonus.
    """

    data_set: str
    request_id: str
    drafter: str
    first_position: int
    num_positions: int
    tokens_per_step: float


@dataclass(frozen=True)
class Spread:
    """How requests of a data set differ.

    Attributes:
        data_set: Kind of the requests.
        drafter: Whose drafts.
        num_requests: Requests.
        p5, p25, median, p75, p95: Percentiles over requests of their mean tokens per step.
    """

    data_set: str
    drafter: str
    num_requests: int
    p5: float
    p25: float
    median: float
    p75: float
    p95: float


def stretches(traces: Traces) -> list[AcceptedStretch]:
    """Every request's stretches; the first token, which comes with the prompt, is left out.

    Stretches are of one width, so that the 95th percentile of the outputs has `NUM_BINS` of them.
    """
    width = max(1, math.ceil(np.percentile(traces.num_output_tokens, 95) / NUM_BINS))
    return list(_stretches(traces, width))


def _stretches(traces: Traces, width: int) -> Iterator[AcceptedStretch]:
    for request, name in enumerate(traces.request_ids):
        span = slice(traces.starts[request], traces.starts[request + 1])
        for drafter, trace in traces.drafters.items():
            tokens = trace.num_accepted_tokens[span].astype(np.float64) + 1
            for first in range(0, min(len(tokens), NUM_BINS * width), width):
                part = tokens[max(first, 1) : first + width]
                if len(part):
                    yield AcceptedStretch(
                        traces.kinds[request], name, drafter, first, len(part), float(part.mean())
                    )


def request_means(traces: Traces) -> dict[tuple[str, str], np.ndarray]:
    """Mean tokens per step of each request of two tokens or more, by data set and drafter."""
    starts = traces.starts[:-1] + 1  # the first token comes with the prompt
    counts = traces.num_output_tokens - 1
    kinds, long_enough = np.array(traces.kinds), counts > 0
    means = {}
    for drafter, trace in traces.drafters.items():
        sums = np.concatenate([[0], np.cumsum(trace.num_accepted_tokens, dtype=np.int64)])
        accepted = sums[traces.starts[1:]] - sums[np.minimum(starts, traces.starts[1:])]
        for kind in sorted(set(traces.kinds)):
            chosen = (kinds == kind) & long_enough
            if chosen.any():
                means[kind, drafter] = 1 + accepted[chosen] / counts[chosen]
    return means


def spreads(means: Mapping[tuple[str, str], np.ndarray]) -> list[Spread]:
    """Percentiles over the requests of each data set and drafter."""
    return [
        Spread(kind, drafter, len(values), *np.percentile(values, [5, 25, 50, 75, 95]).tolist())
        for (kind, drafter), values in means.items()
    ]


def curve(
    rows: Sequence[AcceptedStretch], data_set: str, drafter: str, min_requests: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per step along the output, over all requests that reach a stretch.

    Args:
        rows: Result of `stretches`.
        data_set: Kind of the requests.
        drafter: Whose drafts.
        min_requests: Requests of a stretch that is kept, at least.

    Returns:
        First position of each stretch, and the mean, weighted by positions.
    """
    own = [row for row in rows if row.data_set == data_set and row.drafter == drafter]
    firsts, means = [], []
    for first in sorted({row.first_position for row in own}):
        part = [row for row in own if row.first_position == first]
        if len(part) >= min_requests:
            total = sum(row.num_positions for row in part)
            firsts.append(first)
            means.append(sum(row.tokens_per_step * row.num_positions for row in part) / total)
    return np.array(firsts), np.array(means)
