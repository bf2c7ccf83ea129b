"""For whom a policy decides: all requests, a stable share of them, or nobody."""

from dataclasses import replace

import numpy as np
import pytest

from policy.artifact import load_policy
from policy.contract import Contract
from policy.controllers import SafeController
from policy.errors import DraftgymError
from policy.observation import ObservationBuilder
from policy.serving.config import DraftingPolicyConfig
from policy.serving.deployment import Deployment, deploy

from .exported import CONTRACT, export
from .step_history import DRAFTERS, LENGTHS, random_step

REQUESTS = [f"cmpl-{number:032x}-0-{number * 7919:08x}" for number in range(2000)]
STATIC = (1, 2)
DRAFTS = (2, 4)


class Deciding:
    """Drafts with EAGLE and lets one token through."""

    def __init__(self, per_request):
        self.per_request = per_request

    def decide(self, record, observation):
        return np.array([DRAFTS] * (record.num_rows if self.per_request else 1))

    def admit(self, record, drafts, survival):
        return np.minimum(drafts[:, 1], 1)


def deployed(per_request=True, **settings):
    contract = Contract(DRAFTERS, LENGTHS, "request" if per_request else "batch")
    guarded = SafeController(Deciding(per_request), contract, STATIC)
    return Deployment(guarded, contract, STATIC, **settings), contract


def step(contract, req_ids=REQUESTS):
    record = random_step(np.random.default_rng(0), list(req_ids))
    return record, ObservationBuilder(contract).update(record)


@pytest.mark.parametrize("per_request", [True, False])
def test_without_more_words_the_policy_decides_for_all(per_request):
    deployment, contract = deployed(per_request)
    assert deployment.mode == "full"
    actions = deployment.decide(*step(contract))
    assert actions.tolist() == [list(DRAFTS)] * (len(REQUESTS) if per_request else 1)
    assert not deployment.num_shadow_decisions


@pytest.mark.parametrize("per_request", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_a_canary_share_of_the_requests_gets_the_policy_and_keeps_it(per_request, share):
    deployment, contract = deployed(per_request, canary=share)
    assert deployment.mode == "canary"
    record, observation = step(contract)
    actions = deployment.decide(record, observation)
    is_canary = (actions == DRAFTS).all(axis=1)
    assert (actions[~is_canary] == STATIC).all()
    # Four standard deviations of a binomial share.
    assert abs(is_canary.mean() - share) <= 4 * np.sqrt(share * (1 - share) / len(REQUESTS))
    order = np.random.default_rng(1).permutation(len(REQUESTS))
    shuffled, observation = step(contract, np.array(REQUESTS)[order].tolist())
    again, _ = deployed(per_request, canary=share)
    np.testing.assert_array_equal(again.decide(shuffled, observation), actions[order])


def test_a_larger_share_keeps_the_requests_of_a_smaller_one():
    shares = []
    for share in (0.1, 0.3):
        deployment, contract = deployed(canary=share)
        actions = deployment.decide(*step(contract))
        shares.append((actions == DRAFTS).all(axis=1))
    assert (shares[1] | ~shares[0]).all()


def test_drafts_of_requests_outside_the_share_are_not_judged():
    deployment, contract = deployed(canary=0.3)
    record, observation = step(contract)
    actions = deployment.decide(record, observation)
    survival = np.ones((record.num_rows, 8), np.float32)
    lengths = deployment.admit(record, actions, survival)
    is_canary = (actions == DRAFTS).all(axis=1)
    np.testing.assert_array_equal(lengths, np.where(is_canary, 1, STATIC[1]))


@pytest.mark.parametrize("per_request", [True, False])
def test_a_shadow_policy_is_counted_and_not_applied(per_request):
    deployment, contract = deployed(per_request, shadow=True, canary=0.5)
    assert deployment.mode == "shadow"
    assert deployment.judges_drafts is False
    for _ in range(3):
        assert deployment.decide(*step(contract, REQUESTS[:5])).tolist() == [list(STATIC)]
    expected = {("eagle3", 4): 15 if per_request else 3}
    assert deployment.num_shadow_decisions == expected


class Scripted:
    """Gives one list of actions after the other."""

    def __init__(self, *actions):
        self.actions = list(actions)

    def decide(self, record, observation):
        return np.array(self.actions.pop(0))


@pytest.mark.parametrize(
    ("granularity", "steps", "switches"),
    [
        ("batch", [[(1, 2)], [(1, 2)], [(0, 0)], [(0, 3)], [(1, 2)]], 2),
        ("request", [[(1, 2), (2, 3)], [(1, 2), (2, 2)], [(2, 2), (0, 0)], [(0, 0)] * 2], 4),
    ],
)
def test_switches_are_told(granularity, steps, switches):
    """S3: a setting that flips at every step shows."""
    contract = Contract(DRAFTERS, LENGTHS, granularity)
    deployment = Deployment(SafeController(Scripted(*steps), contract), contract, (0, 0))
    for _ in steps:
        deployment.decide(*step(contract, REQUESTS[:2]))
    assert deployment.num_switches == switches
    deployment.decide(*step(contract, REQUESTS[:2]))  # nothing is left: one row, the fallback
    deployment.decide(*step(contract, REQUESTS[2:4]))  # others, for whom there was no step before
    assert deployment.guarded.num_fallbacks.total() == 2
    assert deployment.num_switches == switches + (granularity == "batch")


def test_a_section_becomes_a_deployment(tmp_path):
    sha256 = export(tmp_path / "policy.pt", action=(2, 3))
    section = {"path": str(tmp_path / "policy.pt"), "fallback": ["ngram", 99], "shadow": True}
    config = DraftingPolicyConfig.from_additional_config({"drafting_policy": section})
    deployment = deploy(config, CONTRACT, load_policy(tmp_path / "policy.pt"))
    assert deployment.policy.artifact.sha256 == sha256
    record, observation = step(CONTRACT, REQUESTS[:2])
    assert deployment.decide(record, observation).tolist() == [[1, 8]]
    assert deployment.num_shadow_decisions == {("eagle3", 3): 1}
    full = deploy(replace(config, shadow=False), CONTRACT, deployment.policy.artifact)
    assert full.decide(record, observation).tolist() == [[2, 3]]
    damaged = np.full_like(observation, np.nan)
    assert full.decide(record, damaged).tolist() == [[1, 8]], "the static setting is the fallback"
    assert sum(full.guarded.num_fallbacks.values()) == 1


def test_a_static_setting_that_the_engine_does_not_have_is_refused():
    config = DraftingPolicyConfig(
        baseline={"name": "fixed"}, drafters={"ngram": 4}, fallback=("eagle3", 2)
    )
    with pytest.raises(DraftgymError, match="no drafter 'eagle3'"):
        deploy(config, config.contract(), None)
