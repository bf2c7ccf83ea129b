"""Published traces: where they lie, if anywhere, and small files in their format."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("DRAFTGYM_PUBLISHED_TRACES", ROOT.parent / "shared" / "traces"))

needs_published_traces = pytest.mark.skipif(
    not list(FOLDER.glob("*.jsonl.gz")),
    reason="no published traces; point DRAFTGYM_PUBLISHED_TRACES at their folder",
)


def published_line(rng, name, eagle_excess=0, positions=None):
    """One request of the published format over few different tokens, so that many drafts match."""
    positions = positions or int(rng.integers(2, 60))
    prompt = rng.integers(0, 3, int(rng.integers(1, 40))).tolist()
    output = rng.integers(0, 3, positions).tolist()
    return {
        "id": name,
        "prompt_token_ids": prompt,
        "generated_token_ids": output,
        "acc_ngram": {"acc_len": [1] * positions},
        "acc_eagle": {"acc_len": [1, *rng.integers(1, 20, positions + eagle_excess - 1).tolist()]},
    }


def write_published(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def run_script(name, *arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def refusal_of(done):
    """The sentence with which a script refused; it ends with what to do."""
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.replace("\r", "\n").strip().splitlines()
    (said,) = [line for line in lines if "file/s]" not in line and "s/file]" not in line and line]
    said = said.removeprefix("error: ")
    assert re.fullmatch(r"[^\n]+; [^\n]+[.?]", said)
    return said
