"""StepRecord: what one engine step did, independent of the engine that did it.

Rows are the requests that got at least one token in the step, in the engine's batch order; a
request whose prompt is still being prefilled has no row. Live vLLM and the replay of traces
both speak in these records, so features, rewards and baselines are written once.

Example:
    Request `a` had four tokens drafted and two of them accepted; `b` got its first token while
    100 tokens of its prompt were read.

    >>> step = StepRecord(
    ...     num_running_reqs=2,
    ...     num_waiting_reqs=0,
    ...     kv_cache_usage=0.1,
    ...     num_prefill_tokens=100,
    ...     num_scheduled_tokens=105,
    ...     req_ids=("a", "b"),
    ...     num_context_tokens=np.array([53, 101], np.int32),
    ...     num_emitted_tokens=np.array([3, 1], np.int32),
    ...     temperature=np.zeros(2, np.float32),
    ...     drafter=np.array([1, 0], np.int32),
    ...     num_draft_tokens=np.array([4, 0], np.int32),
    ...     num_accepted_tokens=np.array([2, 0], np.int32),
    ... )
    >>> step.num_rows
    2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TokenOffer:
    """What a token drafter would propose now, per row, whether or not it is chosen.

    Attributes:
        match_length: Tokens of the match, int32 `[rows]`; 0 without a match.
        num_draft_tokens: Tokens on offer, int32 `[rows]`.
        counterfactual_accepted: Leading tokens of an *earlier* offer that the target then
            emitted, int32 `[rows]`; -1 where the step decided no offer. An offer is open until
            the target emits another token or all of it, and no other is judged meanwhile.
        agreement: Share of the earlier places with the same last tokens that went on with the
            first token on offer, float32 `[rows]`; None of a drafter that does not count it.
        survival: Probability that each token on offer survives verification, float32
            `[rows, max length]`, NaN beyond the offer; None of a drafter that does not know.
    """

    match_length: np.ndarray
    num_draft_tokens: np.ndarray
    counterfactual_accepted: np.ndarray
    agreement: np.ndarray | None = None
    survival: np.ndarray | None = None


@dataclass(frozen=True)
class ModelState:
    """What is known of the model drafter, per row.

    Attributes:
        fresh: Whether it can draft for the row, bool `[rows]`.
        num_pending_tokens: Tokens it must read before it drafts, int32 `[rows]`.
        survival: For rows that it drafted for before this step, the probability that each draft
            token survives verification, whether it was verified or cut, float32
            `[rows, max length]`; NaN elsewhere.
    """

    fresh: np.ndarray
    num_pending_tokens: np.ndarray
    survival: np.ndarray


@dataclass(frozen=True)
class StepRecord:
    """One engine step, as seen at the decision point that follows it.

    Attributes:
        num_running_reqs: Requests scheduled in the step.
        num_waiting_reqs: Requests that waited for a place.
        kv_cache_usage: Share of KV-cache blocks in use, in [0, 1].
        num_prefill_tokens: Prompt tokens computed in the step.
        num_scheduled_tokens: Tokens the target model computed in the step.
        req_ids: Request of each row.
        num_context_tokens: Prompt and output tokens after the step, int32 `[rows]`.
        num_emitted_tokens: Tokens emitted in the step (accepted and bonus), int32 `[rows]`.
        temperature: Sampling temperature, float32 `[rows]`.
        drafter: Index of the drafter whose tokens were verified, int32 `[rows]`; 0 for none.
        num_draft_tokens: Draft tokens verified, int32 `[rows]`.
        num_accepted_tokens: Draft tokens accepted, int32 `[rows]`.
        num_draft_passes: Forward passes the model drafter ran before the step.
        num_draft_pass_tokens: Tokens that went through those passes.
        finished_req_ids: Requests that ended since the last record; their history is forgotten.
        token_offers: What each token drafter offers now.
        model_states: What is known of the model drafter.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    num_prefill_tokens: int
    num_scheduled_tokens: int
    req_ids: tuple[str, ...]
    num_context_tokens: np.ndarray
    num_emitted_tokens: np.ndarray
    temperature: np.ndarray
    drafter: np.ndarray
    num_draft_tokens: np.ndarray
    num_accepted_tokens: np.ndarray
    num_draft_passes: int = 0
    num_draft_pass_tokens: int = 0
    finished_req_ids: frozenset[str] = frozenset()
    token_offers: Mapping[str, TokenOffer] = field(default_factory=dict)
    model_states: Mapping[str, ModelState] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Requests a decision can be taken for."""
        return len(self.req_ids)

    def verified(self, drafter: int) -> tuple[int, int, int]:
        """Drafts of a drafter verified in the step, their tokens, and the accepted ones.

        Args:
            drafter: Index of the drafter.
        """
        used = self.drafter == drafter
        return (
            int(used.sum()),
            int(self.num_draft_tokens[used].sum()),
            int(self.num_accepted_tokens[used].sum()),
        )
