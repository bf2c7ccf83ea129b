"""The bookkeeping of a collection: parts, shards, resuming, merging."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import envs.collection
from envs.collection import CollectionJob, begin, collect_shard, merge, recorded_ids
from envs.live import DraftersConfig, ModelConfig
from envs.recording import num_accepted
from envs.workload import WorkloadConfig, WorkloadRequest
from policy.config import from_mapping
from policy.errors import ConfigError, TraceError
from policy.training.collect import CollectConfig

from .synthetic_traces import LENGTHS, make_traces
from .test_config import hidden_fields

ROOT = Path(__file__).parents[1]
TRACES = make_traces(num_requests=10)
JOB = CollectionJob(
    ModelConfig(),
    DraftersConfig(max_lengths=LENGTHS),
    WorkloadConfig(kinds={"code": 1.0}, concurrency=(1,)),
    concurrency=4,
    requests_per_part=2,
)


@pytest.fixture(autouse=True)
def recorded_from_memory(monkeypatch):
    """Requests and recordings come from traces in memory instead of an engine."""
    place = {request_id: i for i, request_id in enumerate(TRACES.request_ids)}
    requests = [
        (TRACES.splits[i], WorkloadRequest(name, (i,), 8, 0.0, "code")) for name, i in place.items()
    ]
    by_split = sorted(requests, key=lambda pair: JOB.splits.index(pair[0]))
    monkeypatch.setattr(CollectionJob, "requests", lambda self: by_split)

    class Engine:
        def __init__(self, config):
            pass

        def close(self):
            pass

    def record(engine, requests, split, header, concurrency):
        for request in reversed(requests):  # they do not end in their order
            assert TRACES.splits[place[request.request_id]] == split
            yield TRACES.select([place[request.request_id]])

    monkeypatch.setattr(envs.collection, "VllmEngine", Engine)
    monkeypatch.setattr(envs.collection, "engine_config", lambda model, drafters: None)
    monkeypatch.setattr(envs.collection, "record_traces", record)
    return record


def wanted():
    return tuple(request.request_id for _, request in JOB.requests())


def test_a_whole_collection_merges_into_the_jobs_order(tmp_path):
    begin(JOB, tmp_path)
    collect_shard(JOB, tmp_path)
    merged = merge(JOB, tmp_path)
    assert merged.request_ids == wanted()
    first = TRACES.request_ids.index(merged.request_ids[0])
    np.testing.assert_array_equal(merged.outputs(0), TRACES.outputs(first))


@pytest.mark.parametrize("killed_after", range(1, 10, 2))
def test_a_killed_collection_goes_on_without_losing_or_doubling(
    tmp_path, monkeypatch, recorded_from_memory, killed_after
):
    recorded = []

    def dying(*arguments):
        for traces in recorded_from_memory(*arguments):
            if len(recorded) == killed_after:
                raise KeyboardInterrupt
            recorded.append(traces.request_ids[0])
            yield traces

    begin(JOB, tmp_path)
    monkeypatch.setattr(envs.collection, "record_traces", dying)
    with pytest.raises(KeyboardInterrupt):
        collect_shard(JOB, tmp_path)
    done = recorded_ids(tmp_path)
    assert killed_after - JOB.requests_per_part < len(done) <= killed_after
    with pytest.raises(TraceError, match=r"lacks .* collect again to go on"):
        merge(JOB, tmp_path)
    killed_after = -1
    recorded.clear()
    begin(JOB, tmp_path)
    collect_shard(JOB, tmp_path)
    assert not set(recorded) & done
    assert merge(JOB, tmp_path).request_ids == wanted()


@pytest.mark.parametrize("num_shards", [2, 3, 20])
def test_shards_make_the_same_whole_and_their_number_may_change(tmp_path, num_shards):
    begin(JOB, tmp_path)
    collect_shard(JOB, tmp_path, shard=1, num_shards=2)
    assert recorded_ids(tmp_path) == set(wanted()[1::2])
    for shard in range(num_shards):
        collect_shard(JOB, tmp_path, shard, num_shards)
    assert merge(JOB, tmp_path).request_ids == wanted()


def test_a_request_that_two_workers_recorded_counts_once(tmp_path):
    begin(JOB, tmp_path)
    collect_shard(JOB, tmp_path)
    TRACES.select([0, 1]).write(tmp_path / "zz-late.parquet")
    assert merge(JOB, tmp_path).request_ids == wanted()


def test_parts_of_other_settings_are_refused_but_not_for_how_they_are_served(tmp_path):
    begin(JOB, tmp_path)
    begin(replace(JOB, concurrency=2, requests_per_part=7), tmp_path)
    other = replace(JOB, workload=replace(JOB.workload, output_tokens=7))
    with pytest.raises(TraceError, match="other settings; collect with those"):
        begin(other, tmp_path)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"concurrency": 0}, "concurrency is 0; make it 1 or more"),
        ({"concurrency": 64}, "exceeds model.max_num_seqs 32"),
        ({"splits": ("test",)}, "list 'train', 'eval' or both"),
        ({"requests_per_part": 0}, "requests_per_part is 0"),
    ],
)
def test_a_senseless_job_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(JOB, **settings)


@pytest.mark.parametrize(
    ("draft", "outputs", "accepted"),
    [([], [1, 2], 0), ([1, 2], [1, 2, 3], 2), ([1, 9, 3], [1, 2, 3], 1), ([1, 2, 3], [1], 1)],
)
def test_accepted_tokens_are_the_leading_ones_that_were_emitted(draft, outputs, accepted):
    assert num_accepted(draft, outputs) == accepted


@pytest.mark.parametrize("overrides", [[], ["launcher=ray"], ["drafters=ngram"]])
def test_every_setting_of_the_script_is_in_its_configuration(overrides):
    OmegaConf.register_new_resolver("repository", lambda: str(ROOT), replace=True)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = OmegaConf.to_container(compose("collect", overrides), resolve=True)
    config = from_mapping(CollectConfig, settings, where="")
    assert list(hidden_fields(CollectConfig, settings)) == []
    assert config.drafters.max_lengths["ngram"] == 16
