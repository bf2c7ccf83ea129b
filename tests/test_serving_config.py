"""The `drafting_policy` section: what it takes, and how it names what it does not take."""

import itertools
import re

import pytest

from policy.errors import ConfigError
from policy.serving.config import POLICY_VARIABLE, DrafterSettings, DraftingPolicyConfig

RULE = {"baseline": {"name": "fixed", "drafter": "ngram"}, "drafters": {"ngram": 8}}
SENTENCE = r"[^\n]+; [^\n]+[.?]"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)


def read(section):
    return DraftingPolicyConfig.from_additional_config({"drafting_policy": section})


def refused(section):
    """The sentence that refuses a section."""
    with pytest.raises(ConfigError) as refusal:
        read(section)
    return str(refusal.value)


def test_a_path_alone_is_enough():
    assert read({"path": "policy.pt"}) == DraftingPolicyConfig(path="policy.pt")


def test_every_key_is_read():
    config = read(
        {
            **RULE,
            "granularity": "request",
            "fallback": ["ngram", 3],
            "strict": False,
            "decision_budget_ms": 5,
            "shadow": True,
            "canary": 0.25,
            "settings": {"ngram_min_match": 3, "ngram_max_match": 5, "dormant_after": 0},
        }
    )
    assert config.path is None
    assert config.baseline == {"name": "fixed", "drafter": "ngram"}
    assert config.drafters == {"ngram": 8}
    assert config.granularity == "request"
    assert config.fallback == ("ngram", 3)
    assert config.strict is False
    assert config.decision_budget_ms == 5
    assert config.shadow is True
    assert config.canary == 0.25
    assert config.drafter_settings() == DrafterSettings(3, 5, 0, 1024)
    assert read({"external": True, "drafters": {"eagle3": 4}}).external


def test_the_order_of_the_drafters_is_kept():
    for names in (["ngram", "eagle3"], ["eagle3", "ngram"]):
        config = read({"external": True, "drafters": dict.fromkeys(names, 4)})
        assert list(config.drafters) == names


@pytest.mark.parametrize(
    "config", [None, {}, {"other": 1}, object(), "text", {"drafting_policy": None}]
)
def test_without_a_section_nothing_is_configured(config):
    assert DraftingPolicyConfig.from_additional_config(config) is None


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, object(), {"drafting_policy": None}])
def test_the_environment_variable_names_a_policy(config, monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "/models/policy.pt")
    found = DraftingPolicyConfig.from_additional_config(config)
    assert found == DraftingPolicyConfig(path="/models/policy.pt")


def test_the_section_wins_over_the_environment_variable(monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "/models/policy.pt")
    assert read(RULE).path is None


def test_an_empty_environment_variable_says_nothing(monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "")
    assert DraftingPolicyConfig.from_additional_config({}) is None


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"pth": "policy.pt"}, "Unknown key 'pth' in drafting_policy; did you mean 'path'?"),
        (
            {**RULE, "settings": {"ngram_minmatch": 2}},
            "Unknown key 'ngram_minmatch' in drafting_policy.settings; did you mean "
            "'ngram_min_match'?",
        ),
        (
            {"qqq": 1},
            "Unknown key 'qqq' in drafting_policy; known: path, sha256, baseline, external, "
            "drafters, granularity, cutoffs, fallback, strict, decision_budget_ms, shadow, canary, "
            "reload, settings.",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(section, sentence):
    assert refused(section) == sentence


@pytest.mark.parametrize(
    "deciders",
    [
        {},
        {"path": "policy.pt", "baseline": {"name": "fixed"}},
        {"path": "policy.pt", "external": True},
        {"baseline": {"name": "fixed"}, "external": True},
        {"path": "policy.pt", "baseline": {"name": "fixed"}, "external": True},
    ],
    ids=lambda deciders: "+".join(deciders) or "nobody",
)
def test_exactly_one_decides(deciders):
    sentence = "Give exactly one of 'path', 'baseline' and 'external' in drafting_policy."
    assert refused({**deciders, "drafters": {"ngram": 8}}) == sentence


def test_drafters_are_given_without_a_policy_and_only_then():
    assert "needs 'drafters'" in refused({"external": True})
    assert "needs 'drafters'" in refused({"baseline": {"name": "fixed"}, "drafters": {}})
    assert "brings its own drafters" in refused({"path": "policy.pt", "drafters": {"ngram": 8}})


def test_a_policy_with_a_pinned_hash_is_not_reloaded():
    assert read({"path": "policy.pt", "reload": True}).reload
    sentence = refused({"path": "policy.pt", "reload": True, "sha256": "ab" * 32})
    assert "a pinned sha256 allows no other file" in sentence


RIGHT_TYPES = {
    "path": (str, type(None)),
    "sha256": (str, type(None)),
    "baseline": (dict, type(None)),
    "external": (bool,),
    "drafters": (dict,),
    "granularity": (),
    "fallback": (),
    "strict": (bool,),
    "decision_budget_ms": (int, float),
    "shadow": (bool,),
    "canary": (int, float),
    "reload": (bool,),
    "settings": (dict,),
    "settings.dormant_after": (int,),
}
VALUES = [None, 3, "text", ["list"], {"a": 1}, True, 2.5, b"bytes"]
WRONG_TYPES = [
    pytest.param(key, value, id=f"{key}={value}")
    for key, value in itertools.product(RIGHT_TYPES, VALUES)
    if type(value) not in RIGHT_TYPES[key]
]


@pytest.mark.parametrize(("key", "value"), WRONG_TYPES)
def test_a_value_of_another_type_is_named(key, value):
    if "." in key:
        section = {**RULE, "settings": {key.split(".")[1]: value}}
    else:
        section = {**RULE, key: value}
    sentence = refused(section)
    assert re.fullmatch(SENTENCE, sentence)
    assert f"drafting_policy.{key}" in sentence


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"drafters": {"ngram": "8"}}, "drafting_policy.drafters.ngram is '8'"),
        ({"drafters": {"ngram": True}}, "drafting_policy.drafters.ngram is True"),
        ({"fallback": ["ngram"]}, r"drafting_policy.fallback is \['ngram'\]"),
        ({"fallback": [4, "ngram"]}, r"drafting_policy.fallback\[0\] is 4"),
        ({"granularity": "requests"}, "did you mean 'request'"),
        ({"settings": {"max_pending_tokens": "many"}}, "settings.max_pending_tokens is 'many'"),
        ({"settings": {"ngram_min_match": 17}}, r"bounds 17\.\.16 are not in order; give"),
        ({"settings": {"ngram_min_match": 0}}, r"bounds 0\.\.16 are not in order; give"),
        ({"settings": {"dormant_after": -1}}, "must be 0 or more"),
        ({"settings": {"max_pending_tokens": -1}}, "must be 0 or more"),
        ({"canary": -0.1}, r"canary -0\.1 or decision_budget_ms 50 is out of range; give 0\.\.1"),
        ({"canary": 1.5}, r"canary 1\.5 "),
        ({"canary": float("nan")}, "canary nan "),
        ({"decision_budget_ms": -1}, r"decision_budget_ms -1 is out of range"),
        ({"reload": True}, "Only a policy can be reloaded"),
    ],
)
def test_a_value_that_does_not_fit_is_named(change, named):
    assert re.search(named, refused({**RULE, **change}))


@pytest.mark.parametrize("section", [3, "policy.pt", ["path"], True, 0, ""])
def test_a_section_that_is_no_mapping_is_named(section):
    assert re.fullmatch(r"drafting_policy is .*; make it a mapping .*\.", refused(section))


def test_drafters_work_as_in_training_unless_told_otherwise():
    trained_with = {"ngram_min_match": 3, "ngram_max_match": 7}
    settings = read({"path": "policy.pt"}).drafter_settings(trained_with)
    assert settings == DrafterSettings(ngram_min_match=3, ngram_max_match=7)
    config = read({"path": "policy.pt", "settings": {"ngram_max_match": 5}})
    assert config.drafter_settings(trained_with) == DrafterSettings(3, 5)
    with pytest.raises(ConfigError, match="not in order; give"):
        read({"path": "policy.pt", "settings": {"ngram_max_match": 2}}).drafter_settings(
            trained_with
        )
