"""What serving a scenario brought: every request's times, every step, and the totals."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from policy.contract import Contract
from policy.step import StepRecord

from .scenario import Arrival, Arrivals
from .workload import WorkloadRequest

STEP = np.dtype(
    [
        ("end_s", np.float64),  # engine time at its end
        ("num_running_reqs", np.int32),
        ("num_tokens", np.int32),  # emitted
        ("drafter", np.int32),  # whose drafts most requests with one had; 0 without any
        ("num_draft_tokens", np.float32),  # mean per request
    ]
)
"""An engine step, for time lines."""


@dataclass
class ServedRequest:
    """A request's course, in seconds of engine time since the run began.

    Attributes:
        request_id: The same for every policy.
        kind: The prompt's kind.
        arrival_s: When it came.
        first_token_s: End of the step that emitted its first token.
        finish_s: End of the step that emitted its last one.
        num_output_tokens: Tokens emitted.
        engine_s: Its share of the engine's time: each step is divided equally among the requests
            that it gave tokens, so that the shares of all requests add up to the whole.
    """

    request_id: str
    kind: str
    arrival_s: float
    first_token_s: float = np.nan
    finish_s: float = np.nan
    num_output_tokens: int = 0
    engine_s: float = 0.0

    @property
    def time_to_first_token_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def time_per_output_token_s(self) -> float:
        """Mean time between its tokens; NaN for a single one."""
        if self.num_output_tokens < 2:
            return np.nan
        return (self.finish_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class Served:
    """A scenario served to its end.

    Attributes:
        requests: In order of arrival.
        steps: `STEP` `[engine steps]`.
        busy_s: Engine time without idling.
        decision_s: Part of it that decisions took; on traces they take no engine time.
        num_draft_tokens_per_pos: Draft tokens verified at each position of a draft, by drafter,
            int64 `[longest draft]`.
        num_accepted_tokens_per_pos: Of those, the accepted ones.
    """

    requests: tuple[ServedRequest, ...]
    steps: np.ndarray
    busy_s: float
    decision_s: float
    num_draft_tokens_per_pos: Mapping[str, np.ndarray]
    num_accepted_tokens_per_pos: Mapping[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def num_drafts(self) -> dict[str, int]:
        """Drafts verified, by drafter."""
        return {name: int(counts[0]) for name, counts in self.num_draft_tokens_per_pos.items()}

    @property
    def num_draft_tokens(self) -> dict[str, int]:
        """Draft tokens verified, by drafter."""
        return {name: int(counts.sum()) for name, counts in self.num_draft_tokens_per_pos.items()}

    @property
    def num_accepted_tokens(self) -> dict[str, int]:
        """Draft tokens accepted, by drafter."""
        accepted = self.num_accepted_tokens_per_pos
        return {name: int(counts.sum()) for name, counts in accepted.items()}


@dataclass
class Ledger:
    """Keeps the books while a scenario is served.

    Attributes:
        contract: Names the drafters of the records; None without speculation.
        now_s: Engine time since the run began, idling included.
    """

    contract: Contract | None
    now_s: float = 0.0
    _requests: dict[str, ServedRequest] = field(default_factory=dict)
    _unfinished: set[str] = field(default_factory=set)
    _steps: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    _busy_s: float = 0.0
    _drafts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def num_unfinished_reqs(self) -> int:
        """Requests that came and have not ended."""
        return len(self._unfinished)

    def take_due(self, arrivals: Arrivals) -> list[WorkloadRequest] | None:
        """Note the requests that are due and return them; None once all have ended.

        An engine without requests skips to the next one.
        """
        while True:
            due = arrivals.take_due(self.num_unfinished_reqs, self.now_s)
            for arrival in due:
                self.note_arrival(arrival)
            if self.num_unfinished_reqs:
                return [arrival.request for arrival in due]
            if arrivals.are_over:
                return None
            self.skip_to(arrivals.next_s())

    def note_arrival(self, arrival: Arrival) -> None:
        """A request came."""
        request = arrival.request
        self._requests[request.request_id] = ServedRequest(
            request.request_id, request.kind, arrival.arrival_s
        )
        self._unfinished.add(request.request_id)

    def skip_to(self, time_s: float) -> None:
        """The engine idles."""
        self.now_s = max(self.now_s, time_s)

    def note_step(
        self,
        seconds: float,
        num_emitted: Mapping[str, int],
        finished: Collection[str],
        record: StepRecord | None,
    ) -> None:
        """An engine step ended.

        Args:
            seconds: Engine time it took, with the drafting before it.
            num_emitted: New tokens by request; requests without any are left out.
            finished: Requests that it ended.
            record: The step as the hook told it; None without speculation.
        """
        self.now_s += seconds
        self._busy_s += seconds
        served = num_emitted or self._unfinished
        for request_id in served:
            self._requests[request_id].engine_s += seconds / len(served)
        for request_id, count in num_emitted.items():
            request = self._requests[request_id]
            if not request.num_output_tokens:
                request.first_token_s = self.now_s
            request.num_output_tokens += count
            request.finish_s = self.now_s
        num_running, drafter, length = self._note_drafts(record, len(num_emitted))
        self._steps.append((self.now_s, num_running, sum(num_emitted.values()), drafter, length))
        self._unfinished.difference_update(finished)

    def close(self, decision_s: float) -> Served:
        """The run is over."""
        drafted, accepted = self._counts_per_pos()
        return Served(
            tuple(self._requests.values()),
            np.array(self._steps, STEP),
            self._busy_s,
            decision_s,
            drafted,
            accepted,
        )

    def _note_drafts(self, record: StepRecord | None, num_rows: int) -> tuple[int, int, float]:
        """Keep the drafts; running requests, the usual drafter and the mean length."""
        if record is None or self.contract is None or not record.num_rows:
            return (num_rows if record is None else record.num_running_reqs), 0, 0.0
        drafters = record.drafter[record.drafter > 0]
        if not len(drafters):
            return record.num_running_reqs, 0, 0.0
        self._drafts.append((record.drafter, record.num_draft_tokens, record.num_accepted_tokens))
        usual = int(np.bincount(drafters).argmax())
        mean_length = float(record.num_draft_tokens.sum()) / record.num_rows
        return record.num_running_reqs, usual, mean_length

    def _counts_per_pos(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Draft tokens verified and accepted at each position, by drafter."""
        drafted: dict[str, np.ndarray] = {}
        accepted: dict[str, np.ndarray] = {}
        if not self._drafts or self.contract is None:
            return drafted, accepted
        drafters, lengths, num_accepted = (
            np.concatenate(parts) for parts in zip(*self._drafts, strict=True)
        )
        for index, name in enumerate(self.contract.proposers, start=1):
            if (is_own := drafters == index).any():
                positions = np.arange(lengths[is_own].max())[:, None]
                drafted[name] = (positions < lengths[is_own]).sum(axis=1)
                accepted[name] = (positions < num_accepted[is_own]).sum(axis=1)
        return drafted, accepted
