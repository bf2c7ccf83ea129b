"""Training on traces: to the end, interrupted, in two stages; and it finds what is best."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from stable_baselines3.common.save_util import load_from_zip_file

import policy.training.train
from envs.draft_env import EpisodeConfig
from envs.draft_vec_env import DraftVecEnv
from envs.request_vec_env import RequestVecEnv
from envs.simulator_state import TraceEngineConfig
from envs.trace_workload import TraceWorkload
from policy.artifact import load_policy
from policy.config import from_mapping
from policy.cost_model import CostModel
from policy.errors import DraftgymError
from policy.training.checkpoint import find_checkpoint, start_from
from policy.training.config import PpoConfig, TrainConfig
from policy.training.ppo import build_ppo, to_module
from policy.training.train import train

from .synthetic_traces import PRICES_S, make_cost_model, make_traces
from .table_engine import one_thread as one_thread

ROOT = Path(__file__).resolve().parent.parent
TRACES = make_traces(num_requests=16)
OmegaConf.register_new_resolver("repository", lambda: str(ROOT), replace=True)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """A small training on a trace file and the cost model beside it."""
    folder = tmp_path_factory.mktemp("traces")
    TRACES.write(folder / "t.parquet")
    (folder / "t.json").write_text(json.dumps({"cost_model": make_cost_model().state_dict()}))
    settings = {
        "env": "trace",
        "env.work_tokens_per_req": 8,
        "env.trace.files": f"[{folder / 't.parquet'}]",
        "env.trace.cost_model": folder / "t.json",
        "env.trace.num_envs": 4,
        "ppo.total_timesteps": 256,
        "ppo.n_steps": 16,
        "ppo.batch_size": 32,
        "ppo.n_epochs": 2,
        "ppo.hidden_layers": "[8]",
        "workload.output_tokens": 40,
        "workload.concurrency": "[1,2]",
        "checkpoint_every": 128,
        "logger": "none",
        "compare.enabled": "false",
    }
    return [f"{name}={value}" for name, value in settings.items()]


def config_of(*overrides):
    """The settings, as `scripts/train.py` gets them, and the configuration made of them."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = compose("train", overrides=list(overrides))
    resolved = OmegaConf.to_container(settings, resolve=True)
    return from_mapping(TrainConfig, resolved, where=""), resolved


def trained(folder, *overrides):
    return train(*config_of(f"output_dir={folder}", *overrides))


def command(folder, *overrides):
    script = str(ROOT / "scripts" / "train.py")
    return [sys.executable, script, f"hydra.run.dir={folder}", *overrides]


def parameters_of(path):
    """Networks of a run's latest checkpoint."""
    checkpoint = find_checkpoint(path)
    return load_from_zip_file(checkpoint.folder / "model.zip", load_data=False)[1]["policy"]


def differences(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def weights_of(path):
    return {name: value.clone() for name, value in load_policy(path).module.state_dict().items()}


@pytest.fixture(scope="module")
def straight(overrides, tmp_path_factory):
    """A training of 256 steps that saved at 128."""
    return trained(tmp_path_factory.mktemp("straight"), *overrides)


def test_a_training_leaves_policy_checkpoints_and_metrics(straight):
    assert not straight.interrupted
    artifact = load_policy(straight.policy)
    assert artifact.contract == TRACES.contract()
    described = json.loads(straight.policy.with_suffix(".json").read_text())
    assert described["provenance"]["num_timesteps"] == 256
    assert differences(
        weights_of(straight.policy), weights_of(straight.folder / "untrained" / "policy.pt")
    )
    names = sorted(path.name for path in (straight.folder / "checkpoints").iterdir())
    assert names == ["step_00000128", "step_00000256"]
    with (straight.folder / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["time/total_timesteps"]) for row in rows] == [64, 128, 192, 256]
    for row in rows:
        assert 0.1 < float(row["throughput/speedup_over_none"]) < 10
        shares = [float(row[f"actions/share_{drafter}"]) for drafter in ("none", "ngram", "eagle3")]
        assert sum(shares) == pytest.approx(1)


def test_a_resumed_training_ends_as_one_that_never_stopped(straight, overrides, tmp_path):
    half = straight.folder / "checkpoints" / "step_00000128"
    resumed = trained(tmp_path / "resumed", *overrides, f"resume={half}", "seed=5")
    assert differences(parameters_of(resumed.folder), parameters_of(straight.folder)) == []
    assert differences(weights_of(resumed.policy), weights_of(straight.policy)) == []
    other = trained(tmp_path / "other", *overrides, "seed=1")
    assert differences(parameters_of(other.folder), parameters_of(straight.folder))


PER_REQUEST = (
    "env.granularity=request",
    "env.trace.seats_per_load=4",
    "ppo.final_learning_rate=0.0",
    "imitate={rule: {name: fixed, drafter: ngram, num_speculative_tokens: 3}, rows_per_load: 64, "
    "epochs: 20, learning_rate: 0.01, critic_rollouts: 1}",
)


def test_a_training_in_which_every_request_decides_can_be_resumed(overrides, tmp_path):
    whole = trained(tmp_path / "whole", *overrides, *PER_REQUEST)
    artifact = load_policy(whole.policy)
    assert artifact.contract == TRACES.contract(granularity="request")
    with (whole.folder / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert float(rows[0]["actions/share_ngram"]) > 0.5, "it began otherwise than the rule"
    for row in rows:
        for load in (1, 2):
            assert 0.1 < float(row[f"throughput/speedup_at_{load}"]) < 10
    half = whole.folder / "checkpoints" / "step_00000128"
    resumed = trained(tmp_path / "resumed", *overrides, *PER_REQUEST, f"resume={half}")
    assert differences(parameters_of(resumed.folder), parameters_of(whole.folder)) == []


def test_advantages_that_are_known_teach_otherwise_and_can_be_resumed(overrides, tmp_path):
    guessed = (*PER_REQUEST, "imitate=null")
    known = (*guessed, "counterfactual={decay: 0.8, prior_steps: 4}")
    whole = trained(tmp_path / "whole", *overrides, *known)
    half = whole.folder / "checkpoints" / "step_00000128"
    resumed = trained(tmp_path / "resumed", *overrides, *known, f"resume={half}")
    assert differences(parameters_of(resumed.folder), parameters_of(whole.folder)) == []
    estimated = trained(tmp_path / "estimated", *overrides, *guessed)
    assert differences(parameters_of(estimated.folder), parameters_of(whole.folder))


def test_a_second_stage_begins_with_the_weights_of_the_first(overrides, tmp_path, monkeypatch):
    """As `experiment=curriculum`, whose second stage is live: here both stages are on traces."""
    config, resolved = config_of(f"output_dir={tmp_path}", *overrides)
    curriculum, _ = config_of("output_dir=nowhere", "experiment=curriculum")
    assert curriculum.env.trace is None
    assert curriculum.pretrain.env.trace is not None
    ppo = replace(config.ppo, total_timesteps=128, gamma=0.5)
    pretrain = replace(curriculum.pretrain, env=config.env, ppo=ppo, checkpoint_every=64)
    begun = []

    def learn(config, resolved, folder, model, *arguments):
        weights = {name: value.clone() for name, value in model.policy.state_dict().items()}
        begun.append((folder, model.gamma, model.num_timesteps, weights))
        return really_learn(config, resolved, folder, model, *arguments)

    really_learn = policy.training.train._learn
    monkeypatch.setattr(policy.training.train, "_learn", learn)
    result = train(replace(config, pretrain=pretrain, seed=4), resolved)
    (first, first_gamma, *_), (second, second_gamma, num_timesteps, weights) = begun
    assert (first, second) == (tmp_path / "pretrain", tmp_path)
    assert (first_gamma, second_gamma) == (0.5, config.ppo.gamma)
    assert num_timesteps == 0
    assert find_checkpoint(tmp_path / "pretrain").state["num_timesteps"] == 128
    assert differences(weights, parameters_of(tmp_path / "pretrain")) == []
    assert (
        differences(
            weights_of(tmp_path / "pretrain" / "policy.pt"),
            weights_of(tmp_path / "untrained" / "policy.pt"),
        )
        == []
    )
    assert result.policy == tmp_path / "policy.pt"
    assert differences(weights, parameters_of(tmp_path / "checkpoints"))


def test_a_start_from_a_checkpoint_takes_its_weights_and_nothing_else(straight, overrides):
    config, _ = config_of("output_dir=nowhere", *overrides)
    replayed = policy.training.train._read_traces(config)
    vec_env = policy.training.train._make_vec_env(config, replayed)
    model = build_ppo(vec_env, config.ppo, seed=9)
    generators = vec_env.state_dict()
    start_from(find_checkpoint(straight.folder), model)
    assert differences(model.policy.state_dict(), parameters_of(straight.folder)) == []
    assert (model.num_timesteps, model._n_updates) == (0, 0)
    assert vec_env.state_dict() == generators
    assert model.policy.optimizer.state_dict()["state"] == {}
    wider = build_ppo(vec_env, replace(config.ppo, hidden_layers=(16,)), seed=9)
    with pytest.raises(DraftgymError, match=r"another network or contract; [^\n]+\."):
        start_from(find_checkpoint(straight.folder), wider)
    vec_env.close()


def test_a_signal_saves_and_the_training_goes_on_from_there(overrides, tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, *overrides, "ppo.total_timesteps=100000000", "ppo.max_minutes=null"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        began = time.monotonic()
        progress = folder / "progress.csv"
        while not progress.exists() or progress.read_text().count("\n") < 3:
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() - began < 180
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    assert f"resume={folder}" in output
    assert "Traceback" not in output
    assert load_policy(folder / "policy.pt")
    num_timesteps = find_checkpoint(folder).state["num_timesteps"]
    resumed = trained(
        tmp_path / "resumed",
        *overrides,
        f"resume={folder}",
        f"ppo.total_timesteps={num_timesteps + 128}",
    )
    assert resumed.policy == tmp_path / "resumed" / "policy.pt"
    described = json.loads(resumed.policy.with_suffix(".json").read_text())
    assert num_timesteps + 128 <= described["provenance"]["num_timesteps"] < num_timesteps + 256
    assert load_policy(resumed.policy).contract == TRACES.contract()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["env.trace.files=[nowhere.parquet]"], "no trace file nowhere.parquet"),
        (["env.trace.files=[]"], "trace.files is empty"),
        (["env.trace.cost_model=nowhere.json"], "no cost model nowhere.json"),
        (["ppo.batch_size=48"], "A rollout of 64 steps (ppo.n_steps 16 in 4 environments)"),
        (["env.trace.num_envs=5"], "not a multiple of ppo.batch_size 32"),
        (["env.trace.num_envs=0"], "trace.num_envs is 0"),
        (["env.trace.seats_per_load=0"], "trace.seats_per_load is 0"),
        (["imitate={rule: {name: goodput}}", "start_from=a"], "both give the first weights"),
        (["counterfactual={}"], "known for each request on traces"),
        (
            ["env.granularity=request", "counterfactual={decay: 1.5}"],
            "counterfactual.decay is 1.5",
        ),
        (
            ["env.granularity=request", "counterfactual={prior_steps: 0}"],
            "counterfactual.prior_steps is 0",
        ),
        (["ppo.final_learning_rate=-1.0"], "ppo.final_learning_rate is -1.0"),
        (["resume=a", "start_from=b"], "resume goes on with a run"),
        (["resume=nowhere"], "No checkpoint at nowhere"),
        (["start_from=nowhere"], "No checkpoint at nowhere"),
        (["workload.output_tokens=41"], "hold 40 output tokens"),
        (["workload.concurrency=[33]"], "exceeds model.max_num_seqs 32"),
        (["drafters.max_lengths={ngram: 9}"], "up to 8 tokens, not 9"),
        (["env.trace.kinds={poetry: 1}"], "no request of kind 'poetry'"),
        (["model.max_model_len=100"], "raise max_model_len"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(overrides, tmp_path, changes, said):
    with pytest.raises(DraftgymError) as refusal:
        trained(tmp_path, *overrides, *changes)
    sentence = str(refusal.value)
    assert said in sentence
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    assert not (tmp_path / "policy.pt").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("env.granularity=request", "trained on traces; add env=trace"),
        ("imitate={rule: {name: goodput}}", "imitated on traces; add env=trace"),
    ],
)
def test_what_needs_traces_is_refused_on_live_vllm(change, said):
    with pytest.raises(DraftgymError, match=said):
        config_of("output_dir=nowhere", change)


def test_the_script_ends_with_that_sentence(overrides, tmp_path):
    done = subprocess.run(
        command(tmp_path / "run", *overrides, "env.trace.files=[nowhere.parquet]"),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: There is no trace file nowhere")
    assert "Traceback" not in done.stderr


def one_sided_traces(best):
    """Traces in which one drafter's drafts are always accepted whole and the other's never."""
    traces = make_traces(num_requests=16, seed=6)
    left = np.repeat(traces.starts[1:], traces.num_output_tokens) - np.arange(traces.starts[-1])
    drafters = {}
    for name, drafter in traces.drafters.items():
        drafted = np.full_like(drafter.num_draft_tokens, traces.header.max_lengths[name])
        accepted = np.minimum(drafted, left - 1) if name == best else np.zeros_like(drafted)
        drafters[name] = replace(
            drafter, num_draft_tokens=drafted, num_accepted_tokens=accepted.astype(np.uint8)
        )
    return replace(traces, drafters=drafters)


def measured(model, steps=60):
    """Tokens and time against no speculation under the learner's own actions, and their shares."""
    tokens = time_taken = 0.0
    chosen = []
    choices = model.get_env()
    observations = choices.reset()
    for _ in range(steps):
        actions, _ = model.predict(observations, deterministic=False)
        observations, _, _, infos = choices.step(actions)
        tokens += sum(info["reward_tokens"] for info in infos)
        time_taken += sum(info["reward_time"] for info in infos)
        chosen += choices.table[actions, 0].tolist()
    return tokens / time_taken, np.bincount(chosen, minlength=3) / len(chosen)


@pytest.mark.parametrize(
    ("best", "least_speedup"), [("none", 0.95), ("ngram", 3.5), ("eagle3", 1.8)]
)
def test_ppo_finds_the_drafter_that_is_plainly_best(best, least_speedup):
    traces = one_sided_traces(best)
    vec_env = DraftVecEnv(
        TraceWorkload(traces, (1, 2, 4), 40),
        CostModel.from_weights(PRICES_S),
        traces.contract(),
        TraceEngineConfig(),
        EpisodeConfig(work_tokens_per_req=32),
        num_envs=32,
    )
    config = PpoConfig(
        total_timesteps=20_000,
        n_steps=16,
        batch_size=128,
        n_epochs=4,
        learning_rate=3e-3,
        hidden_layers=(16,),
    )
    model = build_ppo(vec_env, config, seed=0)
    untrained, _ = measured(model)
    model.learn(config.total_timesteps)
    speedup, shares = measured(model)
    vec_env.close()
    assert speedup > max(least_speedup, 1.1 * untrained)
    assert shares[("none", "ngram", "eagle3").index(best)] > 0.85


@pytest.mark.parametrize("best", ["none", "ngram", "eagle3"])
def test_ppo_finds_it_for_every_request_too(best):
    traces = one_sided_traces(best)
    vec_env = RequestVecEnv(
        TraceWorkload(traces, (1, 4), 40),
        CostModel.from_weights(PRICES_S),
        traces.contract(granularity="request"),
        TraceEngineConfig(),
        seats_per_load=32,
    )
    config = PpoConfig(
        total_timesteps=30_000,
        n_steps=16,
        batch_size=256,
        n_epochs=4,
        learning_rate=3e-3,
        hidden_layers=(16,),
    )
    model = build_ppo(vec_env, config, seed=0)
    model.learn(config.total_timesteps)
    module, observations, chosen = to_module(model, vec_env.contract), vec_env.reset(), []
    for _ in range(40):
        with torch.inference_mode():
            actions = module(torch.from_numpy(observations)).numpy()
        chosen += actions[(observations != vec_env.contract.low).any(axis=1)].tolist()
        observations, *_ = vec_env.step(actions)
    vec_env.close()
    drafters = np.array(chosen)[:, 0]
    assert (drafters == ("none", "ngram", "eagle3").index(best)).mean() > 0.85
