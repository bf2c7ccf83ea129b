"""The target model: the packaged default, a local folder, or a model of the Hugging Face hub.

Run ``python -m envs.target_model [MODEL]`` to prepare one and print its folder.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from .packaged_model import TargetModelError, prepare_packaged_model

DEFAULT_TARGET_MODEL = "smollm2-135m-instruct"

# What vLLM needs of a hub repository.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def default_cache_dir() -> Path:
    """Return the folder for converted models: ``$DRAFTGYM_CACHE`` or ``~/.cache/draftgym``."""
    return Path(os.environ.get("DRAFTGYM_CACHE") or "~/.cache/draftgym").expanduser()


def prepare_target_model(model: str, cache_dir: Path | None = None) -> str:
    """Make sure that a target model lies on this machine's disk.

    Args:
        model: ``DEFAULT_TARGET_MODEL``, a folder with a ``config.json``, or a Hugging Face id.
        cache_dir: Where the converted default model is kept; ``default_cache_dir()`` if None.
            Models from the hub stay in the hub's own cache.

    Returns:
        The model's folder, as vLLM takes it for ``model=``.

    Raises:
        TargetModelError: The model is neither the default, nor on disk, nor served by the hub, or
            the default cannot be converted here.
    """
    if model == DEFAULT_TARGET_MODEL:
        return str(prepare_packaged_model((cache_dir or default_cache_dir()) / model))
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.is_dir() or model.startswith((".", "/", "~")):
        raise TargetModelError(
            f"Target model folder {model!r} has no config.json: give the folder of a model saved "
            f"in the Hugging Face format, or the default {DEFAULT_TARGET_MODEL!r}."
        )
    return str(_from_hub(model))


def _from_hub(model: str) -> Path:
    """Return a hub model's snapshot folder: the cached one if complete, else downloaded now."""
    from huggingface_hub.errors import GatedRepoError

    try:
        folder = _snapshot(model, local_files_only=True) or _snapshot(model, local_files_only=False)
    except GatedRepoError as error:
        raise TargetModelError(
            f"Target model {model!r} is gated: accept its licence on its page at the Hugging Face "
            "hub, then run `hf auth login`."
        ) from error
    except Exception as error:  # the client's own errors and those of its HTTP library
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _unavailable(model, reason) from error
    if folder is None:
        raise _unavailable(model, "it has no config.json with safetensors weights")
    return folder


def _snapshot(model: str, *, local_files_only: bool) -> Path | None:
    """Return the model's snapshot folder, or None if the files that make a model are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=local_files_only)
        )
    except LocalEntryNotFoundError:
        if local_files_only:
            return None
        raise
    index = folder / "model.safetensors.index.json"
    shards = (
        set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if index.is_file()
        else {path.name for path in folder.glob("*.safetensors")}
    )
    complete = shards and all((folder / name).is_file() for name in {"config.json", *shards})
    return folder if complete else None


def _unavailable(model: str, reason: str) -> TargetModelError:
    return TargetModelError(
        f"Target model {model!r} is no local folder and the Hugging Face hub does not give it "
        f"({reason.rstrip('.')}): name a downloaded model's folder, or {DEFAULT_TARGET_MODEL!r}."
    )


def main() -> int:
    """Prepare the model named on the command line and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m envs.target_model", description=main.__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_TARGET_MODEL)
    try:
        print(prepare_target_model(parser.parse_args().model))
    except TargetModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
