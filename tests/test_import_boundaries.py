"""Who may import whom: a server loads nothing of training, and vLLM stays behind one seam."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("policy", "envs")
TRAINING_ONLY = (
    *("gymnasium", "stable_baselines3", "hydra", "omegaconf", "wandb", "tensorboard"),
    *("matplotlib", "rich", "policy.training", "envs"),
)
ENGINE_FILES = {
    "policy/serving/check.py",
    "policy/serving/counts.py",
    "policy/serving/draft_sampling.py",
    "policy/serving/hook.py",
    "policy/serving/metrics.py",
    "policy/serving/fit.py",
    "policy/serving/plugin.py",
    "policy/serving/proposer.py",
}
SERVING_MAY_IMPORT = (
    *("policy.contract", "policy.step", "policy.observation", "policy.artifact"),
    *("policy.combinations", "policy.compiled"),
    *("policy.controllers", "policy.baselines", "policy.config", "policy.errors"),
    "policy.serving",
)


def source_files(*folders):
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert paths
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(paths)}


def served_files():
    """What an engine may load: all of `policy` but the training."""
    files = source_files("policy").items()
    return {name: path for name, path in files if not name.startswith("policy/training/")}


def imports_of(path):
    """Absolute names of all modules, and of what is imported from them, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def is_within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_relative_imports_are_resolved(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "policy" / "serving" / "new.py"
    path.parent.mkdir(parents=True)
    path.write_text("import envs.x\ndef f():\n    from ..training import ppo\nfrom . import hook\n")
    assert imports_of(path) == {"envs.x", "policy.training.ppo", "policy.serving.hook"}


def test_serving_imports_nothing_that_only_training_needs():
    program = f"""
import sys
import policy.artifact, policy.baselines.fixed, policy.controllers
import policy.serving.hook, policy.serving.plugin
policy.serving.plugin.register()
policy.serving.plugin.register()
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
assert GPUModelRunner.__init__._draftgym_wrapped
for name in {TRAINING_ONLY}:
    if name in sys.modules:
        print(name)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_only_the_seam_imports_the_engine():
    importing = {
        name
        for name, path in served_files().items()
        if any(is_within(imported, ["vllm"]) for imported in imports_of(path))
    }
    assert importing == ENGINE_FILES


@pytest.mark.parametrize("name", served_files())
def test_what_is_served_does_not_know_the_training(name):
    found = {one for one in imports_of(ROOT / name) if is_within(one, TRAINING_ONLY)}
    assert found == set()


@pytest.mark.parametrize("name", source_files("policy/serving"))
def test_serving_stands_on_the_contract_alone(name):
    ours = {one for one in imports_of(ROOT / name) if is_within(one, PACKAGES)}
    assert {one for one in ours if not is_within(one, SERVING_MAY_IMPORT)} == set()


def test_package_markers_are_empty():
    markers = [
        path for name, path in source_files(*PACKAGES).items() if name.endswith("__init__.py")
    ]
    assert len(markers) >= 5
    assert [path for path in markers if path.read_bytes()] == []
