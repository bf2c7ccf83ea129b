"""How far drafts get, against facts that are gathered one by one."""

import re

import numpy as np
import pytest

from policy.baselines.acceptance import Acceptance, AcceptanceConfig, AcceptanceTable
from policy.baselines.judged_offers import JudgedOffers
from policy.contract import Contract
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, step_of

CONTRACT = Contract(DRAFTERS, LENGTHS, "request")
NGRAM, EAGLE = 1, 2


def survival_of(facts, max_length, num_match_lengths, prior_rate, weight):
    """The documented rates; `facts` are `(match length, position, was accepted)`."""
    pooled, rate = [], 1.0
    for position in range(max_length):
        told = [accepted for _, at, accepted in facts if at == position]
        raw = (sum(told) + weight * prior_rate * rate) / (len(told) + weight)
        rate = min(rate, raw)
        pooled.append(rate)
    if num_match_lengths == 1:
        return np.array([pooled])
    table = np.zeros((num_match_lengths, max_length))
    for match in range(num_match_lengths):
        rate = 1.0
        for position in range(max_length):
            told = [ok for m, at, ok in facts if (min(m, 16), at) == (match, position)]
            raw = (sum(told) + weight * pooled[position]) / (len(told) + weight)
            rate = table[match, position] = min(rate, raw)
    return table


class Output:
    """A request whose drafts are known at every output position, followed by the book."""

    def __init__(self, rng):
        self.offers = []
        for _ in range(400):
            length = int(rng.integers(0, 9))
            accepted = min(length, int(rng.geometric(0.3)) - 1)
            self.offers.append((int(rng.integers(2, 20)) if length else 0, length, accepted))
        self.at, self.open_at, self.is_known = 0, None, False
        self.facts = {}

    def tell(self, position, num_told):
        match, _, accepted = self.offers[position]
        for j in range(num_told):
            self.facts[position, j] = match, j, j < accepted  # told twice is told once

    def step(self, num_drafts):
        """Verify a draft of so many tokens; the row of the record and its offer."""
        _, offered, right = self.offers[self.at]
        num_drafts = min(num_drafts, offered) if self.is_known else 0  # its first is a prompt's
        self.is_known = True
        accepted = min(num_drafts, right)
        if num_drafts:
            self.tell(self.at, num_drafts)
        self.at += 1 + accepted
        judged = -1
        if self.open_at is not None:
            _, offered, right = self.offers[self.open_at]
            if self.at - self.open_at >= min(right + 1, offered):
                self.tell(self.open_at, offered)
                judged, self.open_at = right, None
        match, offered, _ = self.offers[self.at]
        if offered and self.open_at is None:
            self.open_at = self.at
        return (NGRAM if num_drafts else 0, num_drafts, accepted), (match, offered, judged)


@pytest.mark.parametrize("by_match_length", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_every_position_of_a_draft_counts_once_and_only_if_it_was_told(seed, by_match_length):
    rng = np.random.default_rng(seed)
    config = AcceptanceConfig(decay=1.0, prior_rate=0.7, prior_weight=2.0)
    acceptance = Acceptance(CONTRACT, config, by_match_length=by_match_length)
    outputs = {name: Output(rng) for name in "abc"}
    ended, facts = set(), []
    for _ in range(60):
        for name in ended:
            facts += outputs[name].facts.values()
            outputs[name] = Output(rng)
        present = [name for name in outputs if rng.random() < 0.8] or ["a"]
        # Mostly none, so that offers nobody takes are open over several steps.
        rows = [outputs[name].step(int(rng.choice([0, 0, 1, 3, 8]))) for name in present]
        drafts, offers = zip(*rows, strict=True)
        record = step_of(
            drafts, offers=offers, req_ids=tuple(present), finished_req_ids=frozenset(ended)
        )
        acceptance.update(record)
        ended = {name for name in outputs if rng.random() < 0.03}
    for output in outputs.values():
        facts += output.facts.values()
    assert len({position for _, position, _ in facts}) == 8

    matches = 17 if by_match_length else 1
    expected = survival_of(facts, 8, matches, prior_rate=0.7, weight=2.0)
    asked = step_of([(0, 0, 0)] * 17, offers=[(m, 8, -1) for m in range(17)])
    np.testing.assert_allclose(
        acceptance.of_offers(NGRAM, asked), np.broadcast_to(expected, (17, 8)), rtol=1e-12
    )


def test_a_longer_match_counts_in_the_last_row_and_nothing_survives_beyond_an_offer():
    acceptance = Acceptance(CONTRACT, AcceptanceConfig(decay=1.0), by_match_length=True)
    acceptance.update(step_of([(0, 0, 0)], offers=[(40, 2, -1)]))
    acceptance.update(step_of([(NGRAM, 2, 0)], offers=[(0, 0, 0)]))
    asked = step_of([(0, 0, 0)] * 3, offers=[(16, 8, -1), (99, 1, -1), (5, 0, -1)])
    survival = acceptance.of_offers(NGRAM, asked)
    pooled = [0.8 / 2, 0.8 * 0.4 / 2]  # one draft refused against a prior worth one
    assert survival[0, :2] == pytest.approx([pooled[0] / 2, pooled[1] / 2])
    assert survival[1] == pytest.approx([pooled[0] / 2] + [0] * 7)
    assert not survival[2].any()


def test_a_draft_cut_short_tells_of_what_was_verified_and_the_offer_of_the_rest():
    offers = JudgedOffers(CONTRACT, NGRAM)
    assert offers.samples(step_of([(0, 0, 0)], offers=[(3, 5, -1)])).tolist() == []
    # Two of five offered tokens are verified and accepted; the offer stays open.
    taken = step_of([(NGRAM, 2, 2)], offers=[(4, 8, -1)])
    assert offers.samples(taken).tolist() == [[3, 0, 2, 2]]
    # The fourth turns out wrong: positions 3 to 5 are news, 1 and 2 are not.
    settled = step_of([(0, 0, 0)], offers=[(0, 0, 3)])
    assert offers.samples(settled).tolist() == [[3, 2, 5, 3]]
    # An offer that was verified in full has no more to tell.
    assert offers.samples(step_of([(0, 0, 0)], offers=[(2, 4, -1)])).tolist() == []
    judged = step_of([(NGRAM, 4, 1)], offers=[(0, 0, 1)])
    assert offers.samples(judged).tolist() == [[2, 0, 4, 1]]


def test_an_offer_of_a_request_that_ended_is_not_held_against_its_namesake():
    offers = JudgedOffers(CONTRACT, NGRAM)
    offers.samples(step_of([(0, 0, 0)], offers=[(3, 5, -1)]))
    back = step_of([(0, 0, 0)], offers=[(2, 1, -1)], finished_req_ids=frozenset("a"))
    assert offers.samples(back).tolist() == []
    settled = step_of([(0, 0, 0)], offers=[(0, 0, 1)])
    assert offers.samples(settled).tolist() == [[2, 0, 1, 1]]


def test_a_model_draft_worked_by_hand():
    acceptance = Acceptance(CONTRACT, AcceptanceConfig(decay=0.5), by_match_length=True)
    assert acceptance.of_model(EAGLE) == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    acceptance.update(step_of([(EAGLE, 2, 1)]))
    first, second = 1.8 / 2, (0.8 * 0.9) / 2
    expected = [first, second, 0.8 * second, 0.64 * second]
    assert acceptance.of_model(EAGLE) == pytest.approx(expected)
    acceptance.update(step_of([(0, 0, 0)]))  # a step without it halves what is known
    first = (0.5 + 0.8) / 1.5
    second = 0.8 * first / 1.5
    expected = [first, second, 0.8 * second, 0.64 * second]
    assert acceptance.of_model(EAGLE) == pytest.approx(expected)
    acceptance.update(step_of([(EAGLE, 1, 0), (EAGLE, 1, 1)]))  # two drafts: a quarter is left
    first = (0.5 / 4 + 1 + 0.8) / (0.5 / 4 + 2 + 1)
    second = 0.8 * first / (0.5 / 4 + 1)
    expected = [first, second, 0.8 * second, 0.64 * second]
    assert acceptance.of_model(EAGLE) == pytest.approx(expected)


def test_an_untouched_model_drifts_back_to_its_prior():
    acceptance = Acceptance(CONTRACT, AcceptanceConfig(decay=0.9), by_match_length=False)
    for _ in range(50):
        acceptance.update(step_of([(EAGLE, 4, 0)]))
    assert acceptance.of_model(EAGLE)[0] < 0.1
    for _ in range(200):
        acceptance.update(step_of([(NGRAM, 1, 1)]))
    assert acceptance.of_model(EAGLE) == pytest.approx([0.8, 0.64, 0.512, 0.4096], rel=1e-6)


def test_only_drafts_of_the_same_match_length_push_the_past_back():
    table = AcceptanceTable(3, 2, AcceptanceConfig(decay=0.5, prior_weight=1e-9))
    table.add(np.array([[1, 0, 2, 2]]))
    table.add(np.array([[2, 0, 2, 2], [2, 0, 1, 1]]))
    table.add(np.array([[2, 1, 2, 1]]))  # the rest of a draft that was counted
    survival = table.survival()
    assert survival[1] == pytest.approx([1, 1])
    assert survival[2] == pytest.approx([1, 1 / 2])
    table.add(np.array([[1, 0, 1, 0]]))  # 1 of 1 becomes 0.5 of 1.5
    assert table.survival()[1] == pytest.approx([1 / 3, 1 / 3])
    assert table.survival()[2] == pytest.approx([1, 1 / 2])


def test_rates_never_rise_along_a_draft():
    """Long drafts are made where they go well; their later positions look better than the first."""
    table = AcceptanceTable(1, 3, AcceptanceConfig(decay=1.0))
    table.add(np.array([[0, 0, 1, 0]] * 9 + [[0, 0, 3, 3]] * 3))
    first = (3 + 0.8) / 13
    assert table.survival()[0] == pytest.approx([first] * 3)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"decay": value} for value in (0.0, 1.1, float("nan"))),
        *({"prior_rate": value} for value in (-0.1, 1.5)),
        *({"prior_weight": value} for value in (0.0, float("nan"))),
    ],
    ids=str,
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ConfigError) as refusal:
        AcceptanceConfig(**wrong)
    assert re.fullmatch(r"[^\n]+; make [^\n]+\.", str(refusal.value))
