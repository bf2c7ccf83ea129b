"""Paired bootstrap of speed ratios."""

from __future__ import annotations

import numpy as np
import pytest

from policy.training.bootstrap import SpeedRatio, speed_ratio


def runs(seed, num_repeats=4, num_requests=30, factor=1.0, noise=0.2):
    """Requests of the same lengths for every seed, that take `factor` times as long."""
    lengths, times = np.random.default_rng(0), np.random.default_rng(seed)
    return [
        (
            lengths.integers(10, 100, num_requests).astype(float),
            factor * times.lognormal(0, noise, num_requests),
        )
        for _ in range(num_repeats)
    ]


def test_the_ratio_is_of_the_totals():
    ours, theirs = runs(1), runs(2, factor=1.5)
    tokens, seconds = (sum(run[i].sum() for run in ours) for i in (0, 1))
    other_tokens, other_seconds = (sum(run[i].sum() for run in theirs) for i in (0, 1))
    ratio = speed_ratio(ours, theirs, seed=0)
    assert ratio.ratio == pytest.approx(tokens / seconds / (other_tokens / other_seconds))
    assert ratio.low < ratio.ratio < ratio.high
    assert ratio.verdict == "ahead"


def test_a_side_against_itself_is_exactly_a_tie():
    ratio = speed_ratio(runs(1), runs(1), seed=0)
    assert (ratio.ratio, ratio.low, ratio.high, ratio.verdict) == (1, 1, 1, "tie")


def test_swapping_the_sides_swaps_the_verdict():
    slow, fast = runs(1, factor=2.0), runs(2)
    assert speed_ratio(slow, fast, 0).verdict == "behind"
    assert speed_ratio(fast, slow, 0).verdict == "ahead"


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    held = [
        (ratio := speed_ratio(runs(10 + i), runs(500 + i), seed=i)).low <= 1 <= ratio.high
        for i in range(200)
    ]
    assert 0.88 <= np.mean(held) <= 0.995


def test_repeats_that_differ_widen_the_interval():
    steady = speed_ratio(runs(1), runs(2), 0)
    drifting = [(tokens, seconds * (1 + i)) for i, (tokens, seconds) in enumerate(runs(1))]
    wide = speed_ratio(drifting, runs(2), 0)
    assert np.log(wide.high / wide.low) > 2 * np.log(steady.high / steady.low)


def test_other_requests_are_no_pair():
    with pytest.raises(ValueError, match="same shape"):
        speed_ratio(runs(1, num_requests=3), runs(1, num_requests=4), 0)
    with pytest.raises(ValueError, match="argument 2"):
        speed_ratio(runs(1, num_repeats=3), runs(1, num_repeats=2), 0)


def test_it_prints_as_a_cell_of_a_table():
    assert str(SpeedRatio(1.234, 1.1, 1.375)) == "1.23 [1.10, 1.38]"
