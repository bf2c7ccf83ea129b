"""Who records the shards of a collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policy.errors import ConfigError


@dataclass(frozen=True)
class LauncherConfig:
    """One process, or several over Ray.

    Attributes:
        name: `local` or `ray`.
        num_workers: Worker processes, each with an engine of its own; Ray only.
        address: Ray cluster to join; null starts one on this machine.
    """

    name: Literal["local", "ray"] = "local"
    num_workers: int = 2
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ("local", "ray"):
            raise ConfigError(f"launcher.name is '{self.name}'; make it 'local' or 'ray'.")
        if self.num_workers < 1:
            raise ConfigError(f"launcher.num_workers is {self.num_workers}; make it 1 or more.")
