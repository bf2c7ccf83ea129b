"""Everything a study measured, as claims, verdict and report read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from envs.engine_memory import EngineMemory

from .study_acceptance import AcceptedStretch, Spread
from .study_live import StageShare
from .study_overlap import Overlap, OverlapCell
from .study_speedups import Speedups


@dataclass(frozen=True)
class StudyResults:
    """What was measured; empty where there were no traces, or nothing was live.

    Attributes:
        speedups: All of them.
        kinds: Data sets of the traces.
        model_drafter: The recorded drafter that runs a model, if n-gram was recorded too.
        code_editing: Data sets that are code editing.
        stretches: Acceptance of every request along its output.
        request_means: Mean tokens per step of each request, by data set and drafter.
        spreads: Percentiles of these.
        overlaps: Overlap and ratio of every request.
        overlap_cells: The same of groups, by load.
        stages: Where the live time goes.
        memory: What the live engine's drafters take.
    """

    speedups: Speedups
    kinds: tuple[str, ...] = ()
    model_drafter: str | None = None
    code_editing: tuple[str, ...] = ()
    stretches: list[AcceptedStretch] = field(default_factory=list)
    request_means: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    spreads: list[Spread] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    overlap_cells: list[OverlapCell] = field(default_factory=list)
    stages: list[StageShare] = field(default_factory=list)
    memory: EngineMemory | None = None
