"""What each drafter is worth on recorded requests: acceptance, confidence, and cost of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from envs.confidence import Forecasts, area_under_curve, calibration_error, forecasts
from envs.live import DraftersConfig
from envs.ngram_traces import with_ngram_matches
from envs.traces import Traces, concatenate

from ..contract import MODEL_DRAFTERS
from ..cost_model import CostModel, StepShape
from ..errors import ConfigError, TraceError
from .study_data import ALL, StudyTraces

UNKNOWN = "–"
"""Stands for a figure that too few drafts, or none, would be behind."""
NUM_RESAMPLES = 1000
MIN_DRAFTS = 50
"""Drafts behind a figure, at least."""


@dataclass(frozen=True)
class DrafterMeasuresConfig:
    """What `scripts/measure_drafters.py` measures.

    Attributes:
        files: Trace files, or folders of them, recorded with the same settings.
        cost_model: JSON file that prices the steps.
        drafters: The n-gram drafter's match lengths.
        concurrency: Requests in flight at which steps are priced.
        output_dir: Where the report goes.
        seed: Of the resamples behind the intervals.
    """

    files: tuple[str, ...]
    cost_model: str
    drafters: DraftersConfig
    output_dir: str
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("files is empty; name a trace file, or a folder of them.")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError("concurrency must name loads of 1 request or more; give some.")


@dataclass(frozen=True)
class Share:
    """A share of drafts, and its 95 % interval over requests."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Share and interval."""
        if math.isnan(self.value):
            return UNKNOWN
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Position:
    """One position of a drafter's drafts, on held-out requests.

    Attributes:
        drafter: Whose drafts.
        data_set: Kind of the requests, or all.
        draft_position: From 1.
        offered: Output positions at which it drafts so far, of all.
        survival: Of those, the share at which the target accepts all tokens up to this one.
        conditional: The share at which it accepts this token after accepting those before.
        num_drafts: Drafts behind `conditional`.
    """

    drafter: str
    data_set: str
    draft_position: int
    offered: Share
    survival: Share
    conditional: Share
    num_drafts: int


@dataclass(frozen=True)
class Confidence:
    """How well acceptance of one draft position is foretold, on held-out requests.

    Attributes:
        drafter: Whose drafts.
        draft_position: From 1.
        raw_auc: Area under the curve of the drafter's own figure; NaN without one.
        raw_error: Its calibration error; NaN where it is no probability.
        auc: Area under the curve of the online logistic.
        error: Its calibration error.
        forecasts: Behind the figures.
    """

    drafter: str
    draft_position: int
    raw_auc: float
    raw_error: float
    auc: float
    error: float
    forecasts: Forecasts = field(repr=False)


@dataclass(frozen=True)
class MatchLength:
    """Drafts behind which there is a match of some length, on held-out requests."""

    drafter: str
    match_length: int
    num_drafts: int
    first_accepted: float
    mean_accepted_tokens: float


@dataclass(frozen=True)
class StepCost:
    """A step in which every request has a draft of some length, in steps without drafts."""

    drafter: str
    num_draft_tokens: int
    concurrency: int
    cost: float


@dataclass(frozen=True)
class DrafterMeasures:
    """Everything the report shows."""

    positions: list[Position]
    confidences: list[Confidence]
    match_lengths: list[MatchLength]
    step_costs: list[StepCost]


def measure_drafters(config: DrafterMeasuresConfig) -> DrafterMeasures:
    """Read the recorded requests and measure every drafter in them.

    Raises:
        TraceError: If the traces cannot be read, or hold no held-out requests.
        ConfigError: If the cost model cannot be read.
    """
    data = StudyTraces.read(config.files, config.cost_model)
    settings = config.drafters.settings
    traces = with_ngram_matches(
        data.all_aligned(), settings.ngram_min_match, settings.ngram_max_match
    )
    train = [i for i, split in enumerate(traces.splits) if split != "eval"]
    held_out = traces.of_split("eval")
    if not train:
        raise TraceError("The traces hold no training requests; collect both splits.")
    ordered = concatenate([traces.select(train), held_out])
    by_kind = replace(data, traces=traces).held_out()
    return DrafterMeasures(
        positions=[
            position
            for kind, chosen in {**by_kind, ALL: held_out}.items()
            for position in _positions(chosen, kind, config.seed)
        ],
        confidences=list(_confidences(ordered, num_train=len(train))),
        match_lengths=list(_match_lengths(held_out)),
        step_costs=list(_step_costs(held_out, data.cost_model, config.concurrency)),
    )


def _positions(traces: Traces, kind: str, seed: int) -> Iterator[Position]:
    is_step = np.ones(int(traces.starts[-1]), bool)
    is_step[traces.starts[:-1]] = False  # the first token comes with the prompt
    count = traces.num_requests
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), NUM_RESAMPLES)

    def share(hits: np.ndarray, of: np.ndarray) -> Share:
        num_hits, counts = (
            np.add.reduceat((values & is_step).astype(np.int64), traces.starts[:-1])
            for values in (hits & of, of)
        )
        if counts.sum() < MIN_DRAFTS:
            return Share(math.nan, math.nan, math.nan)
        with np.errstate(invalid="ignore"):  # a resample may hold no draft
            ratios = (draws @ num_hits) / (draws @ counts)
        low, high = np.nanquantile(ratios, [0.025, 0.975]).tolist()
        return Share(float(num_hits.sum() / counts.sum()), low, high)

    for drafter, trace in traces.drafters.items():
        drafted, accepted = trace.num_draft_tokens, trace.num_accepted_tokens
        for index in range(traces.header.max_lengths[drafter]):
            offered = drafted > index
            reached = offered & (accepted >= index)
            yield Position(
                drafter,
                kind,
                index + 1,
                offered=share(offered, np.ones_like(offered)),
                survival=share(accepted > index, offered),
                conditional=share(accepted > index, reached),
                num_drafts=int((reached & is_step).sum()),
            )


def _confidences(traces: Traces, num_train: int) -> Iterator[Confidence]:
    """The logistic learns from the training requests first and goes on learning."""
    for drafter, length in traces.header.max_lengths.items():
        for index in range(length):
            every = forecasts(traces, drafter, index)
            held_out = every.of(every.request >= num_train)
            if len(held_out.is_accepted) < MIN_DRAFTS:
                continue
            is_known = not np.isnan(held_out.raw).any()
            is_probability = is_known and held_out.raw_is_probability
            yield Confidence(
                drafter,
                index + 1,
                raw_auc=area_under_curve(held_out.raw, held_out.is_accepted)
                if is_known
                else math.nan,
                raw_error=calibration_error(held_out.raw, held_out.is_accepted)
                if is_probability
                else math.nan,
                auc=area_under_curve(held_out.calibrated, held_out.is_accepted),
                error=calibration_error(held_out.calibrated, held_out.is_accepted),
                forecasts=held_out,
            )


def _match_lengths(traces: Traces) -> Iterator[MatchLength]:
    for drafter, trace in traces.drafters.items():
        if trace.match_length is None:
            continue
        for match_length in range(1, int(trace.match_length.max(initial=0)) + 1):
            chosen = (trace.match_length == match_length) & (trace.num_draft_tokens > 0)
            if num_drafts := int(chosen.sum()):
                accepted = trace.num_accepted_tokens[chosen]
                yield MatchLength(
                    drafter,
                    match_length,
                    num_drafts,
                    float((accepted > 0).mean()),
                    float(accepted.mean()),
                )


def _step_costs(
    traces: Traces, cost_model: CostModel, concurrency: tuple[int, ...]
) -> Iterator[StepCost]:
    """Prices by the cost model, in the middle of a usual request, in steady use of a drafter."""
    prompt_tokens = np.median([len(prompt) for prompt in traces.prompts])
    context = int(prompt_tokens + np.median(traces.num_output_tokens) / 2)
    for drafter, longest in traces.header.max_lengths.items():
        for length in sorted({1, max(1, longest // 2), longest}):
            accepted = np.minimum(traces.drafters[drafter].num_accepted_tokens, length).mean()
            for load in concurrency:
                plain = StepShape(load, num_verified_tokens=load, num_context_tokens=load * context)
                verifying = replace(plain, num_verified_tokens=load * (1 + length))
                if drafter in MODEL_DRAFTERS:
                    drafting = _drafting(load, length, accepted, context)
                    drafting_s = cost_model.expected_s(drafting)
                else:
                    drafting_s = cost_model.look_up_s(verifying)
                step_s = cost_model.expected_s(verifying) + drafting_s
                yield StepCost(drafter, length, load, step_s / cost_model.expected_s(plain))


def _drafting(load: int, length: int, accepted: float, context: int) -> StepShape:
    """The model drafter's own work: its first pass reads what was emitted, the others a token."""
    return StepShape(
        load,
        num_engine_steps=0,
        num_model_drafts=1,
        num_draft_passes=length,
        num_draft_pass_tokens=round(load * (accepted + length)),
        num_draft_context_tokens=load * context,
    )
