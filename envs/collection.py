"""Collecting traces: a resumable job of part files, which shards can share.

Every finished request lies in exactly one part file of the job's folder, and a part is written
whole or not at all. Whoever goes on, after a kill or as one of several workers, records what no
part holds yet; how many workers there are may change between two runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from policy.errors import ConfigError, TraceError

from .live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from .part_files import claim
from .prompts.prompt import Split
from .recording import record_traces
from .traces import TraceHeader, Traces, concatenate, read_traces
from .vllm_engine import VllmEngine
from .workload import Workload, WorkloadConfig, WorkloadRequest


@dataclass(frozen=True)
class CollectionJob:
    """What is recorded.

    Attributes:
        model: Target model and engine.
        drafters: Drafters and the longest drafts to record.
        workload: Prompts; each is recorded once, up to `output_tokens`.
        splits: Splits whose prompts are recorded.
        concurrency: Requests in flight.
        requests_per_part: Requests after which a part is written; a kill loses at most so many.
    """

    model: ModelConfig
    drafters: DraftersConfig
    workload: WorkloadConfig
    splits: tuple[Split, ...] = ("train", "eval")
    concurrency: int = 8
    requests_per_part: int = 8

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests_per_part"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; make it 1 or more.")
        if not self.splits or not set(self.splits) <= {"train", "eval"}:
            raise ConfigError(f"splits is {list(self.splits)}; list 'train', 'eval' or both.")
        if self.concurrency > self.model.max_num_seqs:
            raise ConfigError(
                f"A concurrency of {self.concurrency} exceeds model.max_num_seqs "
                f"{self.model.max_num_seqs}; raise it or lower the concurrency."
            )

    @property
    def header(self) -> TraceHeader:
        """Header of the traces."""
        settings = self.drafters.settings
        return TraceHeader(
            max_lengths={
                name: self.drafters.max_lengths[name] for name in self.drafters.contract().proposers
            },
            target=self.model.target,
            output_tokens=self.workload.output_tokens,
            max_model_len=self.model.max_model_len,
            temperature=self.workload.temperature,
            **{
                name: value
                for name, value in vars(settings).items()
                if name.startswith(("ngram_", "suffix_"))
            },
        )

    def requests(self) -> list[tuple[Split, WorkloadRequest]]:
        """Every request of the job, in the order of the merged traces."""
        tokenizer = load_tokenizer(self.model)
        return [
            (split, request)
            for split in self.splits
            for request in Workload(self.workload, split, tokenizer).every_request()
        ]


def begin(job: CollectionJob, folder: Path) -> None:
    """Claim a folder for a job, or go on with the same one.

    Raises:
        TraceError: If the folder holds parts of a job with other settings.
    """
    claim(folder, _recorded_settings(job))


def collect_shard(job: CollectionJob, folder: Path, shard: int = 0, num_shards: int = 1) -> None:
    """Record what no part holds yet of every `num_shards`-th request.

    Args:
        job: What is recorded.
        folder: Where the parts go; `begin` has claimed it.
        shard: Which share, from 0.
        num_shards: Shares in all.
    """
    done = recorded_ids(folder)
    shares = job.requests()[shard::num_shards]
    left = [(split, request) for split, request in shares if request.request_id not in done]
    if not left:
        return
    with (
        closing(VllmEngine(engine_config(job.model, job.drafters))) as engine,
        tqdm(
            total=len(shares), initial=len(shares) - len(left), unit="request", desc="recording"
        ) as bar,
    ):
        for split in job.splits:
            requests = [request for of_split, request in left if of_split == split]
            finished = record_traces(engine, requests, split, job.header, job.concurrency)
            while part := list(islice(finished, job.requests_per_part)):
                concatenate(part).write(_next_part(folder, shard, num_shards))
                bar.update(len(part))


def recorded_ids(folder: Path) -> set[str]:
    """Requests that the parts of a folder hold."""
    paths = folder.glob("*.parquet")
    return {request_id for path in paths for request_id in read_traces(path).request_ids}


def merge(job: CollectionJob, folder: Path) -> Traces:
    """All parts as one, in the job's order.

    A request that two workers recorded, one of them taken for lost, counts once.

    Raises:
        TraceError: If a request is missing.
    """
    parts = [read_traces(path) for path in sorted(folder.glob("*.parquet"))]
    recorded = {request_id for part in parts for request_id in part.request_ids}
    wanted = [request.request_id for _, request in job.requests()]
    if missing := [request_id for request_id in wanted if request_id not in recorded]:
        raise TraceError(
            f"{folder} lacks {len(missing)} requests, such as {missing[0]}; collect again to go on."
        )
    traces = concatenate(list(_without_repeats(parts)))
    place = {request_id: i for i, request_id in enumerate(traces.request_ids)}
    return traces.select([place[request_id] for request_id in wanted])


def _without_repeats(parts: Iterable[Traces]) -> Iterable[Traces]:
    seen: set[str] = set()
    for part in parts:
        new = np.array([request_id not in seen for request_id in part.request_ids])
        seen.update(part.request_ids)
        if new.any():
            yield part if new.all() else part.select(np.flatnonzero(new))


def _next_part(folder: Path, shard: int, num_shards: int) -> Path:
    number = 0
    while (path := folder / f"{shard:03}-of-{num_shards:03}-{number:05}.parquet").exists():
        number += 1
    return path


def _recorded_settings(job: CollectionJob) -> dict[str, Any]:
    """What two runs must share so that their parts are of one collection."""
    workload = replace(job.workload, concurrency=(1,))
    return asdict(replace(job, workload=workload, concurrency=1, requests_per_part=1))
