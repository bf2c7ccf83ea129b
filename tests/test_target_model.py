"""The target model: the real cached default, local folders, and a fake hub."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from envs.packaged_model import TargetModelError
from envs.target_model import DEFAULT_TARGET_MODEL, default_cache_dir, prepare_target_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def default_folder() -> Path:
    return Path(prepare_target_model(DEFAULT_TARGET_MODEL))


def test_default_is_a_bfloat16_llama_with_a_chat_template(default_folder: Path) -> None:
    config = json.loads((default_folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert "<|im_start|>" in (default_folder / "chat_template.jinja").read_text()


def test_sound_default_is_prepared_within_seconds(default_folder: Path) -> None:
    began = time.monotonic()
    assert prepare_target_model(DEFAULT_TARGET_MODEL) == str(default_folder)
    assert time.monotonic() - began < 10


def test_command_prints_the_default_folder(default_folder: Path) -> None:
    done = run_module()
    assert (done.returncode, done.stdout) == (0, f"{default_folder}\n")


def test_command_says_in_one_sentence_what_is_wrong() -> None:
    done = run_module("nobody/no-such-model", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Target model 'nobody/no-such-model' is no local folder")
    assert done.stderr.count("\n") == 1


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "envs.target_model", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGYM_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("DRAFTGYM_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "draftgym"


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TargetModelError, match="set DRAFTGYM_CACHE"):
        prepare_target_model(DEFAULT_TARGET_MODEL, tmp_path / "file")


def test_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert prepare_target_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["", "missing"])
def test_local_folder_without_a_config_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(TargetModelError, match=r"has no config\.json"):
        prepare_target_model(str(tmp_path / name))


class FakeHub:
    """Stands for ``snapshot_download``: what the cache holds, and what the hub then brings."""

    def __init__(self, folder: Path, cached: tuple[str, ...], served: tuple[str, ...]) -> None:
        self.folder, self.cached, self.served = folder, cached, served
        self.asked_the_hub = False

    def __call__(self, model: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        self.asked_the_hub |= not local_files_only
        names = self.cached if local_files_only else self.served
        if not names:
            raise LocalEntryNotFoundError("The hub cannot be reached.\nMore lines.")
        for name in names:
            shards = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
            (self.folder / name).write_text(json.dumps(shards))
        return str(self.folder)


INDEXED = ("config.json", "model.safetensors.index.json", "1.safetensors")


@pytest.mark.parametrize(
    ("cached", "served", "asks"),
    [
        (("config.json", "model.safetensors"), (), False),
        ((*INDEXED, "2.safetensors"), (), False),
        (INDEXED, ("2.safetensors",), True),
        ((), ("config.json", "model.safetensors"), True),
    ],
)
def test_hub_is_asked_only_for_what_the_cache_lacks(
    cached, served, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path, cached, served)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert prepare_target_model("owner/name") == str(tmp_path)
    assert hub.asked_the_hub is asks


@pytest.mark.parametrize(
    ("served", "reason"),
    [((), "The hub cannot be reached)"), (("README.md",), "no config.json with safetensors")],
)
def test_model_the_hub_does_not_give_is_named(
    served, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(tmp_path, (), served))
    with pytest.raises(TargetModelError) as raised:
        prepare_target_model("owner/name")
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
