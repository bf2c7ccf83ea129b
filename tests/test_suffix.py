"""The suffix drafter: hand-worked drafts, and trees that hold all that was emitted and no more."""

import importlib.util

import numpy as np
import pytest

from envs.live import DraftersConfig, ModelConfig, engine_config
from policy.contract import Contract
from policy.errors import ConfigError
from policy.serving.config import DrafterSettings, check_settings
from policy.serving.token_drafter import Contexts

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None, reason="`make suffix` was not run"
)
MODEL_LEN = 96
DEPTH = 12


def make_drafter(max_length=8, max_cached_requests=0, max_spec_factor=1.0, min_token_prob=0.1):
    from policy.serving.suffix import SuffixDrafter

    return SuffixDrafter(
        max_length=max_length,
        max_model_len=MODEL_LEN,
        max_tree_depth=DEPTH,
        max_cached_requests=max_cached_requests,
        max_spec_factor=max_spec_factor,
        min_token_prob=min_token_prob,
    )


def offer(drafter, **contexts):
    """Offer for `request=(prompt, output)`, in engine rows with rubbish behind them."""
    rng = np.random.default_rng(0)
    engine = rng.integers(0, 5, (len(contexts) + 2, MODEL_LEN)).astype(np.int32)
    rows = rng.permutation(len(engine))[: len(contexts)]
    for row, (prompt, output) in zip(rows, contexts.values(), strict=True):
        engine[row, : len(prompt) + len(output)] = [*prompt, *output]
    prompts = np.array([len(prompt) for prompt, _ in contexts.values()], np.int32)
    outputs = np.array([len(output) for _, output in contexts.values()], np.int32)
    return drafter.offer(Contexts(tuple(contexts), engine, rows, prompts + outputs, prompts))


def draft_of(drafter, request, length):
    (draft,) = drafter.draft(np.array([request]), np.array([length]))
    return draft


@needs_package
def test_it_goes_on_as_the_context_did_before():
    """Of two occurrences of 3, 4, 5 one is the end itself, so a half goes on with 6."""
    drafter = make_drafter(max_spec_factor=2.0)
    offered = offer(drafter, a=(range(20), [3, 4, 5]))
    assert offered.match_length.tolist() == [3]
    assert offered.num_draft_tokens.tolist() == [6]  # twice the match
    assert draft_of(drafter, 0, 9).token_ids == [6, 7, 8, 9, 10, 11]
    np.testing.assert_allclose(offered.survival, [[0.5] * 6 + [np.nan] * 2])
    shorter = draft_of(drafter, 0, 2)
    assert shorter.token_ids == [6, 7]
    np.testing.assert_allclose(shorter.survival, [0.5, 0.5])
    assert offered.counterfactual_accepted.tolist() == [-1]


@needs_package
def test_survival_is_the_share_of_occurrences_that_went_on_so():
    """1, 2 was followed by 3 twice and by 4 once, and is the end: a half, then all of it."""
    prompt = [9, 1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 3, 6]
    drafter = make_drafter()
    offered = offer(drafter, a=(prompt, [1, 2]))
    assert draft_of(drafter, 0, 8).token_ids[0] == 3
    assert offered.survival[0, 0] == pytest.approx(2 / 4)
    strict = make_drafter(min_token_prob=0.6)
    assert offer(strict, a=(prompt, [1, 2])).num_draft_tokens.tolist() == [0]


@needs_package
def test_what_one_request_was_answered_another_drafts_from_if_it_may():
    answer = [7, 8, 9, 10, 11, 12]
    for max_cached_requests, expected in ((5, [10, 11, 12]), (0, [])):
        drafter = make_drafter(max_cached_requests=max_cached_requests)
        offer(drafter, a=([50, 51], answer))
        drafter.forget(["a"])  # ended; its response stays
        offer(drafter, b=([60, 61], [7, 8, 9]))
        assert draft_of(drafter, 0, 8).token_ids == expected


@needs_package
def test_drafts_end_at_the_longest_context_of_the_engine():
    repeating = ([1, 2, 3, 4, 5, 6] * 20)[:MODEL_LEN]
    for room in range(6):
        drafter = make_drafter(4)
        offered = offer(drafter, a=(repeating[: MODEL_LEN - room - 1], [repeating[-1 - room]]))
        assert offered.num_draft_tokens[0] == min(room, 4)
        assert np.isfinite(offered.survival[0]).sum() == min(room, 4)


@needs_package
@pytest.mark.parametrize("most_per_step", [1, 3, 9])
def test_trees_hold_every_emitted_token_whatever_came_between(most_per_step):
    """Offers are those of a cache that is built anew from the whole context at every step."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    rng = np.random.default_rng(most_per_step)
    drafter, compared, judged = make_drafter(), 0, []
    requests = {f"r{i}": rng.integers(0, 4, MODEL_LEN).tolist() for i in range(5)}
    num_prompt = {name: int(rng.integers(1, 30)) for name in requests}
    num_tokens = {name: num_prompt[name] + 1 for name in requests}
    open_offers = {}
    for step in range(60):
        running = [name for name in requests if rng.random() < 0.7]  # others wait or are preempted
        rng.shuffle(running)
        if step == 30:  # ended, and another of that name comes
            drafter.forget(["r0"])
            requests["r0"], num_tokens["r0"] = requests["r0"][::-1], num_prompt["r0"] + 1
            open_offers.pop("r0", None)
        for name in running:
            emitted = int(rng.integers(1, most_per_step + 1))
            num_tokens[name] = min(num_tokens[name] + emitted, MODEL_LEN)
        contexts = {
            name: (
                requests[name][: num_prompt[name]],
                requests[name][num_prompt[name] : num_tokens[name]],
            )
            for name in running
        }
        offered = offer(drafter, **contexts)
        for i, (name, (prompt, output)) in enumerate(contexts.items()):
            fresh = SuffixDecodingCache(DEPTH, 0)
            fresh.start_request(name, prompt)
            fresh.add_active_response(name, output)
            found = fresh.speculate(name, [*prompt, *output], max_spec_tokens=16)
            length = min(8, len(found.token_ids), MODEL_LEN - num_tokens[name])
            draft = draft_of(drafter, i, 8)
            assert draft.token_ids == found.token_ids[:length]
            np.testing.assert_array_equal(draft.survival, np.float32(found.probs[:length]))
            compared += length > 0
            fate = -1
            if name in open_offers:
                begin, tokens = open_offers[name]
                follows = requests[name][begin : num_tokens[name]]
                right = [a == b for a, b in zip(tokens, follows, strict=False)]
                if False in right or len(right) == len(tokens):
                    fate = [*right, False].index(False)
                    judged.append(fate)
                    del open_offers[name]
            assert offered.counterfactual_accepted[i] == fate
            if length:
                open_offers.setdefault(name, (num_tokens[name], draft.token_ids))
    assert compared > 80
    assert len(set(judged)) > 2


@needs_package
def test_ended_requests_leave_their_responses_and_no_more_than_allowed():
    drafter = make_drafter(max_cached_requests=3)
    for number in range(100):
        offer(drafter, **{f"r{number}": ([1, 2, 3], [1, 2])})
        drafter.forget([f"r{number}", "never seen"])
    assert not drafter._num_read
    assert len(drafter._pledges) == 0
    assert not drafter._cache.active_requests
    assert len(drafter._cache.cached_requests) == 3


@needs_package
def test_a_step_without_requests_offers_nothing():
    offered = make_drafter().offer(
        Contexts((), np.zeros((1, 4), np.int32), *np.zeros((3, 0), np.intp))
    )
    assert len(offered.match_length) == len(offered.counterfactual_accepted) == 0


def test_without_its_package_it_is_refused_in_a_sentence(monkeypatch):
    contract = Contract(("none", "suffix"), (0, 8))
    monkeypatch.setattr("policy.serving.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refusal:
        check_settings(contract, DrafterSettings())
    assert str(refusal.value) == (
        "The drafter 'suffix' needs the package arctic-inference; build it with `make suffix`, or "
        "leave 'suffix' out of the drafters."
    )
    check_settings(Contract(("none", "ngram"), (0, 8)), DrafterSettings())
    with pytest.raises(ConfigError, match="needs the package arctic-inference; build it"):
        engine_config(ModelConfig(), DraftersConfig(max_lengths={"suffix": 8}, model=None))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"suffix_max_tree_depth": 1}, "suffix_max_tree_depth 1 or"),
        ({"suffix_max_cached_requests": -1}, "suffix_max_cached_requests -1 is too small"),
        ({"suffix_max_spec_factor": 0.0}, "suffix_max_spec_factor 0.0 or"),
        ({"suffix_min_token_prob": 1.5}, "suffix_min_token_prob 1.5 is out of range"),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DrafterSettings(**settings)
