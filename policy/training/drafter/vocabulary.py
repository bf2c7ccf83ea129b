"""The draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .samples import Sample


@dataclass(frozen=True)
class DraftVocabulary:
    """Which tokens a head can draft.

    Attributes:
        token_ids: int64 `[draft vocabulary]`, ascending ids of the target's vocabulary.
        target_vocab_size: Size of that.
    """

    token_ids: Tensor
    target_vocab_size: int

    @property
    def offsets(self) -> Tensor:
        """What is added to a draft id to get the target's, int64; vLLM's `d2t`."""
        return self.token_ids - torch.arange(len(self.token_ids))

    @property
    def is_drafted(self) -> Tensor:
        """Whether the head can draft a token of the target, bool; vLLM's `t2d`."""
        mask = torch.zeros(self.target_vocab_size, dtype=torch.bool)
        mask[self.token_ids] = True
        return mask

    @property
    def draft_ids(self) -> Tensor:
        """Draft id of each of the target's tokens, int64; -1 where there is none."""
        ids = torch.full((self.target_vocab_size,), -1)
        ids[self.token_ids] = torch.arange(len(self.token_ids))
        return ids


def most_frequent(samples: Iterable[Sample], size: int, target_vocab_size: int) -> DraftVocabulary:
    """Choose the tokens that come most often in answers, then those in prompts, then low ids.

    A byte-pair vocabulary has its most frequent merges first, so low ids are a fair guess for
    what a small text lacks.

    Args:
        samples: The text.
        size: Tokens to choose.
        target_vocab_size: Tokens to choose from.
    """
    in_answers = np.zeros(target_vocab_size, np.int64)
    in_prompts = np.zeros(target_vocab_size, np.int64)
    for sample in samples:
        prompt, answer = np.split(sample.token_ids, [sample.num_prompt_tokens])
        in_prompts += np.bincount(prompt, minlength=target_vocab_size)
        in_answers += np.bincount(answer, minlength=target_vocab_size)
    order = np.lexsort((np.arange(target_vocab_size), -in_prompts, -in_answers))
    return DraftVocabulary(torch.from_numpy(np.sort(order[:size])), target_vocab_size)
