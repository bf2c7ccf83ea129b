"""Fitting a `CostModel` to timed live steps, and saying how far it is off.

Between two loads the weights are interpolated, so a step's features count towards the loads on
either side of it (hat functions): one non-negative least-squares problem over all loads. Errors
are relative, and steps that something else on the machine disturbed are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from policy.cost_model import FEATURES, CostModel
from policy.errors import ConfigError

from .step_timings import Timings

_NUM_FITS = 6
"""Fits of which each leaves out what the one before found disturbed."""

_MAX_ERROR = 0.5
"""A step off by more than this share of its expected time was disturbed and does not count."""

_NUM_FOLDS = 6
"""Parts of the cells, each of which is held out once."""

_RIDGE = 0.03
"""Pull of neighbouring loads' weights towards each other, where the steps leave them open."""


@dataclass(frozen=True)
class FitReport:
    """Errors on steps that the fit has not seen, relative to the measured time.

    Attributes:
        num_steps: Held-out steps.
        num_disturbed: Those off by more than half, which only the bias leaves out.
        step_error: Median absolute error of single steps, the machine's noise included.
        visit_error: The same of each visit's median step.
        cell_error: The same of each cell's median step, over all of its visits.
        bias: Relative error of the total time of the undisturbed steps, by load.
    """

    num_steps: int
    num_disturbed: int
    step_error: float
    visit_error: float
    cell_error: float
    bias: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "bias": {str(load): bias for load, bias in self.bias.items()}}

    def __str__(self) -> str:
        """A line for people."""
        bias = ", ".join(f"{bias:+.1%} at {load}" for load, bias in self.bias.items())
        return (
            f"cost model on {self.num_steps} held-out steps: median error {self.cell_error:.1%} "
            f"of a cell, {self.visit_error:.1%} of one visit, {self.step_error:.1%} of one step; "
            f"bias without {self.num_disturbed} disturbed steps {bias} requests"
        )


def fit_cost_model(timings: Timings, loads: Sequence[int]) -> CostModel:
    """Fit the weights to timed steps.

    Args:
        timings: Steps of any shapes.
        loads: Numbers of running requests at which weights are fitted.

    Raises:
        ConfigError: If there are too few steps.
    """
    knots = np.array(sorted(set(loads)), np.float64)
    if len(timings) < 4 * len(knots):
        raise ConfigError(
            f"{len(timings)} timed steps are too few for {len(knots)} loads; time more steps."
        )
    scale = np.maximum(timings.features.max(axis=0), 1)
    hats = np.stack([np.interp(timings.num_running_reqs, knots, row) for row in np.eye(len(knots))])
    columns = hats.T[:, :, None] * (timings.features / scale)[:, None, :]
    design = columns.reshape(len(timings), -1)
    smooth = _differences(len(knots)) * _RIDGE * np.sqrt(len(timings))
    measured = timings.step_time_s
    expected, counts = measured, np.ones(len(timings), bool)
    for _ in range(_NUM_FITS):
        relative = design[counts] / expected[counts, None]
        typical_s = np.median(measured)
        rows = np.concatenate([relative, smooth / typical_s])
        target = np.concatenate([measured[counts] / expected[counts], np.zeros(len(smooth))])
        weights, _ = nnls(rows, target, maxiter=100 * rows.shape[1])
        expected = np.maximum(design @ weights, 1e-6)
        counts = np.abs(measured / expected - 1) <= _MAX_ERROR
        if counts.sum() < len(weights):
            counts[:] = True
    return CostModel(knots, weights.reshape(len(knots), len(FEATURES)) / scale)


def held_out_error(timings: Timings, loads: Sequence[int]) -> FitReport:
    """Leave out some cells after others, fit to the rest, and measure the errors on them.

    Args:
        timings: Steps of any shapes, in cells.
        loads: As in `fit_cost_model`.
    """
    expected = np.zeros(len(timings))
    for fold in range(_NUM_FOLDS):
        held_out = timings.cell % _NUM_FOLDS == fold
        model = fit_cost_model(timings.select(~held_out), loads)
        expected[held_out] = expected_s(model, timings.select(held_out))
    ratio = expected / timings.step_time_s
    calm = np.abs(ratio - 1) <= _MAX_ERROR
    bias = {}
    for load in sorted(set(loads)):
        here = calm & (timings.load == load)
        if here.any():
            measured_s = float(timings.step_time_s[here].sum())
            bias[int(load)] = float(expected[here].sum()) / measured_s - 1
    return FitReport(
        num_steps=len(timings),
        num_disturbed=int((~calm).sum()),
        step_error=float(np.median(np.abs(ratio - 1))),
        visit_error=_median_error(ratio, timings.visit),
        cell_error=_median_error(ratio, timings.cell),
        bias=bias,
    )


def expected_s(model: CostModel, timings: Timings) -> np.ndarray:
    """Expected seconds of every step, float64 `[steps]`."""
    return (model.weights_at(timings.num_running_reqs) * timings.features).sum(axis=1)


def _median_error(ratio: np.ndarray, groups: np.ndarray) -> float:
    """Median over groups of how far each one's median ratio is from 1."""
    medians = [np.median(ratio[groups == group]) for group in np.unique(groups)]
    return float(np.median(np.abs(np.array(medians) - 1)))


def _differences(num_knots: int) -> np.ndarray:
    """Rows that are zero where a feature weighs the same at neighbouring loads."""
    first = np.diff(np.eye(num_knots), axis=0)
    return np.kron(first, np.eye(len(FEATURES)))
