"""What a prompt is, and which split its source item belongs to.

A *source item* is the thing a prompt was made from: a HumanEval task, a top-level definition of
the standard library, a maths template with its numbers, a chat topic, the first user turn of a
line in a user's file. The split is a function of the item alone, so two prompts made from the
same item, by whatever template and of whatever kind, always fall on the same side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from policy.errors import DraftgymError

Split = Literal["train", "eval"]
EVAL_FRACTION = 0.25

_Choice = TypeVar("_Choice")


class PromptSourceError(DraftgymError):
    """A prompt source is missing, malformed, or too small to be split."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: `system`, `user` or `assistant`.
        content: The text of the turn.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One request as a user would send it, before the chat template and the tokenizer.

    Attributes:
        kind: The source it comes from, one of `envs.prompts.loading.KINDS`.
        prompt_id: Unique among all prompts, readable, stable between runs.
        item: The source item it was made from; decides the split.
        messages: The chat so far, the last turn being the user's.
    """

    kind: str
    prompt_id: str
    item: str
    messages: tuple[Message, ...]

    @property
    def text_key(self) -> str:
        """The first user turn with case and white space normalised, for finding repeats."""
        return text_key(next(turn.content for turn in self.messages if turn.role == "user"))


def user_prompt(kind: str, prompt_id: str, item: str, text: str) -> Prompt:
    """Build the common prompt: a single user turn."""
    return Prompt(kind, prompt_id, item, (Message("user", text),))


def text_key(text: str) -> str:
    """Return the text with case and white space normalised."""
    return " ".join(text.casefold().split())


def stable_fraction(text: str) -> float:
    """Map a text to [0, 1) uniformly, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def stable_choice(options: Sequence[_Choice], text: str) -> _Choice:
    """Pick one of the options by the hash of a text."""
    return options[int(stable_fraction(text) * len(options))]


def split_of(item: str) -> Split:
    """Return the split that a source item belongs to, about a quarter being `eval`."""
    return "eval" if stable_fraction(f"draftgym split: {item}") < EVAL_FRACTION else "train"
