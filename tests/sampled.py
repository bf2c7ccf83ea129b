"""Whether sampled output is distributed as the target model says, exactly.

A tree of the likely continuations of one prompt, with the probability of every branch as an engine
without speculation reports it, is held against how often a drafting engine samples each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from envs.live import load_tokenizer
from envs.next_tokens import next_logprobs
from envs.vllm_engine import VllmEngine

from . import live

NUM_BRANCHES = 3
NUM_TOKENS = 4
LEAST_EXPECTED = 5.0
"""Expected count below which cells are put together, as chi-square needs."""
ANSWERS = "yes no no yes no yes yes no yes no no no yes yes"

Path = tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; without a top-k only at temperature 1, where log-probabilities tell."""

    temperature: float = 1.0
    top_k: int = 0

    def probabilities(self, logprobs: dict[int, float]) -> dict[int, float]:
        """Of the likeliest tokens, from their log-probabilities at temperature 1."""
        assert self.top_k == NUM_BRANCHES or self == Sampling()
        weights = {token: math.exp(value / self.temperature) for token, value in logprobs.items()}
        total = sum(weights.values()) if self.top_k else 1.0
        return {token: weight / total for token, weight in weights.items()}


@dataclass(frozen=True)
class Continuations:
    """The likeliest tokens after the prompt and after each of their paths, as log-probabilities."""

    prompt: Path
    logprobs: dict[Path, dict[int, float]]

    @classmethod
    def of(cls, engine: VllmEngine) -> Continuations:
        """As this engine, which does not speculate, reports them."""
        # Two answers share nearly all the probability, and what follows either is in the prompt.
        answers = ", ".join(2 * ANSWERS.split())
        prompt = tuple(load_tokenizer(live.MODEL).encode(f"{answers},"))
        logprobs: dict[Path, dict[int, float]] = {}
        paths: list[Path] = [()]
        for _ in range(NUM_TOKENS):
            found = next_logprobs(engine, [prompt + path for path in paths], NUM_BRANCHES)
            logprobs |= dict(zip(paths, found, strict=True))
            paths = [(*path, token) for path in paths for token in logprobs[path]]
        return cls(prompt, logprobs)

    def cell(self, tokens: list[int]) -> Path:
        """The path of an output, which ends with -1 where it leaves the tree."""
        path: Path = ()
        for token in tokens:
            if token not in self.logprobs[path]:
                return (*path, -1)
            path += (token,)
        return path

    def expected(self, sampling: Sampling) -> dict[Path, float]:
        """Probability of every cell."""
        cells: dict[Path, float] = {}
        reached = {(): 1.0}
        for _ in range(NUM_TOKENS):
            further: dict[Path, float] = {}
            for path, probability in reached.items():
                branches = sampling.probabilities(self.logprobs[path])
                further |= {(*path, token): probability * p for token, p in branches.items()}
                cells[*path, -1] = probability * (1 - sum(branches.values()))
            reached = further
        return cells | reached

    def p_value(self, outputs: list[list[int]], sampling: Sampling) -> float:
        """Of the chi-square test: how often a faithful sampler looks as wrong as these outputs."""
        counts = Counter(self.cell(tokens) for tokens in outputs)
        seen, wanted, few = [], [], [0.0, 0.0]
        for cell, probability in self.expected(sampling).items():
            expected = probability * len(outputs)
            if expected < 1e-6:  # beyond a top-k
                assert not counts[cell]
            elif expected < LEAST_EXPECTED:
                few = [few[0] + counts[cell], few[1] + expected]
            else:
                seen.append(counts[cell])
                wanted.append(expected)
        if few[1] < LEAST_EXPECTED:  # too little to stand alone
            rarest = min(range(len(wanted)), key=wanted.__getitem__)
            few = [few[0] + seen.pop(rarest), few[1] + wanted.pop(rarest)]
        return float(stats.chisquare([*seen, few[0]], [*wanted, few[1]]).pvalue)


def sample(
    engine: VllmEngine, prompt: Path, samplings: Sequence[Sampling], num_samples: int
) -> list[list[list[int]]]:
    """So many outputs by each way of sampling, which take turns in the same batches."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    for index in range(num_samples * len(samplings)):
        parameters = SamplingParams(
            **vars(samplings[index % len(samplings)]),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.llm_engine.add_request(str(index), tokens_input(list(prompt)), parameters)
    outputs: list[list[list[int]]] = [[] for _ in samplings]
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            outputs[int(output.request_id) % len(samplings)].append(tokens)
    return outputs
