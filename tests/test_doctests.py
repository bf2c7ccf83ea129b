"""The examples in the docstrings are true."""

import doctest
import importlib

import pytest

NAMES = [
    "policy.contract",
    "policy.step",
    "policy.observation",
    "policy.serving.metrics",
    "policy.training.drafter.schedule",
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_the_docstrings_hold(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
