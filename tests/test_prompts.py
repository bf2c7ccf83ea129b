import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs.prompts.loading import FILE_KIND, KINDS, load_prompts
from envs.prompts.prompt import EVAL_FRACTION, Message, PromptSourceError, split_of
from envs.prompts.user_file import file_prompts
from policy.errors import ConfigError, DraftgymError

BUILT_IN_KINDS = tuple(kind for kind in KINDS if kind != FILE_KIND)


def write_lines(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def sharegpt(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def openai(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


@pytest.mark.parametrize("kind", BUILT_IN_KINDS)
def test_every_kind_has_enough_prompts_of_a_moderate_length_in_both_splits(kind):
    train, held_out = load_prompts([kind], "train"), load_prompts([kind], "eval")
    assert len(train) + len(held_out) >= 150
    assert len(held_out) >= 30
    assert 0.15 < len(held_out) / (len(train) + len(held_out)) < 0.35
    for prompt in train + held_out:
        assert prompt.kind == kind
        assert [turn.role for turn in prompt.messages] == ["user"]
        assert 100 <= len(prompt.messages[0].content) <= 1600, prompt.prompt_id


def test_the_two_splits_share_no_item_no_text_and_no_id():
    train, held_out = load_prompts(BUILT_IN_KINDS, "train"), load_prompts(BUILT_IN_KINDS, "eval")
    for attribute in ("item", "text_key", "prompt_id"):
        ours = {getattr(prompt, attribute) for prompt in train}
        assert not ours & {getattr(prompt, attribute) for prompt in held_out}, attribute
    for attribute in ("text_key", "prompt_id"):
        counts = Counter(getattr(prompt, attribute) for prompt in train + held_out)
        assert max(counts.values()) == 1, attribute


def test_no_code_or_document_of_one_split_is_nearly_repeated_in_the_other():
    def shingles(prompt):
        body = prompt.messages[0].content.partition("\n\n")[2]
        words = re.findall(r"\w+|\S", body)
        return {tuple(words[i : i + 12]) for i in range(len(words) - 11)}

    kinds = ("edit", "summary")
    seen = [shingles(prompt) for prompt in load_prompts(kinds, "train")]
    for prompt in load_prompts(kinds, "eval"):
        own = shingles(prompt)
        overlap = max(len(own & other) for other in seen)
        assert overlap <= 0.3 * len(own), prompt.prompt_id


def test_a_kind_has_the_same_prompts_alone_and_in_company():
    everything = load_prompts(reversed(BUILT_IN_KINDS), "train")
    assert everything == [p for kind in BUILT_IN_KINDS for p in load_prompts([kind], "train")]


def test_about_a_quarter_of_all_items_is_held_out():
    share = sum(split_of(f"item {i}") == "eval" for i in range(20_000)) / 20_000
    assert share == pytest.approx(EVAL_FRACTION, abs=0.01)


def test_prompts_do_not_depend_on_the_hash_seed_of_the_process():
    program = (
        "import hashlib; from envs.prompts.loading import KINDS, load_prompts\n"
        "print(hashlib.sha256(repr(load_prompts(KINDS[:-1], 'eval')).encode()).hexdigest())"
    )
    digests = {
        subprocess.check_output(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_every_format_of_a_users_file_is_read(tmp_path):
    path = write_lines(
        tmp_path / "mixed.jsonl",
        sharegpt(("system", "Be brief."), ("human", "Hello?"), ("gpt", "Hi."), ("human", "Bye.")),
        {"custom_id": "1", "body": {"model": "m", "messages": openai(("user", "What is 2+2?"))}},
        "",
        {"messages": openai(("user", "First"), ("assistant", "A"), ("user", "Second"))},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]},
        {"messages": openai(("developer", "Rhyme."), ("user", "Moon"), ("assistant", "June"))},
        {"prompt": "Plain"},
    )
    assert [prompt.messages for prompt in file_prompts(path)] == [
        (Message("system", "Be brief."), Message("user", "Hello?")),
        (Message("user", "What is 2+2?"),),
        (Message("user", "First"), Message("assistant", "A"), Message("user", "Second")),
        (Message("user", "In parts"),),
        (Message("system", "Rhyme."), Message("user", "Moon")),
        (Message("user", "Plain"),),
    ]


def test_text_lines_and_json_arrays_are_read(tmp_path):
    text = write_lines(tmp_path / "a.txt", '{"prompt": "kept as it is"}', "", "  two ")
    array = tmp_path / "b.json"
    array.write_text(json.dumps([sharegpt(("human", "One")), {"prompt": "Two"}]))
    assert [p.messages[0].content for p in file_prompts(text)] == [
        '{"prompt": "kept as it is"}',
        "two",
    ]
    assert [p.messages[0].content for p in file_prompts(array)] == ["One", "Two"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "x"', r"line 2 isn't valid JSON .*write one JSON object a line"),
        ("[1]", r"line 2 isn't a JSON object"),
        ({"text": "x"}, r"line 2 has none of 'conversations'.*add one"),
        ({"prompt": 3}, r"line 2 has none of"),
        ({"prompt": "  "}, r"line 2 has no user turn with text; add one"),
        (sharegpt(("gpt", "Hi")), r"line 2 has no user turn with text; add one"),
        (sharegpt(("tool", "x")), r"line 2: turn 1 of 'conversations' has no known 'from'; use"),
        ({"conversations": "x"}, r"line 2: 'conversations' isn't a list; make it"),
        ({"body": {"messages": [3]}}, r"line 2: turn 1 of 'body.messages' has no known 'role'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"line 2: turn 1 isn't text; keep only",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_mend(tmp_path, line, sentence):
    path = write_lines(tmp_path / "bad.jsonl", {"prompt": "good"}, line)
    with pytest.raises(PromptSourceError, match=sentence) as caught:
        file_prompts(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.jsonl", None, "can't be read.*correct the path"),
        ("empty.txt", b"\n\n", "holds no prompts"),
        ("table.csv", b"x", "rename it to .txt"),
        ("latin.txt", b"fine\ncaf\xe9\n", "line 2 isn't UTF-8"),
        ("broken.json", b'[{"prompt": "x"},\n{"prompt" 3}]', "line 2 isn't valid JSON"),
        ("object.json", b"{}", "isn't a JSON array"),
        ("entry.json", b'[{"prompt": "x"}, 3]', "entry 2 isn't a JSON object"),
    ],
)
def test_a_bad_file_is_named_with_its_mend(tmp_path, name, content, sentence):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DraftgymError, match=sentence):
        file_prompts(path)


def test_a_repeated_prompt_of_a_file_is_loaded_once_and_in_one_split(tmp_path):
    lines = [{"prompt": f"Question number {i}"} for i in range(80)]
    one = write_lines(tmp_path / "one.jsonl", *lines)
    conversations = [sharegpt(("human", f" question  NUMBER {i} ")) for i in range(80)]
    two = write_lines(tmp_path / "two.jsonl", *conversations)
    train = load_prompts([FILE_KIND], "train", [one, one, two])
    held_out = load_prompts([FILE_KIND], "eval", [two, one])
    assert len(train) + len(held_out) == 160
    assert not {p.text_key for p in train} & {p.text_key for p in held_out}


def test_a_built_in_prompt_in_a_users_file_stays_in_its_split(tmp_path):
    built_in = load_prompts(["code"], "eval") + load_prompts(["chat"], "eval")
    path = write_lines(
        tmp_path / "copy.jsonl", *({"prompt": p.messages[0].content} for p in built_in)
    )
    assert len(load_prompts([FILE_KIND], "eval", [path])) == len(built_in)
    with pytest.raises(PromptSourceError, match="split 'train'"):
        load_prompts([FILE_KIND], "train", [path])


@pytest.mark.parametrize(
    ("kinds", "split", "paths", "sentence"),
    [
        (["cod"], "train", [], "did you mean 'code'"),
        (["zzz"], "train", [], "use one of code"),
        (["code"], "test", [], "use 'train' or 'eval'"),
        (["code"], "train", ["x.txt"], "both or neither"),
        (["file"], "train", [], "both or neither"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_a_sentence(kinds, split, paths, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_prompts(kinds, split, paths)
