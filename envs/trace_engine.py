"""`TraceEngine`: the engine's protocol on recorded traces, a step in microseconds.

It schedules, drafts, verifies and observes as the live engine does, with step times of the cost
model; `envs.simulator` says what it leaves out. An episode may come from the workload that was
recorded or from `TraceWorkload`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np

from policy.contract import SURVIVAL_DRAFTERS, TOKEN_DRAFTERS, Contract
from policy.controllers import Controller, admitted_lengths, judges_drafts
from policy.cost_model import FEATURES, CostModel, StepShape
from policy.errors import ConfigError, TraceError
from policy.features import ROW, Layout
from policy.step import ModelState, StepRecord, TokenOffer

from .engine import NO_SPECULATION, EngineStep
from .scenario import Arrivals
from .served import Ledger, Served
from .simulator import abort_all, admit, awaits_decision, begin_interval, draft, num_unfinished, run
from .simulator_state import TraceEngineConfig, make_engines, make_replay
from .traces import Traces
from .workload import Episode, WorkloadRequest

_THE_ENGINE = 0
"""Index of the one engine among the simulator's."""


class TraceEngine:
    """Replays traces one decision at a time.

    Args:
        traces: What the drafters would have got accepted.
        cost_model: Step times.
        contract: Drafters and lengths, at most those recorded.
        config: The engine that is simulated.

    Raises:
        TraceError: If the traces lack a drafter or a length of the contract.
    """

    def __init__(
        self,
        traces: Traces,
        cost_model: CostModel,
        contract: Contract,
        config: TraceEngineConfig | None = None,
    ) -> None:
        self.config = config or TraceEngineConfig()
        self._contract = contract
        self._traces = traces
        self._layout = Layout.of(contract)
        self._replay = make_replay(traces, cost_model, contract, self.config)
        self._engines = make_engines(contract, self.config, num_engines=1)
        self._by_prompt = {prompt.tobytes(): i for i, prompt in enumerate(traces.prompts)}
        self._positions = np.arange(self._engines.table.survival.shape[2])
        self._req_ids: list[str] = []
        self._finished: set[str] = set()
        self._episode: Episode | None = None
        self._episode_time_s = 0.0

    @property
    def contract(self) -> Contract:
        """Observation and action table."""
        return self._contract

    def reset(self, episode: Episode) -> EngineStep:
        """Abort what runs, admit the episode's first requests, go to the first decision."""
        self._abort_all()
        self._episode = episode
        self._episode_time_s = 0.0
        begin_interval(self._engines, _THE_ENGINE)
        return self._advance_to_decision()

    def step(self, actions: np.ndarray) -> EngineStep:
        """Draft as decided, verify, and go on to the next decision.

        Args:
            actions: As the contract's, integers `[1, …]` or `[rows, …]`.
        """
        begin_interval(self._engines, _THE_ENGINE)
        self._draft(actions)
        self._run()
        return self._advance_to_decision()

    def serve(self, arrivals: Arrivals, controller: Controller) -> Served:
        """Serve a scenario to its end, the controller deciding as in the production hook.

        Requests beyond `max_num_seqs` wait; an engine without requests skips to the next one. It
        starts anew, so that what was served before makes no difference.

        Args:
            arrivals: The scenario's requests.
            controller: Decides after every step that gave a request a token.
        """
        self._engines = make_engines(self._contract, self.config, num_engines=1)
        self._req_ids.clear()
        self._finished.clear()
        ledger, waiting = Ledger(self._contract), deque[WorkloadRequest]()
        decision_s = 0.0
        step: EngineStep | None = None
        while (due := ledger.take_due(arrivals)) is not None:
            waiting += due
            while waiting and num_unfinished(self._engines, _THE_ENGINE) < self.config.max_num_seqs:
                self._admit(waiting.popleft())
            self._engines.counters[_THE_ENGINE]["num_queued"] = len(waiting)
            if step is not None and step.record.num_rows:
                began_s = time.perf_counter()
                self._draft(controller.decide(step.record, step.observation))
                self._cut_drafts(controller, step.record)
                decision_s += time.perf_counter() - began_s
            step = self._serve_step(ledger)
        return ledger.close(decision_s)

    def _serve_step(self, ledger: Ledger) -> EngineStep:
        """Run one engine step and enter it into the ledger."""
        begin_interval(self._engines, _THE_ENGINE)
        requests = self._engines.requests[_THE_ENGINE]
        num_before = dict(
            zip(self._req_ids, requests["num_emitted"][: len(self._req_ids)].tolist(), strict=True)
        )
        self._run()
        num_emitted: dict[str, int] = {}
        finished = []
        for i, name in enumerate(self._req_ids):
            if count := int(requests["num_emitted"][i]) - num_before[name]:
                num_emitted[name] = count
            if requests["has_ended"][i]:
                finished.append(name)
        step = self._engine_step()
        ledger.note_step(step.step_time_s, num_emitted, finished, step.record)
        return step

    def close(self) -> None:
        """There is nothing to free."""

    def _abort_all(self) -> None:
        self._finished |= set(self._req_ids)
        self._req_ids.clear()
        abort_all(self._replay, self._engines, _THE_ENGINE)

    def _advance_to_decision(self) -> EngineStep:
        assert self._episode is not None
        engines = self._engines
        while True:
            unfinished = num_unfinished(engines, _THE_ENGINE)
            due = self._episode.take_due(unfinished, self._episode_time_s)
            if unfinished + len(due) > self.config.max_num_seqs:
                raise ConfigError(
                    f"A load of {unfinished + len(due)} requests exceeds max_num_seqs "
                    f"{self.config.max_num_seqs}; raise it or lower the load."
                )
            for request in due:
                self._admit(request)
            if awaits_decision(engines, _THE_ENGINE):
                return self._engine_step()
            if engines.counters[_THE_ENGINE]["num_rows"]:
                self._draft(NO_SPECULATION)
            self._run()

    def _admit(self, request: WorkloadRequest) -> None:
        trace = self._by_prompt.get(np.asarray(request.prompt_token_ids, np.int32).tobytes())
        if trace is None:
            raise TraceError(
                f"The traces do not hold the prompt of {request.request_id}; collect them from "
                "this workload."
            )
        recorded = int(self._traces.num_output_tokens[trace])
        if request.max_tokens > recorded and not self._traces.is_stopped[trace]:
            raise TraceError(
                f"The traces hold {recorded} output tokens of {request.request_id}, not "
                f"{request.max_tokens}; lower workload.output_tokens or collect longer ones."
            )
        self._req_ids.append(request.request_id)
        admit(self._replay, self._engines, _THE_ENGINE, trace, request.max_tokens)

    def _draft(self, actions: np.ndarray) -> None:
        canonical = self._contract.canonical_actions(np.asarray(actions))
        draft(self._replay, self._engines, _THE_ENGINE, canonical)

    def _cut_drafts(self, controller: Controller, record: StepRecord) -> None:
        """Let a controller that judges drafts shorten them; their making stays charged."""
        if not judges_drafts(controller):
            return
        requests = self._engines.requests[_THE_ENGINE]
        entries = self._engines.row_entry[_THE_ENGINE, : record.num_rows]
        drafters, lengths = (
            requests[name][entries].astype(np.int64) for name in ("draft_drafter", "draft_length")
        )
        survival = self._survival(entries, drafters)
        survival[np.arange(survival.shape[1]) >= lengths[:, None]] = np.nan
        admitted = admitted_lengths(
            controller, record, np.stack((drafters, lengths), axis=1), survival
        )
        if admitted is not None:
            kept = np.minimum(lengths, admitted)
            requests["draft_length"][entries] = kept
            requests["draft_drafter"][entries] = np.where(kept > 0, drafters, 0)

    def _survival(self, entries: np.ndarray, drafters: np.ndarray) -> np.ndarray:
        """Survival of what drafters would draft now, float32 `[entries, max length]`."""
        replay, requests = self._replay, self._engines.requests[_THE_ENGINE]
        source = replay.recorded[requests["trace"][entries]]
        num_emitted = requests["num_emitted"][entries]
        at = source["first"] + np.minimum(num_emitted, source["num_outputs"] - 1)
        survival = replay.survival[replay.teller[drafters], at].copy()
        survival[(replay.teller[drafters] < 0) | (num_emitted >= source["num_outputs"])] = np.nan
        return survival

    def _run(self) -> None:
        counters = self._engines.counters[_THE_ENGINE]
        has_ended = self._engines.requests[_THE_ENGINE]["has_ended"]
        self._finished |= {name for i, name in enumerate(self._req_ids) if has_ended[i]}
        self._req_ids = [name for i, name in enumerate(self._req_ids) if not has_ended[i]]
        before_s = counters["seconds"]
        run(self._layout, self._replay, self._engines, _THE_ENGINE)
        self._episode_time_s += counters["seconds"] - before_s

    def _engine_step(self) -> EngineStep:
        engines = self._engines
        record = self._record()
        num_rows = record.num_rows if self._replay.per_request else 1
        work = engines.shape[_THE_ENGINE].astype(int).tolist()
        counters = engines.counters[_THE_ENGINE]
        return EngineStep(
            record=record,
            observation=engines.observation[_THE_ENGINE, :num_rows].copy(),
            num_tokens=int(counters["num_tokens"]),
            step_time_s=float(counters["seconds"]),
            num_finished_reqs=int(counters["num_finished"]),
            shape=StepShape(record.num_running_reqs, **dict(zip(FEATURES, work, strict=True))),
        )

    def _record(self) -> StepRecord:
        """The last step as the live engine's hook would tell it."""
        engines, table = self._engines, self._engines.table
        counters = engines.counters[_THE_ENGINE]
        num_rows = int(counters["num_rows"])
        rows = table.rows[_THE_ENGINE, :num_rows].copy()
        running, waiting, kv_cache_usage, prefill = engines.load[_THE_ENGINE].tolist()
        finished, self._finished = frozenset(self._finished), set()

        told = table.told[_THE_ENGINE, :, :, :num_rows].copy()
        agreement = table.agreement[_THE_ENGINE, :, :num_rows].copy()
        survival = table.survival[_THE_ENGINE, :num_rows].copy()
        entries = engines.row_entry[_THE_ENGINE, :num_rows]
        num_made = engines.requests[_THE_ENGINE]["num_made"][entries]
        survival[self._positions >= num_made[:, None]] = np.nan
        offers: dict[str, TokenOffer] = {}
        states: dict[str, ModelState] = {}
        for index, drafter in enumerate(self._contract.proposers):
            if drafter in TOKEN_DRAFTERS:
                match_length, num_draft_tokens, counterfactual = told[index]
                offer = TokenOffer(match_length, num_draft_tokens, counterfactual)
                if drafter in SURVIVAL_DRAFTERS:
                    known = self._survival(entries, np.full(num_rows, index + 1))
                    survival_shown = known[:, : self._contract.max_lengths[index + 1]]
                    offers[drafter] = replace(offer, survival=survival_shown)
                else:
                    offers[drafter] = replace(offer, agreement=agreement[index])
            else:
                states[drafter] = ModelState(
                    told[index, 0].astype(bool),
                    told[index, 1],
                    survival,
                )
        return StepRecord(
            num_running_reqs=int(running),
            num_waiting_reqs=int(waiting),
            kv_cache_usage=kv_cache_usage,
            num_prefill_tokens=int(prefill),
            num_scheduled_tokens=int(counters["num_scheduled_tokens"]),
            req_ids=tuple(self._req_ids[i] for i in entries),
            num_draft_passes=int(counters["step_passes"]),
            num_draft_pass_tokens=int(counters["step_pass_tokens"]),
            **{name: rows[name] for name in ROW.names or ()},
            finished_req_ids=finished,
            token_offers=offers,
            model_states=states,
        )
