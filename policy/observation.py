"""History of StepRecords -> observation rows: the only feature code there is.

Training, serving and replay all call `ObservationBuilder.update` once per engine step with the
same records, so a policy can never see other features in production than it was trained on. It
reads no clock: with tensor parallelism every rank must come to the same numbers.
"""

from __future__ import annotations

import numpy as np

from .contract import NUM_ACCEPTANCE_POSITIONS, TOKEN_DRAFTERS, Contract
from .step import ModelState, StepRecord, TokenOffer

DECAY = 0.98
"""Weight that a past verified step keeps when a newer one arrives: about 50 steps of memory."""

_PRIOR_RATE = 0.5
"""Acceptance assumed, with the weight of one draft, before anything was verified."""


class ObservationBuilder:
    """Turns step records into observation rows.

    Args:
        contract: Says which fields in which order, and whether a row is the batch or a request.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._per_request = contract.granularity == "request"
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._history = _History(self.contract, num_slots=1)

    def update(self, record: StepRecord) -> np.ndarray:
        """Take in one step and return the observation at the decision point after it.

        Args:
            record: The step just done; it must have at least one row.

        Returns:
            float32 `[1, fields]` for batch granularity, `[record.num_rows, fields]` for request
            granularity, every value within its field's bounds.
        """
        self._forget(record.finished_req_ids)
        slots = self._slots_of(record)
        self._history.add_step(slots, record)
        columns = [
            *self._load_columns(record),
            *self._drafter_columns(slots, record),
            *self._last_action_columns(record),
        ]
        num_rows = record.num_rows if self._per_request else 1
        rows = np.empty((num_rows, len(columns)), np.float32)
        for index, column in enumerate(columns):
            rows[:, index] = column
        return np.clip(rows, self.contract.low, self.contract.high, out=rows)

    def _forget(self, finished_req_ids: frozenset[str]) -> None:
        for req_id in finished_req_ids:
            slot = self._slots.pop(req_id, None)
            if slot is not None:
                self._history.clear(slot)
                self._free_slots.append(slot)

    def _slots_of(self, record: StepRecord) -> np.ndarray:
        """The history slot of each row: one for all, or one per request."""
        if not self._per_request:
            return np.zeros(record.num_rows, np.intp)
        for req_id in record.req_ids:
            if req_id not in self._slots:
                if not self._free_slots:
                    self._free_slots += self._history.grow()
                self._slots[req_id] = self._free_slots.pop()
        return np.array([self._slots[req_id] for req_id in record.req_ids], np.intp)

    def _over_rows(self, values: np.ndarray) -> np.ndarray:
        """One value per observation row: the row's own, or the mean over the batch."""
        return values if self._per_request else values.mean(keepdims=True)

    def _load_columns(self, record: StepRecord) -> list[np.ndarray | float]:
        return [
            np.log2(1 + record.num_running_reqs),
            np.log2(1 + record.num_waiting_reqs),
            record.kv_cache_usage,
            np.log2(1 + self._over_rows(record.num_context_tokens)),
            np.log2(1 + record.num_prefill_tokens),
            self._over_rows(record.temperature),
        ]

    def _drafter_columns(self, slots: np.ndarray, record: StepRecord) -> list[np.ndarray]:
        rows = slots if self._per_request else slots[:1]
        columns: list[np.ndarray] = []
        for index, drafter in enumerate(self.contract.drafters[1:], start=1):
            columns += self._history.acceptance_columns(rows, index)
            if drafter in TOKEN_DRAFTERS:
                columns += self._offer_columns(rows, index, record.token_offers[drafter])
            else:
                columns += self._model_columns(rows, index, record.model_states[drafter])
        return columns

    def _offer_columns(self, rows: np.ndarray, index: int, offer: TokenOffer) -> list[np.ndarray]:
        return [
            self._over_rows((offer.num_draft_tokens > 0).astype(np.float32)),
            self._over_rows(offer.match_length),
            np.log2(1 + self._over_rows(offer.num_matches)),
            self._over_rows(offer.num_draft_tokens),
            self._history.counterfactual.mean(rows, index, prior=0.0),
        ]

    def _model_columns(self, rows: np.ndarray, index: int, state: ModelState) -> list[np.ndarray]:
        return [
            self._over_rows(state.fresh.astype(np.float32)),
            np.log2(1 + self._over_rows(state.num_pending_tokens)),
            self._history.top1.mean(rows, index, prior=_PRIOR_RATE),
            self._history.expected.mean(rows, index, prior=_PRIOR_RATE),
        ]

    def _last_action_columns(self, record: StepRecord) -> list[np.ndarray]:
        return [
            *(
                self._over_rows((record.drafter == index).astype(np.float32))
                for index in range(len(self.contract.drafters))
            ),
            self._over_rows(record.num_draft_tokens),
            self._over_rows(record.num_emitted_tokens),
        ]


class _DecayedMean:
    """Decayed sums and weights, `[slots, drafters, *shape]`, whose ratio is a recent mean."""

    def __init__(self, num_slots: int, num_drafters: int, *shape: int) -> None:
        self.total = np.zeros((num_slots, num_drafters, *shape), np.float32)
        self.weight = np.zeros_like(self.total)

    def add(self, slots: np.ndarray, drafter: int, values: np.ndarray, taken: np.ndarray) -> None:
        """Add `values[rows, ...]` where `taken[rows, ...]`; rows of one slot are summed."""
        if not taken.any():
            return
        touched = np.unique(slots)
        self.total[touched, drafter] *= DECAY
        self.weight[touched, drafter] *= DECAY
        np.add.at(self.total[:, drafter], slots, np.where(taken, values, 0).astype(np.float32))
        np.add.at(self.weight[:, drafter], slots, taken.astype(np.float32))

    def mean(self, slots: np.ndarray, drafter: int, prior: float) -> np.ndarray:
        """Recent mean per slot, pulled towards `prior` with the weight of one sample."""
        return (self.total[slots, drafter] + prior) / (self.weight[slots, drafter] + 1)


class _History:
    """What past steps say about each drafter, one slot per request or one for the batch."""

    def __init__(self, contract: Contract, num_slots: int) -> None:
        self._drafters = contract.drafters
        num_drafters = len(self._drafters)
        self.accepted = _DecayedMean(num_slots, num_drafters, NUM_ACCEPTANCE_POSITIONS)
        self.emitted = _DecayedMean(num_slots, num_drafters)
        self.counterfactual = _DecayedMean(num_slots, num_drafters)
        self.top1 = _DecayedMean(num_slots, num_drafters)
        self.expected = _DecayedMean(num_slots, num_drafters)
        self.steps_since = np.full((num_slots, num_drafters), 1024, np.float32)

    def _means(self) -> tuple[_DecayedMean, ...]:
        return self.accepted, self.emitted, self.counterfactual, self.top1, self.expected

    def grow(self) -> list[int]:
        """Double the slots and return the new ones."""
        old = len(self.steps_since)
        for mean in self._means():
            mean.total = np.concatenate([mean.total, np.zeros_like(mean.total)])
            mean.weight = np.concatenate([mean.weight, np.zeros_like(mean.weight)])
        self.steps_since = np.concatenate([self.steps_since, np.full_like(self.steps_since, 1024)])
        return list(range(2 * old - 1, old - 1, -1))

    def clear(self, slot: int) -> None:
        """Forget one slot."""
        for mean in self._means():
            mean.total[slot] = mean.weight[slot] = 0
        self.steps_since[slot] = 1024

    def add_step(self, slots: np.ndarray, record: StepRecord) -> None:
        """Take in what the step verified and what the free drafters would have got."""
        positions = np.arange(1, NUM_ACCEPTANCE_POSITIONS + 1)
        reached = record.num_draft_tokens[:, None] >= positions
        accepted = record.num_accepted_tokens[:, None] >= positions
        self.steps_since[np.unique(slots)] += 1
        for index, drafter in enumerate(self._drafters[1:], start=1):
            used = record.drafter == index
            self.steps_since[slots[used], index] = 0
            self.accepted.add(slots, index, accepted, reached & used[:, None])
            self.emitted.add(slots, index, record.num_emitted_tokens, used)
            if drafter in TOKEN_DRAFTERS:
                hits = record.token_offers[drafter].counterfactual_accepted
                self.counterfactual.add(slots, index, hits, hits >= 0)
            else:
                survival = record.model_states[drafter].survival
                drafted = ~np.isnan(survival[:, 0])
                self.top1.add(slots, index, survival[:, 0], drafted)
                self.expected.add(slots, index, np.nansum(survival, axis=1), drafted)

    def acceptance_columns(self, rows: np.ndarray, drafter: int) -> list[np.ndarray]:
        """Acceptance per position, mean acceptance length and steps since the last draft."""
        rates = self.accepted.mean(rows, drafter, prior=_PRIOR_RATE)
        return [
            *rates.T,
            self.emitted.mean(rows, drafter, prior=1 + _PRIOR_RATE),
            np.log2(1 + self.steps_since[rows, drafter]),
        ]
