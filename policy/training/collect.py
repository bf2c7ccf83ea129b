"""Collecting: traces, timings and the cost model of one machine, with their provenance."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.collection import CollectionJob, begin, collect_shard, merge
from envs.cost_fit import FitReport, fit_cost_model, held_out_error
from envs.launcher import LauncherConfig
from envs.live import DraftersConfig, ModelConfig
from envs.part_files import claim
from envs.prompts.prompt import Split
from envs.step_timings import write_timings
from envs.timing import TimingConfig, TimingJob, collect_timings, merge_timings
from envs.traces import Traces
from envs.workload import WorkloadConfig

from .config import Resolved
from .hardware import describe_hardware


@dataclass(frozen=True)
class RecordConfig:
    """How the plain run is served.

    Attributes:
        splits: Splits whose prompts are recorded.
        concurrency: Requests in flight.
        requests_per_part: Requests after which a part is written; a kill loses at most so many.
    """

    splits: tuple[Split, ...] = ("train", "eval")
    concurrency: int = 16
    requests_per_part: int = 8


@dataclass(frozen=True)
class CollectConfig:
    """Everything `scripts/collect.py` can be told.

    Attributes:
        model: Target model and engine.
        drafters: Drafters and the longest drafts to record.
        workload: Prompts; each is recorded once, up to `output_tokens`.
        record: How the plain run is served.
        timing: The grid of timed steps; null leaves the cost model out.
        launcher: Whether one process records, or several over Ray.
        out: The files' common beginning: `OUT.parquet`, `OUT.timings.parquet`, `OUT.json`.
        seed: Order of the timed steps.
    """

    model: ModelConfig
    drafters: DraftersConfig
    workload: WorkloadConfig
    record: RecordConfig = field(default_factory=RecordConfig)
    timing: TimingConfig | None = field(default_factory=TimingConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    out: str = "outputs/traces/traces"
    seed: int = 0


@dataclass(frozen=True)
class Collected:
    """What a collection left behind."""

    traces: Traces
    paths: tuple[Path, ...]
    fit: FitReport | None


def collect(config: CollectConfig, resolved: Resolved) -> Collected:
    """Record traces, time steps and fit the cost model; go on where a killed run ended.

    Args:
        config: What to collect.
        resolved: The same as plain containers, for the provenance.
    """
    job = CollectionJob(config.model, config.drafters, config.workload, **vars(config.record))
    paths = [Path(f"{config.out}{suffix}") for suffix in (".parquet", ".timings.parquet", ".json")]
    folder, timing_folder = (
        Path(f"{config.out}{suffix}") for suffix in (".parts", ".timings.parts")
    )
    timing = _timing_job(config)
    begin(job, folder)
    if timing is not None:
        claim(timing_folder, {**asdict(timing), "hardware": describe_hardware()})
    if config.launcher.name == "ray":
        from envs.ray_collection import collect_on_ray

        collect_on_ray(job, folder, config.launcher.num_workers, config.launcher.address)
    else:
        collect_shard(job, folder)
    traces = merge(job, folder)
    traces.write(paths[0])
    provenance: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "config": resolved,
        "hardware": describe_hardware(),
        "num_requests": traces.num_requests,
        "num_output_tokens": int(traces.starts[-1]),
        "sha256": _sha256(paths[0]),
    }
    fit = None
    if timing is not None:
        collect_timings(timing, timing_folder)
        steps = merge_timings(timing, timing_folder)
        write_timings(steps, paths[1])
        fit = held_out_error(steps, timing.grid.loads)
        provenance["cost_model"] = {
            **fit_cost_model(steps, timing.grid.loads).state_dict(),
            "fit": fit.as_dict(),
            "timings_sha256": _sha256(paths[1]),
        }
    unfinished = paths[2].with_suffix(".json.partial")
    unfinished.write_text(json.dumps(provenance, indent=1) + "\n")
    unfinished.replace(paths[2])
    return Collected(traces, tuple(path for path in paths if path.exists()), fit)


def describe(collected: Collected) -> str:
    """The end of a collection in a few lines."""
    traces = collected.traces
    lines = [f"{traces.num_requests} requests, {int(traces.starts[-1])} output tokens"]
    for name, drafter in traces.drafters.items():
        drafts = drafter.num_draft_tokens > 0
        if drafts.any():
            lines.append(
                f"{name}: drafts at {drafts.mean():.0%} of the positions, of which "
                f"{drafter.num_accepted_tokens[drafts].mean():.2f} tokens are accepted"
            )
    if collected.fit is not None:
        lines.append(str(collected.fit))
    return "\n".join([*lines, "Files: " + ", ".join(map(str, collected.paths))])


def _timing_job(config: CollectConfig) -> TimingJob | None:
    """What is timed; None leaves the cost model out."""
    if config.timing is None:
        return None
    workload = replace(config.workload, concurrency=config.timing.loads)
    return TimingJob(config.model, config.drafters, workload, config.timing, config.seed)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
