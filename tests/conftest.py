"""Fixtures shared by the live tests: engines are dear, so modules share them."""

from __future__ import annotations

import pytest

from . import live
from .sampled import Continuations

LONG_FILES = ("test_benchmark.py", "test_live_", "test_ray_", "test_trace_training.py")


def pytest_collection_modifyitems(items):
    """Files that start engines first: one of them as the last would leave a core idle."""
    items.sort(key=lambda item: not item.path.name.startswith(LONG_FILES))


@pytest.fixture(scope="session")
def requests_of_128_tokens():
    return live.make_requests(32, max_tokens=128)


@pytest.fixture(scope="session")
def without_speculation(requests_of_128_tokens):
    """Greedy outputs and a tree of continuations of vLLM without a drafting policy."""
    from envs.live import engine_config
    from envs.vllm_engine import VllmEngine

    engine = VllmEngine(engine_config(live.MODEL, None))
    assert engine.hook is None
    outputs = engine.generate(requests_of_128_tokens, concurrency=8)
    continuations = Continuations.of(engine)
    engine.close()
    return outputs, continuations


@pytest.fixture(scope="session")
def plain_outputs(without_speculation):
    """Greedy outputs of vLLM without speculation and without a drafting policy."""
    return without_speculation[0]


@pytest.fixture(scope="session")
def plain_continuations(without_speculation):
    """How likely vLLM without speculation finds the continuations of a prompt."""
    return without_speculation[1]


@pytest.fixture(scope="module")
def engine(plain_outputs):
    """A hooked engine whose controller the test sets; None leaves decisions to the test.

    One process holds one engine at a time: closing another one would end this one too.
    """
    engine = live.make_engine()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _external_controller(request):
    """A test that swaps the shared engine's controller does not leave it behind."""
    yield
    if "engine" in request.fixturenames:
        shared = request.getfixturevalue("engine")
        shared.hook.controller = None
        shared.abort_all()
