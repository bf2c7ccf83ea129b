"""A seeded request whose prompt is read in chunks, on the CPU backend.

vLLM 0.32 rewinds a request's random generator after each chunk, whose sample it throws away, by
`set_offset`. A CPU generator has none: the call raises and takes the engine down. Here the state
is put back instead, so that the output does not depend on how the prompt was cut either.
"""

from __future__ import annotations

import functools
from typing import Any


def rewind_generators_by_state(runner: Any) -> None:
    """Let a CPU runner serve seeded requests with chunked prompts; others are left as they are."""
    if runner.device.type != "cpu":
        return
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def of_discarded() -> dict[int, Any]:
        """Generators of the rows whose sample is thrown away, by row."""
        discarded = runner.discard_request_mask.np
        return {row: gen for row, gen in runner.input_batch.generators.items() if discarded[row]}

    @functools.wraps(sample)
    def sample_and_rewind(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in of_discarded().values()]
        sampled = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return sampled

    @functools.wraps(bookkeep)
    def bookkeep_without_rewinding(*args: Any, **kwargs: Any) -> Any:
        hidden = of_discarded()
        for row in hidden:
            del runner.input_batch.generators[row]
        try:
            return bookkeep(*args, **kwargs)
        finally:
            runner.input_batch.generators.update(hidden)

    runner._sample = sample_and_rewind
    runner._bookkeeping_sync = bookkeep_without_rewinding
