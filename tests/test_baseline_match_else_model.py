"""Copy where the match is long enough, else ask the model drafter."""

import re

import numpy as np
import pytest

from policy.baselines.match_else_model import MatchElseModelConfig, MatchElseModelController
from policy.contract import Contract
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, random_step, step_of

NGRAM, EAGLE = 1, 2
CONFIG = MatchElseModelConfig(min_match_length=3, token_length=6, model_length=2)


def controller(granularity="request", config=CONFIG, drafters=DRAFTERS, lengths=LENGTHS):
    return MatchElseModelController(Contract(drafters, lengths, granularity), config)


@pytest.mark.parametrize("seed", range(5))
def test_every_row_goes_by_its_own_match(seed):
    record = random_step(np.random.default_rng(seed), "abcdefg")
    matches = record.token_offers["ngram"].match_length.tolist()
    assert min(matches) < 3 <= max(matches)
    expected = [[NGRAM, 6] if match >= 3 else [EAGLE, 2] for match in matches]
    assert controller().decide(record, None).tolist() == expected


@pytest.mark.parametrize(
    ("matches", "action"),
    [
        ([3], [NGRAM, 6]),
        ([2], [EAGLE, 2]),
        ([0, 4], [NGRAM, 6]),  # half is enough
        ([0, 2, 9], [EAGLE, 2]),
        ([0, 3, 9], [NGRAM, 6]),
        ([9, 0, 0, 0, 0], [EAGLE, 2]),  # one long match is no half
    ],
)
def test_a_batch_goes_by_half_of_its_rows(matches, action):
    offers = [(match, 4, -1) for match in matches]
    record = step_of([(0, 0, 0)] * len(matches), offers=offers)
    assert controller("batch").decide(record, None).tolist() == [action]


def test_drafters_may_come_in_any_order():
    turned = controller(drafters=("none", "eagle3", "ngram"), lengths=(0, 4, 8))
    record = step_of([(0, 0, 0)] * 2, offers=[(3, 4, -1), (0, 0, -1)])
    assert turned.decide(record, None).tolist() == [[2, 6], [1, 2]]


@pytest.mark.parametrize(
    ("drafters", "lengths", "missing"),
    [(("none", "ngram"), (0, 8), "model"), (("none", "eagle3"), (0, 4), "token")],
)
def test_it_needs_both_kinds(drafters, lengths, missing):
    with pytest.raises(ConfigError) as refusal:
        controller(drafters=drafters, lengths=lengths)
    sentence = rf"The rule needs a {missing} drafter; add one of [^\n]+ to 'drafters'\."
    assert re.fullmatch(sentence, str(refusal.value))


@pytest.mark.parametrize(
    "wrong", [{"min_match_length": 0}, {"token_length": 0}, {"model_length": -1}], ids=str
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"^match_else_model needs [^\n]+; correct them\.$"):
        MatchElseModelConfig(**wrong)
