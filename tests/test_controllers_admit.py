"""Controllers that judge drafts once they are made, and the guard around them."""

import logging

import numpy as np
import pytest

from policy.baselines.fixed import FixedController
from policy.contract import Contract
from policy.controllers import SafeController, admitted_lengths

from .step_history import DRAFTERS, LENGTHS, random_step

CONTRACT = Contract(DRAFTERS, LENGTHS, "request")
RECORD = random_step(np.random.default_rng(0), ["a", "b", "c"])
DRAFTS = np.array([[2, 4], [0, 0], [1, 8]])
SURVIVAL = np.full((3, 8), np.nan, np.float32)


class Judge:
    """Admits what it was told to, one thing a step."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def admit(self, record, drafts, survival):
        assert record is RECORD
        assert drafts is DRAFTS
        assert survival is SURVIVAL
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def guarded(*outcomes):
    return SafeController(Judge(*outcomes), CONTRACT)


def admit(controller):
    return controller.admit(RECORD, DRAFTS, SURVIVAL)


BAD_OUTCOMES = {
    "raises": RuntimeError("CUDA error"),
    "flat number": 3,
    "two rows of three": np.array([1, 2]),
    "no row": np.zeros(0, np.int64),
    "a column": np.array([[1], [2], [3]]),
    "negative": np.array([1, -1, 2]),
    "fractions": np.array([1.0, 2.0, 3.0]),
    "nan": np.full(3, np.nan),
    "booleans": np.array([True, False, True]),
    "text": ["all", "all", "all"],
    "ragged": [[1], [1, 2], []],
}


@pytest.mark.parametrize("outcome", BAD_OUTCOMES.values(), ids=BAD_OUTCOMES)
def test_a_bad_judgement_cuts_nothing_and_is_counted(outcome, caplog):
    controller = guarded(outcome, np.array([2, 0, 5]))
    assert admit(controller) is None
    assert sum(controller.num_fallbacks.values()) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert admit(controller).tolist() == [2, 0, 5], "it does not recover"
    assert sum(controller.num_fallbacks.values()) == 1


def test_bad_judgements_are_counted_by_reason_and_each_is_logged_once(caplog):
    controller = guarded(KeyError(), np.zeros(5, int), KeyError(), np.array([-1, 0, 0]))
    for _ in range(4):
        assert admit(controller) is None
    assert controller.num_fallbacks == {"KeyError": 2, "ContractError": 2}
    assert len(caplog.records) == 2


@pytest.mark.parametrize("kind", [np.int64, np.int32, list])
def test_good_judgements_pass_unchanged(kind):
    outcome = [0, 3, 99] if kind is list else np.array([0, 3, 99], kind)
    controller = guarded(outcome, None)
    assert admit(controller).tolist() == [0, 3, 99]
    assert admit(controller) is None
    assert not controller.num_fallbacks


def test_a_controller_without_judgement_lets_everything_through():
    fixed = FixedController(CONTRACT, "ngram", 4)
    for controller in (None, fixed, SafeController(fixed, CONTRACT)):
        assert admitted_lengths(controller, RECORD, DRAFTS, SURVIVAL) is None


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_not_held_up(interruption):
    class Interrupted:
        def admit(self, record, drafts, survival):
            raise interruption

    with pytest.raises(interruption):
        admit(SafeController(Interrupted(), CONTRACT))
