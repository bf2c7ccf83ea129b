"""Stage 4: the head as a folder that vLLM 0.32 takes for `speculative_config["model"]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..atomic import replace_atomically
from .head import DraftHead
from .initial import shape_for
from .vocabulary import DraftVocabulary

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def export_head(
    head: DraftHead,
    vocabulary: DraftVocabulary,
    target_config: Any,
    aux_layers: Sequence[int],
    folder: Path,
) -> None:
    """Write `model.safetensors` (bfloat16) and `config.json`.

    The embedding is left out: vLLM then shares the target's.

    Args:
        head: What was trained.
        vocabulary: What it drafts.
        target_config: The target's transformers configuration.
        aux_layers: Number of layers after which the head reads.
        folder: Where the files go.
    """
    tensors = {name: p.detach().bfloat16() for name, p in head.state_dict().items()}
    tensors |= {"d2t": vocabulary.offsets, "t2d": vocabulary.is_drafted}
    with replace_atomically(folder / WEIGHTS_FILE) as unfinished:
        save_file(tensors, unfinished, {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.shape.hidden_size,
        "intermediate_size": head.shape.intermediate_size,
        "num_attention_heads": head.shape.num_heads,
        "num_key_value_heads": head.shape.num_kv_heads,
        "head_dim": head.shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary.target_vocab_size,
        "draft_vocab_size": head.shape.draft_vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": head.shape.norm_eps,
        "max_position_embeddings": target_config.max_position_embeddings,
        "rope_parameters": {"rope_theta": head.shape.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target_config.bos_token_id,
        "eos_token_id": target_config.eos_token_id,
        "pad_token_id": target_config.pad_token_id,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "norm_before_residual": True,
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
    }
    with replace_atomically(folder / CONFIG_FILE) as unfinished:
        unfinished.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def read_head(folder: Path, target_config: Any) -> tuple[DraftHead, DraftVocabulary]:
    """Read what `export_head` wrote, in float32.

    Args:
        folder: An exported head.
        target_config: The target's transformers configuration.
    """
    tensors = load_file(folder / WEIGHTS_FILE)
    offsets, is_drafted = tensors.pop("d2t"), tensors.pop("t2d")
    vocabulary = DraftVocabulary(offsets + torch.arange(len(offsets)), len(is_drafted))
    num_aux = sum(name.startswith("fc_norm.") for name in tensors)
    head = DraftHead(shape_for(target_config, num_aux, len(offsets)))
    head.load_state_dict(tensors)
    return head, vocabulary
