"""Everything `scripts/study.py` can be told, as one validated dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from envs.live import DraftersConfig, ModelConfig
from envs.workload import WorkloadConfig

from ..contract import MAX_TOKEN_DRAFT_LENGTH
from ..errors import ConfigError


@dataclass(frozen=True)
class TraceStudyConfig:
    """The part that is computed from traces.

    Attributes:
        files: Trace files, or folders of them, recorded with the same settings; every kind of
            requests in them is a data set.
        cost_model: JSON file that prices the steps.
        policy: An exported policy to judge on held-out requests; None for none.
        concurrency: Requests in flight, ascending.
        chains: Draft lengths that pictures show.
        max_length: Longest draft in tokens, if so long ones were recorded.
        overlap_length: Draft length of both drafters where n-gram is set against the model.
        code_editing: Data sets that are code editing.
        min_tokens_per_slot: Tokens that each of the requests in flight has at least to produce.
    """

    files: tuple[str, ...]
    cost_model: str
    policy: str | None
    concurrency: tuple[int, ...]
    chains: tuple[int, ...]
    max_length: int
    overlap_length: int
    code_editing: tuple[str, ...]
    min_tokens_per_slot: int

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("traces.files is empty; name a trace file, or a folder of them.")
        _check_ascending("traces.concurrency", self.concurrency)
        _check_ascending("traces.chains", self.chains)
        for name in ("max_length", "overlap_length"):
            if not 1 <= getattr(self, name) <= MAX_TOKEN_DRAFT_LENGTH:
                raise ConfigError(
                    f"traces.{name} is {getattr(self, name)}; make it 1 to "
                    f"{MAX_TOKEN_DRAFT_LENGTH}."
                )
        if self.min_tokens_per_slot < 1:
            raise ConfigError("traces.min_tokens_per_slot must be 1 or more; raise it.")


@dataclass(frozen=True)
class LiveStudyConfig:
    """The part that is measured on live vLLM.

    Attributes:
        concurrency: Requests in flight, ascending.
        lengths: Draft lengths of the settings, by drafter.
        by_kind: Whether each kind of prompts is served by itself, or all are mixed.
        num_repeats: Times that each cell is served, with other requests each time.
        tokens_per_request: Output tokens of a cell for each of its requests in flight.
        min_tokens: Output tokens of a cell, at least.
    """

    concurrency: tuple[int, ...]
    lengths: Mapping[str, tuple[int, ...]]
    by_kind: bool
    num_repeats: int
    tokens_per_request: int
    min_tokens: int

    def __post_init__(self) -> None:
        _check_ascending("live.concurrency", self.concurrency)
        for drafter, lengths in self.lengths.items():
            _check_ascending(f"live.lengths.{drafter}", lengths)
        if min(self.num_repeats, self.tokens_per_request, self.min_tokens) < 1:
            raise ConfigError(
                "live.num_repeats, tokens_per_request and min_tokens must be 1 or more; raise them."
            )


@dataclass(frozen=True)
class StudyConfig:
    """A study.

    Attributes:
        model: The target model and its engine, for the live part.
        drafters: Its drafters.
        workload: Its prompts and their output limits.
        output_dir: Where the report goes.
        traces: What is computed from traces; None for nothing.
        live: What is measured live; None for nothing.
        quick: Whether to look at few loads, and live at few tokens.
        num_processes: Threads that serve traces.
        seed: Of requests and their order.
    """

    model: ModelConfig
    drafters: DraftersConfig
    workload: WorkloadConfig
    output_dir: str
    traces: TraceStudyConfig | None = None
    live: LiveStudyConfig | None = None
    quick: bool = False
    num_processes: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.traces is None and self.live is None:
            raise ConfigError("A study needs traces or live; leave one of them in.")
        if self.num_processes < 1:
            raise ConfigError(f"num_processes is {self.num_processes}; make it 1 or more.")
        if self.live is None:
            return
        longest = max(self.live.concurrency)
        if longest > self.model.max_num_seqs:
            raise ConfigError(
                f"live.concurrency goes up to {longest} requests; raise model.max_num_seqs from "
                f"{self.model.max_num_seqs} or lower it."
            )
        for drafter, lengths in self.live.lengths.items():
            if max(lengths) > self.drafters.max_lengths.get(drafter, 0):
                raise ConfigError(
                    f"live.lengths.{drafter} goes up to {max(lengths)} tokens; raise "
                    f"drafters.max_lengths.{drafter} or lower it."
                )

    def quickened(self) -> StudyConfig:
        """The same at the least, a middle and the highest load, with few live tokens."""
        traces, live = self.traces, self.live
        if traces is not None:
            traces = replace(
                traces,
                concurrency=_thinned(traces.concurrency),
                min_tokens_per_slot=min(traces.min_tokens_per_slot, 1024),
            )
        if live is not None:
            live = replace(
                live,
                concurrency=tuple(sorted({live.concurrency[0], live.concurrency[-1]})),
                by_kind=False,
                num_repeats=min(live.num_repeats, 2),
                tokens_per_request=min(live.tokens_per_request, 12),
                min_tokens=min(live.min_tokens, 64),
            )
        return replace(self, traces=traces, live=live)


def _thinned(loads: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({loads[0], loads[len(loads) // 2], loads[-1]}))


def _check_ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or min(values) < 1 or list(values) != sorted(set(values)):
        raise ConfigError(f"{name} is {list(values)}; list ascending whole numbers of 1 or more.")
