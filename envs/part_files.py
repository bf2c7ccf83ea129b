"""Folders of part files: a run that was killed is gone on with, and none with other settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.errors import TraceError

_SETTINGS_FILE = "settings.json"


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Claim a folder for settings, or go on with the same ones.

    Args:
        folder: Where the parts go; made if missing.
        settings: JSON-ready; what all parts of the folder must share.

    Raises:
        TraceError: If the folder holds parts of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _SETTINGS_FILE
    text = json.dumps(settings, sort_keys=True, indent=1)
    if not path.exists():
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(text)
        unfinished.replace(path)
    elif path.read_text() != text:
        raise TraceError(
            f"{folder} holds parts of a collection with other settings; collect with those, name "
            "another file as out=…, or remove the folder."
        )
