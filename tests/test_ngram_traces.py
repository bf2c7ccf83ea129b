"""N-gram drafts computed along recorded outputs, against what live vLLM recorded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.live import DraftersConfig, ModelConfig
from envs.ngram_traces import with_ngram_matches
from envs.replayed import Replayed, TraceConfig
from envs.traces import read_traces
from envs.workload import WorkloadConfig
from policy.serving.config import DrafterSettings
from policy.serving.ngram import NgramDrafter
from policy.serving.token_drafter import Contexts

RECORDING = Path(TraceConfig().files[0])


@pytest.fixture(scope="module")
def recorded():
    return read_traces(RECORDING)


def assert_same_drafts(one, other):
    for name, values in vars(one.drafters["ngram"]).items():
        np.testing.assert_array_equal(values, getattr(other.drafters["ngram"], name), name)


def test_the_recorded_match_lengths_give_what_was_recorded_live(recorded):
    header = recorded.header
    others = with_ngram_matches(recorded, 3, 9)
    again = with_ngram_matches(others, header.ngram_min_match, header.ngram_max_match)
    assert again.header == header
    assert_same_drafts(again, recorded)


def test_other_match_lengths_give_what_the_serving_drafter_offers(recorded):
    traces = with_ngram_matches(recorded.select([0, 100]), 3, 9)
    drafts = traces.drafters["ngram"]
    assert drafts.match_length.max() > recorded.header.ngram_max_match
    for request in range(traces.num_requests):
        prompt, output = traces.prompts[request], traces.outputs(request)
        drafter = NgramDrafter(max_length=16, min_match=3, max_match=9, max_model_len=1024)
        tokens = np.concatenate([prompt, output]).astype(np.int32)[None]
        for position in range(1, len(output)):
            length, prompt_length = (
                np.array([n], np.int32) for n in (len(prompt) + position, len(prompt))
            )
            offer = drafter.offer(
                Contexts(("a",), tokens, np.zeros(1, np.intp), length, prompt_length)
            )
            at = traces.starts[request] + position
            assert drafts.match_length[at] == offer.match_length[0]
            assert drafts.agreement[at] == offer.agreement[0]
            assert drafts.num_draft_tokens[at] == offer.num_draft_tokens[0]
            token_ids = drafter.draft(np.array([0]), np.array([16]))[0].token_ids
            agreed = (
                np.array(token_ids[: len(output) - position])
                == output[position : position + len(token_ids)]
            )
            assert drafts.num_accepted_tokens[at] == np.cumprod(agreed).sum()


def test_drafts_keep_within_the_context(recorded):
    short = replace(recorded, header=replace(recorded.header, max_model_len=100)).select([0])
    drafts = with_ngram_matches(short, 1, 16).drafters["ngram"]
    context = len(short.prompts[0]) + np.arange(len(drafts.num_draft_tokens))
    assert (drafts.num_draft_tokens <= np.maximum(100 - 1 - context, 0)).all()
    assert (drafts.num_accepted_tokens <= drafts.num_draft_tokens).all()


def test_what_is_replayed_is_drafted_as_the_settings_say(recorded):
    replayed = Replayed.read(
        TraceConfig(),
        ModelConfig(),
        DraftersConfig({"ngram": 8}, settings=DrafterSettings(ngram_min_match=3)),
        WorkloadConfig({"chat": 1.0}, concurrency=(1,), output_tokens=128),
    )
    assert replayed.workload.traces.header.ngram_max_match == 16
    assert_same_drafts(
        replayed.workload.traces, with_ngram_matches(recorded.of_split("train"), 3, 16)
    )


def test_traces_without_ngram_stay_as_they_are(recorded):
    without = replace(recorded, drafters={"eagle3": recorded.drafters["eagle3"]})
    assert with_ngram_matches(without, 3, 9) is without
    assert with_ngram_matches(recorded, 2, 4) is recorded
