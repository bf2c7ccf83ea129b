"""What a drafter's signals tell of the fate of its drafts, measured on recorded requests.

A small online logistic regression for each drafter and draft position turns the signals into the
probability that the target accepts this token, given that it accepted the tokens before. It learns
from a request once the request has ended, so no probability knows what it foretells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from policy.compiled import compiled

from .traces import DrafterTrace, Traces

_DECAYS = (0.5, 0.9)
"""Of the running means of a request's outcomes."""
_PRIOR_VARIANCE = 10.0
_SMALLEST = 1e-4
"""Probabilities are kept this far from 0 and 1 where their logits are taken."""


@dataclass(frozen=True)
class Forecasts:
    """What was foretold of one draft position, and what came.

    Attributes:
        is_accepted: Whether the target emitted the token, bool `[drafts]`; drafts whose earlier
            tokens were rejected are left out.
        raw: The drafter's own figure, higher where it is surer, float64 `[drafts]`: conditional
            survival, or the match length in tokens; NaN where it has none.
        raw_is_probability: Whether it is a probability.
        calibrated: Probability of the online logistic, float64 `[drafts]`.
        request: Request of each draft, int64 `[drafts]`.
    """

    is_accepted: np.ndarray
    raw: np.ndarray
    raw_is_probability: bool
    calibrated: np.ndarray
    request: np.ndarray

    def of(self, chosen: np.ndarray) -> Forecasts:
        """Some of the drafts, by a bool mask."""
        return Forecasts(
            self.is_accepted[chosen],
            self.raw[chosen],
            self.raw_is_probability,
            self.calibrated[chosen],
            self.request[chosen],
        )


def forecasts(traces: Traces, drafter: str, draft_position: int) -> Forecasts:
    """Foretell one position of every draft, learning from request to request.

    Args:
        traces: Requests in the order in which they are learnt from.
        drafter: Whose drafts.
        draft_position: Position in the draft, from 0.
    """
    trace = traces.drafters[drafter]
    request = np.repeat(np.arange(traces.num_requests), traces.num_output_tokens)
    output_position = np.arange(len(request)) - traces.starts[request]
    reached = (trace.num_draft_tokens > draft_position) & (
        trace.num_accepted_tokens >= draft_position
    )
    raw = _raw_confidence(trace, draft_position)
    signals = _signals(trace, request, output_position, raw, draft_position)[reached]
    is_accepted = trace.num_accepted_tokens[reached] > draft_position
    bounds = np.searchsorted(request[reached], np.arange(traces.num_requests + 1))
    return Forecasts(
        is_accepted=is_accepted,
        raw=raw[reached],
        raw_is_probability=trace.survival is not None,
        calibrated=_learn_along(signals, is_accepted, bounds, _PRIOR_VARIANCE),
        request=request[reached],
    )


def area_under_curve(scores: np.ndarray, is_accepted: np.ndarray) -> float:
    """Chance that an accepted token scores higher than a rejected one; NaN without both."""
    num_accepted = int(is_accepted.sum())
    num_rejected = len(is_accepted) - num_accepted
    if not num_accepted or not num_rejected:
        return float("nan")
    ranks = rankdata(scores)[is_accepted].sum()
    return float((ranks - num_accepted * (num_accepted + 1) / 2) / (num_accepted * num_rejected))


def reliability(
    probabilities: np.ndarray, is_accepted: np.ndarray, num_bins: int = 10
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare foretold and seen acceptance, in bins of equal width.

    Args:
        probabilities: Foretold, in [0, 1].
        is_accepted: What came.
        num_bins: Bins between 0 and 1.

    Returns:
        Mean probability, share accepted, and number of drafts of each bin that has any.
    """
    bins = np.minimum((probabilities * num_bins).astype(int), num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    filled = counts > 0
    foretold = np.bincount(bins, probabilities, num_bins)[filled] / counts[filled]
    seen = np.bincount(bins, is_accepted, num_bins)[filled] / counts[filled]
    return foretold, seen, counts[filled]


def calibration_error(probabilities: np.ndarray, is_accepted: np.ndarray) -> float:
    """Mean gap between foretold and seen acceptance over the bins, weighted by drafts (ECE)."""
    foretold, seen, counts = reliability(probabilities, is_accepted)
    if not len(counts):
        return float("nan")
    return float(np.average(np.abs(foretold - seen), weights=counts))


def _raw_confidence(trace: DrafterTrace, draft_position: int) -> np.ndarray:
    """What the drafter itself says of a position, given the ones before it."""
    if trace.survival is None:
        assert trace.match_length is not None
        return trace.match_length.astype(np.float64)
    survival = trace.survival.astype(np.float64)
    if draft_position == 0:
        return survival[:, 0]
    before = np.maximum(survival[:, draft_position - 1], _SMALLEST)
    return np.minimum(survival[:, draft_position] / before, 1.0)


def _signals(
    trace: DrafterTrace,
    request: np.ndarray,
    output_position: np.ndarray,
    raw: np.ndarray,
    draft_position: int,
) -> np.ndarray:
    """Everything known when the draft is made, float64 `[positions, signals]`; unknown is 0."""
    drafted, accepted = trace.num_draft_tokens, trace.num_accepted_tokens
    columns = [np.ones(len(request)), np.log1p(output_position)]
    columns += [_recent_acceptance(drafted, accepted, request, decay) for decay in _DECAYS]
    if trace.match_length is not None:
        columns += [np.log2(1.0 + trace.match_length), np.log2(1.0 + drafted)]
    if trace.agreement is not None:
        columns.append(_logit(trace.agreement.astype(np.float64)))
    if trace.survival is not None:
        columns.append(_logit(raw))
    if trace.margin is not None:
        columns.append(np.log1p(np.maximum(trace.margin[:, draft_position], 0)))
    return np.nan_to_num(np.stack(columns, axis=1))


def _logit(probability: np.ndarray) -> np.ndarray:
    within = np.clip(probability, _SMALLEST, 1 - _SMALLEST)
    return np.log(within / (1 - within))


@compiled
def _recent_acceptance(
    num_draft_tokens: np.ndarray, num_accepted_tokens: np.ndarray, request: np.ndarray, decay: float
) -> np.ndarray:  # pragma: no cover - compiled
    """Running mean, before each position, of whether the request's drafts began well."""
    means = np.empty(len(request))
    mean = 0.5
    for i in range(len(request)):
        if i == 0 or request[i] != request[i - 1]:
            mean = 0.5
        means[i] = mean
        if num_draft_tokens[i]:
            mean = decay * mean + (1 - decay) * (num_accepted_tokens[i] > 0)
    return means


@compiled
def _learn_along(
    signals: np.ndarray, is_accepted: np.ndarray, bounds: np.ndarray, prior_variance: float
) -> np.ndarray:  # pragma: no cover - compiled
    """Foretell each request, then learn from it (logistic regression by an extended Kalman filter).

    Args:
        signals: float64 `[drafts, signals]`.
        is_accepted: bool `[drafts]`.
        bounds: First draft of each request and, last, their number, int64 `[requests + 1]`.
        prior_variance: Of the weights, around 0.

    Returns:
        Probabilities, float64 `[drafts]`.
    """
    num_drafts, num_signals = signals.shape
    foretold = np.empty(num_drafts)
    weights = np.zeros(num_signals)
    covariance = np.eye(num_signals) * prior_variance
    for request in range(len(bounds) - 1):
        first, last = bounds[request], bounds[request + 1]
        for i in range(first, last):
            foretold[i] = 1 / (1 + np.exp(-signals[i] @ weights))
        for i in range(first, last):
            probability = 1 / (1 + np.exp(-signals[i] @ weights))
            variance = max(probability * (1 - probability), 1e-6)
            direction = covariance @ signals[i]
            gain = direction / (1 + variance * (signals[i] @ direction))
            covariance -= variance * np.outer(direction, gain)
            weights += gain * (is_accepted[i] - probability)
    return foretold
