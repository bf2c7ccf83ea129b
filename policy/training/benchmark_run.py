"""The whole benchmark: choose the best fixed settings, replay, serve live, report."""

from __future__ import annotations

from pathlib import Path

from .benchmark import BEST_FIXED, ReplayPool, Results, choose_fixed, fixed_contenders
from .benchmark_config import BenchmarkConfig
from .benchmark_live import serve_live
from .benchmark_report import write_benchmark_report
from .config import Resolved
from .contenders import Contender


def run_benchmark(config: BenchmarkConfig, resolved: Resolved) -> str:
    """Run everything and write the report.

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
    fixed = fixed_contenders(config)
    named = {name: Contender.of(name, section) for name, section in config.contenders.items()}
    on_traces = {one.name: one for one in [*fixed, *named.values()] if not one.is_plain}
    with ReplayPool(config) as pool:
        best = choose_fixed(pool.replay(fixed, "train", max(1, config.num_repeats // 2)), fixed)
        traced = pool.replay([*on_traces.values()], "eval", config.num_repeats)
    _name_best_fixed(traced, {scenario: one.name for scenario, one in best.by_scenario.items()})
    lived = None
    if config.live is not None:
        groups = {
            scenario: [
                *(named[name] for name in config.live.contenders),
                Contender(BEST_FIXED, best.by_scenario[scenario].section),
            ]
            for scenario in config.live.scenarios
        }
        lived = serve_live(config, config.live, groups)
    return write_benchmark_report(folder, config, resolved, best, traced, lived)


def _name_best_fixed(results: Results, best: dict[str, str]) -> None:
    """The chosen fixed settings take part under one name."""
    for scenario, name in best.items():
        results.runs[scenario, BEST_FIXED] = results.runs[scenario, name]
