"""Rules by name: each is built from a section, and each mistake is named in one sentence."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from policy.baselines.build import BASELINES, build_baseline
from policy.contract import Contract
from policy.controllers import SafeController, admitted_lengths
from policy.cost_model import CostModel
from policy.errors import ConfigError, ContractError, DraftgymError
from policy.observation import ObservationBuilder
from policy.serving.config import DraftingPolicyConfig
from policy.serving.deployment import deploy

from .step_history import DRAFTERS, LENGTHS, random_history

CONTRACT = Contract(DRAFTERS, LENGTHS, "request")
SECTIONS = {
    "fixed": {"drafter": "eagle3", "num_speculative_tokens": 3},
    "random": {"seed": 5},
    "match_else_model": {"min_match_length": 2, "token_length": 5, "model_length": 0},
    "batch_schedule": {"drafter": "ngram", "schedule": [[1, 4, 8], [8, 16, 2]]},
    "ema_tiers": {"drafter": "eagle3", "tiers": {"1": [1, 2, 4], "8": [0, 1]}, "decay": 0.9},
    "goodput": {
        "cost_model": "COST",
        "match_length_table": False,
        "probe_after_steps": 9,
        "acceptance": {"decay": 0.99, "prior_rate": 1, "prior_weight": 4},
    },
    "adaptive_verification": {"cost_model": "COST", "model_length": 3, "min_match_length": 2},
    "bandit": {"cost_model": "COST", "method": "thompson", "exploration": 1, "seed": 2},
}
BARE = {
    **{name: {} for name in ("fixed", "random", "match_else_model")},
    **{name: {"cost_model": "COST"} for name in ("goodput", "adaptive_verification", "bandit")},
    "batch_schedule": {"drafter": "ngram", "schedule": [[1, 1, 1]]},
    "ema_tiers": {"drafter": "ngram"},
}


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prices") / "step-times.json"
    model = CostModel.from_weights({"num_engine_steps": 0.02, "num_verified_tokens": 0.001}, 0.01)
    path.write_text(json.dumps({"cost_model": model.state_dict()}))
    return path


def section_of(name, settings, cost_file):
    priced = {"cost_model": str(cost_file)} if "cost_model" in settings else {}
    return {"name": name, **settings, **priced}


def refused(section, contract=CONTRACT, error=ConfigError):
    """The sentence that refuses a section; it ends with what to do."""
    with pytest.raises(error) as refusal:
        build_baseline(contract, section)
    assert re.fullmatch(r"[^\n]+; [^\n]+[.?]", str(refusal.value))
    return str(refusal.value)


def test_every_rule_has_a_section_here():
    assert set(SECTIONS) == set(BARE) == set(BASELINES)


@pytest.mark.parametrize("granularity", ["batch", "request"])
@pytest.mark.parametrize("settings", [SECTIONS, BARE], ids=["every key", "no more than needed"])
@pytest.mark.parametrize("name", BASELINES)
def test_every_rule_serves_as_the_plugin_builds_it(name, settings, granularity, cost_file):
    config = DraftingPolicyConfig.from_additional_config(
        {
            "drafting_policy": {
                "baseline": section_of(name, settings[name], cost_file),
                "drafters": {"ngram": 8, "eagle3": 4},
                "granularity": granularity,
                "decision_budget_ms": 0,
            }
        }
    )
    contract = config.contract()
    assert contract == Contract(DRAFTERS, LENGTHS, granularity)
    controller = deploy(config, contract, None)
    assert isinstance(controller.guarded, SafeController)
    builder, rng = ObservationBuilder(contract), np.random.default_rng(0)
    for record in random_history(3, 60):
        num_scheduled = record.num_prefill_tokens + record.num_scheduled_tokens
        record = replace(record, num_scheduled_tokens=num_scheduled)
        actions = controller.decide(record, builder.update(record))
        drafts = np.broadcast_to(actions, (record.num_rows, 2))
        survival = np.where(drafts[:, :1] == 2, rng.random((record.num_rows, 8)), np.nan)
        lengths = admitted_lengths(controller, record, drafts, survival.astype(np.float32))
        assert (lengths is not None) == (name == "adaptive_verification")
        if lengths is not None:
            assert (lengths <= drafts[:, 1]).all()
    assert not controller.guarded.num_fallbacks, "a decision failed"


def test_settings_reach_the_rule(cost_file):
    record = random_history(0, 1)[0]

    def decided(name, settings, contract=CONTRACT):
        rule = build_baseline(contract, section_of(name, settings, cost_file))
        return rule.decide(record, None).tolist()

    assert decided("fixed", SECTIONS["fixed"]) == [[2, 3]]
    assert decided("fixed", {}) == [[0, 0]]
    assert decided("random", {"seed": 1}) != decided("random", {"seed": 2})
    assert decided("ema_tiers", {"drafter": "eagle3", "tiers": {"1": [2]}}) == [[2, 2]]
    rows = decided("adaptive_verification", SECTIONS["adaptive_verification"])
    assert {tuple(row) for row in rows} <= {(1, 8), (2, 3)}


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"name": "godput"}, "Unknown baseline 'godput'; did you mean 'goodput'?"),
        ({"name": "xyz"}, f"Unknown baseline 'xyz'; choose from {', '.join(BASELINES)}."),
        ({}, f"baseline.name is None; choose from {', '.join(BASELINES)}."),
        ({"name": ["fixed"]}, f"baseline.name is ['fixed']; choose from {', '.join(BASELINES)}."),
        ({"name": "goodput"}, "baseline has no 'cost_model'; give one."),
        ({"name": "ema_tiers"}, "baseline has no 'drafter'; give one."),
        (
            {"name": "bandit", "cost_model": "x", "metod": "ucb"},
            "Unknown key 'metod' in baseline; did you mean 'method'?",
        ),
        (
            {"name": "goodput", "cost_model": "x", "acceptance": {"decai": 1}},
            "Unknown key 'decai' in baseline.acceptance; did you mean 'decay'?",
        ),
        (
            {"name": "bandit", "cost_model": "x", "method": "usb"},
            "baseline.method is 'usb'; did you mean 'ucb'?",
        ),
        (
            {"name": "batch_schedule", "drafter": "eagle", "schedule": [[1, 2, 3]]},
            "The engine has no drafter 'eagle'; did you mean 'eagle3'?",
        ),
        (
            {"name": "ema_tiers", "drafter": "suffix"},
            "The engine has no drafter 'suffix'; choose from none, ngram, eagle3.",
        ),
    ],
)
def test_a_mistake_is_named(section, sentence):
    assert refused(section) == sentence


def test_a_fixed_setting_that_the_engine_lacks_is_named():
    section = {"name": "fixed", "drafter": "suffix"}
    assert "no drafter 'suffix'" in refused(section, error=ContractError)
    section = {"name": "fixed", "drafter": "ngram", "num_speculative_tokens": -1}
    assert "outside the table" in refused(section, error=ContractError)


@pytest.mark.parametrize("name", ["goodput", "adaptive_verification", "bandit"])
def test_a_cost_model_that_cannot_be_read_is_named(name, tmp_path):
    path = tmp_path / "step-times.json"
    section = {"name": name, "cost_model": str(path)}
    assert refused(section) == (f"There is no cost model {path}; make one with scripts/collect.py.")
    for damaged in ("", "{}", "[]", '{"cost_model": 3}', '{"cost_model": {"features": []}}'):
        path.write_text(damaged)
        assert refused(section) == (
            f"{path} is no cost model of draftgym; make one with scripts/collect.py."
        )
    state = CostModel.from_weights({"num_engine_steps": 0.02}).state_dict()
    path.write_text(json.dumps({"cost_model": {**state, "features": ["num_flops"]}}))
    assert "prices other work (num_flops)" in refused(section)
    assert refused({"name": name, "cost_model": str(tmp_path)}).startswith(f"{tmp_path} is no")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("random", {"seed": -1}),
        ("bandit", {"seed": -1}),
        ("bandit", {"exploration": -1}),
        ("bandit", {"exploration": "much"}),
        ("goodput", {"probe_after_steps": -1}),
        ("goodput", {"acceptance": {"decay": 2}}),
        ("goodput", {"match_length_table": "yes"}),
        ("goodput", {"cost_model": 3}),
        ("adaptive_verification", {"model_length": 0}),
        ("adaptive_verification", {"model_length": 2.5}),
        ("match_else_model", {"min_match_length": 0}),
        ("batch_schedule", {"schedule": []}),
        ("batch_schedule", {"schedule": [[1, 4]]}),
        ("batch_schedule", {"schedule": [[1, 4, "3"]]}),
        ("ema_tiers", {"tiers": {}}),
        ("ema_tiers", {"tiers": [1, 3]}),
        ("ema_tiers", {"tiers": {"0": [1]}}),
        ("ema_tiers", {"decay": 1}),
    ],
    ids=str,
)
def test_a_senseless_value_is_refused(name, change, cost_file):
    sentence = refused({**section_of(name, SECTIONS[name], cost_file), **change})
    key, value = next(iter(change.items()))
    key = next(iter(value)) if key == "acceptance" else key
    assert key.split("_")[0] in sentence


@pytest.mark.parametrize("name", ["match_else_model", "adaptive_verification"])
def test_a_rule_whose_drafters_are_missing_says_which(name, cost_file):
    without = Contract(("none", "ngram"), (0, 8))
    sentence = refused(section_of(name, BARE[name], cost_file), without)
    assert sentence.startswith("The rule needs a model drafter; add one of")


def test_the_plugin_names_a_wrong_rule_too():
    config = DraftingPolicyConfig(baseline={"name": "godput"}, drafters={"ngram": 4})
    with pytest.raises(DraftgymError, match="did you mean 'goodput'"):
        deploy(config, config.contract(), None)
