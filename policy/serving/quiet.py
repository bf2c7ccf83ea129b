"""Bookkeeping that fails is worth a line in the log, never a request."""

from __future__ import annotations

import logging
from types import TracebackType

logger = logging.getLogger("vllm.draftgym")


class Quiet:
    """Swallows errors inside a `with` block, and logs the first of each type.

    Args:
        what: What is done there, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._seen: set[type[BaseException]] = set()

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Swallow an error; let go what ends the process."""
        if kind is None or not issubclass(kind, Exception):
            return False
        if kind not in self._seen:
            self._seen.add(kind)
            logger.error("%s failed; requests are not affected.", self._what, exc_info=error)
        return True
