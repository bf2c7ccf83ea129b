"""What the training text is made from: no held-out prompt, each answer once a temperature."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from envs.live import ModelConfig, load_tokenizer
from envs.prompts.loading import load_prompts
from envs.prompts.prompt import Prompt, split_of
from envs.workload import Workload, WorkloadConfig
from policy.errors import ConfigError
from policy.training.drafter import questions
from policy.training.drafter.samples import Sample, read_samples, write_samples
from policy.training.drafter.text import TextConfig, text_requests

KINDS = ("code", "edit", "maths", "summary", "chat")
WORKLOAD = WorkloadConfig(
    kinds=dict.fromkeys(KINDS, 1.0), concurrency=(1,), output_tokens=160, max_prompt_tokens=384
)
ASKED = ["How do I bake bread?", "What is the capital of France?", "word " * 500]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def requests(tokenizer):
    return text_requests(TextConfig(temperatures=(0.0, 0.7)), WORKLOAD, tokenizer, ASKED)


def test_no_held_out_prompt_is_in_the_training_text(requests, tokenizer):
    held_out = load_prompts(KINDS, "eval")
    assert len(held_out) > 300
    texts = [tokenizer.decode(request.prompt_token_ids) for request in requests]
    everything = "\n".join(texts)
    for prompt in held_out:
        assert split_of(prompt.item) == "eval"
        assert prompt.messages[-1].content not in everything
    topics = {p.item.removeprefix("chat:") for p in held_out if p.kind == "chat"}
    assert len(topics) > 10
    assert [topic for topic in topics if topic in everything] == []
    # The same search finds what is there.
    assert load_prompts(["chat"], "train")[0].messages[-1].content in everything


def test_every_training_prompt_is_answered_at_each_temperature(requests, tokenizer):
    prompts = {r.prompt_token_ids for r in Workload(WORKLOAD, "train", tokenizer).every_request()}
    ours = [request for request in requests if request.kind != "asked"]
    for temperature in (0.0, 0.7):
        answered = [r.prompt_token_ids for r in ours if r.temperature == temperature]
        assert sorted(answered) == sorted(prompts)
    assert {request.max_tokens for request in requests} == {160}
    assert len({request.request_id for request in requests}) == len(requests)


def test_questions_are_answered_greedily_unless_they_are_too_long(requests, tokenizer):
    asked = [request for request in requests if request.kind == "asked"]
    said = sorted(tokenizer.decode(request.prompt_token_ids) for request in asked)
    assert len(said) == 2
    assert ASKED[0] in said[0]
    assert ASKED[1] in said[1]
    assert {request.temperature for request in asked} == {0.0}


def test_parts_of_a_pass_have_every_kind(requests):
    assert {request.kind for request in requests[:100]} >= set(KINDS)


def test_few_answers_are_the_first_of_all(requests, tokenizer):
    few = TextConfig(temperatures=(0.0, 0.7), max_answers=50)
    assert text_requests(few, WORKLOAD, tokenizer, ASKED) == requests[:50]


class Asker:
    """An engine whose answers are written down."""

    def __init__(self, tokenizer, texts):
        self.config = SimpleNamespace(max_num_seqs=4)
        self.served = []
        self._answers = [tokenizer(text)["input_ids"] for text in texts]

    def generate(self, requests, concurrency):
        self.served += requests
        return {r.request_id: ids for r, ids in zip(requests, self._answers, strict=True)}


def test_questions_with_an_end_are_kept_once_and_none_that_is_held_out(tokenizer, tmp_path):
    topic = next(p.item for p in load_prompts(["chat"], "eval")).removeprefix("chat:")
    end = tokenizer.eos_token
    said = [
        f"How do I grow tomatoes on a balcony?{end}",
        f"How do I grow tomatoes on a balcony?{end}",
        "This one goes on and on and has no end",
        f"Hi{end}",
        f"Please tell me all about {topic.upper()}, would you?{end}",
        f"What is the tallest mountain of Africa?{end}",
    ]
    engine = Asker(tokenizer, said)
    path = tmp_path / "text" / "questions.json"
    found = questions.ask_questions(engine, tokenizer, len(said), 0.8, path)
    assert found == [
        "How do I grow tomatoes on a balcony?",
        "What is the tallest mountain of Africa?",
    ]
    beginning = tokenizer.decode(engine.served[0].prompt_token_ids)
    assert beginning.endswith("<|im_start|>user\n")
    assert json.loads(path.read_text()) == found
    engine.generate = None  # asking again reads the file
    assert questions.ask_questions(engine, tokenizer, len(said), 0.8, path) == found


def test_held_out_texts_cover_every_prompt_and_chat_topic():
    texts = questions.held_out_texts()
    prompts: list[Prompt] = load_prompts(KINDS, "eval")
    assert {prompt.text_key for prompt in prompts} <= set(texts)
    assert any(prompt.item.removeprefix("chat:").casefold() in texts for prompt in prompts)


def test_samples_come_back_as_they_were_written(tmp_path):
    samples = [
        Sample(np.array([5, 6, 7], np.int32), 1, "code"),
        Sample(np.array([8, 9], np.int32), 2, "asked"),
    ]
    write_samples(samples, tmp_path / "new" / "part.npz")
    read = read_samples(tmp_path / "new" / "part.npz")
    assert [(s.token_ids.tolist(), s.num_prompt_tokens, s.kind) for s in read] == [
        ([5, 6, 7], 1, "code"),
        ([8, 9], 2, "asked"),
    ]
    assert [sample.num_answer_tokens for sample in read] == [2, 0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["part.npz"]


@pytest.mark.parametrize(
    "settings",
    [{"temperatures": ()}, {"temperatures": (-1.0,)}, {"requests_per_part": 0}, {"max_answers": 0}],
)
def test_text_that_cannot_be_written_is_refused(settings):
    with pytest.raises(ConfigError, match=r"^text\."):
        TextConfig(**settings)
