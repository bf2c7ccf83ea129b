"""An hour of mixed load against a server: nothing fails, nothing grows, whatever it is asked.

Clients send requests with random sampling parameters without a pause and drop some in mid-stream;
now and then the policy's file is replaced, sometimes by rubbish. Memory is that of the server's
process and all below it.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from policy.artifact import load_policy, save_policy
from policy.contract import Contract
from policy.errors import ConfigError
from policy.module import PolicyModule

from .api_server import serving
from .live import DraftersConfig, ModelConfig, engine_config, load_tokenizer
from .workload import Workload, WorkloadConfig


@dataclass(frozen=True)
class SoakConfig:
    """How long, how hard and how strict.

    Attributes:
        minutes: How long, warm-up included.
        warm_up_share: Share of it after which memory may no longer grow.
        num_clients: Requests in flight.
        drop_share: Share of the requests dropped in mid-stream.
        reload_every_s: Seconds between two changes of the policy's file.
        max_memory_growth: Growth of memory after the warm-up that passes, as a share.
        seed: Of everything random.
    """

    minutes: float = 60.0
    warm_up_share: float = 0.25
    num_clients: int = 8
    drop_share: float = 0.1
    reload_every_s: float = 30.0
    max_memory_growth: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0 or self.num_clients < 1 or not 0 < self.warm_up_share < 1:
            raise ConfigError(
                f"minutes {self.minutes:g}, num_clients {self.num_clients} or warm_up_share "
                f"{self.warm_up_share:g} is out of range; give > 0, >= 1 and 0..1."
            )


@dataclass
class SoakResult:
    """What an hour brought; `problems` is empty where it passes.

    Attributes:
        config: How it was run.
        num_requests: Requests by kind.
        num_dropped: Requests dropped in mid-stream.
        num_output_tokens: Tokens received.
        num_reloads: Changes of the policy's file by kind.
        failures: The first failed requests, with what was asked and answered.
        memory_mb: `[seconds, resident megabytes]` over time.
        memory_growth: From the mean just after the warm-up to the mean at the end, as a share.
        counters: draftgym's metrics at the end.
        problems: What did not pass.
    """

    config: SoakConfig
    num_requests: Counter[str] = field(default_factory=Counter)
    num_dropped: int = 0
    num_output_tokens: int = 0
    num_reloads: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory_mb: list[tuple[float, float]] = field(default_factory=list)
    memory_growth: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """For a file."""
        return json.dumps({**vars(self), "config": asdict(self.config)}, indent=1) + "\n"


def soak(policy: Path, config: SoakConfig, folder: Path) -> SoakResult:
    """Start a server with a copy of a policy and run the load against it.

    Args:
        policy: An exported policy for the default model; its drafters are served.
        config: How long and how hard.
        folder: For the copy and the server's log.
    """
    contract = load_policy(policy).contract
    served = Path(shutil.copy(policy, folder / "policy.pt"))
    lengths = dict(zip(contract.drafters[1:], contract.max_lengths[1:], strict=True))
    section = {"path": str(served), "reload": True}
    model = ModelConfig(max_num_seqs=8, max_model_len=640, max_num_batched_tokens=256)
    engine = engine_config(model, DraftersConfig(lengths), section)
    with serving(engine, folder / "server.log") as server:
        load = Soak(
            f"http://127.0.0.1:{server.port}",
            server.process.pid,
            _prompts(model),
            config,
            lambda rng: replace_policy(served, contract, rng),
        )
        result = load.run()
        metrics = server.get("/metrics").splitlines()
    result.counters = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics
        if line.startswith("draftgym_") and "_created" not in line and "policy_info" not in line
    }
    return result


def _prompts(model: ModelConfig) -> list[str]:
    kinds = {"code": 1.0, "edit": 1.0, "maths": 1.0, "chat": 1.0}
    workload = WorkloadConfig(kinds=kinds, concurrency=(8,), max_prompt_tokens=400)
    tokenizer = load_tokenizer(model)
    requests = Workload(workload, "eval", tokenizer).episode(0).requests
    return [tokenizer.decode(next(requests).prompt_token_ids) for _ in range(64)]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def random_request(rng: random.Random, prompts: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """A request that a server without a policy answers: kind, path and body."""
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 96), "temperature": 0.0}
    prompt = rng.choice(prompts)
    kind = rng.choice(["greedy", "sampled", "penalties", "stop", "logprobs", "seed", "schema", "n"])
    if kind in ("sampled", "n", "seed"):
        body["temperature"] = rng.uniform(0.1, 1.5)
        body["top_p"] = rng.uniform(0.5, 1.0)
        body["top_k"] = rng.choice([-1, 1, 20, 1000])
    if kind == "n":
        body["n"] = rng.randint(2, 3)
    if kind == "seed":
        body["seed"] = rng.randint(0, 2**31)
    if kind == "penalties":
        body |= {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1)}
        body["repetition_penalty"] = rng.uniform(0.8, 1.5)
        body["bad_words"] = [" the", " of"]
    if kind == "stop":
        body |= {"stop": ["\n", "."], "min_tokens": min(5, body["max_tokens"])}
    if kind == "logprobs":
        body |= {"logprobs": 3, "prompt_logprobs": 1}
    if kind == "schema":
        body |= {"structured_outputs": {"json": SCHEMA}, "max_tokens": 96}
    if kind != "logprobs" and rng.random() < 0.5:
        messages = [{"role": "user", "content": prompt}]
        return kind, "/v1/chat/completions", {**body, "messages": messages}
    return kind, "/v1/completions", {**body, "prompt": prompt}


class Soak:
    """Runs the clients against one server.

    Args:
        url: The server's address, such as `http://127.0.0.1:8000`.
        process_id: The server's process.
        prompts: Texts to ask for.
        config: How long and how hard.
        change_policy: Replaces the policy's file and tells how, `good` or `rubbish`.
    """

    def __init__(
        self,
        url: str,
        process_id: int,
        prompts: Sequence[str],
        config: SoakConfig,
        change_policy: Callable[[random.Random], str],
    ) -> None:
        self._url = url
        self._process_id = process_id
        self._prompts = prompts
        self._config = config
        self._change_policy = change_policy
        self._lock = threading.Lock()
        self._until_s = 0.0
        self.result = SoakResult(config)

    def run(self) -> SoakResult:
        """Run to the end and judge."""
        config, started_s = self._config, time.monotonic()
        self._until_s = started_s + config.minutes * 60
        clients = [
            threading.Thread(target=self._client, args=(random.Random(config.seed * 1000 + i),))
            for i in range(config.num_clients)
        ]
        for client in clients:
            client.start()
        rng, changed_s = random.Random(config.seed), started_s
        while (now_s := time.monotonic()) < self._until_s:
            memory = resident_bytes(self._process_id) / 1e6
            self.result.memory_mb.append((round(now_s - started_s, 1), round(memory, 1)))
            if now_s - changed_s > config.reload_every_s:
                self.result.num_reloads[self._change_policy(rng)] += 1
                changed_s = now_s
            time.sleep(min(5.0, config.minutes))
        for client in clients:
            client.join()
        self._judge()
        return self.result

    def _client(self, rng: random.Random) -> None:
        while time.monotonic() < self._until_s:
            kind, path, body = random_request(rng, self._prompts)
            drops = kind in ("greedy", "sampled") and rng.random() < self._config.drop_share * 4
            try:
                num_tokens = self._drop(path, body) if drops else self._ask(kind, path, body)
            except Exception as error:  # whatever goes wrong is a failed request
                with self._lock:
                    self.result.failures.append(f"{path} {json.dumps(body)[:300]}: {error!r}")
                continue
            with self._lock:
                self.result.num_requests[kind] += 1
                self.result.num_dropped += drops
                self.result.num_output_tokens += num_tokens

    def _ask(self, kind: str, path: str, body: dict[str, Any]) -> int:
        with self._open(path, body) as response:
            answer = json.loads(response.read())
        check_answer(kind, body, answer)
        return int(answer["usage"]["completion_tokens"])

    def _drop(self, path: str, body: dict[str, Any]) -> int:
        with self._open(path, {**body, "stream": True, "max_tokens": 200}) as response:
            response.readline()
        return 0

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:300]) from None

    def _judge(self) -> None:
        result, config = self.result, self._config
        if result.failures:
            result.problems.append(f"{len(result.failures)} requests failed")
            del result.failures[20:]
        if not result.num_requests:
            result.problems.append("no request was answered")
        end_s = config.minutes * 60
        warm_s = end_s * config.warm_up_share
        window_s = (end_s - warm_s) / 4
        early = [mb for s, mb in result.memory_mb if warm_s <= s < warm_s + window_s]
        late = [mb for s, mb in result.memory_mb if s >= end_s - window_s]
        if not early or not late:
            result.problems.append("too short to judge memory by")
            return
        result.memory_growth = sum(late) / len(late) / (sum(early) / len(early)) - 1
        if result.memory_growth > config.max_memory_growth:
            result.problems.append(f"memory grew by {result.memory_growth:.1%}")


def check_answer(kind: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Raise ValueError where an answer is not what was asked for."""
    choices = answer["choices"]
    texts = [one["text"] if "text" in one else one["message"]["content"] for one in choices]
    if len(choices) != body.get("n", 1):
        raise ValueError(f"{len(choices)} choices")
    if answer["usage"]["completion_tokens"] > len(choices) * body["max_tokens"]:
        raise ValueError(f"{answer['usage']['completion_tokens']} tokens")
    if any(one["finish_reason"] not in ("stop", "length") for one in choices):
        raise ValueError(f"finish reasons {[one['finish_reason'] for one in choices]}")
    is_whole = kind == "schema" and choices[0]["finish_reason"] == "stop"
    if is_whole and json.loads(texts[0]).keys() != {"name", "size"}:
        raise ValueError(f"not of the schema: {texts[0]}")
    if kind == "penalties" and any(word in text for text in texts for word in (" the ", " of ")):
        raise ValueError(f"bad words in {texts}")


def replace_policy(path: Path, contract: Contract, rng: random.Random) -> str:
    """Put an untrained policy, or rubbish, in the place of the policy under a server.

    Returns:
        `good` or `rubbish`.
    """
    if rng.random() < 0.25:
        path.write_bytes(rng.randbytes(rng.randint(0, 20_000)))
        return "rubbish"
    torch.manual_seed(rng.getrandbits(32))
    bounds = torch.from_numpy(contract.low), torch.from_numpy(contract.high)
    module = PolicyModule(*bounds, [32], torch.from_numpy(contract.action_table))

    def reference(rows: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            actions: np.ndarray = module(torch.from_numpy(rows)).numpy()
        return actions

    observations = np.stack([contract.low, contract.high])
    save_policy(
        module, contract, path, reference=reference, observations=observations, provenance={}
    )
    return "good"


def resident_bytes(process_id: int) -> int:
    """Memory of a process and of all below it; shared pages are divided among their users."""
    total = _proportional_bytes(process_id)
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            total += sum(resident_bytes(int(child)) for child in children.read_text().split())
    return total


def _proportional_bytes(process_id: int) -> int:
    try:
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    except OSError:  # ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
