"""What each request's draft costs the engine step, so that the rows' charges add up to the batch's.

A draft costs what it alone adds (tokens that the target verifies, tokens and context that the model
drafter reads) and a share of what drafts have in common: a pass of the model drafter is split
evenly over the requests whose drafts are at least that long, the rest of its work and a token
drafter's look-ups over all requests that use them. That is the Shapley value of a sum of such
costs. A request that does not draft is charged nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policy.compiled import compiled
from policy.cost_model import (
    CONTEXT,
    DRAFT_CONTEXT,
    MODEL_DRAFTS,
    PASS_TOKENS,
    PASSES,
    STEPS,
    VERIFIED,
)

from .simulator import can_read, resolved, wanted_length
from .simulator_state import Engines, Replay


class Reading(NamedTuple):
    """What the model drafter is about to read, row by row.

    Attributes:
        passes: Its passes for each row, int32 `[engines, rows]`; 0 where it does not draft.
        pending: Tokens it reads of each row first, int32 `[engines, rows]`.
    """

    passes: np.ndarray
    pending: np.ndarray

    @classmethod
    def empty(cls, engines: Engines) -> Reading:
        """Nothing."""
        shape = engines.row_entry.shape
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.int32))


@compiled
def note_reading(
    replay: Replay, engines: Engines, e: int, actions: np.ndarray, reading: Reading
) -> None:
    """See what the model drafter will read; call before `simulator.draft`.

    Args:
        replay: Traces and settings.
        engines: Before the drafts.
        e: The engine.
        actions: Drafter index, draft length and what else there is, int64 `[rows, …]`.
        reading: Filled in for this engine.
    """
    for row in range(engines.counters[e].num_rows):
        request = engines.requests[e, engines.row_entry[e, row]]
        drafter, length = resolved(replay, engines, e, row, actions[row, 0], actions[row, 1])
        length = wanted_length(replay, request, drafter, length)
        reads = length > 0 and replay.is_model[drafter] and can_read(request)
        reading.passes[e, row] = length if reads else 0
        reading.pending[e, row] = request.num_pending if reads else 0


@compiled
def charge_rows(
    replay: Replay, engines: Engines, e: int, load: int, reading: Reading, seconds: np.ndarray
) -> None:
    """Charge each row for its draft; call between `simulator.draft` and `simulator.run`.

    Args:
        replay: Traces and prices.
        engines: With the drafts made.
        e: The engine.
        load: Requests that will run.
        reading: Of this engine's drafts.
        seconds: Filled in, float64 `[rows]`.
    """
    num_rows = engines.counters[e].num_rows
    requests, row_entry, prices = engines.requests[e], engines.row_entry[e], replay.seconds[load]
    passes, pending = reading.passes[e], reading.pending[e]
    longest = num_readers = num_token_drafts = num_model_drafts = 0
    num_verified = load
    num_context = 0
    for row in range(num_rows):
        request = requests[row_entry[row]]
        longest = max(longest, passes[row])
        num_readers += passes[row] > 0
        num_verified += request.draft_length
        num_context += context_of(replay, request)
        if request.draft_length > 0:
            if replay.is_model[request.draft_drafter]:
                num_model_drafts += 1
            else:
                num_token_drafts += 1
    target_s = prices[STEPS] + num_verified * prices[VERIFIED] + num_context * prices[CONTEXT]
    for row in range(num_rows):
        request = requests[row_entry[row]]
        total_s = request.draft_length * prices[VERIFIED]
        total_s += pending[row] * prices[PASS_TOKENS]
        if request.draft_length > 0:
            if replay.is_model[request.draft_drafter]:
                total_s += prices[MODEL_DRAFTS] / num_model_drafts
                total_s += context_of(replay, request) * prices[DRAFT_CONTEXT]
            else:
                total_s += replay.token_draft_share * target_s / num_token_drafts
        seconds[row] = total_s
    for number in range(1, longest + 1):
        num_sharing = 0
        for row in range(num_rows):
            num_sharing += passes[row] >= number
        pass_s = prices[PASSES] + (num_readers * prices[PASS_TOKENS] if number > 1 else 0.0)
        for row in range(num_rows):
            if passes[row] >= number:
                seconds[row] += pass_s / num_sharing


@compiled
def context_of(replay: Replay, request: object) -> int:
    """Prompt and output tokens of a request so far."""
    return replay.recorded[request.trace].num_prompt + request.num_emitted  # type: ignore[attr-defined]
