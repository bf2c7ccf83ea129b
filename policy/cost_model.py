"""Cost model: what a step's shape costs, in seconds, linear in the work at each load.

Weights are given at a few numbers of running requests and interpolated between them; none is
negative, so more tokens never take less time. They are fitted to timed live steps
(`envs.cost_fit`), read from a file, or given, as for the paper's H100.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .contract import Contract
from .errors import ConfigError
from .step import StepRecord


@dataclass(frozen=True)
class StepShape:
    """What the engine computed between two decisions.

    Attributes:
        num_running_reqs: Requests in the (last) engine step.
        num_engine_steps: Engine steps, prefill-only ones included.
        num_verified_tokens: Tokens of the target that were not prompt tokens.
        num_context_tokens: Context that the target attended to, summed over the requests.
        num_prefill_tokens: Prompt tokens of the target.
        num_model_drafts: Times the model drafter was asked for drafts.
        num_draft_passes: Forward passes of the model drafter.
        num_draft_pass_tokens: Tokens in those passes.
        num_draft_context_tokens: Context of the requests it drafted for.
    """

    num_running_reqs: int
    num_engine_steps: int = 1
    num_verified_tokens: int = 0
    num_context_tokens: int = 0
    num_prefill_tokens: int = 0
    num_model_drafts: int = 0
    num_draft_passes: int = 0
    num_draft_pass_tokens: int = 0
    num_draft_context_tokens: int = 0

    def features(self) -> np.ndarray:
        """The work of the step in the order of `FEATURES`, float64."""
        return np.array([getattr(self, name) for name in FEATURES], np.float64)

    def followed_by(self, later: StepShape) -> StepShape:
        """This work and some later work, under the later load."""
        work = {name: getattr(self, name) + getattr(later, name) for name in FEATURES}
        return StepShape(num_running_reqs=later.num_running_reqs, **work)


NO_WORK = StepShape(num_running_reqs=0, num_engine_steps=0)

FEATURES = tuple(field.name for field in fields(StepShape))[1:]
"""Regressors of the step time; `CostModel.weights_s` has one column for each."""

STEPS = FEATURES.index("num_engine_steps")
VERIFIED = FEATURES.index("num_verified_tokens")
CONTEXT = FEATURES.index("num_context_tokens")
PREFILL = FEATURES.index("num_prefill_tokens")
MODEL_DRAFTS = FEATURES.index("num_model_drafts")
PASSES = FEATURES.index("num_draft_passes")
PASS_TOKENS = FEATURES.index("num_draft_pass_tokens")
DRAFT_CONTEXT = FEATURES.index("num_draft_context_tokens")
"""Columns of single features, for compiled code."""


def shape_of(record: StepRecord, contract: Contract) -> StepShape:
    """What one engine step computed.

    Args:
        record: The step.
        contract: Names the drafters of the record.
    """
    model_drafters = [contract.drafters.index(drafter) for drafter in contract.model_drafters]
    drafted = np.isin(record.drafter, model_drafters)
    return StepShape(
        num_running_reqs=record.num_running_reqs,
        num_verified_tokens=record.num_scheduled_tokens - record.num_prefill_tokens,
        num_context_tokens=int(record.num_context_tokens.sum()),
        num_prefill_tokens=record.num_prefill_tokens,
        num_model_drafts=int(drafted.any()),
        num_draft_passes=record.num_draft_passes,
        num_draft_pass_tokens=record.num_draft_pass_tokens,
        num_draft_context_tokens=int(record.num_context_tokens[drafted].sum()),
    )


@dataclass(frozen=True)
class CostModel:
    """Expected engine time of a step.

    Attributes:
        loads: Numbers of running requests at which weights are given, ascending, float64.
        weights_s: Seconds per unit of each feature, float64 `[loads, FEATURES]`; between two
            loads they are interpolated, beyond the ends the last ones hold.
        token_draft_share: Share of the target's time (steps, verified and context tokens) that
            looking up drafts adds to a step in which a token drafter drafts.

    Raises:
        ConfigError: If a weight is negative or the shapes do not fit.

    Example:
        >>> model = CostModel.from_weights({"num_engine_steps": 0.01, "num_verified_tokens": 0.001})
        >>> round(model.expected_s(StepShape(num_running_reqs=4, num_verified_tokens=20)), 6)
        0.03
    """

    loads: np.ndarray
    weights_s: np.ndarray
    token_draft_share: float = 0.0

    def __post_init__(self) -> None:
        if self.weights_s.shape != (*self.loads.shape, len(FEATURES)) or not self.loads.size:
            raise ConfigError(
                f"A cost model needs {len(FEATURES)} weights at each of its loads, not "
                f"{list(self.weights_s.shape)}; fit it anew with scripts/collect.py."
            )
        if not (np.diff(self.loads) > 0).all() or not self.loads[0] >= 1:
            raise ConfigError("A cost model's loads must ascend from 1 or more; sort them.")
        if not ((self.weights_s >= 0) & np.isfinite(self.weights_s)).all():
            raise ConfigError(
                "A cost model has a negative weight: more work would take less time; fit it anew."
            )
        if not 0 <= self.token_draft_share < np.inf:
            raise ConfigError(
                f"A cost model's token_draft_share is {self.token_draft_share}; make it 0 or more."
            )

    @classmethod
    def from_weights(
        cls, weights_s: Mapping[str, float], token_draft_share: float = 0.0
    ) -> CostModel:
        """The same given constants at every load.

        Args:
            weights_s: Seconds per unit of a feature; features left out cost nothing.
            token_draft_share: See the class.

        Raises:
            ConfigError: If a feature is unknown.
        """
        if unknown := sorted(set(weights_s) - set(FEATURES)):
            raise ConfigError(
                f"Unknown cost feature '{unknown[0]}'; choose from {', '.join(FEATURES)}."
            )
        row = [weights_s.get(name, 0.0) for name in FEATURES]
        return cls(np.ones(1), np.array([row], np.float64), token_draft_share)

    def weights_at(self, num_running_reqs: Sequence[int] | np.ndarray) -> np.ndarray:
        """Weights at some loads, float64 `[loads, FEATURES]`."""
        columns = [np.interp(num_running_reqs, self.loads, column) for column in self.weights_s.T]
        return np.stack(columns, axis=-1)

    def expected_s(self, shape: StepShape) -> float:
        """Expected seconds of a step, token drafters' look-ups left out."""
        return float(self.weights_at([shape.num_running_reqs])[0] @ shape.features())

    def prefill_s(self, shape: StepShape) -> float:
        """The part of it that prompt tokens take."""
        weight_s = self.weights_at([shape.num_running_reqs])[0, PREFILL]
        return float(weight_s * shape.num_prefill_tokens)

    def look_up_s(self, shape: StepShape) -> float:
        """What a step takes more if a token drafter drafts in it."""
        target = StepShape(
            shape.num_running_reqs,
            num_engine_steps=shape.num_engine_steps,
            num_verified_tokens=shape.num_verified_tokens,
            num_context_tokens=shape.num_context_tokens,
        )
        return self.token_draft_share * self.expected_s(target)

    def add(self, shape: StepShape, step_time_s: float) -> None:
        """Given constants do not learn; `OnlineCostModel` does."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "features": list(FEATURES),
            "loads": self.loads.tolist(),
            "weights_s": self.weights_s.tolist(),
            "token_draft_share": self.token_draft_share,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Given constants have no state of their own."""


def read_cost_model(path: Path) -> CostModel:
    """Read the `cost_model` section of a JSON file that `scripts/collect.py` wrote.

    Raises:
        ConfigError: If the file is missing, damaged, or of other features.
    """
    try:
        section = json.loads(path.read_text())["cost_model"]
        features = tuple(section["features"])
        model = (
            np.array(section["loads"], np.float64),
            np.array(section["weights_s"], np.float64),
            float(section["token_draft_share"]),
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no cost model {path}; make one with scripts/collect.py."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no cost model of draftgym; make one with scripts/collect.py."
        ) from error
    if features != FEATURES:
        raise ConfigError(
            f"{path} prices other work ({', '.join(features)}) than this draftgym knows; fit it "
            "anew with scripts/collect.py."
        )
    return CostModel(*model)
