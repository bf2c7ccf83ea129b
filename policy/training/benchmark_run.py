"""The whole benchmark: choose the best fixed settings, replay, serve live, report."""

from __future__ import annotations

import re
from pathlib import Path

from .benchmark import (
    BEST_FIXED,
    BEST_SINGLE_FIXED,
    BestFixed,
    choose_fixed,
    fixed_contenders,
    name_best_fixed,
)
from .benchmark_config import BenchmarkConfig, LiveConfig
from .benchmark_live import serve_live
from .benchmark_replay import ReplayPool
from .benchmark_report import TIMELINE_SCENARIO, BenchmarkReport, write_benchmark_report
from .config import Resolved
from .contenders import Contender
from .tracking import Tracking


def run_benchmark(config: BenchmarkConfig, resolved: Resolved) -> str:
    """Run everything, write the report and log it.

    Args:
        config: The benchmark.
        resolved: The same as plain containers, kept in the report.

    Returns:
        The tables as text, and where the report lies.

    Raises:
        DraftgymError: If a contender, a trace or an engine cannot be used.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tracking = Tracking(config.logger, folder, resolved)
    exit_code = 1
    try:
        report = _measure(config, resolved)
        _log(report, tracking)
        exit_code = 0
        return report.text
    finally:
        tracking.finish(exit_code)


def _measure(config: BenchmarkConfig, resolved: Resolved) -> BenchmarkReport:
    fixed = fixed_contenders(config)
    named = {name: Contender.of(name, section) for name, section in config.contenders.items()}
    on_traces = {
        one.name: one
        for one in [*fixed, *named.values(), Contender.oracle()]
        if not one.is_unhooked
    }
    with ReplayPool(config) as pool:
        best = choose_fixed(pool.replay(fixed, "train", max(1, config.num_repeats // 2)), fixed)
        traced = pool.replay([*on_traces.values()], "eval", config.num_repeats)
        observed = TIMELINE_SCENARIO
        if observed not in pool.scenarios:
            observed = pool.scenarios[0]
        observations = {name: pool.observations(named[name], observed) for name in config.policies}
    name_best_fixed(traced, best)
    lived = None
    if config.live is not None:
        lived = serve_live(config, config.live, _live_contenders(config.live, named, best))
        for scenario in lived.scenarios:  # one setting may have both roles
            runs = lived.runs[scenario, BEST_FIXED]
            lived.runs.setdefault((scenario, BEST_SINGLE_FIXED), runs)
    return write_benchmark_report(config, resolved, best, traced, lived, observations)


def _live_contenders(
    live: LiveConfig, named: dict[str, Contender], best: BestFixed
) -> dict[str, list[Contender]]:
    """Who serves each live scenario: those configured and the fixed settings chosen for it."""
    groups = {}
    for scenario in live.scenarios:
        group = [named[name] for name in live.contenders]
        group.append(Contender(BEST_FIXED, best.at(scenario).section))
        if best.at(scenario) != best.overall:
            group.append(Contender(BEST_SINGLE_FIXED, best.overall.section))
        groups[scenario] = group
    return groups


def _log(report: BenchmarkReport, tracking: Tracking) -> None:
    """Summaries as figures; tables and pictures as they are in the report."""
    for where, summaries in report.summaries.items():
        for one in summaries:
            for name in ("over_none", "worst_over_none", "over_best_fixed", "over_single_fixed"):
                tracking.sb3_logger.record(f"{where}/{one.contender}/{name}", getattr(one, name))
    tracking.sb3_logger.dump(0)
    tables = {re.sub(r"\W+", "_", heading.lower()): rows for heading, rows in report.tables}
    tracking.log_report(tables, {path.stem: path for path in report.pictures})
