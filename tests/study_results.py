"""Small studies of given numbers, for whatever reads a study."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envs.engine_memory import EngineMemory
from envs.traces import DrafterTrace, TraceHeader, Traces
from policy.training.study_acceptance import request_means, spreads, stretches
from policy.training.study_live import StageShare
from policy.training.study_overlap import Overlap, OverlapCell
from policy.training.study_results import StudyResults
from policy.training.study_speedups import (
    COMBINED,
    FIXED,
    OPTIMUM,
    ORACLE_LENGTH,
    POLICY,
    Speedup,
    Speedups,
)

from .synthetic_traces import make_traces

DATA_SETS = ("chat", "edit")
LOADS = (1, 8)


def one_request(output_tokens, **drafters):
    """A request whose drafters draft and get accepted what is given, position by position."""
    return Traces(
        header=TraceHeader(
            {name: max(drafted) for name, (drafted, _) in drafters.items()},
            "a-model",
            output_tokens,
            1024,
        ),
        request_ids=("a",),
        kinds=("chat",),
        splits=("eval",),
        prompts=(np.arange(10, dtype=np.int32),),
        starts=np.array([0, output_tokens]),
        output_token_ids=np.arange(output_tokens, dtype=np.int32),
        is_stopped=np.array([True]),
        drafters={
            name: DrafterTrace(np.array(drafted, np.uint8), np.array(accepted, np.uint8))
            for name, (drafted, accepted) in drafters.items()
        },
    )


def figure(data_set, load, setting, drafter, length, speedup, requests="all", where="traces"):
    return Speedup(where, requests, data_set, load, setting, drafter, length, speedup)


def make_results(**changes):
    """A study in which every claim of the paper holds."""
    rows = []
    for data_set in (*DATA_SETS, "all"):
        for load in LOADS:
            slower = 0.5 * (load == LOADS[-1])
            ngram = 2.6 if data_set == "edit" else 1.6
            for requests in ("all", "held_out"):
                rows += [
                    figure(data_set, load, *key, speedup - slower, requests)
                    for *key, speedup in (
                        (FIXED, "ngram", 3, ngram),
                        (FIXED, "ngram", 1, ngram - 0.02),
                        (FIXED, "eagle3", 3, 2.0),
                        (ORACLE_LENGTH, "ngram", 0, 1.3 * ngram),
                        (ORACLE_LENGTH, "eagle3", 0, 2.5),
                        (COMBINED, "if_it_wins", 0, 4.5),
                        (COMBINED, "as_published", 0, 4.9),
                        (COMBINED, "both_draft", 0, 4.0),
                    )
                ]
            rows.append(figure(data_set, load, POLICY, "", 0, 3 - slower, "held_out"))
        rows.append(figure(data_set, 1, OPTIMUM, "", 0, 5.0))
    stages = [
        StageShare(setting, load, stage, share, share * 1.5)
        for setting in ("no speculation", "none", "ngram:3", "eagle3:3")
        for load in LOADS
        for stage, share in (
            ("drafting", 0.2),
            ("verification", 0.7),
            ("sampling", 0.01),
            ("deciding", 0.03),
            ("overhead", 0.055),
            ("not covered", 0.005),
        )
    ]
    traces = _bursty(make_traces(num_requests=48, kinds=DATA_SETS))
    means = request_means(traces)
    results = StudyResults(
        Speedups(rows),
        DATA_SETS,
        "eagle3",
        ("edit",),
        stretches(traces),
        means,
        spreads(means),
        [Overlap(DATA_SETS[i % 2], f"{i}", 9, i / 20, i / 30, 0.6 + i / 20) for i in range(20)],
        [
            OverlapCell(low, low + 0.1, low + 0.05, 5, load, ratio)
            for load in LOADS
            for low, ratio in ((0.4, 0.5), (0.6, 2.0))
        ],
        stages,
        EngineMemory(1000, 80, 500, 20),
    )
    return replace(results, **changes)


def _bursty(traces):
    """n-gram accepts much in some requests, from the middle on, and in one data set more."""
    rng = np.random.default_rng(5)
    ngram, eagle = traces.drafters["ngram"], traces.drafters["eagle3"]
    accepted, steady = np.zeros_like(ngram.num_accepted_tokens), eagle.num_accepted_tokens.copy()
    for request in range(traces.num_requests):
        first, end = traces.starts[request], traces.starts[request + 1]
        burst = rng.integers(0, 5) + 3 * (traces.kinds[request] == "edit")
        accepted[(first + end) // 2 : end] = burst
        steady[first:end] = 1 + (np.arange(end - first) > 8) + (traces.kinds[request] == "edit")
    return replace(
        traces,
        drafters={
            "ngram": replace(ngram, num_accepted_tokens=accepted),
            "eagle3": replace(eagle, num_accepted_tokens=steady),
        },
    )
