"""The live part of a study: speed, stages of the steps, and memory, in interleaved blocks.

All settings of a cell (kind of prompts, load, repeat) serve the same held-out requests one after
the other, in an order that turns with the cell. Speedups are over vLLM without a drafting policy
and without speculation, which runs in an engine and a process of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from envs.engine_memory import EngineMemory
from envs.live import engine_config

from ..contract import NONE
from .engine_process import Block, BlockResult, EngineProcess, Setting
from .statistics import ratio_interval
from .study_config import LiveStudyConfig, StudyConfig
from .study_data import ALL
from .study_speedups import FIXED, Speedup

PLAIN = "no speculation"
UNCOVERED = "not covered"
"""Time of a step that no timed method accounts for."""


@dataclass(frozen=True)
class StageShare:
    """A stage's share of the step time.

    Attributes:
        setting: What ran, such as `eagle3:3`; `no speculation` is vLLM without the hook.
        num_running_reqs: Requests in flight.
        stage: One of `envs.stage_clock.STAGES`, or `not covered`.
        share: Of the engine's time, 0 to 1.
        of_plain_step: Its time in a step over a whole step without speculation.
    """

    setting: str
    num_running_reqs: int
    stage: str
    share: float
    of_plain_step: float


@dataclass
class LiveStudy:
    """What was measured live.

    Attributes:
        memory: Of the engine with all drafters loaded.
        blocks: (kind, requests in flight, setting) -> a block for each repeat.
    """

    memory: EngineMemory
    blocks: dict[tuple[str, int, str], list[BlockResult]] = field(default_factory=dict)

    def speedups(self) -> list[Speedup]:
        """Each setting over no speculation, by kind and over all of them."""
        rows = []
        for (kind, load, setting), blocks in self.blocks.items():
            rows.append(_row(kind, load, setting, blocks, self.blocks[kind, load, PLAIN]))
        kinds = {kind for kind, _, _ in self.blocks}
        if len(kinds) > 1:
            rows += [
                _row(ALL, load, setting, self._all(load, setting), self._all(load, PLAIN))
                for load, setting in self._cells()
            ]
        return rows

    def stages(self) -> list[StageShare]:
        """Where the time of every setting goes, over all kinds."""
        rows = []
        for load, setting in self._cells():
            served = [block.served for block in self._all(load, setting)]
            seconds, step_s = sum(one.seconds for one in served), _step_s(self._all(load, setting))
            plain_s = _step_s(self._all(load, PLAIN))
            spent = {
                stage: sum(one.stages_s[stage] for one in served) for stage in served[0].stages_s
            }
            spent[UNCOVERED] = seconds - sum(spent.values())
            rows += [
                StageShare(
                    setting, load, stage, of_it / seconds, of_it / seconds * step_s / plain_s
                )
                for stage, of_it in spent.items()
            ]
        return rows

    def _cells(self) -> list[tuple[int, str]]:
        """Load and setting, settings in the order of the first cell."""
        loads = sorted({load for _, load, _ in self.blocks})
        return list(itertools.product(loads, dict.fromkeys(name for _, _, name in self.blocks)))

    def _all(self, load: int, setting: str) -> list[BlockResult]:
        return [
            block
            for (_, at, name), blocks in self.blocks.items()
            if (at, name) == (load, setting)
            for block in blocks
        ]


def measure_live(config: StudyConfig, live: LiveStudyConfig) -> LiveStudy:
    """Serve every cell with every setting.

    Args:
        config: The study.
        live: Its live part.

    Raises:
        EngineError: If an engine fails.
    """
    folder = Path(config.output_dir)
    kinds: Sequence[tuple[str, tuple[str, ...] | None]] = [(ALL, None)]
    if live.by_kind:
        kinds = [(kind, (kind,)) for kind in config.workload.kinds]
    cells = [
        (repeat, name, only, load)
        for repeat in range(live.num_repeats)
        for load in live.concurrency
        for name, only in kinds
    ]
    settings = _settings(live.lengths)
    with ExitStack() as stack:
        engines = {
            hooked: stack.enter_context(
                closing(
                    EngineProcess(
                        engine_config(config.model, config.drafters if hooked else None),
                        config.model,
                        config.workload,
                        folder / f"engine-{'hooked' if hooked else 'plain'}.log",
                    )
                )
            )
            for hooked in (True, False)
        }
        for engine in engines.values():
            engine.read_prompts("eval")
        study = LiveStudy(engines[True].memory())
        for turn, (repeat, name, only, load) in enumerate(tqdm(cells, "live vLLM", unit="cell")):
            num_tokens = max(live.min_tokens, live.tokens_per_request * load)
            block = Block("eval", config.seed + repeat, load, num_tokens, only, times_stages=True)
            first = turn % len(settings)
            for setting in [*settings[first:], *settings[:first]]:
                result = engines[setting.hooked].serve(setting, block)
                study.blocks.setdefault((name, load, setting.name), []).append(result)
    return study


def _settings(lengths: Mapping[str, Sequence[int]]) -> list[Setting]:
    drafting = [
        Setting(f"{drafter}:{length}", drafter=drafter, length=length)
        for drafter, chosen in lengths.items()
        for length in chosen
    ]
    return [Setting(PLAIN, hooked=False), Setting(NONE), *drafting]


def _tok_per_s(blocks: Sequence[BlockResult]) -> float:
    served = [block.served for block in blocks]
    return sum(one.num_tokens for one in served) / sum(one.seconds for one in served)


def _step_s(blocks: Sequence[BlockResult]) -> float:
    """Mean seconds of an engine step."""
    served = [block.served for block in blocks]
    return sum(one.seconds for one in served) / sum(one.num_steps for one in served)


def _row(
    kind: str,
    load: int,
    setting: str,
    blocks: Sequence[BlockResult],
    plain: Sequence[BlockResult],
) -> Speedup:
    """Total speeds over each other, with the interval of the pairs of blocks."""
    ratios = [
        math.log(_tok_per_s([ours]) / _tok_per_s([theirs]))
        for ours, theirs in zip(blocks, plain, strict=True)
    ]
    drafter, _, length = setting.partition(":")
    return Speedup(
        "live",
        "held_out",
        kind,
        load,
        FIXED,
        drafter,
        int(length or 0),
        _tok_per_s(blocks) / _tok_per_s(plain),
        *ratio_interval(ratios),
    )
