"""Every rule against its formula, recomputed another way."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from policy.baselines.acceptance import AcceptanceConfig, AcceptanceTable
from policy.baselines.build import BASELINES, build_baseline
from policy.baselines.outlook import Outlook
from policy.baselines.prices import Prices
from policy.contract import Contract
from policy.controllers import SafeController
from policy.cost_model import CostModel, shape_of
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, random_history
from .synthetic_traces import PRICES_S

BATCH = Contract(DRAFTERS, LENGTHS)
ROWS = Contract(DRAFTERS, LENGTHS, "request")


@pytest.fixture(scope="module")
def prices(tmp_path_factory):
    path = tmp_path_factory.mktemp("prices") / "prices.json"
    model = CostModel.from_weights(PRICES_S, token_draft_share=0.01)
    path.write_text(json.dumps({"cost_model": model.state_dict()}))
    return str(path)


def decide(controller, record):
    return np.asarray(controller.decide(record, np.zeros((1, 1), np.float32)))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("contract", [BATCH, ROWS], ids=["batch", "request"])
def test_every_rule_decides_what_an_engine_can_do(name, contract, prices):
    section = {"name": name}
    if name in ("goodput", "adaptive_verification", "bandit"):
        section["cost_model"] = prices
    if name in ("batch_schedule", "ema_tiers"):
        section["drafter"] = "eagle3"
    if name == "batch_schedule":
        section["schedule"] = [[1, 4, 3], [5, 8, 1]]
    first, second = (build_baseline(contract, section) for _ in range(2))
    for record in random_history(seed=5, steps=60):
        actions = decide(first, record)
        assert actions.shape in ((1, 2), (record.num_rows, 2))
        contract.canonical_actions(actions)
        np.testing.assert_array_equal(actions, decide(second, record))


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_vllms(seed):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(1, 60), 6, replace=False)).tolist()
    firsts = [1, ends[1] + 1, ends[3] + int(rng.integers(1, 3))]
    schedule = [
        (first, last, int(rng.integers(0, 7)))
        for first, last in zip(firsts, (ends[1], ends[3], ends[5]), strict=True)
        if first <= last
    ]
    rule = build_baseline(
        BATCH, {"name": "batch_schedule", "drafter": "eagle3", "schedule": schedule}
    )
    theirs = build_dynamic_sd_schedule_lookup(schedule, 80, LENGTHS[2])
    (record,) = random_history(seed=1, steps=1)
    for load in range(1, 81):
        ((drafter, length),) = decide(rule, replace(record, num_running_reqs=load)).tolist()
        assert length == theirs[load]
        assert drafter == (2 if length else 0)


def verified(record, drafted, accepted, load=1):
    """The record, all rows verified with so many EAGLE tokens, so many accepted."""
    rows = record.num_rows
    return replace(
        record,
        num_running_reqs=load,
        drafter=np.full(rows, 2 if drafted else 0, np.int32),
        num_draft_tokens=np.full(rows, drafted, np.int32),
        num_accepted_tokens=np.full(rows, accepted, np.int32),
    )


def test_the_ladder_is_climbed_as_sglang_does():
    (record,) = random_history(seed=1, steps=1)
    rule = build_baseline(BATCH, {"name": "ema_tiers", "drafter": "eagle3"})
    lengths, ema = [], 1.0
    length = 1  # the first rung of 1, 3, 4 (5 and 7 are beyond the drafter)
    for step in range(1, 31):
        accepted = length if step < 20 else 0
        ((_, chosen),) = decide(rule, verified(record, length, accepted)).tolist()
        ema = 0.8 * ema + 0.2 * accepted
        if step >= 10 and step % 5 == 0:
            below = {3: 1, 4: 3}.get(length)
            if below is not None and ema <= below - 0.5 - 0.25:
                length = below
            elif length < 4 and ema > length - 0.5:
                length = {1: 3, 3: 4}[length]
        assert chosen == length
        lengths.append(length)
    assert {1, 3, 4} == set(lengths)
    assert lengths[-1] < 4
    # At a high load there is one rung or none.
    assert decide(rule, verified(record, 0, 0, load=64)).tolist() == [[0, 0]]


def test_bandits_try_every_arm_once_and_then_follow_their_sums(prices):
    model = CostModel.from_weights(PRICES_S, token_draft_share=0.01)
    section = {"name": "bandit", "cost_model": prices, "exploration": 0.3}
    rule = build_baseline(BATCH, section)
    arms = [(0, 0), *((1, n) for n in range(1, 9)), *((2, n) for n in range(1, 5))]
    sums = {arm: np.zeros(3) for arm in arms}
    pulled = None
    for index, record in enumerate(random_history(seed=3, steps=60)):
        record = replace(record, num_running_reqs=4)
        if pulled is not None:
            seconds = model.expected_s(shape_of(record, BATCH))
            seconds *= 1.01 if (record.drafter == 1).any() else 1
            sums[pulled] += 1, record.num_emitted_tokens.sum(), seconds
        (pulled,) = map(tuple, decide(rule, record).tolist())
        if index < len(arms):
            assert pulled == arms[index]
            continue
        width = 0.3 * sums[0, 0][1] / sums[0, 0][2]
        total = sum(values[0] for values in sums.values())
        bounds = {
            arm: tokens / seconds + width * np.sqrt(np.log(total) / pulls)
            for arm, (pulls, tokens, seconds) in sums.items()
        }
        assert pulled == max(bounds, key=bounds.get)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_admitted_is_the_best_of_all_ways_to_cut(seed, prices):
    rng = np.random.default_rng(seed)
    record = random_history(seed, steps=12)[-1]
    rows = min(3, record.num_rows)
    record = replace(
        record,
        **{
            name: getattr(record, name)[:rows]
            for name in (
                *("req_ids", "num_context_tokens", "num_emitted_tokens", "temperature"),
                *("drafter", "num_draft_tokens", "num_accepted_tokens"),
            )
        },
        model_states={
            "eagle3": replace(
                record.model_states["eagle3"],
                num_pending_tokens=record.model_states["eagle3"].num_pending_tokens[:rows],
            )
        },
    )
    lengths = rng.integers(0, 5, rows)
    drafts = np.stack((np.where(lengths, 2, 0), lengths), axis=1)
    survival = np.full((rows, 8), np.nan, np.float32)
    for row, length in enumerate(lengths):
        survival[row, :length] = np.cumprod(rng.random(length) ** 0.3)
    rule = build_baseline(BATCH, {"name": "adaptive_verification", "cost_model": prices})
    admitted = rule.admit(record, drafts, survival)
    assert (admitted <= lengths).all()

    pending = record.model_states["eagle3"].num_pending_tokens[lengths > 0].sum()
    drafting_s = 0.0
    if lengths.any():
        tokens = pending + (lengths.max() - 1) * (lengths > 0).sum()
        drafting_s = PRICES_S["num_draft_passes"] * lengths.max()
        drafting_s += PRICES_S["num_draft_pass_tokens"] * tokens
    step_s = PRICES_S["num_engine_steps"] + PRICES_S["num_verified_tokens"] * rows
    step_s += PRICES_S["num_context_tokens"] * record.num_context_tokens.sum()

    def goodput(kept):
        gained = sum(survival[row, :length].sum() for row, length in enumerate(kept))
        verified_s = PRICES_S["num_verified_tokens"] * sum(kept)
        return (rows + gained) / (step_s + verified_s + drafting_s)

    best = max(map(goodput, itertools.product(*(range(length + 1) for length in lengths))))
    assert goodput(admitted.tolist()) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_goodput_finds_the_best_of_all_joint_choices(seed):
    rng = np.random.default_rng(seed)
    rows, tokens = 3, 2
    actions = np.array([(0, 0), (1, 1), (1, 2), (2, 1), (2, 2)])
    offered = rng.integers(0, tokens + 1, rows)
    has_model = rng.random(rows) < 0.8
    drafted = np.zeros((rows, 5))
    drafted[:, 1:3] = np.minimum([1, 2], offered[:, None])
    drafted[:, 3:] = np.where(has_model[:, None], [1, 2], 0)
    survival = np.cumprod(rng.random((rows, 5, 2)), axis=2)
    gain = np.array(
        [[survival[r, a, : int(drafted[r, a])].sum() for a in range(5)] for r in range(rows)]
    )
    scale = 10.0 ** rng.uniform(-3, -1, 6)
    share = float(rng.choice([0.0, 0.1]))
    prices = Prices(0.02, scale[0], 0.0, scale[1], scale[2], scale[3] / 10, scale[4] / 1e4, share)
    outlook = Outlook(
        prices=prices,
        plain_s=0.02 + rows * scale[0],
        actions=actions,
        first_model=3,
        drafted=drafted,
        gain=gain,
        has_model=has_model,
        num_pending_tokens=np.where(has_model, rng.integers(1, 5, rows), 0),
        num_context_tokens=rng.integers(10, 100, rows),
    )

    def goodput(choice):
        got = [drafted[row, action] for row, action in enumerate(choice)]
        seconds = outlook.plain_s + prices.verified_token_s * sum(got)
        if any(0 < action < 3 and got[row] for row, action in enumerate(choice)):
            seconds *= 1 + share
        users = [row for row, action in enumerate(choice) if action >= 3 and has_model[row]]
        if users:
            longest = max(int(got[row]) for row in users)
            seconds += prices.model_draft_s + prices.pass_s * longest
            for row in users:
                read = outlook.num_pending_tokens[row] + longest - 1
                seconds += prices.pass_token_s * read
                seconds += prices.draft_context_token_s * outlook.num_context_tokens[row]
        return (rows + sum(gain[row, action] for row, action in enumerate(choice))) / seconds

    index = {tuple(action): i for i, action in enumerate(actions.tolist())}
    joint = [index[tuple(action)] for action in outlook.best_actions().tolist()]
    best = max(map(goodput, itertools.product(range(5), repeat=rows)))
    assert goodput(joint) == pytest.approx(best, rel=1e-9)
    (one,) = outlook.best_action().tolist()
    alike = max(range(5), key=lambda action: goodput([action] * rows))
    assert goodput([index[tuple(one)]] * rows) == pytest.approx(goodput([alike] * rows), rel=1e-9)


def test_a_draft_tells_of_its_own_positions_only():
    config = AcceptanceConfig(decay=0.5, prior_rate=0.8, prior_weight=1.0)
    table = AcceptanceTable(1, 3, config)
    table.add(np.array([[0, 0, 2, 2], [0, 0, 1, 0]]))  # 2 of 2 accepted; 0 of 1
    first = (1 + 0.8) / (2 + 1)
    second = (1 + 0.8 * first) / (1 + 1)
    np.testing.assert_allclose(table.survival()[0], [first, min(first, second), 0.8 * first])
    table.add(np.array([[0, 0, 3, 3]]))  # what came before now counts half
    rates = [(0.5 + 1 + 0.8) / (1 + 1 + 1)]
    rates.append(min(rates[0], (0.5 + 1 + 0.8 * rates[0]) / (0.5 + 1 + 1)))
    rates.append(min(rates[1], (1 + 0.8 * rates[1]) / (1 + 1)))
    np.testing.assert_allclose(table.survival()[0], rates)


def test_matches_decide_for_each_request_or_for_most():
    (record,) = random_history(seed=1, steps=1)
    rows = record.num_rows
    assert rows >= 1
    match = np.arange(rows, dtype=np.int32) + 2
    offer = replace(record.token_offers["ngram"], match_length=match)
    record = replace(record, token_offers={"ngram": offer})
    section = {"name": "match_else_model", "min_match_length": 3, "token_length": 5}
    by_row = decide(build_baseline(ROWS, section), record).tolist()
    assert by_row == [[1, 5] if length >= 3 else [2, 3] for length in match]
    has_most = 2 * (match >= 3).sum() >= rows
    assert decide(build_baseline(BATCH, section), record).tolist() == [
        [1, 5] if has_most else [2, 3]
    ]


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"name": "godput"}, "Unknown baseline 'godput'; did you mean 'goodput'?"),
        ({"name": "goodput"}, "baseline has no 'cost_model'; give one"),
        ({"name": "goodput", "cost_model": "no.json"}, "There is no cost model no.json; make one"),
        ({"name": "fixed", "drafer": "ngram"}, "Unknown key 'drafer' in baseline; did you mean"),
        ({"name": "ema_tiers", "drafter": "eagle"}, "no drafter 'eagle'; did you mean 'eagle3'?"),
        (
            {"name": "batch_schedule", "drafter": "ngram", "schedule": [[2, 4, 1]]},
            "must begin at 1 running request; add a first range",
        ),
        (
            {"name": "batch_schedule", "drafter": "ngram", "schedule": [[1, 4, 1], [4, 8, 0]]},
            "give ascending ranges",
        ),
    ],
)
def test_a_section_that_makes_no_sense_is_one_sentence(section, sentence):
    with pytest.raises(ConfigError) as refused:
        build_baseline(BATCH, section)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_fault_while_judging_drafts_cuts_nothing_and_is_counted():
    class Faulty:
        def decide(self, record, observation):
            return np.zeros((1, 2), np.int64)

        def admit(self, record, drafts, survival):
            raise ZeroDivisionError

    (record,) = random_history(seed=1, steps=1)
    safe = SafeController(Faulty(), BATCH)
    survival = np.full((record.num_rows, 8), np.nan, np.float32)
    assert safe.admit(record, np.zeros((record.num_rows, 2), np.int64), survival) is None
    assert safe.num_fallbacks == {"ZeroDivisionError": 1}
