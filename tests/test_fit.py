"""Engines that the hook does not fit are refused in one sentence that names the mend."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from policy.contract import Contract
from policy.errors import EngineError
from policy.serving import fit

SENTENCE = r"[^\n]+; [^\n]+\."


@pytest.fixture(autouse=True)
def _supported(monkeypatch):
    monkeypatch.setattr(fit, "version", lambda name: fit.SUPPORTED_VLLM)


def config(**changes):
    """What the checks look at of vLLM's configuration; dots in names are underscores twice."""
    made = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=8,
            draft_sample_method="greedy",
            parallel_drafting=False,
            use_heterogeneous_vocab=False,
        ),
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
    )
    for name, value in changes.items():
        owner, _, attribute = name.rpartition("__")
        setattr(getattr(made, owner) if owner else made, attribute, value)
    return made


ENGINES = {
    "no speculation": ({"speculative_config": None}, "add --speculative-config"),
    "S16, the V2 runner": ({"use_v2_model_runner": True}, "set VLLM_USE_V2_MODEL_RUNNER=0"),
    "async scheduling": ({"scheduler_config__async_scheduling": True}, "--no-async-scheduling"),
    "S15, data parallel": ({"parallel_config__data_parallel_size": 2}, "one engine per replica"),
    "pipeline parallel": ({"parallel_config__pipeline_parallel_size": 2}, "pipeline or data"),
}


@pytest.mark.parametrize(("changes", "words"), ENGINES.values(), ids=ENGINES)
def test_an_engine_that_does_not_fit_is_refused(changes, words):
    fit.check_engine(config())
    with pytest.raises(EngineError, match=words) as refusal:
        fit.check_engine(config(**changes))
    assert re.fullmatch(SENTENCE, str(refusal.value))


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu"])
def test_the_supported_version_passes_whatever_build_it_is(found, monkeypatch):
    monkeypatch.setattr(fit, "version", lambda name: found)
    fit.check_engine(config())


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.32.1", "1.0"])
def test_other_versions_are_refused_by_name(found, monkeypatch):
    monkeypatch.setattr(fit, "version", lambda name: found)
    with pytest.raises(EngineError, match=re.escape(f"this is {found}; install vllm==0.32.0")):
        fit.check_engine(config())


DRAFTERS = {
    "too long": ({"ngram": 9}, {}, "set num_speculative_tokens to 9"),
    "not loaded": ({"draft_model": 4}, {}, "drafts with 'draft_model'"),
    "no model at all": (
        {"eagle3": 4},
        {"speculative_config__method": "ngram"},
        "the engine has loaded 'ngram'",
    ),
    "sampled drafts": (
        {"eagle3": 4},
        {"speculative_config__draft_sample_method": "probabilistic"},
        "remove draft_sample_method",
    ),
    "parallel drafts": (
        {"ngram": 4},
        {"speculative_config__parallel_drafting": True},
        "remove draft_sample_method",
    ),
}


@pytest.mark.parametrize(("lengths", "changes", "words"), DRAFTERS.values(), ids=DRAFTERS)
def test_drafters_that_the_engine_does_not_have_are_refused(lengths, changes, words):
    fit.check_drafters(Contract(("none", "ngram", "eagle3"), (0, 8, 4)), config())
    contract = Contract(("none", *lengths), (0, *lengths.values()))
    with pytest.raises(EngineError, match=words) as refusal:
        fit.check_drafters(contract, config(**changes))
    assert re.fullmatch(SENTENCE, str(refusal.value))
