"""The cost model finds what a step costs in noisy times, and says nothing where it cannot know."""

import doctest
import json
from dataclasses import fields, replace

import numpy as np
import pytest

import envs.online_cost_model
from envs.online_cost_model import OnlineCostModel
from policy.cost_model import StepShape

SECONDS = {
    "num_engine_steps": 0.020,
    "num_verified_tokens": 0.0008,
    "num_prefill_tokens": 0.001,
    "num_draft_passes": 0.003,
    "num_draft_pass_tokens": 0.0002,
}
"""What the machine of these tests takes; a prompt is far dearer than a decoding step."""


def true_s(shape, scale=1.0):
    return scale * sum(seconds * getattr(shape, name) for name, seconds in SECONDS.items())


def random_shape(rng, load=8, prefill_share=0.08):
    """No speculation, n-gram drafts or model drafts of a few lengths, sometimes a prompt read."""
    drafter, length = rng.integers(0, 3), int(rng.integers(1, 5))
    drafted = int(load * length * rng.uniform(0.5, 1)) if drafter else 0
    prompt = int(rng.integers(50, 512)) if rng.random() < prefill_share else 0
    return StepShape(
        num_engine_steps=1 + int(prompt > 0 and rng.random() < 0.5),
        num_running_reqs=load,
        num_verified_tokens=load + drafted,
        num_prefill_tokens=prompt,
        num_draft_passes=length if drafter == 2 else 0,
        num_draft_pass_tokens=load * (length + 1) if drafter == 2 else 0,
    )


def taught(seed=0, steps=320, load=8, noise=0.03, outliers=0.1, scale=1.0, model=None):
    """A model after noisy steps, of which a share took 1.3 to 10 times as long as they should."""
    rng = np.random.default_rng(seed)
    model = model or OnlineCostModel()
    for _ in range(steps):
        shape = random_shape(rng, load)
        step_time_s = true_s(shape, scale) * (1 + noise * rng.standard_normal())
        if rng.random() < outliers:
            step_time_s *= rng.uniform(1.3, 10)
        model.add(shape, step_time_s)
    return model


def held_out(load=8, count=300, **settings):
    rng = np.random.default_rng(99)
    return [random_shape(rng, load, **settings) for _ in range(count)]


@pytest.mark.parametrize("load", [1, 8, 32])
@pytest.mark.parametrize("seed", range(4))
def test_known_costs_are_found_in_noise_with_a_tenth_of_outliers(seed, load):
    model = taught(seed, load=load)
    expected = [model.expected_s(shape) for shape in held_out(load)]
    true = [true_s(shape) for shape in held_out(load)]
    np.testing.assert_allclose(expected, true, rtol=0.05)


def test_without_noise_the_costs_are_exact():
    model = taught(noise=0, outliers=0)
    expected = [model.expected_s(shape) for shape in held_out()]
    np.testing.assert_allclose(expected, [true_s(shape) for shape in held_out()], rtol=1e-6)


@pytest.mark.parametrize("load", [1, 8])
def test_the_part_of_prompts_is_told_apart_even_where_they_take_ten_times_a_step(load):
    model = taught(load=load)
    prompts = [shape for shape in held_out(load) if shape.num_prefill_tokens > 300]
    assert np.median([true_s(one) for one in prompts]) > 4 * true_s(held_out(load)[0])
    for shape in prompts:
        prefill_s = SECONDS["num_prefill_tokens"] * shape.num_prefill_tokens
        assert model.prefill_s(shape) == pytest.approx(prefill_s, rel=0.05)
        without = model.expected_s(replace(shape, num_prefill_tokens=0))
        assert model.expected_s(shape) - model.prefill_s(shape) == pytest.approx(without)
    assert model.prefill_s(replace(prompts[0], num_prefill_tokens=0)) == 0


@pytest.mark.parametrize("outliers", [0.1, 0.9])
def test_more_work_is_never_predicted_to_take_less_time(outliers):
    rng = np.random.default_rng(5)
    num_compared = 0
    for seed in range(10):
        model = taught(seed, steps=int(rng.integers(40, 200)), noise=0.5, outliers=outliers)
        for shape in held_out(count=40):
            more = {
                spec.name: getattr(shape, spec.name) + int(rng.integers(0, 50))
                for spec in fields(shape)
                if spec.name != "num_running_reqs"
            }
            less_s, more_s = model.expected_s(shape), model.expected_s(replace(shape, **more))
            if less_s is not None and more_s is not None:
                assert 0 <= less_s <= more_s
                num_compared += 1
            assert 0 <= model.prefill_s(shape) <= model.prefill_s(replace(shape, **more))
    assert num_compared > 200


def test_nothing_is_predicted_while_a_load_is_hardly_known():
    model = OnlineCostModel()
    plain = StepShape(num_running_reqs=8, num_verified_tokens=8)
    for _ in range(15):
        model.add(plain, true_s(plain))
        assert model.expected_s(plain) is None
        assert model.prefill_s(replace(plain, num_prefill_tokens=100)) == 0
    model.add(plain, true_s(plain))
    assert model.expected_s(plain) == pytest.approx(true_s(plain))


def test_nothing_is_predicted_for_work_that_was_hardly_seen():
    """After a calibration without speculation, the first drafts are not taken for free."""
    model, plain = OnlineCostModel(), StepShape(num_running_reqs=8, num_verified_tokens=8)
    drafted = StepShape(
        num_running_reqs=8, num_verified_tokens=24, num_draft_passes=2, num_draft_pass_tokens=24
    )
    for _ in range(40):
        model.add(plain, true_s(plain))
    assert model.expected_s(plain) == pytest.approx(true_s(plain))
    for _ in range(7):
        assert model.expected_s(drafted) is None
        model.add(drafted, true_s(drafted))
    for _ in range(9):
        model.add(drafted, true_s(drafted))
    assert model.expected_s(drafted) == pytest.approx(true_s(drafted))


@pytest.mark.parametrize("steps", [3, 21, 43, 500])
def test_a_saved_state_goes_on_exactly(steps):
    model, resumed = taught(steps=steps), OnlineCostModel()
    for shape in held_out():  # predictions fix when the weights were computed last
        model.expected_s(shape)
    model.add(held_out()[0], 1.0)
    resumed.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for seed in range(4):
        before = [(model.expected_s(one), model.prefill_s(one)) for one in held_out()]
        after = [(resumed.expected_s(one), resumed.prefill_s(one)) for one in held_out()]
        assert before == after
        taught(seed, steps=5, model=model)
        taught(seed, steps=5, model=resumed)
    assert model.state_dict() == resumed.state_dict()


def test_loads_do_not_mix():
    model = taught(load=1, scale=1.0)
    alone = [model.expected_s(shape) for shape in held_out(load=1)]
    taught(load=8, scale=5.0, model=model)
    assert [model.expected_s(shape) for shape in held_out(load=1)] == alone
    fast, slow = (
        [model.expected_s(shape) / true_s(shape) for shape in held_out(load)] for load in (1, 8)
    )
    np.testing.assert_allclose(fast, 1, rtol=0.05)
    np.testing.assert_allclose(slow, 5, rtol=0.05)
    assert model.expected_s(held_out(load=32)[0]) is None


def test_a_machine_that_became_slower_is_followed():
    model = taught(steps=400)
    taught(seed=1, steps=400, scale=2.0, model=model)
    ratios = [model.expected_s(shape) / true_s(shape) for shape in held_out()]
    np.testing.assert_allclose(ratios, 2, rtol=0.05)


def test_the_example_in_the_docstring_holds():
    results = doctest.testmod(envs.online_cost_model)
    assert results.attempted > 0
    assert results.failed == 0
