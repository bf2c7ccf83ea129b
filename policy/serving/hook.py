"""The seam into vLLM 0.32: what a step did comes out, draft tokens go in.

vLLM's model runner drafts in `propose_draft_token_ids` and hands the drafts to the scheduler in
`take_draft_token_ids`. On one runner instance the first is replaced by a method that only keeps
its arguments, the second by the decision point: record the step, observe, decide, draft. Classes
stay untouched. With `controller=None` the decision is left to the caller (the training
environment), through the same code. Everything version-specific is here and in `proposer.py`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from ..combinations import Combinations
from ..contract import MODEL_DRAFTERS, Contract, Granularity
from ..controllers import Controller, admitted_lengths, judges_drafts
from ..observation import ObservationBuilder
from ..step import StepRecord
from .config import DrafterSettings
from .drafters import make_token_drafters
from .proposer import ModelDrafter, TargetStep
from .token_drafter import Contexts, Draft

logger = logging.getLogger("vllm.draftgym")

LOAD_ATTRIBUTE = "draftgym_load"
"""Attribute that carries `(waiting requests, KV-cache usage)` on vLLM's SchedulerOutput."""


@dataclass(frozen=True)
class Decision:
    """A decision point: the step just done and what the policy sees of it."""

    record: StepRecord
    observation: np.ndarray


@dataclass(frozen=True)
class Probe:
    """What a drafter would draft at a decision, row by row.

    Attributes:
        token_ids: One list per row; empty without a draft.
        survival: float32 `[rows, max length]`, NaN where unknown and where nothing is drafted.
        margin: Gap between the two largest logits of each token, of the same shape.
    """

    token_ids: list[list[int]]
    survival: np.ndarray
    margin: np.ndarray


@dataclass(frozen=True)
class _Drafted:
    """What was drafted for a request; cut tokens do not wait for verification.

    Attributes:
        drafter: Index of the drafter.
        survival: Of every token that was drafted, cut ones included.
        cutoff: Survival that a token must exceed to be verified.
    """

    drafter: int
    survival: np.ndarray
    cutoff: float = 0.0

    def num_confident(self, num_tokens: int) -> int:
        """Leading tokens, of so many, whose survival exceeds the cutoff or is not known."""
        doubtful = np.flatnonzero(self.survival[:num_tokens] <= self.cutoff)
        return int(doubtful[0]) if len(doubtful) else num_tokens


_UNKNOWN_DRAFT = _Drafted(0, np.zeros(0, np.float32))


class SpeculationHook:
    """Drives the speculation of one vLLM model runner.

    Args:
        runner: `GPUModelRunner` (or the CPU's) of vLLM 0.32 with a speculative configuration.
        contract: Observation and action table.
        settings: How the drafters work.
        controller: Decides; None leaves the decision to `pending` and `draft`.
        is_serving: Whether a fault while recording or drafting costs a step its drafts, as in
            production, or is raised, as in training and tests.
    """

    def __init__(
        self,
        runner: Any,
        contract: Contract,
        settings: DrafterSettings,
        controller: Controller | None,
        *,
        is_serving: bool = False,
    ) -> None:
        self.contract = contract
        self.controller = controller
        self.pending: Decision | None = None
        self.last_record: StepRecord | None = None
        self.decision_s = 0.0
        self.num_decision_steps = 0
        self.num_faults: Counter[str] = Counter()
        self.num_decisions: Counter[tuple[str, int]] = Counter()
        self.num_drafts: Counter[str] = Counter()
        self.num_draft_tokens: Counter[str] = Counter()
        self.num_accepted_tokens: Counter[str] = Counter()
        self._runner = runner
        self._is_serving = is_serving
        self._builder = ObservationBuilder(contract)
        self._combinations = Combinations.of(contract, settings.combination_min_match)
        self._max_model_len: int = runner.max_model_len
        self._token_drafters = make_token_drafters(contract, settings, self._max_model_len)
        self._model: ModelDrafter | None = None
        if contract.model_drafters:
            self._model = ModelDrafter(
                runner,
                dormant_after=settings.dormant_after,
                max_pending_tokens=settings.max_pending_tokens,
            )
        self._engine_rows = np.zeros(0, np.intp)
        self._drafted: dict[str, _Drafted] = {}
        self._known_req_ids: set[str] = set()
        self._captured: tuple[Any, ...] | None = None
        self._sample_hidden_states: torch.Tensor | None = None
        self._spec_decode_metadata: Any = None

    def install(self) -> None:
        """Replace the runner's two drafting methods, on this instance only."""
        self._runner.propose_draft_token_ids = self._capture
        self._runner.take_draft_token_ids = self._take
        # vLLM skips drafting for the whole batch when one request nears the maximal length, which
        # would leave holes in the drafter's KV cache; here each draft is clipped on its own.
        self._runner._input_fits_in_drafter = lambda attn_metadata: attn_metadata is not None

    def hand_over(self, controller: Controller, granularity: Granularity) -> None:
        """Let another controller decide, which knows nothing of the steps before.

        Args:
            controller: Decides from the next step on.
            granularity: Whether it observes the batch, or each request too.
        """
        self.controller = controller
        self._builder = ObservationBuilder(replace(self.contract, granularity=granularity))

    def drafting_methods(self) -> list[tuple[Any, str]]:
        """Objects and names of their methods that take the time of drafting, for a clock."""
        methods: list[tuple[Any, str]] = [(self, "_draft"), (self, "_read_overdue")]
        methods += [(drafter, "offer") for drafter in self._token_drafters.values()]
        return methods if self._model is None else [*methods, (self._model, "observe")]

    def _capture(self, *arguments: Any) -> list[list[int]]:
        """Stand in for `GPUModelRunner.propose_draft_token_ids`: keep what it would use."""
        self._captured = arguments
        return [[] for _ in range(self._runner.input_batch.num_reqs)]

    def _take(self) -> DraftTokenIds | None:
        """Stand in for `GPUModelRunner.take_draft_token_ids`: never takes a server down."""
        captured, self._captured = self._captured, None
        if captured is None:
            return None
        try:
            return self._decide(captured)
        except Exception as error:
            if not self._is_serving:
                raise
            reason = type(error).__name__
            if not self.num_faults[reason]:
                logger.exception("Drafting failed; this step and others like it go undrafted.")
            self.num_faults[reason] += 1
            return None

    @torch.inference_mode()
    def _decide(self, captured: tuple[Any, ...]) -> DraftTokenIds | None:
        """The decision point: record the step, observe, decide, draft."""
        record = self.last_record = self._record_step(*captured)
        self._count(record)
        if not record.num_rows:
            self._builder.forget(record.finished_req_ids)
            self._read_overdue()
            return None
        started_s = time.perf_counter()
        observation = self._builder.update(record)
        self.pending = Decision(record, observation)
        if self.controller is None:
            return None
        actions = self.controller.decide(record, observation)
        self.decision_s += time.perf_counter() - started_s
        self.num_decision_steps += 1
        return self.draft(actions)

    @torch.inference_mode()
    def draft(self, actions: np.ndarray) -> DraftTokenIds:
        """Draft as decided, for the rows of the pending decision.

        Args:
            actions: Integers `[1, 2]` or `[rows, 2]`, drafter index and draft length, or with a
                third column, the cutoff's number.

        Returns:
            One list of draft tokens per row, ready for vLLM's scheduler.
        """
        assert self.pending is not None
        record, self.pending = self.pending.record, None
        canonical = self.contract.canonical_actions(np.asarray(actions))
        for (index, length), count in zip(
            *np.unique(canonical[:, :2], axis=0, return_counts=True), strict=True
        ):
            self.num_decisions[self.contract.drafters[index], int(length)] += int(count)
        canonical = np.broadcast_to(canonical, (record.num_rows, canonical.shape[1]))
        cutoffs = self.contract.cutoff_values(canonical).tolist()
        canonical = self._builder.resolve(self._combinations, record, canonical)
        lengths = np.minimum(canonical[:, 1], self._room(record))
        drafts: list[list[int]] = [[] for _ in range(record.num_rows)]
        for req_id in record.req_ids:
            self._drafted.pop(req_id, None)
        for index, drafter in enumerate(self.contract.proposers, start=1):
            rows = np.flatnonzero((canonical[:, 0] == index) & (lengths > 0))
            if not len(rows):
                continue
            for row, draft in zip(rows, self._draft(drafter, rows, lengths[rows]), strict=True):
                if draft.token_ids:
                    made = _Drafted(index, draft.survival, cutoffs[row])
                    drafts[row] = draft.token_ids[: made.num_confident(len(draft.token_ids))]
                    self._drafted[record.req_ids[row]] = made
        self._read_overdue()
        self._cut_drafts(record, drafts)
        return DraftTokenIds(list(record.req_ids), drafts)

    def _cut_drafts(self, record: StepRecord, drafts: list[list[int]]) -> None:
        """Let a controller that judges drafts shorten them, in place."""
        if not judges_drafts(self.controller):
            return
        made = np.zeros((record.num_rows, 2), np.int64)
        survival = np.full(
            (record.num_rows, self.contract.max_num_speculative_tokens), np.nan, np.float32
        )
        for row, req_id in enumerate(record.req_ids):
            drafted = self._drafted.get(req_id, _UNKNOWN_DRAFT)
            if drafts[row]:
                made[row] = drafted.drafter, len(drafts[row])
            survival[row, : len(drafted.survival)] = drafted.survival
        lengths = admitted_lengths(self.controller, record, made, survival)
        if lengths is None:
            return
        for row, length in enumerate(lengths.tolist()):
            drafts[row] = drafts[row][:length]

    @torch.inference_mode()
    def probe(self) -> dict[str, Probe]:
        """Draft with every drafter at full length for the pending decision, and submit nothing.

        The decision stays pending, for `draft` without speculation: the model drafter has read
        everything now and would not draft again. A request's own token limit does not shorten the
        drafts, so that a replay may ask for fewer tokens than were recorded.
        """
        assert self.pending is not None
        record = self.pending.record
        room = np.maximum(self._max_model_len - 1 - record.num_context_tokens, 0)
        return {
            drafter: self._probe(drafter, length, np.minimum(length, room))
            for drafter, length in zip(
                self.contract.proposers, self.contract.max_lengths[1:], strict=False
            )
        }

    def _probe(self, drafter: str, length: int, lengths: np.ndarray) -> Probe:
        if drafter not in MODEL_DRAFTERS:
            drafts = self._token_drafters[drafter].draft(np.arange(len(lengths)), lengths)
            unknown = np.full((len(lengths), length), np.nan, np.float32)
            survival = unknown.copy()
            for row, draft in enumerate(drafts):
                survival[row, : len(draft.survival)] = draft.survival
            return Probe([draft.token_ids for draft in drafts], survival, unknown)
        assert self._model is not None
        self._model.keeps_margins = True
        drafted = self._model.draft(self._engine_rows, length)
        self._model.keeps_margins = False
        self._model.take_cost()  # no step of the engine's is charged for a probe
        is_beyond = np.arange(length) >= lengths[:, None]
        is_none = np.isnan(drafted.survival[:, 0])
        return Probe(
            [
                [] if none else row[:most].tolist()
                for row, most, none in zip(drafted.token_ids, lengths, is_none, strict=True)
            ],
            np.where(is_beyond, np.nan, drafted.survival),
            np.where(is_beyond, np.nan, drafted.margin),
        )

    @torch.inference_mode()
    def target_probabilities(self, token_ids: np.ndarray) -> np.ndarray:
        """How likely the target was, in the step just done, to sample these tokens.

        Args:
            token_ids: One token per row of the pending decision, int64 `[rows]`.

        Returns:
            float32 `[rows]`, at each request's sampling temperature, which must be above 0, for
            the first token that the step emitted; top-k, top-p and logit processors are not
            applied.
        """
        assert self.pending is not None
        assert self._sample_hidden_states is not None
        num_samples = np.ones(self._runner.input_batch.num_reqs, np.int64)
        if self._spec_decode_metadata is not None:
            num_samples += self._spec_decode_metadata.num_draft_tokens
        first = (np.cumsum(num_samples) - num_samples)[self._engine_rows]
        rows = torch.from_numpy(first).to(self._sample_hidden_states.device)
        logits = self._runner.model.compute_logits(self._sample_hidden_states[rows]).float()
        temperature = torch.from_numpy(self.pending.record.temperature).to(logits.device)
        probabilities = (logits / temperature[:, None]).softmax(dim=-1)
        index = torch.from_numpy(token_ids).to(logits.device)
        return probabilities.gather(1, index[:, None])[:, 0].cpu().numpy()

    def _count(self, record: StepRecord) -> None:
        for index, drafter in enumerate(self.contract.proposers, start=1):
            num_drafts, num_draft_tokens, num_accepted_tokens = record.verified(index)
            if num_drafts:
                self.num_drafts[drafter] += num_drafts
                self.num_draft_tokens[drafter] += num_draft_tokens
                self.num_accepted_tokens[drafter] += num_accepted_tokens

    def _read_overdue(self) -> None:
        """Let the model drafter bound its backlog, now that it has drafted where it was chosen."""
        if self._model is not None:
            self._model.read_overdue()

    def _draft(self, drafter: str, rows: np.ndarray, lengths: np.ndarray) -> list[Draft]:
        """Drafts of one drafter for some rows of the decision; empty where it has none."""
        if drafter in self._token_drafters:
            return self._token_drafters[drafter].draft(rows, lengths)
        assert self._model is not None
        made = self._model.draft(self._engine_rows[rows], int(lengths.max()))
        return [
            Draft([] if none else tokens[:length].tolist(), survival[:length])
            for tokens, survival, length, none in zip(
                made.token_ids, made.survival, lengths, np.isnan(made.survival[:, 0]), strict=True
            )
        ]

    def _room(self, record: StepRecord) -> np.ndarray:
        """Most draft tokens of use per row: the model's length and the request's limit end them."""
        room = self._max_model_len - 1 - record.num_context_tokens
        for row, req_id in enumerate(record.req_ids):
            request = self._runner.requests[req_id]
            max_tokens = request.sampling_params.max_tokens
            if max_tokens is not None:
                room[row] = min(room[row], max_tokens - len(request.output_token_ids) - 1)
        return np.maximum(room, 0)

    def _record_step(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        attn_metadata: Any,
        slot_mappings: Any,
    ) -> StepRecord:
        """Read what the step did; the arguments are those of `propose_draft_token_ids`."""
        self._sample_hidden_states = sample_hidden_states
        self._spec_decode_metadata = spec_decode_metadata
        batch = self._runner.input_batch
        num_reqs = batch.num_reqs
        req_ids = list(batch.req_ids[:num_reqs])
        finished = frozenset(self._known_req_ids - self._runner.requests.keys())
        self._forget(finished)
        self._known_req_ids = (self._known_req_ids - finished) | set(req_ids)

        scheduled = scheduler_output.num_scheduled_tokens
        num_scheduled = np.array([scheduled[req_id] for req_id in req_ids], np.int32)
        submitted = scheduler_output.scheduled_spec_decode_tokens
        num_drafts = np.array(
            [_num_real_tokens(submitted.get(req_id, ())) for req_id in req_ids], np.int32
        )
        is_sampled = ~self._runner.discard_request_mask.np[:num_reqs]
        num_tokens = batch.num_tokens_no_spec[:num_reqs].astype(np.int32)
        starts = batch.num_computed_tokens_cpu[:num_reqs].astype(np.int32)
        ends = np.where(is_sampled, num_tokens - 1, starts + num_scheduled)
        num_accepted = np.where(num_drafts > 0, ends - starts - 1, 0).astype(np.int32)

        rows = np.flatnonzero(is_sampled)
        self._engine_rows = rows
        row_ids = tuple(req_ids[row] for row in rows)
        if self._model is not None:
            uses_aux = self._runner.use_aux_hidden_state_outputs
            self._model.observe(
                TargetStep(
                    req_ids,
                    starts,
                    ends,
                    np.cumsum(num_scheduled) - num_scheduled,
                    aux_hidden_states if uses_aux and aux_hidden_states else [hidden_states],
                    attn_metadata,
                    sampling_metadata,
                )
            )
        is_prompt = num_scheduled > 1 + num_drafts
        num_waiting, kv_cache_usage = getattr(scheduler_output, LOAD_ATTRIBUTE, (0, 0.0))
        drafter = np.array(
            [
                self._drafted.get(req_id, _UNKNOWN_DRAFT).drafter if num_drafts[row] else 0
                for req_id, row in zip(row_ids, rows, strict=True)
            ],
            np.int32,
        )
        contexts = Contexts(
            row_ids,
            batch.token_ids_cpu,
            rows,
            num_tokens[rows],
            batch.num_prompt_tokens[:num_reqs][rows].astype(np.int32),
        )
        num_passes, num_pass_tokens = (0, 0) if self._model is None else self._model.take_cost()
        return StepRecord(
            num_running_reqs=num_reqs,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=kv_cache_usage,
            num_prefill_tokens=int(num_scheduled[is_prompt].sum()),
            num_scheduled_tokens=int(num_scheduled.sum()),
            req_ids=row_ids,
            num_context_tokens=num_tokens[rows],
            num_emitted_tokens=num_accepted[rows] + 1,
            temperature=np.maximum(batch.temperature_cpu[:num_reqs][rows], 0),
            drafter=drafter,
            num_draft_tokens=num_drafts[rows],
            num_accepted_tokens=num_accepted[rows],
            num_draft_passes=num_passes,
            num_draft_pass_tokens=num_pass_tokens,
            finished_req_ids=finished,
            token_offers={
                name: token_drafter.offer(contexts)
                for name, token_drafter in self._token_drafters.items()
            },
            model_states={}
            if self._model is None
            else {
                name: self._model.state(row_ids, self._drafted_survival(name, row_ids))
                for name in self.contract.model_drafters
            },
        )

    def _drafted_survival(self, name: str, row_ids: tuple[str, ...]) -> np.ndarray:
        """Survival of one drafter's tokens, cut ones included, NaN where it drafted none."""
        survival = np.full((len(row_ids), max(self.contract.max_lengths)), np.nan, np.float32)
        index = self.contract.drafters.index(name)
        for row, req_id in enumerate(row_ids):
            drafted = self._drafted.get(req_id, _UNKNOWN_DRAFT)
            if drafted.drafter == index:
                survival[row, : len(drafted.survival)] = drafted.survival
        return survival

    def _forget(self, req_ids: frozenset[str]) -> None:
        for req_id in req_ids:
            self._drafted.pop(req_id, None)
        for token_drafter in self._token_drafters.values():
            token_drafter.forget(req_ids)
        if self._model is not None:
            self._model.forget(req_ids)


def _num_real_tokens(draft: Sequence[int]) -> int:
    """Length of a scheduled draft; 0 for the -1s with which vLLM pads a fully cached prompt."""
    return len(draft) if draft and draft[0] >= 0 else 0
