"""Recording traces on live vLLM: a plain run in which every drafter drafts at every position.

Above temperature 0 this relies on vLLM's rejection sampler as it treats drafts without
probabilities, which is how the hook submits all of them: a draft token is accepted with the
target's probability for it and, if refused, replaced by a draw from the *other* tokens. So it is
accepted exactly when it equals the token that the target emits, and a plain run draws that token
from the same distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policy.contract import MODEL_DRAFTERS, SURVIVAL_DRAFTERS, TOKEN_DRAFTERS, Contract

from .prompts.prompt import Split
from .traces import DrafterTrace, TraceHeader, Traces
from .vllm_engine import ProbedStep, VllmEngine
from .workload import WorkloadRequest


@dataclass
class _Offer:
    """What a drafter drafted at one position."""

    token_ids: list[int] = field(default_factory=list)
    match_length: int = 0
    agreement: float = 0.0
    survival: np.ndarray | None = None
    margin: np.ndarray | None = None
    target_probability: float = np.nan


class _Recording:
    """One request under way."""

    def __init__(self, request: WorkloadRequest, contract: Contract) -> None:
        self.request = request
        self.output_token_ids: list[int] = []
        self.offers: dict[str, dict[int, _Offer]] = {name: {} for name in contract.proposers}

    @property
    def num_outputs(self) -> int:
        return len(self.output_token_ids)

    def to_traces(self, header: TraceHeader, split: Split) -> Traces:
        """The finished request."""
        request, outputs = self.request, self.output_token_ids
        return Traces(
            header=header,
            request_ids=(request.request_id,),
            kinds=(request.kind,),
            splits=(split,),
            prompts=(np.array(request.prompt_token_ids, np.int32),),
            starts=np.array([0, len(outputs)], np.int64),
            output_token_ids=np.array(outputs, np.int32),
            is_stopped=np.array([len(outputs) < request.max_tokens]),
            drafters={
                name: self._drafter(name, length, header.temperature > 0)
                for name, length in header.max_lengths.items()
            },
        )

    def _drafter(self, name: str, max_length: int, is_sampled: bool) -> DrafterTrace:
        offers = [self.offers[name].get(at, _Offer()) for at in range(self.num_outputs)]
        drafted = np.array([len(offer.token_ids) for offer in offers], np.uint8)
        accepted = [
            num_accepted(offer.token_ids, self.output_token_ids[at:])
            for at, offer in enumerate(offers)
        ]
        probability = np.array([offer.target_probability for offer in offers], np.float32)
        parts: dict[str, Any] = {
            "num_draft_tokens": drafted,
            "num_accepted_tokens": np.array(accepted, np.uint8),
            "target_probability": probability if is_sampled else None,
        }
        unknown = np.full(max_length, np.nan, np.float32)
        if name in SURVIVAL_DRAFTERS:
            parts["survival"] = np.array(
                [unknown if offer.survival is None else offer.survival for offer in offers]
            )
        else:
            parts["agreement"] = np.array([offer.agreement for offer in offers], np.float32)
        if name in MODEL_DRAFTERS:
            parts["margin"] = np.array(
                [unknown if offer.margin is None else offer.margin for offer in offers]
            )
        if name in TOKEN_DRAFTERS:
            parts["match_length"] = np.array([offer.match_length for offer in offers], np.uint8)
        return DrafterTrace(**parts)


def num_accepted(draft: list[int], outputs: list[int]) -> int:
    """Leading tokens of a draft that the target emitted.

    Example:
        >>> num_accepted([5, 6, 7], [5, 6, 8, 9])
        2
    """
    count = 0
    for drafted, emitted in zip(draft, outputs, strict=False):
        if drafted != emitted:
            break
        count += 1
    return count


def record_traces(
    engine: VllmEngine,
    requests: Iterable[WorkloadRequest],
    split: Split,
    header: TraceHeader,
    concurrency: int,
) -> Iterator[Traces]:
    """Serve requests without speculation and record what every drafter would have drafted.

    Args:
        engine: A live engine whose decisions are left to the caller.
        requests: What to serve, in order.
        split: Split of the requests.
        header: Of the traces; its drafters and lengths must be the engine's.
        concurrency: Requests in flight.

    Yields:
        The traces of one request, as each ends.
    """
    requests = list(requests)
    by_id = {request.request_id: request for request in requests}
    recordings: dict[str, _Recording] = {}
    for step in engine.probe(requests, concurrency):
        for request_id, token_ids in step.emitted.items():
            if request_id not in recordings:
                recordings[request_id] = _Recording(by_id[request_id], engine.contract)
            recordings[request_id].output_token_ids += token_ids
        if header.temperature > 0 and step.probes:
            _note_probabilities(step, recordings)
        for drafter, probe in step.probes.items():
            offer = step.hook.pending.record.token_offers.get(drafter)
            for row, request_id in enumerate(step.req_ids):
                recording = recordings[request_id]
                recording.offers[drafter][recording.num_outputs] = _Offer(
                    probe.token_ids[row],
                    0 if offer is None else int(offer.match_length[row]),
                    0.0 if offer is None or offer.agreement is None else offer.agreement[row],
                    probe.survival[row],
                    probe.margin[row],
                )
        for request_id in sorted(step.finished):
            yield recordings.pop(request_id).to_traces(header, split)


def _note_probabilities(step: ProbedStep, recordings: dict[str, _Recording]) -> None:
    """Complete the offers of the step before by what the target thought of their first tokens."""
    for drafter in step.probes:
        offers = []
        for request_id in step.req_ids:
            recording = recordings[request_id]
            offers.append(recording.offers[drafter].get(recording.num_outputs - 1, _Offer()))
        first = np.array([offer.token_ids[0] if offer.token_ids else 0 for offer in offers])
        probabilities = step.hook.target_probabilities(first)
        for offer, probability in zip(offers, probabilities.tolist(), strict=True):
            if offer.token_ids:
                offer.target_probability = probability
