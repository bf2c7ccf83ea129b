"""Requests drawn from recorded ones: the stream of a replayed episode.

The draws are compiled and come from one small generator per engine, so that thousands of engines
can begin episodes without Python; `TraceWorkload.episode` makes the very same draws for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from policy.compiled import compiled
from policy.cost_model import CostModel, StepShape
from policy.errors import ConfigError

from .reward import LoadReference
from .traces import Traces
from .workload import ClosedLoop, Episode, Slot, WorkloadRequest, endless_slots


class Mix(NamedTuple):
    """What an episode draws from.

    Attributes:
        concurrency: Numbers of requests in flight, int32 `[loads]`.
        share_up_to: Cumulative shares of the kinds, float64 `[kinds]`.
        first: First entry of each kind in `members` and, last, their number, int64 `[kinds + 1]`.
        members: Recorded requests, kind after kind, int32.
        most_tokens: Longest output that each recorded request can be asked for, int32
            `[requests]`: what was recorded, or any length where it ended by itself.
        output_tokens: Token limit of a request.
        first_wave_min_fraction: Smallest share of it that a request of the first wave asks for.
    """

    concurrency: np.ndarray
    share_up_to: np.ndarray
    first: np.ndarray
    members: np.ndarray
    most_tokens: np.ndarray
    output_tokens: int
    first_wave_min_fraction: float


class TraceWorkload:
    """Recorded requests from which every episode draws, with replacement.

    Args:
        traces: The requests.
        concurrency: Numbers of requests in flight; each episode draws one of them.
        output_tokens: Token limit of a request; at most what was recorded.
        kinds: Weight of each kind; None takes every recorded kind equally.
        first_wave_min_fraction: See `WorkloadConfig`.

    Raises:
        ConfigError: If a kind was not recorded, or outputs are shorter than asked for.
    """

    def __init__(
        self,
        traces: Traces,
        concurrency: tuple[int, ...],
        output_tokens: int,
        kinds: Mapping[str, float] | None = None,
        first_wave_min_fraction: float = 0.25,
    ) -> None:
        if output_tokens > traces.header.output_tokens:
            raise ConfigError(
                f"The traces hold {traces.header.output_tokens} output tokens of a request, not "
                f"{output_tokens}; lower workload.output_tokens or collect longer ones."
            )
        self.traces = traces
        self._concurrency = concurrency
        self._output_tokens = output_tokens
        self._first_wave_min_fraction = first_wave_min_fraction
        self.mix = self._mix(dict.fromkeys(traces.kinds, 1.0) if kinds is None else kinds)

    def episode(self, seed: int, concurrency: int | None = None) -> Episode:
        """The episode of a seed, the same in every process.

        Args:
            seed: Fixes the episode.
            concurrency: Requests in flight; drawn from the configured ones if None.
        """
        state = np.array([seed], np.uint64)
        drawn = draw_concurrency(self.mix, state, 0)
        load = drawn if concurrency is None else concurrency
        stream = self._requests(seed, state, endless_slots(load))
        return Episode(load, stream, ClosedLoop(load))

    def requests(self, seed: int, slots: Iterable[Slot]) -> Iterator[WorkloadRequest]:
        """A stream of requests, one for each slot, as `Workload.requests`.

        Raises:
            ConfigError: If a slot names a kind, or a temperature, that was not recorded.
        """
        return self._requests(seed, np.array([seed], np.uint64), slots)

    def _requests(
        self, seed: int, state: np.ndarray, slots: Iterable[Slot]
    ) -> Iterator[WorkloadRequest]:
        traces = self.traces
        mixes: dict[tuple[tuple[str, float], ...], Mix] = {}
        for index, slot in enumerate(slots):
            mix = self.mix
            if slot.kinds is not None:
                key = tuple(slot.kinds.items())
                if key not in mixes:
                    mixes[key] = self._mix(slot.kinds)
                mix = mixes[key]
            if slot.temperature not in (None, traces.header.temperature):
                raise ConfigError(
                    f"The traces were recorded at temperature {traces.header.temperature}, not "
                    f"{slot.temperature}; serve the scenario live only, or collect others."
                )
            trace, max_tokens = draw_request(mix, state, 0, slot.is_first_wave)
            yield WorkloadRequest(
                request_id=f"{traces.request_ids[trace]}-{seed}-{index}",
                prompt_token_ids=tuple(traces.prompts[trace].tolist()),
                max_tokens=max_tokens,
                temperature=traces.header.temperature,
                kind=traces.kinds[trace],
            )

    def _mix(self, kinds: Mapping[str, float]) -> Mix:
        """What an episode draws from, with these weights of the kinds."""
        traces, output_tokens = self.traces, self._output_tokens
        recorded = sorted(set(traces.kinds))
        if unknown := sorted(set(kinds) - set(recorded)):
            raise ConfigError(
                f"The traces hold no request of kind '{unknown[0]}'; choose from "
                f"{', '.join(recorded)}."
            )
        if not kinds or min(kinds.values()) < 0 or sum(kinds.values()) <= 0:
            raise ConfigError("No kind of the traces has a weight; give one a weight above 0.")
        members = [
            np.array([i for i, name in enumerate(traces.kinds) if name == kind], np.int32)
            for kind in sorted(kinds)
        ]
        weights = np.array([kinds[kind] for kind in sorted(kinds)], np.float64)
        most_tokens = np.where(traces.is_stopped, output_tokens, traces.num_output_tokens)
        return Mix(
            concurrency=np.array(self._concurrency, np.int32),
            share_up_to=np.cumsum(weights) / weights.sum(),
            first=np.cumsum([0, *map(len, members)]).astype(np.int64),
            members=np.concatenate(members),
            most_tokens=most_tokens.astype(np.int32),
            output_tokens=output_tokens,
            first_wave_min_fraction=self._first_wave_min_fraction,
        )

    def references(self, cost_model: CostModel) -> dict[int, LoadReference]:
        """No speculation at each load: a step of one token per request at the mean context."""
        num_prompt = np.array([len(prompt) for prompt in self.traces.prompts])
        outputs = np.minimum(self.traces.num_output_tokens, self.mix.output_tokens)
        context = float(np.average(num_prompt + outputs / 2, weights=outputs))
        references = {}
        for load in sorted(set(self.mix.concurrency.tolist())):
            shape = StepShape(
                num_running_reqs=load,
                num_verified_tokens=load,
                num_context_tokens=round(load * context),
            )
            step_time_s = cost_model.expected_s(shape)
            references[load] = LoadReference(load / step_time_s, step_time_s)
        return references


@compiled
def draw_uint64(states: np.ndarray, e: int) -> np.uint64:
    """The next number of generator `e`: splitmix64, whose state is a counter."""
    states[e] += np.uint64(0x9E3779B97F4A7C15)
    number = states[e]
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


@compiled
def draw_fraction(states: np.ndarray, e: int) -> float:
    """A number in [0, 1)."""
    return (draw_uint64(states, e) >> np.uint64(11)) * (1.0 / (1 << 53))


@compiled
def draw_concurrency(mix: Mix, states: np.ndarray, e: int) -> int:
    """An episode's number of requests in flight."""
    return mix.concurrency[int(draw_fraction(states, e) * len(mix.concurrency))]


@compiled
def draw_request(mix: Mix, states: np.ndarray, e: int, is_first_wave: bool) -> tuple[int, int]:
    """A recorded request and its token limit."""
    share = draw_fraction(states, e)
    kind = 0
    while share >= mix.share_up_to[kind] and kind < len(mix.share_up_to) - 1:
        kind += 1
    num_members = mix.first[kind + 1] - mix.first[kind]
    member = mix.first[kind] + int(draw_fraction(states, e) * num_members)
    trace = mix.members[member]
    fraction = 1.0
    if is_first_wave:
        low = mix.first_wave_min_fraction
        fraction = low + (1 - low) * draw_fraction(states, e)
    limit = max(1, round(fraction * mix.output_tokens))
    return trace, min(limit, mix.most_tokens[trace])
