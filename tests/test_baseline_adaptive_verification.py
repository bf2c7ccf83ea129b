"""Drafts in full, and which of their tokens are verified, against every set of prefixes."""

import itertools
import re

import numpy as np
import pytest

from policy.baselines.acceptance import Acceptance, AcceptanceConfig
from policy.baselines.adaptive_verification import (
    AdaptiveVerificationConfig,
    AdaptiveVerificationController,
)
from policy.contract import Contract
from policy.cost_model import FEATURES, CostModel, StepShape
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, random_step, step_of

CONTRACT = Contract(DRAFTERS, LENGTHS, "request")
NGRAM, EAGLE = 1, 2
FREE = CostModel.from_weights({"num_engine_steps": 0.01})


def rule(cost_model=FREE, contract=CONTRACT, **settings):
    return AdaptiveVerificationController(
        contract, cost_model, AdaptiveVerificationConfig("-", **settings)
    )


def random_drafts(rng, record):
    """Drafts of both kinds and none, and the confidences of the model's."""
    drafts, survival = [], np.full((record.num_rows, 8), np.nan, np.float32)
    for row, offered in enumerate(record.token_offers["ngram"].num_draft_tokens.tolist()):
        drafter = int(rng.integers(0, 3))
        if drafter == EAGLE:
            drafts.append((EAGLE, int(rng.integers(1, 5))))
            survival[row, :4] = np.cumprod(rng.random(4) ** 0.3)
            survival[row, drafts[-1][1] :] = np.nan
        elif drafter == NGRAM and offered:
            drafts.append((NGRAM, int(rng.integers(1, offered + 1))))
        else:
            drafts.append((0, 0))
    return np.array(drafts), survival


def goodput(kept, drafts, likely, record, cost_model):
    """Expected tokens per second if each row keeps so many tokens; the drafts are paid for."""
    is_model = drafts[:, 0] == EAGLE
    num_passes = int(drafts[is_model, 1].max(initial=0))
    pending = record.model_states["eagle3"].num_pending_tokens
    target = StepShape(
        record.num_running_reqs,
        num_verified_tokens=record.num_rows + sum(kept),
        num_context_tokens=int(record.num_context_tokens.sum()),
    )
    making = StepShape(
        record.num_running_reqs,
        num_engine_steps=0,
        num_model_drafts=int(is_model.any()),
        num_draft_passes=num_passes,
        num_draft_pass_tokens=sum(int(p) + num_passes - 1 for p in pending[is_model]),
        num_draft_context_tokens=int(record.num_context_tokens[is_model].sum()),
    )
    share = cost_model.token_draft_share * (drafts[:, 0] == NGRAM).any()
    seconds = cost_model.expected_s(target) * (1 + share) + cost_model.expected_s(making)
    tokens = record.num_rows + sum(likely[row, :n].sum() for row, n in enumerate(kept))
    return tokens / seconds


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_no_other_set_of_prefixes_is_better(num_rows):
    rng = np.random.default_rng(num_rows)
    num_kept, num_cut = 0, 0
    for _ in range(150):
        weights_s = np.array([2e-2, 2e-2, 2e-6, 1e-3, 1e-2, 1e-2, 2e-3, 5e-6])
        weights_s = weights_s * rng.lognormal(0, 1, (2, len(FEATURES)))
        cost_model = CostModel(np.array([1.0, 6.0]), weights_s, float(rng.choice([0, 0.3, 2.0])))
        acceptance_config = AcceptanceConfig(decay=0.9, prior_rate=float(rng.random()))
        acceptance = Acceptance(CONTRACT, acceptance_config, by_match_length=True)
        controller = rule(cost_model, min_match_length=1, acceptance=acceptance_config)
        for _ in range(2):
            record = random_step(rng, "abc"[:num_rows])
            record.model_states["eagle3"].num_pending_tokens[:] = rng.integers(1, 5, num_rows)
            controller.decide(record, None)
            acceptance.update(record)
        drafts, survival = random_drafts(rng, record)
        likely = survival.astype(np.float64)
        offered = acceptance.of_offers(NGRAM, record)
        for row, (drafter, length) in enumerate(drafts):
            likely[row] = {0: np.zeros(8), NGRAM: offered[row], EAGLE: likely[row]}[drafter]
            likely[row, length:] = 0
        admitted = controller.admit(record, drafts, survival)
        assert (admitted >= 0).all()
        assert (admitted <= drafts[:, 1]).all()
        best = max(
            goodput(kept, drafts, likely, record, cost_model)
            for kept in itertools.product(*(range(1 + length) for _, length in drafts))
        )
        reached = goodput(admitted.tolist(), drafts, likely, record, cost_model)
        assert reached >= best * (1 - 1e-10)
        num_kept += admitted.sum()
        num_cut += (drafts[:, 1] - admitted).sum()
    assert min(num_kept, num_cut) > 30


def test_admission_worked_by_hand():
    # A plain step of two rows takes .1 + .02 s and brings 2 tokens: 16.7 a second. Each verified
    # token takes .01 s: the first is worth it from .17 on, later ones have to beat the rate so far.
    cost_model = CostModel.from_weights({"num_engine_steps": 0.1, "num_verified_tokens": 0.01})
    controller = rule(cost_model)
    record = step_of([(0, 0, 0)] * 2)
    survival = np.full((2, 8), np.nan, np.float32)
    survival[:, :3] = [[0.9, 0.5, 0.1], [0.4, 0.3, 0.2]]
    # In order .9 .5 .4 .3 .2 .1: (2 + sum) / (12 + count) hundredths: 16.7, 22.3, 24.3, 25.3,
    # 25.6, 25.3, 24.4 a second.
    drafts = np.array([(EAGLE, 3), (EAGLE, 3)])
    assert controller.admit(record, drafts, survival).tolist() == [2, 2]
    drafts = np.array([(EAGLE, 1), (0, 0)])
    assert controller.admit(record, drafts, survival).tolist() == [1, 0]


def test_survival_that_rises_or_is_unknown_admits_no_more():
    controller = rule()
    survival = np.full((3, 8), np.nan, np.float32)
    survival[0, :3] = [0.5, 0.0, 0.9]
    survival[1, 1:4] = 0.9
    survival[2, :4] = [0.3, 0.9, 0.9, np.nan]
    drafts = np.array([(EAGLE, 4)] * 3)
    assert controller.admit(step_of([(0, 0, 0)] * 3), drafts, survival).tolist() == [1, 0, 3]


def test_of_equals_the_fewest_are_verified():
    """One more token that brings exactly the rate so far changes nothing: it is left out."""
    cost_model = CostModel.from_weights({"num_engine_steps": 0.5, "num_verified_tokens": 0.5})
    survival = np.full((1, 8), np.nan, np.float32)
    survival[0, 0] = 0.5
    drafts, record = np.array([(EAGLE, 1)]), step_of([(0, 0, 0)])
    assert rule(cost_model).admit(record, drafts, survival).tolist() == [0]
    survival[0, 0] = 0.5001
    assert rule(cost_model).admit(record, drafts, survival).tolist() == [1]


def test_a_match_that_is_long_enough_goes_first():
    record = step_of([(0, 0, 0)] * 4, offers=[(0, 0, -1), (3, 2, -1), (4, 8, -1), (9, 1, -1)])
    model, token = [EAGLE, 4], [NGRAM, 8]
    decisions = {
        theta: rule(min_match_length=theta).decide(record, None).tolist() for theta in (0, 3, 4)
    }
    assert decisions[0] == [model] * 4
    assert decisions[3] == [model, token, token, token]
    assert decisions[4] == [model, model, token, token]


@pytest.mark.parametrize(("asked", "length"), [(None, 4), (1, 1), (3, 3), (9, 4)])
def test_the_model_drafts_as_far_as_asked_and_able(asked, length):
    record = step_of([(0, 0, 0)] * 2)
    assert rule(model_length=asked).decide(record, None).tolist() == [[EAGLE, length]] * 2


def test_it_needs_a_model_drafter_and_no_other():
    with pytest.raises(ConfigError, match=r"^The rule needs a model drafter; add one of .*\.$"):
        rule(contract=Contract(("none", "ngram"), (0, 8)))
    alone = rule(contract=Contract(("none", "eagle3"), (0, 4), "request"), min_match_length=3)
    assert alone.decide(step_of([(0, 0, 0)]), None).tolist() == [[1, 4]]


@pytest.mark.parametrize("wrong", [{"min_match_length": -1}, {"model_length": 0}], ids=str)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ConfigError) as refusal:
        AdaptiveVerificationConfig("-", **wrong)
    assert re.fullmatch(r"adaptive_verification needs [^\n]+; correct them\.", str(refusal.value))
