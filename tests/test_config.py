"""Every configuration that ships composes and is complete; a wrong word is named in a sentence."""

import dataclasses
import doctest
import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import policy.config
from policy.config import from_mapping
from policy.errors import ConfigError
from policy.training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
OPTIONS = sorted(
    f"{path.parent.relative_to(CONF)}={path.stem}"
    for path in CONF.glob("*/**/*.yaml")
    # Groups of other scripts, tested in test_collection.py, test_scenario.py, test_tuning.py and
    # test_study.py, test_drafter_config.py.
    if path.parent.name not in ("launcher", "scenario", "contenders", "traces", "drafter_training")
)
OmegaConf.register_new_resolver("repository", lambda: str(ROOT), replace=True)


def composed(*overrides):
    """The run's settings as plain containers, as `scripts/train.py` gets them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = compose("train", overrides=["output_dir=somewhere", *overrides])
    return OmegaConf.to_container(settings, resolve=True)


def build(settings):
    return from_mapping(TrainConfig, settings, where="")


@functools.cache
def defaults():
    return OmegaConf.create(composed())


def changed(*assignments):
    """The default settings with some values changed or added, without Hydra's own checks."""
    settings = OmegaConf.merge(defaults(), OmegaConf.from_dotlist(list(assignments)))
    return OmegaConf.to_container(settings)


def refusal(settings):
    """The sentence that refuses settings; it ends with what to do."""
    with pytest.raises(ConfigError) as refused:
        build(settings)
    said = str(refused.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+[.?]", said)
    return said


def run_train(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def hidden_fields(cls, given, path=""):
    """Dataclass fields, however deep, that the mapping doesn't mention."""
    hints = get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        if spec.name not in given:
            yield path + spec.name
        elif dataclasses.is_dataclass(hints[spec.name]):
            yield from hidden_fields(hints[spec.name], given[spec.name], f"{path}{spec.name}.")


def as_mapping(value):
    """A built configuration back as plain containers."""
    if dataclasses.is_dataclass(value):
        names = [spec.name for spec in dataclasses.fields(value)]
        return {name: as_mapping(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def test_there_are_groups_and_experiments():
    groups = {option.split("=")[0] for option in OPTIONS}
    assert {"experiment", "logger", "drafters", "ppo"} <= groups
    assert groups - {"experiment"} == set(composed()) - {
        *("seed", "checkpoint_every", "resume", "start_from", "imitate"),
        *("counterfactual", "pretrain", "output_dir"),
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_that_ships_composes_builds_and_hides_nothing(option):
    settings = composed(option)
    config = build(settings)
    assert list(hidden_fields(TrainConfig, settings)) == []
    assert as_mapping(config) == settings


def test_an_override_reaches_the_dataclass():
    config = build(
        composed("ppo.learning_rate=2", "workload.concurrency=[3,5]", "drafters=ngram", "seed=7")
    )
    assert (config.ppo.learning_rate, config.seed) == (2.0, 7)
    assert isinstance(config.ppo.learning_rate, float)
    assert config.workload.concurrency == (3, 5)
    assert dict(config.drafters.max_lengths) == {"ngram": 8}
    assert config.drafters.model_drafter is None


@pytest.mark.parametrize(
    ("assignments", "sentence"),
    [
        (["ppo.learnin_rate=1"], "Unknown key 'learnin_rate' in ppo; did you mean"),
        (["sed=1"], "Unknown key 'sed' in the configuration; did you mean 'seed'?"),
        (["drafters.settings.dormant_aftr=1"], "in drafters.settings; did you mean 'dormant_"),
        (["ppo.xyz=1"], "Unknown key 'xyz' in ppo; known: total_timesteps, "),
        (["ppo=null"], "ppo is None; make it a mapping of keys to values."),
        (["seed=one"], "seed is 'one'; make it of type int."),
        (["seed=true"], "seed is True; make it of type int."),
        (["compare.enabled=1"], "compare.enabled is 1; make it of type bool."),
        (["ppo.hidden_layers=64"], "ppo.hidden_layers is 64; make it a list."),
        (["ppo.hidden_layers=[64,a]"], "ppo.hidden_layers[1] is 'a'; make it of type int."),
        (["logger.name=wandp"], "logger.name is 'wandp'; did you mean 'wandb'?"),
        (["logger.name=[1]"], "logger.name is [1]; choose from wandb, tensorboard, none."),
        (["drafters.max_lengths=8"], "drafters.max_lengths is 8; make it a mapping"),
        (["drafters.max_lengths.ngram=8.5"], "drafters.max_lengths.ngram is 8.5; make it of type"),
        (["drafters.model=null"], "drafters.model is missing; give the weights of 'eagle3'."),
        (["ppo.n_steps=100", "ppo.batch_size=64"], "not a multiple of ppo.batch_size 64; change"),
        (["ppo.batch_size=1"], "ppo.batch_size is 1; make it 2 or more."),
        (["ppo.learning_rate=0"], "ppo.learning_rate is 0.0; make it more than 0."),
        (["ppo.gamma=1.5"], "ppo.gamma is 1.5; make it 0 to 1."),
        (["ppo.ent_coef=.nan"], "ppo.ent_coef is nan; make it 0 or more."),
        (["ppo.max_minutes=0"], "make it more than 0, or null for no limit."),
        (["ppo.hidden_layers=[8,0]"], "ppo.hidden_layers is [8, 0]; make every width 1 or more."),
        (["seed=-1"], "seed is -1; make it 0 to 4294967295."),
        (["checkpoint_every=0"], "checkpoint_every is 0; make it 1 or more."),
        (["compare.concurrency=[]"], "compare.concurrency is []; list whole numbers"),
        (["compare.min_tokens=0"], "compare.min_tokens is 0; make it 1 or more."),
        (["compare.output_tokens=0"], "compare.output_tokens is 0; make it 1 or more."),
        (["workload.concurrency=[1,999]"], "A load of 999 requests exceeds model.max_num_seqs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_key_or_value_is_named_with_its_mend(assignments, sentence):
    assert sentence in refusal(changed(*assignments))


def test_a_missing_key_is_named():
    settings = changed()
    del settings["ppo"]["total_timesteps"], settings["ppo"]["gamma"]
    assert refusal(settings) == "ppo has no 'total_timesteps'; give one."
    del settings["ppo"]
    assert refusal(settings) == "the configuration has no 'ppo'; give one."


def test_a_comparison_that_is_switched_off_needs_no_room():
    small = ["model.max_num_seqs=2", "workload.concurrency=[1,2]"]
    assert "exceeds model.max_num_seqs 2" in refusal(changed(*small))
    build(changed(*small, "compare.enabled=false"))


def test_all_settings_are_shown_from_any_folder_and_nothing_is_left_there(tmp_path):
    """T7: the working directory stays."""
    shown = run_train("--cfg", "job", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    settings = OmegaConf.to_container(OmegaConf.create(shown.stdout))
    settings["output_dir"] = "somewhere"
    settings["drafters"]["model"] = settings["drafters"]["model"].replace(
        "${repository:}", f"{ROOT}"
    )
    assert settings == composed()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["ppo.learnin_rate=1"],
            "Unknown key 'ppo.learnin_rate'; did you mean 'ppo.learning_rate'?",
        ),
        (["learning_rate=1"], "Unknown key 'learning_rate'; did you mean 'ppo.learning_rate'?"),
        (["model=smollm3"], "model has no option 'smollm3'; did you mean 'smollm2'?"),
        (["-m", "seed=1,2", "ppo.gama=1"], "Unknown key 'ppo.gama'; did you mean 'ppo.gamma'?"),
        (["hydra.run.dri=x"], "Unknown key 'hydra.run.dri'; did you mean 'hydra.run.dir'?"),
        (["+hydra.run.dri=x", "ppo.gamma=9"], "Unknown key 'hydra.run.dri'; did you mean 'dir'?"),
        (["++hydra.job.env_set.A=1", "ppo.gamma=9"], "ppo.gamma is 9.0; make it 0 to 1."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelt_override_ends_with_one_sentence(arguments, sentence, tmp_path):
    """T6: the nearest key is named."""
    refused = run_train(*arguments, cwd=tmp_path)
    assert refused.returncode != 0
    assert refused.stderr == f"error: {sentence}\n"


def test_the_example_in_the_docstring_holds():
    results = doctest.testmod(policy.config)
    assert results.attempted > 0
    assert results.failed == 0
