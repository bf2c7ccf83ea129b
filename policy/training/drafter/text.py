"""Stage 1: the text a head learns from, all of it written by the target.

Every training prompt of the workload is answered at each of a few temperatures, and so are the
questions that the target asks itself. A head is to guess what the target would write, so text by
anybody else would teach it the wrong thing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from envs.live import ModelConfig, engine_config, load_tokenizer
from envs.prompts.prompt import stable_fraction
from envs.vllm_engine import VllmEngine
from envs.workload import Workload, WorkloadConfig, WorkloadRequest
from policy.errors import ConfigError

from .questions import ask_questions
from .samples import Sample, read_samples, write_samples


@dataclass(frozen=True)
class TextConfig:
    """What is written.

    Attributes:
        temperatures: Each training prompt is answered once at each of them; 0 is greedy.
        num_questions: Questions that the target asks itself, answered at the first temperature.
        question_temperature: At which it asks them.
        max_answers: Answers in all, a random choice of the first pass; null for all passes.
        requests_per_part: Requests after which a part is written; a kill loses at most so many.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    num_questions: int = 1200
    question_temperature: float = 0.8
    max_answers: int | None = None
    requests_per_part: int = 256

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(
                f"text.temperatures is {list(self.temperatures)}; list numbers of at least 0."
            )
        if self.num_questions < 0 or self.requests_per_part < 1:
            raise ConfigError(
                "text.num_questions is below 0 or text.requests_per_part below 1; raise it."
            )
        if self.max_answers is not None and self.max_answers < 1:
            raise ConfigError(
                f"text.max_answers is {self.max_answers}; make it 1 or more, or null for all."
            )


def write_text(
    config: TextConfig, model: ModelConfig, workload: WorkloadConfig, folder: Path
) -> None:
    """Write the parts that the folder lacks.

    Args:
        config: What is written.
        model: The target model.
        workload: Its training prompts are answered, each with up to `output_tokens`.
        folder: Where the parts go.
    """
    if (folder / "complete").exists():
        return
    tokenizer = load_tokenizer(model)
    with closing(VllmEngine(engine_config(model, None))) as engine:
        questions = ask_questions(
            engine,
            tokenizer,
            config.num_questions,
            config.question_temperature,
            folder / "questions.json",
        )
        requests = text_requests(config, workload, tokenizer, questions)
        with tqdm(total=len(requests), unit="answer", desc="text by the target") as bar:
            for first in range(0, len(requests), config.requests_per_part):
                part = requests[first : first + config.requests_per_part]
                path = folder / f"{first:06}.npz"
                if not path.exists():
                    answers = engine.generate(part, model.max_num_seqs)
                    write_samples([_sample(r, answers[r.request_id]) for r in part], path)
                bar.update(len(part))
    (folder / "complete").touch()


def read_text(folder: Path) -> list[Sample]:
    """Every sample of a folder, in the order of the requests."""
    return [sample for path in sorted(folder.glob("*.npz")) for sample in read_samples(path)]


def text_requests(
    config: TextConfig, workload: WorkloadConfig, tokenizer: Any, questions: list[str]
) -> list[WorkloadRequest]:
    """Everything the target answers: prompts and questions, then the prompts once more, and so on.

    A pass is shuffled by a hash, so that each of its parts has every kind.
    """
    prompts = Workload(workload, "train", tokenizer).every_request()
    asked = [
        replace(prompts[0], request_id=f"asked-{index}", prompt_token_ids=token_ids, kind="asked")
        for index, question in enumerate(questions)
        if len(token_ids := _tokenised(question, tokenizer)) <= workload.max_prompt_tokens
    ]
    requests = []
    for number, temperature in enumerate(config.temperatures):
        answered = prompts if number else [*prompts, *asked]
        answered.sort(key=lambda request: stable_fraction(request.request_id))
        requests += [
            replace(request, request_id=f"{request.request_id}-{number}", temperature=temperature)
            for request in answered
        ]
    return requests[: config.max_answers]


def _tokenised(question: str, tokenizer: Any) -> tuple[int, ...]:
    chat = [{"role": "user", "content": question}]
    return tuple(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def _sample(request: WorkloadRequest, answer: list[int]) -> Sample:
    token_ids = np.array([*request.prompt_token_ids, *answer], np.int32)
    return Sample(token_ids, len(request.prompt_token_ids), request.kind)
