"""Baseline `match_else_model`: copy where the context repeats itself, else ask the drafter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..contract import Contract
from ..errors import ConfigError
from ..step import StepRecord
from .drafters import the_model_drafter, the_token_drafter


@dataclass(frozen=True)
class MatchElseModelConfig:
    """Threshold and lengths.

    Attributes:
        min_match_length: Tokens from which a match is trusted.
        token_length: Draft length of the token drafter.
        model_length: Draft length of the model drafter; 0 drafts nothing without a match.
    """

    min_match_length: int = 3
    token_length: int = 8
    model_length: int = 3

    def __post_init__(self) -> None:
        if self.min_match_length < 1 or self.token_length < 1 or self.model_length < 0:
            raise ConfigError(
                "match_else_model needs min_match_length >= 1, token_length >= 1 and "
                "model_length >= 0; correct them."
            )


class MatchElseModelController:
    """The token drafter where its match is long enough, else the model drafter.

    At batch granularity the batch takes what at least half of its requests would take.

    Args:
        contract: The action table.
        config: Threshold and lengths.

    Raises:
        ConfigError: If the engine lacks one of the two kinds of drafters.
    """

    def __init__(self, contract: Contract, config: MatchElseModelConfig) -> None:
        token = the_token_drafter(contract)
        self._name = contract.drafters[token]
        self._per_request = contract.granularity == "request"
        self._min_match_length = config.min_match_length
        self._actions = np.array(
            [(the_model_drafter(contract), config.model_length), (token, config.token_length)]
        )

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Choose by the match on offer."""
        has_match = record.token_offers[self._name].match_length >= self._min_match_length
        if not self._per_request:
            has_match = np.array([2 * np.count_nonzero(has_match) >= len(has_match)])
        return self._actions[has_match.astype(int)]
