"""Drafts that a controller shortens once they are made, in the replay and in the hook."""

import numpy as np
import pytest

from envs.scenario import Arrivals, Phase, Scenario
from envs.simulator_state import TraceEngineConfig
from envs.trace_engine import TraceEngine
from envs.workload import WorkloadRequest
from policy.baselines.fixed import FixedController
from policy.contract import Contract
from policy.controllers import SafeController

from .step_history import step_of
from .synthetic_traces import make_cost_model, make_traces

TRACES = make_traces()
CONTRACT = TRACES.contract(None, "request")
NGRAM, EAGLE = (CONTRACT.drafters.index(name) for name in ("ngram", "eagle3"))


def served_by(controller, contract=CONTRACT):
    """Serve every recorded request to its recorded end, four at a time."""
    requests = (
        WorkloadRequest(
            request_id=str(trace),
            prompt_token_ids=tuple(TRACES.prompts[trace].tolist()),
            max_tokens=int(TRACES.num_output_tokens[trace]),
            temperature=TRACES.header.temperature,
            kind=TRACES.kinds[trace],
        )
        for trace in range(TRACES.num_requests)
    )
    arrivals = Arrivals(Scenario((Phase(TRACES.num_requests, concurrency=4),)), requests, seed=0)
    engine = TraceEngine(TRACES, make_cost_model(), contract, TraceEngineConfig())
    return engine.serve(arrivals, controller)


class Scissors:
    """Drafts and cuts at random, and holds every record against what it left of the drafts."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.left = {}
        self.made_passes = self.num_cut = self.num_kept = 0

    def recorded(self, record):
        """Recorded position of each row's next token."""
        traces = [int(req_id) for req_id in record.req_ids]
        num_prompt = np.array([len(TRACES.prompts[trace]) for trace in traces])
        return TRACES.starts[traces] + record.num_context_tokens - num_prompt

    def decide(self, record, observation):
        for row, req_id in enumerate(record.req_ids):
            drafter, length, accepted, made = self.left.pop(req_id, (0, 0, 0, ()))
            assert record.drafter[row] == drafter
            assert record.num_draft_tokens[row] == length
            assert record.num_accepted_tokens[row] == accepted
            known = record.model_states["eagle3"].survival[row]
            np.testing.assert_array_equal(known[: len(made)], made)
            assert np.isnan(known[len(made) :]).all()
        assert record.num_draft_passes >= self.made_passes, "what was cut is charged all the same"
        return self.rng.integers(0, CONTRACT.action_nvec, (record.num_rows, 2))

    def admit(self, record, drafts, survival):
        lengths = self.rng.integers(0, 10, record.num_rows)
        positions = self.recorded(record)
        for row, (drafter, made) in enumerate(drafts.tolist()):
            known, position = survival[row], positions[row]
            if drafter == EAGLE:
                expected = TRACES.drafters["eagle3"].survival[position, :made]
                np.testing.assert_array_equal(known[:made], expected)
                known = known[made:]
            assert np.isnan(known).all()
            kept = min(made, int(lengths[row]))
            self.num_cut += made - kept
            self.num_kept += kept
            accepted = 0
            if kept:
                name = CONTRACT.drafters[drafter]
                accepted = min(kept, int(TRACES.drafters[name].num_accepted_tokens[position]))
            told = survival[row, :made] if drafter == EAGLE else ()
            self.left[record.req_ids[row]] = drafter if kept else 0, kept, accepted, told
        self.made_passes = int(drafts[drafts[:, 0] == EAGLE, 1].max(initial=0))
        return lengths


@pytest.mark.parametrize("seed", range(3))
def test_what_is_cut_is_not_verified_but_was_made(seed):
    scissors = Scissors(seed)
    served = served_by(scissors)
    assert sum(r.num_output_tokens for r in served.requests) == TRACES.num_output_tokens.sum()
    assert min(scissors.num_cut, scissors.num_kept) > 50


class Cutting:
    """A fixed setting, all drafts cut to some length."""

    def __init__(self, drafter, length, most):
        self.decide = FixedController(CONTRACT, drafter, length).decide
        self.most = most

    def admit(self, record, drafts, survival):
        return np.full(record.num_rows, self.most)


def test_to_cut_nothing_is_to_have_no_judge_and_to_cut_all_look_ups_is_to_draft_none():
    def busy_s(controller):
        return served_by(controller).busy_s

    fixed = {length: busy_s(FixedController(CONTRACT, "ngram", length)) for length in (2, 8)}
    assert busy_s(Cutting("ngram", 8, most=99)) == fixed[8]
    assert busy_s(Cutting("ngram", 8, most=2)) == fixed[2] != fixed[8]
    assert busy_s(Cutting("ngram", 8, most=0)) == busy_s(FixedController(CONTRACT, "none"))
    # A model's passes stay charged.
    short = busy_s(FixedController(CONTRACT, "eagle3", 2))
    assert busy_s(Cutting("eagle3", 4, most=2)) > short


def test_a_judge_that_fails_cuts_nothing():
    class Broken(Cutting):
        def admit(self, record, drafts, survival):
            raise RuntimeError

    broken = SafeController(Broken("ngram", 8, 0), CONTRACT)
    assert served_by(broken).busy_s == served_by(FixedController(CONTRACT, "ngram", 8)).busy_s
    assert broken.num_fallbacks["RuntimeError"] > 10


def test_the_hook_shows_a_judge_what_was_drafted_and_hands_on_what_it_admits():
    hook_module = pytest.importorskip("policy.serving.hook")
    contract = Contract(("none", "ngram", "eagle3"), (0, 8, 4), "request")
    shown = []

    class Judge:
        def admit(self, record, drafts, survival):
            shown.append((drafts.tolist(), survival.copy()))
            return np.array([1, 0, 5, 3])

    confidences = np.array([0.9, 0.5, 0.2], np.float32)
    drafted = {
        "a": hook_module._Drafted(2, confidences),
        "b": hook_module._Drafted(2, confidences[:2]),
        "c": hook_module._Drafted(1, np.zeros(0, np.float32)),
    }
    hook = hook_module.SpeculationHook.__new__(hook_module.SpeculationHook)
    hook.controller, hook.contract, hook._drafted = Judge(), contract, dict(drafted)
    record = step_of([(0, 0, 0)] * 4)
    drafts = [[11, 12, 13], [21, 22], [31, 32], []]
    hook._cut_drafts(record, drafts)
    ((made, survival),) = shown
    assert made == [[2, 3], [2, 2], [1, 2], [0, 0]]
    expected = np.full((4, 8), np.nan, np.float32)
    expected[0, :3], expected[1, :2] = confidences, confidences[:2]
    np.testing.assert_array_equal(survival, expected)
    assert drafts == [[11], [], [31, 32], []]
    assert hook._drafted["a"].survival.tolist() == confidences.tolist(), "cut tokens are told too"

    hook.controller, drafts = FixedController(contract, "none"), [[1, 2]] * 4
    hook._cut_drafts(record, drafts)
    assert drafts == [[1, 2]] * 4
