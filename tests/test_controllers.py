"""Who decides: the policy, a fixed rule, and the guard that keeps serving alive."""

import logging

import numpy as np
import pytest
import torch

from policy.artifact import PolicyArtifact
from policy.baselines.fixed import FixedController
from policy.contract import Contract
from policy.controllers import PolicyController, SafeController
from policy.errors import ContractError
from policy.module import PolicyModule
from policy.observation import ObservationBuilder

from .step_history import DRAFTERS, LENGTHS, random_step

CONTRACT = Contract(DRAFTERS, LENGTHS, "request")
RECORD = random_step(np.random.default_rng(0), ["a", "b", "c"])
OBSERVATION = ObservationBuilder(CONTRACT).update(RECORD)


class Scripted:
    """Gives, or raises, what it was told to, one thing a decision."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def decide(self, record, observation):
        assert record is RECORD
        assert observation is OBSERVATION
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def guarded(*outcomes, fallback=(0, 0)):
    return SafeController(Scripted(*outcomes), CONTRACT, fallback)


BAD_OUTCOMES = {
    "raises": RuntimeError("CUDA error"),
    "none": None,
    "nan": np.full((1, 2), np.nan),
    "fractions": np.array([[1.0, 2.0]]),
    "text": "ngram",
    "ragged": [[1, 2], [1]],
    "flat": np.array([1, 2]),
    "one column": np.array([[1]]),
    "three columns": np.array([[1, 2, 3]]),
    "no row": np.zeros((0, 2), np.int64),
    "two rows of three": np.zeros((2, 2), np.int64),
    "drafter beyond the table": np.array([[3, 1]]),
    "negative drafter": np.array([[-1, 1]]),
    "negative length": np.array([[1, -1]]),
    "one bad row": np.array([[1, 2], [2, 1], [7, 1]]),
    "booleans": np.array([[True, True]]),
}


@pytest.mark.parametrize("outcome", BAD_OUTCOMES.values(), ids=BAD_OUTCOMES)
def test_a_bad_decision_is_replaced_by_the_fallback_and_counted(outcome, caplog):
    controller = guarded(outcome, np.array([[2, 3]]), fallback=(1, 6))
    actions = controller.decide(RECORD, OBSERVATION)
    assert actions.tolist() == [[1, 6]]
    assert sum(controller.num_fallbacks.values()) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert controller.decide(RECORD, OBSERVATION).tolist() == [[2, 3]], "it does not recover"
    assert sum(controller.num_fallbacks.values()) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_observation_that_is_not_finite_is_not_decided_on(value):
    damaged = OBSERVATION.copy()
    damaged[-1, -1] = value
    controller = guarded(fallback=(1, 6))
    assert controller.decide(RECORD, damaged).tolist() == [[1, 6]]
    assert controller.num_fallbacks == {"ContractError": 1}


class Sleeping:
    """Takes as many of a clock's seconds as told, one number a decision, and then none."""

    def __init__(self, monkeypatch, *seconds):
        self.now_s, self.seconds, self.num_asked = 0.0, list(seconds), 0
        monkeypatch.setattr("policy.controllers.time.perf_counter", lambda: self.now_s)

    def decide(self, record, observation):
        self.num_asked += 1
        self.now_s += self.seconds.pop(0) if self.seconds else 0.0
        return np.array([[2, 3]])


def test_a_late_decision_is_not_used_and_pauses_the_controller_ever_longer(monkeypatch, caplog):
    sleeping = Sleeping(monkeypatch, 0.02, 0.011, 0.5, 0.009)
    controller = SafeController(sleeping, CONTRACT, (1, 6), budget_s=0.01)
    steps = [controller.decide(RECORD, OBSERVATION).tolist() for _ in range(12)]
    # late, 1 pause, late, 2 pauses, late, 4 pauses, and then in time
    assert steps == [[[1, 6]]] * 10 + [[[2, 3]]] * 2
    assert sleeping.num_asked == 5
    assert controller.num_fallbacks == {"SlowDecisionError": 10}
    assert len(caplog.records) == 1
    assert "took 20.0 ms and may take 10 ms" in str(caplog.records[0].exc_info[1])
    sleeping.seconds = [1.0, 0.0]
    steps = [controller.decide(RECORD, OBSERVATION).tolist() for _ in range(3)]
    assert steps == [[[1, 6]]] * 2 + [[[2, 3]]], "trust is regained: one pause, not eight"


def test_the_pause_has_an_end(monkeypatch):
    sleeping = Sleeping(monkeypatch, *[1.0] * 15)
    controller = SafeController(sleeping, CONTRACT, budget_s=0.1)
    for _ in range(15 + 2**10 - 1 + 4 * 1024):
        controller.decide(RECORD, OBSERVATION)
    assert sleeping.num_asked == 15


def test_without_a_budget_no_decision_is_late(monkeypatch):
    controller = SafeController(Sleeping(monkeypatch, 1e9), CONTRACT)
    assert controller.decide(RECORD, OBSERVATION).tolist() == [[2, 3]]


def test_late_judgements_of_drafts_pause_the_controller_too(monkeypatch):
    class Judging(Sleeping):
        def admit(self, record, drafts, survival):
            self.now_s += 0.5
            return np.zeros(3, np.int64)

    judging = Judging(monkeypatch)
    controller = SafeController(judging, CONTRACT, budget_s=0.1)
    admitted = []
    for _ in range(12):
        controller.decide(RECORD, OBSERVATION)
        admitted.append(controller.admit(RECORD, np.zeros((3, 2), np.int64), np.zeros((3, 8))))
    assert admitted == [None] * 12
    assert judging.num_asked == 4  # then 1, 2, 4 and 8 pauses


def test_fallbacks_are_counted_by_reason_and_each_reason_is_logged_once(caplog):
    outcomes = [
        RuntimeError("1"),
        ValueError("2"),
        RuntimeError("3"),
        None,
        np.zeros(5),
        KeyError(),
    ]
    controller = guarded(*outcomes)
    for _ in outcomes:
        assert controller.decide(RECORD, OBSERVATION).tolist() == [[0, 0]]
    assert controller.num_fallbacks == {
        "RuntimeError": 2,
        "ValueError": 1,
        "ContractError": 2,
        "KeyError": 1,
    }
    logged = [record.exc_info[0].__name__ for record in caplog.records]
    assert logged == ["RuntimeError", "ValueError", "ContractError", "KeyError"]


@pytest.mark.parametrize("rows", [[[1, 3]], [[1, 3], [2, 4], [0, 0]]], ids=["batch", "request"])
@pytest.mark.parametrize("kind", [np.int64, np.int32, list, torch.tensor])
def test_good_decisions_pass_unchanged(rows, kind):
    outcome = kind(rows) if kind in (list, torch.tensor) else np.array(rows, kind)
    controller = guarded(outcome)
    assert controller.decide(RECORD, OBSERVATION).tolist() == rows
    assert not controller.num_fallbacks


def test_decisions_that_stand_for_a_valid_one_become_it():
    controller = guarded(np.array([[1, 99], [0, 5], [2, 0]]))
    assert controller.decide(RECORD, OBSERVATION).tolist() == [[1, 8], [0, 0], [0, 0]]
    assert not controller.num_fallbacks


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_not_held_up(interruption):
    class Interrupted:
        def decide(self, record, observation):
            raise interruption

    with pytest.raises(interruption):
        SafeController(Interrupted(), CONTRACT).decide(RECORD, OBSERVATION)


def test_a_fallback_outside_the_table_is_refused_at_once():
    with pytest.raises(ContractError, match="outside the table"):
        guarded(fallback=(3, 1))
    assert guarded(None, fallback=(2, 9)).decide(RECORD, OBSERVATION).tolist() == [[2, 4]]


@pytest.mark.parametrize(
    ("drafter", "length", "action"),
    [
        ("none", 0, [0, 0]),
        ("none", 7, [0, 0]),
        ("ngram", 5, [1, 5]),
        ("ngram", 50, [1, 8]),
        ("eagle3", 5, [2, 4]),
        ("eagle3", 0, [0, 0]),
    ],
)
def test_the_fixed_rule_is_clipped_to_its_drafter(drafter, length, action):
    controller = FixedController(CONTRACT, drafter, length)
    for _ in range(3):
        assert controller.decide(RECORD, OBSERVATION).tolist() == [action]


def test_the_fixed_rule_refuses_what_the_engine_does_not_have():
    with pytest.raises(ContractError) as refusal:
        FixedController(CONTRACT, "suffix", 4)
    sentence = "The engine has no drafter 'suffix'; choose from none, ngram, eagle3."
    assert str(refusal.value) == sentence
    for length in (-1, "4", 2.5, None):
        with pytest.raises(ContractError):
            FixedController(CONTRACT, "ngram", length)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.manual_seed(0)
    low, high = torch.from_numpy(CONTRACT.low), torch.from_numpy(CONTRACT.high)
    table = torch.from_numpy(CONTRACT.action_table)
    module = PolicyModule(low, high, (16,), table).eval()
    return PolicyArtifact(module, CONTRACT, "0" * 64, tmp_path_factory.mktemp("p") / "policy.pt")


def test_the_policy_controller_decides_as_its_module_does(policy):
    rng = np.random.default_rng(1)
    controller = PolicyController(policy)
    for rows in (1, 3, 64):
        observation = rng.uniform(CONTRACT.low, CONTRACT.high, (rows, len(CONTRACT.fields)))
        observation = observation.astype(np.float32)
        before = observation.copy()
        actions = controller.decide(RECORD, observation)
        with torch.no_grad():
            expected = policy.module(torch.tensor(before)).numpy()
        assert (type(actions), actions.dtype) == (np.ndarray, np.int64)
        np.testing.assert_array_equal(actions, expected)
        np.testing.assert_array_equal(observation, before)


def test_a_damaged_observation_drafts_nothing(policy):
    observation = np.full((3, len(CONTRACT.fields)), np.nan, np.float32)
    assert PolicyController(policy).decide(RECORD, observation).tolist() == [[0, 0]] * 3
