"""What people use of vLLM's server works under every drafter as it does without drafts.

One server for the whole file. Every greedy request is asked under each of three policies, which
are put into use by replacing the policy's file: one that never drafts, EAGLE-3, and n-gram.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import re
import time
from dataclasses import replace

import openai
import pytest

from envs.api_server import serving
from envs.live import engine_config

from . import live
from .exported import CONTRACT, export

POLICIES = {"none": (0, 0), "eagle3": (2, 3), "ngram": (1, 8)}
DRAFTING = ("eagle3", "ngram")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["city", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " column " FROM " ("users" | "orders")\ncolumn ::= "name" | "id"'
TOOL = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}
QUESTION = "Count: one two three four one two three four one two three four one two"
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"


def completion(prompt=QUESTION, **settings):
    return "/v1/completions", {"prompt": prompt, "max_tokens": 24, **settings}


def chat(content="Name a city and its age.", **settings):
    messages = [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 32, **settings}


def structured(**settings):
    return chat(structured_outputs=settings)


def schema_of(index):
    json_schema = {"name": f"schema{index}", "schema": SCHEMA}
    question = f"Give a JSON object of city number {index}."
    settings = {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    return chat(question, max_tokens=48, **settings)


GREEDY = {
    "completion": completion(),
    "code": completion(CODE),
    "chat": chat(),
    "stop string": completion(stop=[" three"], include_stop_str_in_output=True),
    "stop token": completion(stop_token_ids=[1, 198]),
    "min tokens": completion(min_tokens=20, stop=["."]),
    "penalties": completion(
        presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3, temperature=0
    ),
    "bad words": completion(bad_words=[" three", " four"]),
    "logprobs": completion(logprobs=3),
    "prompt logprobs": completion(CODE, prompt_logprobs=2, max_tokens=8),
    "chat logprobs": chat(logprobs=True, top_logprobs=3),
    "token by token": completion(max_tokens=1),
    "end of the context": completion(
        [100 + i % 7 for i in range(620)], max_tokens=20, ignore_eos=True
    ),
    "long prompt": completion([3000 + i % 90 for i in range(560)], max_tokens=16),
    **{f"schema {index}": schema_of(index) for index in range(8)},
    "regex": structured(regex=r"[A-Z][a-z]{2,8} [0-9]{2}"),
    "choice": structured(choice=["Paris", "London", "Rome"]),
    "grammar": structured(grammar=GRAMMAR),
    "tool call": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "move"}}, max_tokens=48
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The server and the file of its policy."""
    folder = tmp_path_factory.mktemp("served")
    path = folder / "policy.pt"
    export(path, action=POLICIES["none"])
    section = {"path": str(path), "reload": True, "decision_budget_ms": 0}
    model = replace(live.MODEL, max_num_batched_tokens=256)
    config = engine_config(model, live.DRAFTERS, section)
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(config, folder / "server.log", flags) as server:
        yield server, path


@pytest.fixture(scope="module")
def answers(served):
    """Answer of every greedy request under every policy."""
    server, path = served
    found = {}
    for name, action in POLICIES.items():
        put_into_use(server, path, action)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            asked = {case: pool.submit(ask, server, *GREEDY[case]) for case in GREEDY}
            found[name] = {case: future.result() for case, future in asked.items()}
    return found


def put_into_use(server, path, action):
    """Replace the policy under the server and wait until it decides."""
    sha256 = export(path, action=action)
    for _ in range(240):
        ask(server, *completion("x", max_tokens=2))
        if server.metric("draftgym_policy_info", sha256=sha256) == 1:
            return
        time.sleep(0.5)
    raise AssertionError(server.log.read_text()[-3000:])


def ask(server, path, body):
    common = {"model": "target", "temperature": 0, "return_token_ids": True}
    return server.post(path, {**common, **body})


def sampled(server, path, body):
    return ask(server, path, {"temperature": 0.9, **body})


def text_of(answer, choice=0):
    choice = answer["choices"][choice]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def client_of(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=120)


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("case", GREEDY)
def test_greedy_answers_are_those_without_drafts(answers, case, drafter):
    plain, drafted = answers["none"][case], answers[drafter][case]
    assert len(drafted["choices"]) == len(plain["choices"])
    for ours, theirs in zip(drafted["choices"], plain["choices"], strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["finish_reason"] == theirs["finish_reason"]
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def numbers_in(value):
    """All numbers of a nested answer, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers_in(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("case", ["logprobs", "prompt logprobs", "chat logprobs"])
def test_logprobs_are_those_without_drafts(answers, case, drafter):
    """S12."""
    plain, drafted = (answers[name][case]["choices"][0] for name in ("none", drafter))
    for key in ("logprobs", "prompt_logprobs"):
        theirs, ours = numbers_in(plain.get(key)), numbers_in(drafted.get(key))
        assert len(theirs) == len(ours)
        assert all(math.isclose(a, b, abs_tol=2e-3) for a, b in zip(theirs, ours, strict=True))
    found = numbers_in(drafted["prompt_logprobs" if case == "prompt logprobs" else "logprobs"])
    assert len(found) > 20


@pytest.mark.parametrize("drafter", POLICIES)
def test_answers_are_what_was_asked_for(answers, drafter):
    found = answers[drafter]
    assert text_of(found["stop string"]).endswith(" three")
    assert found["stop string"]["choices"][0]["stop_reason"] == " three"
    assert found["min tokens"]["usage"]["completion_tokens"] >= 20
    assert not {" three", " four"} & set(re.findall(r" \w+", text_of(found["bad words"])))
    assert found["end of the context"]["usage"]["total_tokens"] == 640
    assert found["end of the context"]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("drafter", POLICIES)
def test_structured_answers_keep_their_structure(answers, drafter):
    """S8: eight JSON schemas at once, a regular expression, choices, a grammar and a tool call."""
    found = answers[drafter]
    tool = found["tool call"]["choices"][0]["message"]["tool_calls"][0]["function"]
    assert tool["name"] == "move"
    finished = 0
    for answer in [found[f"schema {index}"] for index in range(8)]:
        if answer["choices"][0]["finish_reason"] == "stop":
            value = json.loads(text_of(answer))
            assert value.keys() == {"city", "age"}
            assert isinstance(value["age"], int)
            finished += 1
    assert finished >= 6
    assert re.fullmatch(r"[A-Z][a-z]{2,8} [0-9]{2}", text_of(found["regex"]))
    assert text_of(found["choice"]) in ("Paris", "London", "Rome")
    assert re.fullmatch(r"SELECT (name|id) FROM (users|orders)", text_of(found["grammar"]))


SAMPLED = {
    "temperature": completion(),
    "top-p": completion(top_p=0.8),
    "top-k": completion(top_k=20),
    "three choices": completion(n=3),
    "chat": chat(top_p=0.9, top_k=50),
    "penalties": completion(presence_penalty=0.5, repetition_penalty=1.2),
    "logprobs": completion(logprobs=2),
    "schema": schema_of(0),
    "seed": completion(seed=3),
    "long prompt with a seed": completion([3000 + i % 90 for i in range(560)], seed=4),
}


def test_sampling_parameters_work_together(served, answers):
    server, path = served
    put_into_use(server, path, POLICIES["eagle3"])
    before = server.metric("draftgym_accepted_tokens_total", drafter="eagle3")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = {case: pool.submit(sampled, server, *SAMPLED[case]) for case in SAMPLED}
        found = {case: future.result() for case, future in asked.items()}
    for case, answer in found.items():
        assert len(answer["choices"]) == (3 if case == "three choices" else 1)
        assert all(0 < len(choice["token_ids"]) <= 48 for choice in answer["choices"])
        assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])
    assert len({text_of(found["three choices"], choice) for choice in range(3)}) > 1
    assert server.metric("draftgym_accepted_tokens_total", drafter="eagle3") > before


def test_a_seed_repeats_an_answer_however_the_prompt_is_cut(served, answers):
    """S19: the prompt comes in three chunks; without help, this takes vLLM's CPU engine down."""
    server, _ = served
    texts = {text_of(sampled(server, *SAMPLED["long prompt with a seed"])) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize("refused", [{"min_p": 0.1}, {"logit_bias": {"100": 5}}])
def test_what_vllm_refuses_under_speculation_is_an_error_of_that_request(served, refused):
    """S11."""
    server, _ = served
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match="not yet supported with speculative"):
        client.completions.create(
            model="target", prompt="x", max_tokens=2, extra_body={"temperature": 1, **refused}
        )
    client.close()
    assert ask(server, *completion(max_tokens=2))["usage"]["completion_tokens"] == 2


def test_a_stream_says_the_same_in_pieces(served, answers):
    server, path = served
    put_into_use(server, path, POLICIES["ngram"])
    client = client_of(server)
    stream = client.completions.create(
        model="target", prompt=QUESTION, max_tokens=24, temperature=0, stream=True
    )
    pieces = [event.choices[0].text for event in stream if event.choices]
    messages = [{"role": "user", "content": "Name a city and its age."}]
    stream = client.chat.completions.create(
        model="target", messages=messages, max_tokens=32, temperature=0, stream=True
    )
    deltas = [event.choices[0].delta.content or "" for event in stream if event.choices]
    client.close()
    assert "".join(pieces) == text_of(answers["none"]["completion"])
    assert "".join(deltas) == text_of(answers["none"]["chat"])
    assert 1 < len(pieces) <= 24


def test_requests_that_are_dropped_in_mid_stream_leave_no_trace(served, answers):
    """S14."""
    server, path = served
    put_into_use(server, path, POLICIES["eagle3"])
    client = client_of(server)

    def drop(index):
        stream = client.completions.create(
            model="target", prompt=f"{index} {QUESTION}", max_tokens=400, stream=True
        )
        for _, _ in zip(stream, range(2), strict=False):
            pass
        stream.close()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(drop, range(16)))
    client.close()
    for _ in range(120):
        if not server.metric("vllm:num_requests_running"):
            break
        time.sleep(0.25)
        ask(server, *completion(max_tokens=1))
    again = ask(server, *GREEDY["completion"])
    assert again["choices"] == answers["none"]["completion"]["choices"]


def test_rubbish_in_the_policys_place_is_refused_counted_and_logged_once(served, answers):
    server, path = served
    sha256 = export(path, action=POLICIES["ngram"])
    put_into_use(server, path, POLICIES["ngram"])
    before = server.metric("draftgym_reloads_total", outcome="refused")
    path.write_bytes(b"rubbish" * 1000)
    for _ in range(120):
        answer = ask(server, *GREEDY["completion"])
        assert answer["choices"] == answers["none"]["completion"]["choices"]
        if server.metric("draftgym_reloads_total", outcome="refused") > before:
            break
    assert server.metric("draftgym_reloads_total", outcome="refused") == before + 1
    assert server.metric("draftgym_policy_info", sha256=sha256) == 1
    assert server.log.read_text().count("serves on") == 1


def test_the_metrics_agree_with_vllms_own(served, answers):
    server, _ = served
    names = [f"{drafter}" for drafter in CONTRACT.proposers]
    for ours, theirs in (
        ("draft_tokens", "vllm:spec_decode_num_draft_tokens_total"),
        ("accepted_tokens", "vllm:spec_decode_num_accepted_tokens_total"),
    ):
        parts = [server.metric(f"draftgym_{ours}_total", drafter=name) for name in names]
        assert all(part > 20 for part in parts)
        # Requests that end in a step are not all counted alike.
        assert sum(parts) == pytest.approx(server.metric(theirs), rel=0.1)
    assert server.metric("draftgym_decisions_total", num_speculative_tokens="0") > 20
    assert server.metric("draftgym_decision_seconds_total") > 0
    assert server.metric("draftgym_fallbacks_total") == 0
    assert server.metric("draftgym_policy_info") == 1
