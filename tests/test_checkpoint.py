"""A training goes on from a checkpoint as if it had never stopped."""

import json
import random
import re
import shutil

import numpy as np
import pytest
import torch

import policy.training.checkpoint
from policy.errors import ConfigError
from policy.training.callbacks import CheckpointCallback
from policy.training.checkpoint import find_checkpoint, restore, save_checkpoint
from policy.training.config import PpoConfig
from policy.training.ppo import build_ppo, make_vec_env

from .table_engine import make_env
from .table_engine import one_thread as one_thread

SETTINGS = {"n_steps": 64, "batch_size": 32, "n_epochs": 3, "hidden_layers": (16,)}
RUN_STATE = {"run_id": "abc", "config": {"seed": 3}}


def make_learner(seed=3, **settings):
    config = PpoConfig(total_timesteps=256, **{**SETTINGS, **settings})
    return build_ppo(make_vec_env(make_env()), config, seed)


def learn(model, steps, folder, every=128):
    saver = CheckpointCallback(folder, every, RUN_STATE)
    model.learn(steps, saver, reset_num_timesteps=False)
    return saver


def mix_up_the_generators():
    """As if another process had begun: no generator is where it was."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def tensors_of(model):
    """Parameters of networks and optimizer, by name."""
    optimizer = model.policy.optimizer.state_dict()["state"]
    moments = {
        f"{index}.{name}": value for index, one in optimizer.items() for name, value in one.items()
    }
    return {**model.policy.state_dict(), **moments}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A training of 256 steps that saved at 128, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    model = make_learner()
    learn(model, 256, folder).save()
    return model, folder


@pytest.fixture
def folder(straight, tmp_path):
    """A copy of the checkpoints, to be damaged."""
    return shutil.copytree(straight[1], tmp_path / "checkpoints")


def refused(path, model=None):
    """The sentence that refuses a checkpoint."""
    with pytest.raises(ConfigError) as refusal:
        restore(find_checkpoint(path), model or make_learner())
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


def test_a_resumed_training_ends_bit_for_bit_as_one_that_never_stopped(straight, tmp_path):
    unbroken, folder = straight
    mix_up_the_generators()
    resumed = make_learner(seed=11)
    before = tensors_of(unbroken)
    assert any(
        not torch.equal(value, before[name]) for name, value in resumed.policy.state_dict().items()
    )
    restore(find_checkpoint(folder / "step_00000128"), resumed)
    assert resumed.num_timesteps == 128
    learn(resumed, 128, tmp_path)
    after = tensors_of(resumed)
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (resumed.num_timesteps, resumed._n_updates) == (256, unbroken._n_updates)


def test_a_resumed_training_knows_the_machine_as_before(straight):
    unbroken, folder = straight
    resumed = make_learner(seed=11)
    restore(find_checkpoint(folder), resumed)
    (ours,), (theirs,) = (model.env.get_attr("unwrapped") for model in (resumed, unbroken))
    assert ours.references == theirs.references
    assert ours.cost_model.state_dict() == theirs.cost_model.state_dict() != {}
    assert ours.np_random.bit_generator.state == theirs.np_random.bit_generator.state


def test_the_latest_checkpoint_of_a_run_is_found_and_tells_its_run(straight, tmp_path):
    _, folder = straight
    assert find_checkpoint(folder).folder.name == "step_00000256"
    assert find_checkpoint(folder / "step_00000128").state["num_timesteps"] == 128
    shutil.copytree(folder, tmp_path / "run" / "checkpoints")
    found = find_checkpoint(tmp_path / "run")
    assert found.folder == tmp_path / "run" / "checkpoints" / "step_00000256"
    assert found.run_state == RUN_STATE


def test_only_whole_checkpoints_remain_in_the_folder(straight):
    names = sorted(path.name for path in straight[1].iterdir())
    assert names == ["step_00000128", "step_00000256"]


def test_a_missing_checkpoint_is_named(tmp_path):
    assert "No checkpoint at" in refused(tmp_path)
    assert "No checkpoint at" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"{}", b'{"num_timesteps": 256}'],
)
def test_a_damaged_state_is_named(folder, content):
    (folder / "step_00000256" / "state.json").write_bytes(content)
    assert "step_00000256 is damaged" in refused(folder)
    assert find_checkpoint(folder / "step_00000128").state["num_timesteps"] == 128


@pytest.mark.parametrize("key", ["env", "generators"])
@pytest.mark.parametrize("value", [None, {}, [], 3])
def test_a_state_with_rubbish_inside_is_named(folder, key, value):
    path = folder / "step_00000256" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert "step_00000256 is damaged" in refused(folder)


@pytest.mark.parametrize("share", [None, 0.0, 0.3, 0.7, 0.999])
def test_a_missing_or_truncated_network_is_named(folder, share):
    path = folder / "step_00000256" / "model.zip"
    content = path.read_bytes()
    path.unlink()
    if share is not None:
        path.write_bytes(content[: int(share * len(content))])
    assert "step_00000256 is damaged" in refused(folder)


def test_a_checkpoint_of_another_network_is_refused(folder):
    other = make_learner(hidden_layers=(8,))
    assert "is of another network or contract" in refused(folder, other)


@pytest.mark.parametrize("dies_in", ["state", "rename"])
def test_a_killed_save_leaves_the_earlier_checkpoints_whole(folder, dies_in, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*arguments, **keywords):
        raise Killed

    model = make_learner()
    restore(find_checkpoint(folder), model)
    model.num_timesteps = 300
    if dies_in == "state":
        monkeypatch.setattr(policy.training.checkpoint, "_generator_states", die)
    else:
        monkeypatch.setattr(policy.training.checkpoint.Path, "rename", die)
    with pytest.raises(Killed):
        save_checkpoint(folder, model, RUN_STATE)
    monkeypatch.undo()
    assert find_checkpoint(folder).folder.name == "step_00000256"
    restore(find_checkpoint(folder), make_learner())
    saved = save_checkpoint(folder, model, RUN_STATE)
    assert find_checkpoint(folder).folder == saved
    assert len(list(folder.iterdir())) == 3


def test_saving_the_same_step_again_replaces_it(folder):
    model = make_learner(seed=5)
    model.num_timesteps = 256
    save_checkpoint(folder, model, {"run_id": "other"})
    assert find_checkpoint(folder).run_state == {"run_id": "other"}
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000128", "step_00000256"]
