"""Load prompts by kind and split; train and eval never share a source item or a text."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from policy.errors import ConfigError

from .chat import chat_prompts
from .code_editing import edit_prompts
from .doc_summary import summary_prompts
from .human_eval import code_prompts
from .maths import maths_prompts
from .prompt import Message, Prompt, PromptSourceError, Split, split_of
from .user_file import file_prompts

_BUILT_IN: dict[str, Callable[[], tuple[Prompt, ...]]] = {
    "code": code_prompts,
    "edit": edit_prompts,
    "maths": maths_prompts,
    "summary": summary_prompts,
    "chat": chat_prompts,
}
FILE_KIND = "file"
KINDS = (*_BUILT_IN, FILE_KIND)


def load_prompts(
    kinds: Iterable[str], split: Split, paths: Sequence[str | Path] = ()
) -> list[Prompt]:
    """Load the prompts of some kinds that belong to one split.

    The split is decided per source item by a hash of its name, so it doesn't depend on the kinds
    asked for, on the order of anything, or on the process. A prompt in a user's file that repeats
    a built-in one takes over the built-in one's item, and with it the split.

    Args:
        kinds: Names out of `KINDS`; their order doesn't matter.
        split: `train` (about three quarters of the items) or `eval`.
        paths: Files of the kind `file`, read by `user_file.file_prompts`.

    Returns:
        The prompts in the order of `KINDS` and, within a kind, of its source; no text twice.

    Raises:
        ConfigError: A kind or the split is unknown, or `file` and `paths` don't go together.
        PromptSourceError: A source can't be read, or a kind has no prompt in this split.
    """
    asked = set(kinds)
    check_kinds(asked)
    if split not in ("train", "eval"):
        raise ConfigError(f"Unknown split {split!r}; use 'train' or 'eval'.")
    if (FILE_KIND in asked) != bool(paths):
        raise ConfigError(
            "Prompt files and the kind 'file' go together; give both or neither of them."
        )
    seen: set[tuple[Message, ...]] = set()
    prompts: list[Prompt] = []
    for kind in (kind for kind in KINDS if kind in asked):
        source = _BUILT_IN[kind]() if kind in _BUILT_IN else _prompts_of_files(paths)
        num_before = len(prompts)
        for prompt in source:
            if split_of(prompt.item) == split and prompt.messages not in seen:
                seen.add(prompt.messages)
                prompts.append(prompt)
        if len(prompts) == num_before:
            raise PromptSourceError(
                f"None of the {len(source)} prompts of kind {kind!r} falls into the split "
                f"{split!r}; give at least 20 distinct prompts."
            )
    return prompts


def check_kinds(kinds: Iterable[str]) -> None:
    """Raise a ConfigError that suggests the nearest kind when a name isn't in `KINDS`."""
    for kind in kinds:
        if kind not in KINDS:
            close = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.5)
            mend = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(KINDS)}."
            raise ConfigError(f"Unknown prompt kind {kind!r}; {mend}")


def _prompts_of_files(paths: Sequence[str | Path]) -> list[Prompt]:
    built_in_items = _built_in_items()
    return [
        dataclasses.replace(prompt, item=built_in_items.get(prompt.text_key, prompt.item))
        for path in paths
        for prompt in file_prompts(path)
    ]


@functools.cache
def _built_in_items() -> dict[str, str]:
    """Return the source item of every built-in prompt by its text."""
    items: dict[str, str] = {}
    for source in _BUILT_IN.values():
        with contextlib.suppress(PromptSourceError):  # a source that isn't installed has no prompts
            items.update((prompt.text_key, prompt.item) for prompt in source())
    return items
