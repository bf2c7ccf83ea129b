"""The replay told once more, slowly: positions instead of counts, lists instead of arrays.

It follows vLLM 0.32's scheduler (`Scheduler.schedule`) and this repository's hook and proposer,
not the compiled simulator, and prices each step by hand.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from envs.engine import EngineStep
from policy.combinations import Combinations
from policy.contract import MODEL_DRAFTERS, TOKEN_DRAFTERS
from policy.cost_model import NO_WORK, StepShape
from policy.observation import ObservationBuilder
from policy.step import ModelState, StepRecord, TokenOffer


@dataclass(eq=False)
class Request:
    """Positions count from the first prompt token; `computed` are in the target's KV cache."""

    name: str
    trace: int
    num_prompt: int
    limit: int
    max_tokens: int
    computed: int
    read: int
    outputs: int = 0
    is_fresh: bool = True
    is_running: bool = False
    drafter: str = "none"
    num_draft: int = 0
    num_made: int = 0
    final: int = 0
    open_offers: dict = field(default_factory=dict)

    @property
    def has_ended(self):
        return self.outputs == self.limit

    @property
    def pending(self):
        return self.computed - self.read


class PlainEngine:
    """An engine on traces, one request and one position at a time; `events` counts what came up."""

    def __init__(self, traces, cost_model, contract, config):
        self.traces = traces
        self.cost_model = cost_model
        self.contract = contract
        self.config = config
        self.longest = dict(zip(contract.drafters, contract.max_lengths, strict=True))
        self.model = next(iter(contract.model_drafters), None)
        self.builder = ObservationBuilder(contract)
        self.combinations = Combinations.of(contract, config.combination_min_match)
        self.requests = []
        self.rows = []
        self.scheduled = []
        self.steps_since_draft = 0
        self.passes = self.pass_tokens = 0
        self.finished = set()
        self.events = Counter()

    def reset(self, episode):
        self.finished |= {request.name for request in self.requests}
        self.requests, self.rows = [], []
        self.episode, self.episode_time_s = episode, 0.0
        self.begin()
        return self.advance()

    def step(self, actions):
        self.begin()
        self.draft(actions)
        self.run()
        return self.advance()

    def begin(self):
        self.num_tokens = self.num_finished = 0
        self.seconds, self.shape = 0.0, NO_WORK
        self.told_finished = set()

    def advance(self):
        while True:
            for due in self.episode.take_due(len(self.requests), self.episode_time_s):
                self.admit(due)
            if any(not request.has_ended for request in self.rows):
                return EngineStep(
                    self.record,
                    self.observation,
                    self.num_tokens,
                    self.seconds,
                    self.num_finished,
                    self.shape,
                )
            if self.rows:
                self.events["a batch ended whole"] += 1
                self.draft(np.zeros((1, 2), int))
            self.run()

    def admit(self, due):
        (trace,) = (
            index
            for index, prompt in enumerate(self.traces.prompts)
            if prompt.tolist() == list(due.prompt_token_ids)
        )
        num_prompt = len(due.prompt_token_ids)
        cached = 0
        if self.config.prompts_are_cached:
            cached = (num_prompt - 1) // self.config.block_size * self.config.block_size
        if not self.config.has_prefill:
            cached = num_prompt - 1
        recorded = len(self.traces.outputs(trace))
        limit = min(due.max_tokens, recorded)
        self.requests.append(
            Request(due.request_id, trace, num_prompt, limit, due.max_tokens, cached, cached)
        )

    def schedule(self):
        """Pairs of request and tokens, running requests first, as vLLM does."""
        budget = self.config.max_num_batched_tokens
        scheduled, has_prefill = [], False
        for request in [request for request in self.requests if request.is_running]:
            wanted = request.num_prompt + request.outputs + request.num_draft - request.computed
            if budget == 0:
                self.events["a running request found no room"] += 1
                continue
            has_prefill |= request.outputs == 0
            scheduled.append((request, min(wanted, budget)))
            budget -= scheduled[-1][1]
        num_waiting = 0
        for request in [request for request in self.requests if not request.is_running]:
            wanted = request.num_prompt - request.computed
            if self.config.has_prefill and wanted == 1 and not has_prefill:
                wanted += self.contract.max_num_speculative_tokens
                self.events["a cached prompt was padded"] += 1
                if wanted > budget:
                    budget = 0
            if budget == 0:
                num_waiting += 1
                self.events["a new request had to wait"] += 1
                continue
            request.is_running = True
            scheduled.append((request, min(wanted, budget)))
            budget -= scheduled[-1][1]
        return scheduled, num_waiting

    def run(self):
        scheduled, num_waiting = self.schedule()
        self.steps_since_draft += 1
        self.scheduled = [request for request, _ in scheduled]
        self.rows, told, num_prefill, num_blocks, num_tokens = [], [], 0, 0, 0
        for request, tokens in scheduled:
            start, context = request.computed, request.num_prompt + request.outputs
            num_blocks += -(-(start + tokens) // self.config.block_size)
            verified = 0
            if request.outputs:
                verified = min(request.num_draft, tokens - 1)
                self.events["a draft was cut by the budget"] += verified < request.num_draft
            is_prompt = request.outputs == 0 and tokens > 1
            num_prefill += tokens if is_prompt else 0
            is_chunk = request.outputs == 0 and start + tokens < request.num_prompt
            accepted = 0
            at = self.traces.starts[request.trace] + request.outputs
            if verified:
                trace = self.traces.drafters[request.drafter]
                accepted = min(verified, int(trace.num_accepted_tokens[at]))
            request.computed = start + tokens if is_chunk else context + accepted
            request.final = request.computed - start
            if request.is_fresh and request.pending > self.config.max_num_batched_tokens:
                request.is_fresh = False
                self.events["more waited than one pass reads"] += 1
            if not request.is_fresh or self.model is None:
                request.read = request.computed
            if is_chunk:
                self.events["a prompt was read in parts"] += 1
                continue
            emitted = min(accepted + 1, request.limit - request.outputs)
            request.outputs += emitted
            num_tokens += emitted
            self.rows.append(request)
            told.append((request, context + accepted + 1, verified, accepted, at))
        passes, pass_tokens = self.passes, self.pass_tokens
        self.passes = self.pass_tokens = 0
        self.record = self.tell(
            told,
            num_running_reqs=len(scheduled),
            num_waiting_reqs=num_waiting,
            kv_cache_usage=min(1.0, num_blocks / self.config.num_kv_blocks),
            num_prefill_tokens=num_prefill,
            num_scheduled_tokens=sum(tokens for _, tokens in scheduled),
            num_draft_passes=passes,
            num_draft_pass_tokens=pass_tokens,
        )
        self.price(self.record)
        ended = {request.name for request in self.requests if request.has_ended}
        self.requests = [request for request in self.requests if not request.has_ended]
        self.finished |= ended
        self.num_tokens += num_tokens
        self.num_finished += len(ended)
        if self.rows:
            self.observation = self.builder.update(self.record)
        else:
            self.events["a step without a row"] += 1
            self.builder.forget(self.record.finished_req_ids)
            self.read_overdue()

    def tell(self, told, **load):
        """The record of a step, from `(request, context, verified, accepted, position)` a row."""
        drafters = [request.drafter if verified else "none" for request, _, verified, *_ in told]
        self.finished, finished = set(), frozenset(self.finished)
        self.told_finished |= finished
        width = max(1, self.contract.max_num_speculative_tokens)
        survival = np.full((len(told), width), np.nan, np.float32)
        for row, (request, *_, at) in enumerate(told):
            if request.num_made:
                made = self.traces.drafters[self.model].survival[at, : request.num_made]
                survival[row, : request.num_made] = made

        def column(values, dtype=np.int32):
            return np.array(list(values), dtype)

        return StepRecord(
            **load,
            req_ids=tuple(request.name for request, *_ in told),
            num_context_tokens=column(context for _, context, *_ in told),
            num_emitted_tokens=column(accepted + 1 for *_, accepted, _ in told),
            temperature=np.full(len(told), self.traces.header.temperature, np.float32),
            drafter=column(map(self.contract.drafters.index, drafters)),
            num_draft_tokens=column(verified for _, _, verified, *_ in told),
            num_accepted_tokens=column(accepted for *_, accepted, _ in told),
            finished_req_ids=finished,
            token_offers={
                drafter: self.token_offer(drafter, [request for request, *_ in told])
                for drafter in self.contract.drafters
                if drafter in TOKEN_DRAFTERS
            },
            model_states={
                drafter: ModelState(
                    column((request.is_fresh for request, *_ in told), bool),
                    column(request.pending for request, *_ in told),
                    survival,
                )
                for drafter in self.contract.model_drafters
            },
        )

    def drafted_at(self, drafter, request):
        """Position in the traces, and what the drafter would draft there at most."""
        if request.outputs >= len(self.traces.outputs(request.trace)):
            return None, 0
        at = self.traces.starts[request.trace] + request.outputs
        drafted = int(self.traces.drafters[drafter].num_draft_tokens[at])
        return at, min(drafted, self.longest[drafter])

    def token_offer(self, drafter, requests):
        """`offer` of each request, and the survival of the tokens on offer now."""
        told = [self.offer(drafter, request) for request in requests]
        trace, longest = self.traces.drafters[drafter], self.longest[drafter]
        survival = np.full((len(requests), longest), np.nan, np.float32)
        for row, request in enumerate(requests):
            at, length = self.drafted_at(drafter, request)
            if at is not None and trace.survival is not None:
                survival[row, :length] = trace.survival[at, :length]
        *columns, agreement = np.array(told, np.float64).reshape(-1, 4).T
        return TokenOffer(
            *(column.astype(np.int32) for column in columns),
            agreement=None if trace.agreement is None else agreement.astype(np.float32),
            survival=None if trace.survival is None else survival,
        )

    def offer(self, drafter, request):
        """Match length, tokens on offer now, the fate of an earlier offer, and agreement."""
        fate = -1
        if drafter in request.open_offers:
            made_after, length, accepted = request.open_offers[drafter]
            seen = request.outputs - made_after
            if seen >= length or seen > accepted:
                fate = accepted
                del request.open_offers[drafter]
        at, length = self.drafted_at(drafter, request)
        if at is None:
            return 0, 0, fate, 0.0
        trace = self.traces.drafters[drafter]
        if length and drafter not in request.open_offers:
            accepted = min(length, int(trace.num_accepted_tokens[at]))
            request.open_offers[drafter] = request.outputs, length, accepted
        agreement = 0.0 if trace.agreement is None else float(trace.agreement[at])
        return int(trace.match_length[at]), length, fate, agreement

    def price(self, record):
        has_model = [
            self.contract.drafters[drafter] in MODEL_DRAFTERS for drafter in record.drafter
        ]
        has_token = [
            self.contract.drafters[drafter] in TOKEN_DRAFTERS for drafter in record.drafter
        ]
        work = StepShape(
            num_running_reqs=record.num_running_reqs,
            num_verified_tokens=record.num_scheduled_tokens - record.num_prefill_tokens,
            num_context_tokens=int(record.num_context_tokens.sum()),
            num_prefill_tokens=record.num_prefill_tokens,
            num_model_drafts=int(any(has_model)),
            num_draft_passes=record.num_draft_passes,
            num_draft_pass_tokens=record.num_draft_pass_tokens,
            num_draft_context_tokens=int(record.num_context_tokens[has_model].sum()),
        )
        seconds = self.cost_model.expected_s(work)
        if any(has_token):
            target = StepShape(
                num_running_reqs=record.num_running_reqs,
                num_verified_tokens=work.num_verified_tokens,
                num_context_tokens=work.num_context_tokens,
            )
            seconds += self.cost_model.token_draft_share * self.cost_model.expected_s(target)
        self.seconds += seconds
        self.episode_time_s += seconds
        self.shape = self.shape.followed_by(work)

    def draft(self, actions):
        actions = [self.contract.canonical_action(action) for action in actions]
        actions = actions if len(actions) > 1 else actions * len(self.rows)
        if self.rows:
            chosen = np.array(actions, np.int64)
            actions = self.builder.resolve(self.combinations, self.record, chosen).tolist()
            self.events["a member drafted for a combination"] += (chosen != actions).any()
        asked = []
        for request, (index, length, *number) in zip(self.rows, actions, strict=True):
            request.drafter, request.num_draft, request.num_made = "none", 0, 0
            cutoff = (0.0, *self.contract.cutoffs)[number[0] if number else 0]
            room = min(
                request.max_tokens - request.outputs - 1,
                self.config.max_model_len - 1 - request.num_prompt - request.outputs,
            )
            self.events["a draft was cut by the request's end"] += length > max(room, 0)
            drafter, length = self.contract.drafters[index], min(length, room)
            if length <= 0:
                continue
            if drafter in MODEL_DRAFTERS:
                asked.append((request, length, cutoff))
                continue
            at, longest = self.drafted_at(drafter, request)
            request.num_draft = self.confident(drafter, at, min(length, longest), cutoff)
            request.drafter = drafter if request.num_draft else "none"
        able = [which for which in asked if which[0].is_fresh and which[0].pending]
        self.events["the model drafter was of no use"] += len(able) < len(asked)
        if able:
            self.read_in_passes(
                [request for request, *_ in able], max(length for _, length, _ in asked)
            )
            self.steps_since_draft = 0
            for request, length, cutoff in able:
                at, longest = self.drafted_at(self.model, request)
                request.num_made = min(length, longest)
                request.num_draft = self.confident(self.model, at, request.num_made, cutoff)
                request.drafter = self.model if request.num_draft else "none"
        self.read_overdue()

    def confident(self, drafter, at, length, cutoff):
        """Leading tokens of a draft of this length that are likely enough, where it is told."""
        survival = self.traces.drafters[drafter].survival
        if survival is None or not length:
            return length
        kept = [survival[at, position] > np.float32(cutoff) for position in range(length)]
        if False in kept:
            self.events["a draft was cut by its cutoff"] += 1
            return kept.index(False)
        return length

    def read_overdue(self):
        if self.model is None:
            return
        waiting = [request for request in self.scheduled if request.pending]
        long = [request for request in waiting if request.pending > self.config.max_pending_tokens]
        if self.steps_since_draft > self.config.dormant_after:
            for request in long:
                self.events["a dormant drafter gave up"] += 1
                request.is_fresh, request.read = False, request.computed
            return
        most = 1 + self.contract.max_num_speculative_tokens
        due = [request for request in waiting if request in long or request.final > most]
        self.events["a prompt or backlog was read at once"] += bool(due)
        self.read_in_passes(due, 0)

    def read_in_passes(self, requests, length):
        """Forward passes over what the requests have unread, then `length - 1` more tokens each."""
        groups, room = [], 0
        for request in requests:
            if request.pending > room:
                groups.append([])
                room = self.config.max_num_batched_tokens
            groups[-1].append(request)
            room -= request.pending
        self.events["the model drafter read in several passes"] += len(groups) > 1
        for group in groups:
            self.passes += max(1, length)
            self.pass_tokens += sum(request.pending for request in group)
            self.pass_tokens += max(0, length - 1) * len(group)
        for request in requests:
            request.read = request.computed
