"""Baseline `goodput`: the drafts with the most expected tokens per second of expected time.

SmartSpec's and TurboSpec's rule, extended over drafters: of all pairs of drafter and length, the
one with the highest expected emitted tokens over step time, from decayed acceptance by position
and a fitted cost model. At request granularity every row has its own pair, chosen together.

Where actions have a cutoff, the model drafter's tokens are verified only while their survival
exceeds what their verification costs: its seconds times the tokens per second that are expected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..contract import Contract
from ..cost_model import CostModel
from ..errors import ConfigError
from ..step import StepRecord
from .acceptance import Acceptance, AcceptanceConfig
from .drafters import model_drafters, token_drafters
from .outlook import Outlook
from .prices import PriceList


@dataclass(frozen=True)
class GoodputConfig:
    """What the rule knows.

    Attributes:
        cost_model: A cost model's JSON file (`scripts/collect.py`).
        match_length_table: Whether acceptance of token drafters is told apart by match length.
        probe_after_steps: Steps without a model draft after which one is made to see what it is
            worth now; 0 never does.
        acceptance: How acceptance is estimated.
        backlog_share: Share of a request's older unread tokens that the next model draft is
            charged with. 1 is what it takes; but a request that copied for a while may then put
            EAGLE off for ever, as its backlog grows with every step, where reading it once would
            pay for many steps. 0 was up to 6 % faster on the published traces,
            and no different on those of the CPU.
    """

    cost_model: str
    match_length_table: bool = True
    probe_after_steps: int = 256
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    backlog_share: float = 0.0

    def __post_init__(self) -> None:
        if self.probe_after_steps < 0:
            raise ConfigError(f"probe_after_steps is {self.probe_after_steps}; make it 0 or more.")
        if not 0 <= self.backlog_share <= 1:
            raise ConfigError(f"backlog_share is {self.backlog_share}; make it 0 to 1.")


class GoodputController:
    """Maximises expected tokens per second of the next step.

    A token drafter is judged at every step whether it drafts or not. A model drafter starts with
    an optimistic prior and drifts back to it while it is not chosen; if that is not enough to be
    chosen, all rows take its best length once every `probe_after_steps`.

    Args:
        contract: The action table; its granularity says whether rows have their own actions.
        cost_model: Prices a step.
        config: What the rule knows.
    """

    def __init__(self, contract: Contract, cost_model: CostModel, config: GoodputConfig) -> None:
        self._config = config
        self._per_request = contract.granularity == "request"
        self._prices = PriceList(cost_model)
        self._acceptance = Acceptance(
            contract, config.acceptance, by_match_length=config.match_length_table
        )
        self._contract = contract
        self._tokens = token_drafters(contract)
        self._models = model_drafters(contract)
        self._actions = np.array(
            [
                (0, 0),
                *(
                    (drafter, length)
                    for drafter in (*self._tokens, *self._models)
                    for length in range(1, 1 + contract.max_lengths[drafter])
                ),
            ]
        )
        num_model_actions = sum(contract.max_lengths[drafter] for drafter in self._models)
        self._first_model = len(self._actions) - num_model_actions
        self._steps_since_model = 0

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Take in the step and choose the drafts of the next."""
        self._acceptance.update(record)
        outlook = self._outlook(record)
        if self._is_probe_due(record, outlook):
            rates = outlook.batch_rates()[self._first_model :]
            return self._actions[[self._first_model + rates.argmax()]]
        if self._per_request:
            actions, rate = outlook.best_actions()
        else:
            actions, rate = outlook.best_action()
        if not self._contract.cutoffs:
            return actions
        price = outlook.prices.verified_token_s * rate
        cutoff = np.searchsorted(self._contract.cutoffs, price, side="right")
        return np.column_stack((actions, np.full(len(actions), cutoff)))

    def _is_probe_due(self, record: StepRecord, outlook: Outlook) -> bool:
        is_used = np.isin(record.drafter, self._models).any()
        self._steps_since_model = 0 if is_used else self._steps_since_model + 1
        patience = self._config.probe_after_steps
        return bool(0 < patience <= self._steps_since_model and outlook.has_model.any())

    def _outlook(self, record: StepRecord) -> Outlook:
        """What each action would bring and cost each row."""
        drafted = np.zeros((record.num_rows, len(self._actions)))
        gain = np.zeros_like(drafted)
        has_model = np.zeros(record.num_rows, bool)
        num_charged_tokens = np.zeros(record.num_rows)
        column = 1
        for drafter in self._tokens:
            columns = slice(column, column := column + self._contract.max_lengths[drafter])
            offer = record.token_offers[self._contract.drafters[drafter]]
            lengths = self._actions[columns, 1]
            drafted[:, columns] = np.minimum(lengths, offer.num_draft_tokens[:, None])
            gain[:, columns] = self._acceptance.of_offers(drafter, record).cumsum(axis=1)
        for drafter in self._models:
            state = record.model_states[self._contract.drafters[drafter]]
            num_pending = state.num_pending_tokens
            num_new = np.minimum(num_pending, record.num_emitted_tokens)
            num_charged_tokens = num_new + self._config.backlog_share * (num_pending - num_new)
            has_model = state.fresh & (num_pending > 0)
            drafted[has_model, column:] = self._actions[column:, 1]
            gain[has_model, column:] = self._acceptance.of_model(drafter).cumsum()
        prices = self._prices.at(record.num_running_reqs)
        return Outlook(
            prices=prices,
            plain_s=prices.plain_s(record),
            actions=self._actions,
            first_model=self._first_model,
            drafted=drafted,
            gain=gain,
            has_model=has_model,
            num_pending_tokens=num_charged_tokens,
            num_context_tokens=record.num_context_tokens,
        )
