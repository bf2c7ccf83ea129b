"""What the target model would say next, as its engine reports it."""

from __future__ import annotations

from collections.abc import Sequence

from .vllm_engine import VllmEngine


def next_logprobs(
    engine: VllmEngine, contexts: Sequence[Sequence[int]], num_likeliest: int
) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest next tokens, at temperature 1.

    Args:
        engine: A live engine without requests in flight.
        contexts: Token ids that precede, of each question.
        num_likeliest: Tokens to tell, 20 at most.

    Returns:
        Token id -> natural logarithm of its probability, the likeliest first, for each context.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    parameters = SamplingParams(
        max_tokens=1, temperature=0, logprobs=num_likeliest, detokenize=False
    )
    for index, context in enumerate(contexts):
        engine.llm_engine.add_request(str(index), tokens_input(list(context)), parameters)
    found: dict[str, dict[int, float]] = {}
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            (told,) = output.outputs[0].logprobs
            found[output.request_id] = {token: one.logprob for token, one in told.items()}
    return [found[str(index)] for index in range(len(contexts))]
