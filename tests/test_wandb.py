"""wandb never asks, never phones home from an offline run, and never mixes runs."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from .wandb_file import read_run

ROOT = Path(__file__).resolve().parent.parent
KEY = "0123456789" * 4

PRELUDE = """
import json, logging, os, sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
from policy.errors import ConfigError
from policy.training.config import LoggerConfig
from policy.training.tracking import Tracking

config = LoggerConfig(name="wandb", project="tests", group="sweep", tags=("a", "b"))
"""
TWO_JOBS_AND_A_RESUMED_ONE = """
def train(seed, steps, run_id=None):
    tracking = Tracking(config, Path(f"job-{seed}"), {"seed": seed}, run_id)
    for step in steps:
        tracking.sb3_logger.record("throughput/tok_per_s", 100.0 * seed + step)
        tracking.sb3_logger.record("a text", "is left out")
        tracking.sb3_logger.dump(step)
    tracking.finish()
    return tracking.run_id

Path("job-1").mkdir(), Path("job-2").mkdir(), Path("job-3").mkdir()
first = train(1, [64, 128])
train(2, [64])
print(json.dumps([first, train(3, [192], run_id=first)]))
"""
TRAINING_THAT_FAILS = """
import policy.training.train

def fail(*arguments):
    raise RuntimeError("the engine is gone")

policy.training.train._train_and_export = fail
job = SimpleNamespace(
    output_dir="failed", pretrain=None, resume=None, logger=replace(config, mode="offline")
)
policy.training.train.train(job, {})
"""
WITHOUT_A_LOGIN_ONLINE = """
try:
    Tracking(replace(config, mode="online"), Path("."), {})
except ConfigError as error:
    print(error)
"""
MODES = """
import wandb
from policy.training.tracking import _wandb_mode

modes = {}
for name, variables in json.loads(sys.argv[1]).items():
    os.environ.update(variables)
    modes[name] = _wandb_mode("auto", Path("."))
    wandb.teardown()
    for variable in variables:
        del os.environ[variable]
print(json.dumps(modes))
"""


class RecordingServer(http.server.BaseHTTPRequestHandler):
    """Refuses every request and remembers it."""

    def refuse(self):
        self.server.requests.append(f"{self.command} {self.path}")
        self.send_error(401)

    do_GET = do_POST = do_PUT = do_CONNECT = refuse

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RecordingServer) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(server, tmp_path):
    """Runs a program without a terminal and a login, whose every request goes to the server."""
    address = f"http://127.0.0.1:{server.server_port}"
    home = tmp_path / "home"
    home.mkdir()

    def run(program, *arguments, **variables):
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PRELUDE + program, *arguments],
            cwd=tmp_path,
            env={
                **{"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home)},
                **{"WANDB_BASE_URL": address, "HTTP_PROXY": address, "HTTPS_PROXY": address},
                **variables,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def offline_run(folder):
    (path,) = folder.glob("wandb/offline-run-*")
    return read_run(path)


def test_without_a_login_runs_are_kept_offline_with_one_warning_each(run, server, tmp_path):
    """T9: and nobody is asked."""
    done = run(TWO_JOBS_AND_A_RESUMED_ONE)
    assert done.returncode == 0, done.stderr
    warnings = done.stderr.splitlines()
    assert len(warnings) == 3
    assert all(line.startswith("WARNING wandb has no login here, so the") for line in warnings)
    first, resumed = json.loads(done.stdout)
    one, two, three = (offline_run(tmp_path / f"job-{seed}") for seed in (1, 2, 3))
    assert (one["id"], three["id"]) == (first, resumed)
    assert first == resumed != two["id"]
    assert (one["project"], one["group"], one["tags"]) == ("tests", "sweep", ["a", "b"])
    assert (one["config"]["seed"], two["config"]["seed"]) == (1, 2)
    logged = [
        {key: value for key, value in row.items() if not key.startswith("_")}
        for job in (one, two, three)
        for row in job["history"]
    ]
    assert logged == [
        {"throughput/tok_per_s": 164.0, "global_step": 64},
        {"throughput/tok_per_s": 228.0, "global_step": 128},
        {"throughput/tok_per_s": 264.0, "global_step": 64},
        {"throughput/tok_per_s": 492.0, "global_step": 192},
    ]
    assert one["step_metrics"]["*"] == "global_step"
    assert one["exit_code"] == 0
    assert server.requests == []


def test_a_training_that_fails_ends_its_run_as_failed(run, tmp_path):
    done = run(TRAINING_THAT_FAILS)
    assert done.stderr.rstrip().endswith("RuntimeError: the engine is gone")
    assert offline_run(tmp_path / "failed")["exit_code"] == 1


def test_online_without_a_login_is_refused_and_never_asked_for(run, server):
    done = run(WITHOUT_A_LOGIN_ONLINE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "logger.mode is 'online' but wandb has no login here; call `wandb login`, or set "
        "logger.mode=offline.\n"
    )
    assert server.requests == []


def test_a_login_that_the_server_refuses_ends_with_a_sentence(run, server):
    done = run(WITHOUT_A_LOGIN_ONLINE, WANDB_API_KEY=KEY)
    assert done.stdout.startswith("wandb could not start (")
    assert done.stdout.endswith("set logger.mode=offline or logger=none.\n")
    assert done.stdout.count("\n") == 1
    assert any("graphql" in request for request in server.requests), "nothing was recorded"


def test_auto_is_online_exactly_where_wandb_finds_a_login_or_is_told_so(run, tmp_path):
    def netrc(name, content):
        (tmp_path / name).write_text(content)
        return {"NETRC": str(tmp_path / name)}

    def settings(content):
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "settings").write_text(content)
        return {"WANDB_CONFIG_DIR": str(tmp_path / "config")}

    default = {"WANDB_BASE_URL": "https://api.wandb.ai"}
    login = f"login user password {KEY}"
    cases = {
        "nothing": ({}, "offline"),
        "key": ({"WANDB_API_KEY": KEY}, "online"),
        "key, told offline": ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        "key, told disabled": ({"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "disabled"),
        "nothing, told online": ({"WANDB_MODE": "online"}, "offline"),
        "netrc": (default | netrc("netrc", f"machine api.wandb.ai {login}"), "online"),
        "netrc of another host": (netrc("netrc-2", f"machine example.org {login}"), "offline"),
        "broken netrc": (netrc("netrc-3", "machine"), "offline"),
        "settings file": (
            {"WANDB_API_KEY": KEY} | settings("[default]\nmode = offline"),
            "offline",
        ),
    }
    done = run(MODES, json.dumps({name: variables for name, (variables, _) in cases.items()}))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: mode for name, (_, mode) in cases.items()}
