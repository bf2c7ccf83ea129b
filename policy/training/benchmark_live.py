"""The benchmark on live vLLM: contenders take turns in one engine, on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from envs.live import engine_config
from envs.scenario import Scenario

from .benchmark import Results
from .benchmark_config import BenchmarkConfig, LiveConfig
from .contenders import Contender
from .engine_process import EngineProcess, ScenarioBlock


def serve_live(
    config: BenchmarkConfig, live: LiveConfig, contenders: Mapping[str, Sequence[Contender]]
) -> Results:
    """Serve the live scenarios with every contender, one after the other within each repeat.

    vLLM without a drafting policy takes its turns in an engine and process of its own for each
    contender that asks for it. Prompts lie in the prefix caches of all engines.

    Args:
        config: The benchmark.
        live: Its live part.
        contenders: Who serves, by scenario.
    """
    folder = Path(config.output_dir)
    workload = replace(
        config.workload,
        output_tokens=live.output_tokens,
        max_prompts_per_kind=live.max_prompts_per_kind,
    )
    hooked = engine_config(config.model, config.drafters)
    unhooked = engine_config(config.model, None)
    started = {None: hooked} | {
        one.section: replace(unhooked, speculative_config=one.speculative_config)
        for group in contenders.values()
        for one in group
        if one.is_unhooked
    }
    results = Results()
    with ExitStack() as stack:
        engines = {
            section: stack.enter_context(
                closing(
                    EngineProcess(engine, config.model, workload, folder / f"engine-{index}.log")
                )
            )
            for index, (section, engine) in enumerate(started.items())
        }
        for engine in engines.values():
            engine.read_prompts("eval")
        rounds = [(repeat, name) for repeat in range(live.num_repeats) for name in live.scenarios]
        for repeat, name in tqdm(rounds, desc="live vLLM", unit="round"):
            scenario = shortened(config.scenarios[name], live.request_share)
            block = ScenarioBlock("eval", config.seed + repeat, scenario)
            group = contenders[name]
            for contender in [*group[repeat % len(group) :], *group[: repeat % len(group)]]:
                engine = engines[contender.section if contender.is_unhooked else None]
                served = engine.serve_scenario(contender, block)
                results.runs.setdefault((name, contender.name), []).append(served)
    return results


def shortened(scenario: Scenario, share: float) -> Scenario:
    """The same phases with fewer requests, but enough to reach the load of each."""
    phases = tuple(
        replace(phase, num_requests=max(round(share * phase.num_requests), phase.concurrency or 1))
        for phase in scenario.phases
    )
    return replace(scenario, phases=phases)
