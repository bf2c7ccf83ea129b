"""Combinations of drafters: which member drafts for a request.

A combination is an entry of the action table that is resolved for each request before anything is
drafted, so that whatever is recorded, observed and counted is of the member that drafted. The hook
and the simulator call the same compiled function on the same rows.

* `ngram_else_eagle3` and its like: the token drafter where what it has on offer rests on a match
  that is long enough, else the model drafter.
* `longest_expected`: the drafter whose draft of the length asked for has the most expected accepted
  tokens. Of the suffix drafter that is the survival of its tokens, summed; of n-gram, drafts that
  get as far as its recent offers did; of the model drafter, its recent acceptance by position. A
  drafter with nothing for the request has none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import compiled
from .contract import LONGEST_EXPECTED, Contract
from .features import ACCEPTANCE_POSITIONS, COUNTERFACTUAL, History, Layout, RowTable, recent


class Combinations(NamedTuple):
    """What resolving needs of a contract.

    Attributes:
        token: Token drafter of each drafter's `TOKEN_else_MODEL`, int32 `[drafters]`; 0 elsewhere.
        model: Model drafter of the same, int32 `[drafters]`.
        max_lengths: Of the contract, int32 `[drafters]`.
        min_match: Shortest match, in tokens, with which the token drafter is taken.
        layout: Of the contract.
    """

    token: np.ndarray
    model: np.ndarray
    max_lengths: np.ndarray
    min_match: int
    layout: Layout

    @classmethod
    def of(cls, contract: Contract, min_match: int) -> Combinations:
        """The combinations of a contract."""
        token, model = np.zeros((2, len(contract.drafters)), np.int32)
        for index, name in enumerate(contract.drafters):
            if contract.is_combination(name) and name != LONGEST_EXPECTED:
                token[index], model[index] = map(contract.drafters.index, contract.members(name))
        max_lengths = np.array(contract.max_lengths, np.int32)
        return cls(token, model, max_lengths, min_match, Layout.of(contract))


@compiled
def resolve(
    combinations: Combinations,
    history: History,
    slot: int,
    table: RowTable,
    row: int,
    drafter: int,
    length: int,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The member that drafts for a request, and how far.

    Args:
        combinations: Of the contract.
        history: What past steps say about each drafter.
        slot: The request's, or the batch's, place in the history.
        table: The rows of the last step.
        row: The request's row.
        drafter: Index of the chosen drafter.
        length: Draft tokens asked for.

    Returns:
        Index of a drafter that is no combination, and a length within its maximum; `(0, 0)` where
        none of the members has anything to expect.
    """
    max_lengths, num_members = combinations.max_lengths, len(combinations.layout.is_model)
    if drafter > num_members:
        length = min(length, max_lengths[drafter])
        told, token = table.told, combinations.token[drafter]
        if token == 0:
            drafter = _longest_expected(combinations, history, slot, table, row, length)
        elif told[token - 1, 1, row] > 0 and told[token - 1, 0, row] >= combinations.min_match:
            drafter = token
        else:
            drafter = combinations.model[drafter]
    length = min(length, max_lengths[drafter])
    return (drafter, length) if length > 0 else (0, 0)


@compiled
def resolve_rows(
    combinations: Combinations,
    history: History,
    slots: np.ndarray,
    table: RowTable,
    actions: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """`resolve` every row of a step, in place.

    Args:
        combinations: Of the contract.
        history: What past steps say about each drafter.
        slots: History slot of the batch and, at request granularity, of each row behind it, int64
            `[1]` or `[1 + rows]`.
        table: The rows of the last step.
        actions: Drafter index, draft length and what else there is, int64 `[rows, …]`.
    """
    for row in range(len(actions)):
        slot = slots[1 + row if len(slots) > 1 else 0]
        actions[row, 0], actions[row, 1] = resolve(
            combinations, history, slot, table, row, actions[row, 0], actions[row, 1]
        )


@compiled
def _longest_expected(
    combinations: Combinations,
    history: History,
    slot: int,
    table: RowTable,
    row: int,
    length: int,
) -> int:  # pragma: no cover - compiled
    """The drafter with the most expected accepted tokens, of equals the first; 0 for none."""
    layout, told, survival = combinations.layout, table.told, table.offer_survival
    chosen, most = 0, 0.0
    for index in range(len(layout.is_model)):
        total, weight = history.total[slot, index], history.weight[slot, index]
        prior, longest = layout.prior[index], min(length, combinations.max_lengths[index + 1])
        expected = 0.0
        if layout.is_model[index]:
            if told[index, 0, row] and told[index, 1, row] > 0:
                expected = _expected_of_rates(total, weight, prior, longest)
        elif layout.tells_survival[index]:
            for position in range(min(longest, told[index, 1, row])):
                expected += survival[index, row, position]
        else:
            mean = recent(total, weight, prior, COUNTERFACTUAL)
            rate = 1.0
            for _ in range(min(longest, told[index, 1, row])):
                rate *= mean / (1 + mean)  # a geometric length of this mean
                expected += rate
        if expected > most:
            chosen, most = index + 1, expected
    return chosen


@compiled
def _expected_of_rates(
    total: np.ndarray, weight: np.ndarray, prior: np.ndarray, length: int
) -> float:  # pragma: no cover - compiled
    """Sum of acceptance by position; beyond the observed ones it falls as between the last two."""
    expected, rate, ratio = 0.0, 1.0, 1.0
    for position in range(length):
        before = rate
        if position < ACCEPTANCE_POSITIONS:
            rate = min(before, recent(total, weight, prior, position))
            ratio = rate / before if before > 0 else 0.0
        else:
            rate *= ratio
        expected += rate
    return expected
