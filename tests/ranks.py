"""What the test of tensor parallelism asks of every rank's worker."""

from __future__ import annotations

from policy.baselines.random import RandomController


class Ranks:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    def decide_at_random(self) -> int:
        """Let the controller of each rank decide differently; returns the rank."""
        hook = self.model_runner.draftgym
        hook.controller._inner.guarded.inner = RandomController(hook.contract, seed=self.rank)
        return self.rank

    def decided(self) -> list:
        """What the rank decided, drafted and counted."""
        hook = self.model_runner.draftgym
        fallbacks = hook.controller._inner.guarded.num_fallbacks
        counts = (hook.num_decisions, hook.num_draft_tokens, hook.num_accepted_tokens)
        return [sorted((str(key), n) for key, n in count.items()) for count in counts] + [
            fallbacks.total() + hook.num_faults.total()
        ]
