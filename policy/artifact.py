"""`policy.pt`: TorchScript with the contract and plain weights inside, described by `policy.json`.

The file is a zip archive written by `torch.jit.save`; the contract, the settings of the drafters in
training and a safetensors copy of the weights ride along as extra files, so a torch without
TorchScript can still serve the policy.
Nothing is unpickled. TorchScript is code nevertheless: load only policies you trust, or pin their
sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from .contract import Contract
from .errors import ArtifactError, ContractError
from .module import PolicyModule

logger = logging.getLogger(__name__)

_CONTRACT_FILE = "contract.json"
_WEIGHTS_FILE = "weights.safetensors"
_SETTINGS_FILE = "drafter_settings.json"
_FOLDER = 0x10
"""Bit of a zip entry's external attributes."""


@dataclass(frozen=True)
class PolicyArtifact:
    """An exported policy, ready to decide.

    Attributes:
        module: `forward(float32 [rows, fields]) -> int64 [rows, action]`.
        contract: What the policy observes and which actions it takes.
        sha256: Hash of the file, in hex.
        path: Where it was read from.
        drafter_settings: How the drafters worked in training; empty where the file does not say.
    """

    module: torch.nn.Module
    contract: Contract
    sha256: str
    path: Path
    drafter_settings: Mapping[str, Any] = field(default_factory=dict)


def save_policy(
    module: PolicyModule,
    contract: Contract,
    path: Path,
    *,
    reference: Callable[[np.ndarray], np.ndarray],
    observations: np.ndarray,
    provenance: dict[str, Any],
    drafter_settings: Mapping[str, Any] | None = None,
) -> str:
    """Write `policy.pt` and `policy.json`, if the module decides exactly as its reference does.

    Args:
        module: The network to export.
        contract: Its contract.
        path: Where `policy.pt` goes; `policy.json` is written beside it.
        reference: The trained actor, float32 `[n, fields]` -> int `[n, 2]`.
        observations: Recorded observations, float32 `[n, fields]`, n >= 1.
        provenance: How the policy came to be, JSON-ready.
        drafter_settings: How the drafters worked in training, JSON-ready; a server that is told
            nothing else lets them work so too.

    Returns:
        The file's sha256 in hex.

    Raises:
        ArtifactError: If the module does not fit the contract, it and its reference differ on a
            recorded observation, or the folder cannot be written. No file is then left behind.
    """
    if not len(observations):
        raise ArtifactError("No observation was recorded to compare with; record some first.")
    module = module.eval()
    weights = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    with _torchscript():
        scripted = torch.jit.script(module)
    expected = reference(observations)
    for candidate in (scripted, _plain_module(weights, contract)):
        _check_parity(candidate, expected, observations)
    extra = {
        _CONTRACT_FILE: json.dumps(contract.to_dict()),
        _WEIGHTS_FILE: safetensors.torch.save(weights),
        _SETTINGS_FILE: json.dumps(dict(drafter_settings or {})),
    }
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _torchscript():
            torch.jit.save(scripted, str(partial), _extra_files=extra)
        sha256 = hash_file(partial)
        described = {"sha256": sha256, "contract": contract.to_dict(), "provenance": provenance}
        description = json.dumps(described, indent=2) + "\n"
        partial.replace(path)
        path.with_suffix(".json").write_text(description)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where it cannot write
        raise ArtifactError(
            f"Cannot write {path} ({_one_line(error)}); choose a writable folder."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return sha256


def _check_parity(module: torch.nn.Module, expected: np.ndarray, observations: np.ndarray) -> None:
    with torch.inference_mode():
        ours = module(torch.from_numpy(observations)).cpu().numpy()
    if expected.shape != ours.shape:
        raise ArtifactError(
            f"The trained actor gave actions {list(expected.shape)} for {len(ours)} observations; "
            f"compare with one that gives {list(ours.shape)}."
        )
    differing = np.flatnonzero((ours != expected).any(axis=1))
    if len(differing):
        raise ArtifactError(
            f"The exported module and the trained actor differ on {len(differing)} of "
            f"{len(observations)} recorded observations (the first is number {differing[0]}); "
            "nothing was saved, so export from the unmodified checkpoint."
        )


def load_policy(path: Path, *, sha256: str | None = None) -> PolicyArtifact:
    """Read an exported policy and check it before anything of it runs.

    Args:
        path: A `policy.pt`.
        sha256: The hash the file must have; by default the one in `policy.json` beside it, where
            there is one.

    Raises:
        ArtifactError: If the file is missing, damaged, not the expected one, or of another
            contract.
    """
    if not path.is_file():
        raise ArtifactError(f"No policy at {path}; give the path of an exported policy.pt.")
    try:  # once: what is checked is what is used, even if the file changes
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"Cannot read {path} ({_one_line(error)}); give the server access to it."
        ) from error
    actual = hashlib.sha256(content).hexdigest()
    expected = sha256 or _described_sha256(path)
    if expected is not None and actual != expected.lower():
        raise ArtifactError(
            f"{path} has sha256 {actual[:12]}…, not the expected {expected[:12]}…; "
            "restore the original file or export the policy again."
        )
    stored, settings, weights = _read_extra_files(path, content)
    try:
        contract = Contract.from_dict(stored)
    except ContractError as error:
        raise ArtifactError(f"{path} does not fit this draftgym: {error}") from error
    module = _load_module(path, content, contract, weights)
    return PolicyArtifact(module, contract, actual, path, settings)


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _described_sha256(path: Path) -> str | None:
    description = path.with_suffix(".json")
    if not description.is_file():
        return None
    try:
        return str(json.loads(description.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{description} is not a policy description; restore it, or delete it and pin the "
            "sha256 yourself."
        ) from error


def _read_extra_files(
    path: Path, content: bytes
) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Contract, drafters' settings and weights inside the archive, read without TorchScript."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = {name.split("/extra/")[-1]: name for name in archive.namelist()}
            contract, weights = names[_CONTRACT_FILE], names[_WEIGHTS_FILE]
            for info in archive.infolist():
                # Reading checks the content. Torch also goes by the size and by the mark of a
                # folder in the archive's directory, which nothing checks.
                is_folder = bool(info.external_attr & _FOLDER)
                if is_folder or len(archive.read(info)) != info.file_size:
                    raise zipfile.BadZipFile(f"'{info.filename}' is not what was written")
            settings = names.get(_SETTINGS_FILE)
            return (
                json.loads(archive.read(contract)),
                dict(json.loads(archive.read(settings))) if settings else {},
                safetensors.torch.load(archive.read(weights)),
            )
    except KeyError as error:
        raise ArtifactError(f"{path} carries no contract; export it with draftgym.") from error
    except Exception as error:  # what a damaged archive raises depends on the damaged byte
        raise ArtifactError(
            f"{path} is damaged or not an exported policy ({_one_line(error)}); export the "
            "policy again."
        ) from error


def _load_module(
    path: Path, content: bytes, contract: Contract, weights: dict[str, torch.Tensor]
) -> torch.nn.Module:
    """The TorchScript module, or its plain weights where this torch cannot load TorchScript."""
    plain = _plain_module(weights, contract)
    try:
        with _torchscript():
            return torch.jit.load(io.BytesIO(content), map_location="cpu").eval()
    except Exception as error:  # torch raises several types, and TorchScript may be gone
        logger.info("TorchScript cannot load %s (%s); using its plain weights.", path, error)
        return plain


def _plain_module(weights: dict[str, torch.Tensor], contract: Contract) -> PolicyModule:
    broken = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    if broken:
        raise ArtifactError(
            f"The policy's weights hold numbers that are not finite ({broken[0]}); train it again."
        )
    try:
        return PolicyModule.from_weights(weights, contract)
    except Exception as error:  # a missing weight, one of another shape, other bounds
        raise ArtifactError(
            f"The policy's weights do not fit its contract ({_one_line(error)}); export a "
            "module that was built for this contract."
        ) from error


@contextlib.contextmanager
def _torchscript() -> Iterator[None]:
    """TorchScript is deprecated; the plain weights inside the file remain when it goes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
