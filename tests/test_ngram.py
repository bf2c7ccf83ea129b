"""The n-gram drafter against vLLM's own matcher, brute force, and a target with a known future."""

import itertools

import numpy as np
import pytest
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

from policy.serving.ngram import NgramDrafter
from policy.serving.token_drafter import Contexts

BOUNDS = [(low, high) for high in range(1, 6) for low in range(1, high + 1)]
MODEL_LEN = 64


def random_contexts(rng, count):
    """Contexts of few different tokens, so that matches of every length are frequent."""
    contexts = []
    for _ in range(count):
        alphabet = int(rng.integers(1, 5))
        contexts.append(rng.integers(0, alphabet, int(rng.integers(1, MODEL_LEN + 1))))
    return contexts


def offer(drafter, contexts, req_ids=None, rng=None):
    """Offer for these contexts, which lie in shuffled engine rows with rubbish behind them."""
    rng = rng or np.random.default_rng(0)
    engine = rng.integers(0, 5, (len(contexts) + 3, MODEL_LEN)).astype(np.int32)
    rows = rng.permutation(len(engine))[: len(contexts)]
    for row, context in zip(rows, contexts, strict=True):
        engine[row, : len(context)] = context
    num_tokens = np.array([len(context) for context in contexts], np.int32)
    req_ids = req_ids or [str(number) for number in range(len(contexts))]
    return drafter.offer(Contexts(tuple(req_ids), engine, rows, num_tokens, num_tokens))


def draft_of(drafter, row, length):
    """Tokens of one request's draft."""
    (draft,) = drafter.draft(np.array([row]), np.array([length]))
    assert not len(draft.survival)
    return draft.token_ids


def make_drafter(max_length=8, bounds=(2, 4), max_model_len=MODEL_LEN):
    low, high = bounds
    return NgramDrafter(
        max_length=max_length, min_match=low, max_match=high, max_model_len=max_model_len
    )


def brute_force(context, bounds, room):
    """(match length, draft), by trying every length and place."""
    context = list(context)
    for length in range(bounds[1], bounds[0] - 1, -1):
        suffix = context[len(context) - length :]
        starts = [s for s in range(len(context) - length) if context[s : s + length] == suffix]
        if starts:
            follows = context[starts[0] + length :]
            return length, follows[: max(room, 0)]
    return 0, []


def places_that_agree(context, token):
    """Mean share of the places like the end, in one and in two tokens, that a token followed."""
    shares = []
    for alike in (1, 2):
        end = context[len(context) - alike :]
        starts = [s for s in range(len(context) - alike) if context[s : s + alike] == end]
        agree = [context[start + alike] == token for start in starts]
        shares.append(sum(agree) / (1 + len(agree)))
    return sum(shares) / 2


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: f"{bounds[0]}..{bounds[1]}")
def test_drafts_are_the_ones_vllm_would_make(bounds):
    rng = np.random.default_rng(bounds)
    contexts = random_contexts(rng, 250)
    max_length = int(rng.integers(1, 17))
    drafter = make_drafter(max_length, bounds)
    offered = offer(drafter, contexts, rng=rng)
    for row, context in enumerate(contexts):
        theirs = _find_longest_matched_ngram_and_propose_tokens(
            context.astype(np.int32), *bounds, MODEL_LEN, max_length
        )
        assert draft_of(drafter, row, max_length) == theirs.tolist(), context
        assert offered.num_draft_tokens[row] == len(theirs)


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: f"{bounds[0]}..{bounds[1]}")
def test_match_length_and_agreement_are_those_of_brute_force(bounds):
    rng = np.random.default_rng(bounds)
    contexts = random_contexts(rng, 250)
    drafter = make_drafter(8, bounds)
    offered = offer(drafter, contexts, rng=rng)
    matched = 0
    for row, context in enumerate(contexts):
        length, draft = brute_force(context, bounds, min(8, MODEL_LEN - len(context)))
        assert offered.match_length[row] == length, context
        assert draft_of(drafter, row, 8) == draft
        agreement = places_that_agree(list(context), draft[0]) if draft else 0
        assert offered.agreement[row] == pytest.approx(agreement), context
        matched += length > 0
    assert matched > 100
    assert (offered.counterfactual_accepted == -1).all()


def test_a_draft_is_cut_to_the_length_asked_for():
    drafter = make_drafter(8)
    offer(drafter, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [1, 2, 3]])
    for length in range(12):
        draft = draft_of(drafter, 0, length)
        assert draft == [3, 4, 5, 6, 7, 8, 9, 1][:length]
        assert all(type(token) is int for token in draft)
        assert draft_of(drafter, 1, length) == []


def test_drafts_end_at_the_longest_context_of_the_engine():
    repeating = [1, 2, 3, 4] * (MODEL_LEN // 4)
    for room in range(6):
        drafter = make_drafter(4)
        context = repeating[: MODEL_LEN - room]
        offered = offer(drafter, [context])
        assert offered.match_length[0] == 4
        assert offered.num_draft_tokens[0] == min(room, 4)
        assert draft_of(drafter, 0, 4) == repeating[len(context) :][:4]


def random_target(rng):
    """All tokens that a target will emit for one request: repeated phrases and noise."""
    phrases = [rng.integers(0, 30, int(rng.integers(3, 12))) for _ in range(3)]
    parts = []
    while sum(map(len, parts)) < MODEL_LEN:
        noise = rng.integers(0, 30, int(rng.integers(0, 3)))
        parts += [phrases[rng.integers(len(phrases))], noise]
    return np.concatenate(parts)[:MODEL_LEN].astype(np.int32)


class KnownFuture:
    """What one request's offers are worth, known the moment they are made."""

    def __init__(self, target):
        self.target = target
        self.open = None
        self.settled = []

    def step(self, num_tokens, max_length):
        """Worth of the offer that the step decides, or -1; then a new offer may be opened."""
        worth = -1
        if self.open is not None and num_tokens >= self.open[0]:
            worth = self.open[1]
            self.open = None
            self.settled.append(worth)
        room = min(max_length, MODEL_LEN - num_tokens)
        draft = brute_force(self.target[:num_tokens], (2, 4), room)[1]
        if self.open is None and draft:
            future = self.target[num_tokens : num_tokens + len(draft)].tolist()
            pairs = zip(draft, future, strict=True)
            agreed = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.open = num_tokens + min(agreed + 1, len(draft)), agreed
        return worth


@pytest.mark.parametrize("most_per_step", [1, 2, 5, 9])
def test_past_offers_are_judged_by_what_the_target_emits(most_per_step):
    rng = np.random.default_rng(most_per_step)
    judged = []
    for _ in range(12):
        drafter = make_drafter(8)
        requests = {f"r{number}": KnownFuture(random_target(rng)) for number in range(4)}
        num_tokens = dict.fromkeys(requests, 1)
        while any(count < MODEL_LEN for count in num_tokens.values()):
            running = [r for r in requests if num_tokens[r] < MODEL_LEN and rng.random() < 0.8]
            rng.shuffle(running)
            for req_id in running:
                emitted = int(rng.integers(1, most_per_step + 1))
                num_tokens[req_id] = min(num_tokens[req_id] + emitted, MODEL_LEN)
            contexts = [requests[req_id].target[: num_tokens[req_id]] for req_id in running]
            settled = offer(drafter, contexts, running, rng).counterfactual_accepted.tolist()
            assert settled == [requests[r].step(num_tokens[r], 8) for r in running]
        judged += [worth for request in requests.values() for worth in request.settled]
    assert min(judged) == 0
    assert max(judged) == 8
    assert len(judged) > 100


def test_an_offer_made_for_an_ended_request_judges_nothing():
    drafter = make_drafter()
    offer(drafter, [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]], ["ended", "running"])
    drafter.forget(["ended", "never seen"])
    settled = offer(drafter, [[1, 2, 3, 1, 2, 9]] * 2, ["ended", "running"])
    assert settled.counterfactual_accepted.tolist() == [-1, 0]


def test_nothing_is_kept_of_a_thousand_ended_requests():
    drafter = make_drafter()
    for number in range(1000):
        offer(drafter, [[1, 2, 3, 1, 2]], [str(number)])
        drafter.forget([str(number)])
    assert len(drafter._pledges) == 0


def test_warming_up_leaves_no_trace():
    drafter = make_drafter()
    drafter.warm_up()
    assert len(drafter._pledges) == 0
    assert offer(drafter, [[5, 6, 7]], ["warm-up"]).counterfactual_accepted.tolist() == [-1]


def test_a_step_without_requests_offers_nothing():
    offered = offer(make_drafter(), [])
    assert len(offered.match_length) == len(offered.counterfactual_accepted) == 0
