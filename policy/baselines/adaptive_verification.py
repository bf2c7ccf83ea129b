"""Baseline `adaptive_verification`: draft in full, verify only what is likely enough.

vLLM's adaptive verification (DSpark): the survival of every draft token is the product of its
drafter's confidences up to it. Of all tokens of all requests the most likely are admitted, as many
as maximise expected tokens over the time of drafting and verifying them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..contract import Contract
from ..cost_model import CostModel
from ..errors import ConfigError
from ..step import StepRecord
from .acceptance import Acceptance, AcceptanceConfig
from .drafters import the_model_drafter, token_drafters
from .prices import PriceList


@dataclass(frozen=True)
class AdaptiveVerificationConfig:
    """What is drafted.

    Attributes:
        cost_model: A cost model's JSON file (`scripts/collect.py`).
        model_length: Draft length of the model drafter; null takes its longest.
        min_match_length: Tokens from which a token drafter's match goes first; 0 never.
        acceptance: How the survival of token drafts is estimated.
    """

    cost_model: str
    model_length: int | None = None
    min_match_length: int = 0
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.min_match_length < 0 or (self.model_length is not None and self.model_length < 1):
            raise ConfigError(
                "adaptive_verification needs min_match_length >= 0 and model_length >= 1; "
                "correct them."
            )


class AdaptiveVerificationController:
    """Always drafts, and admits what pays.

    Args:
        contract: The action table.
        cost_model: Prices a step.
        config: What is drafted.

    Raises:
        ConfigError: If the engine has no model drafter.
    """

    def __init__(
        self, contract: Contract, cost_model: CostModel, config: AdaptiveVerificationConfig
    ) -> None:
        self._contract = contract
        self._model = the_model_drafter(contract)
        length = contract.max_lengths[self._model]
        self._action = self._model, min(config.model_length or length, length)
        self._prices = PriceList(cost_model)
        self._acceptance = Acceptance(contract, config.acceptance, by_match_length=True)
        self._tokens = token_drafters(contract)[:1] if config.min_match_length else []
        self._min_match_length = config.min_match_length

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """The longest draft for every request."""
        self._acceptance.update(record)
        actions = np.array([self._action] * record.num_rows)
        for drafter in self._tokens:
            offer = record.token_offers[self._contract.drafters[drafter]]
            is_first = offer.match_length >= self._min_match_length
            actions[is_first] = drafter, self._contract.max_lengths[drafter]
        return actions

    def admit(self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Tokens of each draft that are worth their verification; see `admitted_lengths`."""
        likely = self._likely(record, drafts, survival)
        rows = np.repeat(np.arange(len(likely)), likely.shape[1])
        order = np.argsort(-likely, axis=None, kind="stable")
        order = order[likely.ravel()[order] > 0]
        gained = np.concatenate(([0.0], likely.ravel()[order].cumsum()))
        prices = self._prices.at(record.num_running_reqs)
        seconds = prices.plain_s(record) + prices.verified_token_s * np.arange(len(gained))
        if np.isin(drafts[:, 0], self._tokens).any():
            seconds *= 1 + prices.token_draft_share
        seconds += self._drafting_s(record, drafts)
        best = int(((record.num_rows + gained) / seconds).argmax())
        return np.bincount(rows[order[:best]], minlength=record.num_rows)

    def _likely(self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Survival of every token that was drafted, float64 `[rows, max length]`; 0 elsewhere."""
        likely = survival.astype(np.float64)
        for drafter in self._tokens:
            rows = drafts[:, 0] == drafter
            offered = self._acceptance.of_offers(drafter, record)[rows]
            likely[rows, : offered.shape[1]] = offered
        likely[np.arange(likely.shape[1]) >= drafts[:, 1:]] = 0
        return np.minimum.accumulate(np.nan_to_num(likely), axis=1)

    def _drafting_s(self, record: StepRecord, drafts: np.ndarray) -> float:
        """What the drafts took."""
        prices = self._prices.at(record.num_running_reqs)
        is_model = drafts[:, 0] == self._model
        if not is_model.any():
            return 0.0
        pending = record.model_states[self._contract.drafters[self._model]].num_pending_tokens
        num_passes = int(drafts[is_model, 1].max())
        num_tokens = int(pending[is_model].sum()) + (num_passes - 1) * int(is_model.sum())
        return (
            prices.model_draft_s
            + prices.pass_s * num_passes
            + prices.pass_token_s * num_tokens
            + prices.draft_context_token_s * int(record.num_context_tokens[is_model].sum())
        )
