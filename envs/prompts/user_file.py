"""Kind `file`: prompts from a file of the user's.

`.txt` holds one prompt a line. `.jsonl` holds one JSON object a line, and `.json` a JSON
array of such objects; each object is one of

- ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, ...]}`, of which the turns up
  to the first human one are used (the recorded answers aren't ours);
- an OpenAI batch request: `{"body": {"messages": [...]}}`, used up to the last user turn;
- `{"messages": [...]}`, likewise;
- `{"prompt": "..."}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .prompt import Message, Prompt, PromptSourceError, text_key

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


def file_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Read the prompts of one file, in its order; blank lines are skipped.

    The source item is the first user turn, so a prompt that occurs in two files, and the growing
    prefixes of one conversation, stay in one split.

    Raises:
        PromptSourceError: The file can't be read, or an entry has none of the formats above; the
            message names the line (or the entry of a `.json` array) and the mend.
    """
    path = Path(path)
    prompts = []
    for place, entry in _entries(path):
        messages = _messages(entry, place)
        first_turn = next(turn.content for turn in messages if turn.role == "user")
        digest = hashlib.sha256(text_key(first_turn).encode()).hexdigest()[:16]
        prompts.append(Prompt("file", f"file:{place}", f"file:{digest}", messages))
    if not prompts:
        raise PromptSourceError(f"{path} holds no prompts; write one a line or drop the file.")
    return tuple(prompts)


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place for messages, entry); a line of plain text is given as `{"prompt": line}`."""
    if path.suffix not in (".txt", ".jsonl", ".json"):
        raise PromptSourceError(
            f"{path} isn't a known prompt format; rename it to .txt (one prompt a line), .jsonl "
            "(one JSON object a line) or .json (an array of objects)."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptSourceError(
            f"{path} can't be read ({error.strerror}); correct the path in prompt_files."
        ) from None
    except UnicodeDecodeError as error:
        lines_before = error.object.count(b"\n", 0, error.start)
        raise PromptSourceError(
            f"{path} line {lines_before + 1} isn't UTF-8; save the file as UTF-8."
        ) from None
    if path.suffix == ".json":
        array = _parsed(text, path, 0, "make the file one JSON array of objects")
        if not isinstance(array, list):
            raise PromptSourceError(f"{path} isn't a JSON array; wrap its objects in [ ].")
        yield from ((f"{path} entry {number}", entry) for number, entry in enumerate(array, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and path.suffix == ".txt":
            yield f"{path} line {number}", {"prompt": line.strip()}
        elif line.strip():
            mend = "write one JSON object a line, or rename a file of plain text to .txt"
            yield f"{path} line {number}", _parsed(line, path, number - 1, mend)


def _parsed(text: str, path: Path, lines_before: int, mend: str) -> Any:
    """Parse JSON text that begins after the given number of lines of its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = lines_before + error.lineno
        raise PromptSourceError(
            f"{path} line {line} isn't valid JSON ({error.msg} at column {error.colno}); {mend}."
        ) from None


def _messages(entry: Any, place: str) -> tuple[Message, ...]:
    """Return the turns of one entry up to the user turn that asks for an answer."""
    if not isinstance(entry, dict):
        raise PromptSourceError(f"{place} isn't a JSON object; write it as {{...}}.")
    body = entry.get("body")
    turns: tuple[Message, ...]
    if isinstance(entry.get("prompt"), str):
        turns = (Message("user", entry["prompt"]),)
    elif "conversations" in entry:
        turns = _turns(entry["conversations"], "conversations", "from", "value", place)
    elif "messages" in entry:
        turns = _turns(entry["messages"], "messages", "role", "content", place)
    elif isinstance(body, dict) and "messages" in body:
        turns = _turns(body["messages"], "body.messages", "role", "content", place)
    else:
        raise PromptSourceError(
            f"{place} has none of 'conversations', 'messages', 'body.messages' and a text "
            "'prompt'; add one of them."
        )
    asked = [i for i, turn in enumerate(turns) if turn.role == "user" and turn.content.strip()]
    if not asked:
        raise PromptSourceError(f"{place} has no user turn with text; add one or drop the entry.")
    return turns[: (asked[0] if "conversations" in entry else asked[-1]) + 1]


def _turns(
    turns: Any, field: str, role_key: str, text_name: str, place: str
) -> tuple[Message, ...]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise PromptSourceError(f"{place}: '{field}' isn't a list; make it a list of turns.")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or turn.get(role_key) not in _ROLES:
            raise PromptSourceError(
                f"{place}: turn {number} of '{field}' has no known '{role_key}'; use one of "
                f"{', '.join(_ROLES)}."
            )
        messages.append(Message(_ROLES[turn[role_key]], _text(turn.get(text_name), number, place)))
    return tuple(messages)


def _text(content: Any, number: int, place: str) -> str:
    """Return a turn's text, given as a string or as OpenAI's list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    raise PromptSourceError(f"{place}: turn {number} isn't text; keep only turns of plain text.")
