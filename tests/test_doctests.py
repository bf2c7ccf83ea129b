"""The examples in the docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("policy", "envs")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_the_docstrings_hold(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
