"""The goodput rule against every joint choice of drafts there is."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from policy.baselines.acceptance import Acceptance, AcceptanceConfig
from policy.baselines.goodput import GoodputConfig, GoodputController
from policy.contract import Contract
from policy.cost_model import FEATURES, CostModel, StepShape
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, random_step, step_of

NGRAM, EAGLE = 1, 2
ACTIONS = [(0, 0), *((NGRAM, n) for n in range(1, 9)), *((EAGLE, n) for n in range(1, 5))]
SCALES_S = dict(zip(FEATURES, (2e-2, 1e-3, 2e-6, 1e-3, 2e-3, 1e-3, 2e-6, 5e-7), strict=True))


def contract(granularity):
    return Contract(DRAFTERS, LENGTHS, granularity)


def random_prices(rng):
    """Prices at two loads, of any proportion to each other; some are nothing."""
    weights_s = np.array(list(SCALES_S.values())) * rng.lognormal(0, 1.5, (2, len(FEATURES)))
    weights_s *= rng.random(weights_s.shape) > 0.1
    weights_s[:, 0] += 1e-3
    share = float(rng.choice([0.0, 0.02, 0.3]))
    return CostModel(np.array([1.0, 6.0]), weights_s, share)


def goodput(joint, record, survival, cost_model):
    """Expected tokens per second if each row takes its action, from the shape of that step."""
    tokens = verified = record.num_rows
    model_rows, num_passes, has_token_draft = [], 0, False
    state, offer = record.model_states["eagle3"], record.token_offers["ngram"]
    for row, (drafter, length) in enumerate(joint):
        if drafter == NGRAM:
            length = min(length, int(offer.num_draft_tokens[row]))
            has_token_draft |= length > 0
        if drafter == EAGLE:
            if not state.fresh[row] or not state.num_pending_tokens[row]:
                continue
            model_rows.append(row)
            num_passes = max(num_passes, length)
        if length:
            verified += length
            tokens += survival[drafter][row][:length].sum()
    num_read = sum(int(state.num_pending_tokens[row]) + num_passes - 1 for row in model_rows)
    target = StepShape(
        record.num_running_reqs,
        num_verified_tokens=verified,
        num_context_tokens=int(record.num_context_tokens.sum()),
    )
    shape = replace(
        target,
        num_model_drafts=bool(model_rows),
        num_draft_passes=num_passes,
        num_draft_pass_tokens=num_read,
        num_draft_context_tokens=int(record.num_context_tokens[model_rows].sum()),
    )
    look_up_s = cost_model.token_draft_share * cost_model.expected_s(target) * has_token_draft
    return tokens / (cost_model.expected_s(shape) + look_up_s)


def cases(num_rows, num_cases, seed):
    """A record after some history, what its drafts are worth, prices, and a way to decide."""
    rng = np.random.default_rng(seed)
    for _ in range(num_cases):
        by_match_length = bool(rng.integers(2))
        acceptance_config = AcceptanceConfig(decay=0.9, prior_rate=float(rng.random()))
        config = GoodputConfig("-", by_match_length, 0, acceptance_config, backlog_share=1.0)
        cost_model = random_prices(rng)
        acceptance = Acceptance(
            contract("request"), acceptance_config, by_match_length=by_match_length
        )
        rules = {
            granularity: GoodputController(contract(granularity), cost_model, config)
            for granularity in ("batch", "request")
        }
        for _ in range(3):
            record = random_step(rng, "abc"[:num_rows])
            acceptance.update(record)
            actions = {name: rule.decide(record, None) for name, rule in rules.items()}
        of_model = acceptance.of_model(EAGLE)
        survival = {NGRAM: acceptance.of_offers(NGRAM, record), EAGLE: [of_model] * num_rows}
        yield record, survival, cost_model, actions


@pytest.mark.parametrize(("num_rows", "num_cases"), [(1, 100), (2, 400), (3, 30)])
def test_no_joint_choice_is_better(num_rows, num_cases):
    kinds = set()
    for record, survival, cost_model, actions in cases(num_rows, num_cases, seed=num_rows):
        chosen = [tuple(action) for action in actions["request"].tolist()]
        assert len(chosen) == num_rows
        best = max(
            goodput(joint, record, survival, cost_model)
            for joint in itertools.product(ACTIONS, repeat=num_rows)
        )
        assert goodput(chosen, record, survival, cost_model) >= best * (1 - 1e-10)
        kinds.add(tuple(sorted({drafter for drafter, _ in chosen})))
    alone, mixed = {(0,), (NGRAM,), (EAGLE,)}, {(0, NGRAM), (0, EAGLE), (NGRAM, EAGLE)}
    assert kinds >= {1: alone, 2: alone | mixed, 3: {(NGRAM, EAGLE)}}[num_rows]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_no_choice_for_all_rows_is_better(num_rows):
    chosen = set()
    for record, survival, cost_model, actions in cases(num_rows, 200, seed=10 + num_rows):
        (action,) = map(tuple, actions["batch"].tolist())
        rates = [goodput([a] * num_rows, record, survival, cost_model) for a in ACTIONS]
        rate = rates[ACTIONS.index(action)]
        assert rate >= max(rates) * (1 - 1e-10)
        chosen.add(action)
    assert {drafter for drafter, _ in chosen} == {0, NGRAM, EAGLE}


def rule(prices_s, granularity, share=0.0, **settings):
    prices_s = {"num_engine_steps": 0.01, **prices_s}
    config = GoodputConfig("-", **settings)
    return GoodputController(contract(granularity), CostModel.from_weights(prices_s, share), config)


@pytest.mark.parametrize("granularity", ["batch", "request"])
@pytest.mark.parametrize(
    ("prices_s", "prior_rate", "offered", "action"),
    [
        ({}, 0.0, 8, (0, 0)),  # nothing is gained by any draft: none
        ({}, 0.5, 3, (EAGLE, 4)),  # all is free: the longest draft
        ({}, 0.5, 4, (NGRAM, 4)),  # as good: the token drafter, and no longer than its offer
        ({}, 1.0, 8, (NGRAM, 8)),
        ({"num_draft_passes": 1.0}, 0.5, 2, (NGRAM, 2)),
        ({"num_draft_passes": 1.0}, 0.5, 0, (0, 0)),
        ({"num_draft_pass_tokens": 1e-9}, 0.5, 4, (NGRAM, 4)),
    ],
)
def test_of_equals_the_first_and_the_shortest_is_taken(
    granularity, prices_s, prior_rate, offered, action
):
    controller = rule(prices_s, granularity, acceptance=AcceptanceConfig(prior_rate=prior_rate))
    record = step_of([(0, 0, 0)] * 2, offers=[(2, offered, -1)] * 2)
    actions = controller.decide(record, None)
    rows = 2 if granularity == "request" else 1
    assert actions.tolist() == [list(action)] * rows


def test_passes_that_bring_no_more_are_left_out():
    """One row can be drafted for: the other takes none, not a draft it would not get."""
    controller = rule({}, "request")
    record = step_of([(0, 0, 0)] * 3, states=[(1, 1), (0, 0), (1, 0)])
    assert controller.decide(record, None).tolist() == [[EAGLE, 4], [0, 0], [0, 0]]


def test_look_ups_that_cost_more_than_they_bring_are_not_made():
    record = step_of([(0, 0, 0)] * 2, offers=[(2, 1, -1), (0, 0, -1)], states=[(0, 0)] * 2)
    # Two rows and .8 more: worth 40 % of the time, and no more.
    for share, action in ((0.39, [NGRAM, 1]), (0.41, [0, 0])):
        assert rule({}, "request", share).decide(record, None).tolist() == [action, [0, 0]]
        assert rule({}, "batch", share).decide(record, None).tolist() == [action]


@pytest.mark.parametrize("granularity", ["batch", "request"])
def test_the_model_is_tried_again_after_so_many_steps_without_it(granularity):
    # A pass takes as long as two steps: never worth it.
    dear = {"num_draft_passes": 0.02}
    controller = rule(dear, granularity, probe_after_steps=3)
    plain, drafted = step_of([(0, 0, 0)] * 2), step_of([(EAGLE, 1, 0), (0, 0, 0)])
    stale = step_of([(0, 0, 0)] * 2, states=[(0, 0)] * 2)
    none = [[0, 0]] * (2 if granularity == "request" else 1)
    # Without a row that it can draft for, the probe waits; one draft starts the count anew.
    steps = [plain, plain, plain, plain, drafted, plain, plain, stale, stale, plain, drafted]
    probed = [controller.decide(record, None).tolist() for record in steps]
    probe = [[EAGLE, 1]]  # 1.8 tokens in .03 s beat 2.44 in .05 s
    expected = [none, none, probe, probe, none, none, none, none, none, probe, none]
    assert probed == expected


def test_probes_can_be_left_out():
    controller = rule({"num_draft_passes": 0.02}, "batch", probe_after_steps=0)
    plain = step_of([(0, 0, 0)])
    assert all((controller.decide(plain, None) == 0).all() for _ in range(600))


def test_what_goes_badly_is_given_up():
    controller = rule({"num_verified_tokens": 0.002}, "batch", probe_after_steps=0)
    refuted = step_of([(EAGLE, 4, 0)])
    assert controller.decide(step_of([(0, 0, 0)]), None)[0, 0] == EAGLE
    for _ in range(30):
        actions = controller.decide(refuted, None)
    assert actions.tolist() == [[0, 0]]


@pytest.mark.parametrize("drafters", [("none",), ("none", "ngram"), ("none", "eagle3")])
@pytest.mark.parametrize("granularity", ["batch", "request"])
def test_it_serves_with_any_drafters(drafters, granularity):
    lengths = tuple(LENGTHS[DRAFTERS.index(name)] for name in drafters)
    few = Contract(drafters, lengths, granularity)
    config = GoodputConfig("-", probe_after_steps=1, acceptance=AcceptanceConfig(prior_rate=1.0))
    free = CostModel.from_weights({"num_engine_steps": 0.01})
    record = step_of([(0, 0, 0)], offers=[(2, 8, -1)])
    action = GoodputController(few, free, config).decide(record, None).tolist()
    assert action == [[len(drafters) - 1, lengths[-1]]]


@pytest.mark.parametrize("granularity", ["batch", "request"])
@pytest.mark.parametrize(("share", "drafter"), [(1.0, 0), (0.51, 0), (0.49, EAGLE), (0.0, EAGLE)])
def test_an_old_backlog_is_charged_in_part(granularity, share, drafter):
    # A draft of one token brings .8 more: worth up to 8 of the 10 ms of a step. Reading takes 1 ms
    # a token; of 15 unread ones one is new, so that half of the others makes it 8.
    acceptance = AcceptanceConfig(prior_rate=0.8)
    one_token = Contract(("none", "eagle3"), (0, 1), granularity)
    config = GoodputConfig("-", probe_after_steps=0, backlog_share=share, acceptance=acceptance)
    prices = CostModel.from_weights({"num_engine_steps": 0.01, "num_draft_pass_tokens": 0.001})
    record = step_of([(0, 0, 0)], states=[(1, 15)])
    (action,) = GoodputController(one_token, prices, config).decide(record, None).tolist()
    assert action == ([1, 1] if drafter else [0, 0])


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_beyond_the_whole_backlog_is_refused(share):
    with pytest.raises(ConfigError, match=r"backlog_share is .*; make it 0 to 1\."):
        GoodputConfig("-", backlog_share=share)


def test_a_negative_patience_is_refused():
    with pytest.raises(ConfigError) as refusal:
        GoodputConfig("-", probe_after_steps=-1)
    assert re.fullmatch(r"probe_after_steps is -1; make it 0 or more\.", str(refusal.value))
