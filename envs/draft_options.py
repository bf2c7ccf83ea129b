"""What a request can do at each position of its output, and what a step of such choices costs.

An *option* is a way to take a step, such as an n-gram draft of up to four tokens, or none. Oracles
and fixed settings are tables of options over traces; `envs.closed_loop` serves requests by them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policy.compiled import compiled
from policy.contract import MODEL_DRAFTERS, NONE
from policy.cost_model import (
    CONTEXT,
    DRAFT_CONTEXT,
    MODEL_DRAFTS,
    PASS_TOKENS,
    PASSES,
    STEPS,
    VERIFIED,
    CostModel,
)

from .traces import Traces

PLAIN, TOKEN, MODEL = 0, 1, 2
"""What an option's draft is paid for: nothing, a look-up, passes of the model drafter."""


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


@compiled
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
    total_s = weights_s[STEPS] + verified * weights_s[VERIFIED] + context * weights_s[CONTEXT]
    if has_token_draft:
        total_s *= 1 + prices.token_draft_share
    if has_model_draft:
        total_s += (
            weights_s[MODEL_DRAFTS]
            + passes * weights_s[PASSES]
            + pass_tokens * weights_s[PASS_TOKENS]
            + draft_context * weights_s[DRAFT_CONTEXT]
        )
    return total_s
