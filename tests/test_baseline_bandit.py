"""The bandit against its own log of pulls, summed anew at every decision."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from policy.baselines.bandit import BanditConfig, BanditController
from policy.contract import Contract
from policy.cost_model import FEATURES, CostModel
from policy.errors import ConfigError

from .step_history import random_step, step_of

DRAFTERS, LENGTHS = ("none", "ngram", "eagle3"), (0, 2, 3)
CONTRACT = Contract(DRAFTERS, LENGTHS)
ARMS = [(0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]
WEIGHTS_S = (2e-2, 1e-3, 2e-6, 5e-4, 3e-3, 2e-3, 1e-5, 1e-6)
SHARE = 0.1
COST_MODEL = CostModel.from_weights(dict(zip(FEATURES, WEIGHTS_S, strict=True)), SHARE)


def bandit(**settings):
    return BanditController(CONTRACT, COST_MODEL, BanditConfig("-", **settings))


def step_after(rng, action, num_running_reqs):
    """A step in which the action was taken, with passes, prompts and luck of its own."""
    drafter, length = action
    record = random_step(rng, "abc")
    drafts = np.full(3, length, np.int32)
    if drafter == 1:
        drafts[0] = 0  # nothing was on offer for one row
    accepted = rng.integers(0, drafts + 1).astype(np.int32)
    return replace(
        record,
        num_running_reqs=num_running_reqs,
        drafter=np.where(drafts > 0, drafter, 0).astype(np.int32),
        num_draft_tokens=drafts,
        num_accepted_tokens=accepted,
        num_emitted_tokens=accepted + np.int32(1),
        num_scheduled_tokens=record.num_prefill_tokens + 3 + int(drafts.sum()),
        num_draft_passes=length * (drafter == 2),
        num_draft_pass_tokens=length * 3 * (drafter == 2),
    )


def seconds_of(record):
    """The price list, written out."""
    step, verified, context, prefill, model, passes, tokens, draft_context = WEIGHTS_S
    num_verified = record.num_scheduled_tokens - record.num_prefill_tokens
    target_s = step + verified * num_verified + context * record.num_context_tokens.sum()
    is_model = record.drafter == 2
    return (
        target_s * (1 + SHARE * (record.drafter == 1).any())
        + prefill * record.num_prefill_tokens
        + model * is_model.any()
        + passes * record.num_draft_passes
        + tokens * record.num_draft_pass_tokens
        + draft_context * record.num_context_tokens[is_model].sum()
    )


def expected_arm(log, bucket, method, exploration, generator):
    """By the sums of all pulls in the bucket; `log` holds `(bucket, arm, tokens, seconds)`."""
    pulls = [[entry for entry in log if entry[:2] == (bucket, arm)] for arm in ARMS]
    for arm, mine in zip(ARMS, pulls, strict=True):
        if not mine:
            return arm
    rates = [sum(e[2] for e in mine) / sum(e[3] for e in mine) for mine in pulls]
    widths = [exploration * rates[0] / math.sqrt(len(mine)) for mine in pulls]
    total = sum(map(len, pulls))
    if method == "ucb":
        values = [r + w * math.sqrt(math.log(total)) for r, w in zip(rates, widths, strict=True)]
    else:
        values = [generator.normal(r, w) for r, w in zip(rates, widths, strict=True)]
    return ARMS[values.index(max(values))]


@pytest.mark.parametrize("method", ["ucb", "thompson"])
@pytest.mark.parametrize("exploration", [0.0, 0.1, 0.5])
def test_every_pull_follows_from_the_log(method, exploration):
    rng = np.random.default_rng(7)
    controller = bandit(method=method, exploration=exploration, seed=3)
    generator, log, last = np.random.default_rng(3), [], None
    loads = [1, 2, 3, 4, 7, 8]
    record, seen = step_after(rng, (0, 0), 1), set()
    for _ in range(300):
        if last is not None:
            log.append((*last, int(record.num_emitted_tokens.sum()), seconds_of(record)))
        bucket = math.floor(math.log2(record.num_running_reqs))
        expected = expected_arm(log, bucket, method, exploration, generator)
        assert controller.decide(record, None).tolist() == [list(expected)]
        last = bucket, expected
        seen.add(last)
        record = step_after(rng, expected, int(rng.choice(loads)))
    assert seen == {(bucket, arm) for bucket in range(4) for arm in ARMS}


def test_every_arm_is_tried_once_at_each_load_and_in_order():
    controller = bandit()
    for load in (1, 2, 4):
        # The last load's last arm is judged by this load's first step; it counts where it was
        # pulled.
        pulled = [
            controller.decide(step_of([(0, 0, 0)], num_running_reqs=load), None)[0].tolist()
            for _ in ARMS
        ]
        assert pulled == [list(arm) for arm in ARMS]


def test_the_fastest_arm_is_found():
    """Every arm brings a token but one, which brings three."""
    for method in ("ucb", "thompson"):
        controller = bandit(method=method, exploration=0.3)
        action, chosen = (0, 0), []
        for _ in range(300):
            drafter, length = action
            accepted = 2 if action == (2, 2) else 0
            record = step_of([(drafter, length, accepted)])
            action = tuple(controller.decide(record, None)[0].tolist())
            chosen.append(action)
        assert chosen[-100:].count((2, 2)) > 80


def test_draws_follow_the_seed():
    def decisions(seed):
        controller = bandit(method="thompson", exploration=1.0, seed=seed)
        record = step_of([(0, 0, 0)])
        return [controller.decide(record, None)[0].tolist() for _ in range(60)]

    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)


@pytest.mark.parametrize("wrong", [{"exploration": -0.1}, {"exploration": math.nan}, {"seed": -1}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ConfigError) as refusal:
        BanditConfig("-", **wrong)
    assert re.fullmatch(r"[^\n]+; make it 0 or more\.", str(refusal.value))
