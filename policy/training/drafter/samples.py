"""Samples of training text: a prompt and the answer that the target wrote, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..atomic import replace_atomically


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    Attributes:
        token_ids: int32 `[tokens]`, the prompt in its chat template first.
        num_prompt_tokens: Tokens of the prompt; what follows was written by the target.
        kind: The prompt's kind, such as `code`; `asked` where the target wrote the prompt too.
    """

    token_ids: np.ndarray
    num_prompt_tokens: int
    kind: str

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote."""
        return len(self.token_ids) - self.num_prompt_tokens


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write samples as one `.npz` file, whole or not at all."""
    with replace_atomically(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            token_ids=np.concatenate([sample.token_ids for sample in samples]),
            lengths=np.array([len(sample.token_ids) for sample in samples]),
            prompt_lengths=np.array([sample.num_prompt_tokens for sample in samples]),
            kinds=np.array([sample.kind for sample in samples]),
        )


def read_samples(path: Path) -> list[Sample]:
    """Read what `write_samples` wrote."""
    with np.load(path) as arrays:
        ends = np.cumsum(arrays["lengths"])
        return [
            Sample(token_ids, int(num_prompt_tokens), str(kind))
            for token_ids, num_prompt_tokens, kind in zip(
                np.split(arrays["token_ids"], ends[:-1]),
                arrays["prompt_lengths"],
                arrays["kinds"],
                strict=True,
            )
        ]
