"""The books of a served scenario, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from envs.scenario import Arrival
from envs.served import Ledger
from envs.workload import WorkloadRequest
from policy.contract import Contract
from policy.step import StepRecord

CONTRACT = Contract(("none", "ngram", "eagle3"), (0, 8, 4))


def arrival(name, arrival_s):
    return Arrival(WorkloadRequest(name, (1,), 9, 0.0, "code"), arrival_s)


def record(req_ids, drafters, lengths, accepted):
    rows = len(req_ids)
    return StepRecord(
        num_running_reqs=rows,
        num_waiting_reqs=0,
        kv_cache_usage=0.0,
        num_prefill_tokens=0,
        num_scheduled_tokens=rows + sum(lengths),
        req_ids=tuple(req_ids),
        num_context_tokens=np.ones(rows, np.int32),
        num_emitted_tokens=np.array(accepted, np.int32) + 1,
        temperature=np.zeros(rows, np.float32),
        drafter=np.array(drafters, np.int32),
        num_draft_tokens=np.array(lengths, np.int32),
        num_accepted_tokens=np.array(accepted, np.int32),
    )


@pytest.fixture
def served():
    ledger = Ledger(CONTRACT)
    ledger.note_arrival(arrival("a", 0.0))
    ledger.note_step(1.0, {}, [], record([], [], [], []))  # a long prompt: no token yet
    ledger.note_step(0.5, {"a": 1}, [], record(["a"], [0], [0], [0]))
    ledger.note_arrival(arrival("b", 1.25))
    ledger.note_step(2.0, {"a": 3, "b": 1}, ["a"], record(["a", "b"], [1, 0], [4, 0], [2, 0]))
    assert ledger.num_unfinished_reqs == 1
    ledger.note_step(1.0, {"b": 2}, ["b"], record(["b"], [2], [3], [1]))
    assert ledger.num_unfinished_reqs == 0
    ledger.skip_to(10.0)
    ledger.skip_to(9.0)
    assert ledger.now_s == 10.0
    ledger.note_arrival(arrival("c", 10.0))
    ledger.note_step(0.25, {"c": 1}, ["c"], record(["c"], [0], [0], [0]))
    return ledger.close(decision_s=0.125)


def test_times_of_requests(served):
    a, b, c = served.requests
    assert [request.request_id for request in served.requests] == ["a", "b", "c"]
    assert (a.first_token_s, a.finish_s, a.num_output_tokens) == (1.5, 3.5, 4)
    assert a.time_to_first_token_s == 1.5
    assert a.time_per_output_token_s == pytest.approx(2 / 3)
    assert (b.time_to_first_token_s, b.time_per_output_token_s) == (2.25, 0.5)
    assert c.time_to_first_token_s == 0.25
    assert np.isnan(c.time_per_output_token_s)


def test_shares_of_the_engines_time_add_up(served):
    assert [request.engine_s for request in served.requests] == [2.5, 2.0, 0.25]
    assert served.busy_s == 4.75
    assert served.num_tokens == 8


def test_drafts_are_counted_and_steps_told(served):
    assert served.num_drafts == {"ngram": 1, "eagle3": 1}
    assert served.num_draft_tokens == {"ngram": 4, "eagle3": 3}
    assert served.num_accepted_tokens == {"ngram": 2, "eagle3": 1}
    steps = served.steps
    np.testing.assert_array_equal(steps["end_s"], [1.0, 1.5, 3.5, 4.5, 10.25])
    np.testing.assert_array_equal(steps["num_tokens"], [0, 1, 4, 2, 1])
    np.testing.assert_array_equal(steps["drafter"], [0, 0, 1, 2, 0])
    np.testing.assert_array_equal(steps["num_draft_tokens"], [0, 0, 2, 3, 0])
    assert served.decision_s == 0.125


def test_without_speculation_there_is_nothing_to_count():
    ledger = Ledger(None)
    ledger.note_arrival(arrival("a", 0.0))
    ledger.note_step(1.0, {"a": 1}, ["a"], None)
    served = ledger.close(decision_s=0.0)
    assert served.num_drafts == {}
    assert served.steps["num_running_reqs"].tolist() == [1]
