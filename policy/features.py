"""The feature code: one compiled function from step rows to observation rows.

`ObservationBuilder` calls it for every step of a live engine, the simulator for every step of
thousands of replayed ones: there is no second version that could see something else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import compiled
from .contract import (
    MODEL_DRAFTERS,
    NUM_ACCEPTANCE_POSITIONS,
    SURVIVAL_DRAFTERS,
    Contract,
)

DECAY = 0.98
"""Weight that past samples keep when a step brings a newer one: about 50 such steps of memory."""

NEVER = 1024
"""Steps since a draft that never was: beyond the field's upper bound."""

_PRIOR_RATE = 0.5
"""Acceptance assumed, with the weight of one draft, before anything was verified."""

_CONTEXT, _TEMPERATURE, _FIRST_DRAFTER = 3, 5, 6
"""Fields of the load that a request has of its own, and the first field behind the load."""
_NUM_BATCH_ONLY = 4
"""The other fields of the load."""

ACCEPTANCE_POSITIONS = _LENGTH = NUM_ACCEPTANCE_POSITIONS
"""Samples of a drafter: acceptance by position, acceptance length, and two of its own kind."""
_NUM_SAMPLES = _LENGTH + 3
COUNTERFACTUAL = _TOP1 = _LENGTH + 1
_EXPECTED = _LENGTH + 2


class Layout(NamedTuple):
    """What the feature code needs of a contract.

    Attributes:
        is_model: Whether each proposer of the contract runs a model, uint8 `[proposers]`.
        tells_survival: Whether it tells how likely its tokens survive, uint8 `[proposers]`.
        prior: Samples assumed before the first one, float32 `[proposers, samples]`.
        is_log2: Whether a field is a logarithm, uint8 `[fields]`.
        low: Lower bounds, float32 `[fields]`.
        high: Upper bounds, float32 `[fields]`.
    """

    is_model: np.ndarray
    tells_survival: np.ndarray
    prior: np.ndarray
    is_log2: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, contract: Contract) -> Layout:
        """The layout of a contract."""
        is_model = [drafter in MODEL_DRAFTERS for drafter in contract.proposers]
        tells_survival = [drafter in SURVIVAL_DRAFTERS for drafter in contract.proposers]
        prior = np.full((len(is_model), _NUM_SAMPLES), _PRIOR_RATE, np.float32)
        prior[:, _LENGTH] = 1 + _PRIOR_RATE
        prior[~np.array(is_model, bool), COUNTERFACTUAL] = 0
        is_log2 = [name.endswith("_log2") for name in contract.field_names]
        return cls(
            np.array(is_model, np.uint8),
            np.array(tells_survival, np.uint8),
            prior,
            np.array(is_log2, np.uint8),
            contract.low,
            contract.high,
        )


class History(NamedTuple):
    """What past steps say about each drafter, one slot per request or one for the batch.

    Attributes:
        total: Decayed sums of the samples, float32 `[slots, proposers, samples]`.
        weight: Decayed numbers of the samples, of the same shape.
        steps_since: Steps since each drafter was verified, float32 `[slots, proposers]`.
    """

    total: np.ndarray
    weight: np.ndarray
    steps_since: np.ndarray

    @classmethod
    def of(cls, contract: Contract, num_slots: int) -> History:
        """A history of nothing."""
        num_drafters = len(contract.proposers)
        return cls(
            np.zeros((num_slots, num_drafters, _NUM_SAMPLES), np.float32),
            np.zeros((num_slots, num_drafters, _NUM_SAMPLES), np.float32),
            np.full((num_slots, num_drafters), NEVER, np.float32),
        )

    def doubled(self) -> History:
        """The same with as many empty slots behind."""
        return History(
            np.concatenate([self.total, np.zeros_like(self.total)]),
            np.concatenate([self.weight, np.zeros_like(self.weight)]),
            np.concatenate([self.steps_since, np.full_like(self.steps_since, NEVER)]),
        )

    def clear(self, slot: int) -> None:
        """Forget one slot."""
        self.total[slot] = self.weight[slot] = 0
        self.steps_since[slot] = NEVER


ROW = np.dtype(
    [
        ("num_context_tokens", np.int32),
        ("temperature", np.float32),
        ("drafter", np.int32),
        ("num_draft_tokens", np.int32),
        ("num_accepted_tokens", np.int32),
        ("num_emitted_tokens", np.int32),
    ]
)
"""A row of a `StepRecord`; the names are its attributes."""


class RowTable(NamedTuple):
    """The rows of a `StepRecord`, in arrays that may be longer than the record.

    Attributes:
        rows: `ROW` `[rows]`.
        told: What each proposer tells of itself, int32 `[proposers, 3, rows]`: match length,
            tokens on offer and counterfactually accepted tokens (-1: no sample) of a token
            drafter; freshness and pending tokens of a model drafter.
        agreement: Agreement of a token drafter that counts it, float32 `[proposers, rows]`.
        offer_survival: Survival of the tokens on offer of a token drafter that tells it, float32
            `[proposers, rows, max length]`; only those on offer are read.
        survival: Survival of the model drafter's drafts, cut tokens included, float32
            `[rows, max length]`; NaN behind them, of which only the first is read.
    """

    rows: np.ndarray
    told: np.ndarray
    agreement: np.ndarray
    offer_survival: np.ndarray
    survival: np.ndarray

    @classmethod
    def empty(cls, contract: Contract, *shape: int) -> RowTable:
        """Arrays of a shape whose last axis is the rows; its other axes come first."""
        *outer, num_rows = shape
        length, num_drafters = max(1, contract.max_num_speculative_tokens), len(contract.proposers)
        return cls(
            np.zeros(shape, ROW),
            np.zeros((*outer, num_drafters, 3, num_rows), np.int32),
            np.zeros((*outer, num_drafters, num_rows), np.float32),
            np.zeros((*outer, num_drafters, num_rows, length), np.float32),
            np.full((*outer, num_rows, length), np.nan, np.float32),
        )


@compiled
def observe(
    layout: Layout,
    history: History,
    slots: np.ndarray,
    load: np.ndarray,
    table: RowTable,
    num_rows: int,
    out: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Take in one step and write the observation of the decision after it.

    Args:
        layout: Of the contract.
        history: Changed in place.
        slots: History slot of the batch and, at request granularity, of each row behind it,
            int64 `[1]` or `[1 + rows]`.
        load: Running and waiting requests, KV-cache usage, prefill tokens, float32 `[4]`.
        table: The step's rows, of which the first `num_rows` count.
        num_rows: Rows of the step.
        out: Observation rows, float32 `[1, fields]` or `[rows, fields]`.
    """
    num_fields = out.shape[1]
    if len(slots) > 1:  # see `Contract.fields`: the batch's, then but four of them again
        num_fields = (num_fields + _NUM_BATCH_ONLY) // 2
    batch = out[0, :num_fields]
    _observe_group(layout, history, slots[0], load, table, 0, num_rows, batch)
    if len(slots) == 1:
        return
    own = np.empty(num_fields, np.float32)
    for row in range(num_rows):
        _observe_group(layout, history, slots[1 + row], load, table, row, row + 1, own)
        out[row, :num_fields] = batch
        out[row, num_fields] = own[_CONTEXT]
        out[row, num_fields + 1] = own[_TEMPERATURE]
        out[row, num_fields + 2 :] = own[_FIRST_DRAFTER:]


@compiled
def _observe_group(
    layout: Layout,
    history: History,
    slot: int,
    load: np.ndarray,
    table: RowTable,
    first: int,
    last: int,
    out: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """One observation row over the step's rows `[first, last)`; fields as in the contract."""
    # Arrays are taken out of their tuples first: inside a loop each access would count references.
    num_drafters, count = len(layout.is_model), last - first
    rows, steps_since = table.rows, history.steps_since
    is_model, is_log2, low, high = layout.is_model, layout.is_log2, layout.low, layout.high
    tells_survival = layout.tells_survival
    out[0] = load[0]
    out[1] = load[1]
    out[2] = load[2]
    out[4] = load[3]
    field = len(out) - num_drafters - 3
    for index in range(field, len(out)):
        out[index] = 0
    num_context = num_draft_tokens = num_emitted_tokens = 0
    temperature = 0.0
    for row in range(first, last):
        num_context += rows[row].num_context_tokens
        temperature += rows[row].temperature
        num_draft_tokens += rows[row].num_draft_tokens
        num_emitted_tokens += rows[row].num_emitted_tokens
        out[field + rows[row].drafter] += 1
    for index in range(num_drafters + 1):
        out[field + index] /= count
    out[_CONTEXT] = num_context / count
    out[_TEMPERATURE] = temperature / count
    out[-2] = num_draft_tokens / count
    out[-1] = num_emitted_tokens / count
    field = _FIRST_DRAFTER
    for index in range(num_drafters):
        told = table.told[index]
        total, weight = history.total[slot, index], history.weight[slot, index]
        prior = layout.prior[index]
        used = _add_samples(
            is_model[index], total, weight, rows, told, table.survival, index + 1, first, last
        )
        if used:
            steps_since[slot, index] = 0
        else:
            steps_since[slot, index] += 1
        for sample in range(_LENGTH + 1):
            out[field + sample] = recent(total, weight, prior, sample)
        field += _LENGTH + 1
        out[field] = steps_since[slot, index]
        if is_model[index]:
            out[field + 1] = _mean(told[0], first, last)
            out[field + 2] = _mean(told[1], first, last)
            out[field + 3] = recent(total, weight, prior, _TOP1)
            out[field + 4] = recent(total, weight, prior, _EXPECTED)
            field += 5
        else:
            num_offers = match_length = num_offered = 0
            for row in range(first, last):
                match_length += told[0, row]
                num_offered += told[1, row]
                num_offers += told[1, row] > 0
            out[field + 1] = num_offers / count
            out[field + 2] = match_length / count
            if tells_survival[index]:
                out[field + 3] = _mean_sum(table.offer_survival[index], told[1], first, last)
            else:
                out[field + 3] = _mean(table.agreement[index], first, last)
            out[field + 4] = num_offered / count
            out[field + 5] = recent(total, weight, prior, COUNTERFACTUAL)
            field += 6
    for index in range(len(out)):
        value = out[index]
        if is_log2[index]:
            value = np.log2(1 + value)
        out[index] = min(max(value, low[index]), high[index])


@compiled
def _add_samples(
    is_model: bool,
    total: np.ndarray,
    weight: np.ndarray,
    rows: np.ndarray,
    told: np.ndarray,
    all_survival: np.ndarray,
    drafter: int,
    first: int,
    last: int,
) -> bool:  # pragma: no cover - compiled
    """Age one drafter's history by what the step adds to it; whether the drafter was verified."""
    sums = np.zeros(_NUM_SAMPLES, np.float32)
    counts = np.zeros(_NUM_SAMPLES, np.float32)
    used = False
    for row in range(first, last):
        if rows[row].drafter == drafter:
            used = True
            for position in range(min(_LENGTH, rows[row].num_draft_tokens)):
                counts[position] += 1
                sums[position] += rows[row].num_accepted_tokens > position
            counts[_LENGTH] += 1
            sums[_LENGTH] += rows[row].num_emitted_tokens
        if is_model:
            if not np.isnan(all_survival[row, 0]):
                counts[_TOP1] += 1
                sums[_TOP1] += all_survival[row, 0]
                counts[_EXPECTED] += 1
                for position in range(all_survival.shape[1]):
                    if np.isnan(all_survival[row, position]):
                        break
                    sums[_EXPECTED] += all_survival[row, position]
        elif told[2, row] >= 0:
            counts[COUNTERFACTUAL] += 1
            sums[COUNTERFACTUAL] += told[2, row]
    for sample in range(_NUM_SAMPLES):
        if counts[sample] > 0:
            total[sample] *= DECAY
            total[sample] += sums[sample]
            weight[sample] *= DECAY
            weight[sample] += counts[sample]
    return used


@compiled
def recent(
    total: np.ndarray, weight: np.ndarray, prior: np.ndarray, sample: int
) -> float:  # pragma: no cover - compiled
    """Recent mean of a sample, pulled towards its prior with the weight of one sample."""
    return (total[sample] + prior[sample]) / (weight[sample] + 1)


@compiled
def _mean(values: np.ndarray, first: int, last: int) -> float:  # pragma: no cover - compiled
    total = 0  # whole numbers add up faster as such; Numba compiles both
    for row in range(first, last):
        total += values[row]
    return total / (last - first)


@compiled
def _mean_sum(
    survival: np.ndarray, counts: np.ndarray, first: int, last: int
) -> float:  # pragma: no cover - compiled
    """Mean over rows of the sum of each row's first values, as many as its count."""
    total = 0.0
    for row in range(first, last):
        for position in range(counts[row]):
            total += survival[row, position]
    return total / (last - first)
