"""Fixtures shared by the live tests: engines are dear, so modules share them."""

from __future__ import annotations

import pytest

from . import live


@pytest.fixture(scope="session")
def requests_of_128_tokens():
    return live.make_requests(32, max_tokens=128)


@pytest.fixture(scope="session")
def plain_outputs(requests_of_128_tokens):
    """Greedy outputs of vLLM without speculation and without a drafting policy."""
    from envs.live import engine_config
    from envs.vllm_engine import VllmEngine

    engine = VllmEngine(engine_config(live.MODEL, None))
    assert engine.hook is None
    outputs = engine.generate(requests_of_128_tokens, concurrency=8)
    engine.close()
    return outputs


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
