"""The whole study: what traces tell, what live vLLM tells, the claims and the report."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from envs.live import ModelConfig, best_dtype

from .benchmark_page import aligned
from .hardware import describe_hardware
from .study_acceptance import request_means, spreads, stretches
from .study_claims import Claim, judge_claims
from .study_config import StudyConfig, TraceStudyConfig
from .study_data import NGRAM, StudyTraces
from .study_files import write_tidy
from .study_live import LiveStudy, measure_live
from .study_overlap import Overlap, OverlapCell, measure_overlap
from .study_page import Section, as_html, as_markdown
from .study_policy import measure_policy
from .study_results import StudyResults
from .study_sections import (
    acceptance_section,
    oracle_section,
    overlap_section,
    speedup_sections,
    stage_section,
)
from .study_speedups import Speedup, Speedups, measure_speedups
from .study_verdict import claims_section, verdict_section


def run_study(config: StudyConfig) -> str:
    """Measure everything and write the report.

    Args:
        config: The study.

    Returns:
        The verdict and the claims in words, and where the report lies.

    Raises:
        DraftgymError: If traces, cost model, policy or engine cannot be used.
    """
    began_s = time.perf_counter()
    if config.quick:
        config = config.quickened()
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    traced = StudyResults(Speedups())
    if config.traces is not None:
        traced = _study_traces(config, config.traces)
    live = None if config.live is None else measure_live(config, config.live)
    results = _joined(traced, live)
    claims = judge_claims(results)
    sections = _report(folder, config, results, claims, time.perf_counter() - began_s)
    _write_tables(folder, results, claims)
    return _told(sections[0], claims, folder)


def _study_traces(config: StudyConfig, traces: TraceStudyConfig) -> StudyResults:
    study = StudyTraces.read(traces.files, traces.cost_model)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        policy: Future[list[Speedup]] | None = None
        if traces.policy is not None:
            policy = pool.submit(measure_policy, traces, config.seed)
        speedups = [*_speedups(config, traces, study)]
        model = study.model_drafter if NGRAM in study.traces.drafters else None
        overlaps: list[Overlap] = []
        cells: list[OverlapCell] = []
        if model is not None:
            overlaps, cells = measure_overlap(
                study.all_aligned(), study.cost_model, model, traces, config.seed
            )
        means = request_means(study.traces)
        rows = stretches(study.traces)
        if policy is not None:
            speedups += policy.result()
    return StudyResults(
        Speedups(speedups),
        tuple(study.kinds),
        model,
        traces.code_editing,
        rows,
        means,
        spreads(means),
        overlaps,
        cells,
    )


def _speedups(config: StudyConfig, traces: TraceStudyConfig, study: StudyTraces) -> list[Speedup]:
    """All requests, the aligned ones at the least and the highest load, and the held-out ones."""
    loads = traces.concurrency
    ends = tuple(dict.fromkeys((loads[0], loads[-1])))
    rows: list[Speedup] = []
    for requests, sets, at in (
        ("all", study.data_sets(), loads),
        ("aligned", study.aligned(), ends),
        ("held_out", study.held_out() if traces.policy is not None else {}, loads),
    ):
        rows += measure_speedups(
            sets,
            study.cost_model,
            traces,
            requests,  # type: ignore[arg-type]
            at,
            num_threads=config.num_processes,
            seed=config.seed,
        )
    return rows


def _joined(traced: StudyResults, live: LiveStudy | None) -> StudyResults:
    if live is None:
        return traced
    return replace(
        traced,
        speedups=Speedups([*traced.speedups, *live.speedups()]),
        stages=live.stages(),
        memory=live.memory,
    )


def _report(
    folder: Path, config: StudyConfig, results: StudyResults, claims: list[Claim], seconds: float
) -> list[Section]:
    """Write `report.md` and `report.html`."""
    chains = config.traces.chains if config.traces is not None else ()
    sections = [verdict_section(results, claims), claims_section(claims)]
    sections += speedup_sections(folder, results, chains)
    for section in (
        stage_section(folder, results),
        acceptance_section(folder, results),
        overlap_section(folder, results),
        oracle_section(folder, results),
    ):
        if section is not None:
            sections.append(section)
    sections.append(Section("How it was measured", _notes(config, seconds)))
    title = "What speculation brings here"
    (folder / "report.md").write_text(as_markdown(title, sections))
    (folder / "report.html").write_text(as_html(title, sections))
    return sections


def _notes(config: StudyConfig, seconds: float) -> list[str]:
    notes = []
    if config.traces is not None:
        notes.append(
            "Traces are served in a closed loop, decoding alone: prompts cost nothing, the first "
            "token takes a step, and steps are priced by the cost model beside the traces. Best "
            "lengths are chosen with hindsight, by data set and load. Figures carry no intervals: "
            "requests are few, differences of a few per cent may be theirs alone. The prices were "
            f"measured on: {_priced_on(Path(config.traces.cost_model))}"
        )
    if config.live is not None:
        notes.append(
            f"Live, on the machine below in {_dtype(config.model)}: {config.live.num_repeats} "
            "interleaved repeat(s) of every cell on held-out prompts, all settings on the same "
            "requests, against vLLM without speculation in an engine of its own; the clock of the "
            "stages runs in all of them. Intervals are 95 %, over paired blocks."
        )
    notes.append(f"Command: `{_command()}`, {seconds / 60:.1f} minutes.")
    notes.append(f"Machine: {json.dumps(describe_hardware())}")
    return notes


def _priced_on(cost_model: Path) -> str:
    """The machine of a cost model, as far as its file tells."""
    told = json.loads(cost_model.expanduser().read_text())
    if "hardware" in told:
        return json.dumps(told["hardware"])
    return str(told.get("provenance", {}).get("measured_on", "an unknown machine"))


def _dtype(model: ModelConfig) -> str:
    return best_dtype() if model.dtype == "auto" else model.dtype


def _command() -> str:
    """The command as one would type it, without folders of this machine."""
    arguments = [argument for argument in sys.argv if not argument.startswith("output_dir=")]
    repository = str(Path(__file__).resolve().parents[2])
    return shlex.join(argument.replace(f"{repository}/", "") for argument in arguments)


def _write_tables(folder: Path, results: StudyResults, claims: list[Claim]) -> None:
    write_tidy(folder, "speedups", results.speedups)
    write_tidy(folder, "acceptance", results.stretches)
    write_tidy(folder, "acceptance-by-request", results.spreads)
    write_tidy(folder, "overlap", results.overlaps)
    write_tidy(folder, "overlap-groups", results.overlap_cells)
    write_tidy(folder, "stages", results.stages)
    write_tidy(folder, "memory", [] if results.memory is None else [results.memory])
    write_tidy(folder, "claims", claims)


def _told(verdict: Section, claims: list[Claim], folder: Path) -> str:
    lines = [*verdict.sentences, *(aligned(rows) for rows in verdict.tables)]
    lines += [f"{claim.outcome}: {claim.paper} Here: {claim.evidence}." for claim in claims]
    return "\n\n".join([*lines, f"Report: {folder / 'report.html'}"])
