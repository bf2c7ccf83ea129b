"""The model drafter: feeds vLLM's own proposer only with what it has missed, when it is needed.

vLLM runs its proposer after every step, which keeps the drafter's KV cache in step with the
target but costs a forward pass even where nothing is drafted. Here the target's hidden states of
each request wait in memory instead, and are read in one pass when the drafter is chosen for that
request: a drafter that is not chosen costs next to nothing, and one that is chosen drafts from a
complete KV cache whatever was used before. Together with `hook.py` this is the only file that
touches vLLM internals (0.32, V1 model runner).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from ..step import ModelState


@dataclass
class _Backlog:
    """Positions `[start, end)` of a request that the drafter has not read.

    Attributes:
        start: First position the drafter's KV cache lacks.
        end: One past the last position whose hidden states are known.
        cached_end: End of what came from the prefix cache, until the drafter is known to have
            read that too; then 0.
        hidden_states: Chunks `[positions, hidden]` that cover the positions in order.
        lost: Whether a position was lost: the drafter is then of no use to the request.
    """

    start: int
    end: int
    cached_end: int
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    lost: bool = False

    @property
    def fresh(self) -> bool:
        """Whether all that precedes `start` lies in the drafter's KV cache."""
        return not self.lost and not self.cached_end

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def lose(self) -> None:
        """Drop the hidden states; the request cannot use the drafter until its next prefill."""
        self.lost = True
        self.hidden_states.clear()
        self.start = self.end


class ModelDraft(NamedTuple):
    """Drafts for some requests; a row of NaN survival has none.

    Attributes:
        token_ids: int64 `[rows, length]`.
        survival: Probability that each token survives verification, float32 `[rows, length]`.
        margin: Gap between the two largest logits of each token, float32 `[rows, length]`; NaN
            unless margins are kept.
    """

    token_ids: np.ndarray
    survival: np.ndarray
    margin: np.ndarray

    @classmethod
    def empty(cls, num_rows: int, length: int) -> ModelDraft:
        """No draft for any row."""
        unknown = np.full((2, num_rows, length), np.nan, np.float32)
        return cls(np.zeros((num_rows, length), np.int64), *unknown)


@dataclass(frozen=True)
class TargetStep:
    """What the target model left behind in one step, as vLLM hands it to a proposer.

    Attributes:
        req_ids: Requests in batch order.
        starts: First position computed in the step, int `[reqs]`.
        ends: One past the last position that is final, int `[reqs]`; rejected drafts are beyond.
        offsets: First flat token index of each request, int `[reqs]`.
        hidden_states: What the proposer reads per computed token, one tensor per layer used.
        attn_metadata: The drafter's attention metadata of the step, for its block table.
        sampling_metadata: The batch's sampling parameters.
    """

    req_ids: list[str]
    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    hidden_states: list[torch.Tensor]
    attn_metadata: CommonAttentionMetadata
    sampling_metadata: Any


class ModelDrafter:
    """Drafts with the proposer that vLLM loaded, for any subset of the requests.

    Args:
        runner: vLLM's `GPUModelRunner` (or the CPU's), with its `drafter` constructed.
        dormant_after: Steps without a draft after which prompts are no longer read at once.
        max_pending_tokens: Unread tokens a request may gather before the drafter reads them
            (awake) or gives the request up (dormant).

    Attributes:
        keeps_margins: Whether drafts tell their margins, which costs a second look at the logits.
    """

    def __init__(self, runner: Any, *, dormant_after: int, max_pending_tokens: int) -> None:
        self.keeps_margins = False
        self._runner = runner
        self._proposer = runner.drafter
        self._max_num_speculative_tokens = runner.num_spec_tokens
        self._dormant_after = dormant_after
        self._max_pending_tokens = max_pending_tokens
        self._backlogs: dict[str, _Backlog] = {}
        self._holes: set[int] = set()
        self._steps_since_draft = 0
        self._top1: list[torch.Tensor] = []
        self._margins: list[torch.Tensor] = []
        self._num_passes = 0
        self._num_pass_tokens = 0
        self._step: TargetStep | None = None
        self._proposer._greedy_sample = self._greedy_sample

    @property
    def dormant(self) -> bool:
        """Whether the drafter has not drafted for so long that it stopped reading prompts."""
        return self._steps_since_draft > self._dormant_after

    def observe(self, step: TargetStep) -> None:
        """Take in what the target computed; nothing is run."""
        self._step = step
        self._steps_since_draft += 1
        blocks = self._block_table()
        chunks = self._final_hidden_states(step)
        for row, req_id in enumerate(step.req_ids):
            start, end = int(step.starts[row]), int(step.ends[row])
            self._holes.update(blocks.blocks(row, start, end))
            backlog = self._backlogs.get(req_id)
            if backlog is None or start != backlog.end:
                # A new request, or one whose KV cache was dropped (preemption) and is recomputed:
                # what precedes `start` came from the prefix cache.
                backlog = self._backlogs[req_id] = _Backlog(start, start, cached_end=start)
            backlog.end = end
            backlog.hidden_states.append(chunks[row])
            if backlog.lost or backlog.num_tokens > self._proposer.max_num_tokens:
                backlog.lose()  # more than one pass of the proposer could read
        self._check_cached(blocks)

    def _check_cached(self, blocks: _BlockTable) -> None:
        """Note whose cached positions the drafter has read by now.

        Requests of one step may share a prefix that the first of them computes: it lies in the
        prefix cache at once, but the drafter has yet to read it.
        """
        assert self._step is not None
        for row, req_id in enumerate(self._step.req_ids):
            backlog = self._backlogs[req_id]
            if backlog.cached_end:
                cached = blocks.blocks(row, 0, backlog.cached_end)
                backlog.cached_end *= not self._holes.isdisjoint(cached)

    def _final_hidden_states(self, step: TargetStep) -> tuple[torch.Tensor, ...]:
        """Hidden states of the positions that stay, copied out of vLLM's buffers, per request."""
        counts = step.ends - step.starts
        index = np.arange(counts.sum()) + np.repeat(
            step.offsets - np.cumsum(counts) + counts, counts
        )
        device_index = _to(self._proposer.device, index)
        states = torch.cat([states[device_index] for states in step.hidden_states], dim=-1)
        return states.split(counts.tolist())

    def state(self, req_ids: Iterable[str], survival: np.ndarray) -> ModelState:
        """What is known of each request, with the survival of the drafts just verified."""
        backlogs = [self._backlogs[req_id] for req_id in req_ids]
        return ModelState(
            np.array([backlog.fresh for backlog in backlogs], bool),
            np.array([backlog.num_tokens for backlog in backlogs], np.int32),
            survival,
        )

    def draft(self, rows: np.ndarray, length: int) -> ModelDraft:
        """Catch up on the given requests and draft for them.

        Args:
            rows: Batch rows of the requests; stale ones get no draft.
            length: Draft length in tokens.
        """
        assert self._step is not None
        draft = ModelDraft.empty(len(rows), length)
        backlogs = [self._backlogs[self._step.req_ids[row]] for row in rows]
        usable = np.flatnonzero([backlog.fresh and backlog.num_tokens > 0 for backlog in backlogs])
        for group in self._groups(rows[usable]):
            drafted = usable[group]
            for whole, part in zip(draft, self._propose(rows[drafted], length), strict=True):
                whole[drafted] = part
        if len(usable):
            self._steps_since_draft = 0
        return draft

    def read_overdue(self) -> None:
        """Bound what waits: while awake read prompts and long backlogs, while dormant give up.

        Prompts are read at once so that prefix-cache blocks are complete for the drafter too.
        """
        step = self._step
        assert step is not None
        backlogs = [self._backlogs[req_id] for req_id in step.req_ids]
        is_overdue = np.array([b.num_tokens > self._max_pending_tokens for b in backlogs])
        if not self.dormant:
            is_prompt = step.ends - step.starts > 1 + self._max_num_speculative_tokens
            is_due = is_overdue | is_prompt
            while len(
                rows := np.flatnonzero(is_due & [b.fresh and b.num_tokens > 0 for b in backlogs])
            ):
                for group in self._groups(rows):
                    self._propose(rows[group], 0)
                self._check_cached(self._block_table())
        for row in np.flatnonzero(is_overdue):
            if backlogs[row].num_tokens > self._max_pending_tokens:
                backlogs[row].lose()

    def take_cost(self) -> tuple[int, int]:
        """Forward passes run since the last call, and the tokens that went through them."""
        cost = self._num_passes, self._num_pass_tokens
        self._num_passes = self._num_pass_tokens = 0
        return cost

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is kept of ended requests."""
        for req_id in req_ids:
            self._backlogs.pop(req_id, None)

    def _groups(self, rows: np.ndarray) -> list[np.ndarray]:
        """Split rows so that each group's unread tokens fit the proposer's buffers."""
        assert self._step is not None
        groups: list[list[int]] = []
        room = 0
        for index, row in enumerate(rows):
            num_tokens = self._backlogs[self._step.req_ids[row]].num_tokens
            if num_tokens > room:
                groups.append([])
                room = self._proposer.max_num_tokens
            groups[-1].append(index)
            room -= num_tokens
        return [np.array(group) for group in groups]

    def _propose(self, rows: np.ndarray, length: int) -> ModelDraft:
        """Run vLLM's proposer over the unread tokens of `rows`; length 0 only reads them."""
        step = self._step
        assert step is not None
        backlogs = [self._backlogs[step.req_ids[row]] for row in rows]
        starts = np.array([backlog.start for backlog in backlogs])
        ends = np.array([backlog.end for backlog in backlogs])
        counts = ends - starts
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
        owners = np.repeat(rows, counts)
        token_ids = self._runner.input_batch.token_ids_cpu
        blocks = self._block_table()

        device = self._proposer.device
        seq_lens = torch.from_numpy(ends.astype(np.int32))
        self._top1.clear()
        self._margins.clear()
        draft = self._proposer.propose(
            num_speculative_tokens=length,
            target_token_ids=_to(device, token_ids[owners, positions]),
            target_positions=_to(device, positions),
            target_hidden_states=torch.cat(
                [chunk for backlog in backlogs for chunk in backlog.hidden_states]
            ),
            next_token_ids=_to(device, token_ids[rows, ends].astype(np.int32)),
            token_indices_to_sample=None,
            sampling_metadata=step.sampling_metadata,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=_to(device, query_start),
                query_start_loc_cpu=torch.from_numpy(query_start),
                seq_lens=seq_lens.to(device, copy=True),
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=len(rows),
                num_actual_tokens=int(query_start[-1]),
                max_query_len=int(counts.max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=step.attn_metadata.block_table_tensor[_to(device, rows)],
                slot_mapping=_to(device, blocks.slots(owners, positions)),
                causal=True,
            ),
        )
        for row, backlog in zip(rows, backlogs, strict=True):
            self._holes.difference_update(blocks.blocks(int(row), backlog.start, backlog.end))
            backlog.start = backlog.end
            backlog.hidden_states.clear()
        self._num_passes += max(1, length)
        self._num_pass_tokens += int(query_start[-1]) + max(0, length - 1) * len(rows)
        if not length:
            return ModelDraft.empty(len(rows), 0)
        survival = torch.stack(self._top1, dim=1).cumprod(dim=1)
        margin = torch.stack(self._margins, dim=1) if self.keeps_margins else survival * np.nan
        return ModelDraft(draft.cpu().numpy(), survival.cpu().numpy(), margin.cpu().numpy())

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sample greedily, keep the top-1 probability, and stay in the drafter's vocabulary.

        Replaces `SpecDecodeBaseProposer._greedy_sample`, whose `compute_logits` scatters an
        EAGLE-3 head's logits to the target's full vocabulary before the argmax.
        """
        model = self._proposer.model
        offsets = getattr(model, "draft_id_to_target_id", None)
        if offsets is None:
            logits = model.compute_logits(hidden_states)
        else:
            logits = model.logits_processor(model.lm_head, hidden_states)
        top_logit, token_ids = logits.float().max(dim=-1)
        if self.keeps_margins:
            top_two = logits.float().topk(2, dim=-1).values
            self._margins.append(top_two[:, 0] - top_two[:, 1])
        self._top1.append(torch.exp(top_logit - logits.float().logsumexp(dim=-1)))
        return token_ids if offsets is None else token_ids + offsets[token_ids]

    def _block_table(self) -> _BlockTable:
        table = self._runner.input_batch.block_table[max(self._proposer.kv_cache_gid, 0)]
        return _BlockTable(table.get_numpy_array(), self._proposer.block_size)


@dataclass(frozen=True)
class _BlockTable:
    """Which KV-cache block holds which position of a batch row."""

    table: np.ndarray
    block_size: int

    def blocks(self, row: int, start: int, end: int) -> list[int]:
        """Blocks that hold positions `[start, end)`."""
        if end <= start:
            return []
        last = (end - 1) // self.block_size
        blocks: list[int] = self.table[row, start // self.block_size : last + 1].tolist()
        return blocks

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV-cache slots of the positions, int64."""
        block, offset = np.divmod(positions, self.block_size)
        slots: np.ndarray = self.table[rows, block].astype(np.int64) * self.block_size + offset
        return slots


def _to(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
