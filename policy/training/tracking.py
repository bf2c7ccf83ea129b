"""Where metrics go: terminal and CSV always, wandb or TensorBoard on demand."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, make_output_format

from .config import LoggerConfig

logger = logging.getLogger(__name__)


class WandbWriter(KVWriter):
    """Writes stable-baselines3's key-values to a wandb run, against `global_step`."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")

    def write(
        self,
        key_values: dict[str, Any],
        key_excluded: dict[str, tuple[str, ...]],
        step: int = 0,
    ) -> None:
        """Log the scalars of one dump."""
        scalars = {
            key: value
            for key, value in key_values.items()
            if isinstance(value, int | float | np.number)
        }
        self._run.log({**scalars, "global_step": step})

    def close(self) -> None:
        """The run is finished by `Tracking.finish`."""


class Tracking:
    """A run's loggers.

    Args:
        config: Which.
        folder: The run's folder.
        resolved: The whole configuration, logged with the run.
        run_id: wandb's run id of a resumed run.
    """

    def __init__(
        self,
        config: LoggerConfig,
        folder: Path,
        resolved: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        formats: list[KVWriter] = [make_output_format("csv", str(folder))]
        self._run: Any = None
        if config.name == "tensorboard":
            formats.append(make_output_format("tensorboard", str(folder)))
        if config.name == "wandb":
            self._run = _start_wandb(config, folder, resolved, run_id)
            formats.append(WandbWriter(self._run))
        self.sb3_logger = Logger(str(folder), formats)

    @property
    def run_id(self) -> str | None:
        """Run id of wandb, to resume the same run."""
        return None if self._run is None else str(self._run.id)

    def log_report(self, cells: list[dict[str, Any]], figure: Path) -> None:
        """Log the comparison's table and figure."""
        if self._run is None:
            return
        import wandb

        columns = list(cells[0])
        rows = [[cell[column] for column in columns] for cell in cells]
        self._run.log(
            {
                "comparison": wandb.Table(columns=columns, data=rows),
                "comparison_figure": wandb.Image(str(figure)),
            }
        )

    def log_policy(self, path: Path) -> None:
        """Log the exported policy as an artefact."""
        if self._run is None:
            return
        import wandb

        artifact = wandb.Artifact("policy", type="model")
        artifact.add_file(str(path))
        artifact.add_file(str(path.with_suffix(".json")))
        self._run.log_artifact(artifact)

    def finish(self, exit_code: int = 0) -> None:
        """End the run, whatever happened."""
        self.sb3_logger.close()
        if self._run is not None:
            self._run.finish(exit_code=exit_code)


def _start_wandb(
    config: LoggerConfig, folder: Path, resolved: Mapping[str, Any], run_id: str | None
) -> Any:
    import wandb

    mode = config.mode
    if mode == "auto":
        mode = "online" if _has_login() else "offline"
        if mode == "offline":
            logger.warning(
                "wandb has no login here, so the run is kept offline under %s; use `wandb sync` "
                "to upload it, or logger=none.",
                folder / "wandb",
            )
    os.environ.setdefault("WANDB_SILENT", "true")
    return wandb.init(
        project=config.project,
        entity=config.entity,
        group=config.group,
        tags=list(config.tags),
        mode=mode,
        dir=str(folder),
        config=dict(resolved),
        id=run_id,
        resume="allow" if run_id else None,
        settings=wandb.Settings(console="off"),
    )


def _has_login() -> bool:
    """Whether wandb finds a key without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
