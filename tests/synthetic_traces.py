"""Random traces that a run could have recorded, for whatever replays them."""

from dataclasses import replace

import numpy as np

from envs.traces import DrafterTrace, TraceHeader, Traces
from policy.cost_model import CostModel

LENGTHS = {"ngram": 8, "eagle3": 4}
PRICES_S = {
    "num_engine_steps": 0.02,
    "num_verified_tokens": 0.001,
    "num_context_tokens": 1e-6,
    "num_prefill_tokens": 0.002,
    "num_draft_passes": 0.004,
    "num_draft_pass_tokens": 0.0002,
}


def with_suffix(traces, seed=1):
    """The same with a suffix drafter that has less often something on offer, but longer drafts."""
    rng = np.random.default_rng(seed)
    ngram = traces.drafters["ngram"]
    drafted = np.minimum(2 * ngram.num_draft_tokens, 12)
    drafted[rng.random(len(drafted)) < 0.4] = 0
    survival = np.cumprod(rng.random((len(drafted), 12)), axis=1).astype(np.float32)
    survival[np.arange(12) >= drafted[:, None]] = np.nan
    suffix = DrafterTrace(
        drafted,
        np.minimum(ngram.num_accepted_tokens, drafted),
        match_length=np.where(drafted, rng.integers(1, 20, len(drafted)), 0).astype(np.uint8),
        survival=survival,
    )
    lengths = {"ngram": LENGTHS["ngram"], "suffix": 12, "eagle3": LENGTHS["eagle3"]}
    drafters = {"ngram": ngram, "suffix": suffix, "eagle3": traces.drafters["eagle3"]}
    header = replace(traces.header, max_lengths=lengths)
    return replace(traces, header=header, drafters=drafters)


def make_traces(num_requests=12, output_tokens=40, seed=0, kinds=("code", "chat"), **header):
    """Requests of up to `output_tokens`; every third ended by itself."""
    rng = np.random.default_rng(seed)
    counts = np.full(num_requests, output_tokens)
    is_stopped = np.arange(num_requests) % 3 == 2
    counts[is_stopped] = rng.integers(5, output_tokens, is_stopped.sum())
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    positions = int(starts[-1])
    left = np.repeat(starts[1:], counts) - np.arange(positions)
    is_first = np.isin(np.arange(positions), starts[:-1])

    def drafts(longest, chance):
        drafted = np.where(
            rng.random(positions) < chance, rng.integers(1, longest + 1, positions), 0
        )
        drafted[is_first] = 0
        accepted = np.minimum(rng.geometric(0.4, positions) - 1, np.minimum(drafted, left))
        return drafted.astype(np.uint8), accepted.astype(np.uint8)

    ngram, eagle = drafts(LENGTHS["ngram"], 0.4), drafts(LENGTHS["eagle3"], 1.0)
    eagle = (np.where(is_first, 0, LENGTHS["eagle3"]).astype(np.uint8), eagle[1])
    shape = positions, LENGTHS["eagle3"]
    return Traces(
        header=TraceHeader(LENGTHS, "a-model", output_tokens, 1024, **header),
        request_ids=tuple(f"request-{i}" for i in range(num_requests)),
        kinds=tuple(kinds[i % len(kinds)] for i in range(num_requests)),
        splits=tuple("eval" if i % 4 == 3 else "train" for i in range(num_requests)),
        prompts=tuple(
            rng.integers(0, 1000, rng.integers(20, 200)).astype(np.int32)
            for _ in range(num_requests)
        ),
        starts=starts,
        output_token_ids=rng.integers(0, 1000, positions).astype(np.int32),
        is_stopped=is_stopped,
        drafters={
            "ngram": DrafterTrace(
                *ngram,
                match_length=np.where(ngram[0], rng.integers(2, 5, positions), 0).astype(np.uint8),
                agreement=np.where(ngram[0], rng.random(positions), 0).astype(np.float32),
            ),
            "eagle3": DrafterTrace(
                *eagle,
                survival=np.cumprod(rng.random(shape), axis=1).astype(np.float32),
                margin=rng.random(shape).astype(np.float32),
            ),
        },
    )


def make_cost_model():
    """A machine on which a pass of the drafter costs a fifth of a step."""
    return CostModel.from_weights(PRICES_S)
