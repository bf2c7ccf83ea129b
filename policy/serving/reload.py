"""A new policy under a running server: the file at the policy's path is taken when it changes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from ..artifact import PolicyArtifact, load_policy
from ..controllers import PolicyController
from ..errors import ArtifactError
from ..step import StepRecord

logger = logging.getLogger("vllm.draftgym")


class ReloadedPolicy:
    """The exported policy, until a file that fits takes its place.

    A new file is read once it has stopped changing, checked as at the start, warmed up, and only
    then put into use, between two decisions. Any other file is refused once, and the policy in use
    stays.

    Args:
        artifact: The policy to begin with; its path is watched.

    Attributes:
        num_reloads: New files by outcome, `loaded` and `refused`.
    """

    def __init__(self, artifact: PolicyArtifact) -> None:
        self.num_reloads: Counter[str] = Counter()
        self._policy = PolicyController(artifact)
        self._judged: tuple[tuple[int, ...], ...] = ()  # nothing yet, not even the file in use
        self._latest: tuple[tuple[int, ...], ...] = ()

    @property
    def artifact(self) -> PolicyArtifact:
        """The policy in use."""
        return self._policy.artifact

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Apply the policy in use to every observation row."""
        return self._policy.decide(record, observation)

    def watch(self, interval_s: float) -> None:
        """Look for a new file every so often, in a thread that ends with the process."""
        ticking = threading.Event()

        def look_for_ever() -> None:
            while not ticking.wait(interval_s):
                self.look()

        threading.Thread(target=look_for_ever, name="draftgym-reload", daemon=True).start()

    def look(self) -> None:
        """Take a new file into use, if there is one that has been the same for two looks."""
        signature, latest = _signature(self.artifact.path), self._latest
        self._latest = signature
        if signature == self._judged or signature != latest:
            return
        self._judged = signature
        try:
            artifact = load_policy(self.artifact.path)
            if artifact.sha256 == self.artifact.sha256:
                return
            if artifact.contract != self.artifact.contract:
                raise ArtifactError(
                    "The new policy has other drafters, lengths or another granularity; restart "
                    "the server to serve it."
                )
            if artifact.drafter_settings != self.artifact.drafter_settings:
                raise ArtifactError(
                    "The new policy was trained with other settings of the drafters; restart the "
                    "server to serve it."
                )
            policy = PolicyController(artifact)
        except Exception as error:  # whatever lies there now, the policy in use serves on
            self.num_reloads["refused"] += 1
            logger.error(
                "The new file at %s is not used, policy %s… serves on: %s",
                self.artifact.path,
                self.artifact.sha256[:12],
                error,
            )
            return
        self._policy = policy
        self.num_reloads["loaded"] += 1
        logger.info("draftgym now uses policy %s (sha256 %s).", artifact.path, artifact.sha256)


def _signature(path: Path) -> tuple[tuple[int, ...], ...]:
    """What changes when the policy or its description is replaced or written to."""
    return tuple(_identity(file) for file in (path, path.with_suffix(".json")))


def _identity(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError:  # missing, perhaps for a moment
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
