"""Traces: what every drafter would have got accepted, at every position of recorded outputs.

What the target emits does not depend on how it is speculated for, so one plain run in which every
drafter drafts at every position, and nothing is submitted, tells what any sequence of actions
would have brought. At temperature 0 that is exact. At higher temperatures a draft token is
accepted exactly when it equals the token the target samples (vLLM's rejection sampler, for drafts
that are not distributions), so a replay is one fair draw of what live serving would have done;
`target_probability` is the chance of the first draft token behind that draw.

A file is one parquet table, zstd-compressed, one row per request, in which `positions` is the
number of output tokens; its schema carries `TraceHeader` as JSON under the key `draftgym`.

| column | type | meaning |
|---|---|---|
| `request_id`, `kind`, `split` | string | who, what sort of prompt, `train` or `eval` |
| `prompt_token_ids` | list of int32 | |
| `output_token_ids` | list of int32 `[positions]` | |
| `is_stopped` | bool | ended by a stop token, not by its token limit |
| `DRAFTER_num_draft_tokens` | list of uint8 `[positions]` | what it drafts after p output tokens |
| `DRAFTER_num_accepted_tokens` | list of uint8 `[positions]` | leading ones the target emits |
| `DRAFTER_match_length` | list of uint8 `[positions]` | token drafters only |
| `DRAFTER_agreement` | list of float32 `[positions]` | n-gram only |
| `DRAFTER_survival` | list of float32 `[positions * max length]` | suffix and model drafters |
| `DRAFTER_margin` | list of float32 `[positions * max length]` | model drafters: logit gap |
| `DRAFTER_target_probability` | list of float32 `[positions]` | temperature above 0 only |

Entry p of a list speaks of the draft made after p output tokens; entry 0 is empty in traces of
vLLM, where the first token comes with the prompt. What the suffix drafter drafts depends on the
request alone where `suffix_max_cached_requests` is 0; else also on the responses that the engine
gave before, and a replay repeats the drafts of the recording's order of requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policy.config import from_mapping
from policy.contract import (
    CONTRACT_VERSION,
    MODEL_DRAFTERS,
    NONE,
    SURVIVAL_DRAFTERS,
    TOKEN_DRAFTERS,
    Contract,
    Granularity,
)
from policy.errors import ConfigError, ContractError, TraceError

TRACE_VERSION = 2
_METADATA_KEY = b"draftgym"


@dataclass(frozen=True)
class TraceHeader:
    """What a trace was recorded with.

    Attributes:
        max_lengths: Longest recorded draft per drafter, `none` left out.
        target: The target model.
        temperature: Sampling temperature of every request.
        output_tokens: Token limit of every request.
        max_model_len: Longest context of the engine, in tokens.
        ngram_min_match: Shortest match the n-gram drafter offered, in tokens.
        ngram_max_match: Longest match it looked for, in tokens.
        suffix_max_tree_depth: Longest match and draft of the suffix drafter, in tokens.
        suffix_max_cached_requests: Requests whose responses it drafted from for others.
        suffix_max_spec_factor: Most tokens that it drafted per token of the match.
        suffix_min_token_prob: Survival below which its drafts ended.
        trace_version: Layout of the file.
        contract_version: Contract of the records.
    """

    max_lengths: Mapping[str, int]
    target: str
    output_tokens: int
    max_model_len: int
    temperature: float = 0.0
    ngram_min_match: int = 2
    ngram_max_match: int = 4
    suffix_max_tree_depth: int = 24
    suffix_max_cached_requests: int = 10_000
    suffix_max_spec_factor: float = 1.0
    suffix_min_token_prob: float = 0.1
    trace_version: int = TRACE_VERSION
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True)
class DrafterTrace:
    """One drafter's drafts at every position of every request.

    Attributes:
        num_draft_tokens: Tokens drafted, uint8 `[positions]`.
        num_accepted_tokens: Leading ones that the target emits, uint8 `[positions]`.
        match_length: Match behind the draft, uint8 `[positions]`; token drafters only.
        agreement: Share of the earlier places with the same last tokens that went on as the draft
            begins, float32 `[positions]`; n-gram only.
        survival: Probability that each draft token survives, float32 `[positions, max length]`,
            NaN where unknown; `SURVIVAL_DRAFTERS` only.
        margin: Gap between the two largest logits of each draft token, float32
            `[positions, max length]`, NaN where unknown; model drafters only.
        target_probability: Target's probability of the first draft token at the sampling
            temperature, float32 `[positions]`; None at temperature 0.
    """

    num_draft_tokens: np.ndarray
    num_accepted_tokens: np.ndarray
    match_length: np.ndarray | None = None
    agreement: np.ndarray | None = None
    survival: np.ndarray | None = None
    margin: np.ndarray | None = None
    target_probability: np.ndarray | None = None

    def changed(self, change: Callable[[str, np.ndarray], np.ndarray]) -> DrafterTrace:
        """The same with each array that is there replaced by `change(name, array)`."""
        arrays: dict[str, Any] = {
            name: None if values is None else change(name, values)
            for name, values in vars(self).items()
        }
        return DrafterTrace(**arrays)


@dataclass(frozen=True)
class Traces:
    """Recorded requests, their positions laid end to end.

    Attributes:
        header: What they were recorded with.
        request_ids: Unique names.
        kinds: Sort of each prompt.
        splits: `train` or `eval`.
        prompts: Prompt token ids, one int32 array per request.
        starts: First position of each request and, last, the number of positions, int64.
        output_token_ids: int32 `[positions]`.
        is_stopped: Whether a stop token ended the request, bool `[requests]`.
        drafters: What each drafter drafts.
    """

    header: TraceHeader
    request_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    splits: tuple[str, ...]
    prompts: tuple[np.ndarray, ...]
    starts: np.ndarray
    output_token_ids: np.ndarray
    is_stopped: np.ndarray
    drafters: Mapping[str, DrafterTrace] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.request_ids)

    @property
    def num_output_tokens(self) -> np.ndarray:
        """Output tokens of each request, int64 `[requests]`."""
        return np.diff(self.starts)

    def outputs(self, request: int) -> np.ndarray:
        """Output token ids of one request."""
        return self.output_token_ids[self.starts[request] : self.starts[request + 1]]

    def contract(
        self,
        max_lengths: Mapping[str, int] | None = None,
        granularity: Granularity = "batch",
        cutoffs: tuple[float, ...] = (),
    ) -> Contract:
        """The contract over these drafters.

        Args:
            max_lengths: Longest draft per drafter, combinations of recorded ones among them; None
                takes everything that was recorded.
            granularity: Whether an observation row is the batch or a request.
            cutoffs: Survival probabilities that actions choose from.

        Raises:
            TraceError: If a drafter, or a length, was not recorded.
        """
        wanted = dict(self.header.max_lengths if max_lengths is None else max_lengths)
        contract = Contract((NONE, *wanted), (0, *wanted.values()), granularity, cutoffs)
        for drafter in contract.proposers:
            length = wanted[drafter]
            recorded = self.header.max_lengths.get(drafter, 0)
            if length > recorded:
                raise TraceError(
                    f"The traces hold drafts of '{drafter}' up to {recorded} tokens, not {length}; "
                    "collect them anew, or lower drafters.max_lengths."
                )
        return contract

    def select(self, requests: Sequence[int] | np.ndarray) -> Traces:
        """Some of the requests, in the given order."""
        index = np.asarray(requests, np.int64)
        spans = [np.arange(self.starts[i], self.starts[i + 1]) for i in index]
        positions = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        return replace(
            self,
            request_ids=tuple(self.request_ids[i] for i in index),
            kinds=tuple(self.kinds[i] for i in index),
            splits=tuple(self.splits[i] for i in index),
            prompts=tuple(self.prompts[i] for i in index),
            starts=_starts(self.num_output_tokens[index]),
            output_token_ids=self.output_token_ids[positions],
            is_stopped=self.is_stopped[index],
            drafters={
                name: drafter.changed(lambda _, values: values[positions])
                for name, drafter in self.drafters.items()
            },
        )

    def of_split(self, split: str) -> Traces:
        """The requests of one split.

        Raises:
            TraceError: If there are none.
        """
        requests = [i for i, name in enumerate(self.splits) if name == split]
        if not requests:
            raise TraceError(f"The traces hold no request of the {split} split; collect some.")
        return self.select(requests)

    def table(self) -> pa.Table:
        """The parquet table of these requests."""
        columns: dict[str, pa.Array] = {
            "request_id": pa.array(self.request_ids, pa.string()),
            "kind": pa.array(self.kinds, pa.string()),
            "split": pa.array(self.splits, pa.string()),
            "prompt_token_ids": pa.array(self.prompts, pa.list_(pa.int32())),
            "output_token_ids": _lists(self.output_token_ids, self.starts),
            "is_stopped": pa.array(self.is_stopped, pa.bool_()),
        }
        for name, drafter in self.drafters.items():
            for part, values in vars(drafter).items():
                if values is not None:
                    columns[f"{name}_{part}"] = _lists(values, self.starts)
        return pa.table(columns).replace_schema_metadata(
            {_METADATA_KEY: json.dumps(asdict(self.header)).encode()}
        )

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".partial")
        pq.write_table(self.table(), unfinished, compression="zstd")
        unfinished.replace(path)


def read_traces(*paths: Path) -> Traces:
    """Read one or more trace files as one.

    Raises:
        TraceError: If there is none, one is cut off, of another version, or makes no sense, or
            they were recorded with different settings.
    """
    if not paths:
        raise TraceError("No trace file was named; collect one with scripts/collect.py.")
    return concatenate([_read(path) for path in paths])


def concatenate(parts: Sequence[Traces]) -> Traces:
    """Several traces as one.

    Raises:
        TraceError: If their headers differ, or a request is in two of them.
    """
    first = parts[0]
    for part in parts[1:]:
        for name, value in vars(part.header).items():
            if value != getattr(first.header, name):
                raise TraceError(
                    f"Traces with {name} {getattr(first.header, name)} and {value} do not go "
                    "together; use one of them."
                )
    request_ids = tuple(request_id for part in parts for request_id in part.request_ids)
    if len(set(request_ids)) != len(request_ids):
        raise TraceError("A request is in the traces twice; name each file once.")
    return replace(
        first,
        request_ids=request_ids,
        kinds=tuple(kind for part in parts for kind in part.kinds),
        splits=tuple(split for part in parts for split in part.splits),
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        starts=_starts(np.concatenate([part.num_output_tokens for part in parts])),
        output_token_ids=np.concatenate([part.output_token_ids for part in parts]),
        is_stopped=np.concatenate([part.is_stopped for part in parts]),
        drafters={
            name: drafter.changed(partial(_joined, [part.drafters[name] for part in parts]))
            for name, drafter in first.drafters.items()
        },
    )


def _joined(parts: Sequence[DrafterTrace], name: str, _: np.ndarray) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in parts])


def _read(path: Path) -> Traces:
    try:
        table = pq.read_table(path)
        header = json.loads((table.schema.metadata or {})[_METADATA_KEY])
    except FileNotFoundError as error:
        raise TraceError(f"There is no trace file {path}; collect it first.") from error
    except KeyError as error:
        raise TraceError(f"{path} is not a trace file of draftgym; name one that is.") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TraceError(f"{path} is cut off or damaged; collect or import it again.") from error
    for name, known in (("trace_version", TRACE_VERSION), ("contract_version", CONTRACT_VERSION)):
        if header.get(name) != known:
            raise TraceError(
                f"{path} has {name} {header.get(name)} and this draftgym reads {known}; collect it "
                "anew."
            )
    try:
        traces = _from_table(table, from_mapping(TraceHeader, header, str(path)))
    except (KeyError, ConfigError, ContractError, pa.ArrowException) as error:
        raise TraceError(
            f"{path} lacks a part of a trace ({' '.join(str(error).split()).rstrip('.')}); collect "
            "it anew."
        ) from error
    _check(traces, path)
    return traces


def _from_table(table: pa.Table, header: TraceHeader) -> Traces:
    """Lay the lists of a table end to end."""
    outputs = table["output_token_ids"].combine_chunks()
    starts = _starts(np.asarray(outputs.value_lengths()))
    num_positions = int(starts[-1])
    drafters = {}
    for name, max_length in header.max_lengths.items():
        parts: dict[str, np.ndarray | None] = {
            "num_draft_tokens": _flat(table, f"{name}_num_draft_tokens"),
            "num_accepted_tokens": _flat(table, f"{name}_num_accepted_tokens"),
        }
        matrices = ["survival"] * (name in SURVIVAL_DRAFTERS) + ["margin"] * (
            name in MODEL_DRAFTERS
        )
        for part in matrices:
            values = _flat(table, f"{name}_{part}")
            if len(values) != num_positions * max_length:
                raise KeyError(f"{name}_{part} of every position")
            parts[part] = values.reshape(num_positions, max_length)
        if name in TOKEN_DRAFTERS:
            parts["match_length"] = _flat(table, f"{name}_match_length")
        if name not in SURVIVAL_DRAFTERS:
            parts["agreement"] = _flat(table, f"{name}_agreement")
        if header.temperature > 0:
            parts["target_probability"] = _flat(table, f"{name}_target_probability")
        drafters[name] = DrafterTrace(**parts)  # type: ignore[arg-type]
    return Traces(
        header=header,
        request_ids=tuple(table["request_id"].to_pylist()),
        kinds=tuple(table["kind"].to_pylist()),
        splits=tuple(table["split"].to_pylist()),
        prompts=tuple(
            np.asarray(prompt, np.int32) for prompt in table["prompt_token_ids"].to_pylist()
        ),
        starts=starts,
        output_token_ids=_flat(table, "output_token_ids"),
        is_stopped=table["is_stopped"].to_numpy(),
        drafters=drafters,
    )


def _check(traces: Traces, path: Path) -> None:
    """Refuse what no run can have recorded."""
    num_positions = int(traces.starts[-1])
    if not traces.num_requests or (traces.num_output_tokens < 1).any():
        raise TraceError(f"{path} has a request without output tokens; collect it anew.")
    for name, drafter in traces.drafters.items():
        for part, values in vars(drafter).items():
            if values is not None and len(values) != num_positions:
                raise TraceError(
                    f"{path} has {len(values)} values of {name}_{part} for {num_positions} "
                    "positions; collect it anew."
                )
        drafted, accepted = drafter.num_draft_tokens, drafter.num_accepted_tokens
        if min(drafted.min(), accepted.min()) < 0:
            raise TraceError(f"{path} has negative lengths of '{name}'; collect it anew.")
        if (accepted > drafted).any() or drafted.max() > traces.header.max_lengths[name]:
            raise TraceError(
                f"{path} has more tokens of '{name}' accepted than drafted, or more drafted than "
                f"{traces.header.max_lengths[name]}; collect it anew."
            )


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _flat(table: pa.Table, column: str) -> np.ndarray:
    values: Any = table[column].combine_chunks().flatten()
    return np.asarray(values)


def _lists(values: np.ndarray, starts: np.ndarray) -> pa.ListArray:
    """A list per request; several values per position are laid end to end."""
    per_position = values[0].size if len(values) else 1
    return pa.ListArray.from_arrays((starts * per_position).astype(np.int32), values.ravel())
