"""The cost model's fit: known weights come back from noisy, disturbed steps."""

from __future__ import annotations

import numpy as np
import pytest

from envs.cost_fit import expected_s, fit_cost_model, held_out_error
from envs.step_timings import Timings, read_timings, write_timings
from policy.cost_model import FEATURES, CostModel
from policy.errors import ConfigError, TraceError

LOADS = (1, 4, 16)
WEIGHTS_S = {
    "num_engine_steps": 0.03,
    "num_verified_tokens": 0.001,
    "num_context_tokens": 2e-6,
    "num_prefill_tokens": 0.002,
    "num_draft_passes": 0.004,
    "num_draft_pass_tokens": 0.0003,
}


def true_model():
    """Steps get dearer with the load, tokens cheaper."""
    row = np.array([WEIGHTS_S.get(name, 0.0) for name in FEATURES])
    rows = np.stack([row * (1 + 0.1 * i) for i in range(len(LOADS))])
    return CostModel(np.array(LOADS, np.float64), rows)


def make_timings(noise, disturbed, seed=0, num_cells=120, steps_per_cell=10):
    rng = np.random.default_rng(seed)
    cell = np.repeat(np.arange(num_cells), steps_per_cell).astype(np.int32)
    load = rng.choice(LOADS, num_cells)[cell].astype(np.int32)
    running = np.maximum(1, load - rng.integers(0, 2, len(cell))).astype(np.int32)
    passes = rng.integers(0, 5, num_cells)[cell]
    features = np.zeros((len(cell), len(FEATURES)))
    for name, values in {
        "num_engine_steps": np.ones(len(cell)),
        "num_verified_tokens": running * (1 + passes),
        "num_context_tokens": running * rng.integers(50, 700, num_cells)[cell],
        "num_prefill_tokens": np.where(rng.random(len(cell)) < 0.1, 64, 0),
        "num_draft_passes": passes,
        "num_draft_pass_tokens": passes * running + np.where(passes, running, 0),
    }.items():
        features[:, FEATURES.index(name)] = values
    visit = (2 * cell + np.arange(len(cell)) % 2).astype(np.int32)
    timings = Timings(cell, visit, load, running, features, np.zeros(len(cell)))
    seconds = expected_s(true_model(), timings) * np.exp(noise * rng.normal(size=len(cell)))
    seconds[rng.random(len(cell)) < disturbed] *= 3
    return Timings(cell, visit, load, running, features, seconds)


def test_expected_seconds_are_the_cost_models():
    timings, model = make_timings(0, 0), true_model()
    weights = model.weights_at(timings.num_running_reqs[:1])[0]
    assert expected_s(model, timings)[0] == pytest.approx(float(weights @ timings.features[0]))


def test_known_weights_come_back_from_noisy_and_disturbed_steps():
    timings = make_timings(noise=0.05, disturbed=0.1)
    fitted, truth = fit_cost_model(timings, LOADS), true_model()
    undisturbed = make_timings(noise=0, disturbed=0, seed=1)
    ratio = expected_s(fitted, undisturbed) / expected_s(truth, undisturbed)
    assert np.median(np.abs(ratio - 1)) < 0.01
    assert np.abs(ratio - 1).max() < 0.06
    by_load = [ratio[undisturbed.load == load].mean() for load in LOADS]
    assert np.abs(np.array(by_load) - 1).max() < 0.01


def test_more_work_never_takes_less_time():
    fitted = fit_cost_model(make_timings(noise=0.3, disturbed=0.2), LOADS)
    assert (fitted.weights_s >= 0).all()


def test_the_held_out_error_is_that_of_the_noise():
    report = held_out_error(make_timings(noise=0.05, disturbed=0), LOADS)
    assert report.step_error == pytest.approx(0.05 * 0.6745, rel=0.15)  # median of a normal
    assert report.cell_error < report.visit_error < report.step_error
    assert report.cell_error < 0.02
    assert all(abs(bias) < 0.01 for bias in report.bias.values())
    assert set(report.as_dict()["bias"]) == {"1", "4", "16"}
    assert "held-out steps" in str(report)
    assert f"without {report.num_disturbed} disturbed steps" in str(report)


def test_the_held_out_error_of_two_cells_is_the_one_worked_out_by_hand():
    """Each cell is predicted to take what the other takes: 1.25 s for 1 s, and 1 s for 1.25 s.

    The first cell's last step was disturbed; it counts in every median, and in no bias.
    """
    cell = np.repeat([0, 1], [9, 16]).astype(np.int32)
    visit = np.repeat([0, 1, 2], [9, 8, 8]).astype(np.int32)
    features = np.zeros((25, len(FEATURES)))
    features[:, FEATURES.index("num_engine_steps")] = 1
    seconds = np.repeat([1.0, 3.0, 1.25], [8, 1, 16])
    ones = np.ones(25, np.int32)
    report = held_out_error(Timings(cell, visit, ones, ones, features, seconds), (1,))
    assert (report.num_steps, report.num_disturbed) == (25, 1)
    assert report.step_error == pytest.approx(0.2)  # 16 of 0.2, 8 of 0.25, one of 0.58
    assert report.visit_error == pytest.approx(0.2)  # 0.25, 0.2, 0.2
    assert report.cell_error == pytest.approx((0.25 + 0.2) / 2)
    assert report.bias == {1: pytest.approx((8 * 1.25 + 16 * 1) / (8 * 1 + 16 * 1.25) - 1)}


def test_a_biased_load_shows():
    """A load whose every other cell was timed on a slower machine cannot be fitted."""
    timings = make_timings(noise=0.02, disturbed=0)
    slow = (timings.load == 4) & (timings.cell % 2 == 1)
    timings.step_time_s[slow] *= 1.2
    calm = held_out_error(make_timings(noise=0.02, disturbed=0), LOADS)
    assert held_out_error(timings, LOADS).step_error > 1.3 * calm.step_error


def test_too_few_steps_are_refused():
    timings = make_timings(0, 0)
    with pytest.raises(ConfigError, match="too few for 3 loads; time more"):
        fit_cost_model(timings.select(np.arange(10)), LOADS)


def test_timings_survive_their_file_and_a_cut_off_one_is_refused(tmp_path):
    path, timings = tmp_path / "a.timings.parquet", make_timings(0.1, 0.1)
    write_timings(timings, path)
    read = read_timings(path)
    for name, values in vars(timings).items():
        np.testing.assert_array_equal(getattr(read, name), values)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TraceError, match="remove it and time anew"):
        read_timings(path)
    with pytest.raises(TraceError, match="no whole file of timings"):
        read_timings(tmp_path / "missing.parquet")
    with pytest.raises(TraceError, match="No file of timings was named"):
        read_timings()


def test_several_files_of_timings_are_read_as_one(tmp_path):
    timings = make_timings(0.1, 0.1)
    halves = timings.select(timings.cell < 50), timings.select(timings.cell >= 50)
    paths = [tmp_path / f"{index}.parquet" for index in range(2)]
    for half, path in zip(halves, paths, strict=True):
        write_timings(half, path)
    read = read_timings(*paths)
    for name, values in vars(timings).items():
        np.testing.assert_array_equal(getattr(read, name), values)
