"""The greedy oracle as a controller: at every step of a replay, the best choice with hindsight.

It serves the same requests as the contenders it is set beside, prompts and idle slots included.
Its pricing is `if_it_wins`, as the replayed engine charges: a drafter is paid where it drafts. What
the model drafter must read after a pause is not foreseen.
"""

from __future__ import annotations

import functools

import numpy as np

from policy.contract import Contract
from policy.cost_model import CostModel
from policy.step import StepRecord

from .closed_loop import choose
from .draft_options import Prices, prices_at
from .oracles import exact_options
from .traces import Traces


class OracleController:
    """Drafts for each request what will be accepted, where that brings more tokens per second.

    Args:
        traces: What is replayed, in requests that `TraceWorkload` names.
        cost_model: What the replayed engine charges.
        contract: Drafters and lengths to choose from.

    Raises:
        TraceError: If a drafter was not recorded.
    """

    def __init__(self, traces: Traces, cost_model: CostModel, contract: Contract) -> None:
        options = exact_options(
            traces, contract.proposers, contract.max_num_speculative_tokens, "if_it_wins"
        )
        longest = np.array(contract.max_lengths[: 1 + len(contract.proposers)], np.int32)[:, None]
        drafted = np.minimum(options.drafted, longest)
        self._options = options._replace(drafted=drafted, emitted=drafted + 1)
        self._cost_model = cost_model
        self._first = dict(zip(traces.request_ids, traces.starts[:-1].tolist(), strict=True))
        self._last = dict(zip(traces.request_ids, (traces.starts[1:] - 1).tolist(), strict=True))
        self._num_prompt = {
            name: len(prompt)
            for name, prompt in zip(traces.request_ids, traces.prompts, strict=True)
        }
        self._prices = functools.cache(self._prices_at)

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """The action of each request, int64 `[rows, 2]`."""
        position = np.array(
            [
                self._position(req_id, num_context)
                for req_id, num_context in zip(
                    record.req_ids, record.num_context_tokens.tolist(), strict=True
                )
            ],
            np.int64,
        )
        option, length = np.zeros((2, record.num_rows), np.int64)
        choose(self._options, self._prices(record.num_running_reqs), position, option, length)
        return np.stack((option, length), axis=1)

    def _position(self, req_id: str, num_context: int) -> int:
        """Where a request stands; its name is the recorded one's, the seed, and a number."""
        name = req_id.rsplit("-", 2)[0]
        return min(self._first[name] + num_context - self._num_prompt[name], self._last[name])

    def _prices_at(self, num_running_reqs: int) -> Prices:
        return prices_at(self._cost_model, num_running_reqs)
