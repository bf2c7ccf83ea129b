"""What a drafter's signals foretell: figures against brute force, and no look at the future."""

from dataclasses import replace

import numpy as np
import pytest

from envs.confidence import area_under_curve, calibration_error, forecasts, reliability

from .synthetic_traces import make_traces, with_suffix

DRAFTERS = ("ngram", "suffix", "eagle3")


def test_area_under_the_curve_counts_pairs():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.integers(0, 5, 40)  # with many ties
        is_accepted = rng.random(40) < rng.random()
        pairs = [
            (mine > theirs) + (mine == theirs) / 2
            for mine in scores[is_accepted]
            for theirs in scores[~is_accepted]
        ]
        expected = np.mean(pairs) if pairs else np.nan
        assert area_under_curve(scores, is_accepted) == pytest.approx(expected, nan_ok=True)


def test_calibration_error_is_the_mean_gap_of_the_bins():
    rng = np.random.default_rng(1)
    probabilities, is_accepted = rng.random(500), rng.random(500) < 0.5
    probabilities[:2] = 0.0, 1.0
    gaps, counts = [], []
    for low in np.arange(10) / 10:
        inside = (probabilities >= low) & (probabilities < low + 0.1)
        inside |= (low == 0.9) & (probabilities == 1)
        gaps.append(abs(probabilities[inside].mean() - is_accepted[inside].mean()))
        counts.append(inside.sum())
    assert sum(counts) == 500
    error = np.dot(gaps, counts) / 500
    assert calibration_error(probabilities, is_accepted) == pytest.approx(error)


def test_bins_without_drafts_are_left_out():
    foretold, seen, counts = reliability(np.array([0.05, 0.95, 0.97]), np.array([0, 1, 0]))
    assert foretold == pytest.approx([0.05, 0.96])
    assert seen == pytest.approx([0, 0.5])
    assert counts.tolist() == [1, 2]
    assert np.isnan(calibration_error(np.zeros(0), np.zeros(0)))


@pytest.mark.parametrize("draft_position", [0, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_draft_that_gets_so_far_is_foretold(drafter, draft_position):
    traces = with_suffix(make_traces())
    trace = traces.drafters[drafter]
    found = forecasts(traces, drafter, draft_position)
    expected = [
        (request, trace.num_accepted_tokens[i] > draft_position)
        for request in range(traces.num_requests)
        for i in range(traces.starts[request], traces.starts[request + 1])
        if trace.num_draft_tokens[i] > draft_position
        and trace.num_accepted_tokens[i] >= draft_position
    ]
    assert list(zip(found.request, found.is_accepted, strict=True)) == expected
    assert ((found.calibrated > 0) & (found.calibrated < 1)).all()
    assert found.raw_is_probability == (drafter != "ngram")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_future_is_not_looked_at(drafter):
    traces = with_suffix(make_traces(num_requests=8))
    before = forecasts(traces, drafter, 0)
    trace = traces.drafters[drafter]
    # Another fate of everything from the middle of the fifth request on.
    middle = int(traces.starts[4] + 10)
    fate = trace.num_accepted_tokens.copy()
    fate[middle:] = np.where(fate[middle:] > 0, 0, np.minimum(1, trace.num_draft_tokens[middle:]))
    changed = {**traces.drafters, drafter: replace(trace, num_accepted_tokens=fate)}
    after = forecasts(replace(traces, drafters=changed), drafter, 0)
    known = np.count_nonzero(trace.num_draft_tokens[: middle + 1])  # it forecasts its own fate too
    np.testing.assert_array_equal(before.calibrated[:known], after.calibrated[:known])
    assert (before.calibrated[known:] != after.calibrated[known:]).any()


def test_a_drafter_that_is_too_sure_is_calibrated():
    """Survival that tells the order but not the probability: AUC stays, the error goes."""
    traces = make_traces(num_requests=150)
    rng = np.random.default_rng(3)
    eagle = traces.drafters["eagle3"]
    true_chance = rng.random(len(eagle.num_draft_tokens))
    accepted = np.where(rng.random(len(true_chance)) < true_chance, 1, 0)
    accepted = np.minimum(accepted, eagle.num_draft_tokens).astype(np.uint8)
    logit = np.log(true_chance / (1 - true_chance))
    told = 1 / (1 + np.exp(-(2 * logit + 1)))
    survival = np.tile(told[:, None], (1, 4)).astype(np.float32)
    drafters = {"eagle3": replace(eagle, num_accepted_tokens=accepted, survival=survival)}
    found = forecasts(replace(traces, drafters=drafters), "eagle3", 0)
    held_out = found.of(found.request >= 75)
    raw_auc = area_under_curve(held_out.raw, held_out.is_accepted)
    auc = area_under_curve(held_out.calibrated, held_out.is_accepted)
    assert auc == pytest.approx(raw_auc, abs=0.01)
    assert raw_auc > 0.8
    assert calibration_error(held_out.raw, held_out.is_accepted) > 0.08
    assert calibration_error(held_out.calibrated, held_out.is_accepted) < 0.03
