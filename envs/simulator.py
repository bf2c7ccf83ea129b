"""The simulator: what vLLM's scheduler, the hook and the drafters do in a step, on traces.

One compiled function per thing that happens, in the order in which it happens live: `draft` as
decided (`SpeculationHook.draft`), `run` one engine step (schedule, verify, record, observe),
`admit` new requests. `TraceEngine` calls them one engine at a time, `DraftVecEnv` for thousands.

Not simulated: preemption (the KV cache is taken to suffice) and the unread prefix-cache blocks
that a model drafter finds after it was dormant.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policy.combinations import resolve
from policy.compiled import compiled
from policy.cost_model import (
    CONTEXT,
    DRAFT_CONTEXT,
    FEATURES,
    MODEL_DRAFTS,
    PASS_TOKENS,
    PASSES,
    PREFILL,
    STEPS,
    VERIFIED,
)
from policy.features import NEVER, Layout, RowTable, observe

from .simulator_state import Engines, Replay


@compiled
def begin_interval(engines: Engines, e: int) -> None:
    """Count from here to the next decision."""
    counters = engines.counters[e]
    counters.num_tokens = counters.num_finished = 0
    counters.seconds = counters.prefill_seconds = 0
    for feature in range(len(FEATURES)):
        engines.shape[e, feature] = 0


@compiled
def abort_all(replay: Replay, engines: Engines, e: int) -> None:
    """End every request; what the observation remembers of the batch stays."""
    for i in range(engines.counters[e].num_reqs):
        _free_history(replay, engines, e, i)
    counters = engines.counters[e]
    counters.num_reqs = counters.num_ended = counters.num_rows = counters.num_queued = 0


@compiled
def admit(replay: Replay, engines: Engines, e: int, trace: int, max_tokens: int) -> None:
    """Put a recorded request at the end of the queue."""
    i = engines.counters[e].num_reqs
    engines.counters[e].num_reqs += 1
    request = engines.requests[e, i]
    request.trace = trace
    request.max_tokens = max_tokens
    request.num_todo = replay.recorded[trace].num_uncached
    request.num_emitted = request.num_pending = request.num_final = 0
    request.draft_drafter = request.draft_length = request.num_made = request.history_slot = 0
    request.is_scheduled = request.has_row = request.has_ended = False
    request.is_fresh = replay.model > 0
    for drafter in range(engines.pledges.shape[2]):
        engines.pledges[e, i, drafter].start = -1
    if replay.per_request:
        slot = 0
        while engines.slot_is_used[e, slot]:
            slot += 1
        engines.slot_is_used[e, slot] = True
        request.history_slot = slot


@compiled
def num_unfinished(engines: Engines, e: int) -> int:
    """Requests admitted and not ended."""
    return engines.counters[e].num_reqs - engines.counters[e].num_ended


@compiled
def awaits_decision(engines: Engines, e: int) -> bool:
    """Whether a request that goes on got a token in the last step."""
    return engines.counters[e].num_rows > engines.counters[e].num_ended


@compiled
def draft(replay: Replay, engines: Engines, e: int, actions: np.ndarray) -> None:
    """Draft as decided, then let the model drafter read what it must not put off.

    Args:
        replay: Traces and settings.
        engines: Changed in place.
        e: The engine.
        actions: Drafter index, draft length and, maybe, the cutoff's number, int64
            `[1, 2 or 3]` or `[rows, 2 or 3]`.
    """
    counters, requests = engines.counters[e], engines.requests[e]
    recorded, offers, is_model = replay.recorded, replay.offers, replay.is_model
    row = longest = num_model_rows = num_pending = num_groups = room = 0
    has_cutoffs = actions.shape[1] > 2
    for i in range(counters.num_reqs):
        request = requests[i]
        if not request.has_row:
            continue  # one that found no room in the last step keeps its draft
        request.draft_length = request.draft_drafter = request.num_made = 0
        at = row if len(actions) > 1 else 0
        drafter, length = resolved(replay, engines, e, row, actions[at, 0], actions[at, 1])
        row += 1
        source = recorded[request.trace]
        length = wanted_length(replay, request, drafter, length)
        if length <= 0:
            continue
        if is_model[drafter]:
            longest = max(longest, length)
            if not can_read(request):
                continue
            if request.num_pending > room:
                num_groups += 1
                room = replay.max_num_batched_tokens
            room -= request.num_pending
            num_model_rows += 1
            num_pending += request.num_pending
            request.num_pending = 0
        if request.num_emitted < source.num_outputs:
            offered = offers[source.first + request.num_emitted, drafter].length
            request.draft_length = min(length, offered)
            if is_model[drafter]:
                request.num_made = request.draft_length
            if has_cutoffs and replay.teller[drafter] >= 0:
                request.draft_length = num_confident(
                    replay,
                    request,
                    drafter,
                    replay.cutoffs[actions[at, 2]],
                    request.draft_length,
                )
            request.draft_drafter = drafter if request.draft_length > 0 else 0
    if num_model_rows > 0:
        counters.steps_since_draft = 0
        counters.draft_passes += num_groups * longest
        counters.draft_pass_tokens += num_pending + (longest - 1) * num_model_rows
    _read_overdue(replay, engines, e)


@compiled
def num_confident(replay: Replay, request: Any, drafter: int, cutoff: float, length: int) -> int:
    """Leading tokens of a request's draft whose survival exceeds a cutoff."""
    at = replay.recorded[request.trace].first + request.num_emitted
    survival = replay.survival[replay.teller[drafter], at]
    for position in range(length):
        if survival[position] <= cutoff:  # what is not known is NaN
            return position
    return length


@compiled
def wanted_length(replay: Replay, request: Any, drafter: int, length: int) -> int:
    """The longest draft of use to a request, at most the length asked for."""
    source = replay.recorded[request.trace]
    return min(
        length,
        replay.max_lengths[drafter],
        request.max_tokens - request.num_emitted - 1,
        replay.max_model_len - 1 - source.num_prompt - request.num_emitted,
    )


@compiled
def can_read(request: Any) -> bool:
    """Whether the model drafter can draft for a request at once."""
    return request.is_fresh and request.num_pending > 0


@compiled
def resolved(
    replay: Replay, engines: Engines, e: int, row: int, drafter: int, length: int
) -> tuple[int, int]:
    """Who drafts for a row, and how far: of a combination, one of its members."""
    if drafter < len(replay.is_model):
        return drafter, length
    slot = first_history_slot(replay, engines, e)
    if replay.per_request:
        slot += 1 + engines.row_slot[e, row]
    table = _table(engines, e)
    return resolve(replay.combinations, engines.history, slot, table, row, drafter, length)


@compiled
def _read_overdue(replay: Replay, engines: Engines, e: int) -> None:
    """As `ModelDrafter.read_overdue`: prompts at once while awake, nothing while dormant."""
    if replay.model == 0:
        return
    counters, requests = engines.counters[e], engines.requests[e]
    is_dormant = counters.steps_since_draft > replay.dormant_after
    room = 0
    for i in range(counters.num_reqs):
        request = requests[i]
        if not request.is_scheduled or request.num_pending == 0:
            continue
        is_overdue = request.num_pending > replay.max_pending_tokens
        if is_dormant:
            if is_overdue:
                request.is_fresh = False
                request.num_pending = 0
        elif is_overdue or request.num_final > 1 + replay.max_num_speculative_tokens:
            if request.num_pending > room:
                counters.draft_passes += 1
                room = replay.max_num_batched_tokens
            room -= request.num_pending
            counters.draft_pass_tokens += request.num_pending
            request.num_pending = 0


@compiled
def run(layout: Layout, replay: Replay, engines: Engines, e: int) -> None:
    """One engine step: schedule, verify, record, observe."""
    _remove_ended(replay, engines, e)
    counters, requests, load = engines.counters[e], engines.requests[e], engines.load[e]
    recorded, offers, is_model = replay.recorded, replay.offers, replay.is_model
    rows, told, row_entry = engines.table.rows[e], engines.table.told[e], engines.row_entry[e]
    survival, row_survival = replay.survival, engines.table.survival[e]
    teller, model, offer_survival = replay.teller, replay.model, engines.table.offer_survival[e]
    agreement = engines.table.agreement[e]
    pledges, row_slot = engines.pledges[e], engines.row_slot[e]
    counters.steps_since_draft += 1
    counters.num_rows = counters.num_scheduled_tokens = 0
    load[0] = load[3] = 0
    load[1] = counters.num_queued
    budget = replay.max_num_batched_tokens
    num_blocks = 0
    has_prefill = False
    for i in range(counters.num_reqs):
        request = requests[i]
        source = recorded[request.trace]
        is_running = request.num_emitted > 0 or request.num_todo < source.num_uncached
        request.has_row = request.is_scheduled = False
        wanted = 1 + request.draft_length
        if request.num_todo > 0:
            wanted = request.num_todo
            if is_running:
                has_prefill = True
            elif wanted == 1 and not has_prefill:
                wanted += replay.max_num_speculative_tokens  # vLLM's placeholders: a cost, no more
                budget = budget if wanted <= budget else 0  # all of them or nothing
        num_tokens = min(wanted, budget)
        if num_tokens == 0:
            load[1] += not is_running
            continue
        request.is_scheduled = True
        budget -= num_tokens
        counters.num_scheduled_tokens += num_tokens
        load[0] += 1
        load[3] += num_tokens if request.num_todo > 0 and num_tokens > 1 else 0
        num_cached = source.num_prompt + request.num_emitted - max(1, request.num_todo)
        num_blocks += (num_cached + num_tokens + replay.block_size - 1) // replay.block_size
        at = source.first + request.num_emitted
        accepted = 0
        if request.num_todo > 0:
            num_final = min(num_tokens, request.num_todo)
            request.num_todo -= num_final
        else:
            request.draft_length = min(request.draft_length, num_tokens - 1)
            if request.draft_length > 0:
                accepted = min(request.draft_length, offers[at, request.draft_drafter].accepted)
            num_final = accepted + 1
        _let_model_wait(request, num_final, replay.max_num_batched_tokens)
        if request.num_todo > 0:
            continue
        row = counters.num_rows
        counters.num_rows += 1
        row_entry[row], row_slot[row] = i, request.history_slot
        num_known = request.num_made
        for position in range(num_known):
            row_survival[row, position] = survival[teller[model], at, position]
        if num_known < row_survival.shape[1]:
            row_survival[row, num_known] = np.nan  # nobody reads beyond
        _emit(request, source, counters, rows[row], accepted)
        rows[row].temperature = replay.temperature
        at = source.first + request.num_emitted
        has_offer = request.num_emitted < source.num_outputs
        for drafter in range(1, len(is_model)):
            if is_model[drafter]:
                told[drafter - 1, 0, row] = request.is_fresh
                told[drafter - 1, 1, row] = request.num_pending
                continue
            pledge = pledges[i, drafter]
            told[drafter - 1, 2, row] = _settle(pledge, request.num_emitted)
            offer = offers[at if has_offer else 0, drafter]
            told[drafter - 1, 0, row] = offer.match_length if has_offer else 0
            told[drafter - 1, 1, row] = offer.length if has_offer else 0
            agreement[drafter - 1, row] = offer.agreement if has_offer else 0
            if has_offer and teller[drafter] >= 0:
                for position in range(offer.length):
                    known = survival[teller[drafter], at, position]
                    offer_survival[drafter - 1, row, position] = known
            if has_offer and offer.length > 0 and pledge.start < 0:
                pledge.start = request.num_emitted
                pledge.length = offer.length
                pledge.accepted = offer.accepted
    load[2] = min(1.0, num_blocks / replay.num_kv_blocks)
    counters.step_passes = counters.draft_passes
    counters.step_pass_tokens = counters.draft_pass_tokens
    counters.draft_passes = counters.draft_pass_tokens = 0
    _charge(replay, engines, e)
    if counters.num_rows > 0:
        _observe(layout, replay, engines, e)
    else:
        _read_overdue(replay, engines, e)


@compiled
def _let_model_wait(request: Any, num_final: int, most: int) -> None:
    """Final positions wait for the model drafter; more than one pass could read are lost."""
    request.num_final = num_final
    request.num_pending += num_final if request.is_fresh else 0
    if request.num_pending > most:
        request.is_fresh = False
        request.num_pending = 0


@compiled
def _emit(request: Any, source: Any, counters: Any, row: Any, accepted: int) -> None:
    """Give a request the accepted tokens and one more, and the record a row."""
    before = request.num_emitted
    limit = min(request.max_tokens, source.num_outputs)
    request.num_emitted = min(before + accepted + 1, limit)
    request.has_row = True
    request.has_ended = request.num_emitted == limit
    counters.num_tokens += request.num_emitted - before
    counters.num_finished += request.has_ended
    counters.num_ended += request.has_ended
    row.num_context_tokens = source.num_prompt + before + accepted + 1
    row.drafter = request.draft_drafter if request.draft_length > 0 else 0
    row.num_draft_tokens = request.draft_length
    row.num_accepted_tokens = accepted
    row.num_emitted_tokens = accepted + 1


@compiled
def _settle(pledge: Any, num_emitted: int) -> int:
    """Accepted tokens of the open offer once the outputs decide it, else -1."""
    if pledge.start < 0:
        return -1
    if num_emitted - pledge.start < min(pledge.accepted + 1, pledge.length):
        return -1
    pledge.start = -1
    return pledge.accepted


@compiled
def _charge(replay: Replay, engines: Engines, e: int) -> None:
    """Price the step and add it to what was done since the last decision."""
    counters, load, rows = engines.counters[e], engines.load[e], engines.table.rows[e]
    is_model, shape = replay.is_model, engines.shape[e]
    num_context = num_draft_context = 0
    has_model_draft = has_token_draft = False
    for row in range(counters.num_rows):
        num_context += rows[row].num_context_tokens
        drafter = rows[row].drafter
        if is_model[drafter]:
            has_model_draft = True
            num_draft_context += rows[row].num_context_tokens
        elif drafter > 0:
            has_token_draft = True
    work = np.zeros(len(FEATURES))
    work[STEPS] = 1
    work[VERIFIED] = counters.num_scheduled_tokens - load[3]
    work[CONTEXT] = num_context
    work[PREFILL] = load[3]
    work[MODEL_DRAFTS] = has_model_draft
    work[PASSES] = counters.step_passes
    work[PASS_TOKENS] = counters.step_pass_tokens
    work[DRAFT_CONTEXT] = num_draft_context
    prices = replay.seconds[int(load[0])]
    for feature in range(len(work)):
        counters.seconds += work[feature] * prices[feature]
        shape[feature] += work[feature]
    if has_token_draft:
        target_s = prices[STEPS] + work[VERIFIED] * prices[VERIFIED]
        target_s += work[CONTEXT] * prices[CONTEXT]
        counters.seconds += replay.token_draft_share * target_s
    counters.prefill_seconds += work[PREFILL] * prices[PREFILL]


@compiled
def _observe(layout: Layout, replay: Replay, engines: Engines, e: int) -> None:
    num_rows = engines.counters[e].num_rows
    slots = np.empty(1 + num_rows if replay.per_request else 1, np.int64)
    slots[0] = first_history_slot(replay, engines, e)
    for index in range(1, len(slots)):
        slots[index] = slots[0] + 1 + engines.row_slot[e, index - 1]
    observe(
        layout,
        engines.history,
        slots,
        engines.load[e],
        _table(engines, e),
        num_rows,
        engines.observation[e],
    )


@compiled
def _table(engines: Engines, e: int) -> RowTable:
    """The last step's rows of one engine."""
    table = engines.table
    return RowTable(
        table.rows[e], table.told[e], table.agreement[e], table.offer_survival[e], table.survival[e]
    )


@compiled
def _remove_ended(replay: Replay, engines: Engines, e: int) -> None:
    """Close the ranks over requests that ended in the last step."""
    counters, requests, pledges = engines.counters[e], engines.requests[e], engines.pledges[e]
    if counters.num_ended == 0:
        return
    kept = 0
    for i in range(counters.num_reqs):
        if requests[i].has_ended:
            _free_history(replay, engines, e, i)
            continue
        if kept < i:
            requests[kept] = requests[i]
            for drafter in range(pledges.shape[1]):
                pledges[kept, drafter] = pledges[i, drafter]
        kept += 1
    counters.num_reqs = kept
    counters.num_ended = 0


@compiled
def first_history_slot(replay: Replay, engines: Engines, e: int) -> int:
    """The engine's first slot of the history, the batch's; its requests' follow."""
    return e * (1 + engines.slot_is_used.shape[1]) if replay.per_request else e


@compiled
def _free_history(replay: Replay, engines: Engines, e: int, i: int) -> None:
    """Forget a request, where the observation remembers requests."""
    if not replay.per_request:
        return
    slot = engines.requests[e, i].history_slot
    engines.slot_is_used[e, slot] = False
    slot += first_history_slot(replay, engines, e) + 1
    for drafter in range(engines.history.steps_since.shape[1]):
        engines.history.steps_since[slot, drafter] = NEVER
        for sample in range(engines.history.total.shape[2]):
            engines.history.total[slot, drafter, sample] = 0
            engines.history.weight[slot, drafter, sample] = 0
