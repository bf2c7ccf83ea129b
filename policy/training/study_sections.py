"""The sections of a study's report between its verdict and its notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .study_data import NGRAM
from .study_figures import draw_boxes, draw_chains, draw_curves, draw_oracles, draw_stages
from .study_maps import draw_acceptance_map, draw_difference_map, draw_overlap
from .study_overlap import break_even, in_words
from .study_page import Section
from .study_results import StudyResults
from .study_speedups import COMBINED, FIXED, OPTIMUM, ORACLE_LENGTH, POLICY, Speedups


def speedup_sections(folder: Path, results: StudyResults, chains: Sequence[int]) -> list[Section]:
    """Speed against the load, on traces and live."""
    sections = []
    for where, requests in (("traces", "all"), ("live", "held_out")):
        rows = results.speedups.where(where=where, requests=requests)
        if not rows:
            continue
        path = folder / f"speedups-{where}.png"
        shown = chains if where == "traces" else range(1, 17)
        draw_chains(path, rows, shown, f"Speed of fixed draft lengths against the load, {where}")
        sections.append(
            Section(f"Speed against the load, {where}", [], [_best_fixed(rows)], [path])
        )
    return sections


def stage_section(folder: Path, results: StudyResults) -> Section | None:
    """Where the live time goes, and what drafters take of the memory."""
    if not results.stages or results.memory is None:
        return None
    path = folder / "stages.png"
    draw_stages(path, results.stages, "Where the time of an engine step goes")
    stages = list(dict.fromkeys(row.stage for row in results.stages))
    table = [
        [
            "setting",
            "requests in flight",
            *(f"{stage}, %" for stage in stages),
            "step over a plain one",
        ]
    ]
    for setting, load in dict.fromkeys(
        (row.setting, row.num_running_reqs) for row in results.stages
    ):
        own = [
            row for row in results.stages if (row.setting, row.num_running_reqs) == (setting, load)
        ]
        total = sum(row.of_plain_step for row in own)
        table.append(
            [setting, str(load), *(f"{100 * row.share:.1f}" for row in own), f"{total:.2f}"]
        )
    memory = results.memory
    sizes = [
        ["", "weights, MB", "KV cache, bytes per token of context"],
        [
            "target",
            f"{memory.target_weight_bytes / 1e6:.1f}",
            str(memory.target_kv_bytes_per_token),
        ],
        ["n-gram", "0", "0"],
        [
            "model drafter",
            f"{memory.drafter_weight_bytes / 1e6:.1f}",
            str(memory.drafter_kv_bytes_per_token),
        ],
    ]
    covered = 1 - max(abs(row.share) for row in results.stages if row.stage == stages[-1])
    sentence = (
        f"Every stage is timed by itself inside the engine; they add up to {covered:.1%} or more "
        "of the step. Verification is the target's pass, prompts included; drafting holds "
        "look-ups and what the model drafter reads; deciding is draftgym's own record, observation "
        "and controller. Weights that target and drafter share count for the target."
    )
    return Section("Where the time and the memory go", [sentence], [sizes, table], [path])


def acceptance_section(folder: Path, results: StudyResults) -> Section | None:
    """Acceptance by position, by request and by data set."""
    if not results.stretches:
        return None
    names = ("acceptance-map", "acceptance-curves", "acceptance-boxes")
    paths = [folder / f"{name}.png" for name in names]
    draw_acceptance_map(paths[0], results.stretches, "Tokens per step, request by request")
    draw_curves(paths[1], results.stretches, "Tokens per step along the output")
    draw_boxes(paths[2], results.request_means, "Tokens per step of the requests of each data set")
    table = [["data set", "drafter", "requests", "5 %", "25 %", "median", "75 %", "95 %"]]
    for one in results.spreads:
        figures = (one.p5, one.p25, one.median, one.p75, one.p95)
        row = [one.data_set, one.drafter, str(one.num_requests)]
        table.append([*row, *(f"{figure:.2f}" for figure in figures)])
    sentence = (
        "Tokens per step, accepted and bonus, if the drafter drafts its longest recorded draft at "
        "every position; percentiles are over requests. Where the token limit cut an output, its "
        "last positions look worse than they are: a recording tells of no token beyond its end."
    )
    return Section("Acceptance is not one number", [sentence], [table], paths)


def overlap_section(folder: Path, results: StudyResults) -> Section | None:
    """When n-gram wins."""
    model = results.model_drafter
    if not results.overlap_cells or model is None:
        return None
    path = folder / "overlap.png"
    title = "Overlap of prompt and output, and the speed of n-gram over the model drafter's"
    draw_overlap(path, results.overlaps, results.overlap_cells, model, title)
    table = [["requests in flight", "break-even overlap (BLEU-4)"]]
    for load in sorted({cell.num_running_reqs for cell in results.overlap_cells}):
        table.append([str(load), in_words(break_even(results.overlap_cells, load), model)])
    sentence = (
        "Overlap is BLEU-4 (sacrebleu) of the output against the prompt, over the model's tokens "
        "and without brevity penalty. The break-even is where n-gram becomes faster than the model "
        "drafter and stays so, which need not be faster than no speculation; the paper found about "
        "0.6. Outputs that loop copy from themselves: n-gram wins on them whatever the prompt. "
        "Requests with a misaligned record are left out."
    )
    return Section("When n-gram wins", [sentence], [table], [path])


def oracle_section(folder: Path, results: StudyResults) -> Section | None:
    """How far fixed settings and the policy are from what hindsight reaches."""
    rows = results.speedups.where(where="traces", requests="all")
    if not rows:
        return None
    held_out = results.speedups.where(where="traces", requests="held_out")
    paths = [folder / "oracles.png"]
    draw_oracles(paths[0], rows, held_out, "Fixed lengths, oracles and the policy")
    if (model := results.model_drafter) is not None:
        paths.append(folder / "differences.png")
        title = "Which drafter brings more tokens, request by request"
        draw_difference_map(paths[1], results.stretches, NGRAM, model, title)
    sentence = (
        "An oracle drafts just what will be accepted, at each step what brings the most tokens per "
        "second. Combinations choose the drafter too: if_it_wins pays the one chosen, both_draft "
        "pays both at every step, as_published pays every draft as an n-gram look-up, which is how "
        "the paper arrives at 4.9x. The optimum is a dynamic programme over the whole output. Rows "
        "of the policy are held-out requests; all else is all requests."
    )
    tables = [_oracle_table(rows), _oracle_table(held_out, "held out")]
    aligned = results.speedups.where(where="traces", requests="aligned")
    if aligned:
        tables.append(_oracle_table(aligned, "aligned"))
        sentence += (
            " The model drafter's published record does not fit the output of some requests; the "
            "last table leaves those out."
        )
    return Section("How far from optimal", [sentence], [one for one in tables if one], paths)


def _best_fixed(rows: Speedups) -> list[list[str]]:
    """The best length of each drafter, by data set and load."""
    loads = rows.values("num_running_reqs")
    table = [["best fixed length (speed over none)", *map(str, loads)]]
    drafting = Speedups(row for row in rows.where(setting=FIXED) if row.num_speculative_tokens)
    for data_set in drafting.values("data_set"):
        for drafter in drafting.values("drafter"):
            cells = [
                drafting.best(data_set=data_set, drafter=drafter, num_running_reqs=load)
                for load in loads
            ]
            told = [f"{cell.num_speculative_tokens} ({cell})" for cell in cells]
            table.append([f"{data_set}, {drafter}", *told])
    for row in dict.fromkeys(
        (one.data_set, one.drafter) for one in rows if not one.num_speculative_tokens
    ):
        data_set, drafter = row
        line = rows.where(data_set=data_set, drafter=drafter, setting=FIXED)
        if len(line) == len(loads) and drafter == "none":
            table.append([f"{data_set}, hook without drafts", *map(str, line)])
    return table


def _oracle_table(rows: Speedups, which: str = "all requests") -> list[list[str]]:
    """Speedups by data set and setting; empty without rows."""
    if not rows:
        return []
    loads = rows.values("num_running_reqs")
    table = [[f"{which}: speed over none", *map(str, loads)]]
    for data_set in rows.values("data_set"):
        own = rows.where(data_set=data_set)
        for drafter in own.where(setting=ORACLE_LENGTH).values("drafter"):
            best = [own.best(setting=FIXED, drafter=drafter, num_running_reqs=n) for n in loads]
            told = [f"{one.speedup:.2f} ({one.num_speculative_tokens})" for one in best]
            table.append([f"{data_set}: best fixed {drafter} (tokens)", *told])
        for setting in (ORACLE_LENGTH, COMBINED, OPTIMUM, POLICY):
            for drafter in own.where(setting=setting).values("drafter"):
                line = {
                    one.num_running_reqs: f"{one.speedup:.2f}"
                    for one in own.where(setting=setting, drafter=drafter)
                }
                label = " ".join(filter(None, (setting.replace("_", " "), drafter)))
                table.append([f"{data_set}: {label}", *(line.get(n, "–") for n in loads)])
    return table
