"""Training-time test: the head drafts several tokens in a row, on its own outputs.

At draft position 1 the head reads the target's hidden states, at position `j` its own output of
position `j - 1` (EAGLE-3, section 3). Row `i` of a sample starts a draft after token `i + 1`; at
position `j` it sees the target's rows `0..i` and its own rows of positions `2..j`, as the head
in vLLM does when all earlier draft tokens were right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .head import DraftHead


@dataclass(frozen=True)
class TargetStates:
    """One sample with what the target computed on it.

    Attributes:
        token_ids: int64 `[tokens]`.
        num_prompt_tokens: Tokens of the prompt.
        aux: `[tokens, num_aux * hidden]`, the outputs of the layers that the head reads.
        final: `[starts, hidden]`, the normed last output at tokens `num_prompt_tokens` to the
            last but one: what the target predicts the drafted tokens from.
        greedy: int64 `[starts]`, the token that the target finds likeliest there.
    """

    token_ids: Tensor
    num_prompt_tokens: int
    aux: Tensor
    final: Tensor
    greedy: Tensor

    @property
    def first_start(self) -> int:
        """Row of the first draft: the last token of the prompt."""
        return self.num_prompt_tokens - 1

    @property
    def num_starts(self) -> int:
        """Rows that start a draft whose first token the sample contains."""
        return len(self.token_ids) - 2 - self.first_start


@dataclass(frozen=True)
class DraftPosition:
    """The head's predictions at one draft position.

    Attributes:
        hidden: `[starts, hidden]`, the layer's outputs of all samples.
        rows: int64 `[valid]`, the starts whose token at this position the samples contain.
        targets: int64 `[valid]`, the row of the samples' `final` that predicts the same token.
    """

    hidden: Tensor
    rows: Tensor
    targets: Tensor


def unroll(
    head: DraftHead, embedding: Tensor, samples: Sequence[TargetStates], num_positions: int
) -> Iterator[DraftPosition]:
    """Let the head draft from every row of an answer.

    Args:
        head: The head.
        embedding: The target's, `[vocabulary, hidden]`.
        samples: At least one start each.
        num_positions: Draft tokens in a row.
    """
    batch = _Batch(samples)
    layer = head.midlayer
    combined = head.combine(torch.cat([sample.aux[:-1] for sample in samples]).float()).float()
    embeds = embedding[torch.cat([sample.token_ids[1:] for sample in samples])]
    inputs, residual = layer.inputs(embeds, combined)
    base = layer.self_attn.keys_and_values(inputs, batch.base_positions)
    inputs, residual = inputs[batch.starts], residual[batch.starts]
    own: list[tuple[Tensor, Tensor]] = []
    hidden = combined
    for position in range(1, num_positions + 1):
        places = batch.start_positions + position - 1
        if position > 1:
            inputs, residual = layer.inputs(embedding[batch.next_tokens(position)], hidden)
            own.append(layer.self_attn.keys_and_values(inputs, places))
        queries = layer.self_attn.queries(inputs, places)
        hidden = layer.outputs(batch.attend(queries, base, own), residual)
        rows = batch.valid_rows(position)
        yield DraftPosition(hidden, rows, rows + position - 1)


class _Batch:
    """Samples packed into rows without padding, all but the attention being one product each."""

    def __init__(self, samples: Sequence[TargetStates]) -> None:
        self._samples = samples
        self._num_starts = [sample.num_starts for sample in samples]
        self._num_base = [len(sample.token_ids) - 1 for sample in samples]

    @cached_property
    def base_positions(self) -> Tensor:
        """Positions of all rows with the target's states, int64 `[base rows]`."""
        return torch.cat([torch.arange(count) for count in self._num_base])

    @cached_property
    def start_positions(self) -> Tensor:
        """Positions of the rows that start a draft, int64 `[starts]`."""
        return torch.cat([s.first_start + torch.arange(n) for s, n in self._with(self._num_starts)])

    @cached_property
    def starts(self) -> Tensor:
        """The same rows among all with the target's states, int64 `[starts]`."""
        offsets = torch.tensor([0, *self._num_base]).cumsum(0)[:-1]
        return self.start_positions + offsets.repeat_interleave(torch.tensor(self._num_starts))

    def next_tokens(self, position: int) -> Tensor:
        """The token read at a draft position; a start without one repeats its sample's last."""
        return torch.cat(
            [
                s.token_ids[(s.first_start + position + torch.arange(n)).clamp(max=n_base)]
                for (s, n), n_base in zip(self._with(self._num_starts), self._num_base, strict=True)
            ]
        )

    def valid_rows(self, position: int) -> Tensor:
        """Starts whose token at this draft position exists, int64."""
        left = torch.cat([torch.arange(n, 0, -1) for n in self._num_starts])
        return (left >= position).nonzero().squeeze(1)

    def attend(
        self, queries: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention of every start to the rows before it and to its own earlier positions.

        Args:
            queries: `[starts, heads, head_dim]`.
            base: Keys and values of the target's rows, `[base rows, kv_heads, head_dim]`.
            own: The same of the starts' own rows, `[starts, kv_heads, head_dim]` a position.

        Returns:
            `[starts, heads * head_dim]`.
        """
        keys, values = (part.split(self._num_base) for part in base)
        own_parts = [[part.split(self._num_starts) for part in pair] for pair in own]
        attended = [
            _attend_one(
                rows,
                keys[index],
                values[index],
                [(pair[0][index], pair[1][index]) for pair in own_parts],
                self._samples[index].first_start,
            )
            for index, rows in enumerate(queries.split(self._num_starts))
        ]
        return torch.cat(attended)

    def _with(self, counts: Sequence[int]) -> Iterator[tuple[TargetStates, int]]:
        return zip(self._samples, counts, strict=True)


def _attend_one(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    first_start: int,
) -> Tensor:
    """`_Batch.attend` for one sample."""
    num_starts, _, head_dim = queries.shape
    num_base, num_kv_heads, _ = keys.shape
    # [kv_heads, queries per kv head, starts, head_dim]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3) * head_dim**-0.5
    scores = grouped @ keys.permute(1, 2, 0)[:, None]
    unseen = torch.ones(num_starts, num_base, dtype=torch.bool).triu(first_start + 1)
    parts = [scores.masked_fill(unseen, -torch.inf)]
    for own_keys, _ in own:
        parts.append((grouped * own_keys.transpose(0, 1)[:, None]).sum(-1, keepdim=True))
    shares = torch.cat(parts, dim=-1).float().softmax(dim=-1).to(values.dtype)
    attended = shares[..., :num_base] @ values.transpose(0, 1)[:, None]
    for number, (_, own_values) in enumerate(own):
        attended = (
            attended + shares[..., num_base + number, None] * own_values.transpose(0, 1)[:, None]
        )
    return attended.permute(2, 0, 1, 3).flatten(1)
