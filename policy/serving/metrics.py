"""draftgym's metrics on vLLM's own `/metrics`, and one line in the log every minute."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .counts import Counts, take_from_stats
from .quiet import Quiet

logger = logging.getLogger("vllm.draftgym")

LOG_INTERVAL_S = 60.0
COUNTERS = {
    "decisions": (
        "Decisions applied: one per engine step, or one per request and step of a policy that "
        "decides for requests.",
        ("drafter", "num_speculative_tokens"),
    ),
    "shadow_decisions": (
        "Decisions of a policy in shadow mode, which are not applied.",
        ("drafter", "num_speculative_tokens"),
    ),
    "switches": (
        "Decisions applied that chose otherwise than in the step before, for the batch or for the "
        "same request.",
        (),
    ),
    "drafts": ("Drafts verified by the target model.", ("drafter",)),
    "draft_tokens": ("Draft tokens verified by the target model.", ("drafter",)),
    "accepted_tokens": ("Draft tokens accepted by the target model.", ("drafter",)),
    "fallbacks": (
        "Steps in which a decision failed (stage decision: the static setting was used) or "
        "drafting did (stage drafting: nothing was drafted), by the type of the error.",
        ("stage", "reason"),
    ),
    "reloads": ("New policy files under the running server, loaded or refused.", ("outcome",)),
    "decision_steps": ("Engine steps in which a decision was taken.", ()),
    "decision_seconds": ("Time that taking decisions took, observing included.", ()),
}


@functools.cache
def _metrics() -> dict[str, Any]:
    """One set per process, whatever number of engines there is."""
    common = ("model_name", "engine")
    metrics: dict[str, Any] = {
        name: PrometheusCounter(f"draftgym_{name}", text, (*common, *labels))
        for name, (text, labels) in COUNTERS.items()
    }
    metrics["policy_info"] = Gauge(
        "draftgym_policy_info",
        "1 for who decides now: the sha256 of the policy or the name of the rule, and whether for "
        "all requests (full), a share (canary) or for show (shadow).",
        (*common, "sha256", "decider", "mode"),
        multiprocess_mode="mostrecent",
    )
    return metrics


class PolicyStatLogger(AggregateStatLoggerBase):
    """Receives vLLM's statistics in the API server's process and takes ours out of them.

    Args:
        vllm_config: vLLM's configuration, for the model's name.
        engine_indexes: Engines whose statistics arrive here.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._model_name = vllm_config.model_config.served_model_name
        self._since_log: Counts = Counter()
        self._decider = ""
        self._logged_s = time.monotonic()
        self._quiet = Quiet("Recording metrics")

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add what one engine step brought."""
        with self._quiet:
            if scheduler_stats is not None:
                self._record(scheduler_stats, engine_idx)

    def _record(self, scheduler_stats: Any, engine_idx: int) -> None:
        counts = take_from_stats(scheduler_stats)
        for (name, *labels), count in counts.items():
            values = (self._model_name, str(engine_idx), *labels)
            if name == "policy_info":
                _metrics()[name].labels(*values).set(count)
                self._decider = labels[0][:12] or labels[1] if count else self._decider
            elif name == "decision_microseconds":
                _metrics()["decision_seconds"].labels(*values).inc(count / 1e6)
            else:
                _metrics()[name].labels(*values).inc(count)
        self._since_log.update(counts)

    def log(self) -> None:
        """Write the line, once a minute at most and only where something was decided."""
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_INTERVAL_S or not self._since_log["decision_steps",]:
            return
        line = summarise(self._since_log, now_s - self._logged_s, self._decider)
        self._since_log, self._logged_s = Counter(), now_s
        logger.info(line)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the worker names the policy."""


def summarise(counts: Counts, seconds: float, decider: str) -> str:
    """One line of a stretch of time.

    Example:
        >>> counts = Counter({("decision_steps",): 10, ("decision_microseconds",): 800})
        >>> counts.update({("decisions", "none", "0"): 4, ("decisions", "ngram", "4"): 6})
        >>> counts.update({("draft_tokens", "ngram"): 20, ("accepted_tokens", "ngram"): 13})
        >>> summarise(counts, 60.0, "0a1b2c3d4e5f")
        'draftgym 0a1b2c3d4e5f: 10 steps in 60 s; ngram 4 60%, none 40%; accepted ngram 65% of \
20 tokens; 80 us a decision; 0 fallbacks'
    """
    decisions = Counter(
        {f"{name[1]} {name[2]}": n for name, n in counts.items() if name[0] == "decisions"}
    )
    total = decisions.total()
    chosen = [
        f"{label.removesuffix(' 0')} {count / total:.0%}"
        for label, count in decisions.most_common(5)
    ]
    accepted = [
        f"{name[1]} {counts['accepted_tokens', name[1]] / n:.0%} of {n} tokens"
        for name, n in counts.items()
        if name[0] == "draft_tokens" and n
    ]
    steps = counts["decision_steps",]
    fallbacks = sum(n for name, n in counts.items() if name[0] == "fallbacks")
    parts = [
        f"{steps} steps in {seconds:.0f} s",
        ", ".join(chosen) or "nothing decided",
        "accepted " + ", ".join(accepted) if accepted else "nothing drafted",
        f"{counts['decision_microseconds',] / steps:.0f} us a decision",
        f"{fallbacks} fallbacks",
    ]
    return f"draftgym {decider}: " + "; ".join(parts)
