"""Offers of a token drafter that the target has not decided yet: its counterfactual acceptance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .token_drafter import Contexts


@dataclass(frozen=True)
class _Pledge:
    """An offer that has not been settled: `tokens` was offered to follow position `start`."""

    start: int
    tokens: np.ndarray


class Pledges:
    """At most one open offer per request, judged by what the target goes on to emit."""

    def __init__(self) -> None:
        self._open: dict[str, _Pledge] = {}

    def __len__(self) -> int:
        return len(self._open)

    def make(self, contexts: Contexts, drafts: np.ndarray, num_draft_tokens: np.ndarray) -> None:
        """Open the offers of the requests that have none open.

        Args:
            contexts: The requests.
            drafts: Tokens on offer, int32 `[requests, max length]`; kept, not copied.
            num_draft_tokens: How many of them, int32 `[requests]`.
        """
        for i in np.flatnonzero(num_draft_tokens):
            pledge = _Pledge(int(contexts.num_tokens[i]), drafts[i, : num_draft_tokens[i]])
            self._open.setdefault(contexts.req_ids[i], pledge)

    def settle(self, contexts: Contexts) -> np.ndarray:
        """Accepted tokens of each open offer that the emitted tokens decide; -1 elsewhere.

        One step without speculation decides only the first token of an offer, so an offer stays
        open until a token differs or all of it was emitted.

        Returns:
            int32 `[requests]`.
        """
        settled = np.full(len(contexts.rows), -1, np.int32)
        for i, req_id in enumerate(contexts.req_ids):
            pledge = self._open.get(req_id)
            if pledge is None:
                continue
            emitted = contexts.context(i)[pledge.start :][: len(pledge.tokens)]
            agreed = pledge.tokens[: len(emitted)] == emitted
            if agreed.all() and len(emitted) < len(pledge.tokens):
                continue
            settled[i] = len(agreed) if agreed.all() else int(agreed.argmin())
            del self._open[req_id]
        return settled

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop the offers of ended requests."""
        for req_id in req_ids:
            self._open.pop(req_id, None)
