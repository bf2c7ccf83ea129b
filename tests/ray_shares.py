"""Shares that Ray workers do in tests; light to import, as every worker is a new process."""

from __future__ import annotations

import os
from pathlib import Path

from policy.errors import TraceError


def note(folder: Path, index: int, num_shares: int) -> None:
    """Leave a file that names the process and the cores it was given."""
    name = f"{index}-of-{num_shares}-{os.getpid()}.done"
    (folder / name).write_text(os.environ["OMP_NUM_THREADS"])


def die_once(folder: Path, index: int, num_shares: int) -> None:
    """The first worker of share 1 dies as if it was killed."""
    died = folder / "died"
    if index == 1 and not died.exists():
        died.touch()
        os._exit(1)
    note(folder, index, num_shares)


def die_always(folder: Path, index: int, num_shares: int) -> None:
    """Every worker of share 0 dies."""
    if index == 0:
        with (folder / "deaths").open("a") as file:
            file.write("x")
        os._exit(1)


def refuse(folder: Path, index: int, num_shares: int) -> None:
    """A share that fails with a sentence."""
    raise TraceError(f"Share {index} of {folder} makes no sense; mend it.")


def fail(folder: Path, index: int, num_shares: int) -> None:
    """A share that fails on a mistake."""
    raise ZeroDivisionError("no such number")
