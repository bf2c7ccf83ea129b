"""What runs where: an engine in a process of its own, training in one thread a core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def in_own_process(function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
    """Call a function in a fresh process and wait for its result.

    vLLM binds the threads of its process to cores for good and takes torch's say over their
    number away, so an engine lives apart from training.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as processes:
        return processes.submit(function, *args, **kwargs).result()


@contextmanager
def one_thread_a_core() -> Iterator[ThreadPoolExecutor]:
    """Threads, one for each core this process may use, in which torch uses one core alone.

    Products of this size gain little from a second core and wait whenever that is busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(
            len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)
        ) as threads:
            yield threads
    finally:
        torch.set_num_threads(before)
