"""The n-gram drafter: vLLM's matcher, with what its match is worth.

It looks up the longest suffix of the context that occurred before (the earliest occurrence wins,
as in `vllm.v1.spec_decode.ngram_proposer`) and offers the tokens that followed. Unlike vLLM's own
it also tells the length of the match and how far other places in the context agree with the draft,
and checks every past offer against what the target went on to emit, chosen or not.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..compiled import compiled
from ..step import TokenOffer
from .pledges import Pledges
from .token_drafter import NO_SURVIVAL, Contexts, Draft


@compiled
def _longest_match(
    tokens: np.ndarray, min_match: int, max_match: int
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Find the longest earlier occurrence of the suffix of `tokens`.

    The suffix is the prefix of the reversed context, so one pass of the Knuth-Morris-Pratt
    failure function over the reversed context finds its longest and, by keeping the last hit,
    its earliest occurrence.

    Returns:
        `(start of the tokens that follow the match, match length)`; zeros without a match of at
        least `min_match` tokens.
    """
    num_tokens = len(tokens)
    failure = np.zeros(max_match, np.int32)
    longest, position = 0, 0
    length = 0
    i = 1
    while i < num_tokens:
        if tokens[num_tokens - 1 - length] == tokens[num_tokens - 1 - i]:
            length += 1
            if length >= longest:
                longest, position = length, i
            if i < max_match:
                failure[i] = length
            if length == max_match:
                length = failure[max_match - 1]
            i += 1
        elif length != 0:
            length = failure[length - 1]
        else:
            i += 1
    if longest < min_match:
        return 0, 0
    return num_tokens - 1 - position + longest, longest


@compiled
def _agreement(tokens: np.ndarray, draft_token: int) -> float:  # pragma: no cover - compiled
    """How many earlier places like the end of the context went on with a token.

    A place is like the end if it has its last token, and more so if it has its last two. One
    place that went on otherwise is assumed, so that much evidence counts for more than little.

    Returns:
        The mean of the two shares, in [0, 1).
    """
    num_tokens = len(tokens)
    alike, alike_in_two = 1, 1
    agree, agree_in_two = 0, 0
    for i in range(num_tokens - 1):
        if tokens[i] != tokens[num_tokens - 1]:
            continue
        goes_on_so = tokens[i + 1] == draft_token
        alike += 1
        agree += goes_on_so
        if i > 0 and tokens[i - 1] == tokens[num_tokens - 2]:
            alike_in_two += 1
            agree_in_two += goes_on_so
    return (agree / alike + agree_in_two / alike_in_two) / 2


@compiled
def _draft_rows(
    token_ids: np.ndarray,
    rows: np.ndarray,
    num_tokens: np.ndarray,
    min_match: int,
    max_match: int,
    max_lengths: np.ndarray,
    drafts: np.ndarray,
    found: np.ndarray,
    agreement: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Fill `drafts [rows, max length]`, `found [rows, 2]` (match, draft), `agreement [rows]`."""
    for i in range(len(rows)):
        context = token_ids[rows[i], : num_tokens[i]]
        start, match_length = _longest_match(context, min_match, max_match)
        num_draft_tokens = 0
        if match_length:
            num_draft_tokens = min(max_lengths[i], len(context) - start)
            for j in range(num_draft_tokens):
                drafts[i, j] = context[start + j]
        if num_draft_tokens:
            agreement[i] = _agreement(context, drafts[i, 0])
        found[i, 0] = match_length
        found[i, 1] = num_draft_tokens


@compiled
def drafts_along(
    token_ids: np.ndarray,
    num_prompt_tokens: int,
    min_match: int,
    max_match: int,
    max_length: int,
) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """What the drafter would offer at every output position of a finished request.

    Args:
        token_ids: Prompt and output, int32 `[tokens]`.
        num_prompt_tokens: How many of them are the prompt.
        min_match: Shortest match in tokens that is offered.
        max_match: Longest match in tokens that is looked for.
        max_length: Longest draft in tokens.

    Returns:
        Match length, draft tokens, and how many leading ones of these the output goes on with,
        int32 `[positions, 3]`; agreement, float32 `[positions]`.
    """
    num_tokens = len(token_ids)
    found = np.zeros((num_tokens - num_prompt_tokens, 3), np.int32)
    agreement = np.zeros(num_tokens - num_prompt_tokens, np.float32)
    for end in range(num_prompt_tokens, num_tokens):
        start, match_length = _longest_match(token_ids[:end], min_match, max_match)
        if not match_length:
            continue
        num_draft_tokens = min(max_length, end - start)
        accepted = 0
        while (
            accepted < min(num_draft_tokens, num_tokens - end)
            and token_ids[start + accepted] == token_ids[end + accepted]
        ):
            accepted += 1
        position = end - num_prompt_tokens
        found[position] = (match_length, num_draft_tokens, accepted)
        agreement[position] = _agreement(token_ids[:end], token_ids[start])
    return found, agreement


class NgramDrafter:
    """Offers drafts from the context of each request.

    Args:
        max_length: Longest draft in tokens.
        min_match: Shortest match in tokens that is offered.
        max_match: Longest match in tokens that is looked for.
        max_model_len: Longest context of the engine; drafts never run past it.
    """

    def __init__(
        self, *, max_length: int, min_match: int, max_match: int, max_model_len: int
    ) -> None:
        self._max_length = max_length
        self._min_match = min_match
        self._max_match = max_match
        self._max_model_len = max_model_len
        self._pledges = Pledges()
        self._drafts = np.zeros((0, max_length), np.int32)
        self._num_draft_tokens = np.zeros(0, np.int32)

    def warm_up(self) -> None:
        """Compile the matcher before the first request needs it."""
        eight = np.array([8], np.int32)
        context = np.zeros((1, 8), np.int32)
        self.offer(Contexts(("warm-up",), context, np.zeros(1, np.intp), eight, eight))
        self.forget(["warm-up"])

    def offer(self, contexts: Contexts) -> TokenOffer:
        """Settle every request's earlier offer and look it up again."""
        settled = self._pledges.settle(contexts)
        num_tokens = contexts.num_tokens
        self._drafts = np.zeros((len(num_tokens), self._max_length), np.int32)
        found = np.zeros((len(num_tokens), 2), np.int32)
        agreement = np.zeros(len(num_tokens), np.float32)
        room = np.minimum(self._max_length, self._max_model_len - num_tokens).astype(np.int32)
        _draft_rows(
            contexts.token_ids,
            contexts.rows,
            num_tokens,
            self._min_match,
            self._max_match,
            np.maximum(room, 0),
            self._drafts,
            found,
            agreement,
        )
        self._num_draft_tokens = found[:, 1]
        self._pledges.make(contexts, self._drafts, self._num_draft_tokens)
        return TokenOffer(found[:, 0], found[:, 1], settled, agreement)

    def draft(self, requests: np.ndarray, lengths: np.ndarray) -> list[Draft]:
        """The drafts on offer, each cut to its length; their survival is not known."""
        counts = np.minimum(lengths, self._num_draft_tokens[requests])
        return [
            Draft(self._drafts[i, :count].tolist(), NO_SURVIVAL)
            for i, count in zip(requests.tolist(), counts.tolist(), strict=True)
        ]

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is kept of ended requests."""
        self._pledges.forget(req_ids)
