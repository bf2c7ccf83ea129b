"""What a step costs, by hand; more work never costs less; a damaged cost model is refused."""

import doctest
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import policy.cost_model
from policy.contract import Contract
from policy.cost_model import FEATURES, NO_WORK, CostModel, StepShape, read_cost_model, shape_of
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, random_history

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = Contract(DRAFTERS, LENGTHS)
LOADS = np.array([1.0, 4.0, 16.0])


def refused(act, *arguments):
    """The sentence that refuses; it ends with what to do."""
    with pytest.raises(ConfigError) as refusal:
        act(*arguments)
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


def random_model(rng, loads=LOADS):
    """Weights of very different sizes, some of them 0."""
    shape = len(loads), len(FEATURES)
    return CostModel(
        loads, rng.random(shape) * 10.0 ** rng.integers(-6, 0, shape) * rng.integers(0, 2, shape)
    )


def random_shape(rng, load):
    return StepShape(load, *rng.integers(0, 500, len(FEATURES)).tolist())


def test_a_step_costs_what_its_parts_cost():
    model = CostModel.from_weights(
        {"num_engine_steps": 0.01, "num_verified_tokens": 0.002, "num_draft_passes": 0.003}
    )
    shape = StepShape(
        num_running_reqs=7,
        num_engine_steps=2,
        num_verified_tokens=10,
        num_context_tokens=1000,
        num_prefill_tokens=50,
        num_draft_passes=4,
    )
    assert model.expected_s(shape) == pytest.approx(2 * 0.01 + 10 * 0.002 + 4 * 0.003)
    assert model.prefill_s(shape) == 0
    with_prompts = CostModel.from_weights({"num_engine_steps": 0.01, "num_prefill_tokens": 0.004})
    assert with_prompts.prefill_s(shape) == pytest.approx(50 * 0.004)
    assert with_prompts.expected_s(shape) == pytest.approx(2 * 0.01 + 50 * 0.004)


def test_every_feature_has_a_column_of_its_own():
    for name in FEATURES:
        model = CostModel.from_weights({name: 0.25})
        assert model.expected_s(replace(NO_WORK, num_running_reqs=3, **{name: 8})) == 2
        others = {other: 8 for other in FEATURES if other != name}
        assert model.expected_s(replace(NO_WORK, num_running_reqs=3, **others)) == 0


@pytest.mark.parametrize(
    ("load", "weight_s"),
    [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (7, 0.3), (10, 0.2), (16, 0.0), (17, 0.0), (999, 0.0)],
)
def test_weights_are_interpolated_between_loads_and_held_beyond(load, weight_s):
    weights_s = np.zeros((3, len(FEATURES)))
    weights_s[:, 0] = 0.1, 0.4, 0.0
    model = CostModel(LOADS, weights_s)
    assert model.expected_s(StepShape(load)) == pytest.approx(weight_s)
    assert model.weights_at(np.array([load, 1]))[:, 0] == pytest.approx([weight_s, 0.1])
    later = CostModel(LOADS + 2, weights_s)
    assert later.expected_s(StepShape(1)) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(5))
def test_more_work_never_takes_less_time(seed):
    rng = np.random.default_rng(seed)
    model = random_model(rng)
    for load in (1, 3, 4, 11, 40):
        for feature in FEATURES:
            shape = random_shape(rng, load)
            more = replace(shape, **{feature: getattr(shape, feature) + int(rng.integers(1, 100))})
            assert 0 <= model.expected_s(shape) <= model.expected_s(more)
            assert 0 <= model.prefill_s(shape) <= model.prefill_s(more)
            assert model.prefill_s(shape) <= model.expected_s(shape) * (1 + 1e-12)


def test_given_constants_do_not_learn():
    model = CostModel.from_weights({"num_engine_steps": 0.01})
    before = model.state_dict()
    model.add(StepShape(4), 1000.0)
    model.load_state_dict({"weights_s": [[9.0] * len(FEATURES)]})
    assert model.state_dict() == before
    assert model.expected_s(StepShape(4)) == 0.01


def test_weights_that_make_no_sense_are_refused():
    weights_s = np.ones((3, len(FEATURES)))
    for value in (-1e-9, np.nan, np.inf):
        damaged = weights_s.copy()
        damaged[1, 4] = value
        assert "negative weight" in refused(CostModel, LOADS, damaged)
    for loads in ([1, 4, 4], [4, 1, 16], [0, 1, 2], [1, np.nan, 3], [np.nan, 1, 2]):
        assert "ascend" in refused(CostModel, np.array(loads, float), weights_s)
    assert "needs 8 weights" in refused(CostModel, LOADS, weights_s[:2])
    assert "needs 8 weights" in refused(CostModel, LOADS, weights_s[:, 1:])
    assert "needs 8 weights" in refused(CostModel, LOADS[:0], weights_s[:0])
    for share in (-0.1, np.nan, np.inf):
        assert "token_draft_share" in refused(CostModel, LOADS, weights_s, share)
    said = refused(CostModel.from_weights, {"num_engine_steps": 1.0, "num_coffees": 2.0})
    assert "'num_coffees'" in said
    assert all(name in said for name in FEATURES)


def write_model(path, **changes):
    section = {**random_model(np.random.default_rng(0)).state_dict(), **changes}
    path.write_text(json.dumps({"cost_model": section, "provenance": {"source": "a test"}}))
    return path


def test_a_file_gives_the_model_back(tmp_path):
    model = replace(random_model(np.random.default_rng(0)), token_draft_share=0.02)
    again = read_cost_model(write_model(tmp_path / "m.json", **model.state_dict()))
    np.testing.assert_array_equal(again.loads, model.loads)
    np.testing.assert_array_equal(again.weights_s, model.weights_s)
    assert again.token_draft_share == 0.02


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"{}", b'{"cost_model": 3}', b'{"cost_model": {}}', b"\xff\xfe"],
)
def test_a_damaged_file_is_refused_by_name(content, tmp_path):
    (tmp_path / "m.json").write_bytes(content)
    assert f"{tmp_path / 'm.json'} is no cost model" in refused(
        read_cost_model, tmp_path / "m.json"
    )


@pytest.mark.parametrize("key", ["features", "loads", "weights_s", "token_draft_share"])
@pytest.mark.parametrize("value", [None, "much", {}])
def test_a_file_with_rubbish_inside_is_refused(key, value, tmp_path):
    refused(read_cost_model, write_model(tmp_path / "m.json", **{key: value}))


def test_a_missing_file_other_features_and_negative_weights_are_refused(tmp_path):
    assert "There is no cost model" in refused(read_cost_model, tmp_path / "nowhere.json")
    assert "is no cost model" in refused(read_cost_model, tmp_path)
    other = write_model(tmp_path / "m.json", features=[*FEATURES[1:], "num_coffees"])
    assert "num_coffees" in refused(read_cost_model, other)
    swapped = write_model(tmp_path / "m.json", features=[*FEATURES[1:], FEATURES[0]])
    assert "prices other work" in refused(read_cost_model, swapped)
    weights_s = np.full((3, len(FEATURES)), -1.0).tolist()
    negative = write_model(tmp_path / "m.json", weights_s=weights_s)
    assert "negative weight" in refused(read_cost_model, negative)
    fewer = write_model(tmp_path / "m.json", loads=[1.0, 4.0])
    assert "weights at each of its loads" in refused(read_cost_model, fewer)


def test_the_published_h100_constants_that_ship_give_the_published_times():
    """verify + overhead, EAGLE and n-gram as in the paper's fit, at 4 requests of 500 tokens."""
    model = read_cost_model(ROOT / "checkpoints" / "cost_models" / "llama3.1-8b-h100.json")
    plain_s = 3.92645679e-8 * 2000 + 2.10103129e-5 * 4 + 5.88590713e-3 + 1.20683946e-3
    plain = StepShape(4, num_verified_tokens=4, num_context_tokens=2000)
    assert model.expected_s(plain) == pytest.approx(plain_s, rel=1e-9)
    eagle_s = 2.37768493e-9 * 2000 + 8.41429603e-7 * 12 + 2.13526175e-3
    drafted = replace(
        plain,
        num_model_drafts=1,
        num_draft_passes=3,
        num_draft_pass_tokens=12,
        num_draft_context_tokens=2000,
    )
    assert model.expected_s(drafted) == pytest.approx(plain_s + eagle_s, rel=1e-9)
    assert model.token_draft_share == 0.005875


def test_the_shape_of_a_step_is_what_its_rows_add_up_to():
    rng = np.random.default_rng(2)
    for record in random_history(2, 200):
        record = replace(
            record,
            num_draft_passes=int(rng.integers(0, 5)),
            num_draft_pass_tokens=int(rng.integers(0, 99)),
        )
        rows = range(record.num_rows)
        with_model = [row for row in rows if DRAFTERS[record.drafter[row]] == "eagle3"]
        assert shape_of(record, CONTRACT) == StepShape(
            num_running_reqs=record.num_running_reqs,
            num_engine_steps=1,
            num_verified_tokens=record.num_scheduled_tokens - record.num_prefill_tokens,
            num_context_tokens=sum(int(record.num_context_tokens[row]) for row in rows),
            num_prefill_tokens=record.num_prefill_tokens,
            num_model_drafts=1 if with_model else 0,
            num_draft_passes=record.num_draft_passes,
            num_draft_pass_tokens=record.num_draft_pass_tokens,
            num_draft_context_tokens=sum(int(record.num_context_tokens[row]) for row in with_model),
        )


def test_the_shape_of_steps_in_a_row_is_their_sum_under_the_last_load():
    rng = np.random.default_rng(3)
    shapes = [random_shape(rng, load) for load in (3, 9, 5)]
    total = NO_WORK
    for shape in shapes:
        total = total.followed_by(shape)
    assert total.num_running_reqs == 5
    for spec in fields(StepShape)[1:]:
        assert getattr(total, spec.name) == sum(getattr(shape, spec.name) for shape in shapes)
    assert total.features().tolist() == sum(shape.features() for shape in shapes).tolist()


def test_the_documented_example_holds():
    result = doctest.testmod(policy.cost_model)
    assert result.failed == 0
    assert result.attempted > 0
