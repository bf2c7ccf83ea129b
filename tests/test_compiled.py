"""What numba compiled is kept for the next process, and never for other sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources with one small function of its own to compile."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("policy", "envs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    write_sum(tmp_path, adds=1)
    (tmp_path / "envs" / "sum_of.py").write_text(
        "from policy.compiled import compiled\n"
        "from .added import added\n"
        "@compiled\n"
        "def sum_of(x):\n"
        "    return x + added()\n"
    )
    return tmp_path


def write_sum(tree, adds):
    (tree / "envs" / "added.py").write_text(
        f"from policy.compiled import compiled\n@compiled\ndef added():\n    return {adds}\n"
    )


def sum_and_loaded(tree, **environment):
    """What `sum_of(1)` is in a new process, and whether it was loaded instead of compiled."""
    code = "from envs.sum_of import sum_of\nprint(sum_of(1), sum(sum_of.stats.cache_hits.values()))"
    environment = {**os.environ, "PYTHONPATH": str(tree), **environment}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return tuple(int(number) for number in run.stdout.split())


def test_the_next_process_loads_what_one_compiled(tree):
    assert sum_and_loaded(tree) == (2, 0)
    assert sum_and_loaded(tree) == (2, 1)


def test_another_file_that_changed_is_compiled_anew_with_its_callers(tree):
    sum_and_loaded(tree)
    write_sum(tree, adds=2)
    assert sum_and_loaded(tree) == (3, 0)


def test_numbas_own_setting_says_where(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    sum_and_loaded(tree, NUMBA_CACHE_DIR=str(elsewhere))
    assert sum_and_loaded(tree, NUMBA_CACHE_DIR=str(elsewhere)) == (2, 1)
    assert not list(tree.rglob("numba-*"))


def test_a_tree_that_cannot_be_written_to_compiles_every_time(tree):
    (tree / "policy" / "__pycache__").write_text("a file, where the folder would be")
    assert sum_and_loaded(tree) == (2, 0)
    assert sum_and_loaded(tree) == (2, 0)
