"""`policy.pt`: TorchScript with the contract and plain weights inside, described by `policy.json`.

The file is a zip archive written by `torch.jit.save`; the contract and a safetensors copy of the
weights ride along as extra files, so a torch without TorchScript can still serve the policy.
Nothing is unpickled. TorchScript is code nevertheless: load only policies you trust, or pin their
sha256.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PolicyArtifact:
    """An exported policy, ready to decide.

    Attributes:
        module: `forward(float32 [rows, fields]) -> int64 [rows, 2]`.
        contract: What the policy observes and which actions it takes.
        sha256: Hash of the file, in hex.
        path: Where it was read from.
    """

    module: torch.nn.Module
    contract: Contract
    sha256: str
    path: Path


def save_policy(
    module: PolicyModule,
    contract: Contract,
    path: Path,
    *,
    reference: Callable[[np.ndarray], np.ndarray],
    observations: np.ndarray,
    provenance: dict[str, Any],
) -> str:
    """Write `policy.pt` and `policy.json`, if the module decides exactly as its reference does.

    Args:
        module: The network to export.
        contract: Its contract.
        path: Where `policy.pt` goes; `policy.json` is written beside it.
        reference: The trained actor, float32 `[n, fields]` -> int `[n, 2]`.
        observations: Recorded observations, float32 `[n, fields]`, n >= 1.
        provenance: How the policy came to be, JSON-ready.

    Returns:
        The file's sha256 in hex.

    Raises:
        ArtifactError: If module and reference differ on a recorded observation, or the folder
            cannot be written.
    """
    module = module.eval()
    _check_parity(module, reference, observations)
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = {
        _CONTRACT_FILE: json.dumps(contract.to_dict()),
        _WEIGHTS_FILE: safetensors.torch.save(module.state_dict()),
    }
    partial = path.with_suffix(".partial")
    try:
        with warnings.catch_warnings():
            # TorchScript is deprecated in favour of torch.export; the safetensors copy inside
            # the file is what remains when it goes.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(module), str(partial), _extra_files=extra)
        partial.replace(path)
    except OSError as error:
        raise ArtifactError(f"Cannot write {path} ({error}); choose a writable folder.") from error
    sha256 = hash_file(path)
    description = {"sha256": sha256, "contract": contract.to_dict(), "provenance": provenance}
    path.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")
    return sha256


def _check_parity(
    module: PolicyModule, reference: Callable[[np.ndarray], np.ndarray], observations: np.ndarray
) -> None:
    if not len(observations):
        raise ArtifactError("No observation was recorded to compare with; record some first.")
    with torch.inference_mode():
        ours = module(torch.from_numpy(observations)).numpy()
    differing = np.flatnonzero((ours != reference(observations)).any(axis=1))
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
    actual = hash_file(path)
    expected = sha256 or _described_sha256(path)
    if expected is not None and actual != expected.lower():
        raise ArtifactError(
            f"{path} has sha256 {actual[:12]}…, not the expected {expected[:12]}…; "
            "restore the original file or export the policy again."
        )
    stored, weights = _read_extra_files(path)
    try:
        contract = Contract.from_dict(stored)
    except ContractError as error:
        raise ArtifactError(f"{path} does not fit this draftgym: {error}") from error
    return PolicyArtifact(_load_module(path, contract, weights), contract, actual, path)


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
    except (ValueError, KeyError) as error:
        raise ArtifactError(
            f"{description} is not a policy description; restore it, or delete it and pin the "
            "sha256 yourself."
        ) from error


def _read_extra_files(path: Path) -> tuple[dict[str, Any], bytes]:
    """The contract and the weights inside the archive, read without torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.split("/extra/")[-1]: name for name in archive.namelist()}
            contract = json.loads(archive.read(names[_CONTRACT_FILE]))
            return contract, archive.read(names[_WEIGHTS_FILE])
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise ArtifactError(
            f"{path} is damaged or not an exported policy ({error}); export the policy again."
        ) from error
    except KeyError as error:
        raise ArtifactError(
            f"{path} carries no draftgym contract; export it with draftgym."
        ) from error


def _load_module(path: Path, contract: Contract, weights: bytes) -> torch.nn.Module:
    try:
        with warnings.catch_warnings():
            # As in save_policy: the plain weights below are the way without TorchScript.
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(path), map_location="cpu").eval()
    except Exception as error:  # torch raises several types, and TorchScript may be gone
        logger.info("TorchScript cannot load %s (%s); using its plain weights.", path, error)
    try:
        return PolicyModule.from_weights(safetensors.torch.load(weights), contract)
    except Exception as error:
        raise ArtifactError(
            f"{path} holds weights that do not fit its contract ({error}); export it again."
        ) from error
