"""A new policy under a running server: taken when it fits, refused when it does not."""

import logging
import os
import shutil
import threading

import numpy as np
import pytest

from policy.artifact import load_policy
from policy.contract import Contract
from policy.serving.reload import ReloadedPolicy

from .exported import CONTRACT, export

OBSERVATION = np.repeat(CONTRACT.low[None], 1, axis=0)


@pytest.fixture
def served(tmp_path):
    """A policy that drafts 8 n-gram tokens, and the folder it lies in."""
    export(tmp_path / "policy.pt", action=(1, 8))
    policy = ReloadedPolicy(load_policy(tmp_path / "policy.pt"))
    look_twice(policy)
    return policy, tmp_path


def look_twice(policy):
    policy.look()
    policy.look()


def action_of(policy):
    return policy.decide(None, OBSERVATION).tolist()


def test_a_new_policy_is_taken_once_it_has_stopped_changing(served):
    policy, folder = served
    assert action_of(policy) == [[1, 8]]
    assert not policy.num_reloads, "the file it began with is not new"
    sha256 = export(folder / "policy.pt", action=(2, 3))
    policy.look()
    assert action_of(policy) == [[1, 8]], "it might still be written to"
    policy.look()
    assert action_of(policy) == [[2, 3]]
    assert policy.artifact.sha256 == sha256
    look_twice(policy)
    assert policy.num_reloads == {"loaded": 1}


def rubbish(folder):
    (folder / "policy.pt").write_bytes(os.urandom(5000))


def rubbish_without_a_description(folder):
    (folder / "policy.json").unlink()
    rubbish(folder)


def truncated(folder):
    (folder / "policy.json").unlink()
    (folder / "policy.pt").write_bytes((folder / "policy.pt").read_bytes()[:3000])


def missing(folder):
    (folder / "policy.pt").unlink()


def a_folder(folder):
    (folder / "policy.pt").unlink()
    (folder / "policy.pt").mkdir()


def other_drafters(folder):
    export(folder / "policy.pt", Contract(("none", "ngram"), (0, 8)))


def another_granularity(folder):
    export(folder / "policy.pt", Contract(CONTRACT.drafters, CONTRACT.max_lengths, "request"))


def not_as_described(folder):
    description = (folder / "policy.json").read_text()
    export(folder / "policy.pt", action=(2, 1))
    (folder / "policy.json").write_text(description)


@pytest.mark.parametrize(
    "spoil",
    [
        rubbish,
        rubbish_without_a_description,
        truncated,
        missing,
        a_folder,
        other_drafters,
        another_granularity,
        not_as_described,
    ],
)
def test_a_file_that_does_not_fit_is_refused_once_and_the_policy_stays(served, spoil, caplog):
    policy, folder = served
    sha256 = policy.artifact.sha256
    spoil(folder)
    for _ in range(5):
        policy.look()
        assert action_of(policy) == [[1, 8]]
    assert policy.num_reloads == {"refused": 1}
    assert policy.artifact.sha256 == sha256
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert f"policy {sha256[:12]}… serves on" in line
    assert "\n" not in line


def test_a_good_file_after_a_refused_one_is_taken(served):
    policy, folder = served
    rubbish(folder)
    look_twice(policy)
    export(folder / "policy.pt", action=(2, 1))
    look_twice(policy)
    assert action_of(policy) == [[2, 1]]
    assert policy.num_reloads == {"refused": 1, "loaded": 1}


def test_the_same_policy_copied_again_is_no_reload(served):
    policy, folder = served
    shutil.copy(folder / "policy.pt", folder / "copy.pt")
    os.replace(folder / "copy.pt", folder / "policy.pt")
    look_twice(policy)
    assert not policy.num_reloads


def test_a_watched_file_is_taken_while_decisions_go_on(served):
    policy, folder = served
    policy.watch(0.01)
    export(folder / "policy.pt", action=(2, 4))
    seen = [action_of(policy)]
    for _ in range(3000):
        seen.append(action_of(policy))
        if seen[-1] != seen[0]:
            break
        threading.Event().wait(0.01)
    assert seen[0] == [[1, 8]]
    assert seen[-1] == [[2, 4]]
