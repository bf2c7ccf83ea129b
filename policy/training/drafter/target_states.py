"""Stage 2: what the target computed on its own text, one forward pass per sample.

vLLM computes the same numbers while it writes, but has no public way to read them on a CPU; the
pass here costs about as much as a third of the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from ..atomic import replace_atomically
from .cores import one_thread_a_core
from .samples import Sample
from .unroll import TargetStates

_SAMPLES_PER_PART = 64


def load_target(folder: str, dtype: torch.dtype) -> Any:
    """The target as transformers' model.

    Args:
        folder: Where its weights lie.
        dtype: Data type of the weights.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def write_states(
    target: Any, samples: Sequence[Sample], aux_layers: Sequence[int], folder: Path
) -> None:
    """Write the states of every sample that has none yet, some samples a file.

    Samples are shared out to one thread a core: a forward pass over one of them that is split
    between cores waits for the busiest of them.

    Args:
        target: The target model.
        samples: Answers of two tokens or more.
        aux_layers: Number of layers after which the head reads, in vLLM's count: layer `n` is
            the output after `n` layers.
        folder: Where the files go.
    """
    with (
        one_thread_a_core() as threads,
        tqdm(total=len(samples), unit="sample", desc="states of the target") as bar,
    ):
        for first in range(0, len(samples), _SAMPLES_PER_PART):
            part = samples[first : first + _SAMPLES_PER_PART]
            path = folder / f"{first:06}.safetensors"
            if not path.exists():
                computed = threads.map(
                    compute_states, repeat(target), part, repeat(tuple(aux_layers))
                )
                tensors = {
                    f"{index}.{name}": tensor
                    for index, states in enumerate(computed)
                    for name, tensor in vars(states).items()
                    if isinstance(tensor, Tensor)
                }
                prompts = {str(i): str(s.num_prompt_tokens) for i, s in enumerate(part)}
                with replace_atomically(path) as unfinished:
                    save_file(tensors, unfinished, prompts)
            bar.update(len(part))


def compute_states(target: Any, sample: Sample, aux_layers: Sequence[int]) -> TargetStates:
    """Run the target over one sample.

    Args:
        target: The target model.
        sample: An answer of two tokens or more.
        aux_layers: As for `write_states`.
    """
    token_ids = torch.from_numpy(sample.token_ids).long()
    with torch.no_grad():
        outputs = target.model(token_ids[None], output_hidden_states=True, use_cache=False)
        final = outputs.last_hidden_state[0, sample.num_prompt_tokens : -1]
        aux = torch.cat([outputs.hidden_states[layer][0] for layer in aux_layers], dim=-1)
        greedy = target.lm_head(final).argmax(-1)
    return TargetStates(token_ids, sample.num_prompt_tokens, aux, final.contiguous(), greedy)


class StatesFolder:
    """Reads samples with their states in any order, without holding them in memory.

    Args:
        folder: What `write_states` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self._places = [
            (file, index, int(num_prompt_tokens))
            for file in self._files
            for index, num_prompt_tokens in sorted(
                ((int(key), value) for key, value in file.metadata().items())
            )
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> TargetStates:
        file, index, num_prompt_tokens = self._places[number]
        names = ("token_ids", "aux", "final", "greedy")
        tensors = {name: file.get_tensor(f"{index}.{name}") for name in names}
        return TargetStates(num_prompt_tokens=num_prompt_tokens, **tensors)

    def num_starts(self) -> list[int]:
        """Rows of each sample that start a draft."""
        return [file.get_slice(f"{index}.greedy").get_shape()[0] for file, index, _ in self._places]
