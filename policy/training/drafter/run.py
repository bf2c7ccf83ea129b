"""The stages of making a head, each left out where its result lies in the folder already."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from envs.live import REPOSITORY, best_dtype
from envs.part_files import claim
from envs.target_model import prepare_target_model
from policy.errors import ConfigError

from ..atomic import replace_atomically
from ..hardware import describe_hardware
from .acceptance import Acceptance, mean_over_kinds, measure_acceptance
from .config import DrafterConfig
from .cores import in_own_process
from .export import WEIGHTS_FILE, export_head
from .fit import fit_head
from .initial import check_target, initial_head
from .objective import make_teacher
from .report import table
from .samples import Sample
from .target_states import StatesFolder, load_target, write_states
from .text import read_text, write_text
from .vocabulary import most_frequent

Resolved = dict[str, Any]


def train_drafter(config: DrafterConfig, resolved: Resolved) -> Path:
    """Make a head from nothing, or go on where a killed run ended.

    Args:
        config: How.
        resolved: The same as plain containers, for the provenance.

    Returns:
        Folder of the head, which vLLM takes as the model of `eagle3`.

    Raises:
        ConfigError: If no head can be made for the target, or the other head isn't there.
        TraceError: If the folder holds work of other settings.
    """
    out = Path(config.out)
    head = out / "head"
    _check_inputs(config, out)
    _claim_folders(config, out)
    if not (head / WEIGHTS_FILE).exists():
        in_own_process(write_text, config.text, config.model, config.workload, out / "text")
        samples = [sample for sample in read_text(out / "text") if sample.num_answer_tokens >= 2]
        _fit_and_export(config, samples, out, head)
    measured = _measure(config, out, head)
    _write_provenance(config, resolved, measured, out, head)
    return head


def _check_inputs(config: DrafterConfig, out: Path) -> None:
    """Refuse in the first seconds what would fail in an hour."""
    from transformers import AutoConfig

    target_config = AutoConfig.from_pretrained(prepare_target_model(config.model.target))
    check_target(target_config, config.aux_layers, config.draft_vocab_size)
    if config.compare_with is not None:
        other = Path(config.compare_with)
        if not (other / WEIGHTS_FILE).is_file() and not other.is_relative_to(out):
            raise ConfigError(
                f"compare_with is {config.compare_with} and has no {WEIGHTS_FILE}; give the folder "
                "of a head, or null."
            )


def _claim_folders(config: DrafterConfig, out: Path) -> None:
    """Refuse to go on with work of other settings."""
    workload = replace(config.workload, concurrency=(1,))  # the load of episodes has no part here
    text = {
        "text": asdict(config.text),
        "model": asdict(config.model),
        "workload": asdict(workload),
    }
    claim(out / "text", text)
    claim(out / "states", {"aux_layers": config.aux_layers})
    claim(out / "fit", {**asdict(config.fit), "draft_vocab_size": config.draft_vocab_size})
    if config.acceptance is not None:
        claim(out / "acceptance", asdict(config.acceptance))


def _fit_and_export(config: DrafterConfig, samples: list[Sample], out: Path, head: Path) -> None:
    dtype = best_dtype() if config.model.dtype == "auto" else config.model.dtype
    target = load_target(prepare_target_model(config.model.target), getattr(torch, dtype))
    vocabulary = most_frequent(samples, config.draft_vocab_size, target.config.vocab_size)
    write_states(target, samples, config.aux_layers, out / "states")
    states = StatesFolder(out / "states")
    torch.manual_seed(config.fit.seed)
    fitted = initial_head(target, vocabulary, states[0].aux)
    export_head(fitted, vocabulary, target.config, config.aux_layers, out / "untrained")
    teacher = make_teacher(target, vocabulary, config.fit.greedy_share)
    target_config = target.config
    del target  # its weights are as large as everything else together
    shares = fit_head(config.fit, fitted, teacher, states, out / "fit" / "checkpoint.pt")
    _write_json(
        out / "fit" / "validation.json",
        {
            "accepted_share_per_pos": shares,
            "mean_acceptance_length": 1 + sum(shares),
            "num_samples": len(samples),
            "num_answer_tokens": sum(sample.num_answer_tokens for sample in samples),
        },
    )
    export_head(fitted, vocabulary, target_config, config.aux_layers, head)


def _measure(config: DrafterConfig, out: Path, head: Path) -> dict[str, dict[str, Acceptance]]:
    """Acceptance of the new head and of the one it is compared with, by head and kind."""
    if config.acceptance is None:
        return {}
    heads = {"new": head}
    if config.compare_with is not None:
        heads["compared"] = Path(config.compare_with)
    measured = {}
    for name, folder in heads.items():
        path = out / "acceptance" / f"{_sha256(folder)}.json"
        if not path.exists():
            by_kind = in_own_process(
                measure_acceptance, folder, config.acceptance, config.model, config.workload
            )
            _write_json(path, {kind: asdict(one) for kind, one in by_kind.items()})
        measured[name] = {
            kind: Acceptance(one["num_drafts"], tuple(one["num_accepted_per_pos"]))
            for kind, one in json.loads(path.read_text(encoding="utf-8")).items()
        }
    return measured


def _write_provenance(
    config: DrafterConfig,
    resolved: Resolved,
    measured: dict[str, dict[str, Acceptance]],
    out: Path,
    head: Path,
) -> None:
    text = table(measured) if measured else ""
    with replace_atomically(head / "acceptance.md") as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    local = f"{REPOSITORY}/"  # where the repository lies says nothing
    _write_json(
        head / "drafter.json",
        {
            "command": shlex.join(sys.argv).replace(local, ""),
            "config": json.loads(json.dumps(resolved).replace(local, "")),
            "hardware": describe_hardware(),
            "transformers": metadata.version("transformers"),
            "sha256": _sha256(head),
            "validation": json.loads((out / "fit" / "validation.json").read_text(encoding="utf-8")),
            "acceptance": {
                name: {
                    **{kind: asdict(one) for kind, one in kinds.items()},
                    "mean_acceptance_length": mean_over_kinds(kinds),
                }
                for name, kinds in measured.items()
            },
        },
    )


def _sha256(head: Path) -> str:
    return hashlib.sha256((head / WEIGHTS_FILE).read_bytes()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    with replace_atomically(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
