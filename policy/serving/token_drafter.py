"""What the hook asks of a drafter that reads tokens only, and what it hands to it.

Such a drafter looks every request up after every step, so that its offers are observed, and past
ones judged, whether or not it is chosen; drafting is then a matter of cutting its offers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from ..step import TokenOffer


class Contexts(NamedTuple):
    """The requests that got a token in a step, prompt and output tokens of each.

    Attributes:
        req_ids: The requests, one per entry of `rows`.
        token_ids: Contexts by engine row, int32 `[engine rows, max_model_len]`.
        rows: Engine row of each request, int `[requests]`.
        num_tokens: Context length of each request, int32 `[requests]`.
        num_prompt_tokens: How many of these are its prompt, int32 `[requests]`.
    """

    req_ids: tuple[str, ...]
    token_ids: np.ndarray
    rows: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray

    def context(self, i: int) -> np.ndarray:
        """All tokens of request `i`, int32 `[num_tokens]`."""
        tokens: np.ndarray = self.token_ids[self.rows[i], : self.num_tokens[i]]
        return tokens


class Draft(NamedTuple):
    """A request's draft.

    Attributes:
        token_ids: The tokens; empty without a draft.
        survival: Probability that each token survives verification, float32 `[tokens]`; empty
            where the drafter does not know.
    """

    token_ids: list[int]
    survival: np.ndarray


NO_SURVIVAL = np.zeros(0, np.float32)


class TokenDrafter(Protocol):
    """A drafter that reads tokens only."""

    def warm_up(self) -> None:
        """Do before the first request what would keep it waiting."""
        ...

    def offer(self, contexts: Contexts) -> TokenOffer:
        """Read what the step emitted, settle earlier offers and make new ones."""
        ...

    def draft(self, requests: np.ndarray, lengths: np.ndarray) -> list[Draft]:
        """The drafts on offer.

        Args:
            requests: Entries of the last `offer`, int `[requests]`.
            lengths: Most tokens for each, int `[requests]`.
        """
        ...

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is kept of ended requests."""
        ...
