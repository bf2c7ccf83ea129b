"""What a drafter takes of a live engine's memory: weights, and KV cache for each token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineMemory:
    """Memory of the target and of the loaded model drafter; token drafters load nothing.

    Attributes:
        target_weight_bytes: Weights of the target.
        drafter_weight_bytes: Weights of the drafter that the target does not have too.
        target_kv_bytes_per_token: KV cache of the target for a token of context.
        drafter_kv_bytes_per_token: The same of the drafter.
    """

    target_weight_bytes: int
    drafter_weight_bytes: int
    target_kv_bytes_per_token: int
    drafter_kv_bytes_per_token: int


def engine_memory(runner: Any) -> EngineMemory:
    """Measure a model runner of vLLM 0.32.

    Args:
        runner: With its KV cache laid out.
    """
    drafter = getattr(getattr(runner, "drafter", None), "model", None)
    target_weights = _weights([runner.model])
    all_weights = _weights([runner.model, drafter] if drafter is not None else [runner.model])
    kv_bytes = {
        name: bytes_per_token
        for group in runner.kv_cache_config.kv_cache_groups
        for name, bytes_per_token in _kv_bytes(group)
    }
    of_drafter = set(getattr(runner.drafter, "_draft_attn_layer_names", ())) if drafter else set()
    return EngineMemory(
        sum(target_weights.values()),
        sum(all_weights.values()) - sum(target_weights.values()),
        sum(size for name, size in kv_bytes.items() if name not in of_drafter),
        sum(size for name, size in kv_bytes.items() if name in of_drafter),
    )


def _weights(models: Iterable[Any]) -> dict[int, int]:
    """Bytes of each weight by its place in memory, so that shared ones count once."""
    weights = {}
    for model in models:
        for layer in model.modules():
            for weight in layer.parameters(recurse=False):
                if weight.numel():
                    storage = weight.untyped_storage()
                    weights[storage.data_ptr()] = storage.nbytes()
                else:
                    weights[id(layer)] = _packed_bytes(layer, weight)
    return weights


def _packed_bytes(layer: Any, weight: Any) -> int:
    """Bytes of a linear layer's weight that vLLM keeps packed for a CPU, out of torch's sight.

    `dispatch_cpu_unquantized_gemm` leaves an empty parameter behind.
    """
    inputs = getattr(layer, "input_size_per_partition", getattr(layer, "input_size", 0))
    outputs = getattr(layer, "output_size_per_partition", getattr(layer, "output_size", 0))
    return int(inputs * outputs * weight.element_size())


def _kv_bytes(group: Any) -> Iterable[tuple[str, int]]:
    """Bytes that a token takes in each layer of a KV-cache group."""
    for name in group.layer_names:
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        yield name, spec.page_size_bytes // spec.block_size
