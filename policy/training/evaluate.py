"""The comparison after training: interleaved blocks on held-out prompts, measured time only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from envs.live import engine_config
from envs.prompts.prompt import Split

from ..contract import MODEL_DRAFTERS, NONE
from .config import CompareConfig, TrainConfig
from .engine_process import Block, EngineProcess, Setting
from .measurement import Measurement

PLAIN = Setting(NONE, hooked=False)
HOOKED = Setting("none_hooked")


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        measurements: One per setting, concurrency and repeat.
        details: Chosen lengths of the best fixed settings, in words.
    """

    measurements: list[Measurement]
    details: dict[str, str]


def evaluate(config: TrainConfig, policy: Path, untrained: Path, folder: Path) -> Evaluation:
    """Measure no speculation, the best fixed settings, the untrained and the trained policy.

    The best fixed length of each drafter is chosen per concurrency on training prompts; all else
    is measured on held-out prompts, setting after setting within each repeat. Prompts lie in both
    engines' prefix caches, so the figures are those of decoding.

    Args:
        config: The run.
        policy: The trained `policy.pt`, loaded by the plugin.
        untrained: The same network before training.
        folder: For the engines' logs.
    """
    workload = replace(
        config.workload,
        max_prompts_per_kind=config.compare.max_prompts_per_kind,
        output_tokens=config.compare.output_tokens,
    )
    plain_config = engine_config(config.model, None)
    hooked_config = engine_config(config.model, config.drafters, {"path": str(policy)})
    with (
        closing(EngineProcess(plain_config, config.model, workload, folder / "plain.log")) as plain,
        closing(
            EngineProcess(hooked_config, config.model, workload, folder / "plugin.log")
        ) as hooked,
    ):
        fixed = _choose_fixed(config, hooked)
        plain.read_prompts("eval")
        hooked.read_prompts("eval")
        measurements = []
        rounds = [
            (repeat, concurrency)
            for repeat in range(config.compare.num_repeats)
            for concurrency in config.compare.concurrency
        ]
        for repeat, concurrency in tqdm(rounds, desc="comparing", unit="cell"):
            settings = [
                PLAIN,
                HOOKED,
                *(by_load[concurrency] for by_load in fixed.values()),
                Setting("policy_untrained", policy=untrained),
                Setting("policy", policy=policy),
            ]
            block = _block(config.compare, "eval", 1000 + repeat, concurrency)
            for setting in _rotate(settings, repeat):
                engine = hooked if setting.hooked else plain
                measurements.append(_measure(engine, setting, block, repeat))
    details = {
        name: "length "
        + ", ".join(f"{setting.length} at {load}" for load, setting in by_load.items())
        + " requests, chosen on training prompts"
        for name, by_load in fixed.items()
    }
    return Evaluation(measurements, details)


def _choose_fixed(config: TrainConfig, engine: EngineProcess) -> dict[str, dict[int, Setting]]:
    """The fastest length of each drafter at each concurrency, on training prompts."""
    engine.read_prompts("train")
    compare = replace(config.compare, tokens_per_req=config.compare.tuning_tokens_per_req)
    chosen: dict[str, dict[int, Setting]] = {}
    cells = [
        (drafter, concurrency)
        for drafter in config.drafters.max_lengths
        for concurrency in compare.concurrency
    ]
    for drafter, concurrency in tqdm(cells, desc="choosing fixed lengths", unit="cell"):
        longest = config.drafters.max_lengths[drafter]
        lengths = compare.model_lengths if drafter in MODEL_DRAFTERS else compare.ngram_lengths
        name = f"{drafter}_fixed"
        block = _block(compare, "train", 1, concurrency)
        candidates = [
            Setting(name, drafter=drafter, length=length)
            for length in sorted({min(length, longest) for length in lengths})
        ]
        speeds = [_measure(engine, setting, block, 0).tok_per_s for setting in candidates]
        chosen.setdefault(name, {})[concurrency] = candidates[speeds.index(max(speeds))]
    return chosen


def _block(compare: CompareConfig, split: Split, seed: int, concurrency: int) -> Block:
    num_tokens = max(compare.min_tokens, compare.tokens_per_req * concurrency)
    return Block(split, seed, concurrency, num_tokens)


def _measure(engine: EngineProcess, setting: Setting, block: Block, repeat: int) -> Measurement:
    result = engine.serve(setting, block)
    return Measurement(
        setting=setting.name,
        concurrency=block.concurrency,
        repeat=repeat,
        num_tokens=result.served.num_tokens,
        seconds=result.served.seconds,
        num_steps=result.served.num_steps,
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        actions=result.actions,
        num_drafts=result.num_drafts,
    )


def _rotate(settings: Sequence[Setting], repeat: int) -> list[Setting]:
    """Start each repeat with another setting, so that none is always first."""
    start = repeat % len(settings)
    return [*settings[start:], *settings[:start]]
