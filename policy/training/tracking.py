"""Where metrics go: terminal and CSV always, wandb or TensorBoard on demand."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, make_output_format

from ..errors import ConfigError
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
        self._run: Any = None
        formats: list[KVWriter] = []
        if config.name == "wandb":
            self._run = _start_wandb(config, folder, resolved, run_id)
            formats.append(WandbWriter(self._run))
        if config.name == "tensorboard":
            formats.append(make_output_format("tensorboard", str(folder)))
        formats.append(make_output_format("csv", str(folder), _csv_suffix(folder)))
        self.sb3_logger = Logger(str(folder), formats)

    @property
    def run_id(self) -> str | None:
        """Run id of wandb, to resume the same run."""
        return None if self._run is None else str(self._run.id)

    def log_report(
        self, tables: Mapping[str, Sequence[Sequence[Any]]], figures: Mapping[str, Path]
    ) -> None:
        """Log a report.

        Args:
            tables: Rows by name; the first one names the columns.
            figures: Pictures by name.
        """
        if self._run is None:
            return
        import wandb

        logged: dict[str, Any] = {
            name: wandb.Table(columns=list(rows[0]), data=[list(row) for row in rows[1:]])
            for name, rows in tables.items()
        }
        logged |= {name: wandb.Image(str(path)) for name, path in figures.items()}
        self._run.log(logged)

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


def _csv_suffix(folder: Path) -> str:
    """What keeps a run that is resumed in its own folder from overwriting its earlier CSV."""
    suffix, number = "", 1
    while (folder / f"progress{suffix}.csv").exists():
        number += 1
        suffix = f"_{number}"
    return suffix


def _start_wandb(
    config: LoggerConfig, folder: Path, resolved: Mapping[str, Any], run_id: str | None
) -> Any:
    # wandb sends figures of its own use to its server, from an offline run too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    try:
        mode = _wandb_mode(config.mode, folder)
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            mode=mode,
            dir=str(folder),
            config=dict(resolved),
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        raise ConfigError(
            f"wandb could not start ({' '.join(str(error).split()).rstrip('.')}); call "
            "`wandb login`, or set logger.mode=offline or logger=none."
        ) from error
    if mode == "online":
        print(f"wandb: {run.url}")
    return run


def _wandb_mode(wanted: Literal["auto", "online", "offline"], folder: Path) -> Any:
    """Online where wandb finds credentials, without ever asking for any.

    `auto` leaves the choice to WANDB_MODE and wandb's settings files where they make one.
    """
    import wandb

    session = wandb.setup(wandb.Settings(silent=True))  # or it prints on top of the progress bar
    if wanted == "offline":
        return wanted
    if wanted == "auto" and session.settings.mode != "online":
        return session.settings.mode
    session.settings.mode = "online"
    if wandb.login(prompt=False, verify=False):
        return "online"
    if wanted == "online":
        raise ConfigError(
            "logger.mode is 'online' but wandb has no login here; call `wandb login`, or set "
            "logger.mode=offline."
        )
    logger.warning(
        "wandb has no login here, so the run is kept offline under %s; use `wandb sync` "
        "to upload it, or logger=none.",
        folder / "wandb",
    )
    return "offline"
