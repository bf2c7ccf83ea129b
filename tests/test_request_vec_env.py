"""Requests that decide for themselves: the engine's own rows, and rewards that add up to its."""

import json
import re

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecEnv

from envs.request_vec_env import RequestVecEnv, engine_loads
from envs.simulator_state import TraceEngineConfig
from envs.trace_engine import TraceEngine
from envs.trace_workload import TraceWorkload
from envs.workload import ClosedLoop, Episode, endless_slots
from policy.cost_model import CostModel
from policy.errors import ConfigError, TraceError

from .synthetic_traces import PRICES_S, make_traces

TRACES = make_traces(num_requests=30, output_tokens=48, seed=2)
LOADS = (1, 2, 8)
WORKLOAD = TraceWorkload(TRACES, LOADS, 40, {"code": 2.0, "chat": 1.0})
PRICES_S = {**PRICES_S, "num_model_drafts": 0.003, "num_draft_context_tokens": 2e-6}
COST_MODEL = CostModel.from_weights(PRICES_S, token_draft_share=0.05)
SEATS = 8
NUM_SEATS = 24


@pytest.fixture
def make_vec_env():
    """Makes environments that are closed after the test."""
    made = []

    def make(
        seed=5,
        num_threads=2,
        workload=WORKLOAD,
        cost_model=COST_MODEL,
        lengths=None,
        seats=SEATS,
        **settings,
    ):
        contract = TRACES.contract(lengths, granularity="request")
        config = TraceEngineConfig(**settings)
        vec_env = RequestVecEnv(workload, cost_model, contract, config, seats, seed, num_threads)
        made.append(vec_env)
        return vec_env

    yield make
    for vec_env in made:
        vec_env.close()


def decided_by_row(contract, rows):
    """An action for each observation row that depends on nothing else, int `[rows, 2]`."""
    numbers = np.frombuffer(rows.astype(np.float32).tobytes(), np.uint32).reshape(rows.shape)
    choices = (numbers.astype(np.uint64).sum(axis=1) // 7) % len(contract.action_table)
    return contract.action_table[choices]


def deciders(vec_env, observations):
    """Which seats have a request that decides."""
    return (observations != vec_env.contract.low).any(axis=1)


def in_order(rows):
    return rows[np.lexsort(rows.T)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompts_are_cached": False, "max_num_batched_tokens": 60, "max_num_seqs": 8},
        {"dormant_after": 3, "max_pending_tokens": 8},
        {"has_prefill": False},
    ],
    ids=["roomy", "crowded", "dormant", "decode"],
)
def test_the_seats_of_an_engine_are_the_rows_of_a_trace_engine(make_vec_env, settings):
    vec_env = make_vec_env(**settings)
    contract = vec_env.contract
    observations = vec_env.reset()
    engines, steps = [], []
    for load, state in zip(vec_env.loads.tolist(), drawn_seeds(5, len(vec_env.loads)), strict=True):
        engines.append(TraceEngine(TRACES, COST_MODEL, contract, TraceEngineConfig(**settings)))
        stream = WORKLOAD.requests(state, endless_slots(load))
        steps.append(engines[-1].reset(Episode(load, stream, ClosedLoop(load))))
    first = np.cumsum([0, *vec_env.loads])
    num_finished = num_done = 0
    for _ in range(120):
        for e, step in enumerate(steps):
            seats = slice(first[e], first[e + 1])
            ours = observations[seats][deciders(vec_env, observations)[seats]]
            alive = ~np.isin(step.record.req_ids, list(ended(engines[e])))
            np.testing.assert_array_equal(in_order(ours), in_order(step.observation[alive]))
        observations, _, dones, _ = vec_env.step(decided_by_row(contract, observations))
        num_done += dones.sum()
        for e, engine in enumerate(engines):
            steps[e] = engine.step(decided_by_row(contract, steps[e].observation))
            num_finished += steps[e].num_finished_reqs
    assert num_done == num_finished > 50


def drawn_seeds(seed, count):
    """Seeds of the engines' requests: splitmix64, written once more."""
    mask, state, seeds = (1 << 64) - 1, seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        number = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
        seeds.append(number ^ (number >> 31))
    return seeds


def ended(engine):
    """Requests that ended in the last step."""
    has_ended = engine._engines.requests[0]["has_ended"]
    return {name for i, name in enumerate(engine._req_ids) if has_ended[i]}


@pytest.mark.parametrize("num_steps", range(1, 40, 3))
def test_what_the_seats_earn_adds_up_to_what_the_engines_gain(make_vec_env, num_steps):
    """Against the same step without drafts, in steps of no speculation at that load.

    Context is free here: a step is charged for that of its end, a row for that of its beginning.
    """
    rng = np.random.default_rng(num_steps)
    free = {"num_context_tokens": 0.0, "num_draft_context_tokens": 0.0}
    prices = CostModel.from_weights({**PRICES_S, **free}, token_draft_share=0.05)
    settings = {"has_prefill": False, "max_pending_tokens": 10_000, "cost_model": prices}
    drafting, plain = (make_vec_env(**settings) for _ in range(2))
    observations = drafting.reset()
    plain.reset()
    for _ in range(num_steps):
        actions = rng.integers(0, drafting.contract.action_nvec, (NUM_SEATS, 2))
        observations, *_ = drafting.step(actions)
        plain.step(actions)
    drafting.take_throughput()
    plain.take_throughput()
    actions = rng.integers(0, drafting.contract.action_nvec, (NUM_SEATS, 2))
    _, rewards, _, _ = drafting.step(actions)
    _, nothing, _, _ = plain.step(np.zeros((NUM_SEATS, 2), int))
    assert not nothing.any()
    assert not rewards[~deciders(drafting, observations)].any()
    earned = {load: rewards[seats_of(drafting, load)].sum() for load in LOADS}
    ours, theirs = drafting.take_throughput(), plain.take_throughput()
    for load in LOADS:
        tokens, charged_s = np.subtract(ours[load], theirs[load])
        gained = tokens - load * charged_s / drafting.references[load].step_time_s
        assert earned[load] == pytest.approx(gained, abs=1e-4)
    assert any(earned.values())


def seats_of(vec_env, load):
    """Seats at a load."""
    return np.repeat(vec_env.loads, vec_env.loads) == load


@pytest.mark.parametrize("price", [1.0, 1.75])
def test_a_pass_is_shared_by_those_whose_drafts_are_that_long(make_vec_env, price):
    """Two requests draft one and three tokens with the model, by hand."""
    vec_env = make_vec_env(has_prefill=False, workload=TraceWorkload(TRACES, (2,), 40), seats=2)
    vec_env.set_prices({2: price})
    observations = vec_env.reset()
    pending = np.round(2 ** observations[:, column(vec_env, "request_eagle3_pending_tokens_log2")])
    context = np.round(2 ** observations[:, column(vec_env, "request_num_context_tokens_log2")]) - 1
    _, rewards, _, _ = vec_env.step(np.array([[2, 1], [2, 3]]))
    tokens = observed_tokens(vec_env)
    later_s = PRICES_S["num_draft_passes"] + 2 * PRICES_S["num_draft_pass_tokens"]
    for seat, (length, passes_s) in enumerate(
        [(1, PRICES_S["num_draft_passes"] / 2), (3, PRICES_S["num_draft_passes"] / 2 + 2 * later_s)]
    ):
        seconds = length * PRICES_S["num_verified_tokens"] + PRICES_S["num_model_drafts"] / 2
        seconds += (pending[seat] - 1) * PRICES_S["num_draft_pass_tokens"] + passes_s
        seconds += context[seat] * PRICES_S["num_draft_context_tokens"]
        reference_s = vec_env.references[2].step_time_s
        assert rewards[seat] == pytest.approx(
            tokens[seat] - price * (1 + 2 * seconds / reference_s)
        )


@pytest.mark.parametrize("cutoffs", [(), (0.3,)], ids=["whole", "cut"])
@pytest.mark.parametrize("seat", [0, 5, 9, 13, 20])
def test_worth_is_the_difference_that_each_action_of_one_request_makes(cutoffs, seat):
    """Every action is taken in an engine of its own; the others do the same in all of them.

    Context is free, as above; tokens that wait for the model drafter are, by definition.
    """
    free = {"num_context_tokens": 0.0, "num_draft_context_tokens": 0.0}
    prices = CostModel.from_weights({**PRICES_S, **free}, token_draft_share=0.05)
    contract = TRACES.contract(granularity="request", cutoffs=cutoffs)
    settings = TraceEngineConfig(has_prefill=False, max_pending_tokens=10_000)
    table, made = contract.action_table, []
    for action in table:
        vec_env = RequestVecEnv(WORKLOAD, prices, contract, settings, SEATS, 5, 1)
        observations = vec_env.reset()
        rng = np.random.default_rng(seat)
        for _ in range(7):
            observations, *_ = vec_env.step(table[rng.integers(0, len(table), NUM_SEATS)])
        vec_env.take_throughput()
        actions = table[rng.integers(0, len(table), NUM_SEATS)]
        actions[seat] = action
        vec_env.step(actions)
        load = int(np.repeat(vec_env.loads, vec_env.loads)[seat])
        num_tokens, charged_s = vec_env.take_throughput()[load]
        if table[:, 0][len(made)] == 2 and vec_env.worth().tokens[seat].any():
            waiting = round(
                2 ** observations[seat, column(vec_env, "request_eagle3_pending_tokens_log2")]
            )
            charged_s -= max(0, waiting - 1) * PRICES_S["num_draft_pass_tokens"]
        made.append((num_tokens, charged_s, vec_env.worth()))
        vec_env.close()
    reference_s = vec_env.references[load].step_time_s
    first_tokens, first_s, first = made[0]
    assert first.tokens[seat].any(), "nobody decides in this seat; the test would show nothing"
    for number, (num_tokens, charged_s, worth) in enumerate(made):
        np.testing.assert_array_equal(worth.tokens[seat], first.tokens[seat])
        np.testing.assert_allclose(worth.plain_steps[seat], first.plain_steps[seat], rtol=1e-6)
        assert worth.price[seat] == 1
        more = worth.tokens[seat, number] - worth.tokens[seat, 0]
        assert num_tokens - first_tokens == more
        longer_s = (worth.plain_steps[seat, number] - 1) * reference_s / load
        assert charged_s - first_s == pytest.approx(longer_s, abs=1e-7), table[number]
    assert len(set(first.plain_steps[seat].tolist())) > 3


def column(vec_env, name):
    return vec_env.contract.field_names.index(name)


def observed_tokens(vec_env):
    """Tokens of each seat's last step."""
    observation = vec_env._seats.observation
    return observation[:, column(vec_env, "request_last_emitted_tokens")]


def rollout(vec_env, steps=60, seed=0):
    """Everything a learner sees under random actions."""
    rng = np.random.default_rng(seed)
    seen = [(vec_env.reset(),)]
    for _ in range(steps):
        actions = rng.integers(0, vec_env.contract.action_nvec, (vec_env.num_envs, 2))
        seen.append(vec_env.step(actions)[:3])
    return seen


def assert_same_rollouts(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for values, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(values, same)


def test_neither_threads_nor_an_earlier_stretch_change_what_a_seed_gives(make_vec_env):
    first = rollout(make_vec_env(num_threads=1))
    vec_env = make_vec_env(num_threads=3)
    assert_same_rollouts(rollout(vec_env), first)
    assert not np.array_equal(rollout(make_vec_env(seed=6))[0][0], first[0][0])


def test_a_saved_training_goes_on_with_the_same_requests(make_vec_env):
    vec_env = make_vec_env()
    rollout(vec_env)
    saved = json.loads(json.dumps(vec_env.state_dict()))
    unbroken = rollout(vec_env)
    resumed = make_vec_env(seed=77)
    resumed.load_state_dict(saved)
    resumed._reset_seeds()  # as `restore` does: the saved generators, not the seed, decide
    assert_same_rollouts(rollout(resumed), unbroken)


def test_it_keeps_stable_baselines3s_contract(make_vec_env):
    vec_env = make_vec_env()
    assert isinstance(vec_env, VecEnv)
    contract = vec_env.contract
    assert vec_env.num_envs == NUM_SEATS
    assert vec_env.observation_space == gymnasium.spaces.Box(contract.low, contract.high)
    assert vec_env.action_space == gymnasium.spaces.MultiDiscrete(contract.action_nvec)
    seen = rollout(vec_env)
    assert seen[0][0].dtype == np.float32
    for observations, rewards, dones in seen[1:]:
        assert observations.shape == (NUM_SEATS, len(contract.fields))
        assert ((observations >= contract.low) & (observations <= contract.high)).all()
        assert (rewards.shape, rewards.dtype) == ((NUM_SEATS,), np.float32)
        assert (dones.shape, dones.dtype) == ((NUM_SEATS,), np.bool_)
    assert not np.shares_memory(seen[-1][0], seen[-2][0])
    assert vec_env.get_attr("contract", [0, 2]) == [contract, contract]
    assert vec_env.env_is_wrapped(gymnasium.Wrapper) == [False] * NUM_SEATS
    assert vec_env.env_method("state_dict", indices=1) == [vec_env.state_dict()]
    vec_env.set_attr("render_mode", None)


def test_every_load_gets_as_many_seats_or_the_least_above():
    assert engine_loads((4, 1, 4, 3), 4) == [1, 1, 1, 1, 3, 3, 4]
    assert engine_loads((32,), 4) == [32]


def refused(error, act, *arguments, **keywords):
    """The sentence that refuses; it ends with what to do."""
    with pytest.raises(error) as refusal:
        act(*arguments, **keywords)
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


def test_what_it_cannot_do_is_refused(make_vec_env):
    assert "A load of 8 requests exceeds" in refused(ConfigError, make_vec_env, max_num_seqs=7)
    assert "seats_per_load is 0" in refused(ConfigError, make_vec_env, seats=0)
    assert "up to 4 tokens, not 5" in refused(TraceError, make_vec_env, lengths={"eagle3": 5})
    contract, config = TRACES.contract(), TraceEngineConfig()
    said = refused(ConfigError, RequestVecEnv, WORKLOAD, COST_MODEL, contract, config, 2)
    assert "granularity" in said
    vec_env = make_vec_env()
    vec_env.reset()
    for action in [(3, 1), (-1, 1), (0, 9), (1, -1)]:
        actions = np.zeros((NUM_SEATS, 2), int)
        actions[2] = action
        refused(gymnasium.error.InvalidAction, vec_env.step, actions)
    vec_env.step(np.zeros((NUM_SEATS, 2), int))
