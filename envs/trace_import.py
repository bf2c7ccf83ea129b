"""Import of published traces: each source file becomes one trace file and its provenance.

* n-gram: drafts, matches and accepted tokens are computed anew from the tokens with the serving
  drafter; the published numbers only serve to check that.
* EAGLE: `acc_len - 1` tokens are accepted of a draft of the longest length. Confidences were not
  published: they are NaN. Where the list is shorter or longer than the output, the request is
  *misaligned*: part of its list belongs to other tokens.
* Entry 0 is empty: in vLLM the first token comes with the prompt, and both lists say 1 there.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from policy.contract import MAX_TOKEN_DRAFT_LENGTH
from policy.errors import ConfigError, TraceError

from .ngram_traces import NGRAM, ngram_trace
from .prompts.prompt import split_of
from .published_traces import PublishedRequest, find_published, read_published, stem_of
from .traces import DrafterTrace, TraceHeader, Traces

EAGLE = "eagle3"


@dataclass(frozen=True)
class ImportConfig:
    """What to import and how it was recorded.

    Attributes:
        src: A published file, or a folder of them.
        output_dir: Where the traces go.
        target: The target model of the record.
        output_tokens: Token limit of every request.
        max_model_len: Longest context of the engine, in tokens.
        misaligned: Whether requests whose EAGLE list does not fit their output stay (`keep`: the
            list is cut, or goes on without accepted tokens) or are left out (`drop`).
        max_length: Longest draft of either drafter.
        ngram_min_match: Shortest match the n-gram drafter offers, in tokens.
        ngram_max_match: Longest match it looks for, in tokens.
    """

    src: str | None
    output_dir: str
    target: str
    output_tokens: int
    max_model_len: int
    misaligned: Literal["keep", "drop"] = "keep"
    max_length: int = MAX_TOKEN_DRAFT_LENGTH
    ngram_min_match: int = 3
    ngram_max_match: int = 7

    def __post_init__(self) -> None:
        if not self.src:
            raise ConfigError("SRC is missing; give a published file, or a folder of them.")
        if not 1 <= self.max_length <= MAX_TOKEN_DRAFT_LENGTH:
            raise ConfigError(
                f"max_length is {self.max_length}; make it 1 to {MAX_TOKEN_DRAFT_LENGTH}."
            )
        if not 1 <= self.ngram_min_match <= self.ngram_max_match <= MAX_TOKEN_DRAFT_LENGTH:
            raise ConfigError(
                f"ngram_min_match {self.ngram_min_match} and ngram_max_match "
                f"{self.ngram_max_match} do not ascend within 1 to {MAX_TOKEN_DRAFT_LENGTH}; "
                "correct them."
            )


@dataclass(frozen=True)
class Imported:
    """One imported file.

    Attributes:
        path: The parquet file.
        provenance: What `NAME.json` beside it says.
    """

    path: Path
    provenance: Mapping[str, Any]


def import_published(config: ImportConfig) -> tuple[Imported, ...]:
    """Import every file of the source; all of them are read before anything is written.

    Raises:
        TraceError: If there is no file, one is damaged, or two would have the same name.
    """
    sources = find_published(Path(str(config.src)).expanduser())
    imported = []
    for source in tqdm(sources, desc="importing", unit="file", delay=5):
        requests = read_published(source)
        imported.append((source, requests, to_traces(requests, _kind(source), config)))
    try:
        return tuple(_write(*one, config) for one in imported)
    except OSError as error:
        raise TraceError(
            f"Cannot write to {config.output_dir} ({error.strerror}); choose another output_dir."
        ) from error


def _write(
    source: Path, requests: Sequence[PublishedRequest], traces: Traces, config: ImportConfig
) -> Imported:
    path = Path(config.output_dir).expanduser() / f"{stem_of(source)}.parquet"
    traces.write(path)
    provenance = _provenance(source, requests, traces, config)
    path.with_suffix(".json").write_text(json.dumps(provenance, indent=2) + "\n")
    return Imported(path, provenance)


def describe_import(imported: Sequence[Imported]) -> str:
    """What was imported, a line per file."""
    lines = []
    for one in imported:
        facts = one.provenance
        lines.append(
            f"{one.path}: {facts['num_requests']} requests, {facts['num_positions']} output "
            f"tokens; {facts['num_misaligned']} of {facts['num_published']} published ones "
            f"misaligned ({facts['misaligned']}); n-gram as published at "
            f"{facts['ngram_agreement']:.2%} of positions"
        )
    return "\n".join(lines)


def to_traces(requests: Sequence[PublishedRequest], kind: str, config: ImportConfig) -> Traces:
    """Published requests as traces.

    Args:
        requests: Those of one file.
        kind: Name of the data set; with a request's `id` it decides the split.
        config: How they were recorded.

    Raises:
        TraceError: If none is left, or one is longer than the configured limit.
    """
    kept = [one for one in requests if config.misaligned == "keep" or not one.is_misaligned]
    if not kept:
        raise TraceError(f"All requests of {kind} are misaligned; import with misaligned=keep.")
    lengths = np.array([len(request.output) for request in kept])
    if lengths.max() > config.output_tokens:
        raise TraceError(
            f"A request of {kind} has {lengths.max()} output tokens, more than the limit "
            f"{config.output_tokens}; raise output_tokens."
        )
    names = tuple(f"{kind}-{request.name}" for request in kept)
    return Traces(
        header=TraceHeader(
            max_lengths={NGRAM: config.max_length, EAGLE: config.max_length},
            target=config.target,
            output_tokens=config.output_tokens,
            max_model_len=config.max_model_len,
            ngram_min_match=config.ngram_min_match,
            ngram_max_match=config.ngram_max_match,
        ),
        request_ids=names,
        kinds=(kind,) * len(kept),
        splits=tuple(split_of(name) for name in names),
        prompts=tuple(request.prompt for request in kept),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        output_token_ids=np.concatenate([request.output for request in kept]),
        is_stopped=lengths < config.output_tokens,
        drafters={
            NGRAM: ngram_trace(
                [request.prompt for request in kept],
                [request.output for request in kept],
                config.ngram_min_match,
                config.ngram_max_match,
                config.max_length,
            ),
            EAGLE: _eagle_trace(kept, config.max_length),
        },
    )


def _eagle_trace(requests: Sequence[PublishedRequest], max_length: int) -> DrafterTrace:
    drafted, accepted = [], []
    for request in requests:
        positions = len(request.output)
        room = np.minimum(max_length, positions - np.arange(positions))
        room[0] = 0
        tokens = np.zeros(positions, np.int64)
        published = request.eagle_step_tokens[:positions] - 1
        tokens[: len(published)] = published
        drafted.append(room.astype(np.uint8))
        accepted.append(np.minimum(tokens, room).astype(np.uint8))
    num_positions = sum(map(len, drafted))
    unknown = np.full((num_positions, max_length), np.nan, np.float32)
    return DrafterTrace(
        num_draft_tokens=np.concatenate(drafted),
        num_accepted_tokens=np.concatenate(accepted),
        survival=unknown,
        margin=unknown,
    )


def _ngram_agreement(requests: Sequence[PublishedRequest], traces: Traces) -> float:
    """Share of positions at which the n-gram steps computed anew are as long as published."""
    longest = 1 + traces.header.max_lengths[NGRAM]
    computed = traces.drafters[NGRAM].num_accepted_tokens.astype(np.int64) + 1
    start_of = dict(zip(traces.request_ids, traces.starts, strict=False))
    kind, same, compared = traces.kinds[0], 0, 0
    for request in requests:
        start = start_of.get(f"{kind}-{request.name}")
        if start is None:
            continue
        published = np.minimum(request.ngram_step_tokens[: len(request.output)], longest)
        same += int((computed[start : start + len(published)] == published).sum())
        compared += len(published)
    return same / max(compared, 1)


def _provenance(
    source: Path, requests: Sequence[PublishedRequest], traces: Traces, config: ImportConfig
) -> dict[str, Any]:
    misaligned = [f"{_kind(source)}-{one.name}" for one in requests if one.is_misaligned]
    return {
        "source": source.name,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "num_published": len(requests),
        "num_requests": traces.num_requests,
        "num_positions": int(traces.starts[-1]),
        "splits": dict(Counter(traces.splits)),
        "misaligned": config.misaligned,
        "num_misaligned": len(misaligned),
        "misaligned_request_ids": misaligned,
        "ngram_agreement": _ngram_agreement(requests, traces),
    }


def _kind(path: Path) -> str:
    """Name of the data set: what follows the last underscore of the file's name."""
    return stem_of(path).rpartition("_")[2]
