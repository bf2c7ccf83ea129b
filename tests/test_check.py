"""`python -m policy.serving check`: what fits, and what does not, before a server starts."""

from __future__ import annotations

import json

import pytest

from envs.live import engine_config
from policy.contract import Contract
from policy.serving.__main__ import main

from . import live
from .exported import export


@pytest.fixture(scope="module")
def flags():
    """What the tests' server is started with."""
    settings = engine_config(live.MODEL, live.DRAFTERS).engine_args()
    return {
        "--model": settings["model"],
        "--dtype": "float32",
        "--max-model-len": "640",
        "--speculative-config": json.dumps(settings["speculative_config"]),
        "--no-async-scheduling": None,
    }


@pytest.fixture
def policy(tmp_path):
    export(tmp_path / "policy.pt")
    return tmp_path / "policy.pt"


def run(policy, flags, capsys):
    """Exit status and, by what was looked at, whether it fits and what is said."""
    words = [word for pair in flags.items() for word in pair if word is not None]
    status = main(["check", str(policy), *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("ok ", "NO ")]
    found = {}
    for line in lines:
        what, says = line[4:].split(": ", 1)
        found[what] = line.startswith("ok"), says
    return status, found


def test_what_fits_is_said_line_by_line(policy, flags, capsys):
    section = json.dumps({"drafting_policy": {"path": str(policy), "canary": 0.1}})
    status, found = run(policy, {**flags, "--additional-config": section}, capsys)
    assert status == 0
    assert all(fits for fits, _ in found.values())
    described = json.loads(policy.with_suffix(".json").read_text())
    assert described["sha256"] in found["policy"][1]
    assert found["drafts with"][1] == "ngram up to 8, eagle3 up to 4"
    assert found["drafters"][1] == "ngram, suffix, eagle3, up to 8 tokens"
    assert found["model runner"][1] == "V1"
    assert found["drafting_policy"][1] == "is read"


def misfits(tmp_path, flags):
    """Policy, flags, what is wrong, and the words that say so."""
    fine = tmp_path / "policy.pt"
    other, damaged = tmp_path / "other.pt", tmp_path / "damaged.pt"
    export(other, Contract(("none", "draft_model"), (0, 4)))
    export(damaged)
    damaged.write_bytes(damaged.read_bytes()[:500])
    ngram = json.dumps({"method": "ngram", "num_speculative_tokens": 4})

    def section(**settings):
        return {**flags, "--additional-config": json.dumps({"drafting_policy": settings})}

    plain = {name: value for name, value in flags.items() if name != "--speculative-config"}
    return {
        "damaged": (damaged, flags, "policy", "sha256"),
        "missing": (tmp_path / "none.pt", flags, "policy", "give the path"),
        "other drafter": (other, flags, "drafters", "drafts with 'draft_model'"),
        "too short": (
            fine,
            {**flags, "--speculative-config": ngram},
            "drafters",
            "set num_speculative_tokens to 8",
        ),
        "no speculation": (fine, plain, "engine", "add --speculative-config"),
        "misspelt key": (fine, section(pth=str(fine)), "drafting_policy", "did you mean 'path'"),
        "another file": (fine, section(path="x.pt"), "drafting_policy", "names x.pt"),
        "fallback": (
            fine,
            section(path=str(fine), fallback=["suffix", 3]),
            "drafting_policy",
            "no drafter 'suffix'",
        ),
        "no model": (fine, {**flags, "--model": "/nowhere"}, "engine", "vLLM refuses these flags"),
    }


CASES = [
    *("damaged", "missing", "other drafter", "too short", "no speculation", "misspelt key"),
    *("another file", "fallback", "no model"),
]


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_named(case, policy, flags, tmp_path, capsys):
    cases = misfits(tmp_path, flags)
    assert sorted(cases) == sorted(CASES)
    file, given, what, words = cases[case]
    status, found = run(file, given, capsys)
    assert status == 1
    fits, says = found[what]
    assert not fits
    assert words in says


@pytest.mark.parametrize("arguments", [[], ["check"], ["chekc", "policy.pt"], ["check", "--model"]])
def test_a_wrong_command_shows_the_usage(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: python -m policy.serving check" in capsys.readouterr().err
