"""The soak's own judgement: what it asks, what it takes for valid, and how it reads memory."""

from __future__ import annotations

import http.server
import json
import os
import random
import subprocess
import sys
import threading

import pytest

from envs.soak import (
    Soak,
    SoakConfig,
    check_answer,
    random_request,
    replace_policy,
    resident_bytes,
)
from policy.artifact import load_policy
from policy.errors import ArtifactError, ConfigError

from .exported import CONTRACT

KINDS = {"greedy", "sampled", "penalties", "stop", "logprobs", "seed", "schema", "n"}


def test_requests_are_of_every_kind_and_both_endpoints():
    rng = random.Random(0)
    requests = [random_request(rng, ["a", "b"]) for _ in range(400)]
    assert {kind for kind, _, _ in requests} == KINDS
    assert {path for _, path, _ in requests} == {"/v1/completions", "/v1/chat/completions"}
    for kind, path, body in requests:
        assert ("messages" in body) == ("chat" in path) != ("prompt" in body)
        assert kind != "n" or body["temperature"] > 0  # vLLM refuses several greedy choices
        assert body.get("min_tokens", 0) <= body["max_tokens"]


def answer(text="hello", finish="length", tokens=3, choices=1):
    return {
        "choices": [{"text": text, "finish_reason": finish}] * choices,
        "usage": {"completion_tokens": tokens},
    }


@pytest.mark.parametrize(
    ("kind", "body", "given", "is_valid"),
    [
        ("greedy", {"max_tokens": 3}, answer(), True),
        ("greedy", {"max_tokens": 2}, answer(), False),
        ("greedy", {"max_tokens": 3}, answer(finish="abort"), False),
        ("n", {"max_tokens": 3, "n": 2}, answer(tokens=6, choices=2), True),
        ("n", {"max_tokens": 3, "n": 2}, answer(), False),
        ("schema", {"max_tokens": 9}, answer('{"name": "a", "size": 1}', "stop"), True),
        ("schema", {"max_tokens": 9}, answer('{"name": "a"}', "stop"), False),
        ("schema", {"max_tokens": 9}, answer('{"name": "a', "stop"), False),
        ("schema", {"max_tokens": 9}, answer('{"name": "a', "length"), True),
        ("penalties", {"max_tokens": 9}, answer("over the moon"), False),
        ("penalties", {"max_tokens": 9}, answer("over a moon"), True),
    ],
)
def test_an_answer_is_checked_for_what_was_asked(kind, body, given, is_valid):
    if is_valid:
        check_answer(kind, body, given)
    else:
        with pytest.raises(ValueError, match=r".*"):
            check_answer(kind, body, given)


def test_the_policys_file_is_sometimes_good_and_sometimes_rubbish(tmp_path):
    rng, path = random.Random(0), tmp_path / "policy.pt"
    hashes = set()
    for _ in range(12):
        if replace_policy(path, CONTRACT, rng) == "good":
            artifact = load_policy(path)
            assert artifact.contract == CONTRACT
            hashes.add(artifact.sha256)
        else:
            with pytest.raises(ArtifactError):
                load_policy(path)
    assert 4 < len(hashes) < 12


def test_memory_is_that_of_a_process_and_all_below_it():
    code = "import sys; block = bytearray(b'x' * 60_000_000); print(flush=True); sys.stdin.read()"
    before = resident_bytes(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        grown = resident_bytes(os.getpid()) - before
        child.stdin.close()
    assert 55e6 < grown < 120e6
    assert resident_bytes(child.pid) == 0


class Answering(http.server.BaseHTTPRequestHandler):
    """A server that answers every third request with an error."""

    num_asked = 0

    def do_POST(self):
        Answering.num_asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        texts = {"text": "x", "finish_reason": "length"}, {"message": {"content": "x"}}
        choice = {**texts["messages" in body], "finish_reason": "length"}
        reply = {"choices": [choice] * body.get("n", 1), "usage": {"completion_tokens": 1}}
        self.send_response(500 if Answering.num_asked % 3 == 0 else 200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass


def test_failed_requests_and_growth_are_problems():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = SoakConfig(minutes=0.03, num_clients=2, reload_every_s=0.5, max_memory_growth=-1.0)
    load = Soak(
        f"http://127.0.0.1:{server.server_port}", os.getpid(), ["a"], config, lambda rng: "good"
    )
    result = load.run()
    server.shutdown()
    server.server_close()
    assert result.num_reloads["good"] > 0
    assert sum(result.num_requests.values()) > 0
    assert 0 < len(result.failures) <= 20
    assert any("requests failed" in problem for problem in result.problems)
    assert any("memory grew" in problem for problem in result.problems)
    assert json.loads(result.to_json())["num_requests"]


def test_a_soak_of_no_length_is_refused():
    for settings in ({"minutes": 0}, {"num_clients": 0}, {"warm_up_share": 1.0}):
        with pytest.raises(ConfigError, match="out of range"):
            SoakConfig(**settings)
