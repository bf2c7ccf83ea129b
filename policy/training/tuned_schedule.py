"""A `batch_schedule` made of the best fixed draft length of each load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from ..contract import NONE
from .contenders import Contender
from .tuning_config import TuningConfig


def schedules(
    config: TuningConfig, speedups: Callable[[Contender], Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """The best schedule of each drafter, as keys of a `batch_schedule` section.

    A length holds from the geometric mean of its load and the one before to that of its load and
    the next. Loads are those of the scenarios that have a single one; there may be none.

    Args:
        config: Drafters, their lengths, and the scenarios.
        speedups: Speed over none by scenario, of a fixed setting.
    """
    scenario_of = {
        scenario.max_concurrency: name
        for name, scenario in config.scenarios.items()
        if len(scenario.phases) == 1 and scenario.max_concurrency
    }
    loads = sorted(scenario_of)
    if not loads:
        return {}
    lasts = [math.isqrt(load * following) for load, following in pairwise(loads)]
    firsts = [1, *(last + 1 for last in lasts)]
    lasts.append(config.model.max_num_seqs)

    def best_length(drafter: str, load: int) -> int:
        longest = config.drafters.max_lengths[drafter]
        lengths = [0, *sorted({min(length, longest) for length in config.fixed_lengths[drafter]})]
        speeds = [
            speedups(Contender.fixed(drafter if length else NONE, length))[scenario_of[load]]
            for length in lengths
        ]
        return lengths[speeds.index(max(speeds))]

    return {
        drafter: {
            "drafter": drafter,
            "schedule": [
                [first, last, best_length(drafter, load)]
                for first, last, load in zip(firsts, lasts, loads, strict=True)
            ],
        }
        for drafter in config.fixed_lengths
    }
