"""Measurement: one setting served one set of requests once; and how measurements are paired.

Settings are measured in turn (A B C, A B C), each repeat with the same requests for all of them,
so two settings are compared repeat by repeat at one concurrency.

Example:
    >>> plain = Measurement("none", 4, 0, 1000, 10.0, 300, 0, 0, {"none:0": 300})
    >>> plain.tok_per_s
    100.0
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..errors import DraftgymError


class MeasurementError(DraftgymError):
    """Measurements cannot be compared as they are."""


@dataclass(frozen=True)
class Measurement:
    """What one run of one setting took.

    Attributes:
        setting: Name of what was measured, such as `none` or `policy`.
        concurrency: Requests in flight.
        repeat: Number of the repeat; runs with the same number served the same requests.
        num_tokens: Output tokens emitted.
        seconds: Time they took.
        num_steps: Engine steps.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens accepted.
        actions: Engine steps per action, named `drafter:length`.
        num_drafts: Drafts verified, one per request and engine step that had draft tokens; None
            where the engine didn't count them.

    Raises:
        MeasurementError: If no token or no time was measured, or the counts contradict.
    """

    setting: str
    concurrency: int
    repeat: int
    num_tokens: int
    seconds: float
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    actions: Mapping[str, int]
    num_drafts: int | None = None

    def __post_init__(self) -> None:
        run = f"Repeat {self.repeat} of '{self.setting}' at concurrency {self.concurrency}"
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise MeasurementError(f"{run} took {self.seconds} seconds; measure it again.")
        if self.num_tokens <= 0:
            raise MeasurementError(f"{run} emitted no token; give it requests and measure again.")
        if self.concurrency < 1:
            raise MeasurementError(f"{run} had no request in flight; use a concurrency >= 1.")
        if not 0 <= self.num_accepted_tokens <= self.num_draft_tokens:
            raise MeasurementError(
                f"{run} accepted {self.num_accepted_tokens} of {self.num_draft_tokens} draft "
                "tokens; count both over the same engine steps."
            )
        if self.num_drafts is not None and (
            self.num_drafts > self.num_draft_tokens
            or (self.num_drafts < 1) != (self.num_draft_tokens < 1)
        ):
            raise MeasurementError(
                f"{run} has {self.num_drafts} drafts of {self.num_draft_tokens} tokens in all; "
                "count a draft per request and step that had draft tokens."
            )

    @property
    def tok_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


def tok_per_s(runs: Collection[Measurement]) -> float:
    """Output tokens per second over all runs."""
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


Pair = tuple[Measurement, Measurement]
Runs = dict[tuple[str, int], dict[int, Measurement]]


def group_runs(measurements: Iterable[Measurement]) -> Runs:
    """Measurements by `(setting, concurrency)`, then by repeat.

    Raises:
        MeasurementError: If there are none, or a repeat was measured twice.
    """
    runs: Runs = {}
    for run in measurements:
        repeats = runs.setdefault((run.setting, run.concurrency), {})
        if run.repeat in repeats:
            raise MeasurementError(
                f"Repeat {run.repeat} of '{run.setting}' at concurrency {run.concurrency} is there "
                "twice; number the repeats apart."
            )
        repeats[run.repeat] = run
    if not runs:
        raise MeasurementError("Nothing was measured; measure at least the baseline.")
    return runs


def pair_runs(runs: Runs, setting: str, against: str, concurrency: int) -> dict[int, Pair]:
    """Runs of two settings at one concurrency, paired by repeat.

    Raises:
        MeasurementError: If one was not measured there or they were not measured in pairs.
    """
    for name in (setting, against):
        if (name, concurrency) not in runs:
            raise MeasurementError(
                f"'{name}' was not measured at concurrency {concurrency}; measure it beside the "
                "others."
            )
    left, right = runs[setting, concurrency], runs[against, concurrency]
    unpaired = sorted(left.keys() ^ right.keys())
    if unpaired:
        raise MeasurementError(
            f"Only one of '{setting}' and '{against}' has repeat "
            f"{', '.join(map(str, unpaired))} at concurrency {concurrency}; measure both or leave "
            "the repeat out."
        )
    return {repeat: (left[repeat], right[repeat]) for repeat in sorted(left)}


def count_actions(
    measurements: Iterable[Measurement], setting: str = "policy"
) -> dict[int, dict[str, int]]:
    """Engine steps per action that a setting took, by concurrency."""
    counts: dict[int, Counter[str]] = {}
    for run in measurements:
        if run.setting == setting:
            counts.setdefault(run.concurrency, Counter()).update(run.actions)
    return {concurrency: dict(counts[concurrency]) for concurrency in sorted(counts)}
