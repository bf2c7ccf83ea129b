"""How much of the greedy output speculation leaves identical, by data type."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from envs.live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from envs.next_tokens import next_logprobs
from envs.registration import DEFAULT_KINDS
from envs.vllm_engine import VllmEngine
from envs.workload import Workload, WorkloadConfig, WorkloadRequest

from ..baselines.random import RandomController


@dataclass(frozen=True)
class Losslessness:
    """Outputs with random speculation against outputs without.

    Attributes:
        num_requests: Requests served.
        num_identical: Those with the same output, token for token.
        num_tokens: Tokens without speculation.
        num_agreeing_tokens: Tokens before the first difference of each request.
        gaps: Between the logits of the two likeliest tokens at each first difference, in nats, as
            computed without speculation: near 0 for a near-tie.
    """

    num_requests: int
    num_identical: int
    num_tokens: int
    num_agreeing_tokens: int
    gaps: tuple[float, ...] = ()

    def describe(self) -> str:
        """The result in a sentence."""
        share = self.num_agreeing_tokens / self.num_tokens
        said = (
            f"{self.num_identical} of {self.num_requests} outputs identical; {share:.1%} of the "
            "tokens lie before a first difference"
        )
        if not self.gaps:
            return said
        return f"{said}, where the two likeliest are at most {max(self.gaps):.3g} nats apart"


def measure_losslessness(
    model: ModelConfig,
    drafters: DraftersConfig,
    num_requests: int,
    max_tokens: int,
    concurrency: int,
) -> Losslessness:
    """Serve held-out prompts with and without speculation.

    Args:
        model: The target model, in the data type of interest.
        drafters: What speculates, at random.
        num_requests: Prompts to serve.
        max_tokens: Output tokens of each, at most.
        concurrency: Requests in flight.
    """
    model = replace(model, enable_prefix_caching=False)
    workload = WorkloadConfig(
        kinds=DEFAULT_KINDS,
        concurrency=(concurrency,),
        output_tokens=max_tokens,
        first_wave_min_fraction=1.0,
    )
    stream = Workload(workload, "eval", load_tokenizer(model)).episode(0).requests
    requests = list(itertools.islice(stream, num_requests))
    with closing(VllmEngine(engine_config(model, drafters))) as engine:
        engine.hook.controller = RandomController(engine.contract)
        speculative = engine.generate(requests, concurrency)
    with closing(VllmEngine(engine_config(model, None))) as engine:
        plain = engine.generate(requests, concurrency)
        return compare_outputs(engine, requests, plain, speculative)


def compare_outputs(
    engine: VllmEngine,
    requests: Sequence[WorkloadRequest],
    plain: Mapping[str, list[int]],
    speculative: Mapping[str, list[int]],
) -> Losslessness:
    """Set outputs against each other, and ask how near a tie their differences are.

    Args:
        engine: Without speculation; asked for the logits where outputs part.
        requests: What was served.
        plain: Output token ids without speculation, by request id.
        speculative: The same with it.
    """
    agreeing = {name: _common(plain[name], speculative[name]) for name in plain}
    differing = [one for one in requests if plain[one.request_id] != speculative[one.request_id]]
    contexts = [
        [*one.prompt_token_ids, *plain[one.request_id][: agreeing[one.request_id]]]
        for one in differing
    ]
    likeliest = [list(found.values()) for found in next_logprobs(engine, contexts, 2)]
    return Losslessness(
        len(requests),
        len(requests) - len(differing),
        sum(len(tokens) for tokens in plain.values()),
        sum(agreeing.values()),
        tuple(first - second for first, second in likeliest),
    )


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)
