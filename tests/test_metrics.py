"""What a hook counts reaches vLLM's metrics, exactly once, and leaves vLLM's own as they are."""

import logging
import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from policy.artifact import load_policy
from policy.contract import Contract
from policy.controllers import PolicyController, SafeController
from policy.observation import ObservationBuilder
from policy.serving import metrics
from policy.serving.counts import (
    CARRIER,
    Reporter,
    pass_on_in_scheduler,
    report_from_worker,
    take_from_stats,
)
from policy.serving.deployment import Deployment
from policy.serving.metrics import PolicyStatLogger

from .exported import export
from .step_history import DRAFTERS, LENGTHS, random_step

CONTRACT = Contract(DRAFTERS, LENGTHS)


class Failing:
    def decide(self, record, observation):
        raise OverflowError


@pytest.fixture
def hook():
    """What a hook counts, without an engine."""
    return SimpleNamespace(
        decision_s=0.0,
        num_decision_steps=0,
        num_decisions=Counter(),
        num_drafts=Counter(),
        num_draft_tokens=Counter(),
        num_accepted_tokens=Counter(),
        num_faults=Counter(),
    )


@pytest.fixture
def deployment():
    guarded = SafeController(Failing(), CONTRACT, (1, 2))
    return Deployment(guarded, CONTRACT, (1, 2), shadow=True)


def step_of(hook, deployment):
    """One decision, with what it drafts and gets accepted."""
    record = random_step(np.random.default_rng(0), ["a", "b"])
    deployment.decide(record, ObservationBuilder(CONTRACT).update(record))
    hook.decision_s += 0.002
    hook.num_decision_steps += 1
    hook.num_decisions["ngram", 2] += 1
    hook.num_drafts["ngram"] += 2
    hook.num_draft_tokens["ngram"] += 4
    hook.num_accepted_tokens["ngram"] += 3
    hook.num_faults["KeyError"] += 1


class Runner:
    def __init__(self, *drafts):
        self.drafts = list(drafts)

    def take_draft_token_ids(self):
        return self.drafts.pop(0)


class Scheduler:
    """Takes drafts and makes statistics as vLLM's does."""

    def __init__(self):
        self.drafted = []

    def update_draft_token_ids(self, drafts):
        self.drafted.append(drafts.draft_token_ids)

    def make_stats(self, *args, **kwargs):
        return SchedulerStats(num_kv_fetch_reqs_by_stage={"in_progress": 1})


def through_the_wire(stats):
    """As the engine's process sends them to the API server's."""
    return MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))


def test_counts_travel_from_the_worker_to_the_api_server_exactly_once(hook, deployment):
    drafts = [DraftTokenIds(["a"], [[1, 2]]), None, DraftTokenIds(["a"], [[3]])]
    runner, scheduler = Runner(*drafts), Scheduler()
    report_from_worker(runner, Reporter(hook, deployment, "fixed"))
    pass_on_in_scheduler(scheduler)
    received = Counter()
    for _ in drafts:
        step_of(hook, deployment)
        taken = pickle.loads(pickle.dumps(runner.take_draft_token_ids()))
        scheduler.update_draft_token_ids(taken)
        stats = through_the_wire(scheduler.make_stats())
        received.update(take_from_stats(stats))
        assert getattr(stats, CARRIER) == {"in_progress": 1}, "vLLM's own part changed"
    assert scheduler.drafted == [[[1, 2]], [], [[3]]], "drafts were lost or made up"
    assert received == {
        ("policy_info", "", "fixed", "shadow"): 1,
        ("decision_steps",): 3,
        ("decision_microseconds",): 6000,
        ("decisions", "ngram", "2"): 3,
        ("shadow_decisions", "ngram", "2"): 3,
        ("drafts", "ngram"): 6,
        ("draft_tokens", "ngram"): 12,
        ("accepted_tokens", "ngram"): 9,
        ("fallbacks", "decision", "OverflowError"): 3,
        ("fallbacks", "drafting", "KeyError"): 3,
    }
    assert take_from_stats(scheduler.make_stats()) == {}


def test_what_statistics_do_not_take_waits_for_the_next(hook, deployment):
    runner, scheduler = Runner(None, None), Scheduler()
    report_from_worker(runner, Reporter(hook, deployment, "fixed"))
    pass_on_in_scheduler(scheduler)
    for _ in range(2):
        step_of(hook, deployment)
        scheduler.update_draft_token_ids(runner.take_draft_token_ids())
    assert take_from_stats(scheduler.make_stats())["drafts", "ngram"] == 4


def test_a_worker_with_nothing_new_hands_over_what_it_drafted(hook, deployment):
    drafts = DraftTokenIds(["a"], [[1]])
    runner = Runner(None, None, drafts)
    report_from_worker(runner, Reporter(hook, deployment, "fixed"))
    assert runner.take_draft_token_ids() is not None  # who decides
    assert runner.take_draft_token_ids() is None
    assert runner.take_draft_token_ids() is drafts
    assert vars(drafts).keys() == {"req_ids", "draft_token_ids"}


def test_a_reloaded_policy_takes_the_place_of_the_old_one(hook, tmp_path):
    old = export(tmp_path / "policy.pt", CONTRACT, action=(1, 1))
    policy = PolicyController(load_policy(tmp_path / "policy.pt"))
    new = export(tmp_path / "policy.pt", CONTRACT, action=(1, 2))
    renewed = PolicyController(load_policy(tmp_path / "policy.pt"))
    deployment = Deployment(SafeController(policy, CONTRACT), CONTRACT, (0, 0), policy=policy)
    reporter = Reporter(hook, deployment, "")
    assert reporter.take() == {f"draftgym|policy_info|{old}|policy|full": 1}
    deployment.policy = renewed
    assert reporter.take() == {
        f"draftgym|policy_info|{old}|policy|full": 0,
        f"draftgym|policy_info|{new}|policy|full": 1,
    }


@pytest.fixture
def lines(caplog, monkeypatch):
    """What our logger writes; vLLM's own, above it, may have been set up by an earlier test."""
    written = []
    keep = logging.Handler()
    keep.emit = lambda record: written.append(record.getMessage())
    caplog.set_level(logging.INFO, logger=metrics.logger.name)
    monkeypatch.setattr(metrics.logger, "handlers", [keep])
    monkeypatch.setattr(metrics.logger, "propagate", False)
    return written


def test_counting_that_fails_costs_counts_and_nothing_else(lines):
    class Broken:
        def take(self):
            raise KeyError("counts")

    drafts = [DraftTokenIds(["a"], [[1]]) for _ in range(3)]
    runner = Runner(*drafts)
    report_from_worker(runner, Broken())
    assert [runner.take_draft_token_ids() for _ in range(3)] == drafts
    model = SimpleNamespace(model_config=SimpleNamespace(served_model_name="target"))
    logger = PolicyStatLogger(model, [3])
    for _ in range(3):
        logger.record(stats_of({"of_another_version|a|b": 1}), None, engine_idx=3)
    assert lines == [
        "Counting decisions failed; requests are not affected.",
        "Recording metrics failed; requests are not affected.",
    ]


def sample(name, **labels):
    labels = {"model_name": "target", "engine": "3", **labels}
    return prometheus_client.REGISTRY.get_sample_value(f"draftgym_{name}", labels)


def stats_of(counts):
    stats = SchedulerStats()
    getattr(stats, CARRIER).update({"draftgym|" + name: n for name, n in counts.items()})
    return stats


def test_counts_become_prometheus_metrics_and_one_line_a_minute(monkeypatch, lines):
    now_s = [0.0]
    monkeypatch.setattr("policy.serving.metrics.time.monotonic", lambda: now_s[0])
    model = SimpleNamespace(model_config=SimpleNamespace(served_model_name="target"))
    loggers = [PolicyStatLogger(model, [3]), PolicyStatLogger(model, [3])]  # engines come and go
    counts = {
        "policy_info|0a1b2c3d4e5f6789|policy|full": 1,
        "decision_steps": 10,
        "decision_microseconds": 1500,
        "decisions|ngram|4": 3,
        "decisions|none|0": 7,
        "drafts|ngram": 5,
        "draft_tokens|ngram": 20,
        "accepted_tokens|ngram": 13,
        "fallbacks|decision|KeyError": 2,
        "reloads|refused": 1,
    }
    for logger in loggers:
        logger.record(stats_of(counts), None, engine_idx=3)
        logger.record(None, None)
    now_s[0] = 59.0
    loggers[0].log()
    assert not lines
    now_s[0] = 61.0
    loggers[0].log()
    loggers[0].log()
    now_s[0] = 200.0
    loggers[0].log()  # nothing was decided since
    (line,) = lines
    assert line == (
        "draftgym 0a1b2c3d4e5f: 10 steps in 61 s; none 70%, ngram 4 30%; accepted ngram 65% of 20 "
        "tokens; 150 us a decision; 2 fallbacks"
    )
    assert sample("decisions_total", drafter="ngram", num_speculative_tokens="4") == 6
    assert sample("draft_tokens_total", drafter="ngram") == 40
    assert sample("accepted_tokens_total", drafter="ngram") == 26
    assert sample("fallbacks_total", stage="decision", reason="KeyError") == 4
    assert sample("reloads_total", outcome="refused") == 2
    assert sample("decision_seconds_total") == pytest.approx(0.003)
    assert sample("decision_steps_total") == 20
    info = {"sha256": "0a1b2c3d4e5f6789", "decider": "policy", "mode": "full"}
    assert sample("policy_info", **info) == 1
    loggers[0].record(stats_of({"policy_info|0a1b2c3d4e5f6789|policy|full": 0}), None, engine_idx=3)
    assert sample("policy_info", **info) == 0
