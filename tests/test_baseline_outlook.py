"""The best choice of drafts against every joint choice, for rows as different as can be."""

import itertools

import numpy as np
import pytest

from policy.baselines.outlook import Outlook
from policy.baselines.prices import Prices

TOKEN_LENGTHS, MODEL_LENGTHS = (1, 2, 3), (1, 2, 3)
ACTIONS = np.array([(0, 0), *((1, n) for n in TOKEN_LENGTHS), *((2, n) for n in MODEL_LENGTHS)])
FIRST_MODEL = 1 + len(TOKEN_LENGTHS)
PRICE_SCALES = {
    "step_s": 1.0,
    "verified_token_s": 0.1,
    "context_token_s": 0.0,  # in `plain_s` already
    "model_draft_s": 0.1,
    "pass_s": 0.2,
    "pass_token_s": 0.05,
    "draft_context_token_s": 1e-3,
}


def random_outlook(rng, num_rows):
    """Every row has an offer, survivals and a backlog of its own, or none."""
    names, scales = zip(*PRICE_SCALES.items(), strict=True)
    values = np.array(scales) * rng.lognormal(0, 1, len(scales)) * (rng.random(len(scales)) > 0.15)
    share = float(rng.choice([0.0, 0.05, 0.3]))
    prices = Prices(**dict(zip(names, values.tolist(), strict=True)), token_draft_share=share)
    drafted, gain = np.zeros((2, num_rows, len(ACTIONS)))
    has_model = rng.random(num_rows) < 0.8
    for row, offered in enumerate(rng.integers(0, 4, num_rows)):
        token, model = np.cumprod(rng.random((2, 3)) ** 0.4, axis=1)
        token[offered:] = 0
        drafted[row, 1:FIRST_MODEL] = np.minimum(TOKEN_LENGTHS, offered)
        gain[row, 1:FIRST_MODEL] = token.cumsum()
        if has_model[row]:
            drafted[row, FIRST_MODEL:] = MODEL_LENGTHS
            gain[row, FIRST_MODEL:] = model.cumsum()
    return Outlook(
        prices=prices,
        plain_s=0.1 + prices.step_s + num_rows * prices.verified_token_s,
        actions=ACTIONS,
        first_model=FIRST_MODEL,
        drafted=drafted,
        gain=gain,
        has_model=has_model,
        num_pending_tokens=rng.integers(1, 5, num_rows),
        num_context_tokens=rng.integers(1, 200, num_rows),
    )


def rate_of(outlook, joint):
    """Tokens per second if each row takes the action of that index."""
    prices, target_s, tokens = outlook.prices, outlook.plain_s, len(joint)
    has_token_draft, num_passes, model_rows = False, 0, []
    for row, action in enumerate(joint):
        drafter, length = ACTIONS[action]
        drafted = int(outlook.drafted[row, action])
        target_s += prices.verified_token_s * drafted
        tokens += outlook.gain[row, action]
        if drafter == 1 and drafted:
            has_token_draft = True
        if drafter == 2 and outlook.has_model[row]:
            model_rows.append(row)
            num_passes = max(num_passes, int(length))
    seconds = target_s * (1 + prices.token_draft_share * has_token_draft)
    if model_rows:
        seconds += prices.model_draft_s + num_passes * prices.pass_s
    for row in model_rows:  # every pass reads a token of every row that is drafted for
        seconds += prices.pass_token_s * (outlook.num_pending_tokens[row] + num_passes - 1)
        seconds += prices.draft_context_token_s * outlook.num_context_tokens[row]
    return tokens / seconds


def indices_of(actions):
    return [ACTIONS.tolist().index(action) for action in actions.tolist()]


@pytest.mark.parametrize(("num_rows", "num_cases"), [(1, 300), (2, 300), (3, 60)])
def test_no_joint_choice_is_better(num_rows, num_cases):
    rng = np.random.default_rng(num_rows)
    chosen_lengths = set()
    for _ in range(num_cases):
        outlook = random_outlook(rng, num_rows)
        actions, reached = outlook.best_actions()
        chosen = indices_of(actions)
        assert len(chosen) == num_rows
        assert rate_of(outlook, chosen) == pytest.approx(reached, rel=1e-10)
        best = max(
            rate_of(outlook, joint)
            for joint in itertools.product(range(len(ACTIONS)), repeat=num_rows)
        )
        assert rate_of(outlook, chosen) >= best * (1 - 1e-10)
        chosen_lengths.add(tuple(sorted(map(tuple, ACTIONS[chosen].tolist()))))
    assert len(chosen_lengths) >= (7 if num_rows == 1 else 15)
    if num_rows > 1:
        model_lengths = [{n for d, n in chosen if d == 2} for chosen in chosen_lengths]
        assert max(map(len, model_lengths)) > 1, "no case where rows share passes unequally"


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_no_choice_for_all_rows_is_better(num_rows):
    rng = np.random.default_rng(100 + num_rows)
    chosen = set()
    for _ in range(300):
        outlook = random_outlook(rng, num_rows)
        rates = [rate_of(outlook, [action] * num_rows) for action in range(len(ACTIONS))]
        best_action, reached = outlook.best_action()
        (action,) = indices_of(best_action)
        assert rates[action] == pytest.approx(reached, rel=1e-10)
        assert rates[action] >= max(rates) * (1 - 1e-10)
        chosen.add(action)
        # A model that can draft for no row is charged: it is never worth it either way.
        can = outlook.has_model.any() | (np.arange(len(ACTIONS)) < FIRST_MODEL)
        np.testing.assert_allclose(outlook.batch_rates()[can], np.array(rates)[can], rtol=1e-12)
    assert chosen == set(range(len(ACTIONS)))


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_do_no_worse_than_any_change_of_one_row(seed):
    """64 rows have too many joint choices to try; each single change is tried instead."""
    outlook = random_outlook(np.random.default_rng(seed), 64)
    chosen = indices_of(outlook.best_actions()[0])
    reached = rate_of(outlook, chosen)
    assert reached >= outlook.batch_rates().max() * (1 - 1e-10)
    for row, action in itertools.product(range(64), range(len(ACTIONS))):
        changed = [*chosen[:row], action, *chosen[row + 1 :]]
        assert rate_of(outlook, changed) <= reached * (1 + 1e-10)
