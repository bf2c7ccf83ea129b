"""vLLM's OpenAI server on loopback, started for a test and ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.live import engine_config

from . import live


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        process: It; its engine is a child.
        port: Where it listens.
        log: What it and its engine wrote.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> str:
        """The body of an answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The decoded body of an answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{body} was refused: {error.read().decode()}") from None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 without any."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.split()[-1])
            for line in self.get("/metrics").splitlines()
            if line.split("{")[0] == name and all(label in line for label in wanted)
        )

    def wait_until_ready(self) -> None:
        """Return when it answers; fail with its log when it ends."""
        for _ in range(420):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def end(self) -> None:
        """End it and its engine."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def serving(log: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """A server of the tests' model and drafters, by the name `target`.

    Args:
        log: File for its output.
        arguments: Further flags.
        environment: Further variables.
    """
    settings = engine_config(live.MODEL, live.DRAFTERS).engine_args()
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", settings["model"], "--served-model-name", "target", "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--no-async-scheduling"),
        *("--max-model-len", "640", "--max-num-seqs", "8", "--block-size", "32"),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        *("--speculative-config", json.dumps(settings["speculative_config"])),
        *arguments,
    ]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that its engine ends with it, whatever happens
        )
        server = Server(process, port, log)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.end()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
