"""Chat prompts that the target writes itself, since templates alone are too much alike.

Given nothing but the beginning of a user's turn, an instruction model goes on with what it has
learnt users to ask (Magpie, Xu et al. 2024, arXiv:2406.08464). What resembles a held-out prompt
is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from envs.prompts.loading import load_prompts
from envs.prompts.prompt import text_key
from envs.vllm_engine import VllmEngine
from envs.workload import WorkloadRequest

from ..atomic import replace_atomically

_MAX_QUESTION_TOKENS = 96
_MIN_QUESTION_TOKENS = 6
_PLACE = "the user's words"


def ask_questions(
    engine: VllmEngine, tokenizer: Any, num_questions: int, temperature: float, path: Path
) -> list[str]:
    """Let the target write questions, or read those that it has written before.

    Args:
        engine: The target, without speculation.
        tokenizer: Its tokenizer.
        num_questions: How many it writes; fewer remain, since some have no end or come twice.
        temperature: Of the sampling.
        path: Where they are kept, as a JSON list.
    """
    if not path.exists():
        beginning = tuple(_beginning_of_a_user_turn(tokenizer))
        asked = engine.generate(
            [
                WorkloadRequest(
                    f"question-{index}", beginning, _MAX_QUESTION_TOKENS, temperature, "asked"
                )
                for index in range(num_questions)
            ],
            engine.config.max_num_seqs,
        )
        questions = _usable(_texts(asked.values(), tokenizer), held_out_texts())
        with replace_atomically(path) as unfinished:
            unfinished.write_text(json.dumps(questions, indent=1), encoding="utf-8")
    questions = json.loads(path.read_text(encoding="utf-8"))
    return questions


def held_out_texts() -> list[str]:
    """What no question may contain: every held-out prompt, and every held-out chat topic."""
    prompts = load_prompts(("code", "edit", "maths", "summary", "chat"), "eval")
    topics = {p.item.partition(":")[2] for p in prompts if p.kind == "chat"}
    return sorted({prompt.text_key for prompt in prompts} | {text_key(topic) for topic in topics})


def _beginning_of_a_user_turn(tokenizer: Any) -> list[int]:
    """The chat template up to the place where the user's words begin."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACE}], add_generation_prompt=False, tokenize=False
    )
    ids: list[int] = tokenizer(chat.partition(_PLACE)[0], add_special_tokens=False)["input_ids"]
    return ids


def _texts(outputs: Iterable[Sequence[int]], tokenizer: Any) -> list[str]:
    """The questions that have an end, decoded without it."""
    return [
        tokenizer.decode(token_ids[:-1]).strip()
        for token_ids in outputs
        if len(token_ids) >= _MIN_QUESTION_TOKENS and token_ids[-1] == tokenizer.eos_token_id
    ]


def _usable(questions: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Each question once, without those that contain a held-out text."""
    held_out = list(held_out)
    return [
        question
        for question in dict.fromkeys(questions)
        if not any(text in text_key(question) for text in held_out)
    ]
