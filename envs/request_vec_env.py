"""`RequestVecEnv`: every request in flight decides for itself, all by one policy.

Each seat of a replayed engine is an environment of the `VecEnv`; a request that sits down begins
an episode and ends it with its last token. What a seat earns is the tokens of its request less the
time they took, that of a plain step and what its draft cost (`envs.row_charges`), at the price of
time: the tokens per second that are reached at its load now (`set_prices`). At a lower price, such
as that of no speculation, a learner that discounts the future would pay more for tokens than they
are worth. The engines go on from episode to episode, at constant loads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from policy.compiled import compiled
from policy.contract import Contract
from policy.cost_model import CostModel
from policy.errors import ConfigError
from policy.features import Layout

from .draft_vec_env import advance
from .row_charges import Reading, charge_rows, note_reading
from .row_worth import Worth, value_rows
from .simulator import abort_all, begin_interval, draft, run
from .simulator_state import Engines, Replay, TraceEngineConfig, make_engines, make_replay
from .trace_workload import Mix, TraceWorkload, draw_uint64

_FREE = -1


class Seats(NamedTuple):
    """Who sits where, and what came of it.

    Attributes:
        first: First seat of each engine and, last, their number, int64 `[engines + 1]`.
        of_slot: Seat, counted within the engine, of the request with each history slot, int32
            `[engines, slots]`; -1 for none.
        is_taken: bool `[seats]`.
        num_emitted: Output tokens of each seat's request at its last decision, int64 `[seats]`.
        action: The contract's, of each seat, int64 `[seats, len(action_nvec)]`.
        reward: float32 `[seats]`.
        done: Whether its request ended, bool `[seats]`.
        observation: float32 `[seats, fields]`; the fields' lower bounds while nobody decides.
        price: Tokens that the time of a plain token is worth in each engine, float64 `[engines]`.
        num_tokens: Output tokens of each engine since they were last counted, int64 `[engines]`.
        charged_s: Seconds they took, prompts left out, float64 `[engines]`.
        table: The contract's canonical actions, int64 `[actions, len(action_nvec)]`.
        worth_tokens: See `Worth.tokens`, float32 `[seats, actions]`.
        worth_steps: See `Worth.plain_steps`, float32 `[seats, actions]`.
    """

    first: np.ndarray
    of_slot: np.ndarray
    is_taken: np.ndarray
    num_emitted: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    done: np.ndarray
    observation: np.ndarray
    price: np.ndarray
    num_tokens: np.ndarray
    charged_s: np.ndarray
    table: np.ndarray
    worth_tokens: np.ndarray
    worth_steps: np.ndarray

    @classmethod
    def empty(cls, loads: Sequence[int], engines: Engines, contract: Contract) -> Seats:
        """Engines whose requests have yet to come."""
        first = np.cumsum([0, *loads])
        num_seats = int(first[-1])
        table = contract.action_table
        return cls(
            first=first,
            of_slot=np.full(engines.slot_is_used.shape, _FREE, np.int32),
            is_taken=np.zeros(num_seats, np.bool_),
            num_emitted=np.zeros(num_seats, np.int64),
            action=np.zeros((num_seats, len(contract.action_nvec)), np.int64),
            reward=np.zeros(num_seats, np.float32),
            done=np.zeros(num_seats, np.bool_),
            observation=np.zeros((num_seats, len(contract.fields)), np.float32),
            price=np.ones(len(loads)),
            num_tokens=np.zeros(len(loads), np.int64),
            charged_s=np.zeros(len(loads)),
            table=table,
            worth_tokens=np.zeros((num_seats, len(table)), np.float32),
            worth_steps=np.zeros((num_seats, len(table)), np.float32),
        )


def engine_loads(loads: Iterable[int], seats_per_load: int) -> list[int]:
    """Requests in flight of each engine: at every load as many seats, or the least above."""
    return [load for load in sorted(set(loads)) for _ in range(-(-seats_per_load // load))]


class RequestVecEnv(VecEnv):
    """The seats of many replayed engines.

    Args:
        workload: Recorded requests and loads.
        cost_model: Step times.
        contract: Drafters and lengths, request granularity.
        config: The engine that is simulated.
        seats_per_load: Seats at each of the workload's loads, at least; an engine has as many as
            its load.
        seed: Of the requests' draws.
        num_threads: Threads that step the engines; None takes one per processor. Results do not
            depend on it.

    Raises:
        ConfigError: If a load exceeds the engine, or the granularity is another.
        TraceError: If the traces lack a drafter or a length of the contract.
    """

    def __init__(
        self,
        workload: TraceWorkload,
        cost_model: CostModel,
        contract: Contract,
        config: TraceEngineConfig,
        seats_per_load: int,
        seed: int = 0,
        num_threads: int | None = None,
    ) -> None:
        if contract.granularity != "request":
            raise ConfigError("RequestVecEnv decides per request; set granularity to 'request'.")
        loads = sorted(set(workload.mix.concurrency.tolist()))
        if loads[-1] > config.max_num_seqs:
            raise ConfigError(
                f"A load of {loads[-1]} requests exceeds max_num_seqs {config.max_num_seqs}; raise "
                "it or lower workload.concurrency."
            )
        if seats_per_load < 1:
            raise ConfigError(f"seats_per_load is {seats_per_load}; make it 1 or more.")
        self.contract = contract
        self.render_mode = None
        self.cost_model = cost_model
        self.references = workload.references(cost_model)
        self.loads = np.array(engine_loads(loads, seats_per_load))
        self._mix = workload.mix
        self._layout = Layout.of(contract)
        self._replay = make_replay(workload.traces, cost_model, contract, config)
        self._engines = make_engines(contract, config, len(self.loads))
        self._reading = Reading.empty(self._engines)
        self._seats = Seats.empty(self.loads.tolist(), self._engines, contract)
        self._reference_s = np.array(
            [self.references[load].step_time_s for load in self.loads.tolist()]
        )
        self._master = np.zeros(1, np.uint64)
        self._states = np.zeros(len(self.loads), np.uint64)
        self._num_threads = max(1, min(len(self.loads), num_threads or os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(self._num_threads)
        super().__init__(
            int(self.loads.sum()),
            gymnasium.spaces.Box(contract.low, contract.high),
            gymnasium.spaces.MultiDiscrete(np.array(contract.action_nvec)),
        )
        self.seed(seed)

    def reset(self) -> np.ndarray:
        """Fill every seat anew.

        Returns:
            Observations, float32 `[num_envs, fields]`.
        """
        if self._seeds[0] is not None:
            self._master[0] = self._seeds[0]
            self._reset_seeds()
        self._states[:] = [draw_uint64(self._master, 0) for _ in self.loads]
        self._in_threads(_begin_some)
        return self._seats.observation.copy()

    def step_async(self, actions: np.ndarray) -> None:
        """Take the actions, int `[num_envs, len(action_nvec)]`."""
        if ((actions < 0) | (actions >= self.contract.action_nvec)).any():
            raise gymnasium.error.InvalidAction(
                f"An action is not in {self.action_space}; take its pairs only."
            )
        self._seats.action[:] = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step every engine to its next decision; seats that fell free are taken again.

        Returns:
            Observations, rewards, dones and empty infos; `take_throughput` tells of the engines.
        """
        self._in_threads(_step_some)
        seats = self._seats
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        return seats.observation.copy(), seats.reward.copy(), seats.done.copy(), infos

    def take_throughput(self) -> dict[int, tuple[int, float]]:
        """Output tokens and charged seconds by load, since the last call."""
        seats, taken = self._seats, {}
        for load in np.unique(self.loads).tolist():
            here = self.loads == load
            taken[load] = int(seats.num_tokens[here].sum()), float(seats.charged_s[here].sum())
        seats.num_tokens[:] = 0
        seats.charged_s[:] = 0
        return taken

    def worth(self) -> Worth:
        """What each canonical action would have been worth in the last step, beside the others'."""
        seats = self._seats
        price = np.repeat(seats.price, self.loads).astype(np.float32)
        return Worth(seats.worth_tokens.copy(), seats.worth_steps.copy(), price)

    def set_prices(self, speedups: Mapping[int, float]) -> None:
        """Pay time by the speed that is reached now.

        Args:
            speedups: Tokens per second over those of no speculation, by load.
        """
        self._seats.price[:] = [speedups[load] for load in self.loads.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs to draw, observe and pay alike; JSON-ready."""
        return {
            "master": int(self._master[0]),
            "price": self._seats.price.tolist(),
            "history": [values[self._batch_slots()].tolist() for values in self._engines.history],
            "steps_since_draft": self._engines.counters["steps_since_draft"].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, with new requests in every seat."""
        self._master[0] = state["master"]
        self._seats.price[:] = state["price"]
        for values, saved in zip(self._engines.history, state["history"], strict=True):
            values[self._batch_slots()] = np.array(saved, np.float32)
        self._engines.counters["steps_since_draft"] = state["steps_since_draft"]

    def _batch_slots(self) -> slice:
        """What an observation remembers of the engines; requests and their slots end at a reset."""
        return slice(0, None, 1 + self._engines.slot_is_used.shape[1])

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same attribute for every seat; there is one object only."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of all seats."""
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method once, for all seats."""
        result = getattr(self, method_name)(*method_args, **method_kwargs)
        return [result] * len(list(self._get_indices(indices)))

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """No seat is wrapped."""
        return [False] * len(list(self._get_indices(indices)))

    def _in_threads(self, function: Callable[..., None]) -> None:
        """Call a compiled function, which lets go of Python's lock, on shares of the seats."""
        seats = np.linspace(0, self.num_envs, self._num_threads + 1)
        bounds = np.searchsorted(self._seats.first, seats)
        bounds[-1] = len(self.loads)
        shares = [
            self._threads.submit(
                function,
                self._layout,
                self._replay,
                self._engines,
                self._mix,
                self._states,
                self._reading,
                self._seats,
                self._reference_s,
                first,
                last,
            )
            for first, last in itertools.pairwise(bounds.tolist())
        ]
        for share in shares:
            share.result()


@compiled
def _begin_some(
    layout: Layout,
    replay: Replay,
    engines: Engines,
    mix: Mix,
    states: np.ndarray,
    reading: Reading,
    seats: Seats,
    reference_s: np.ndarray,
    first: int,
    last: int,
) -> None:
    for e in range(first, last):
        abort_all(replay, engines, e)
        seats.of_slot[e] = _FREE
        seats.is_taken[seats.first[e] : seats.first[e + 1]] = False
        begin_interval(engines, e)
        load = seats.first[e + 1] - seats.first[e]
        advance(layout, replay, engines, mix, states, load, True, e)
        _seat_and_observe(layout, engines, seats, e)


@compiled
def _step_some(
    layout: Layout,
    replay: Replay,
    engines: Engines,
    mix: Mix,
    states: np.ndarray,
    reading: Reading,
    seats: Seats,
    reference_s: np.ndarray,
    first: int,
    last: int,
) -> None:
    for e in range(first, last):
        load = seats.first[e + 1] - seats.first[e]
        num_rows = engines.counters[e].num_rows
        actions = np.zeros((num_rows, seats.action.shape[1]), np.int64)
        seat_of_row = np.zeros(num_rows, np.int64)
        for row in range(num_rows):
            seat_of_row[row] = seats.of_slot[e, engines.row_slot[e, row]]
            if seat_of_row[row] != _FREE:
                seat_of_row[row] += seats.first[e]
                actions[row] = seats.action[seat_of_row[row]]
        mine = slice(seats.first[e], seats.first[e + 1])
        seats.reward[mine] = seats.worth_tokens[mine] = seats.worth_steps[mine] = 0
        seats.done[mine] = False
        begin_interval(engines, e)
        note_reading(replay, engines, e, actions, reading)
        tokens, added_s = np.zeros((2, num_rows, len(seats.table)), np.float32)
        value_rows(replay, engines, e, load, actions, seats.table, reading, tokens, added_s)
        draft(replay, engines, e, actions)
        seconds = np.zeros(num_rows)
        charge_rows(replay, engines, e, load, reading, seconds)
        for row in range(num_rows):
            seat = seat_of_row[row]
            if seat != _FREE:
                plain_steps = load / reference_s[e]  # that a second is worth to one of `load`
                seats.reward[seat] = -seats.price[e] * (1 + plain_steps * seconds[row])
                seats.worth_tokens[seat] = tokens[row]
                seats.worth_steps[seat] = 1 + plain_steps * added_s[row]
        run(layout, replay, engines, e)
        _settle(engines, seats, e)
        advance(layout, replay, engines, mix, states, load, False, e)
        seats.num_tokens[e] += engines.counters[e].num_tokens
        seats.charged_s[e] += engines.counters[e].seconds - engines.counters[e].prefill_seconds
        _seat_and_observe(layout, engines, seats, e)


@compiled
def _settle(engines: Engines, seats: Seats, e: int) -> None:
    """Pay for the step's tokens; who ended leaves."""
    for row in range(engines.counters[e].num_rows):
        request = engines.requests[e, engines.row_entry[e, row]]
        if seats.of_slot[e, request.history_slot] == _FREE:
            continue
        seat = seats.first[e] + seats.of_slot[e, request.history_slot]
        if seats.num_emitted[seat] > 0:  # it had decided
            seats.reward[seat] += request.num_emitted - seats.num_emitted[seat]
        if request.has_ended:
            seats.done[seat] = True
            seats.is_taken[seat] = False
            seats.of_slot[e, request.history_slot] = _FREE


@compiled
def _seat_and_observe(layout: Layout, engines: Engines, seats: Seats, e: int) -> None:
    """Seat those who came and show every decider its row."""
    first, last = seats.first[e], seats.first[e + 1]
    seats.observation[first:last] = layout.low
    for i in range(engines.counters[e].num_reqs):
        request = engines.requests[e, i]
        if request.has_ended or seats.of_slot[e, request.history_slot] != _FREE:
            continue
        seat = first
        while seats.is_taken[seat]:
            seat += 1
        seats.is_taken[seat] = True
        seats.of_slot[e, request.history_slot] = seat - first
        seats.num_emitted[seat] = 0
    for row in range(engines.counters[e].num_rows):
        request = engines.requests[e, engines.row_entry[e, row]]
        if not request.has_ended:
            seat = first + seats.of_slot[e, request.history_slot]
            seats.num_emitted[seat] = request.num_emitted
            seats.observation[seat] = engines.observation[e, row]
