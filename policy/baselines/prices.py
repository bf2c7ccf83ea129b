"""A cost model at one load, by name: what the rules multiply and add."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost_model import FEATURES, CostModel
from ..step import StepRecord


@dataclass(frozen=True)
class Prices:
    """Seconds per unit of each kind of work; see `StepShape`.

    Attributes:
        step_s: Per engine step.
        verified_token_s: Per token that the target verifies.
        context_token_s: Per token that the target attends to.
        model_draft_s: Per step in which the model drafter drafts.
        pass_s: Per forward pass of the model drafter.
        pass_token_s: Per token in those passes.
        draft_context_token_s: Per context token of the requests it drafts for.
        token_draft_share: Share of the target's time that a token drafter's look-ups add.
    """

    step_s: float
    verified_token_s: float
    context_token_s: float
    model_draft_s: float
    pass_s: float
    pass_token_s: float
    draft_context_token_s: float
    token_draft_share: float

    def plain_s(self, record: StepRecord) -> float:
        """The next step of the record's rows without drafts and prompts."""
        context_s = self.context_token_s * int(record.num_context_tokens.sum())
        return self.step_s + self.verified_token_s * record.num_rows + context_s


class PriceList:
    """A cost model's prices by load, each load looked up once.

    Args:
        cost_model: Prices a step.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._at: dict[int, Prices] = {}

    def at(self, num_running_reqs: int) -> Prices:
        """The prices with so many requests running."""
        if num_running_reqs not in self._at:
            weights_s = self._cost_model.weights_at([num_running_reqs])[0].tolist()
            by_name = dict(zip(FEATURES, weights_s, strict=True))
            self._at[num_running_reqs] = Prices(
                step_s=by_name["num_engine_steps"],
                verified_token_s=by_name["num_verified_tokens"],
                context_token_s=by_name["num_context_tokens"],
                model_draft_s=by_name["num_model_drafts"],
                pass_s=by_name["num_draft_passes"],
                pass_token_s=by_name["num_draft_pass_tokens"],
                draft_context_token_s=by_name["num_draft_context_tokens"],
                token_draft_share=self._cost_model.token_draft_share,
            )
        return self._at[num_running_reqs]
