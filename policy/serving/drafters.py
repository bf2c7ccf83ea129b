"""The token drafters of a contract, made from settings."""

from __future__ import annotations

from ..contract import Contract
from .config import DrafterSettings
from .ngram import NgramDrafter
from .suffix import SuffixDrafter
from .token_drafter import TokenDrafter


def make_token_drafters(
    contract: Contract, settings: DrafterSettings, max_model_len: int
) -> dict[str, TokenDrafter]:
    """Every token drafter of the contract by name, warmed up.

    Args:
        contract: Drafters and longest drafts.
        settings: How they work.
        max_model_len: Longest context of the engine, in tokens.
    """
    lengths = dict(zip(contract.drafters, contract.max_lengths, strict=True))
    drafters: dict[str, TokenDrafter] = {}
    if "ngram" in lengths:
        drafters["ngram"] = NgramDrafter(
            max_length=lengths["ngram"],
            max_model_len=max_model_len,
            min_match=settings.ngram_min_match,
            max_match=settings.ngram_max_match,
        )
    if "suffix" in lengths:
        drafters["suffix"] = SuffixDrafter(
            max_length=lengths["suffix"],
            max_model_len=max_model_len,
            max_tree_depth=settings.suffix_max_tree_depth,
            max_cached_requests=settings.suffix_max_cached_requests,
            max_spec_factor=settings.suffix_max_spec_factor,
            min_token_prob=settings.suffix_min_token_prob,
        )
    for drafter in drafters.values():
        drafter.warm_up()
    return drafters
