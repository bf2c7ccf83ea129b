"""What every action of every request would bring and cost, beside what the others decided.

Only a recording can tell. A draft costs the time by which it lengthens the step: a pass that others
need anyway is free, while `envs.row_charges` shares it, so that its charges add up. What an action
changes is what a learner has to know; with shared charges nobody would draft with the model
drafter once few do.

Tokens that wait for the model drafter cost nothing here: most are read sooner or later.
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

from .row_charges import Reading, context_of
from .simulator import can_read, num_confident, resolved, wanted_length
from .simulator_state import Engines, Replay


class Worth(NamedTuple):
    """What the actions of a step's decisions were worth.

    Attributes:
        tokens: Output tokens that each action would have brought, float32 `[requests, actions]`;
            0 where nobody decided.
        plain_steps: Time that it would have been charged, in steps of no speculation, float32
            `[requests, actions]`.
        price: Tokens that such a step is worth at the request's load, float32 `[requests]`.
    """

    tokens: np.ndarray
    plain_steps: np.ndarray
    price: np.ndarray


@compiled
def value_rows(
    replay: Replay,
    engines: Engines,
    e: int,
    load: int,
    actions: np.ndarray,
    table: np.ndarray,
    reading: Reading,
    tokens: np.ndarray,
    seconds: np.ndarray,
) -> None:
    """Value every action of every row; call between `row_charges.note_reading` and `draft`.

    Args:
        replay: Traces and prices.
        engines: Before the drafts.
        e: The engine.
        load: Requests that will run.
        actions: What the rows decided, int64 `[rows, …]`.
        table: The contract's canonical actions, int64 `[actions, …]`.
        reading: Of the decided drafts.
        tokens: Output tokens that the action would bring, filled in, float32 `[rows, actions]`.
        seconds: By how much it would lengthen the step, filled in, float32 `[rows, actions]`.
    """
    num_rows, prices = engines.counters[e].num_rows, replay.seconds[load]
    own_verified = np.zeros(num_rows, np.int64)
    has_token_draft = np.zeros(num_rows, np.bool_)
    has_model_draft = np.zeros(num_rows, np.bool_)
    num_sharing = np.zeros(replay.max_num_speculative_tokens + 1, np.int64)  # by pass
    num_verified, num_context = load, 0
    for row in range(num_rows):
        request = engines.requests[e, engines.row_entry[e, row]]
        drafter, _, verified, _ = _draft(replay, engines, e, row, actions[row])
        own_verified[row] = verified
        has_token_draft[row] = verified > 0 and not replay.is_model[drafter]
        has_model_draft[row] = verified > 0 and replay.is_model[drafter]
        num_verified += verified
        num_context += context_of(replay, request)
        num_sharing[1 : reading.passes[e, row] + 1] += 1
    token_draft_share = replay.token_draft_share
    num_token_drafts, num_model_drafts = has_token_draft.sum(), has_model_draft.sum()
    for row in range(num_rows):
        request = engines.requests[e, engines.row_entry[e, row]]
        num_sharing[1 : reading.passes[e, row] + 1] -= 1  # from here on, of the others
        longest = 0
        while longest + 1 < len(num_sharing) and num_sharing[longest + 1] > 0:
            longest += 1
        others_look_up = num_token_drafts > has_token_draft[row]
        alone_s = prices[STEPS] + num_context * prices[CONTEXT]
        alone_s += (num_verified - own_verified[row]) * prices[VERIFIED]
        for action in range(len(table)):
            drafter, made, verified, accepted = _draft(replay, engines, e, row, table[action])
            target_s = verified * prices[VERIFIED]
            total_s = target_s + (token_draft_share * target_s if others_look_up else 0.0)
            if made > 0 and replay.is_model[drafter]:
                total_s += _reading_s(prices, num_sharing[1], longest, made)
                if verified > 0:  # a draft that is cut to nothing counts as none in a step's shape
                    total_s += context_of(replay, request) * prices[DRAFT_CONTEXT]
                    if num_model_drafts == has_model_draft[row]:
                        total_s += prices[MODEL_DRAFTS]
            elif verified > 0 and not others_look_up:
                total_s += token_draft_share * (alone_s + target_s)
            tokens[row, action] = 1 + accepted
            seconds[row, action] = total_s
        num_sharing[1 : reading.passes[e, row] + 1] += 1


@compiled
def _reading_s(prices: np.ndarray, num_others: int, longest: int, made: int) -> float:
    """Seconds by which one more draft of the model drafter lengthens its work.

    Args:
        prices: Seconds per feature.
        num_others: Other requests that it drafts for.
        longest: Passes of their longest draft; 0 where there is none.
        made: Tokens of the draft.
    """
    new_longest = max(longest, made)  # every reader takes part in every pass
    num_tokens = (new_longest - 1) * (num_others + 1) - max(0, longest - 1) * num_others
    return (new_longest - longest) * prices[PASSES] + num_tokens * prices[PASS_TOKENS]


@compiled
def _draft(
    replay: Replay, engines: Engines, e: int, row: int, action: np.ndarray
) -> tuple[int, int, int, int]:
    """Who would draft for a row, and how many tokens would be made, verified and accepted."""
    request = engines.requests[e, engines.row_entry[e, row]]
    source = replay.recorded[request.trace]
    drafter, length = resolved(replay, engines, e, row, action[0], action[1])
    length = wanted_length(replay, request, drafter, length)
    is_model = replay.is_model[drafter]
    if length <= 0 or (is_model and not can_read(request)):
        return drafter, 0, 0, 0
    if request.num_emitted >= source.num_outputs:
        return drafter, length if is_model else 0, 0, 0
    offer = replay.offers[source.first + request.num_emitted, drafter]
    verified = min(length, offer.length)
    if len(action) > 2 and replay.teller[drafter] >= 0:
        verified = num_confident(replay, request, drafter, replay.cutoffs[action[2]], verified)
    return drafter, length, verified, min(verified, offer.accepted)
