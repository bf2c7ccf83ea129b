"""Every field, recomputed by plain Python from the list of past steps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from policy.contract import Contract
from policy.features import DECAY
from policy.observation import ObservationBuilder

from .step_history import DRAFTERS, LENGTHS, held_bytes, random_history, random_step

GRANULARITIES = ("batch", "request")
both_granularities = pytest.mark.parametrize("granularity", GRANULARITIES)


def recent_mean(samples, prior):
    """`samples`: one list per step; a step with samples ages all earlier ones."""
    total, weight = prior, 1.0
    told = [values for values in samples if values]
    for age, values in enumerate(reversed(told)):
        total += DECAY**age * sum(values)
        weight += DECAY**age * len(values)
    return total / weight


def mean(values):
    values = [float(value) for value in values]
    return sum(values) / len(values)


def log2(value):
    return math.log2(1 + value)


def expected_row(contract, past, last_rows):
    """One observation row.

    `past` lists the steps as (record, rows of the batch or of the request), oldest first;
    `last_rows` are the rows of the last step that the observation row speaks of.
    """
    now = past[-1][0]
    row = [
        log2(now.num_running_reqs),
        log2(now.num_waiting_reqs),
        now.kv_cache_usage,
        log2(mean(now.num_context_tokens[last_rows])),
        log2(now.num_prefill_tokens),
        mean(now.temperature[last_rows]),
    ]
    for index, drafter in enumerate(contract.drafters):
        if drafter == "none":
            continue
        used = [(step, [r for r in rows if step.drafter[r] == index]) for step, rows in past]
        for position in (1, 2, 3):
            outcomes = [
                [
                    step.num_accepted_tokens[r] >= position
                    for r in rows
                    if step.num_draft_tokens[r] >= position
                ]
                for step, rows in used
            ]
            row.append(recent_mean(outcomes, 0.5))
        row.append(recent_mean([[s.num_emitted_tokens[r] for r in rows] for s, rows in used], 1.5))
        ages = [age for age, (_, rows) in enumerate(reversed(used)) if rows]
        row.append(log2(ages[0] if ages else 1024))
        if drafter in ("ngram", "suffix"):
            offer = now.token_offers[drafter]
            hits = [
                [s.token_offers[drafter].counterfactual_accepted[r] for r in rs] for s, rs in past
            ]
            known = offer.survival if drafter == "suffix" else ()
            expected = [
                sum(p for p in known[r].tolist() if p == p) for r in last_rows if len(known)
            ]
            row += [
                mean(offer.num_draft_tokens[last_rows] > 0),
                mean(offer.match_length[last_rows]),
                mean(expected) if expected else mean(offer.agreement[last_rows]),
                mean(offer.num_draft_tokens[last_rows]),
                recent_mean([[hit for hit in step if hit != -1] for step in hits], 0.0),
            ]
        else:
            state = now.model_states["eagle3"]
            drafts = [
                [[p for p in s.model_states["eagle3"].survival[r] if p == p] for r in rs]
                for s, rs in past
            ]
            drafts = [[draft for draft in step if draft] for step in drafts]
            row += [
                mean(state.fresh[last_rows]),
                log2(mean(state.num_pending_tokens[last_rows])),
                recent_mean([[float(draft[0]) for draft in step] for step in drafts], 0.5),
                recent_mean([[float(sum(draft)) for draft in step] for step in drafts], 0.5),
            ]
    row += [mean(now.drafter[last_rows] == index) for index in range(len(contract.drafters))]
    row += [mean(now.num_draft_tokens[last_rows]), mean(now.num_emitted_tokens[last_rows])]
    bounds = zip(row, contract.low.tolist(), contract.high.tolist(), strict=False)
    return [min(max(value, low), high) for value, low, high in bounds]


def expected_observation(contract, history):
    now = history[-1]
    whole = [(step, list(range(step.num_rows))) for step in history]
    batch = expected_row(contract, whole, list(range(now.num_rows)))
    if contract.granularity == "batch":
        return [batch]
    rows = []
    for row, req_id in enumerate(now.req_ids):
        past = []
        for step in history:
            if req_id in step.finished_req_ids:
                past = []
            if req_id in step.req_ids:
                past.append((step, [step.req_ids.index(req_id)]))
        own = expected_row(contract, past, [row])
        rows.append([*batch, own[3], own[5], *own[6:]])  # the load but context and temperature
    return rows


@both_granularities
@pytest.mark.parametrize(
    "drafters",
    [DRAFTERS, ("none", "ngram", "suffix"), ("none", "ngram"), ("none",)],
    ids=lambda names: "+".join(names),
)
def test_every_field_equals_its_recomputation_from_all_past_steps(granularity, drafters):
    contract = Contract(drafters, LENGTHS[: len(drafters)], granularity)
    builder = ObservationBuilder(contract)
    history = random_history(seed=1, steps=150, drafters=drafters)
    for last in range(len(history)):
        observed = builder.update(history[last])
        expected = np.array(expected_observation(contract, history[: last + 1]))
        assert observed.shape == expected.shape
        wrong = np.argwhere(~np.isclose(observed, expected, rtol=1e-4, atol=1e-4))
        assert not len(wrong), [
            (last, row, contract.field_names[i], observed[row, i], expected[row, i])
            for row, i in wrong
        ]


@both_granularities
def test_rows_are_float32_one_per_batch_or_per_request(granularity):
    contract = Contract(DRAFTERS, LENGTHS, granularity)
    builder = ObservationBuilder(contract)
    for step in random_history(seed=2, steps=30):
        rows = 1 if granularity == "batch" else step.num_rows
        observed = builder.update(step)
        assert observed.shape == (rows, len(contract.fields))
        assert observed.dtype == np.float32
        assert observed.flags.c_contiguous


@both_granularities
def test_bounds_hold_whatever_the_engine_reports(granularity):
    contract = Contract(DRAFTERS, LENGTHS, granularity)
    builder = ObservationBuilder(contract)
    reached = np.zeros(len(contract.fields), bool)
    for step in random_history(seed=3, steps=60, wild=500.0):
        observed = builder.update(step)
        assert (observed >= contract.low).all()
        assert (observed <= contract.high).all()
        reached |= (observed == contract.high).any(axis=0)
    assert reached[contract.field_names.index("kv_cache_usage")], "no value was out of bounds"
    assert reached[contract.field_names.index("ngram_match_length")]


@both_granularities
def test_the_same_records_give_the_same_bytes(granularity):
    contract = Contract(DRAFTERS, LENGTHS, granularity)
    history = random_history(seed=4, steps=80)
    one, two = ObservationBuilder(contract), ObservationBuilder(contract)
    first = [one.update(step).tobytes() for step in history]
    assert [two.update(step).tobytes() for step in history] == first
    one.reset()
    assert [one.update(step).tobytes() for step in history] == first


@both_granularities
def test_observations_already_handed_out_do_not_change(granularity):
    builder = ObservationBuilder(Contract(DRAFTERS, LENGTHS, granularity))
    history = random_history(seed=5, steps=10)
    observations = [builder.update(step) for step in history[:5]]
    copies = [observation.copy() for observation in observations]
    for step in history[5:]:
        builder.update(step)
    for observation, copy in zip(observations, copies, strict=True):
        np.testing.assert_array_equal(observation, copy)


@both_granularities
def test_before_anything_is_verified_the_priors_show(granularity):
    contract = Contract(DRAFTERS, LENGTHS, granularity)
    rng = np.random.default_rng(0)
    step = random_step(rng, ["a", "b"])
    zeros = np.zeros(2, np.int32)
    offer = replace(step.token_offers["ngram"], counterfactual_accepted=zeros - 1)
    state = replace(step.model_states["eagle3"], survival=np.full((2, 8), np.nan, np.float32))
    step = replace(
        step,
        drafter=zeros,
        num_draft_tokens=zeros,
        num_accepted_tokens=zeros,
        num_emitted_tokens=zeros + 1,
        token_offers={"ngram": offer},
        model_states={"eagle3": state},
    )
    first = ObservationBuilder(contract).update(step)[0]
    row = dict(zip(contract.field_names, first.tolist(), strict=True))
    for drafter in ("ngram", "eagle3"):
        rates = [row[f"{drafter}_acceptance_rate_pos_{position}"] for position in (1, 2, 3)]
        assert rates == [0.5, 0.5, 0.5]
        assert row[f"{drafter}_mean_acceptance_length"] == 1.5
        assert row[f"{drafter}_steps_since_draft_log2"] == 10
    assert row["ngram_counterfactual_accepted_tokens"] == 0
    assert (row["eagle3_top1_probability"], row["eagle3_expected_accepted_tokens"]) == (0.5, 0.5)
    assert (row["last_share_none"], row["last_emitted_tokens"]) == (1, 1)


def test_one_request_does_not_age_what_is_known_of_another():
    contract = Contract(DRAFTERS, LENGTHS, "request")
    rng = np.random.default_rng(0)
    together = random_step(rng, ["a", "b"])
    used = replace(
        together,
        drafter=np.array([1, 1], np.int32),
        num_draft_tokens=np.array([8, 8], np.int32),
        num_accepted_tokens=np.array([8, 8], np.int32),
    )
    only_b = replace(
        used,
        drafter=np.array([0, 1], np.int32),
        num_draft_tokens=np.array([0, 8], np.int32),
        num_accepted_tokens=np.array([0, 8], np.int32),
    )
    builder = ObservationBuilder(contract)
    column = contract.field_names.index("request_ngram_acceptance_rate_pos_1")
    before = builder.update(used)[0, column]
    for _ in range(50):
        after = builder.update(only_b)[0, column]
    assert before == after == np.float32(0.75)


def test_a_request_that_ended_is_forgotten_and_its_place_used_again():
    contract = Contract(DRAFTERS, LENGTHS, "request")
    builder = ObservationBuilder(contract)
    rng = np.random.default_rng(0)
    finished: frozenset[str] = frozenset()
    sizes = []
    for wave in range(250):
        req_ids = [f"{wave}-{number}" for number in range(4)]
        builder.update(random_step(rng, req_ids, finished))
        finished = frozenset(req_ids)
        sizes.append(held_bytes(builder))
    assert sizes[-1] == sizes[2], "1,000 requests ended and something of them is still kept"
    again = random_step(rng, ["0-0"], finished | {"0-0"})
    own = [name.startswith("request_") for name in contract.field_names]
    first = ObservationBuilder(contract).update(again)
    np.testing.assert_array_equal(builder.update(again)[:, own], first[:, own])


def test_requests_can_be_forgotten_between_steps():
    contract = Contract(DRAFTERS, LENGTHS, "request")
    rng = np.random.default_rng(0)
    step = random_step(rng, ["a"])
    own = [name.startswith("request_") for name in contract.field_names]
    builder = ObservationBuilder(contract)
    first = builder.update(step)[:, own]
    assert not np.array_equal(builder.update(step)[:, own], first)
    builder.forget(["a", "never seen"])
    np.testing.assert_array_equal(builder.update(step)[:, own], first)
