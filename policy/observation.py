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

from collections.abc import Iterable

import numpy as np

from .combinations import Combinations, resolve_rows
from .contract import TOKEN_DRAFTERS, Contract
from .features import ROW, History, Layout, RowTable, observe
from .step import StepRecord


class ObservationBuilder:
    """Turns step records into observation rows.

    Args:
        contract: Says which fields in which order, and whether a row is the batch or a request.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._per_request = contract.granularity == "request"
        self._layout = Layout.of(contract)
        self._load = np.zeros(4, np.float32)
        self.reset()
        self._compile()

    def reset(self) -> None:
        """Forget everything."""
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._history = History.of(self.contract, num_slots=1)  # the batch's comes first

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
        self._load[:] = (
            record.num_running_reqs,
            record.num_waiting_reqs,
            record.kv_cache_usage,
            record.num_prefill_tokens,
        )
        num_rows = record.num_rows if self._per_request else 1
        rows = np.empty((num_rows, len(self.contract.fields)), np.float32)
        observe(
            self._layout,
            self._history,
            slots,
            self._load,
            _row_table(self.contract, record),
            record.num_rows,
            rows,
        )
        return rows

    def resolve(
        self, combinations: Combinations, record: StepRecord, actions: np.ndarray
    ) -> np.ndarray:
        """Let the members of combinations take their place.

        Args:
            combinations: Of the contract.
            record: The step of the last `update`.
            actions: Canonical, int64 `[rows, len(action_nvec)]`.

        Returns:
            Actions without combinations, of the same shape.
        """
        if actions[:, 0].max(initial=0) <= len(self.contract.proposers):
            return actions
        resolved = actions.copy()
        table, slots = _row_table(self.contract, record), self._slots_of(record)
        resolve_rows(combinations, self._history, slots, table, resolved)
        return resolved

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is kept of ended requests."""
        for req_id in req_ids:
            slot = self._slots.pop(req_id, None)
            if slot is not None:
                self._history.clear(slot)
                self._free_slots.append(slot)

    def _compile(self) -> None:
        """Compile the feature code now, so that no step of a server waits for it."""
        observe(
            self._layout,
            History.of(self.contract, num_slots=1),
            np.zeros(2 if self._per_request else 1, np.int64),
            self._load,
            RowTable.empty(self.contract, 1),
            1,
            np.empty((1, len(self.contract.fields)), np.float32),
        )
        if len(self.contract.proposers) < len(self.contract.drafters) - 1:
            resolve_rows(
                Combinations.of(self.contract, min_match=1),
                History.of(self.contract, num_slots=1),
                np.zeros(1, np.int64),
                RowTable.empty(self.contract, 1),
                np.zeros((1, 2), np.int64),
            )

    def _slots_of(self, record: StepRecord) -> np.ndarray:
        """The history slot of the batch and, at request granularity, of each request."""
        if not self._per_request:
            return np.zeros(1, np.int64)
        for req_id in record.req_ids:
            if req_id not in self._slots:
                if not self._free_slots:
                    num_slots = len(self._history.total)
                    self._free_slots += range(num_slots, 2 * num_slots)
                    self._history = self._history.doubled()
                self._slots[req_id] = self._free_slots.pop()
        return np.array([0, *(self._slots[req_id] for req_id in record.req_ids)], np.int64)


def _row_table(contract: Contract, record: StepRecord) -> RowTable:
    """The record's rows as the feature code reads them."""
    table = RowTable.empty(contract, record.num_rows)
    for name in ROW.names or ():
        table.rows[name] = getattr(record, name)
    for index, drafter in enumerate(contract.proposers):
        if drafter in TOKEN_DRAFTERS:
            offer = record.token_offers[drafter]
            table.told[index, 0] = offer.match_length
            table.told[index, 1] = offer.num_draft_tokens
            table.told[index, 2] = offer.counterfactual_accepted
            if offer.agreement is not None:
                table.agreement[index] = offer.agreement
            if offer.survival is not None:
                table.offer_survival[index, :, : offer.survival.shape[1]] = offer.survival
        else:
            state = record.model_states[drafter]
            table.told[index, 0] = state.fresh
            table.told[index, 1] = state.num_pending_tokens
            table.survival[:, : state.survival.shape[1]] = state.survival
    return table
