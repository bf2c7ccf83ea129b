"""What the n-gram drafter drafts along recorded outputs: it follows from the tokens alone.

So a recording serves any match lengths: what they would have drafted is computed anew, with the
matcher that serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policy.serving.ngram import drafts_along

from .traces import DrafterTrace, Traces

NGRAM = "ngram"


def ngram_trace(
    prompts: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    min_match: int,
    max_match: int,
    max_length: int,
    max_model_len: int | None = None,
) -> DrafterTrace:
    """The drafts at every output position of some requests, none at their first.

    Args:
        prompts: Prompt token ids, one int32 array per request.
        outputs: Output token ids, one int32 array per request.
        min_match: Shortest match that is offered, in tokens.
        max_match: Longest match that is looked for, in tokens.
        max_length: Longest draft in tokens.
        max_model_len: Longest context of the engine in tokens, which drafts keep within.
    """
    found, agreement = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = np.concatenate([prompt, output]).astype(np.int32)
        drafts, agree = drafts_along(tokens, len(prompt), min_match, max_match, max_length)
        drafts[0] = agree[0] = 0  # the first token comes with the prompt
        if max_model_len is not None:
            room = max_model_len - 1 - len(prompt) - np.arange(len(output))
            drafts[:, 1:] = np.minimum(drafts[:, 1:], np.maximum(room, 0)[:, None])
            agree[drafts[:, 1] == 0] = 0
        found.append(drafts)
        agreement.append(agree)
    match_length, drafted, accepted = np.concatenate(found).T
    return DrafterTrace(
        num_draft_tokens=drafted.astype(np.uint8),
        num_accepted_tokens=accepted.astype(np.uint8),
        match_length=match_length.astype(np.uint8),
        agreement=np.concatenate(agreement),
    )


def with_ngram_matches(traces: Traces, min_match: int, max_match: int) -> Traces:
    """The same requests, drafted for by an n-gram drafter of these match lengths.

    Args:
        traces: Recorded with any match lengths; returned as they are where those are these, or
            where n-gram was not recorded.
        min_match: Shortest match that is offered, in tokens.
        max_match: Longest match that is looked for, in tokens.
    """
    header = replace(traces.header, ngram_min_match=min_match, ngram_max_match=max_match)
    if NGRAM not in traces.drafters or header == traces.header:
        return traces
    drafts = ngram_trace(
        traces.prompts,
        [traces.outputs(request) for request in range(traces.num_requests)],
        min_match,
        max_match,
        header.max_lengths[NGRAM],
        header.max_model_len,
    )
    return replace(traces, header=header, drafters={**traces.drafters, NGRAM: drafts})
