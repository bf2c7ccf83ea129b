"""A study's figures as tidy tables: one row each, as parquet and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq


def write_tidy(folder: Path, name: str, rows: Sequence[Any]) -> None:
    """Write dataclass rows to `NAME.parquet` and `NAME.csv`; nothing without rows.

    Args:
        folder: Where to.
        name: Name of the table.
        rows: Instances of one dataclass of plain values.
    """
    if not rows:
        return
    names = [spec.name for spec in fields(rows[0])]
    table = pa.table({name: [getattr(row, name) for row in rows] for name in names})
    pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
    pyarrow.csv.write_csv(table, folder / f"{name}.csv")
