"""Oracles and the closed loop against brute force, hand-computed prices and published figures."""

import doctest
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

import envs.oracles
from envs.closed_loop import seconds_alone, tokens_per_s
from envs.draft_options import fixed_options, prices_at, step_s
from envs.headroom import HeadroomConfig, measure_headroom
from envs.oracles import exact_options, fraction_of_oracle, optimal_s
from envs.trace_import import ImportConfig, import_published
from envs.traces import DrafterTrace, TraceHeader, Traces
from policy.cost_model import CostModel, StepShape, read_cost_model
from policy.errors import ConfigError, TraceError

from .published import FOLDER, ROOT, needs_published_traces, refusal_of, run_script

H100 = ROOT / "checkpoints" / "cost_models" / "llama3.1-8b-h100.json"
DRAFTERS = ("ngram", "eagle3")
MAX_LENGTH = 4


def make_traces(drafted, accepted, lengths, prompt_tokens=10):
    """Requests of these output lengths; `drafted` and `accepted` are `[drafters, positions]`."""
    num_positions = sum(lengths)
    unknown = np.full((num_positions, MAX_LENGTH), np.nan, np.float32)
    zeros = np.zeros(num_positions, np.int32)
    drafters = {}
    for row, name in enumerate(DRAFTERS):
        tokens = [np.asarray(values[row], np.uint8) for values in (drafted, accepted)]
        extra = (
            {"survival": unknown, "margin": unknown}
            if name == "eagle3"
            else {"match_length": zeros.astype(np.uint8), "agreement": zeros.astype(np.float32)}
        )
        drafters[name] = DrafterTrace(*tokens, **extra)
    return Traces(
        header=TraceHeader(
            max_lengths=dict.fromkeys(DRAFTERS, MAX_LENGTH),
            target="a-model",
            output_tokens=64,
            max_model_len=128,
        ),
        request_ids=tuple(f"r{i}" for i in range(len(lengths))),
        kinds=("toy",) * len(lengths),
        splits=("train",) * len(lengths),
        prompts=(np.zeros(prompt_tokens, np.int32),) * len(lengths),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        output_token_ids=zeros,
        is_stopped=np.ones(len(lengths), bool),
        drafters=drafters,
    )


def random_traces(rng, num_requests=3, max_tokens=7):
    lengths = rng.integers(1, max_tokens + 1, num_requests).tolist()
    drafted = rng.integers(0, MAX_LENGTH + 1, (2, sum(lengths)))
    return make_traces(drafted, rng.integers(0, drafted + 1), lengths)


def random_prices(rng, pass_s=0.0):
    """Prices at which drafts often pay and often don't, the model drafter's passes included."""
    weights_s = {
        "num_engine_steps": 1.0,
        "num_verified_tokens": rng.uniform(0.02, 0.4),
        "num_context_tokens": rng.uniform(0, 0.02),
        "num_model_drafts": rng.uniform(0.1, 0.8),
        "num_draft_passes": pass_s,
        "num_draft_pass_tokens": rng.uniform(0, 0.1),
        "num_draft_context_tokens": rng.uniform(0, 0.01),
    }
    return CostModel.from_weights(weights_s, token_draft_share=rng.uniform(0, 0.1))


def price(cost_model, contexts, drafts, offered=None):
    """Seconds of a step; `drafts` are (drafter, tokens), `offered` what all drafters drafted."""
    paid = [(drafter, tokens, at) for at, (drafter, tokens) in enumerate(drafts)]
    if offered is not None:
        paid = [
            (name, tokens, at) for at, row in enumerate(offered) for name, tokens in row.items()
        ]
    model = [(tokens, at) for name, tokens, at in paid if name == "eagle3" and (tokens or offered)]
    verified = len(drafts) + sum(tokens for _, tokens in drafts)
    target = StepShape(
        num_running_reqs=len(drafts),
        num_verified_tokens=verified,
        num_context_tokens=sum(contexts),
    )
    whole = StepShape(
        **{
            **vars(target),
            "num_model_drafts": int(bool(model)),
            "num_draft_passes": max((tokens for tokens, _ in model), default=0),
            "num_draft_pass_tokens": sum(tokens for tokens, _ in model),
            "num_draft_context_tokens": sum(contexts[at] for _, at in model),
        }
    )
    looked_up = any(name == "ngram" and (tokens or offered) for name, tokens, _ in paid)
    share = cost_model.token_draft_share if looked_up else 0
    return cost_model.expected_s(whole) + share * cost_model.expected_s(target)


def exact(traces, request, position):
    """What will be accepted of each drafter, as far as it is any use."""
    at = traces.starts[request] + position
    room = traces.num_output_tokens[request] - position - 1
    return {
        name: int(min(traces.drafters[name].num_accepted_tokens[at], room)) for name in DRAFTERS
    }


def least_s(traces, request, cost_model, pricing, first_position):
    """The optimum by trying every sequence of drafts."""
    total = traces.num_output_tokens[request]

    @functools.cache
    def rest_s(position):
        if position >= total:
            return 0.0
        accepted = exact(traces, request, position)
        times = []
        for name, most in [("none", 0), *accepted.items()]:
            for tokens in range(most + 1):
                charged = "ngram" if pricing == "as_published" and name == "eagle3" else name
                offered = [accepted] if pricing == "both_draft" else None
                step = price(cost_model, [10 + position], [(charged, tokens)], offered)
                times.append(step + rest_s(position + tokens + 1))
        return min(times)

    return rest_s(first_position)


@pytest.mark.parametrize("pricing", ["if_it_wins", "as_published", "both_draft"])
@pytest.mark.parametrize("pass_s", [0.0, 0.2])
@pytest.mark.parametrize("first_position", [0, 1])
def test_the_optimum_is_the_best_of_all_sequences(pricing, pass_s, first_position):
    rng = np.random.default_rng(int(10 * pass_s) + first_position)
    for _ in range(10):
        traces, cost_model = random_traces(rng), random_prices(rng, pass_s)
        options = exact_options(traces, DRAFTERS, MAX_LENGTH, pricing)
        optimum = optimal_s(traces, options, cost_model, first_position=first_position)
        expected = [least_s(traces, i, cost_model, pricing, first_position) for i in range(3)]
        np.testing.assert_allclose(optimum, expected, rtol=1e-12)
        greedy = seconds_alone(traces, options, cost_model, first_position=first_position)
        assert (greedy >= optimum - 1e-12).all()


def test_the_greedy_oracle_is_not_the_optimum():
    """A draft of one token now hides one of four tokens that the next position has."""
    traces = make_traces([[1, 4, 0, 0, 0, 0, 0]] * 2, [[1, 4, 0, 0, 0, 0, 0]] * 2, [7])
    cost_model = CostModel.from_weights({"num_engine_steps": 1.0})
    options = exact_options(traces, ("ngram",), MAX_LENGTH)
    greedy = seconds_alone(traces, options, cost_model, first_position=0)
    optimum = optimal_s(traces, options, cost_model, first_position=0)
    assert (greedy.tolist(), optimum.tolist()) == ([6.0], [3.0])
    assert fraction_of_oracle(optimum, greedy) == 0.5


def test_three_ways_to_charge_by_hand():
    """Two steps: EAGLE brings 3 tokens, n-gram 1; then n-gram brings 2, EAGLE nothing."""
    drafted = [[1, 0, 0, 2, 0, 0], [2, 0, 0, 0, 0, 0]]
    traces = make_traces(drafted, drafted, [6])
    weights_s = {
        "num_engine_steps": 10.0,
        "num_verified_tokens": 1.0,
        "num_model_drafts": 2.0,
        "num_draft_pass_tokens": 0.5,
    }
    cost_model = CostModel.from_weights(weights_s, token_draft_share=0.1)
    expected = {
        "as_published": 1.1 * 13 + 1.1 * 13,
        "if_it_wins": (13 + 2 + 2 * 0.5) + 1.1 * 13,
        "both_draft": (1.1 * 13 + 2 + 2 * 0.5) + (1.1 * 13 + 2),
    }
    for pricing, seconds in expected.items():
        options = exact_options(traces, DRAFTERS, MAX_LENGTH, pricing)
        alone = seconds_alone(traces, options, cost_model, first_position=0)
        assert alone == pytest.approx([seconds])
        assert optimal_s(traces, options, cost_model, first_position=0) == pytest.approx([seconds])
    plain = seconds_alone(traces, fixed_options(traces), cost_model, first_position=0)
    assert plain == pytest.approx([6 * 11])


@pytest.mark.parametrize("pass_s", [0.0, 0.3])
@pytest.mark.parametrize("pricing", ["if_it_wins", "both_draft"])
def test_each_step_of_the_closed_loop_brings_most_tokens_per_second(pass_s, pricing):
    rng = np.random.default_rng(int(10 * pass_s))
    for _ in range(10):
        traces, cost_model = random_traces(rng, num_requests=4), random_prices(rng, pass_s)
        options = exact_options(traces, DRAFTERS, MAX_LENGTH, pricing)
        settings = {"first_position": 0, "min_tokens_per_slot": 1, "seed": 3}
        rate = tokens_per_s(traces, options, cost_model, 2, **settings)
        assert rate == pytest.approx(brute_force_rate(traces, cost_model, 2, pricing, seed=3))


def brute_force_rate(traces, cost_model, num_slots, pricing, seed):
    order = np.random.default_rng(seed).permutation(traces.num_requests)
    queue = itertools.cycle(order)
    slots = [[next(queue), 0] for _ in range(num_slots)]
    tokens, seconds = 0, 0.0
    while tokens < traces.starts[-1]:
        accepted = [exact(traces, *slot) for slot in slots]
        contexts = [10 + position for _, position in slots]
        offered = accepted if pricing == "both_draft" else None
        choices = []
        for row in accepted:  # shorter drafts of the model drafter may save the others a pass
            drafts = [("none", 0), ("ngram", row["ngram"])]
            choices.append(drafts + [("eagle3", n) for n in range(1, row["eagle3"] + 1)])
        taken = max(
            itertools.product(*choices),
            key=lambda drafts: (
                (len(drafts) + sum(length for _, length in drafts))
                / price(cost_model, contexts, drafts, offered)
            ),
        )
        seconds += price(cost_model, contexts, taken, offered)
        for slot, (_, length) in zip(slots, taken, strict=True):
            tokens += length + 1
            slot[1] += length + 1
            if slot[1] >= traces.num_output_tokens[slot[0]]:
                slot[:] = [next(queue), 0]
    return tokens / seconds


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_fixed_setting_drafts_as_recorded(drafter):
    rng = np.random.default_rng(5)
    traces, cost_model = random_traces(rng), random_prices(rng, pass_s=0.1)
    recorded = traces.drafters[drafter]
    for length in range(1, MAX_LENGTH + 1):
        options = fixed_options(traces, drafter, length)
        expected = []
        for request in range(traces.num_requests):
            position, seconds = 1, 0.0
            while position < traces.num_output_tokens[request]:
                at = traces.starts[request] + position
                drafts = int(min(recorded.num_draft_tokens[at], length))
                seconds += price(cost_model, [10 + position], [(drafter, drafts)])
                position += int(min(recorded.num_accepted_tokens[at], length)) + 1
            expected.append(seconds)
        np.testing.assert_allclose(seconds_alone(traces, options, cost_model), expected)


def test_a_step_costs_what_the_cost_model_says_at_its_load():
    rng = np.random.default_rng(6)
    traces = random_traces(rng)
    options = exact_options(traces, DRAFTERS, MAX_LENGTH)
    low, high = random_prices(rng, 0.1), random_prices(rng, 0.2)
    cost_model = CostModel(
        np.array([1.0, 4.0]), np.concatenate([low.weights_s, high.weights_s]), 0.05
    )
    position, option, length = np.array([[0, 1, 2], [0, 1, 2], [0, 3, 2]])
    contexts = options.context[position].tolist()
    drafts = [("none", 0), ("ngram", 3), ("eagle3", 2)]
    seconds = step_s(options, prices_at(cost_model, 3), position, option, length)
    assert seconds == pytest.approx(price(cost_model, contexts, drafts))


def test_lengths_that_were_not_recorded_are_refused():
    traces = random_traces(np.random.default_rng(7))
    with pytest.raises(TraceError, match="hold drafts of 'ngram' up to 4 tokens, not 5;"):
        fixed_options(traces, "ngram", 5)
    with pytest.raises(TraceError, match="hold drafts of 'mtp' up to 0 tokens, not 1;"):
        exact_options(traces, ("mtp",), 2)


def test_the_example_of_the_fraction_holds():
    results = doctest.testmod(envs.oracles)
    assert (results.attempted, results.failed) == (1, 0)


def test_the_h100_constants_are_the_published_ones():
    cost_model = read_cost_model(H100)
    decode = StepShape(num_running_reqs=2, num_verified_tokens=10, num_context_tokens=1000)
    verify_s = 3.92645679e-8 * 1000 + 2.10103129e-5 * 10 + 5.88590713e-3
    assert cost_model.expected_s(decode) == pytest.approx(verify_s + 1.20683946e-3)
    drafting = {"num_model_drafts": 1, "num_draft_passes": 4, "num_draft_pass_tokens": 8}
    drafting["num_draft_context_tokens"] = 1000
    draft_s = 2.37768493e-9 * 1000 + 8.41429603e-7 * 8 + 2.13526175e-3
    with_draft = StepShape(**{**vars(decode), **drafting})
    assert cost_model.expected_s(with_draft) == pytest.approx(verify_s + 1.20683946e-3 + draft_s)
    assert cost_model.token_draft_share == 0.005875


@needs_published_traces
def test_published_figures_are_reached(tmp_path):
    (source,) = FOLDER.glob("*_instructcoder.jsonl.gz")
    import_published(ImportConfig(str(source), str(tmp_path), "a-model", 8192, 131072))
    config = HeadroomConfig(str(tmp_path), str(H100), concurrency=(1,), min_tokens_per_slot=1)
    (headroom,) = measure_headroom(config)
    figures = {name: float(row["1"].split()[0]) for name, row in headroom.by_load.items()}
    assert figures["ngram oracle"] == pytest.approx(2.7, rel=0.05)
    assert figures["combined, as_published"] == pytest.approx(5.1, rel=0.05)
    assert figures["combined, if_it_wins"] == pytest.approx(4.5, rel=0.05)
    assert figures["combined, both_draft"] == pytest.approx(4.0, rel=0.05)
    totals, means, *_ = headroom.by_choice.values()
    assert float(totals["optimum"]) > figures["combined, if_it_wins"]
    assert float(means["fixed ngram, 5"]) == pytest.approx(2.1, rel=0.05)


def write_toy(folder: Path):
    path = folder / "toy.parquet"
    random_traces(np.random.default_rng(8), num_requests=6).write(path)
    return path


def test_the_script_prints_the_tables_of_each_file(tmp_path):
    write_toy(tmp_path)
    (tmp_path / "toy.json").write_text('{"misaligned_request_ids": ["r0"]}')
    done = run_script(
        "headroom.py",
        *(f"TRACES={tmp_path}", "concurrency=[1,3]", "min_tokens_per_slot=9"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## toy\n\n| requests in flight")
    for row in ("best fixed ngram (length)", "combined, both_draft", "aligned requests"):
        assert row in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json", "toy.parquet"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "TRACES is missing; give a trace file"),
        (["TRACES=empty"], "There is no .parquet file in empty;"),
        (["TRACES=nothing.parquet"], "There is no trace file nothing.parquet;"),
        (["TRACES=single.parquet"], "holds no output of two tokens; collect longer ones."),
        (["TRACES=toy", "cost_model=nothing"], "There is no cost model nothing;"),
        (["TRACES=toy", "max_lenght=4"], "Unknown key 'max_lenght'; did you mean 'max_length'?"),
    ],
)
def test_the_script_refuses_in_a_sentence(tmp_path, arguments, sentence):
    for folder in ("toy", "empty"):
        (tmp_path / folder).mkdir()
    write_toy(tmp_path / "toy")
    make_traces([[0]] * 2, [[0]] * 2, [1]).write(tmp_path / "single.parquet")
    assert sentence in refusal_of(run_script("headroom.py", *arguments, cwd=tmp_path))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_length": 0}, "max_length is 0; make it 1 to 16."),
        ({"concurrency": (0,)}, "concurrency must name loads of 1 or more; correct it."),
        ({"concurrency": ()}, "concurrency must name loads of 1 or more; correct it."),
        ({"first_position": 2}, "make no sense; use 0 or 1, and 1 or more."),
        ({"min_tokens_per_slot": 0}, "make no sense; use 0 or 1, and 1 or more."),
    ],
)
def test_settings_out_of_range_are_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        HeadroomConfig("somewhere", str(H100), **changes)
