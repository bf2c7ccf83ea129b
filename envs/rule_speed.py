"""How fast a rule decodes traces in a closed loop, beside the oracles of `envs.headroom`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from policy.baselines.build import build_baseline
from policy.contract import Contract
from policy.controllers import Controller
from policy.cost_model import CostModel

from .closed_loop import serving_order
from .simulator_state import TraceEngineConfig
from .trace_engine import TraceEngine
from .traces import Traces
from .workload import ClosedLoop, Episode, WorkloadRequest

_NO_LIMIT = 1 << 24
"""Tokens and blocks beyond what traces hold: the engine is never short of room."""


def rule_tokens_per_s(
    traces: Traces,
    section: Mapping[str, Any],
    cost_model: CostModel,
    num_running_reqs: int,
    *,
    max_length: int,
    min_tokens_per_slot: int = 2**17,
    seed: int = 0,
) -> float:
    """Output tokens per second of a rule, decoding alone, its start included.

    The same requests in the same order as `envs.closed_loop.tokens_per_s` with a step for the
    first token, but the rule decides through the replay engine, as it would in production.

    Args:
        traces: The requests.
        section: The rule as the plugin's `baseline` takes it, with an own `granularity`.
        cost_model: Prices the steps.
        num_running_reqs: Requests in flight.
        max_length: Longest draft in tokens, if so long ones were recorded.
        min_tokens_per_slot: Tokens that a slot has at least to produce, on average.
        seed: Seed of the order.

    Raises:
        ConfigError: If the rule does not exist or does not fit the drafters.
    """
    settings = dict(section)
    granularity = settings.pop("granularity", "batch")
    longest = {name: min(most, max_length) for name, most in traces.header.max_lengths.items()}
    contract = traces.contract(longest, granularity)
    return controller_tokens_per_s(
        traces,
        build_baseline(contract, settings),
        contract,
        cost_model,
        num_running_reqs,
        min_tokens_per_slot=min_tokens_per_slot,
        seed=seed,
    )


def controller_tokens_per_s(
    traces: Traces,
    controller: Controller,
    contract: Contract,
    cost_model: CostModel,
    num_running_reqs: int,
    *,
    min_tokens_per_slot: int = 2**17,
    seed: int = 0,
) -> float:
    """The same of anything that decides.

    Args:
        traces: The requests.
        controller: Decides; it may not judge drafts.
        contract: What it chooses from.
        cost_model: Prices the steps.
        num_running_reqs: Requests in flight.
        min_tokens_per_slot: Tokens that a slot has at least to produce, on average.
        seed: Seed of the order.

    Raises:
        TraceError: If the traces lack a drafter or a length of the contract.
    """
    engine = TraceEngine(traces, cost_model, contract, _engine_config(traces, num_running_reqs))
    order, num_tokens = serving_order(traces, num_running_reqs, 0, min_tokens_per_slot, seed)
    step = engine.reset(
        Episode(num_running_reqs, _requests(traces, order), ClosedLoop(num_running_reqs))
    )
    tokens, seconds = step.num_tokens, step.step_time_s
    while tokens < num_tokens:
        step = engine.step(controller.decide(step.record, step.observation))
        tokens += step.num_tokens
        seconds += step.step_time_s
    return tokens / seconds


def _engine_config(traces: Traces, num_running_reqs: int) -> TraceEngineConfig:
    return TraceEngineConfig(
        max_num_seqs=num_running_reqs,
        max_model_len=traces.header.max_model_len,
        max_num_batched_tokens=_NO_LIMIT,
        num_kv_blocks=_NO_LIMIT,
        has_prefill=False,
    )


def _requests(traces: Traces, order: np.ndarray) -> Iterator[WorkloadRequest]:
    """The requests in turn, round and round, each time under another name."""
    prompts = [tuple(prompt.tolist()) for prompt in traces.prompts]
    limits = np.where(traces.is_stopped, traces.header.output_tokens, traces.num_output_tokens)
    turn = 0
    while True:
        for request in order.tolist():
            yield WorkloadRequest(
                request_id=f"{traces.request_ids[request]}-{turn}",
                prompt_token_ids=prompts[request],
                max_tokens=int(limits[request]),
                temperature=traces.header.temperature,
                kind=traces.kinds[request],
            )
            turn += 1
