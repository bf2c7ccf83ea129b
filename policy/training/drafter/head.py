"""The EAGLE-3 head in plain torch, with the tensor names and the arithmetic of vLLM 0.32.

Source: `vllm/model_executor/models/llama_eagle3.py` with `norm_before_residual` and `fc_norm`
(Li et al. 2025, arXiv:2503.01840). One decoder layer whose attention reads the next token's
embedding beside what the target computed; its output predicts the token after that one, and is
the layer's own input at the next draft position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; all but the last two are the target's.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_heads: Attention heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of an attention head.
        norm_eps: Added to the mean square in every norm.
        rope_theta: Base of the rotary embedding.
        num_aux: Target layers whose outputs the head reads.
        draft_vocab_size: Tokens that the head can draft.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    num_aux: int
    draft_vocab_size: int


class Attention(nn.Module):
    """Projections of grouped-query attention; its input is an embedding beside a hidden state."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, kv_width = 2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self._shape = shape

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries, `[rows, heads, head_dim]`."""
        return self._rotated(self.q_proj(inputs), positions)

    def keys_and_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each `[rows, kv_heads, head_dim]`."""
        keys = self._rotated(self.k_proj(inputs), positions)
        return keys, self.v_proj(inputs).unflatten(-1, (-1, self._shape.head_dim))

    def _rotated(self, flat: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding, the two halves of a head's width being paired as in Llama."""
        half = self._shape.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32) / half
        angles = positions[:, None, None].float() * self._shape.rope_theta**-exponents
        cos, sin = angles.cos().to(flat.dtype), angles.sin().to(flat.dtype)
        first, second = flat.unflatten(-1, (-1, self._shape.head_dim)).split(half, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[rows, hidden]` to the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class MidLayer(nn.Module):
    """The decoder layer, split where the attention of training differs from that of serving."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = _norm(shape)
        self.input_layernorm = _norm(shape)
        self.post_attention_layernorm = _norm(shape)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, `[rows, 2 * hidden]`, and the residual, `[rows, hidden]`."""
        residual = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), residual], dim=-1), residual

    def outputs(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output before the last norm, from `[rows, heads * head_dim]`."""
        residual = residual + self.self_attn.o_proj(attended)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class DraftHead(nn.Module):
    """The trained weights; the embedding is the target's and no part of them.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(_norm(shape) for _ in range(shape.num_aux))
        self.fc = nn.Linear(shape.num_aux * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = _norm(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)

    def combine(self, aux: Tensor) -> Tensor:
        """Map the target's outputs `[rows, num_aux * hidden]` to `[rows, hidden]`."""
        parts = aux.split(self.shape.hidden_size, dim=-1)
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(normed, dim=-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary of layer outputs `[rows, hidden]`."""
        return self.lm_head(self.norm(hidden))


def _norm(shape: HeadShape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
