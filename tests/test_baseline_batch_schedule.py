"""The schedule by load against vLLM's own table."""

import re

import numpy as np
import pytest
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from policy.baselines.batch_schedule import BatchScheduleConfig, BatchScheduleController
from policy.contract import Contract
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, step_of

CONTRACT = Contract(DRAFTERS, LENGTHS)
RECORD_AT = {load: step_of([(0, 0, 0)], num_running_reqs=load) for load in range(1, 81)}


def random_schedule(rng):
    """Ascending ranges from 1, with and without gaps, some of a single load."""
    schedule, first = [], 1
    for _ in range(rng.integers(1, 6)):
        last = first + int(rng.integers(0, 12))
        schedule.append((first, last, int(rng.integers(0, 11))))
        first = last + 1 + int(rng.choice([0, 0, 1, 7]))
    return tuple(schedule)


@pytest.mark.parametrize("drafter", [1, 2])
def test_it_takes_the_lengths_that_vllm_takes(drafter):
    rng = np.random.default_rng(drafter)
    for _ in range(100):
        schedule = random_schedule(rng)
        theirs = build_dynamic_sd_schedule_lookup(list(schedule), 80, LENGTHS[drafter])
        controller = BatchScheduleController(
            CONTRACT, BatchScheduleConfig(DRAFTERS[drafter], schedule)
        )
        for load, record in RECORD_AT.items():
            length = theirs[load]
            expected = [[drafter, length]] if length else [[0, 0]]
            assert controller.decide(record, None).tolist() == expected, (schedule, load)


def test_requests_that_run_count_and_not_rows():
    controller = BatchScheduleController(
        CONTRACT, BatchScheduleConfig("ngram", ((1, 4, 5), (5, 8, 1)))
    )
    record = step_of([(0, 0, 0)] * 4, num_running_reqs=5)
    assert controller.decide(record, None).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "schedule",
    [
        (),
        ((2, 4, 3),),
        ((0, 4, 3),),
        ((1, 4, 3), (4, 8, 2)),
        ((5, 8, 2), (1, 4, 3)),
        ((4, 1, 3),),
        ((1, 4, -1),),
    ],
)
def test_a_schedule_that_vllm_would_refuse_is_refused(schedule):
    with pytest.raises(ConfigError) as refusal:
        BatchScheduleConfig("ngram", schedule)
    assert re.fullmatch(r"schedule [^\n]+; [^\n]+\.", str(refusal.value))


def test_an_unknown_drafter_is_named():
    with pytest.raises(ConfigError) as refusal:
        BatchScheduleController(CONTRACT, BatchScheduleConfig("n-gram", ((1, 1, 1),)))
    assert str(refusal.value) == "The engine has no drafter 'n-gram'; did you mean 'ngram'?"
