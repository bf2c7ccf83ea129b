"""What tuning found: contenders that `scripts/evaluate.py` loads, and a table of all trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from .tuning import Section, Trial, Tuning
from .tuning_config import TuningConfig

_TABLE = "tuning.md"
_COST_MODEL = "${trace.cost_model}"


def prepare_files(config: TuningConfig) -> None:
    """Make the folders, before anything is replayed.

    Raises:
        ConfigError: If a place cannot be written to.
    """
    for path in (Path(config.out), Path(config.output_dir) / _TABLE):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"Cannot write to {path} ({error.strerror}); name another place."
            ) from error


def write_tuning(config: TuningConfig, tunings: Mapping[str, Tuning]) -> str:
    """Write both files.

    Args:
        config: Says where.
        tunings: The searches by contender.

    Returns:
        A summary and where the files lie.
    """
    traces = ", ".join(Path(file).name for file in config.trace.files)
    head = (
        f"# By scripts/tune_baselines.py on training requests of {traces}.\n"
        "# Behind each rule the geometric mean of its speed over none, before and after, at\n"
        f"# {', '.join(config.scenarios)}.\n"
    )
    lines = [
        f"{name}: {json.dumps(_portable(tuning.best.section, config))} "
        f"# {tuning.trials[0].score:.3f} -> {tuning.best.score:.3f}\n"
        for name, tuning in tunings.items()
    ]
    out, table = Path(config.out), Path(config.output_dir) / _TABLE
    out.write_text(head + "".join(lines))  # JSON is YAML
    table.write_text(_tables(config, tunings))
    return f"{_summary(tunings)}\n\nContenders: {out}\nEvery trial: {table}"


def _portable(section: Section, config: TuningConfig) -> Section:
    """The section with the cost model of whoever loads it, where it is the tuning's own."""
    if section.get("cost_model") == config.trace.cost_model:
        return {**section, "cost_model": _COST_MODEL}
    return section


def _summary(tunings: Mapping[str, Tuning]) -> str:
    rows = [
        [
            name,
            f"{tuning.trials[0].score:.3f}",
            f"{tuning.best.score:.3f}",
            ", ".join(f"`{key}={value}`" for key, value in _differences(tuning)) or "–",
        ]
        for name, tuning in tunings.items()
    ]
    return _table(["contender", "start", "tuned", "what was changed"], rows)


def _differences(tuning: Tuning) -> list[tuple[str, object]]:
    start, best = tuning.trials[0].section, tuning.best.section
    return [(key, value) for key, value in best.items() if start.get(key) != value]


def _tables(config: TuningConfig, tunings: Mapping[str, Tuning]) -> str:
    """The summary and, for each contender, its trials."""
    parts = ["# Tuning", "Speed over none on training requests.", _summary(tunings)]
    for name, tuning in tunings.items():
        rows = [_row(trial, config) for trial in tuning.trials]
        header = ["tried", *config.scenarios, "geometric mean"]
        parts += [f"## {name}", _table(header, rows)]
    return "\n\n".join(parts) + "\n"


def _row(trial: Trial, config: TuningConfig) -> list[str]:
    speeds = [f"{trial.speedups[scenario]:.3f}" for scenario in config.scenarios]
    return [f"`{trial.change}`" if trial.change else "start", *speeds, f"{trial.score:.4f}"]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
