import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from envs.prompts.loading import FILE_KIND, KINDS
from envs.prompts.prompt import PromptSourceError
from envs.target_model import DEFAULT_TARGET_MODEL, default_cache_dir
from envs.workload import Slot, Workload, WorkloadConfig
from policy.errors import ConfigError

EVERY_KIND = {kind: 1.0 for kind in KINDS if kind != FILE_KIND}


class WordTokenizer:
    """One token a word; the ids are the same in every process."""

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt
        assert tokenize
        assert not return_dict
        words = " ".join(turn["content"] for turn in conversation).split()
        return [int.from_bytes(word.encode()[:6], "big") for word in words]


def first_requests(workload, seed, count):
    return list(itertools.islice(workload.episode(seed).requests, count))


@pytest.fixture(scope="module")
def workload():
    config = WorkloadConfig(kinds=EVERY_KIND, concurrency=(1, 4, 16), output_tokens=100)
    return Workload(config, "train", WordTokenizer())


@pytest.fixture(scope="module")
def tokenizer():
    folder = default_cache_dir() / DEFAULT_TARGET_MODEL
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the default target model isn't prepared: run `python -m envs.target_model`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_a_slot_may_have_a_temperature_of_its_own_and_nothing_else_changes(workload):
    slots = [Slot(), Slot(temperature=0.7), Slot(temperature=0.0)]
    requests = list(workload.requests(3, slots))
    assert [request.temperature for request in requests] == [0.0, 0.7, 0.0]
    plain = list(workload.requests(3, [Slot()] * 3))
    assert [replace(request, temperature=0.0) for request in requests] == plain


def test_an_episode_depends_on_its_seed_alone(workload):
    expected = first_requests(workload, 7, 50)
    random.seed(0)
    first_requests(workload, 8, 20)
    again = Workload(workload.config, "train", WordTokenizer())
    assert first_requests(workload, 7, 50) == expected
    assert first_requests(again, 7, 50) == expected
    assert first_requests(workload, 8, 50) != expected


def test_interleaved_episodes_do_not_disturb_each_other(workload):
    expected = first_requests(workload, 1, 40), first_requests(workload, 2, 40)
    one, two = workload.episode(1).requests, workload.episode(2).requests
    pairs = [(next(one), next(two)) for _ in range(40)]
    assert tuple(map(list, zip(*pairs, strict=True))) == expected


def test_an_episode_is_the_same_in_every_process():
    program = """
import hashlib, itertools
from tests.test_workload import EVERY_KIND, Workload, WorkloadConfig, WordTokenizer
config = WorkloadConfig(kinds=EVERY_KIND, concurrency=(2, 8))
episode = Workload(config, "eval", WordTokenizer()).episode(3)
drawn = episode.concurrency, list(itertools.islice(episode.requests, 60))
print(hashlib.sha256(repr(drawn).encode()).hexdigest())
"""
    digests = {
        subprocess.check_output(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_splits_send_different_prompts():
    prompts = {}
    for split in ("train", "eval"):
        drawn = Workload(
            WorkloadConfig(kinds=EVERY_KIND, concurrency=(1,)), split, WordTokenizer()
        ).episode(0)
        prompts[split] = {r.prompt_token_ids for r in itertools.islice(drawn.requests, 1500)}
    assert not prompts["train"] & prompts["eval"]


def test_kinds_are_drawn_by_weight():
    config = WorkloadConfig(kinds={"chat": 3, "maths": 1, "code": 0}, concurrency=(1,))
    drawn = first_requests(Workload(config, "train", WordTokenizer()), 0, 4000)
    counts = Counter(request.kind for request in drawn)
    assert counts["chat"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert set(counts) == {"chat", "maths"}


def test_the_order_of_the_kinds_in_the_config_does_not_matter():
    configs = [
        WorkloadConfig(kinds=kinds, concurrency=(1,))
        for kinds in ({"chat": 2, "code": 1}, {"code": 1, "maths": 0, "chat": 2})
    ]
    assert configs[0] == configs[1]
    assert hash(configs[0]) == hash(configs[1])
    one, two = (Workload(config, "eval", WordTokenizer()) for config in configs)
    assert first_requests(one, 5, 30) == first_requests(two, 5, 30)


def test_a_prompt_returns_only_after_all_others_of_its_kind():
    config = WorkloadConfig(kinds={"code": 1}, concurrency=(1,))
    workload = Workload(config, "eval", WordTokenizer())
    size = workload.num_prompts["code"]
    prompts = [request.prompt_token_ids for request in first_requests(workload, 0, 3 * size)]
    rounds = [prompts[i : i + size] for i in range(0, 3 * size, size)]
    assert all(set(one) == set(rounds[0]) and len(set(one)) == size for one in rounds)
    assert rounds[0] != rounds[1]


def test_the_concurrency_is_drawn_from_the_list_and_leaves_the_prompts_alone(workload):
    counts = Counter(workload.episode(seed).concurrency for seed in range(300))
    assert set(counts) == {1, 4, 16}
    assert min(counts.values()) > 60
    cells = [
        Workload(
            WorkloadConfig(kinds=EVERY_KIND, concurrency=(n,), output_tokens=100),
            "train",
            WordTokenizer(),
        )
        for n in (2, 32)
    ]
    one, two = ([r.prompt_token_ids for r in first_requests(cell, 3, 60)] for cell in cells)
    assert one == two


def test_only_the_first_wave_is_staggered():
    config = WorkloadConfig(kinds={"chat": 1}, concurrency=(64,), output_tokens=200)
    drawn = first_requests(Workload(config, "train", WordTokenizer()), 0, 200)
    wave, rest = [r.max_tokens for r in drawn[:64]], [r.max_tokens for r in drawn[64:]]
    assert min(wave) >= 50
    assert max(wave) <= 200
    assert len(set(wave)) > 30
    assert sum(wave) / 64 == pytest.approx(125, abs=15)
    assert set(rest) == {200}


def test_the_stagger_can_be_switched_off_and_never_asks_for_nothing():
    lengths = {}
    for fraction in (1, 0.0):
        config = WorkloadConfig(
            kinds={"chat": 1},
            concurrency=(16,),
            output_tokens=2,
            first_wave_min_fraction=fraction,
        )
        drawn = first_requests(Workload(config, "train", WordTokenizer()), 0, 16)
        lengths[fraction] = {request.max_tokens for request in drawn}
    assert lengths == {1: {2}, 0.0: {1, 2}}


def test_a_closed_loop_replaces_what_has_finished(workload):
    episode = next(e for e in map(workload.episode, range(100)) if e.concurrency == 4)
    taken = [
        request.request_id
        for num_unfinished in (0, 4, 3, 1, 9)
        for request in episode.take_due(num_unfinished, elapsed_s=0.0)
    ]
    assert len(taken) == 4 + 0 + 1 + 3 + 0
    assert len(set(taken)) == len(taken)


def test_long_prompts_are_dropped_and_counted():
    lengths = {}
    for limit in (10_000, 60):
        config = WorkloadConfig(kinds={"summary": 1}, concurrency=(1,), max_prompt_tokens=limit)
        workload = Workload(config, "eval", WordTokenizer())
        lengths[limit] = workload.num_prompts["summary"], workload.num_dropped_prompts["summary"]
        drawn = first_requests(workload, 0, 200)
        assert max(len(request.prompt_token_ids) for request in drawn) <= limit
    assert lengths[10_000][1] == 0
    assert lengths[60][1] > 0
    assert sum(lengths[60]) == lengths[10_000][0]
    config = WorkloadConfig(kinds={"summary": 1}, concurrency=(1,), max_prompt_tokens=3)
    with pytest.raises(PromptSourceError, match="raise max_prompt_tokens"):
        Workload(config, "eval", WordTokenizer())


def test_a_large_file_is_subsampled_whatever_its_order(tmp_path):
    lines = [f"Question number {i}" for i in range(400)]
    pools = []
    for name, order in (("up.txt", lines), ("down.txt", lines[::-1])):
        (tmp_path / name).write_text("\n".join(order))
        config = WorkloadConfig(
            kinds={"file": 1},
            concurrency=(1,),
            prompt_files=(str(tmp_path / name),),
            max_prompts_per_kind=50,
        )
        workload = Workload(config, "train", WordTokenizer())
        pools.append([r.prompt_token_ids for r in first_requests(workload, 0, 50)])
    assert pools[0] == pools[1]
    assert len(set(pools[0])) == 50


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kinds": {"math": 1}}, "did you mean 'maths'"),
        ({"kinds": {}}, "give one of kinds a weight"),
        ({"kinds": {"code": 0}}, "give one of kinds a weight"),
        ({"kinds": {"code": -1}}, "kinds.code is -1; make it a number of at least 0"),
        ({"kinds": {"code": float("nan")}}, "kinds.code is nan"),
        ({"concurrency": ()}, "at least one number"),
        ({"concurrency": (0,)}, "concurrency is 0; make it a whole number"),
        ({"concurrency": (1.5,)}, "concurrency is 1.5"),
        ({"output_tokens": True}, "output_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": "0"}, "temperature is '0'"),
        ({"first_wave_min_fraction": 1.2}, "a number from 0 to 1"),
        ({"prompt_files": ("x.jsonl",)}, "go together"),
        ({"kinds": {"file": 1}}, "go together"),
    ],
)
def test_a_bad_config_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        WorkloadConfig(**{"kinds": {"code": 1}, "concurrency": (1,), **changes})


def test_a_tokenizer_without_a_chat_template_is_refused_with_a_sentence():
    class BaseModelTokenizer:
        def apply_chat_template(self, conversation, **options):
            raise ValueError("no chat template is set")

    config = WorkloadConfig(kinds={"code": 1}, concurrency=(1,))
    with pytest.raises(PromptSourceError, match="use an instruct model's tokenizer"):
        Workload(config, "eval", BaseModelTokenizer())


def test_lengths_with_the_default_target_models_tokenizer(tokenizer):
    config = WorkloadConfig(kinds=EVERY_KIND, concurrency=(1,))
    workload = Workload(config, "eval", tokenizer)
    assert sum(workload.num_dropped_prompts.values()) <= 0.02 * sum(workload.num_prompts.values())
    drawn = first_requests(workload, 0, 600)
    lengths = sorted(len(request.prompt_token_ids) for request in drawn)
    assert lengths[0] >= 40
    assert lengths[len(lengths) * 95 // 100] <= 400
    text = tokenizer.decode(drawn[0].prompt_token_ids)
    assert text.endswith("<|im_start|>assistant\n")
    assert all(type(token) is int for token in drawn[0].prompt_token_ids)
