"""Step-time model, fitted online to live steps: what a step's shape costs on this machine.

Live times are noisy, above all on shared cores, while the time that an action is charged for
depends on the step's shape only. Around each load (powers of two of the running requests) the
time is close to linear in what was computed, so one small regression per load predicts it; its
weights are not negative, since more work never takes less time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import nnls

from policy.cost_model import StepShape

_MIN_STEPS = 16
"""Steps seen at a load before its predictions are used."""

_MIN_SEEN = 8
"""Steps with some kind of work before a step with that work is predicted."""

_WINDOW = 384
"""Recent steps per load that count: the machine's speed may drift."""

_REFIT_EVERY = 8
"""New steps after which the weights are computed again."""

_MAX_RATIO = 1.5
"""A step that took this many times its expected time was disturbed and does not count."""

_NUM_FITS = 4
"""Fits of which each leaves out what the one before found disturbed."""


class OnlineCostModel:
    """Expected engine time of a step, in seconds.

    Example:
        >>> model = OnlineCostModel()
        >>> for tokens in range(1, 40):
        ...     shape = StepShape(num_running_reqs=1, num_verified_tokens=tokens)
        ...     model.add(shape, step_time_s=0.01 + 0.001 * tokens)
        >>> round(model.expected_s(StepShape(num_running_reqs=1, num_verified_tokens=20)), 3)
        0.03
    """

    def __init__(self) -> None:
        self._loads: dict[int, _LoadModel] = {}

    def add(self, shape: StepShape, step_time_s: float) -> None:
        """Learn from one measured step."""
        self._load_model(shape).add(_features(shape), step_time_s)

    def expected_s(self, shape: StepShape) -> float | None:
        """Expected seconds of a step, or None while its load or its work is hardly known."""
        fit = self._load_model(shape).current_fit()
        features = _features(shape)
        if fit is None or (fit.num_seen[features > 0] < _MIN_SEEN).any():
            return None
        return float(fit.weights @ features)

    def prefill_s(self, shape: StepShape) -> float:
        """The part of the expected time that prompt tokens took; 0 while unknown."""
        fit = self._load_model(shape).current_fit()
        return 0.0 if fit is None else float(fit.weights[-1] * _features(shape)[-1])

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on exactly; JSON-ready."""
        return {str(load): model.state_dict() for load, model in self._loads.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._loads = {int(load): _LoadModel.from_state(model) for load, model in state.items()}

    def _load_model(self, shape: StepShape) -> _LoadModel:
        load = round(np.log2(max(1, shape.num_running_reqs)))
        return self._loads.setdefault(load, _LoadModel())


def _features(shape: StepShape) -> np.ndarray:
    """Regressors of the step time, float64 `[5]`; the prefill's is last.

    Contexts are left out: at one load they drift slowly, as the machine's speed does.
    """
    return np.array(
        [
            shape.num_engine_steps,
            shape.num_verified_tokens / 16,
            shape.num_draft_passes,
            shape.num_draft_pass_tokens / 16,
            shape.num_prefill_tokens / 64,
        ],
        np.float64,
    )


@dataclass(frozen=True)
class _Fit:
    """A regression: seconds per unit of each feature, and how many steps had any of it."""

    weights: np.ndarray
    num_seen: np.ndarray


@dataclass
class _LoadModel:
    """Recent steps at one load and the regression through them."""

    steps: deque[tuple[np.ndarray, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    fit: _Fit | None = None
    num_unfitted: int = 0

    def add(self, features: np.ndarray, step_time_s: float) -> None:
        self.steps.append((features, step_time_s))
        self.num_unfitted += 1

    def current_fit(self) -> _Fit | None:
        """The regression, computed anew when due; None while too few steps are known."""
        if len(self.steps) < _MIN_STEPS:
            return None
        if self.fit is None or self.num_unfitted >= _REFIT_EVERY:
            features = np.stack([row for row, _ in self.steps])
            self.fit = _fit(features, np.array([step_time_s for _, step_time_s in self.steps]))
            self.num_unfitted = 0
        return self.fit

    def state_dict(self) -> dict[str, Any]:
        fit = self.fit
        return {
            "steps": [[*features.tolist(), step_time_s] for features, step_time_s in self.steps],
            "fit": None if fit is None else [fit.weights.tolist(), fit.num_seen.tolist()],
            "num_unfitted": self.num_unfitted,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _LoadModel:
        model = cls(num_unfitted=state["num_unfitted"])
        model.steps.extend((np.array(row[:-1]), row[-1]) for row in state["steps"])
        if state["fit"] is not None:
            model.fit = _Fit(*(np.array(column) for column in state["fit"]))
        return model


def _fit(features: np.ndarray, times_s: np.ndarray) -> _Fit:
    """Least squares of relative errors, in which disturbed steps do not count.

    The first fit takes errors relative to the measured time, so that a disturbed step weighs
    little, whatever its length, while a step that is long by its shape counts like any other.
    """
    scale_s, counts = np.maximum(times_s, 1e-6), np.ones(len(times_s), bool)
    for _ in range(_NUM_FITS):
        relative = features[counts] / scale_s[counts, None]
        weights, _ = nnls(relative, times_s[counts] / scale_s[counts], maxiter=100)
        scale_s = np.maximum(features @ weights, 1e-6)
        counts = times_s <= _MAX_RATIO * scale_s
        if not counts.any():
            break
    return _Fit(weights, (features > 0).sum(axis=0))
