"""The examples in the docstrings of the pure modules are true."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    ["policy.contract", "policy.step", "policy.observation", "policy.training.drafter.schedule"],
)
def test_examples_in_the_docstrings_hold(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
