"""What a hook counted, on its way from the worker to vLLM's own metrics.

The worker attaches what was counted since the last time to the draft tokens it hands over, and
the scheduler adds it to the statistics that vLLM sends to the API server after every step. Of
these, one mapping of names to whole numbers takes names that vLLM does not know without any
effect; a name of ours is a metric's and its label values.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from .deployment import Deployment
from .quiet import Quiet

COUNTS_ATTRIBUTE = "draftgym_counts"
"""Attribute that carries counts on vLLM's DraftTokenIds."""
CARRIER = "num_kv_fetch_reqs_by_stage"
"""Field of vLLM's SchedulerStats that carries them on: `dict[str, int]`."""
_MARK = "draftgym"
_SEPARATOR = "|"

Counts = Counter[tuple[str, ...]]
"""A metric's name and its label values -> how many."""


class Reporter:
    """Tells what a hook and its controller counted since it was last asked.

    Args:
        hook: The hook.
        deployment: Its controller.
        rule: The name of the rule; empty for a policy.
    """

    def __init__(self, hook: Any, deployment: Deployment, rule: str) -> None:
        self._hook = hook
        self._deployment = deployment
        self._rule = rule
        self._told: Counts = Counter()
        self._info: tuple[str, ...] = ()

    def totals(self) -> Counts:
        """Everything counted so far."""
        hook, deployment = self._hook, self._deployment
        totals: Counts = Counter()
        totals["decision_microseconds",] = int(hook.decision_s * 1e6)
        totals["decision_steps",] = hook.num_decision_steps
        totals["switches",] = deployment.num_switches
        for (drafter, length), count in hook.num_decisions.items():
            totals["decisions", drafter, str(length)] = count
        for (drafter, length), count in deployment.num_shadow_decisions.items():
            totals["shadow_decisions", drafter, str(length)] = count
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            for drafter, count in getattr(hook, f"num_{name}").items():
                totals[name, drafter] = count
        for reason, count in deployment.guarded.num_fallbacks.items():
            totals["fallbacks", "decision", reason] = count
        for reason, count in hook.num_faults.items():
            totals["fallbacks", "drafting", reason] = count
        for outcome, count in getattr(deployment.policy, "num_reloads", {}).items():
            totals["reloads", outcome] = count
        return totals

    def take(self) -> dict[str, int]:
        """What is new, by coded name; a policy that went has 0, the one that came 1."""
        totals = self.totals()
        new = {encode(name): n for name, count in totals.items() if (n := count - self._told[name])}
        self._told = totals
        info = self._describe()
        if info != self._info:
            if self._info:
                new[encode(self._info)] = 0
            new[encode(info)] = 1
            self._info = info
        return new

    def _describe(self) -> tuple[str, ...]:
        policy = self._deployment.policy
        sha256 = policy.artifact.sha256 if policy else ""
        return "policy_info", sha256, "policy" if policy else self._rule, self._deployment.mode


def report_from_worker(runner: Any, reporter: Reporter) -> None:
    """Attach new counts to the draft tokens that the runner hands to the scheduler."""
    from vllm.v1.outputs import DraftTokenIds

    take: Callable[[], DraftTokenIds | None] = runner.take_draft_token_ids
    quiet = Quiet("Counting decisions")

    @functools.wraps(take)
    def take_with_counts() -> DraftTokenIds | None:
        drafts = take()
        with quiet:
            if counts := reporter.take():
                drafts = drafts or DraftTokenIds([], [])
                setattr(drafts, COUNTS_ATTRIBUTE, counts)
        return drafts

    runner.take_draft_token_ids = take_with_counts


def pass_on_in_scheduler(scheduler: Any) -> None:
    """Move counts from the draft tokens to the statistics of the scheduler's next step."""
    pending: Counter[str] = Counter()
    update, make_stats = scheduler.update_draft_token_ids, scheduler.make_stats

    @functools.wraps(update)
    def update_and_keep_counts(drafts: Any) -> None:
        for name, count in getattr(drafts, COUNTS_ATTRIBUTE, {}).items():
            pending[name] += count
        update(drafts)

    @functools.wraps(make_stats)
    def make_stats_with_counts(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        if stats is not None and pending:
            getattr(stats, CARRIER).update(pending)
            pending.clear()
        return stats

    scheduler.update_draft_token_ids = update_and_keep_counts
    scheduler.make_stats = make_stats_with_counts


def take_from_stats(stats: Any) -> Counts:
    """Remove the counts from vLLM's SchedulerStats, which is left as vLLM made it."""
    carrier = getattr(stats, CARRIER)
    ours = [name for name in carrier if name.startswith(_MARK + _SEPARATOR)]
    return Counter({decode(name): carrier.pop(name) for name in ours})


def encode(name: tuple[str, ...]) -> str:
    """One string of a metric's name and labels."""
    return _SEPARATOR.join((_MARK, *name))


def decode(coded: str) -> tuple[str, ...]:
    """The name and labels of a coded string."""
    return tuple(coded.split(_SEPARATOR)[1:])
