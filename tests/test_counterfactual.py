"""Advantages that a recording knows, computed once more in plain loops."""

import numpy as np
import pytest

from envs.row_worth import Worth
from policy.training.counterfactual import CounterfactualConfig, advantages

STEPS, REQUESTS, ACTIONS = 6, 5, 4


@pytest.fixture
def rollout():
    rng = np.random.default_rng(3)
    shape = (REQUESTS, ACTIONS)
    worths = [
        Worth(
            rng.integers(1, 6, shape).astype(np.float32),
            rng.uniform(1, 2, shape).astype(np.float32),
            rng.uniform(1, 3, REQUESTS).astype(np.float32),
        )
        for _ in range(STEPS)
    ]
    dones = rng.random((STEPS, REQUESTS)) < 0.3
    actions = rng.integers(0, ACTIONS, (STEPS, REQUESTS))
    probabilities = rng.dirichlet(np.ones(ACTIONS), (STEPS, REQUESTS))
    return worths, dones, actions, probabilities


@pytest.mark.parametrize(("decay", "prior_steps"), [(0.0, 2.0), (0.9, 8.0), (1.0, 0.5)])
def test_they_are_earnings_beyond_the_policys_average_at_the_requests_own_price(
    rollout, decay, prior_steps
):
    worths, dones, actions, probabilities = rollout
    found = advantages(*rollout, CounterfactualConfig(decay, prior_steps))
    for request in range(REQUESTS):
        for step in range(STEPS):
            tokens, plain_steps = prior_steps * worths[step].price[request], prior_steps
            for later in range(step, STEPS):
                taken = actions[later, request]
                weight = decay ** (later - step)
                tokens += weight * worths[later].tokens[request, taken]
                plain_steps += weight * worths[later].plain_steps[request, taken]
                if dones[later, request]:
                    break
            price = tokens / plain_steps
            earned = [
                worths[step].tokens[request, a] - price * worths[step].plain_steps[request, a]
                for a in range(ACTIONS)
            ]
            average = sum(p * e for p, e in zip(probabilities[step, request], earned, strict=True))
            expected = earned[actions[step, request]] - average
            assert found[step, request] == pytest.approx(expected, abs=1e-5)


def test_a_policy_that_is_sure_of_its_action_learns_nothing(rollout):
    worths, dones, actions, _ = rollout
    sure = np.eye(ACTIONS)[actions]
    found = advantages(worths, dones, actions, sure, CounterfactualConfig())
    assert found == pytest.approx(np.zeros((STEPS, REQUESTS)), abs=1e-5)
