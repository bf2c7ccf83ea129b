"""What each step tells of a token drafter's drafts: verified ones, and offers nobody took.

A draft of four tokens that was verified tells of its first four positions and no more. An offer
that the output has since confirmed or refuted (`TokenOffer.counterfactual_accepted`) tells of all
its positions, drafted or not; those that were verified are not counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..contract import Contract
from ..step import StepRecord


@dataclass(slots=True)
class _OpenOffer:
    """An offer on which the output has not decided yet; `num_told` positions were counted."""

    match_length: int
    num_draft_tokens: int
    num_told: int = 0
    is_latest: bool = True


class JudgedOffers:
    """Follows one token drafter's offers, request by request.

    Args:
        contract: Names the drafters.
        drafter: Index of the token drafter.
    """

    def __init__(self, contract: Contract, drafter: int) -> None:
        self._drafter = drafter
        self._name = contract.drafters[drafter]
        self._match_length: dict[str, int] = {}
        self._open: dict[str, _OpenOffer] = {}

    def samples(self, record: StepRecord) -> np.ndarray:
        """Take in a step and return what it tells.

        An offer is opened and settled as the drafter itself does it (`TokenOffer`).

        Args:
            record: The step just done.

        Returns:
            int64 `[samples, 4]`: match length, positions told by an earlier sample of the same
            draft, positions told by now, accepted tokens.
        """
        for req_id in record.finished_req_ids:
            self._match_length.pop(req_id, None)
            self._open.pop(req_id, None)
        offers = record.token_offers[self._name]
        samples: list[tuple[int, int, int, int]] = []
        for req_id, drafter, num_drafted, num_accepted, match_length, num_offered, judged in zip(
            record.req_ids,
            record.drafter.tolist(),
            record.num_draft_tokens.tolist(),
            record.num_accepted_tokens.tolist(),
            offers.match_length.tolist(),
            offers.num_draft_tokens.tolist(),
            offers.counterfactual_accepted.tolist(),
            strict=True,
        ):
            offer = self._open.get(req_id)
            if drafter == self._drafter:
                matched = self._match_length.get(req_id, 0)
                samples.append((matched, 0, num_drafted, num_accepted))
                if offer is not None and offer.is_latest:
                    offer.num_told = num_drafted
            if offer is not None:
                offer.is_latest = False
                if judged >= 0:
                    del self._open[req_id]
                    told = offer.num_told, offer.num_draft_tokens, judged
                    if told[0] < told[1]:
                        samples.append((offer.match_length, *told))
            if num_offered and req_id not in self._open:
                self._open[req_id] = _OpenOffer(match_length, num_offered)
            self._match_length[req_id] = match_length
        return np.array(samples, np.int64).reshape(-1, 4)
