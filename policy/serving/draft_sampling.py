"""Sampling parameters of draft tokens, on the CPU backend.

vLLM 0.32 gives every draft token its request's temperature, top-k and top-p by a kernel that, on a
CPU, fills a converted copy of the result wherever that is not int64: the result itself stays
uninitialised memory. Sampled requests with drafts then follow arbitrary parameters, and a
top-k takes the engine down. Here the same is computed by torch. A top-k also takes it down in a
step whose drafts are all empty; there is nothing to constrain then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def constrain_drafts_by_torch(runner: Any) -> None:
    """Let a CPU runner give draft tokens their requests' parameters; others are left alone."""
    from vllm.v1.sample import rejection_sampler

    if runner.device.type != "cpu":
        return
    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    constrain = rejection_sampler.apply_sampling_constraints

    @functools.wraps(constrain)
    def constrain_some(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return constrain(logits, *args, **kwargs) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrain_some
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Stands in for vLLM's function of this name.

    Args:
        x: A value of each request, `[requests]`.
        cu_num_tokens: Draft tokens up to and including each request, `[requests]`.
        num_tokens: All of them.
        replace_from: A value that is replaced ...
        replace_to: ... by this one.

    Returns:
        The value of each draft token's request, `[num_tokens]`, of the same type.

    Example:
        >>> ks, counts = torch.tensor([20, 0, 50], dtype=torch.int32), torch.tensor([2, 2, 3])
        >>> expand_batch_to_tokens(ks, counts, 3).tolist()
        [20, 20, 50]
        >>> expand_batch_to_tokens(torch.tensor([0.0, 0.5]), torch.tensor([1, 2]), 2, 0, 1).tolist()
        [1.0, 0.5]
    """
    replaced = x.masked_fill(x == replace_from, replace_to)
    num_each = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(replaced, num_each, output_size=num_tokens)
