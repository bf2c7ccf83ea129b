"""How far drafts get: the share of drafts whose first tokens, up to each position, are accepted.

The rates are unconditional, as SmartSpec's: position 3 counts as accepted only together with 1 and
2, so the expected tokens of a draft are one plus the sum of its rates. Old drafts count less with
each new one. A draft tells of the positions it had and of no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..contract import MAX_TOKEN_DRAFT_LENGTH, Contract
from ..errors import ConfigError
from ..step import StepRecord
from .drafters import model_drafters, token_drafters
from .judged_offers import JudgedOffers


@dataclass(frozen=True)
class AcceptanceConfig:
    """How acceptance is estimated.

    Attributes:
        decay: Weight a draft keeps when a newer one is counted: 0.998 remembers some 500 drafts.
        prior_rate: Share of drafts that get one position further, assumed before any was seen;
            high, so that what was never tried is tried.
        prior_weight: Drafts that the assumption stands for.
    """

    decay: float = 0.998
    prior_rate: float = 0.8
    prior_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1 or not 0 <= self.prior_rate <= 1:
            raise ConfigError(
                f"decay {self.decay} or prior_rate {self.prior_rate} is out of range; make decay "
                "above 0 and both at most 1."
            )
        if not self.prior_weight > 0:
            raise ConfigError(f"prior_weight is {self.prior_weight}; make it more than 0.")


class AcceptanceTable:
    """One drafter's rates by position, and by match length where there is one.

    Args:
        num_match_lengths: Rows of the table; longer matches count in the last.
        max_length: Longest draft in tokens.
        config: How acceptance is estimated.
    """

    def __init__(self, num_match_lengths: int, max_length: int, config: AcceptanceConfig) -> None:
        self._config = config
        self._drafted = np.zeros((num_match_lengths, max_length))
        self._accepted = np.zeros((num_match_lengths, max_length))
        self._positions = np.arange(max_length)

    def add(self, samples: np.ndarray) -> None:
        """Count what a step tells.

        Args:
            samples: int64 `[samples, 4]` as of `JudgedOffers.samples`.
        """
        match_length, told_before, told, accepted = samples.T[..., None]
        row = np.minimum(match_length[:, 0], len(self._drafted) - 1)
        is_told = (self._positions >= told_before) & (self._positions < told)
        num_drafts = np.bincount(row[told_before[:, 0] == 0], minlength=len(self._drafted))
        self._forget(num_drafts[:, None])
        np.add.at(self._drafted, row, is_told)
        np.add.at(self._accepted, row, is_told & (self._positions < accepted))

    def age(self) -> None:
        """Let a step without a draft make the past count less, as a draft would."""
        self._forget(1)

    def survival(self) -> np.ndarray:
        """Share of drafts accepted up to each position, float64 `[match lengths, max length]`.

        The prior is worth `prior_weight` drafts: at each position of all matches together it is
        the rate one position earlier times `prior_rate`, and for one match length it is the rate
        of all of them. Rates never rise along a draft.
        """
        prior_rate, weight = self._config.prior_rate, self._config.prior_weight
        rates, rate = [], 1.0
        for drafted, accepted in zip(
            self._drafted.sum(axis=0).tolist(), self._accepted.sum(axis=0).tolist(), strict=True
        ):
            rate = min(rate, (accepted + weight * prior_rate * rate) / (drafted + weight))
            rates.append(rate)
        if len(self._drafted) == 1:
            return np.array([rates])
        by_match = (self._accepted + weight * np.array(rates)) / (self._drafted + weight)
        return np.minimum.accumulate(by_match, axis=1)

    def _forget(self, num_drafts: np.ndarray | int) -> None:
        self._drafted *= self._config.decay**num_drafts
        self._accepted *= self._config.decay**num_drafts


class Acceptance:
    """The tables of all drafters of an engine, kept up to date by its steps.

    Args:
        contract: Names the drafters.
        config: How acceptance is estimated.
        by_match_length: Whether token drafters have rates for each match length.
    """

    def __init__(
        self, contract: Contract, config: AcceptanceConfig, *, by_match_length: bool
    ) -> None:
        rows = 1 + MAX_TOKEN_DRAFT_LENGTH if by_match_length else 1
        self._offers = {i: JudgedOffers(contract, i) for i in token_drafters(contract)}
        self._models = model_drafters(contract)
        self._tables = {
            i: AcceptanceTable(rows if i in self._offers else 1, contract.max_lengths[i], config)
            for i in (*self._offers, *self._models)
        }
        self._contract = contract

    def update(self, record: StepRecord) -> None:
        """Take in the step just done.

        A token drafter is judged at every step, for free. What a model drafter was worth is known
        only while it drafts, and a token that was cut brought nothing; each step without a draft
        ages it, so that the prior returns.
        """
        for drafter, offers in self._offers.items():
            self._tables[drafter].add(offers.samples(record))
        for drafter in self._models:
            survival = record.model_states[self._contract.drafters[drafter]].survival
            num_verified = np.where(record.drafter == drafter, record.num_draft_tokens, 0)
            num_made = np.maximum(np.count_nonzero(~np.isnan(survival), axis=1), num_verified)
            used = num_made > 0
            if used.any():
                told = np.zeros((np.count_nonzero(used), 4), np.int64)
                told[:, 2] = num_made[used]
                told[:, 3] = record.num_accepted_tokens[used]
                self._tables[drafter].add(told)
            else:
                self._tables[drafter].age()

    def of_model(self, drafter: int) -> np.ndarray:
        """Survival of the model drafter's tokens, float64 `[max length]`."""
        return self._tables[drafter].survival()[0]

    def of_offers(self, drafter: int, record: StepRecord) -> np.ndarray:
        """Survival of the tokens on offer, float64 `[rows, max length]`; 0 beyond each offer."""
        offer = record.token_offers[self._contract.drafters[drafter]]
        table = self._tables[drafter].survival()
        survival = table[np.minimum(offer.match_length, len(table) - 1)]
        survival[np.arange(survival.shape[1]) >= offer.num_draft_tokens[:, None]] = 0
        return survival
