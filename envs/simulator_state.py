"""What the simulator reads and changes: traces, settings, and the state of many engines at once.

Plain arrays in named tuples, because compiled code takes nothing else. The first axis of every
array of `Engines` is the engine; requests keep the order in which they were admitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policy.combinations import Combinations
from policy.contract import MODEL_DRAFTERS, NONE, SURVIVAL_DRAFTERS, Contract
from policy.cost_model import FEATURES, CostModel
from policy.errors import ConfigError, TraceError
from policy.features import History, RowTable

from .traces import Traces


@dataclass(frozen=True)
class TraceEngineConfig:
    """The engine that a replay stands for; the defaults are those of the live one.

    Attributes:
        max_num_seqs: Largest number of requests in an engine step.
        max_model_len: Longest context in tokens.
        max_num_batched_tokens: Most tokens in an engine step.
        num_kv_blocks: KV-cache blocks, for the share in use.
        block_size: Tokens of a KV-cache block.
        prompts_are_cached: Whether prompts lie in the prefix cache, all but their last block.
        dormant_after: As in `DrafterSettings`.
        max_pending_tokens: As in `DrafterSettings`.
        combination_min_match: As in `DrafterSettings`.
        has_prefill: False replays decoding alone, as the paper's simulator does: prompts cost
            nothing.
    """

    max_num_seqs: int = 32
    max_model_len: int = 1024
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int = 2048
    block_size: int = 32
    prompts_are_cached: bool = True
    dormant_after: int = 512
    max_pending_tokens: int = 1024
    combination_min_match: int = 3
    has_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "num_kv_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; make it 1 or more.")
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; make it 1 or more.")


RECORDED = np.dtype(
    [
        ("first", np.int64),  # position of output 0
        ("num_outputs", np.int32),  # recorded output tokens
        ("num_prompt", np.int32),  # prompt tokens
        ("num_uncached", np.int32),  # prompt tokens that are computed at admission
    ],
    align=True,
)
"""A recorded request."""

OFFER = np.dtype(
    [
        ("agreement", np.float32),  # of earlier places with a token drafter's draft
        ("match_length", np.uint8),
        ("length", np.uint8),  # tokens drafted
        ("accepted", np.uint8),  # leading ones the target emits
    ],
    align=True,
)
"""A drafter's draft at one position."""

REQUEST = np.dtype(
    [
        ("trace", np.int32),  # which recorded request it is
        ("max_tokens", np.int32),  # output tokens it may have
        ("num_emitted", np.int32),  # output tokens it has
        ("num_todo", np.int32),  # prompt tokens left to compute; 0 while decoding
        ("num_pending", np.int32),  # tokens the model drafter has not read
        ("num_final", np.int32),  # positions that the last step made final
        ("draft_drafter", np.int32),  # whose draft is verified next
        ("draft_length", np.int32),
        ("num_made", np.int32),  # tokens that the model drafter drafted for it, cut ones included
        ("history_slot", np.int32),  # for request granularity
        ("is_scheduled", np.bool_),  # the last step computed something of it
        ("has_row", np.bool_),  # ... and gave it a token: it awaits a decision
        ("has_ended", np.bool_),  # ... its last one
        ("is_fresh", np.bool_),  # the model drafter can draft for it
    ],
    align=True,
)
"""A request in an engine."""

PLEDGE = np.dtype([("start", np.int32), ("length", np.int32), ("accepted", np.int32)])
"""A token drafter's open offer: output tokens at its making (-1: none), its length, its fate."""

ENGINE = np.dtype(
    [
        ("num_reqs", np.int32),  # unfinished ones and those that ended in the last step
        ("num_ended", np.int32),  # of those, the ones that ended in the last step
        ("num_rows", np.int32),  # of the last step
        ("num_queued", np.int32),  # requests that wait outside, for their number alone
        ("steps_since_draft", np.int32),  # of the model drafter
        ("num_scheduled_tokens", np.int32),  # of the last step
        ("draft_passes", np.int32),  # of the model drafter since the last step
        ("draft_pass_tokens", np.int32),
        ("step_passes", np.int32),  # ... and before the last step
        ("step_pass_tokens", np.int32),
        ("num_tokens", np.int64),  # output tokens since the last decision
        ("num_finished", np.int64),  # requests ended since the last decision
        ("seconds", np.float64),  # time since the last decision
        ("prefill_seconds", np.float64),  # the part of it that prompts took
    ],
    align=True,
)
"""An engine's own counters."""


class Replay(NamedTuple):
    """Traces, prices and settings; nothing here changes.

    Attributes:
        recorded: `RECORDED` `[requests]`.
        offers: `OFFER` `[positions, 1 + proposers]`; nothing of `none`, the first.
        survival: Of the tokens of those drafters that tell it, float32
            `[tellers, positions, max length]`.
        teller: Place of each drafter among them, int32 `[1 + proposers]`; -1 where it tells none.
        seconds: Cost by running requests and feature, float64 `[loads, FEATURES]`.
        combinations: Of the contract.
        max_lengths: Of the contract, int32 `[drafters]`.
        cutoffs: Survival that tokens must exceed by the cutoff's number, float32 `[1 + cutoffs]`.
        is_model: Whether a drafter runs a model, uint8 `[1 + proposers]`.
        model: Index of the model drafter; 0 without one.
        per_request: Whether an observation row is a request.
        max_num_speculative_tokens: Longest of `max_lengths`.
        temperature: Of every request.
        token_draft_share: See `CostModel`.
        max_num_batched_tokens: See `TraceEngineConfig`, also for what follows.
    """

    recorded: np.ndarray
    offers: np.ndarray
    survival: np.ndarray
    teller: np.ndarray
    seconds: np.ndarray
    combinations: Combinations
    max_lengths: np.ndarray
    cutoffs: np.ndarray
    is_model: np.ndarray
    model: int
    per_request: bool
    max_num_speculative_tokens: int
    temperature: float
    token_draft_share: float
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    dormant_after: int
    max_pending_tokens: int


class Engines(NamedTuple):
    """The state of many engines.

    Attributes:
        counters: `ENGINE` `[engines]`.
        requests: `REQUEST` `[engines, entries]`, in the order of admission.
        pledges: `PLEDGE` `[engines, entries, 1 + proposers]`.
        slot_is_used: Whether a history slot is taken, bool `[engines, entries]`.
        shape: Work since the last decision, float64 `[engines, FEATURES]`.
        load: Running and waiting requests, KV-cache usage, prefill tokens of the last step,
            float32 `[engines, 4]`.
        table: The last step's rows, with the engine as first axis.
        row_entry: Entry of each row among the requests, int32 `[engines, entries]`.
        row_slot: History slot of each row, int64 `[engines, entries]`.
        history: The slots of all engines, one after the other; the batch's before the requests'.
        observation: float32 `[engines, observation rows, fields]`.
    """

    counters: np.ndarray
    requests: np.ndarray
    pledges: np.ndarray
    slot_is_used: np.ndarray
    shape: np.ndarray
    load: np.ndarray
    table: RowTable
    row_entry: np.ndarray
    row_slot: np.ndarray
    history: History
    observation: np.ndarray


def make_replay(
    traces: Traces, cost_model: CostModel, contract: Contract, config: TraceEngineConfig
) -> Replay:
    """Lay traces out for the simulator, drafts cut to the contract's lengths.

    Raises:
        TraceError: If the traces lack a drafter of the contract, or a request is longer than the
            engine's longest context.
        ConfigError: If a draft and its bonus token do not fit into an engine step.
    """
    if config.max_num_batched_tokens <= contract.max_num_speculative_tokens:
        raise ConfigError(
            f"A draft of {contract.max_num_speculative_tokens} tokens does not fit into "
            f"{config.max_num_batched_tokens} batched tokens; raise max_num_batched_tokens."
        )
    traces.contract(dict(zip(contract.drafters[1:], contract.max_lengths[1:], strict=True)))
    recorded = np.zeros(traces.num_requests, RECORDED)
    recorded["first"] = traces.starts[:-1]
    recorded["num_outputs"] = traces.num_output_tokens
    recorded["num_prompt"] = [len(prompt) for prompt in traces.prompts]
    longest = int((recorded["num_prompt"] + recorded["num_outputs"]).max())
    if longest > config.max_model_len:
        raise TraceError(
            f"The traces hold contexts of {longest} tokens; raise max_model_len from "
            f"{config.max_model_len}."
        )
    if config.has_prefill:
        cached_blocks = (recorded["num_prompt"] - 1) // config.block_size
        num_cached = cached_blocks * config.block_size if config.prompts_are_cached else 0
        recorded["num_uncached"] = recorded["num_prompt"] - num_cached
    num_positions = int(traces.starts[-1])
    drafters = (NONE, *contract.proposers)
    offers = np.zeros((num_positions, len(drafters)), OFFER)
    tellers = [name for name in drafters if name in SURVIVAL_DRAFTERS]
    survival = np.full(
        (max(1, len(tellers)), num_positions, max(1, contract.max_num_speculative_tokens)),
        np.nan,
        np.float32,
    )
    for index, name in enumerate(contract.proposers, start=1):
        drafter, length = traces.drafters[name], contract.max_lengths[index]
        offer = offers[:, index]
        offer["length"] = np.minimum(drafter.num_draft_tokens, length)
        offer["accepted"] = np.minimum(drafter.num_accepted_tokens, length)
        if drafter.survival is not None:
            survival[tellers.index(name), :, :length] = drafter.survival[:, :length]
        if drafter.match_length is not None:
            offer["match_length"] = drafter.match_length
        if drafter.agreement is not None:
            offer["agreement"] = drafter.agreement
    is_model = np.array([name in MODEL_DRAFTERS for name in drafters], np.uint8)
    return Replay(
        recorded=recorded,
        offers=offers,
        survival=survival,
        teller=np.array(
            [tellers.index(name) if name in tellers else -1 for name in drafters], np.int32
        ),
        seconds=cost_model.weights_at(np.arange(config.max_num_seqs + 1)),
        combinations=Combinations.of(contract, config.combination_min_match),
        max_lengths=np.array(contract.max_lengths, np.int32),
        cutoffs=np.array((0.0, *contract.cutoffs), np.float32),
        is_model=is_model,
        model=int(is_model.argmax()),
        per_request=contract.granularity == "request",
        max_num_speculative_tokens=contract.max_num_speculative_tokens,
        temperature=float(traces.header.temperature),
        token_draft_share=cost_model.token_draft_share,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        dormant_after=config.dormant_after,
        max_pending_tokens=config.max_pending_tokens,
    )


def make_engines(contract: Contract, config: TraceEngineConfig, num_engines: int) -> Engines:
    """Idle engines."""
    num_rows = config.max_num_seqs
    entries = num_engines, 2 * num_rows  # what ended in a step is there beside its successors
    per_request = contract.granularity == "request"
    num_slots = 1 + entries[1] if per_request else 1
    observation_rows = num_rows if per_request else 1
    return Engines(
        counters=np.zeros(num_engines, ENGINE),
        requests=np.zeros(entries, REQUEST),
        pledges=np.zeros((*entries, 1 + len(contract.proposers)), PLEDGE),
        slot_is_used=np.zeros(entries, np.bool_),
        shape=np.zeros((num_engines, len(FEATURES)), np.float64),
        load=np.zeros((num_engines, 4), np.float32),
        table=RowTable.empty(contract, num_engines, num_rows),
        row_entry=np.zeros(entries, np.int32),
        row_slot=np.zeros(entries, np.int64),
        history=History.of(contract, num_engines * num_slots),
        observation=np.zeros((num_engines, observation_rows, len(contract.fields)), np.float32),
    )
