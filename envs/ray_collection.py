"""Collecting traces with several workers over Ray, on this machine or a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tqdm import tqdm

from .collection import CollectionJob, collect_shard, recorded_ids
from .ray_workers import run_shares
from .traces import read_traces


def collect_on_ray(
    job: CollectionJob, folder: Path, num_workers: int, address: str | None = None
) -> None:
    """Record what no part holds yet, each worker a live engine on its share of the requests.

    All the workers need is the folder: every machine must see it under the same path, and they
    write their parts and logs there. The share of a worker that dies is gone on with by a new
    one. `merge` then gives what `collect_shard` in one process gives: at temperature 0, the same
    tokens, drafts and acceptance, but for numeric near-ties.

    Args:
        job: What is recorded.
        folder: Where the parts go; `begin` has claimed it.
        num_workers: Worker processes, each with an engine of its own.
        address: Ray cluster to join, such as `auto` or `HOST:PORT`; None starts one on this
            machine and ends it again.

    Raises:
        ConfigError: If Ray is not installed.
        EngineError: If there is no cluster, or a worker failed or died too often.
    """
    folder = folder.resolve()
    seen = set(folder.glob("*.parquet"))
    wanted = {request.request_id for _, request in job.requests()}
    left = wanted - recorded_ids(folder)
    if not left:
        return
    with tqdm(
        total=len(wanted), initial=len(wanted) - len(left), unit="request", desc="recording"
    ) as bar:

        def show_progress() -> None:
            for path in set(folder.glob("*.parquet")) - seen:
                seen.add(path)
                bar.update(read_traces(path).num_requests)

        run_shares(partial(collect_shard, job, folder), folder, num_workers, address, show_progress)
        show_progress()
