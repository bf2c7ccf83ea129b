"""What a study measures on traces and on blocks of live steps, against values by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import envs.stage_clock
from envs.engine import ServedBlock
from envs.engine_memory import EngineMemory, engine_memory
from envs.stage_clock import STAGES, StageClock
from policy.cost_model import CostModel
from policy.training.engine_process import BlockResult
from policy.training.study_acceptance import curve, request_means, spreads, stretches
from policy.training.study_config import TraceStudyConfig
from policy.training.study_files import write_tidy
from policy.training.study_live import UNCOVERED, LiveStudy
from policy.training.study_maps import grids_of
from policy.training.study_overlap import OverlapCell, bleu4, break_even, measure_overlap
from policy.training.study_speedups import (
    COMBINED,
    FIXED,
    OPTIMUM,
    ORACLE_LENGTH,
    measure_speedups,
)

from .study_results import one_request

STEP_S, TOKEN_S, PASS_S = 1.0, 0.25, 0.125
PRICES = CostModel.from_weights(
    {"num_engine_steps": STEP_S, "num_verified_tokens": TOKEN_S, "num_draft_passes": PASS_S}
)
NGRAM = ([0, 2, 2, 2, 2, 2, 0], [0, 2, 0, 0, 1, 0, 0])
EAGLE = ([0, 2, 2, 2, 2, 2, 1], [0, 1, 1, 1, 1, 1, 0])
CONFIG = TraceStudyConfig(("x",), "x", None, (1,), (1,), 16, 2, ("chat",), 1)


def step_s(drafted, passes=0):
    return STEP_S + TOKEN_S * (1 + drafted) + PASS_S * passes


def test_speedups_are_those_by_hand():
    traces = one_request(7, ngram=NGRAM, eagle3=EAGLE)
    rows = measure_speedups({"chat": traces}, PRICES, CONFIG, "all", (1,), num_threads=1, seed=0)
    plain_s = 7 * step_s(0)

    def speedup(**fields):
        (row,) = rows.where(**fields)
        return row.speedup

    # n-gram, 2 tokens: positions 0, 1 (both accepted), 4 (one accepted), 6.
    fixed_s = step_s(0) + step_s(2) + step_s(2) + step_s(0)
    assert speedup(setting=FIXED, drafter="ngram", num_speculative_tokens=2) == pytest.approx(
        plain_s / fixed_s
    )
    # Its oracle drafts one token at position 4.
    oracle_s = step_s(0) + step_s(2) + step_s(1) + step_s(0)
    assert speedup(setting=ORACLE_LENGTH, drafter="ngram") == pytest.approx(plain_s / oracle_s)
    # EAGLE: one token at 1, 3, 5; each costs a pass.
    model_s = step_s(0) + 3 * step_s(1, passes=1)
    assert speedup(setting=ORACLE_LENGTH, drafter="eagle3") == pytest.approx(plain_s / model_s)
    # Together n-gram wins wherever it accepts; both drafting pays EAGLE's pass at every step but
    # the first and the last, which have nothing on offer.
    assert speedup(setting=COMBINED, drafter="if_it_wins") == pytest.approx(plain_s / oracle_s)
    assert speedup(setting=COMBINED, drafter="both_draft") == pytest.approx(
        plain_s / (oracle_s + 2 * PASS_S)
    )
    assert speedup(setting=OPTIMUM) >= speedup(setting=COMBINED, drafter="if_it_wins")


def test_acceptance_is_told_without_the_first_token():
    accepted = [5, 2, 0, 0, 1, 0, 0]
    traces = one_request(7, ngram=([5] * 7, accepted))
    (mean,) = request_means(traces)["chat", "ngram"]
    assert mean == pytest.approx(1 + 3 / 6)
    rows = stretches(traces)  # of one token each, since the output is short
    assert [row.tokens_per_step for row in rows] == [3, 1, 1, 2, 1, 1]
    assert [row.first_position for row in rows] == [1, 2, 3, 4, 5, 6]
    (spread,) = spreads({("chat", "ngram"): np.arange(101.0)})
    assert (spread.p5, spread.median, spread.p95, spread.num_requests) == (5, 50, 95, 101)


def test_a_curve_weighs_positions_and_drops_stretches_of_few_requests():
    rows = stretches(one_request(70, ngram=([4] * 70, [1] * 35 + [3] * 35)))
    firsts, means = curve(rows, "chat", "ngram", min_requests=1)
    assert firsts.tolist() == list(range(0, 70, 3))
    # The stretch from 33 holds two positions of two tokens and one of four.
    assert means[11] == pytest.approx((2 + 2 + 4) / 3)
    assert (means[:11] == 2).all()
    assert (means[12:] == 4).all()
    assert not len(curve(rows, "chat", "ngram", min_requests=2)[0])
    grids, width = grids_of(rows)
    assert width == 3
    np.testing.assert_allclose(grids["ngram"][0], means)


def test_overlap_is_bleu4_of_the_output_against_the_prompt():
    # Four of five words, three of four pairs, two of three triples, one of two quadruples.
    overlap, with_penalty = bleu4([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9])
    by_hand = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert overlap == pytest.approx(by_hand)
    assert with_penalty == pytest.approx(by_hand * math.exp(1 - 8 / 5))
    assert bleu4([1, 2, 3, 4], [1, 2, 3]) == (0, 0)
    assert bleu4(list(range(9)), list(range(20, 29)))[0] < 0.1


def test_a_requests_ratio_is_n_grams_speed_over_the_models():
    traces = one_request(7, ngram=NGRAM, eagle3=EAGLE)
    (row,), cells = measure_overlap(traces, PRICES, "eagle3", CONFIG, seed=0)
    ngram_s = step_s(0) + step_s(2) + step_s(2) + step_s(0)
    # EAGLE drafts two, one is accepted, at 1, 3 and 5.
    model_s = step_s(0) + 3 * step_s(2, passes=2)
    assert row.ratio_alone == pytest.approx(model_s / ngram_s)
    assert cells == []  # one request is no group


@pytest.mark.parametrize(
    ("ratios", "point"),
    [
        ([0.5, 0.5, 2.0], 0.4),
        ([0.5, 0.25, 2.0], 0.3 + 0.2 * 2 / 3),
        ([2.0, 0.5, 2.0], 0.4),
        ([2.0, 2.0, 2.0], 0.0),
        ([0.5, 2.0, 0.9], None),
    ],
)
def test_the_break_even_is_where_n_gram_wins_and_stays_ahead(ratios, point):
    cells = [
        OverlapCell(0, 1, mean, 5, 4, ratio)
        for mean, ratio in zip((0.1, 0.3, 0.5), ratios, strict=True)
    ]
    assert break_even([*cells, OverlapCell(0, 1, 0.9, 5, 1, 0.1)], 4) == (
        None if point is None else pytest.approx(point)
    )


def test_the_clock_charges_a_method_what_its_inner_ones_leave(monkeypatch):
    now = iter(range(100))
    clock_s = {"now": 0.0}
    monkeypatch.setattr(envs.stage_clock.time, "perf_counter", lambda: clock_s["now"])

    def work(seconds):
        clock_s["now"] += seconds

    class Engine:
        def step(self):
            work(1)
            self.forward()
            work(2)
            self.forward()
            return next(now)

        def forward(self):
            work(10)
            self.draft()

        def draft(self):
            work(100)
            raise_if = clock_s["now"] > 400
            if raise_if:
                raise RuntimeError

    engine, clock = Engine(), StageClock()
    clock.wrap(engine, "step", "overhead")
    clock.wrap(engine, "forward", "verification")
    clock.wrap(engine, "draft", "drafting")
    assert engine.step() == 0
    work(5)  # nobody's
    expected = dict.fromkeys(STAGES, 0.0) | {"overhead": 3, "verification": 20, "drafting": 200}
    assert clock.seconds == expected
    with pytest.raises(RuntimeError):
        engine.step()
    assert sum(clock.seconds.values()) == clock_s["now"] - 5
    engine.step = lambda: work(1)  # unwrapped: a failure left nobody at work
    engine.step()
    assert sum(clock.seconds.values()) == clock_s["now"] - 6


def test_memory_counts_shared_weights_once_and_kv_cache_by_layer():
    target, drafter = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 5, bias=False)
    drafter.embedding = target
    spec = SimpleNamespace(page_size_bytes=640, block_size=32)
    mixed = SimpleNamespace(
        kv_cache_specs={"draft": SimpleNamespace(page_size_bytes=96, block_size=32)}
    )
    runner = SimpleNamespace(
        model=target,
        drafter=SimpleNamespace(model=drafter, _draft_attn_layer_names={"draft"}),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec),
                SimpleNamespace(layer_names=["draft"], kv_cache_spec=mixed),
            ]
        ),
    )
    assert engine_memory(runner) == EngineMemory(48, 80, 40, 3)
    # A CPU's packed weight leaves an empty parameter, of which the layer's sizes tell.
    drafter.weight = torch.nn.Parameter(torch.empty(0))
    drafter.input_size, drafter.output_size_per_partition = 4, 5
    assert engine_memory(runner) == EngineMemory(48, 80, 40, 3)
    del runner.drafter
    runner.kv_cache_config.kv_cache_groups.pop()
    assert engine_memory(runner) == EngineMemory(48, 0, 40, 0)


def block(num_tokens, seconds, num_steps, **stages_s):
    return BlockResult(ServedBlock(num_tokens, seconds, num_steps, stages_s), 0, 0, 0, {})


def test_live_speedups_and_shares_are_of_total_times():
    stages = {"verification": 6.0, "drafting": 3.0}
    study = LiveStudy(
        EngineMemory(1, 0, 1, 0),
        {
            ("chat", 4, "no speculation"): [block(100, 10, 100, verification=9.5, drafting=0.0)],
            ("chat", 4, "ngram:3"): [block(100, 5, 40, **stages)],
            ("edit", 4, "no speculation"): [block(100, 10, 100, verification=9.5, drafting=0.0)],
            ("edit", 4, "ngram:3"): [block(100, 5, 10, verification=0.0, drafting=0.9)],
        },
    )
    speedups = {(row.data_set, row.drafter): row.speedup for row in study.speedups()}
    assert speedups["chat", "ngram"] == speedups["all", "ngram"] == 2
    assert speedups["all", "no speculation"] == 1
    (row,) = [row for row in study.speedups() if (row.data_set, row.drafter) == ("all", "ngram")]
    assert (row.low, row.high) == (pytest.approx(2), pytest.approx(2))  # both blocks agree
    shares = {row.stage: row for row in study.stages() if row.setting == "ngram:3"}
    assert shares["verification"].share == pytest.approx(0.6)
    assert shares["drafting"].share == pytest.approx(0.39)
    assert shares[UNCOVERED].share == pytest.approx(0.01)
    # Ten seconds in 50 steps, against twenty in 200 without speculation.
    assert shares["verification"].of_plain_step == pytest.approx(0.6 * 0.2 / 0.1)


def test_tidy_tables_say_the_same_in_both_formats(tmp_path):
    rows = spreads({("chat", "ngram"): np.arange(5.0), ("chat", "eagle3"): np.ones(3)})
    write_tidy(tmp_path, "spreads", rows)
    write_tidy(tmp_path, "nothing", [])
    stored = pq.read_table(tmp_path / "spreads.parquet").to_pylist()
    assert stored == [vars(row) for row in rows]
    assert pyarrow.csv.read_csv(tmp_path / "spreads.csv").to_pylist() == stored
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spreads.csv", "spreads.parquet"]
