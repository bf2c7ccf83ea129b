"""Shares of a job over Ray: each in a process of its own, redone when its worker dies.

What the workers need of each other is a folder that all of them, and this process, see under one
path. Nothing is uploaded: draftgym must be importable on every machine of the cluster, either
installed or at the path it has here.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from policy.errors import ConfigError, DraftgymError, EngineError

Share = Callable[[int, int], None]
"""Does one share of a job, given which (from 0) and how many there are; can be pickled."""

MAX_ATTEMPTS = 3
"""Workers that a share may lose before the job is given up."""

_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_OBJECT_STORE_BYTES = 80 << 20  # shares return next to nothing; the memory is the engines'
_PYTHON_PATH = str(Path(__file__).resolve().parents[1])


def run_shares(
    share: Share,
    folder: Path,
    num_workers: int,
    address: str | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Do every share of a job, as many as there are workers, over Ray.

    A worker gets its part of the cluster's cores and, where the cluster has GPUs, one of them;
    more workers than fit take turns. A share must go on where a worker that died left it.

    Args:
        share: What a worker does.
        folder: Where all machines find each other's files; workers write their logs there.
        num_workers: Worker processes, and shares.
        address: Ray cluster to join, as `ray.init` takes it; None starts one on this machine, for
            this call only. A cluster that this process already is connected to is used and kept.
        on_poll: Called about once a second.

    Raises:
        ConfigError: If Ray is not installed.
        EngineError: If there is no cluster, or a share failed or lost too many workers.
    """
    with _cluster(num_workers, address) as ray:
        task = _task(ray, num_workers)
        attempts: Counter[int] = Counter()
        running: dict[Any, int] = {}

        def start(index: int) -> None:
            attempts[index] += 1
            log = _log_path(folder, index, num_workers)
            running[task.remote(share, index, num_workers, log, Path.cwd())] = index

        for index in range(num_workers):
            start(index)
        try:
            while running:
                ended, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                on_poll()
                for reference in ended:
                    index = running.pop(reference)
                    death = _death(ray, reference, folder)
                    if death is None:
                        continue
                    lost = f"Worker {index + 1} of {num_workers} died"
                    log = _log_path(folder, index, num_workers)
                    if attempts[index] == MAX_ATTEMPTS:
                        raise EngineError(f"{lost} {MAX_ATTEMPTS} times ({death}); see {log}.")
                    tqdm.write(f"{lost} ({death}); its share is gone on with.", sys.stderr)
                    start(index)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


@contextmanager
def _cluster(num_workers: int, address: str | None) -> Iterator[Any]:
    """The module `ray`, connected; a cluster started here ends here."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # else a new cluster reports to Ray's makers
    os.environ.setdefault("RAY_worker_niceness", "0")  # else workers yield to all other processes
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of its change
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            'Ray is not installed; `pip install "draftgym[ray]"`, or use launcher=local.'
        ) from error
    if ray.is_initialized():
        yield ray
        return
    new_cluster: dict[str, Any] = {
        "num_cpus": max(len(os.sched_getaffinity(0)), num_workers),
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    try:
        if address is not None:
            _check_reachable(address)
        ray.init(
            address or "local",  # None would join whatever runs on this machine
            logging_level=logging.ERROR,
            log_to_driver=False,
            **({} if address else new_cluster),
        )
    except Exception as error:  # of many types, by what is wrong with the cluster
        ray.shutdown()
        reason = _first_line(error)
        if address is None:
            raise EngineError(f"Ray did not start ({reason}); use launcher=local.") from error
        raise EngineError(
            f"No Ray cluster can be joined at {address} ({reason}); check launcher.address and, "
            "where the cluster wants a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise OSError where nobody answers at HOST:PORT, for which Ray would look for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _task(ray: Any, num_workers: int) -> Any:
    """`_run_share` as a Ray task with a worker's part of the cluster."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if sum(cores) < 1:
        raise EngineError("The Ray cluster has no cores; start its nodes with --num-cpus.")
    inherited = os.environ.get("PYTHONPATH")
    python_path = f"{_PYTHON_PATH}{os.pathsep}{inherited}" if inherited else _PYTHON_PATH
    as_task = ray.remote(
        num_cpus=cores_per_worker(cores, num_workers),  # also the threads that its engine uses
        num_gpus=1 if ray.cluster_resources().get("GPU", 0) else 0,
        max_calls=1,  # a process holds one live engine, ever
        max_retries=0,
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": {"PYTHONPATH": python_path}},
    )
    return as_task(_run_share)


def cores_per_worker(node_cores: Sequence[int], num_workers: int) -> int:
    """Most cores that every worker can have at once; 1 where they have to take turns.

    Example:
        >>> cores_per_worker([16, 16, 16], num_workers=4)
        8
    """
    fitting = (
        cores
        for cores in range(1, max(node_cores) + 1)
        if sum(available // cores for available in node_cores) >= num_workers
    )
    return max(fitting, default=1)


def _run_share(
    share: Share, index: int, num_shares: int, log: Path, directory: Path
) -> DraftgymError | None:
    """Body of a worker: do the share and return its error, with all that it prints in its log."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    name = f"Worker {index + 1} of {num_shares}"
    print(f"{name} is process {os.getpid()} on {socket.gethostname()}.", flush=True)
    if directory.is_dir():
        os.chdir(directory)  # relative paths mean what they mean where the job was given
    try:
        share(index, num_shares)
    except DraftgymError as error:
        traceback.print_exc()
        return error
    except Exception as error:  # reported to the caller, whatever it is
        traceback.print_exc()
        return EngineError(f"{name} failed ({type(error).__name__}: {error}); see {log}.")
    return None


def _death(ray: Any, reference: Any, folder: Path) -> str | None:
    """How the worker of a task died; None if it lived, and its error is raised if it failed."""
    try:
        error = ray.get(reference)
    except ray.exceptions.RayTaskError as failure:
        raise EngineError(
            f"A Ray worker could not begin ({type(failure.cause).__name__}: "
            f"{_first_line(failure.cause)}); install draftgym on every machine and share {folder} "
            "between them."
        ) from failure
    except ray.exceptions.RayError as death:
        return type(death).__name__
    if error is not None:
        raise error
    return None


def _log_path(folder: Path, index: int, num_workers: int) -> Path:
    return folder / f"worker-{index:03}-of-{num_workers:03}.log"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
