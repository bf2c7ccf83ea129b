"""How much of the greedy output speculation leaves identical, by data type."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from envs.engine import EngineConfig
from envs.live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
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
    """

    num_requests: int
    num_identical: int
    num_tokens: int
    num_agreeing_tokens: int

    def describe(self) -> str:
        """The result in a sentence."""
        share = self.num_agreeing_tokens / self.num_tokens
        return (
            f"{self.num_identical} of {self.num_requests} outputs identical; {share:.1%} of the "
            "tokens lie before a first difference"
        )


def measure_losslessness(
    dtype: str, num_requests: int, max_tokens: int, concurrency: int
) -> Losslessness:
    """Serve held-out prompts of the default model with and without speculation.

    Args:
        dtype: Data type of the model.
        num_requests: Prompts to serve.
        max_tokens: Output tokens of each, at most.
        concurrency: Requests in flight.
    """
    model = ModelConfig(dtype=dtype, max_num_seqs=concurrency)
    drafters = DraftersConfig()
    workload = WorkloadConfig(
        kinds=DEFAULT_KINDS,
        concurrency=(concurrency,),
        output_tokens=max_tokens,
        first_wave_min_fraction=1.0,
    )
    stream = Workload(workload, "eval", load_tokenizer(model)).episode(0).requests
    requests = list(itertools.islice(stream, num_requests))
    plain = _outputs(engine_config(model, None), requests, concurrency)
    speculative = _outputs(engine_config(model, drafters), requests, concurrency)
    agreeing = {name: _common(plain[name], speculative[name]) for name in plain}
    return Losslessness(
        num_requests,
        sum(plain[name] == speculative[name] for name in plain),
        sum(len(tokens) for tokens in plain.values()),
        sum(agreeing.values()),
    )


def _outputs(
    config: EngineConfig, requests: list[WorkloadRequest], concurrency: int
) -> dict[str, list[int]]:
    engine = VllmEngine(replace(config, enable_prefix_caching=False))
    if engine.hook is not None:
        engine.hook.controller = RandomController(engine.contract)
    outputs = engine.generate(requests, concurrency)
    engine.close()
    return outputs


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)
