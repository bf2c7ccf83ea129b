"""Collecting: traces, timings and the cost model of one machine, with their provenance."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.collection import CollectionJob, begin, collect_shard, merge
from envs.cost_fit import FitReport, fit_cost_model, held_out_error
from envs.launcher import LauncherConfig
from envs.live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from envs.prompts.prompt import Split
from envs.timing import TimingConfig, read_timings, run_timings, write_timings
from envs.traces import Traces
from envs.vllm_engine import VllmEngine
from envs.workload import Workload, WorkloadConfig

from ..errors import ConfigError
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
    folder = Path(f"{config.out}.parts")
    if config.timing is not None and max(config.timing.loads) > config.model.max_num_seqs:
        raise ConfigError(
            f"timing.loads go up to {max(config.timing.loads)} requests; raise model.max_num_seqs "
            f"from {config.model.max_num_seqs} or lower them."
        )
    begin(job, folder)
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
        "sha256": hashlib.sha256(paths[0].read_bytes()).hexdigest(),
    }
    fit = None
    if config.timing is not None:
        _time_steps(config, config.timing, paths[1])
        rows = read_timings(paths[1])
        fit = held_out_error(rows, config.timing.loads)
        model = fit_cost_model(rows, config.timing.loads)
        provenance["cost_model"] = {**model.state_dict(), "fit": fit.as_dict()}
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


def _time_steps(config: CollectConfig, timing: TimingConfig, path: Path) -> None:
    """Run the grid of timed steps on this machine, unless an earlier run has."""
    if path.exists():
        return
    workload = replace(
        config.workload,
        concurrency=timing.loads,
        max_prompts_per_kind=timing.prompts_per_kind,
    )
    requests = Workload(workload, "train", load_tokenizer(config.model))
    with closing(VllmEngine(engine_config(config.model, config.drafters))) as engine:
        write_timings(run_timings(engine, requests, timing, config.seed), path)
