"""What every possible draft would bring and cost in the next step, and the best choice of drafts.

A step brings the tokens its requests emit. It takes the time of what they share (the target's
step, the model drafter's passes, look-ups) and of what each of them adds. The best choice has the
highest ratio of the two, its goodput.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .prices import Prices


@dataclass(frozen=True)
class Outlook:
    """A decision between drafts.

    Attributes:
        prices: At this load.
        plain_s: The step without drafts, in seconds.
        actions: None, then those of token drafters, then the model drafter's by length, int64
            `[actions, 2]`.
        first_model: Index of the model drafter's first action.
        drafted: Tokens that a row drafts by each action, float64 `[rows, actions]`; 0 where the
            drafter has nothing for it.
        gain: Of those, the expected accepted ones, of the same shape.
        has_model: Whether the model drafter can draft for the row, bool `[rows]`.
        num_pending_tokens: Tokens it is charged for reading first, float64 `[rows]`.
        num_context_tokens: int64 `[rows]`.
    """

    prices: Prices
    plain_s: float
    actions: np.ndarray
    first_model: int
    drafted: np.ndarray
    gain: np.ndarray
    has_model: np.ndarray
    num_pending_tokens: np.ndarray
    num_context_tokens: np.ndarray

    def batch_rates(self) -> np.ndarray:
        """Tokens per second if all rows take one action, float64 `[actions]`."""
        prices, is_model = self.prices, np.arange(len(self.actions)) >= self.first_model
        drafted = self.drafted.sum(axis=0)
        seconds = self.plain_s + prices.verified_token_s * drafted
        seconds[~is_model] *= 1 + prices.token_draft_share * (drafted[~is_model] > 0)
        seconds[is_model] += self._shared_s + self._reading_s.sum(axis=0)
        return (len(self.gain) + self.gain.sum(axis=0)) / seconds

    def best_action(self) -> tuple[np.ndarray, float]:
        """The action for all rows that brings the most tokens per second, int64 `[1, 2]`.

        Of equals the first: none, then token drafts, then the model's, shorter before longer.

        Returns:
            The action, and those tokens per second.
        """
        rates = self.batch_rates()
        best = int(rates.argmax())
        return self.actions[[best]], float(rates[best])

    def best_actions(self) -> tuple[np.ndarray, float]:
        """The actions that together bring the most tokens per second, int64 `[rows, 2]`.

        By Dinkelbach's iteration, which ends at the exact optimum: every row takes what is worth
        most at the rate reached so far, until no choice raises the rate. Ties fall as in
        `best_action`; look-ups and passes that bring no more are left out.

        Returns:
            The actions, and those tokens per second.
        """
        choice = np.zeros(len(self.gain), np.int64)
        rate = len(choice) / self.plain_s
        while True:
            new_choice = self._most_worth(rate)
            tokens, seconds = self._price(new_choice)
            if tokens <= rate * seconds * (1 + 1e-12):
                return self.actions[choice], rate
            rate, choice = tokens / seconds, new_choice

    def _most_worth(self, rate: float) -> np.ndarray:
        """The choice worth most, int64 `[rows]`, if a second is worth `rate` tokens.

        What rows share is enumerated; given that, the worth of a choice adds up over rows.
        """
        candidates = [
            (worth, share, num_passes)
            for share in self._look_up_shares
            for num_passes, worth in enumerate(self._total_worths(rate, share))
        ]
        _, share, num_passes = max(candidates, key=lambda candidate: candidate[0])
        worth = self._worth(rate, share)
        choice = worth[:, : self.first_model].argmax(axis=1)
        if num_passes:
            drafts = worth[:, self.first_model : self.first_model + num_passes]
            model_worth = drafts.max(axis=1) - rate * self._reading_s[:, num_passes - 1]
            is_better = model_worth > worth[np.arange(len(choice)), choice]
            choice[is_better] = self.first_model + drafts.argmax(axis=1)[is_better]
        return choice

    def _total_worths(self, rate: float, share: float) -> Iterator[float]:
        """Worth of the best choices with at most 0, 1, 2, ... passes of the model drafter."""
        worth = self._worth(rate, share)
        floor = worth[:, : self.first_model].max(axis=1, keepdims=True)
        drafts = np.maximum.accumulate(worth[:, self.first_model :], axis=1)
        extra = np.maximum(drafts - rate * self._reading_s - floor, 0).sum(axis=0)
        without = floor.sum() - rate * self.plain_s * (1 + share)
        yield without
        yield from without + extra - rate * self._shared_s

    def _worth(self, rate: float, share: float) -> np.ndarray:
        """Each row's gain less what verifying it takes, float64 `[rows, actions]`."""
        verified_s = self.prices.verified_token_s * (1 + share)
        worth = self.gain - rate * verified_s * self.drafted
        if share < self.prices.token_draft_share:
            worth[:, 1 : self.first_model] = -np.inf  # nothing is looked up
        return worth

    def _price(self, choice: np.ndarray) -> tuple[float, float]:
        """Expected tokens of a choice, and its seconds."""
        prices, rows = self.prices, np.arange(len(choice))
        drafted = self.drafted[rows, choice]
        is_model = (choice >= self.first_model) & self.has_model
        seconds = self.plain_s + prices.verified_token_s * drafted.sum()
        if (drafted[~is_model] > 0).any():
            seconds *= 1 + prices.token_draft_share
        if is_model.any():
            last = int(drafted[is_model].max()) - 1
            seconds += self._shared_s[last] + self._reading_s[is_model, last].sum()
        return len(choice) + self.gain[rows, choice].sum(), seconds

    @property
    def _look_up_shares(self) -> tuple[float, ...]:
        """Time that look-ups add, as a share: without any, and with."""
        share = self.prices.token_draft_share
        return (0.0, share) if share else (0.0,)

    @cached_property
    def _shared_s(self) -> np.ndarray:
        """What the model drafter takes whatever rows it drafts for, by passes, float64."""
        num_passes = np.arange(1, 1 + len(self.actions) - self.first_model)
        return self.prices.model_draft_s + self.prices.pass_s * num_passes

    @cached_property
    def _reading_s(self) -> np.ndarray:
        """What it takes more for each row, by passes, float64 `[rows, passes]`."""
        num_later_passes = np.arange(len(self.actions) - self.first_model)
        read = self.num_pending_tokens[:, None] + num_later_passes
        seconds = self.prices.pass_token_s * read
        seconds += self.prices.draft_context_token_s * self.num_context_tokens[:, None]
        return seconds * self.has_model[:, None]
