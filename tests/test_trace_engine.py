"""The replayed engine against a plain retelling, request by request; and as an environment."""

import hashlib
import itertools
import json
import re
from dataclasses import fields, replace

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

import envs.registration
from envs.draft_env import DraftEnv, EpisodeConfig
from envs.reward import RewardConfig
from envs.simulator_state import TraceEngineConfig
from envs.trace_engine import TraceEngine
from envs.trace_workload import TraceWorkload
from envs.workload import ClosedLoop, Episode, WorkloadRequest
from policy.cost_model import FEATURES, CostModel
from policy.errors import ConfigError, TraceError

from .plain_engine import PlainEngine
from .synthetic_traces import LENGTHS, make_cost_model, make_traces, with_suffix

TRACES = make_traces()
SUFFIX_TRACES = with_suffix(TRACES)
COMBINED = {"ngram_else_eagle3": 8, "suffix_else_eagle3": 10, "longest_expected": 6}
MOODS = {
    "anything": (0, 1, 2, 3, 4, 5, 6),
    "no model": (0, 1),
    "model": (2, 3),
    "combined": (4, 5, 6),
    "nothing": (0,),
}


def cost_model_by_load(seed=0):
    """Weights that change with the load, and a price for looking drafts up."""
    rng = np.random.default_rng(seed)
    return CostModel(np.array([1.0, 3.0, 6.0]), rng.random((3, len(FEATURES))) * 1e-3, 0.05)


def endless_requests(seed, traces=TRACES, full=False):
    """Recorded requests with any limit; those that end by themselves may be asked for more."""
    rng = np.random.default_rng(seed)
    for index in itertools.count():
        trace = int(rng.integers(traces.num_requests))
        recorded = int(traces.num_output_tokens[trace])
        most = recorded + 30 * bool(traces.is_stopped[trace])
        yield WorkloadRequest(
            request_id=f"{seed}-{index}",
            prompt_token_ids=tuple(traces.prompts[trace].tolist()),
            max_tokens=most if full else int(rng.integers(1, most + 1)),
            temperature=traces.header.temperature,
            kind="code",
        )


def make_episode(seed, load, **settings):
    return Episode(load, endless_requests(seed, **settings), ClosedLoop(load))


def random_actions(rng, contract, mood, num_rows):
    rows = num_rows if contract.granularity == "request" else 1
    drafters = [drafter for drafter in MOODS[mood] if drafter < len(contract.drafters)]
    _, *sizes = contract.action_nvec
    return np.stack(
        [
            rng.choice(drafters or range(len(contract.drafters)), rows),
            *(rng.integers(0, size, rows) for size in sizes),
        ],
        axis=1,
    )


def assert_equal_steps(ours, theirs, finished):
    record, plain = ours.record, theirs.record
    for spec in fields(plain):
        if spec.name == "finished_req_ids":
            assert record.finished_req_ids == finished
        elif spec.name in ("token_offers", "model_states"):
            told, plain_told = getattr(record, spec.name), getattr(plain, spec.name)
            assert told.keys() == plain_told.keys()
            for drafter, known in plain_told.items():
                for name, values in vars(known).items():
                    same = getattr(told[drafter], name)
                    if values is None:
                        assert same is None
                        continue
                    np.testing.assert_array_equal(same, values, err_msg=f"{drafter} {name}")
                    assert same.dtype == values.dtype
        elif spec.name == "kv_cache_usage":
            assert record.kv_cache_usage == pytest.approx(plain.kv_cache_usage, rel=1e-6)
        else:
            np.testing.assert_array_equal(
                getattr(record, spec.name), getattr(plain, spec.name), err_msg=spec.name
            )
    np.testing.assert_array_equal(ours.observation, theirs.observation)
    assert ours.observation.dtype == np.float32
    assert (ours.num_tokens, ours.num_finished_reqs) == (
        theirs.num_tokens,
        theirs.num_finished_reqs,
    )
    assert ours.shape == theirs.shape
    assert ours.step_time_s == pytest.approx(theirs.step_time_s, rel=1e-9)


def assert_possible(record, contract, config):
    """What holds for any step of any engine."""
    longest = np.array(contract.max_lengths)[record.drafter]
    assert (record.num_accepted_tokens <= record.num_draft_tokens).all()
    assert (record.num_draft_tokens <= longest).all()
    assert ((record.num_draft_tokens > 0) == (record.drafter > 0)).all()
    np.testing.assert_array_equal(record.num_emitted_tokens, record.num_accepted_tokens + 1)
    assert record.num_rows <= record.num_running_reqs <= config.max_num_seqs
    assert record.num_scheduled_tokens <= config.max_num_batched_tokens
    assert record.num_prefill_tokens <= record.num_scheduled_tokens
    assert 0 <= record.kv_cache_usage <= 1
    assert len(set(record.req_ids)) == record.num_rows


LONGEST = int(
    (np.array([len(prompt) for prompt in TRACES.prompts]) + TRACES.num_output_tokens).max()
)
ALWAYS = {"a draft was cut by the request's end"}
CASES = {
    "roomy": ({}, None, 6, ALWAYS | {"a prompt or backlog was read at once"}),
    "cached": ({"block_size": 2}, None, 6, ALWAYS | {"a cached prompt was padded"}),
    "alone": (
        {"block_size": 1},
        None,
        1,
        ALWAYS | {"a batch ended whole", "a cached prompt was padded"},
    ),
    "uncached": (
        {"prompts_are_cached": False, "max_num_batched_tokens": 64, "num_kv_blocks": 30},
        None,
        6,
        ALWAYS
        | {
            *("a prompt was read in parts", "a new request had to wait", "a step without a row"),
            *("the model drafter read in several passes",),
        },
    ),
    "crowded": (
        {"max_num_batched_tokens": 12, "max_pending_tokens": 20, "block_size": 7},
        None,
        5,
        ALWAYS
        | {
            *("a running request found no room", "a draft was cut by the budget"),
            *("a cached prompt was padded", "more waited than one pass reads"),
            "the model drafter was of no use",
        },
    ),
    "dormant": (
        {"dormant_after": 6, "max_pending_tokens": 12, "block_size": 16},
        None,
        4,
        ALWAYS | {"a dormant drafter gave up", "the model drafter was of no use"},
    ),
    "shortest context": ({"max_model_len": LONGEST}, None, 3, ALWAYS),
    "decoding alone": ({"has_prefill": False}, None, 6, ALWAYS),
    "full": ({"max_num_seqs": 5}, None, 5, ALWAYS),
    "ngram": ({}, {"ngram": 3}, 4, ALWAYS),
    "eagle3": ({}, {"eagle3": 2}, 4, ALWAYS),
    "suffix": ({}, {"suffix": 10}, 6, ALWAYS),
    "three": ({}, {"ngram": 3, "suffix": 12, "eagle3": 4}, 4, ALWAYS),
    "combined": (
        {"dormant_after": 6, "max_pending_tokens": 12, "block_size": 16},
        {"ngram": 8, "suffix": 12, "eagle3": 4, **COMBINED},
        5,
        ALWAYS | {"a member drafted for a combination", "the model drafter was of no use"},
    ),
    "cut": (
        {},
        {"ngram": 8, "suffix": 12, "eagle3": 4, **COMBINED},
        5,
        ALWAYS | {"a member drafted for a combination", "a draft was cut by its cutoff"},
    ),
}


@pytest.mark.parametrize("granularity", ["batch", "request"])
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_as_a_plain_retelling_tells_it(case, granularity):
    settings, lengths, load, expected = CASES[case]
    config = TraceEngineConfig(**settings)
    cutoffs = (0.3, 0.6) if case == "cut" else ()
    contract = SUFFIX_TRACES.contract(lengths or LENGTHS, granularity, cutoffs)
    cost_model = cost_model_by_load()
    ours = TraceEngine(SUFFIX_TRACES, cost_model, contract, config)
    plain = PlainEngine(SUFFIX_TRACES, cost_model, contract, config)
    rng = np.random.default_rng(len(case))
    num_accepted = 0
    for seed in (1, 2):
        full = seed == 2
        steps = [one.reset(make_episode(seed, load, full=full)) for one in (ours, plain)]
        mood = "anything"
        for index in range(120):
            assert_equal_steps(*steps, finished=plain.told_finished)
            record = steps[0].record
            assert_possible(record, contract, config)
            num_accepted += record.num_accepted_tokens.sum()
            mood = rng.choice(list(MOODS)) if index % 15 == 14 else mood
            actions = random_actions(rng, contract, mood, record.num_rows)
            steps = [one.step(actions) for one in (ours, plain)]
    assert num_accepted > 50
    assert {name for name, count in plain.events.items() if count} >= expected


def make_engine(traces=TRACES, lengths=None, **settings):
    config = TraceEngineConfig(**settings)
    return TraceEngine(traces, make_cost_model(), traces.contract(lengths), config)


def episode_of(*requests, load=1):
    return Episode(load, iter(requests), ClosedLoop(load))


def request_of(trace, max_tokens, prompt=None):
    prompt = TRACES.prompts[trace].tolist() if prompt is None else prompt
    return WorkloadRequest(f"asked-{trace}", tuple(prompt), max_tokens, 0.0, "code")


def refused(error, act, *arguments, **keywords):
    """The sentence that refuses; it ends with what to do."""
    with pytest.raises(error) as refusal:
        act(*arguments, **keywords)
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


def test_a_prompt_that_was_not_recorded_is_refused():
    engine = make_engine()
    said = refused(TraceError, engine.reset, episode_of(request_of(0, 5, prompt=[1, 2, 3])))
    assert "do not hold the prompt of asked-0" in said


def test_only_a_request_that_ended_by_itself_may_be_asked_for_more_than_was_recorded():
    engine = make_engine()
    assert not TRACES.is_stopped[0]
    said = refused(TraceError, engine.reset, episode_of(request_of(0, 41)))
    assert "hold 40 output tokens of asked-0, not 41" in said
    assert TRACES.is_stopped[2]
    recorded = int(TRACES.num_output_tokens[2])
    step = engine.reset(episode_of(request_of(2, recorded + 100), request_of(1, 40)))
    emitted = step.num_tokens
    while not step.num_finished_reqs:
        step = engine.step(np.array([[0, 0]]))
        emitted += step.num_tokens
    assert emitted == recorded + 1  # and the first token of the request after it


def test_a_load_beyond_the_engine_is_refused():
    engine = make_engine(max_num_seqs=2)
    said = refused(ConfigError, engine.reset, make_episode(0, 3))
    assert "A load of 3 requests exceeds max_num_seqs 2" in said
    assert engine.reset(make_episode(0, 2)).record.num_rows


def test_an_engine_that_the_traces_do_not_fit_is_refused():
    assert "raise max_model_len" in refused(TraceError, make_engine, max_model_len=LONGEST - 1)
    said = refused(ConfigError, make_engine, max_num_batched_tokens=8)
    assert "raise max_num_batched_tokens" in said
    with_more = replace(TRACES.contract(), max_lengths=(0, 9, 4))
    said = refused(TraceError, TraceEngine, TRACES, make_cost_model(), with_more)
    assert "up to 8 tokens, not 9" in said
    for name in ("max_num_seqs", "max_model_len", "num_kv_blocks", "block_size"):
        assert f"{name} is 0" in refused(ConfigError, TraceEngineConfig, **{name: 0})


def test_a_new_episode_ends_what_runs_and_tells_so():
    engine = make_engine()
    first = engine.reset(make_episode(3, 4))
    second = engine.reset(make_episode(4, 4))
    assert first.record.finished_req_ids == frozenset()
    assert second.record.finished_req_ids == {f"3-{index}" for index in range(4)}
    assert set(second.record.req_ids) <= {f"4-{index}" for index in range(4)}


def make_env(loads=(1, 2, 4), lengths=None, **settings):
    cost_model = make_cost_model()
    workload = TraceWorkload(TRACES, loads, 40)
    episode = EpisodeConfig(**{"work_tokens_per_req": 24, **settings})
    return DraftEnv(
        lambda: make_engine(lengths=lengths),
        workload,
        episode,
        RewardConfig("measured"),
        cost_model=cost_model,
        references=workload.references(cost_model),
    )


def trajectory(env, seed, steps=150):
    """A hash over all that an agent with random actions sees."""
    rng = np.random.default_rng(seed)
    seen = hashlib.sha256()
    observation, info = env.reset(seed=seed)
    for _ in range(steps):
        seen.update(observation.tobytes())
        seen.update(json.dumps(info, sort_keys=True).encode())
        observation, reward, terminated, truncated, info = env.step(
            rng.integers(0, env.contract.action_nvec)
        )
        seen.update(repr((reward, terminated, truncated)).encode())
        if terminated or truncated:
            observation, info = env.reset()
    return seen.hexdigest()


def test_a_seed_gives_the_same_trajectory():
    first, again, other = (trajectory(make_env(), seed) for seed in (7, 7, 8))
    assert first == again != other


def test_an_episode_is_a_fixed_amount_of_work():
    env = make_env()
    for seed in range(12):
        _, info = env.reset(seed=seed)
        tokens, steps, terminated = 0, 0, False
        while not terminated:
            _, reward, terminated, truncated, step = env.step(np.array([1, 8]))
            assert reward == pytest.approx(step["reward_tokens"] - step["reward_time"])
            assert step["reward_tokens"] == pytest.approx(step["num_tokens"] / info["concurrency"])
            tokens += step["num_tokens"]
            steps += 1
            assert not truncated
        assert 24 * info["concurrency"] <= tokens < (24 + 9) * info["concurrency"]
        assert steps <= 24 * info["concurrency"]
    env = make_env(max_episode_steps=3)
    env.reset(seed=1)
    ends = [env.step(np.array([0, 0]))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_return_is_the_time_saved_against_no_speculation():
    """At one load and price, whatever is done: tokens of the reference less the time it took."""
    env = make_env(loads=(2,))
    rng = np.random.default_rng(0)
    env.reset(seed=5)
    total, tokens, charged_s, done = 0.0, 0, 0.0, False
    while not done:
        _, reward, done, _, info = env.step(rng.integers(0, env.contract.action_nvec))
        total += reward
        tokens += info["num_tokens"]
        charged_s += info["charged_time_s"]
        assert info["charged_time_s"] <= info["step_time_s"]
    reference = env.references[2]
    assert reference.tok_per_s == pytest.approx(2 / reference.step_time_s)
    assert total == pytest.approx(
        (tokens / reference.tok_per_s - charged_s) / reference.step_time_s
    )


def test_no_speculation_earns_nothing():
    """But for the context, which is cheap here, and a new request's first token, which is free."""
    env = make_env(loads=(4,), lengths={"ngram": 8})
    env.reset(seed=2)
    done, rewards = False, []
    while not done:
        _, reward, done, _, info = env.step(np.array([0, 0]))
        if info["num_finished_reqs"] == 0:
            rewards.append(reward)
    np.testing.assert_allclose(rewards, 0, atol=0.06)
    assert np.median(np.abs(rewards)) < 0.01


def test_the_reference_is_a_plain_step_at_the_mean_context():
    workload = TraceWorkload(TRACES, (1, 4), 20)
    contexts, weights = [], []
    for prompt, count in zip(TRACES.prompts, TRACES.num_output_tokens.tolist(), strict=True):
        asked = min(count, 20)
        contexts.append(len(prompt) + asked / 2)
        weights.append(asked)
    context = np.average(contexts, weights=weights)
    references = workload.references(make_cost_model())
    for load in (1, 4):
        step_time_s = 0.02 + 0.001 * load + 1e-6 * round(load * context)
        assert references[load].step_time_s == pytest.approx(step_time_s)
    assert references.keys() == {1, 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trace file and the cost model beside it, as settings."""
    folder = tmp_path_factory.mktemp("traces")
    TRACES.write(folder / "t.parquet")
    (folder / "t.json").write_text(json.dumps({"cost_model": make_cost_model().state_dict()}))
    return {"files": [str(folder / "t.parquet")], "cost_model": str(folder / "t.json")}


def made_env(files, **settings):
    return gymnasium.make(
        "draftgym/TraceDraft-v0",
        trace=files,
        workload={"concurrency": [1, 2], "output_tokens": 40},
        episode={"work_tokens_per_req": 8},
        **settings,
    )


def test_it_passes_gymnasiums_and_stable_baselines3s_checks(files):
    check_env(made_env(files, render_mode="ansi").unwrapped, skip_render_check=True)
    check_env_of_sb3(made_env(files).unwrapped)


def test_it_is_made_by_gymnasium_from_files(files):
    env = made_env(files)
    assert env.unwrapped.contract == TRACES.contract(LENGTHS)
    assert trajectory(env.unwrapped, 3, 30) == trajectory(made_env(files).unwrapped, 3, 30)
    for split in ("train", "eval"):
        engine = made_env(files, split=split).unwrapped._make_engine()
        assert engine._traces.request_ids == TRACES.of_split(split).request_ids


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"workload": {"concurrency": [33]}}, ConfigError, "exceeds max_num_seqs 32"),
        ({"workload": {"output_tokens": 41}}, ConfigError, "hold 40 output tokens"),
        ({"drafters": {"max_lengths": {"ngram": 9}}}, TraceError, "up to 8 tokens, not 9"),
        ({"kinds": {"poetry": 1.0}}, ConfigError, "no request of kind 'poetry'"),
        ({"kinds": {"code": 0.0}}, ConfigError, "has a weight"),
        ({"files": []}, ConfigError, "name at least one"),
        ({"files": ["nowhere.parquet"]}, TraceError, "no trace file nowhere.parquet"),
        ({"cost_model": "nowhere.json"}, ConfigError, "no cost model nowhere.json"),
        ({"num_envs": 0}, ConfigError, "trace.num_envs is 0"),
        ({"num_threads": 0}, ConfigError, "trace.num_threads is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_it_is_made(files, settings, error, said):
    settings = dict(settings)
    sections = {name: settings.pop(name) for name in ("workload", "drafters") if name in settings}
    sections["workload"] = {"output_tokens": 40, **sections.get("workload", {})}
    act = envs.registration.make_trace_draft_env
    assert said in refused(error, act, trace={**files, **settings}, **sections)


def drawn(workload, seed, count):
    return list(itertools.islice(workload.episode(seed).requests, count))


def test_a_workload_draws_kinds_by_weight_and_staggers_the_first_wave():
    workload = TraceWorkload(TRACES, (8,), 36, {"code": 3.0, "chat": 1.0}, 0.25)
    requests = [request for seed in range(150) for request in drawn(workload, seed, 16)]
    share = np.mean([request.kind == "code" for request in requests])
    assert share == pytest.approx(0.75, abs=0.03)
    first = [request.max_tokens for seed in range(150) for request in drawn(workload, seed, 8)]
    assert min(first) >= 9
    assert max(first) == 36
    assert np.mean(first) == pytest.approx(0.625 * 36, rel=0.03)
    later = {request.max_tokens for request in drawn(workload, 3, 200)[8:]}
    assert later == {36}
    by_prompt = {tuple(prompt.tolist()): i for i, prompt in enumerate(TRACES.prompts)}
    drawn_traces = [by_prompt[request.prompt_token_ids] for request in requests]
    assert all(TRACES.kinds[i] == one.kind for i, one in zip(drawn_traces, requests, strict=True))
    assert set(drawn_traces) == set(range(TRACES.num_requests))


def test_episodes_differ_by_seed_in_load_and_requests():
    workload = TraceWorkload(TRACES, (1, 2, 4), 36)
    loads = [workload.episode(seed).concurrency for seed in range(300)]
    for load in (1, 2, 4):
        assert loads.count(load) == pytest.approx(100, abs=25)
    assert drawn(workload, 5, 50) == drawn(workload, 5, 50)
    assert [one.prompt_token_ids for one in drawn(workload, 5, 50)] != [
        one.prompt_token_ids for one in drawn(workload, 6, 50)
    ]
    assert len({one.request_id for seed in (5, 6) for one in drawn(workload, seed, 50)}) == 100
    assert workload.episode(5, concurrency=3).concurrency == 3
