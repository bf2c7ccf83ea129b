"""The benchmark on live vLLM: contenders take turns in one engine, on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
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

    An engine without speculation takes its turns in a process of its own where a contender asks
    for it. Prompts lie in both engines' prefix caches.

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
    needs_plain = any(one.is_plain for group in contenders.values() for one in group)
    hooked = EngineProcess(
        engine_config(config.model, config.drafters), config.model, workload, folder / "hook.log"
    )
    plain = hooked
    if needs_plain:
        plain = EngineProcess(
            engine_config(config.model, None), config.model, workload, folder / "plain.log"
        )
    results = Results()
    with closing(hooked), closing(plain):
        hooked.read_prompts("eval")
        if needs_plain:
            plain.read_prompts("eval")
        rounds = [(repeat, name) for repeat in range(live.num_repeats) for name in live.scenarios]
        for repeat, name in tqdm(rounds, desc="live vLLM", unit="round"):
            scenario = shortened(config.scenarios[name], live.request_share)
            block = ScenarioBlock("eval", config.seed + repeat, scenario)
            group = contenders[name]
            for contender in [*group[repeat % len(group) :], *group[: repeat % len(group)]]:
                engine = plain if contender.is_plain else hooked
                served = engine.serve_scenario(contender, block)
                results.runs.setdefault((name, contender.name), []).append(served)
    return results


def shortened(scenario: Scenario, share: float) -> Scenario:
    """The same phases with fewer requests, but enough to reach the load of each."""
    return Scenario(
        tuple(
            replace(
                phase,
                num_requests=max(round(share * phase.num_requests), phase.concurrency or 1),
            )
            for phase in scenario.phases
        )
    )
