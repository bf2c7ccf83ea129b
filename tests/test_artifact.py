"""The exported policy: what goes in comes out, and nothing else is accepted."""

import json
import logging
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import policy.artifact
from policy.artifact import hash_file, load_policy, save_policy
from policy.contract import Contract
from policy.errors import ArtifactError
from policy.module import PolicyModule

CONTRACT = Contract(("none", "ngram", "eagle3"), (0, 8, 4), "request")
PROVENANCE = {"seed": 3, "steps": 1000, "target_model": "smollm2"}


def make_module(contract=CONTRACT, layers=(16, 16), seed=0):
    torch.manual_seed(seed)
    low, high = torch.from_numpy(contract.low), torch.from_numpy(contract.high)
    table = torch.from_numpy(contract.action_table)
    module = PolicyModule(low, high, layers, table)
    with torch.no_grad():
        module.action.weight.mul_(5)  # decisions that vary
    return module


def observations_of(count=1000, contract=CONTRACT, seed=0):
    share = np.random.default_rng(seed).random((count, len(contract.fields)))
    span = contract.high.astype(np.float64) - contract.low
    return (contract.low + share * span).astype(np.float32)


def decide_in_numpy(module, observations, contract=CONTRACT):
    """The same network in float64, without torch."""
    low, high = contract.low.astype(np.float64), contract.high.astype(np.float64)
    clipped = np.clip(observations, low, high)
    state = {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}
    values = 2 * (clipped - low) / (high - low) - 1
    for layer in module.hidden[::2]:
        name = next(name for name, one in module.named_modules() if one is layer)
        values = np.tanh(values @ state[f"{name}.weight"].T + state[f"{name}.bias"])
    logits = values @ state["action.weight"].T + state["action.bias"]
    pairs = [(0, 0)]
    for drafter, longest in enumerate(contract.max_lengths):
        pairs += [(drafter, 1 + shorter) for shorter in range(longest)]
    return np.array([pairs[choice] for choice in logits.argmax(1)])


def decide(module, observations):
    with torch.inference_mode():
        return module(torch.from_numpy(observations)).numpy()


def save(path, module=None, contract=CONTRACT, observations=None, reference=None, **changes):
    module = make_module(contract) if module is None else module
    observations = observations_of(200, contract) if observations is None else observations
    reference = reference or (lambda rows: decide(module, rows))
    arguments = {"reference": reference, "observations": observations, "provenance": PROVENANCE}
    return save_policy(module, contract, path, **{**arguments, **changes})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "policy.pt"
    save(path)
    return path


@pytest.fixture
def policy_file(exported, tmp_path):
    """A copy of an exported policy, with its description, to be damaged."""
    shutil.copy(exported.with_suffix(".json"), tmp_path)
    return Path(shutil.copy(exported, tmp_path))


def refused(path, **arguments):
    """The sentence that refuses a policy."""
    with pytest.raises(ArtifactError) as refusal:
        load_policy(path, **arguments)
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


def rewrite(path, changed):
    """Write the archive anew with some members changed (None: left out), and no description."""
    path.with_suffix(".json").unlink()
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            content = changed.get(name.split("/extra/")[-1], content)
            if content is not None:
                archive.writestr(name, content)


def without_torchscript(monkeypatch):
    def fail(*arguments, **keywords):
        raise RuntimeError("TorchScript is\ngone")

    monkeypatch.setattr(torch.jit, "load", fail)


@pytest.mark.parametrize(
    ("contract", "layers"),
    [
        (CONTRACT, (16, 16)),
        (Contract(("none", "ngram"), (0, 16)), (64,)),
        (Contract(("none", "eagle3"), (0, 4)), ()),
        (Contract(("none",), (0,)), (4,)),
        (CONTRACT, (9, 8, 7, 6, 5, 4, 3)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "+".join(value.drafters),
)
def test_a_saved_policy_decides_as_before_with_and_without_torchscript(
    contract, layers, tmp_path, monkeypatch
):
    module = make_module(contract, layers)
    observations = observations_of(500, contract)
    sha256 = save(tmp_path / "policy.pt", module, contract)
    loaded = load_policy(tmp_path / "policy.pt")
    assert (loaded.contract, loaded.sha256) == (contract, sha256)
    assert loaded.path == tmp_path / "policy.pt"
    actions = decide(loaded.module, observations)
    assert (actions.shape, actions.dtype) == ((500, 2), np.int64)
    np.testing.assert_array_equal(actions, decide(module, observations))
    without_torchscript(monkeypatch)
    plain = load_policy(tmp_path / "policy.pt")
    np.testing.assert_array_equal(decide(plain.module, observations), actions)


def test_without_torchscript_the_plain_weights_serve_and_the_log_says_so(
    exported, monkeypatch, caplog
):
    """S4: TorchScript may go; the weights beside it decide the same."""
    assert isinstance(load_policy(exported).module, torch.jit.ScriptModule)
    without_torchscript(monkeypatch)
    with caplog.at_level(logging.INFO, logger="policy.artifact"):
        assert isinstance(load_policy(exported).module, PolicyModule)
    assert "using its plain weights" in caplog.text


def test_the_module_is_the_documented_network(exported):
    observations = observations_of(1000)
    module = load_policy(exported).module
    expected = decide_in_numpy(make_module(), observations)
    assert len(np.unique(expected, axis=0)) > 8, "the decisions hardly vary"
    np.testing.assert_array_equal(decide(module, observations), expected)


@pytest.mark.parametrize("shift", [1000, -1000])
def test_values_out_of_bounds_are_clipped_inside_the_module(exported, shift):
    """T2: what turns an observation into decisions is all in the module."""
    module = load_policy(exported).module
    original = observations_of(1000)
    shifted = original.copy()
    columns = np.arange(1000) % len(CONTRACT.fields)
    shifted[np.arange(1000), columns] += shift
    clipped = np.clip(shifted, CONTRACT.low, CONTRACT.high)
    np.testing.assert_array_equal(decide(module, shifted), decide(module, clipped))
    np.testing.assert_array_equal(decide(module, shifted), decide_in_numpy(make_module(), clipped))
    assert (decide(module, shifted) != decide(module, original)).any(), "the shift had no effect"


def test_the_description_tells_hash_contract_and_provenance(exported):
    described = json.loads(exported.with_suffix(".json").read_text())
    assert described["sha256"] == hash_file(exported)
    assert Contract.from_dict(described["contract"]) == CONTRACT
    assert described["provenance"] == PROVENANCE
    assert sorted(path.name for path in exported.parent.iterdir()) == ["policy.json", "policy.pt"]


def test_one_differing_decision_refuses_the_export_and_leaves_nothing(tmp_path):
    module = make_module()

    def differs_once(rows):
        actions = decide(module, rows).copy()
        actions[137, 1] += 1
        return actions

    with pytest.raises(ArtifactError, match=r"differ on 1 of 200 .* is number 137"):
        save(tmp_path / "new" / "policy.pt", module, reference=differs_once)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"observations": observations_of(0)},
        {"reference": lambda rows: np.zeros(len(rows), np.int64)},
        {"reference": lambda rows: np.zeros((1, 2), np.int64)},
        {"module": make_module(Contract(("none", "ngram", "eagle3"), (0, 8, 3)))},
        {"module": make_module(Contract(("none", "ngram"), (0, 8)))},
    ],
    ids=["no observation", "flat actions", "one action", "other bounds", "other drafters"],
)
def test_what_cannot_be_compared_is_not_exported(arguments, tmp_path):
    if "module" in arguments:
        arguments = {**arguments, "reference": lambda rows: np.zeros((len(rows), 2), np.int64)}
        arguments["observations"] = observations_of(5)[:, : len(arguments["module"].low)]
    with pytest.raises(ArtifactError, match=r"^[^\n]+; [^\n]+\.$"):
        save(tmp_path / "policy.pt", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"^Cannot write .*file/policy\.pt .*; choose a"):
        save(tmp_path / "file" / "policy.pt")
    (tmp_path / "policy.pt").mkdir()
    with pytest.raises(ArtifactError, match=r"^Cannot write .*policy\.pt .*; choose a"):
        save(tmp_path / "policy.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "policy.pt"]


def test_a_provenance_that_is_no_json_leaves_the_earlier_policy_as_it_was(policy_file):
    before = hash_file(policy_file)
    with pytest.raises(TypeError):
        save(policy_file, make_module(seed=1), provenance={"when": object()})
    assert load_policy(policy_file).sha256 == before
    assert len(list(policy_file.parent.iterdir())) == 2


def test_a_missing_policy_is_named(tmp_path):
    assert "No policy at" in refused(tmp_path / "policy.pt")
    assert "No policy at" in refused(tmp_path)


def test_another_file_than_the_described_or_pinned_one_is_refused(policy_file):
    actual = hash_file(policy_file)
    assert load_policy(policy_file, sha256=actual.upper()).sha256 == actual
    assert "not the expected 000000000000…" in refused(policy_file, sha256="0" * 64)
    described = policy_file.with_suffix(".json")
    described.write_text(described.read_text().replace(actual, "1" * 64))
    assert "not the expected 111111111111…" in refused(policy_file)
    assert load_policy(policy_file, sha256=actual).sha256 == actual, "the pin wins"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '"sha256"', b"\xff\xfe"])
def test_a_broken_description_is_named(policy_file, text):
    content = text if isinstance(text, bytes) else text.encode()
    policy_file.with_suffix(".json").write_bytes(content)
    assert "policy.json is not a policy description" in refused(policy_file)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_policy_is_refused(policy_file, share):
    policy_file.with_suffix(".json").unlink()
    content = policy_file.read_bytes()
    policy_file.write_bytes(content[: int(share * len(content))])
    assert "is damaged or not an exported policy" in refused(policy_file)


def test_flipped_bytes_are_refused_or_harmless(policy_file):
    """Without a known hash: no byte may change a decision or raise anything else."""
    policy_file.with_suffix(".json").unlink()
    content = policy_file.read_bytes()
    observations = observations_of(50)
    expected = decide(load_policy(policy_file).module, observations)
    num_refused = 0
    for position in np.random.default_rng(0).permutation(len(content))[:200]:
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        policy_file.write_bytes(damaged)
        try:
            module = load_policy(policy_file).module
        except ArtifactError:
            num_refused += 1
        else:
            np.testing.assert_array_equal(decide(module, observations), expected)
    assert num_refused > 20


def test_a_file_that_is_no_archive_is_refused(policy_file):
    policy_file.with_suffix(".json").unlink()
    torch.save({"weights": torch.zeros(3)}, policy_file, _use_new_zipfile_serialization=False)
    assert "is damaged or not an exported policy" in refused(policy_file)


@pytest.mark.parametrize("missing", ["contract.json", "weights.safetensors"])
def test_torchscript_that_draftgym_did_not_export_is_refused(policy_file, missing):
    rewrite(policy_file, {missing: None})
    assert "carries no contract" in refused(policy_file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(contract_version=9), "speaks contract version 9, this draftgym 1"),
        (lambda d: d["fields"].reverse(), "Field 0 of the policy is 'request_last_emitted_tokens'"),
        (lambda d: d.pop("granularity"), "carries no granularity"),
        (lambda d: d.update(drafters=["none", "eagle3", "ngram"]), "Field 6 of the policy is"),
    ],
    ids=["version", "reordered", "incomplete", "drafters reordered"],
)
def test_a_policy_of_another_contract_is_refused(policy_file, change, sentence):
    """T11: an older policy never meets fields in another order."""
    stored = CONTRACT.to_dict()
    change(stored)
    rewrite(policy_file, {"contract.json": json.dumps(stored)})
    assert sentence in refused(policy_file)


@pytest.mark.parametrize("content", ["[]", "3", "null", "{", b"\xff"])
def test_a_contract_that_cannot_be_read_is_refused(policy_file, content):
    rewrite(policy_file, {"contract.json": content})
    refused(policy_file)


def test_weights_of_another_contract_are_refused(policy_file, tmp_path):
    other = Contract(("none", "ngram", "eagle3"), (0, 8, 3), "request")
    rewrite(policy_file, {"contract.json": json.dumps(other.to_dict())})
    assert "do not fit its contract" in refused(policy_file)
    rewrite_target = tmp_path / "again.pt"
    save(rewrite_target)
    rewrite(rewrite_target, {"weights.safetensors": b"rubbish"})
    assert "is damaged" in refused(rewrite_target)


def test_nothing_is_unpickled(exported, monkeypatch):
    """S17: a policy file from a stranger."""

    def refuse(*arguments, **keywords):
        raise AssertionError("something was unpickled")

    for module, name in [
        (torch, "load"),
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (pickle, "_Unpickler"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    assert load_policy(exported).contract == CONTRACT
    without_torchscript(monkeypatch)
    assert load_policy(exported).contract == CONTRACT


def test_a_contract_is_checked_before_torchscript_runs(policy_file, monkeypatch):
    rewrite(policy_file, {"contract.json": json.dumps(CONTRACT.to_dict() | {"fields": []})})

    def run(*arguments, **keywords):
        raise AssertionError("TorchScript was loaded")

    monkeypatch.setattr(policy.artifact.torch.jit, "load", run)
    assert "The policy reads 0 fields" in refused(policy_file)


def test_the_settings_of_the_drafters_ride_along(tmp_path):
    settings = {"ngram_min_match": 3, "ngram_max_match": 7}
    save(tmp_path / "policy.pt", drafter_settings=settings)
    assert load_policy(tmp_path / "policy.pt").drafter_settings == settings


def test_a_policy_that_says_nothing_of_its_drafters_still_loads(policy_file):
    rewrite(policy_file, {"drafter_settings.json": None})
    assert load_policy(policy_file).drafter_settings == {}
