"""Oracles: how fast decoding would be if it were known which draft tokens will be accepted.

* The exact length of one drafter: at every step it drafts just what will be accepted, or nothing
  where that brings more tokens per second.
* The best drafter per step: the same over several drafters, with three ways to charge them.
* The optimum at one request in flight, by dynamic programming over positions. Taking the most
  tokens per second at each step is not optimal: a long draft from here may waste an even longer one
  from the next position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from policy.compiled import compiled
from policy.contract import NONE
from policy.cost_model import CostModel

from .draft_options import (
    MODEL,
    TOKEN,
    Options,
    Prices,
    context_tokens,
    kind_of,
    prices_at,
    remaining_tokens,
    step_s,
)
from .traces import Traces

Pricing = Literal["if_it_wins", "as_published", "both_draft"]


def exact_options(
    traces: Traces,
    drafters: Sequence[str],
    max_length: int,
    pricing: Pricing = "if_it_wins",
) -> Options:
    """No draft, or just what will be accepted of one drafter.

    Args:
        traces: The requests.
        drafters: Those to choose from.
        max_length: Longest draft in tokens, if so long ones were recorded.
        pricing: `if_it_wins` charges the drafter that is chosen, `both_draft` all drafters at every
            step, since who wins shows only after drafting; `as_published` charges every draft as a
            look-up, which is how the paper's authors arrive at their figure.

    Raises:
        TraceError: If a drafter was not recorded.
    """
    traces.contract(dict.fromkeys(drafters, 1))
    # The last token needs no draft: it is the bonus of the last step.
    room = np.minimum(remaining_tokens(traces) - 1, max_length)
    accepted = [traces.drafters[drafter].num_accepted_tokens for drafter in drafters]
    drafted = np.stack([np.minimum(tokens, room) for tokens in [np.zeros_like(room), *accepted]])
    kinds = np.array([kind_of(drafter) for drafter in (NONE, *drafters)], np.int8)
    if pricing == "as_published":
        kinds[kinds == MODEL] = TOKEN
    return Options(
        kinds=kinds,
        drafted=drafted.astype(np.int32),
        emitted=drafted.astype(np.int32) + 1,
        context=context_tokens(traces),
        is_prepaid=pricing == "both_draft",
    )


def optimal_s(
    traces: Traces, options: Options, cost_model: CostModel, *, first_position: int = 1
) -> np.ndarray:
    """Least seconds of decoding each request alone, float64 `[requests]`.

    Args:
        traces: The requests.
        options: Result of `exact_options`; shorter drafts than these are tried too.
        cost_model: Prices the steps.
        first_position: See `envs.closed_loop.tokens_per_s`.
    """
    seconds: np.ndarray = _optimal_s(
        options, traces.starts, first_position, prices_at(cost_model, 1)
    )
    return seconds


def fraction_of_oracle(oracle_s: np.ndarray | float, policy_s: np.ndarray | float) -> float:
    """Share of the oracle's speed that a policy reaches on the same requests.

    Args:
        oracle_s: The oracle's seconds, of each request or in total.
        policy_s: The policy's.

    Returns:
        0 to 1 with `optimal_s`; a greedy oracle can be beaten.

    Example:
        >>> fraction_of_oracle(np.array([1.0, 2.0]), 4.0)
        0.75
    """
    return float(np.sum(oracle_s) / np.sum(policy_s))


@compiled
def _optimal_s(
    options: Options, starts: np.ndarray, first_position: int, prices: Prices
) -> np.ndarray:  # pragma: no cover - compiled
    """Least seconds from each position on, backwards from the end of each request."""
    seconds = np.zeros(len(starts) - 1)
    position, option, length = np.zeros((3, 1), np.int64)
    for request in range(len(seconds)):
        first, end = starts[request] + first_position, starts[request + 1]
        least_s = np.zeros(max(end - first, 0) + 1)
        for at in range(end - 1, first - 1, -1):
            position[0] = at
            least_s[at - first] = np.inf
            for row in range(len(options.kinds)):
                for tokens in range(options.drafted[row, at] + 1):
                    option[0], length[0] = row, tokens
                    total_s = step_s(options, prices, position, option, length)
                    total_s += least_s[at - first + tokens + 1]
                    least_s[at - first] = min(least_s[at - first], total_s)
        seconds[request] = least_s[0]
    return seconds
