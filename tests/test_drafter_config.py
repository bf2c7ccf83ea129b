"""What `scripts/train_drafter.py` can be told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from policy.config import from_mapping
from policy.errors import ConfigError
from policy.training.drafter.acceptance import AcceptanceConfig
from policy.training.drafter.config import DrafterConfig
from policy.training.drafter.run import train_drafter

from .test_config import as_mapping, hidden_fields

ROOT = Path(__file__).resolve().parent.parent
WRONG_VALUES = pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["draft_vocab_size=0"], "draft_vocab_size is 0; make it 1 or more."),
        (["aux_layers=[]"], "aux_layers is []; list numbers of at least 1."),
        (["+fit.epoch=3"], "Unknown key 'epoch' in fit; did you mean 'epochs'?"),
        (["fit.num_positions=0"], "fit.num_positions is 0; make it 1 or more."),
        (["acceptance.kinds=[]"], "acceptance.kinds is empty; name at least one prompt kind."),
        (["acceptance.output_tokens=0"], "acceptance.output_tokens is 0; make it 1 or more."),
    ],
)


def composed(*overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(
            compose("train_drafter", overrides=[*overrides]), resolve=True
        )


@pytest.mark.parametrize("option", ["hour", "quick"])
def test_every_option_composes_builds_and_hides_nothing(option):
    settings = composed(f"drafter_training={option}")
    config = from_mapping(DrafterConfig, settings, where="")
    assert list(hidden_fields(DrafterConfig, settings)) == []
    given = as_mapping(config)
    # A kind of no weight is left out.
    settings["workload"]["kinds"] = {k: w for k, w in settings["workload"]["kinds"].items() if w}
    assert given == settings


def test_the_defaults_of_the_dataclasses_are_those_of_the_hour():
    config = from_mapping(DrafterConfig, composed(), where="")
    plain = DrafterConfig(config.model, config.workload)
    assert (plain.text, plain.fit, plain.acceptance) == (
        config.text,
        config.fit,
        AcceptanceConfig(),
    )


@WRONG_VALUES
def test_a_wrong_value_is_named_with_its_mend(overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        from_mapping(DrafterConfig, composed(*overrides), where="")
    assert str(refused.value) == sentence


def test_a_head_to_compare_with_that_is_not_there_is_refused_at_once(tmp_path):
    settings = composed(f"out={tmp_path}/out", f"compare_with={tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=r"nowhere and has no model\.safetensors; give the"):
        train_drafter(from_mapping(DrafterConfig, settings, where=""), settings)
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_override_ends_with_one_sentence(tmp_path):
    refused = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train_drafter.py"), "fit.epoch=3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 1
    assert refused.stderr == "error: Unknown key 'fit.epoch'; did you mean 'fit.epochs'?\n"
    assert list(tmp_path.iterdir()) == []
