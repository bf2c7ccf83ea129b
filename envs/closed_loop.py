"""Decoding in a closed loop: a constant number of requests in flight, priced by a cost model.

At every step each request takes one of its *options*, such as an n-gram draft of four tokens or no
draft; ended requests are replaced by the next. Where there are several options, the step takes
those of all requests together that make it produce the most tokens per second, which a policy
could only do with hindsight. Prompts take no time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from policy.contract import MODEL_DRAFTERS, NONE

from .cost_model import FEATURES, CostModel
from .traces import Traces

PLAIN, TOKEN, MODEL = 0, 1, 2
"""What an option's draft is paid for: nothing, a look-up, passes of the model drafter."""

_STEPS = FEATURES.index("num_engine_steps")
_VERIFIED = FEATURES.index("num_verified_tokens")
_CONTEXT = FEATURES.index("num_context_tokens")
_MODEL_DRAFTS = FEATURES.index("num_model_drafts")
_PASSES = FEATURES.index("num_draft_passes")
_PASS_TOKENS = FEATURES.index("num_draft_pass_tokens")
_DRAFT_CONTEXT = FEATURES.index("num_draft_context_tokens")


class Options(NamedTuple):
    """What a request can do at each position of its output.

    Attributes:
        kinds: `PLAIN`, `TOKEN` or `MODEL`, int8 `[options]`.
        drafted: Draft tokens, int32 `[options, positions]`.
        emitted: Tokens that the step then produces, int32 `[options, positions]`.
        context: Prompt and output tokens so far, int32 `[positions]`.
        is_prepaid: Whether all drafters draft at every step, whichever draft is verified.
    """

    kinds: np.ndarray
    drafted: np.ndarray
    emitted: np.ndarray
    context: np.ndarray
    is_prepaid: bool = False


class Prices(NamedTuple):
    """A cost model at one load.

    Attributes:
        weights_s: Seconds per unit of each feature, float64 `[FEATURES]`.
        token_draft_share: See `CostModel`.
    """

    weights_s: np.ndarray
    token_draft_share: float


def prices_at(cost_model: CostModel, num_running_reqs: int) -> Prices:
    """The cost model at one load."""
    weights_s = np.ascontiguousarray(cost_model.weights_at([num_running_reqs])[0])
    return Prices(weights_s, cost_model.token_draft_share)


def kind_of(drafter: str) -> int:
    """What a drafter's drafts are paid for."""
    if drafter == NONE:
        return PLAIN
    return MODEL if drafter in MODEL_DRAFTERS else TOKEN


def remaining_tokens(traces: Traces) -> np.ndarray:
    """Tokens that each request has still to produce, itself included, int64 `[positions]`."""
    ends = np.repeat(traces.starts[1:], traces.num_output_tokens)
    return ends - np.arange(traces.starts[-1])


def context_tokens(traces: Traces) -> np.ndarray:
    """Prompt and output tokens before each position, int32 `[positions]`."""
    prompts = np.array([len(prompt) for prompt in traces.prompts], np.int64)
    totals = np.repeat(prompts + traces.num_output_tokens, traces.num_output_tokens)
    return (totals - remaining_tokens(traces)).astype(np.int32)


def fixed_options(traces: Traces, drafter: str = NONE, length: int = 0) -> Options:
    """One setting for every step: the same drafter and draft length.

    Args:
        traces: The requests.
        drafter: `none` for no speculation.
        length: Longest draft in tokens.

    Raises:
        TraceError: If such drafts were not recorded.
    """
    num_positions = int(traces.starts[-1])
    drafted, accepted = np.zeros((2, num_positions), np.int64)
    if drafter != NONE:
        traces.contract({drafter: length})
        drafted = np.minimum(traces.drafters[drafter].num_draft_tokens, length)
        accepted = np.minimum(traces.drafters[drafter].num_accepted_tokens, length)
    emitted = np.minimum(accepted.astype(np.int64) + 1, remaining_tokens(traces))
    return Options(
        kinds=np.array([kind_of(drafter)], np.int8),
        drafted=drafted[None].astype(np.int32),
        emitted=emitted[None].astype(np.int32),
        context=context_tokens(traces),
    )


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
    num_tokens = int(np.maximum(traces.num_output_tokens - first_position, 0).sum())
    num_passes = max(1, math.ceil(num_running_reqs * min_tokens_per_slot / num_tokens))
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(traces.num_requests) for _ in range(num_passes)])
    seconds, emitted = _serve(
        options,
        traces.starts,
        first_position,
        order,
        num_running_reqs,
        num_passes * num_tokens,
        prices_at(cost_model, num_running_reqs),
    )
    return emitted / seconds


def seconds_alone(
    traces: Traces, options: Options, cost_model: CostModel, *, first_position: int = 1
) -> np.ndarray:
    """Seconds of decoding each request alone, float64 `[requests]`; see `tokens_per_s`."""
    prices = prices_at(cost_model, 1)
    num_tokens = np.maximum(traces.num_output_tokens - first_position, 0)
    return np.array(
        [
            _serve(options, traces.starts, first_position, np.array([request]), 1, tokens, prices)[
                0
            ]
            for request, tokens in enumerate(num_tokens)
        ]
    )


@njit(nogil=True)
def step_s(
    options: Options, prices: Prices, position: np.ndarray, option: np.ndarray, length: np.ndarray
) -> float:  # pragma: no cover - compiled
    """Seconds of one step.

    Args:
        options: What the requests can do.
        prices: At this load.
        position: Where each request in flight stands, int64 `[requests]`.
        option: What it does, int64 `[requests]`.
        length: Draft tokens verified of it, int64 `[requests]`.
    """
    weights_s = prices.weights_s
    context = pass_tokens = passes = draft_context = 0
    verified = len(position)
    has_token_draft = has_model_draft = False
    for slot in range(len(position)):
        at = position[slot]
        context += options.context[at]
        verified += length[slot]
        for row in range(len(options.kinds)):
            drafted = options.drafted[row, at] if options.is_prepaid else length[slot]
            if not options.is_prepaid and (row != option[slot] or drafted == 0):
                continue
            if options.kinds[row] == TOKEN:
                has_token_draft = True
            elif options.kinds[row] == MODEL:
                has_model_draft = True
                draft_context += options.context[at]
                pass_tokens += drafted
                passes = max(passes, drafted)
    total_s = weights_s[_STEPS] + verified * weights_s[_VERIFIED] + context * weights_s[_CONTEXT]
    if has_token_draft:
        total_s *= 1 + prices.token_draft_share
    if has_model_draft:
        total_s += (
            weights_s[_MODEL_DRAFTS]
            + passes * weights_s[_PASSES]
            + pass_tokens * weights_s[_PASS_TOKENS]
            + draft_context * weights_s[_DRAFT_CONTEXT]
        )
    return total_s


@njit(nogil=True)
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
        _choose(options, prices, position, option, length)
        seconds += step_s(options, prices, position, option, length)
        for slot in range(num_running_reqs):
            tokens = min(options.emitted[option[slot], position[slot]], length[slot] + 1)
            position[slot] += tokens
            emitted += tokens
    return seconds, emitted


@njit(nogil=True)
def _choose(
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
    stride = longest if prices.weights_s[_PASSES] == 0 else 1  # passes at no price: all or none
    rate = 0.0
    for passes in range(longest if options.is_prepaid else 0, longest + 1, max(stride, 1)):
        for with_token in range(1 if options.is_prepaid else 0, 2):
            rate = _raise_rate(
                options, prices, position, passes, with_token == 1, rate, option, length
            )


@njit(nogil=True)
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
    verify_s = weights_s[_VERIFIED] * (1 + prices.token_draft_share * with_token)
    shared_s = step_s(options, prices, position, new_option, new_length)
    if not options.is_prepaid:
        shared_s *= 1 + prices.token_draft_share * with_token
        if passes > 0:
            shared_s += weights_s[_MODEL_DRAFTS] + passes * weights_s[_PASSES]
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
                    row_s += drafted * weights_s[_PASS_TOKENS]
                    row_s += options.context[at] * weights_s[_DRAFT_CONTEXT]
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
