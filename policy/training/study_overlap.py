"""When n-gram wins: overlap of prompt and output against n-gram's speed over the model drafter's.

Overlap is BLEU-4 as sacrebleu computes it, of the output against the prompt, over the model's own
tokens (published traces hold no text). Its brevity penalty is left out: a prompt need not be as
short as an answer that is copied from it. BLEU-4 with the penalty is kept beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.closed_loop import seconds_alone, tokens_per_s
from envs.draft_options import fixed_options
from envs.traces import Traces
from policy.cost_model import CostModel

from .study_config import TraceStudyConfig
from .study_data import NGRAM

EDGES = tuple(round(0.1 * edge, 1) for edge in range(11))
MIN_REQUESTS = 3
"""Requests of a cell, at least."""


@dataclass(frozen=True)
class Overlap:
    """One request.

    Attributes:
        data_set: Its kind.
        request_id: Its name.
        num_output_tokens: Length of its output.
        bleu4: Overlap of prompt and output, 0 to 1, without brevity penalty.
        bleu4_with_penalty: The same with it.
        ratio_alone: Speed of n-gram over that of the model drafter, served alone.
    """

    data_set: str
    request_id: str
    num_output_tokens: int
    bleu4: float
    bleu4_with_penalty: float
    ratio_alone: float


@dataclass(frozen=True)
class OverlapCell:
    """Requests of similar overlap, served together.

    Attributes:
        low: Least overlap.
        high: Its end; belongs to the next cell, but 1 to the last.
        mean_bleu4: Mean overlap.
        num_requests: Requests.
        num_running_reqs: Requests in flight.
        ratio: Speed of n-gram over that of the model drafter.
    """

    low: float
    high: float
    mean_bleu4: float
    num_requests: int
    num_running_reqs: int
    ratio: float


def bleu4(prompt: Sequence[int], output: Sequence[int]) -> tuple[float, float]:
    """BLEU-4 of an output against its prompt: without and with brevity penalty, 0 to 1.

    Example:
        All of the output stands in a prompt of twice its length.

        >>> overlap, with_penalty = bleu4(range(20), range(10))
        >>> round(overlap, 6), round(with_penalty, 6) == round(math.exp(1 - 2), 6)
        (1.0, True)
    """
    from sacrebleu.metrics import BLEU

    hypothesis, reference = (" ".join(map(str, tokens)) for tokens in (output, prompt))
    # Tokens are words already; sacrebleu warns of pre-tokenised text unless force is set.
    score = BLEU(tokenize="none", force=True, effective_order=True).sentence_score(
        hypothesis, [reference]
    )
    if score.sys_len < 4:
        return 0.0, 0.0
    return math.prod(share / 100 for share in score.precisions) ** 0.25, score.score / 100


def measure_overlap(
    traces: Traces, cost_model: CostModel, model_drafter: str, config: TraceStudyConfig, seed: int
) -> tuple[list[Overlap], list[OverlapCell]]:
    """Every request's overlap and ratio, and those of groups of similar overlap at every load.

    Args:
        traces: The requests of all data sets.
        cost_model: Prices the steps.
        model_drafter: The drafter that n-gram is set against.
        config: Draft length and loads.
        seed: Of the order of the requests.
    """
    lengths = {
        drafter: min(config.overlap_length, traces.header.max_lengths[drafter])
        for drafter in (NGRAM, model_drafter)
    }
    ngram_s, model_s = (
        seconds_alone(traces, fixed_options(traces, *setting), cost_model, first_position=0)
        for setting in lengths.items()
    )
    rows = [
        Overlap(
            traces.kinds[request],
            traces.request_ids[request],
            int(traces.num_output_tokens[request]),
            *bleu4(traces.prompts[request].tolist(), traces.outputs(request).tolist()),
            float(model_s[request] / ngram_s[request]),
        )
        for request in range(traces.num_requests)
    ]
    overlaps = np.array([row.bleu4 for row in rows])
    cells = []
    for low, high in itertools.pairwise(EDGES):
        members = np.flatnonzero((overlaps >= low) & ((overlaps < high) | (high == 1)))
        if len(members) < MIN_REQUESTS:
            continue
        group = traces.select(members)
        for load in config.concurrency:
            speeds = [
                tokens_per_s(
                    group,
                    fixed_options(group, *setting),
                    cost_model,
                    load,
                    first_position=0,
                    min_tokens_per_slot=config.min_tokens_per_slot,
                    seed=seed,
                )
                for setting in lengths.items()
            ]
            mean = float(overlaps[members].mean())
            cells.append(OverlapCell(low, high, mean, len(members), load, speeds[0] / speeds[1]))
    return rows, cells


def in_words(point: float | None, model_drafter: str) -> str:
    """A break-even as one reads it."""
    if point is None:
        return f"none, {model_drafter} is faster"
    return f"{point:.2f}" if point else "any, ngram is always faster"


def break_even(cells: Sequence[OverlapCell], num_running_reqs: int) -> float | None:
    """Overlap from which on n-gram is the faster one, at one load.

    Between the last group that it loses and the next, the logarithm of the ratio is interpolated.

    Returns:
        0 where n-gram wins everywhere, None where it loses at the highest overlap.

    Example:
        >>> at = lambda overlap, ratio: OverlapCell(0, 1, overlap, 9, 1, ratio)
        >>> break_even([at(0.2, 0.5), at(0.4, 0.5), at(0.6, 2.0)], 1)
        0.5
    """
    own = sorted(
        (cell for cell in cells if cell.num_running_reqs == num_running_reqs),
        key=lambda cell: cell.mean_bleu4,
    )
    losing = [index for index, cell in enumerate(own) if cell.ratio <= 1]
    if not losing:
        return 0.0
    if losing[-1] == len(own) - 1:
        return None
    last, following = own[losing[-1]], own[losing[-1] + 1]
    below, above = math.log(last.ratio), math.log(following.ratio)
    share = -below / (above - below)
    return last.mean_bleu4 + share * (following.mean_bleu4 - last.mean_bleu4)
