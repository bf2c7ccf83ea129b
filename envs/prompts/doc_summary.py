"""Kind `summary`: summaries of documentation, from docstrings and the language reference."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from .prompt import Prompt, stable_choice, stable_fraction, text_key, user_prompt
from .stdlib_source import stdlib_definitions

_MIN_CHARACTERS, _MAX_CHARACTERS = 250, 1200
_MAX_PROMPTS = 400
_REQUESTS = (
    "Summarise the following documentation in three sentences.",
    "Summarise the text below for a programmer who has never used it.",
    "List the main points of the following documentation as short bullets.",
    "Write a one-paragraph summary of this text and end with one practical tip.",
    "Explain the following documentation in plain words, as you would to a beginner.",
    "What are the three most important facts in this text? Quote the words they rest on.",
)


@functools.cache
def summary_prompts() -> tuple[Prompt, ...]:
    """Return one summary request for each of up to 400 distinct texts, in a stable order.

    Raises:
        PromptSourceError: The standard library has no readable source on this machine.
    """
    distinct: dict[str, tuple[str, str, str]] = {}
    for name, item, text in _texts():
        excerpt = _excerpt(text)
        if len(excerpt) >= _MIN_CHARACTERS:
            distinct.setdefault(text_key(excerpt), (name, item, excerpt))
    chosen = sorted(distinct.values(), key=lambda entry: stable_fraction(entry[0]))
    return tuple(
        user_prompt(
            kind="summary",
            prompt_id=f"summary:{name}",
            item=item,
            text=f"{stable_choice(_REQUESTS, name)}\n\n{excerpt}",
        )
        for name, item, excerpt in chosen[:_MAX_PROMPTS]
    )


def _texts() -> list[tuple[str, str, str]]:
    """Return (name, source item, text) of every docstring and language-reference topic."""
    texts = [
        (definition.name, definition.item, definition.docstring)
        for definition in stdlib_definitions()
        if definition.docstring
    ]
    if importlib.util.find_spec("pydoc_data") is not None:
        topics = importlib.import_module("pydoc_data.topics").topics
        texts += [(f"topic.{topic}", f"topic:{topic}", topics[topic]) for topic in sorted(topics)]
    return texts


def _excerpt(text: str) -> str:
    """Return the first whole paragraphs of a text that fit, or nothing when none does."""
    if len(text) <= _MAX_CHARACTERS:
        return text.strip()
    end = text.rfind("\n\n", 0, _MAX_CHARACTERS)
    return text[:end].strip() if end > 0 else ""
