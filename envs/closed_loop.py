"""Decoding in a closed loop: a constant number of requests in flight, priced by a cost model.

At every step each request takes one of its options; ended requests are replaced by the next. Where
there are several options, the step takes those of all requests together that bring the most tokens
per second, which a policy could only do with hindsight. Prompts take no time.
"""

from __future__ import annotations

import math

import numpy as np

from policy.compiled import compiled
from policy.cost_model import DRAFT_CONTEXT, MODEL_DRAFTS, PASS_TOKENS, PASSES, VERIFIED, CostModel

from .draft_options import (
    MODEL,
    TOKEN,
    Options,
    Prices,
    prices_at,
    step_s,
)
from .traces import Traces


def tokens_per_s(
    traces: Traces,
    options: Options,
    cost_model: CostModel,
    num_running_reqs: int,
    *,
    first_position: int = 1,
    min_tokens_per_slot: int = 2**17,
    seed: int = 0,
) -> float:
    """Output tokens per second with so many requests in flight.

    All requests are served in a random order, whole passes of them until every slot has had enough
    tokens; one slot and one pass serve each request exactly once.

    Args:
        traces: The requests.
        options: What each can do.
        cost_model: Prices the steps.
        num_running_reqs: Requests in flight.
        first_position: Output position of a request's first step: 1, as the first token comes with
            the prompt, or 0 to count a step for it.
        min_tokens_per_slot: Tokens that a slot has at least to produce, on average.
        seed: Seed of the order.
    """
    order, num_tokens = serving_order(
        traces, num_running_reqs, first_position, min_tokens_per_slot, seed
    )
    seconds, emitted = _serve(
        options,
        traces.starts,
        first_position,
        order,
        num_running_reqs,
        num_tokens,
        prices_at(cost_model, num_running_reqs),
    )
    return emitted / seconds


def serving_order(
    traces: Traces, num_running_reqs: int, first_position: int, min_tokens_per_slot: int, seed: int
) -> tuple[np.ndarray, int]:
    """Indices of the requests in the order in which they come, and their tokens; see above."""
    num_tokens = int(np.maximum(traces.num_output_tokens - first_position, 0).sum())
    num_passes = max(1, math.ceil(num_running_reqs * min_tokens_per_slot / num_tokens))
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(traces.num_requests) for _ in range(num_passes)])
    return order, num_passes * num_tokens


def seconds_alone(
    traces: Traces, options: Options, cost_model: CostModel, *, first_position: int = 1
) -> np.ndarray:
    """Seconds of decoding each request alone, float64 `[requests]`; see `tokens_per_s`."""
    prices = prices_at(cost_model, 1)
    num_tokens = np.maximum(traces.num_output_tokens - first_position, 0)
    served = [
        _serve(options, traces.starts, first_position, np.array([request]), 1, tokens, prices)
        for request, tokens in enumerate(num_tokens)
    ]
    return np.array([seconds for seconds, _ in served])


@compiled
def _serve(
    options: Options,
    starts: np.ndarray,
    first_position: int,
    order: np.ndarray,
    num_running_reqs: int,
    num_tokens: int,
    prices: Prices,
) -> tuple[float, int]:  # pragma: no cover - compiled
    """Serve requests in turn, round and round, until so many tokens are out: seconds, tokens."""
    position = np.zeros(num_running_reqs, np.int64)
    end = np.zeros(num_running_reqs, np.int64)
    option = np.zeros(num_running_reqs, np.int64)
    length = np.zeros(num_running_reqs, np.int64)
    seconds, emitted, num_admitted = 0.0, 0, 0
    while emitted < num_tokens:
        for slot in range(num_running_reqs):
            while position[slot] >= end[slot]:
                request = order[num_admitted % len(order)]
                position[slot], end[slot] = starts[request] + first_position, starts[request + 1]
                num_admitted += 1
        choose(options, prices, position, option, length)
        seconds += step_s(options, prices, position, option, length)
        for slot in range(num_running_reqs):
            tokens = min(options.emitted[option[slot], position[slot]], length[slot] + 1)
            position[slot] += tokens
            emitted += tokens
    return seconds, emitted


@compiled
def choose(
    options: Options, prices: Prices, position: np.ndarray, option: np.ndarray, length: np.ndarray
) -> None:  # pragma: no cover - compiled
    """Fill in the options, and their draft lengths, that bring the most tokens per second.

    What the requests share is taken as given first: whether drafts are looked up, and how many
    passes the model drafter makes.
    """
    option[:] = 0
    length[:] = options.drafted[0][position]
    if len(options.kinds) == 1:
        return
    longest = 0
    for row in range(len(options.kinds)):
        if options.kinds[row] == MODEL:
            longest = max(longest, options.drafted[row][position].max())
    stride = longest if prices.weights_s[PASSES] == 0 else 1  # passes at no price: all or none
    rate = 0.0
    for passes in range(longest if options.is_prepaid else 0, longest + 1, max(stride, 1)):
        for with_token in range(1 if options.is_prepaid else 0, 2):
            rate = _raise_rate(
                options, prices, position, passes, with_token == 1, rate, option, length
            )


@compiled
def _raise_rate(
    options: Options,
    prices: Prices,
    position: np.ndarray,
    passes: int,
    with_token: bool,
    rate: float,
    option: np.ndarray,
    length: np.ndarray,
) -> float:  # pragma: no cover - compiled
    """The best rate with so many passes, with or without look-ups; if higher, its choice.

    What is not shared adds up over the requests, so the ratio of tokens and time is maximised by
    Dinkelbach's iteration: each request takes what is worth most at the rate reached so far, until
    no choice raises the rate.
    """
    weights_s = prices.weights_s
    new_option, new_length = np.zeros_like(option), np.zeros_like(length)
    verify_s = weights_s[VERIFIED] * (1 + prices.token_draft_share * with_token)
    shared_s = step_s(options, prices, position, new_option, new_length)
    if not options.is_prepaid:
        shared_s *= 1 + prices.token_draft_share * with_token
        if passes > 0:
            shared_s += weights_s[MODEL_DRAFTS] + passes * weights_s[PASSES]
    while True:
        total, total_s = 0, shared_s
        for slot in range(len(position)):
            at = position[slot]
            most = -np.inf
            tokens, tokens_s = 0, 0.0
            for row in range(len(options.kinds)):
                kind = options.kinds[row]
                drafted = options.drafted[row, at]
                if kind == MODEL:
                    drafted = min(drafted, passes)
                elif kind == TOKEN and not with_token:
                    continue
                row_s = drafted * verify_s
                if kind == MODEL and drafted > 0 and not options.is_prepaid:
                    row_s += drafted * weights_s[PASS_TOKENS]
                    row_s += options.context[at] * weights_s[DRAFT_CONTEXT]
                row_tokens = min(options.emitted[row, at], drafted + 1)
                if row_tokens - rate * row_s > most:
                    most = row_tokens - rate * row_s
                    tokens, tokens_s = row_tokens, row_s
                    new_option[slot], new_length[slot] = row, drafted
            total += tokens
            total_s += tokens_s
        if total / total_s <= rate * (1 + 1e-12):
            return rate
        rate = total / total_s
        option[:], length[:] = new_option, new_length
