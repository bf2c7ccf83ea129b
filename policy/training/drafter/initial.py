"""Where training starts: the target's own last layer, so that little is left to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policy.errors import ConfigError

from .head import DraftHead, HeadShape
from .vocabulary import DraftVocabulary


def shape_for(target_config: Any, num_aux: int, draft_vocab_size: int) -> HeadShape:
    """The sizes of a head for a target.

    Args:
        target_config: The target's transformers configuration.
        num_aux: Target layers whose outputs the head reads.
        draft_vocab_size: Tokens that the head can draft.
    """
    return HeadShape(
        hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_heads=target_config.num_attention_heads,
        num_kv_heads=target_config.num_key_value_heads,
        head_dim=target_config.head_dim,
        norm_eps=target_config.rms_norm_eps,
        rope_theta=target_config.rope_parameters["rope_theta"],
        num_aux=num_aux,
        draft_vocab_size=draft_vocab_size,
    )


def check_target(target_config: Any, aux_layers: Sequence[int], draft_vocab_size: int) -> None:
    """Refuse a target that a head can't be made for, before anything is written.

    Args:
        target_config: The target's transformers configuration.
        aux_layers: Number of layers after which the head is to read.
        draft_vocab_size: Tokens that the head is to draft.

    Raises:
        ConfigError: If it isn't a Llama, or has too few layers or tokens.
    """
    if target_config.model_type != "llama":
        raise ConfigError(
            f"The head starts from a layer of Llama and the target is of type "
            f"'{target_config.model_type}'; choose a Llama as model.target."
        )
    if max(aux_layers) > target_config.num_hidden_layers:
        raise ConfigError(
            f"aux_layers is {list(aux_layers)} and the target has "
            f"{target_config.num_hidden_layers} layers; lower them."
        )
    if draft_vocab_size > target_config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {draft_vocab_size} and the target has "
            f"{target_config.vocab_size} tokens; lower it."
        )


@torch.no_grad()
def initial_head(target: Any, vocabulary: DraftVocabulary, aux: Tensor) -> DraftHead:
    """A head that passes the last state it reads through the target's last layer.

    The layer's residual is normed here and not in the target, so what the layer adds to it is
    divided by the target's residual scale; and the target's input norm is folded into the hidden
    half of the projections, whose embedding half starts at nothing.

    Args:
        target: The target model.
        vocabulary: What the head drafts.
        aux: Some of the states that it will read, `[rows, num_aux * hidden]`.
    """
    hidden_size = target.config.hidden_size
    head = DraftHead(
        shape_for(target.config, aux.shape[1] // hidden_size, len(vocabulary.token_ids))
    )
    last = target.model.layers[-1]
    scale = aux[:, -hidden_size:].float().pow(2).mean().sqrt()
    nn.init.zeros_(head.fc.weight)
    head.fc.weight[:, -hidden_size:] = torch.eye(hidden_size)
    layer = head.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight.zero_()
        copied = getattr(last.self_attn, name).weight.float()
        weight[:, hidden_size:] = copied * last.input_layernorm.weight.float()
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight.float() / scale)
    layer.mlp.gate_proj.weight.copy_(last.mlp.gate_proj.weight)
    layer.mlp.up_proj.weight.copy_(last.mlp.up_proj.weight)
    layer.mlp.down_proj.weight.copy_(last.mlp.down_proj.weight.float() / scale)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    head.lm_head.weight.copy_(target.lm_head.weight[vocabulary.token_ids])
    return head
