"""Functions that numba compiles, kept on disk as Python keeps byte code.

Compiling the simulator takes a minute, loading it a second. numba's own cache would not see that a
function called from another file has changed; here the folder is named after all the sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_POLICY = Path(__file__).parent
_SOURCES = (_POLICY, _POLICY / "serving", _POLICY.parent / "envs")


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, or load what an earlier process compiled.

    It lets go of Python's lock and divides as NumPy does. Kept below `NUMBA_CACHE_DIR`, or else
    in `policy/__pycache__`; where that cannot be written to, every process compiles anew.
    """
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, _CACHE_DIR
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=bool(_CACHE_DIR))(function)
    finally:
        numba.config.CACHE_DIR = before


def _cache_dir(parent: Path) -> str:
    """Where this version of the sources is kept below `parent`; empty for nowhere."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    kept = parent / f"numba-{digest.hexdigest()[:16]}"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / ".writable").touch()
    except OSError:
        return ""
    return str(kept)


_CACHE_DIR = _cache_dir(Path(numba.config.CACHE_DIR or _POLICY / "__pycache__"))
