"""Kind `edit`: small changes to real functions, whose answer repeats most of the prompt.

This is the traffic on which n-gram drafting shines: nearly every token of the answer can be
copied from the prompt.
"""

from __future__ import annotations

import functools

from .prompt import Prompt, stable_choice, stable_fraction, text_key, user_prompt
from .stdlib_source import Definition, stdlib_definitions

_MIN_CHARACTERS, _MAX_CHARACTERS = 350, 1200
_MIN_LINES = 7
_MAX_PROMPTS = 400
_REPEAT = "Reply with the whole function in one Python code block and change nothing else."
_EDITS = (
    "Add type hints to every parameter and to the return value of this function.",
    "Add a short docstring in Google style to this function; replace the old docstring if any.",
    "Add a comment above each block of this function that says what the block does.",
    "Add a line that logs the name of the function with `logging.debug` at the start of its body.",
    "Fix any spelling mistakes in the comments and strings of this function.",
    "Rewrite this function so that every string literal uses double quotes.",
    "Remove every comment from this function.",
)
_RENAME = "Rename the parameter `{old}` of this function to `{new}` wherever it is used."


@functools.cache
def edit_prompts() -> tuple[Prompt, ...]:
    """Return one editing request for each of up to 400 functions, in a stable order.

    Raises:
        PromptSourceError: The standard library has no readable source on this machine.
    """
    distinct = {
        text_key(function.source): function
        for function in reversed(stdlib_definitions())
        if _MIN_CHARACTERS <= len(function.source) <= _MAX_CHARACTERS
        and function.source.count("\n") + 1 >= _MIN_LINES
    }
    chosen = sorted(distinct.values(), key=lambda function: stable_fraction(function.name))
    return tuple(
        user_prompt(
            kind="edit",
            prompt_id=f"edit:{function.name}",
            item=function.item,
            text=f"{_edit_of(function)} {_REPEAT}\n\n```python\n{function.source}\n```",
        )
        for function in chosen[:_MAX_PROMPTS]
    )


def _edit_of(function: Definition) -> str:
    """Pick the edit; renaming is as likely as all the others of the list together."""
    long_names = [name for name in function.parameters if len(name) > 1]
    if long_names and stable_fraction(f"rename {function.name}") < 0.5:
        old = stable_choice(long_names, function.name)
        return _RENAME.format(old=old, new=f"{old.strip('_')}_value")
    return stable_choice(_EDITS, function.name)
