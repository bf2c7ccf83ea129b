"""The suffix drafter: Arctic Inference's suffix trees over contexts and other requests' responses.

`SuffixDecodingCache` keeps a tree over each request's own context and one over the responses of
all recent requests, and offers the continuation with the highest expected length of either
(SuffixDecoding, arXiv:2411.04975). vLLM's proposer of that name wants one length for the batch
and is fed by its own drafting alone; here the trees read every emitted token whatever drafted it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..contract import MAX_TOKEN_DRAFT_LENGTH
from ..step import TokenOffer
from .pledges import Pledges
from .token_drafter import Contexts, Draft


class SuffixDrafter:
    """Offers drafts from suffix trees.

    Args:
        max_length: Longest draft in tokens.
        max_model_len: Longest context of the engine; drafts never run past it.
        max_tree_depth: Longest match and draft together, in tokens.
        max_cached_requests: Requests whose responses others draft from; 0 for none.
        max_spec_factor: Draft tokens per token of the match, at most.
        min_token_prob: Survival below which a draft ends.
    """

    def __init__(
        self,
        *,
        max_length: int,
        max_model_len: int,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._max_length = max_length
        self._max_model_len = max_model_len
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self._cache = SuffixDecodingCache(max_tree_depth, max_cached_requests)
        self._num_read: dict[str, int] = {}
        self._pledges = Pledges()
        self._drafts = np.zeros((0, max_length), np.int32)
        self._survival = np.zeros((0, max_length), np.float32)
        self._num_draft_tokens = np.zeros(0, np.int32)

    def warm_up(self) -> None:
        """Nothing is compiled or loaded later."""

    def offer(self, contexts: Contexts) -> TokenOffer:
        """Read what the step emitted, settle earlier offers and make new ones."""
        settled = self._pledges.settle(contexts)
        num_requests = len(contexts.rows)
        self._drafts = np.zeros((num_requests, self._max_length), np.int32)
        self._survival = np.full((num_requests, self._max_length), np.nan, np.float32)
        self._num_draft_tokens = np.zeros(num_requests, np.int32)
        match_length = np.zeros(num_requests, np.int32)
        # All are read before any is looked up, so that the order of the batch does not matter.
        for i, req_id in enumerate(contexts.req_ids):
            self._read(req_id, contexts.context(i), int(contexts.num_prompt_tokens[i]))
        for i, req_id in enumerate(contexts.req_ids):
            match_length[i] = self._look_up(i, req_id, contexts.context(i))
        self._pledges.make(contexts, self._drafts, self._num_draft_tokens)
        return TokenOffer(match_length, self._num_draft_tokens, settled, survival=self._survival)

    def draft(self, requests: np.ndarray, lengths: np.ndarray) -> list[Draft]:
        """The drafts on offer, each cut to its length."""
        counts = np.minimum(lengths, self._num_draft_tokens[requests])
        return [
            Draft(self._drafts[i, :count].tolist(), self._survival[i, :count])
            for i, count in zip(requests.tolist(), counts.tolist(), strict=True)
        ]

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop the trees over ended requests; their responses stay for others to draft from."""
        req_ids = list(req_ids)
        self._pledges.forget(req_ids)
        for req_id in req_ids:
            if self._num_read.pop(req_id, None) is not None:
                self._cache.stop_request(req_id)

    def _read(self, req_id: str, context: np.ndarray, num_prompt_tokens: int) -> None:
        """Take in the tokens since the last time; a preempted request goes on where it was."""
        if req_id not in self._num_read:
            self._cache.start_request(req_id, context[:num_prompt_tokens])
            self._num_read[req_id] = num_prompt_tokens
        self._cache.add_active_response(req_id, context[self._num_read[req_id] :])
        self._num_read[req_id] = len(context)

    def _look_up(self, i: int, req_id: str, context: np.ndarray) -> int:
        """Fill the offer of request `i` and return the length of the match behind it.

        The tree is always asked for the longest draft there may be: which match it takes depends
        on that, and so a shorter draft is the beginning of a longer one.
        """
        found = self._cache.speculate(
            req_id,
            context,
            max_spec_tokens=MAX_TOKEN_DRAFT_LENGTH,
            max_spec_factor=self._max_spec_factor,
            min_token_prob=self._min_token_prob,
        )
        room = min(self._max_length, self._max_model_len - len(context))
        count = max(0, min(len(found.token_ids), room))
        if not found.token_ids:
            return 0
        self._num_draft_tokens[i] = count
        self._drafts[i, :count] = found.token_ids[:count]
        self._survival[i, :count] = found.probs[:count]
        return int(found.match_len)
