"""The format of published traces: tokens, and the tokens that each drafter's steps produced.

A file is `.jsonl` or `.jsonl.gz`, one request a line: `id`, `prompt_token_ids`,
`generated_token_ids`, and under `acc_ngram` and `acc_eagle` a list `acc_len`, whose entry p is the
number of tokens of the engine step in which that drafter drafts after p output tokens: the accepted
ones and the bonus. `envs.trace_import` makes traces of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policy.errors import TraceError

SUFFIXES = (".jsonl.gz", ".jsonl")


@dataclass(frozen=True)
class PublishedRequest:
    """One line of a published file.

    Attributes:
        name: Its `id`.
        prompt: Prompt token ids, int32.
        output: Output token ids, int32 `[positions]`.
        ngram_step_tokens: Tokens of a step with an n-gram draft, int32 `[positions]`.
        eagle_step_tokens: Tokens of a step with an EAGLE draft, int32; its length may differ.
    """

    name: str
    prompt: np.ndarray
    output: np.ndarray
    ngram_step_tokens: np.ndarray
    eagle_step_tokens: np.ndarray

    @property
    def is_misaligned(self) -> bool:
        """Whether the EAGLE list does not fit the output."""
        return len(self.eagle_step_tokens) != len(self.output)


def find_published(source: Path) -> tuple[Path, ...]:
    """The published files that a path names.

    Raises:
        TraceError: If there is none, or two differ in their suffix only.
    """
    found = sorted(source.iterdir()) if source.is_dir() else [source]
    paths = tuple(path for path in found if path.is_file() and path.name.endswith(SUFFIXES))
    if not paths:
        raise TraceError(
            f"There is no {' or '.join(SUFFIXES)} file at {source}; name a published file or a "
            "folder of them."
        )
    name, count = Counter(map(stem_of, paths)).most_common(1)[0]
    if count > 1:
        raise TraceError(f"{source} holds {name} twice; keep one of them.")
    return paths


def read_published(path: Path) -> tuple[PublishedRequest, ...]:
    """Read one published file.

    Raises:
        TraceError: If it is cut off, or a line is not of the published format.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is cut off or damaged; download it again.") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    requests = tuple(_request(line, f"{path}, line {number},") for number, line in lines)
    if not requests:
        raise TraceError(f"{path} holds no request; download it again.")
    name, count = Counter(request.name for request in requests).most_common(1)[0]
    if count > 1:
        raise TraceError(f"{path} holds the request '{name}' twice; keep one of them.")
    return requests


def stem_of(path: Path) -> str:
    """Name of a published file without its suffixes."""
    return next(path.name.removesuffix(end) for end in SUFFIXES if path.name.endswith(end))


def _request(line: str, where: str) -> PublishedRequest:
    """Check and convert one line."""
    try:
        given = json.loads(line)
        name = str(given["id"])
        prompt, output = given["prompt_token_ids"], given["generated_token_ids"]
        ngram, eagle = given["acc_ngram"]["acc_len"], given["acc_eagle"]["acc_len"]
    except ValueError as error:
        raise TraceError(f"{where} is cut off or no JSON; download the file again.") from error
    except KeyError as error:
        raise TraceError(f"{where} has no {error}; give the published format.") from error
    except TypeError as error:
        raise TraceError(
            f"{where} is not an object of the published format; give that format."
        ) from error
    request = PublishedRequest(
        name,
        _numbers(prompt, 0, f"{where} prompt_token_ids"),
        _numbers(output, 0, f"{where} generated_token_ids"),
        _numbers(ngram, 1, f"{where} acc_ngram.acc_len"),
        _numbers(eagle, 1, f"{where} acc_eagle.acc_len"),
    )
    if not len(request.prompt) or not len(request.output):
        raise TraceError(f"{where} has no prompt or no output tokens; leave it out.")
    return request


def _numbers(values: Any, low: int, where: str) -> np.ndarray:
    """A list of whole numbers as int32."""
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TraceError(f"{where} is no list of whole numbers; give the published format.")
    if values and not low <= min(values) <= max(values) < 2**31:
        raise TraceError(f"{where} holds {min(values)}..{max(values)}; numbers start at {low}.")
    return np.array(values, np.int32)
