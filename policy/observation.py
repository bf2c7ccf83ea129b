"""History of StepRecords -> observation rows: the only feature code there is.

Training, serving and replay all call `ObservationBuilder.update` once per engine step with the
same records, so a policy can never see other features in production than it was trained on. It
reads no clock: with tensor parallelism every rank must come to the same numbers.

Example:
    Two requests, of 10 and 52 tokens, each got one token without speculation.

    >>> ones, zeros = np.ones(2, np.int32), np.zeros(2, np.int32)
    >>> step = StepRecord(
    ...     num_running_reqs=2,
    ...     num_waiting_reqs=0,
    ...     kv_cache_usage=0.25,
    ...     num_prefill_tokens=0,
    ...     num_scheduled_tokens=2,
    ...     req_ids=("a", "b"),
    ...     num_context_tokens=np.array([10, 52], np.int32),
    ...     num_emitted_tokens=ones,
    ...     temperature=np.zeros(2, np.float32),
    ...     drafter=zeros,
    ...     num_draft_tokens=zeros,
    ...     num_accepted_tokens=zeros,
    ... )
    >>> builder = ObservationBuilder(Contract(drafters=("none",), max_lengths=(0,)))
    >>> for name, value in zip(builder.contract.field_names[2:4], builder.update(step)[0, 2:4]):
    ...     print(name, value)
    kv_cache_usage 0.25
    num_context_tokens_log2 5.0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .contract import NUM_ACCEPTANCE_POSITIONS, TOKEN_DRAFTERS, Contract
from .step import StepRecord

DECAY = 0.98
"""Weight that past samples keep when a step brings a newer one: about 50 such steps of memory."""

_PRIOR_RATE = 0.5
"""Acceptance assumed, with the weight of one draft, before anything was verified."""

_NEVER = 1024
"""Steps since a draft that never was: beyond the field's upper bound."""


class ObservationBuilder:
    """Turns step records into observation rows.

    Args:
        contract: Says which fields in which order, and whether a row is the batch or a request.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._per_request = contract.granularity == "request"
        names = contract.field_names
        self._past = [names.index(name) for name in _past_fields(contract)]
        self._steps_since = [
            names.index(f"{drafter}_steps_since_draft_log2") for drafter in contract.drafters[1:]
        ]
        from_history = {*self._past, *self._steps_since}
        self._present = [column for column in range(len(names)) if column not in from_history]
        self._log2 = [column for column, name in enumerate(names) if name.endswith("_log2")]
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._slots: dict[str, int] = {}
        self._free_slots = [0]
        self._history = _History(self.contract)

    def update(self, record: StepRecord) -> np.ndarray:
        """Take in one step and return the observation at the decision point after it.

        Args:
            record: The step just done; it must have at least one row.

        Returns:
            float32 `[1, fields]` for batch granularity, `[record.num_rows, fields]` for request
            granularity, every value within its field's bounds.
        """
        self.forget(record.finished_req_ids)
        slots = self._slots_of(record)
        self._history.add(slots, record)
        shape = record.num_rows, len(self._present)
        present = _table(_present_values(self.contract, record), shape)
        rows = np.empty((len(slots), len(self.contract.fields)), np.float32)
        rows[:, self._present] = present if self._per_request else present.mean(axis=0)
        rows[:, self._past] = self._history.means(slots)
        rows[:, self._steps_since] = self._history.steps_since[slots]
        rows[:, self._log2] = np.log2(1 + rows[:, self._log2])
        return np.clip(rows, self.contract.low, self.contract.high, out=rows)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is kept of ended requests."""
        for req_id in req_ids:
            slot = self._slots.pop(req_id, None)
            if slot is not None:
                self._history.clear(slot)
                self._free_slots.append(slot)

    def _slots_of(self, record: StepRecord) -> np.ndarray:
        """The history slot of each observation row: one for the batch, or one per request."""
        if not self._per_request:
            return np.zeros(1, np.intp)
        for req_id in record.req_ids:
            if req_id not in self._slots:
                if not self._free_slots:
                    self._free_slots += self._history.grow()
                self._slots[req_id] = self._free_slots.pop()
        return np.array([self._slots[req_id] for req_id in record.req_ids], np.intp)


class _History:
    """What past steps say about each drafter, one slot per request or one for the batch."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._prior = np.array([*_past_fields(contract).values()], np.float32)
        self._drafters = np.arange(1, len(contract.drafters))
        self._total = np.zeros((1, len(self._prior)), np.float32)
        self._weight = np.zeros_like(self._total)
        self.steps_since = np.full((1, len(self._drafters)), _NEVER, np.float32)

    def grow(self) -> range:
        """Double the slots and return the new ones."""
        old = len(self._total)
        self._total = np.concatenate([self._total, np.zeros_like(self._total)])
        self._weight = np.concatenate([self._weight, np.zeros_like(self._weight)])
        unused = np.full_like(self.steps_since, _NEVER)
        self.steps_since = np.concatenate([self.steps_since, unused])
        return range(old, 2 * old)

    def clear(self, slot: int) -> None:
        """Forget one slot."""
        self._total[slot] = self._weight[slot] = 0
        self.steps_since[slot] = _NEVER

    def add(self, slots: np.ndarray, record: StepRecord) -> None:
        """Take in what the step verified and what the free drafters would have got."""
        shape = record.num_rows, len(self._prior)
        samples = _table(_samples(self._contract, record), shape)
        counts = ~np.isnan(samples)
        sums = np.where(counts, samples, 0)
        used = record.drafter[:, None] == self._drafters
        if len(slots) < record.num_rows:
            sums, counts, used = sums.sum(axis=0), counts.sum(axis=0), used.any(axis=0)
        kept = np.where(counts, np.float32(DECAY), np.float32(1))
        self._total[slots] = kept * self._total[slots] + sums
        self._weight[slots] = kept * self._weight[slots] + counts
        self.steps_since[slots] = np.where(used, 0, self.steps_since[slots] + 1)

    def means(self, slots: np.ndarray) -> np.ndarray:
        """Recent mean of each sample, pulled towards its prior with the weight of one sample."""
        return (self._total[slots] + self._prior) / (self._weight[slots] + 1)


def _table(columns: Iterable[np.ndarray | float], shape: tuple[int, int]) -> np.ndarray:
    """Columns, in order, as float32 `[rows, columns]`; a number stands for a whole column."""
    table = np.empty(shape[::-1], np.float32)
    for index, column in enumerate(columns):
        table[index] = column
    return table.T


def _present_values(contract: Contract, record: StepRecord) -> Iterator[np.ndarray | float]:
    """The fields that the step alone tells, in the contract's order, before logarithms."""
    yield record.num_running_reqs
    yield record.num_waiting_reqs
    yield record.kv_cache_usage
    yield record.num_context_tokens
    yield record.num_prefill_tokens
    yield record.temperature
    for drafter in contract.drafters[1:]:
        if drafter in TOKEN_DRAFTERS:
            offer = record.token_offers[drafter]
            yield offer.num_draft_tokens > 0
            yield offer.match_length
            yield offer.num_matches
            yield offer.num_draft_tokens
        else:
            state = record.model_states[drafter]
            yield state.fresh
            yield state.num_pending_tokens
    for index in range(len(contract.drafters)):
        yield record.drafter == index
    yield record.num_draft_tokens
    yield record.num_emitted_tokens


def _past_fields(contract: Contract) -> dict[str, float]:
    """The fields that are recent means, with what is assumed before the first sample."""
    fields: dict[str, float] = {}
    for drafter in contract.drafters[1:]:
        for position in range(1, NUM_ACCEPTANCE_POSITIONS + 1):
            fields[f"{drafter}_acceptance_rate_pos_{position}"] = _PRIOR_RATE
        fields[f"{drafter}_mean_acceptance_length"] = 1 + _PRIOR_RATE
        if drafter in TOKEN_DRAFTERS:
            fields[f"{drafter}_counterfactual_accepted_tokens"] = 0.0
        else:
            fields[f"{drafter}_top1_probability"] = _PRIOR_RATE
            fields[f"{drafter}_expected_accepted_tokens"] = _PRIOR_RATE
    return fields


def _samples(contract: Contract, record: StepRecord) -> Iterator[np.ndarray]:
    """What the step adds to each of `_past_fields`, in their order; NaN where it adds nothing."""
    positions = np.arange(1, NUM_ACCEPTANCE_POSITIONS + 1)[:, None]
    for index, drafter in enumerate(contract.drafters[1:], start=1):
        used = record.drafter == index
        reached = used & (record.num_draft_tokens >= positions)
        yield from np.where(reached, record.num_accepted_tokens >= positions, np.nan)
        yield np.where(used, record.num_emitted_tokens, np.nan)
        if drafter in TOKEN_DRAFTERS:
            accepted = record.token_offers[drafter].counterfactual_accepted
            yield np.where(accepted >= 0, accepted, np.nan)
        else:
            survival = record.model_states[drafter].survival
            yield survival[:, 0]
            yield np.where(np.isnan(survival[:, 0]), np.nan, np.nansum(survival, axis=1))
