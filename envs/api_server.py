"""vLLM's OpenAI server on loopback, started for a while and ended for sure."""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.errors import EngineError

from .engine import EngineConfig


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
        """The decoded body of an answer.

        Raises:
            EngineError: If the server refuses or fails, with what it says.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise EngineError(f"{body} was refused: {error.read().decode()}") from None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 without any."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.split()[-1])
            for line in self.get("/metrics").splitlines()
            if line.split("{")[0] == name and all(label in line for label in wanted)
        )

    def wait_until_ready(self, seconds: int = 600) -> None:
        """Return when it answers.

        Raises:
            EngineError: With the end of its log, if it ends or does not answer in time.
        """
        until_s = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(1)
        raise EngineError(f"The server does not answer; see its log: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self.log.read_text()[-3000:]

    def end(self) -> None:
        """End it and its engine."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def serving(
    config: EngineConfig, log: Path, flags: Sequence[str] = (), **environment: str
) -> Iterator[Server]:
    """A server of a model by the name `target`, in processes of its own.

    Args:
        config: How the engine is started, its drafting policy included.
        log: File for its output.
        flags: Further flags of `vllm serve`.
        environment: Further variables.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)),
        *_flags_of(config),
        *flags,
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


def _flags_of(config: EngineConfig) -> list[str]:
    """The flags of `vllm serve` for what `config.engine_args` says."""
    flags = []
    for name, value in config.engine_args().items():
        flag = name.replace("_", "-")
        if value is None or name == "disable_log_stats":  # the metrics are wanted
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
