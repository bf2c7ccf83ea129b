"""Timed steps and their file.

A file is one parquet table, one row per step between two decisions:

| column | type | meaning |
|---|---|---|
| `cell` | int32 | load, action and context |
| `visit` | int32 | one stretch of steps; the machine's speed differs between stretches |
| `load` | int32 | requests in flight |
| `num_running_reqs` | int32 | requests in the step |
| `num_engine_steps`, …, `num_draft_context_tokens` | int64 | the step's shape, see `StepShape` |
| `step_time_s` | double | measured seconds |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policy.cost_model import FEATURES
from policy.errors import TraceError


@dataclass(frozen=True)
class Timings:
    """Timed steps, one entry each.

    Attributes:
        cell: Load, action and context, int32 `[steps]`.
        visit: One stretch of steps, int32 `[steps]`.
        load: Requests in flight, int32 `[steps]`.
        num_running_reqs: Requests in the step, int32 `[steps]`.
        features: Work in the order of `FEATURES`, float64 `[steps, FEATURES]`.
        step_time_s: Measured seconds, float64 `[steps]`.
    """

    cell: np.ndarray
    visit: np.ndarray
    load: np.ndarray
    num_running_reqs: np.ndarray
    features: np.ndarray
    step_time_s: np.ndarray

    def __len__(self) -> int:
        return len(self.cell)

    def select(self, steps: np.ndarray) -> Timings:
        """Some of the steps."""
        return Timings(**{name: values[steps] for name, values in vars(self).items()})


def write_timings(timings: Timings, path: Path) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "cell": timings.cell,
            "visit": timings.visit,
            "load": timings.load,
            "num_running_reqs": timings.num_running_reqs,
            **{
                name: timings.features[:, index].astype(np.int64)
                for index, name in enumerate(FEATURES)
            },
            "step_time_s": timings.step_time_s,
        }
    )
    unfinished = path.with_name(path.name + ".partial")
    pq.write_table(table, unfinished, compression="zstd")
    unfinished.replace(path)


def read_timings(*paths: Path) -> Timings:
    """Read one or more files of `write_timings` as one.

    Raises:
        TraceError: If there is none, or one is missing, cut off, or of other columns.
    """
    if not paths:
        raise TraceError("No file of timings was named; make one with scripts/collect.py.")
    parts = [vars(_read(path)) for path in paths]
    return Timings(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _read(path: Path) -> Timings:
    try:
        table = pq.read_table(path)
        return Timings(
            table["cell"].to_numpy(),
            table["visit"].to_numpy(),
            table["load"].to_numpy(),
            table["num_running_reqs"].to_numpy(),
            np.stack([table[name].to_numpy() for name in FEATURES], axis=1).astype(np.float64),
            table["step_time_s"].to_numpy(),
        )
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise TraceError(f"{path} is no whole file of timings; remove it and time anew.") from error
