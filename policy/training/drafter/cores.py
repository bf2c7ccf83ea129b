"""Work shared out to the cores in pieces, instead of every product being split between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


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
