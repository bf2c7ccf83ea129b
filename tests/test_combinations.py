"""Which member of a combination drafts: against plain Python on random pasts, and by hand."""

import numpy as np
import pytest

from policy.combinations import Combinations
from policy.contract import Contract
from policy.errors import ConfigError, ContractError
from policy.observation import ObservationBuilder
from policy.serving.config import DrafterSettings, check_settings

from .step_history import random_history
from .test_observation import recent_mean

DRAFTERS = ("none", "ngram", "eagle3", "suffix")
COMBINED = ("ngram_else_eagle3", "suffix_else_eagle3", "longest_expected")
LENGTHS = (0, 8, 4, 4, 8, 6, 5)
MIN_MATCH = 3


def make_contract(granularity="request"):
    return Contract((*DRAFTERS, *COMBINED), LENGTHS, granularity)


def expected_accepted(contract, past, record, row, name, length):
    """Expected accepted tokens of a draft of `length`; `past` as in `test_observation`."""
    index = contract.drafters.index(name)
    length = min(length, contract.max_lengths[index])
    if name == "eagle3":
        state = record.model_states["eagle3"]
        if not (state.fresh[row] and state.num_pending_tokens[row]):
            return 0.0
        rates = [1.0]
        for position in (1, 2, 3):
            outcomes = [
                [
                    step.num_accepted_tokens[r] >= position
                    for r in rows
                    if step.drafter[r] == index and step.num_draft_tokens[r] >= position
                ]
                for step, rows in past
            ]
            rates.append(min(rates[-1], recent_mean(outcomes, 0.5)))
        while len(rates) <= length:
            rates.append(rates[-1] * (rates[3] / rates[2] if rates[2] else 0))
        return sum(rates[1 : length + 1])
    offer = record.token_offers[name]
    length = min(length, int(offer.num_draft_tokens[row]))
    if name == "suffix":
        return float(sum(offer.survival[row, :length].tolist()))
    hits = [
        [step.token_offers[name].counterfactual_accepted[r] for r in rows] for step, rows in past
    ]
    mean = recent_mean([[hit for hit in step if hit >= 0] for step in hits], 0.0)
    return sum((mean / (1 + mean)) ** position for position in range(1, length + 1))


def expected_member(contract, past, record, row, name, length):
    """The rule in plain Python."""
    length = min(length, contract.max_lengths[contract.drafters.index(name)])
    if name == "longest_expected":
        worth = {
            member: expected_accepted(contract, past, record, row, member, length)
            for member in DRAFTERS[1:]
        }
        member = max(worth, key=worth.get) if max(worth.values()) > 0 else "none"
        ranks = sorted(worth.values())
        if length and ranks[-1] - ranks[-2] < 1e-4:
            return None  # a tie in float32
    elif "_else_" in name:
        token, model = name.split("_else_")
        offer = record.token_offers[token]
        is_long = offer.match_length[row] >= MIN_MATCH and offer.num_draft_tokens[row] > 0
        member = token if is_long else model
    else:
        member = name
    index = contract.drafters.index(member)
    length = min(length, contract.max_lengths[index])
    return (index, length) if length else (0, 0)


@pytest.mark.parametrize("granularity", ["batch", "request"])
def test_members_are_those_of_the_rule_in_plain_python(granularity):
    contract = make_contract(granularity)
    builder, history = ObservationBuilder(contract), []
    combinations = Combinations.of(contract, MIN_MATCH)
    rng, chosen = np.random.default_rng(1), []
    for record in random_history(seed=7, steps=120, drafters=DRAFTERS):
        history.append(record)
        builder.update(record)
        actions = contract.canonical_actions(
            rng.integers(0, contract.action_nvec, (record.num_rows, 2))
        )
        resolved = builder.resolve(combinations, record, actions)
        for row, req_id in enumerate(record.req_ids):
            past = []
            for step in history:
                if granularity == "batch":
                    past.append((step, range(step.num_rows)))
                    continue
                past = [] if req_id in step.finished_req_ids else past
                if req_id in step.req_ids:
                    past.append((step, [step.req_ids.index(req_id)]))
            drafter, length = actions[row].tolist()
            name = contract.drafters[drafter]
            member = expected_member(contract, past, record, row, name, length)
            if member is not None:
                assert tuple(resolved[row].tolist()) == member, name
                chosen.append((name, member[0]))
    for name in COMBINED:
        drafted = {member for combination, member in chosen if combination == name}
        members = {contract.drafters.index(member) for member in contract.members(name)}
        assert members <= drafted <= members | {0}


def test_without_a_combination_nothing_is_copied_or_changed():
    contract = make_contract()
    builder = ObservationBuilder(contract)
    (record,) = random_history(seed=2, steps=1, drafters=DRAFTERS)
    builder.update(record)
    actions = np.full((record.num_rows, 2), 3)
    assert builder.resolve(Combinations.of(contract, 3), record, actions) is actions


def test_combinations_add_actions_and_no_fields():
    plain = Contract(DRAFTERS, LENGTHS[:4])
    combined = Contract((*DRAFTERS, *COMBINED), LENGTHS)
    assert combined.field_names == plain.field_names
    assert combined.proposers == plain.proposers == DRAFTERS[1:]
    assert combined.action_nvec == (7, 9)
    assert Contract.from_dict(combined.to_dict()) == combined
    assert combined.members("longest_expected") == DRAFTERS[1:]
    assert combined.members("suffix_else_eagle3") == ("suffix", "eagle3")


@pytest.mark.parametrize(
    ("drafters", "sentence"),
    [
        (
            ("none", "ngram", "ngram_else_eagle3"),
            "The combination 'ngram_else_eagle3' needs the drafter 'eagle3'; add 'eagle3' to the "
            "drafters.",
        ),
        (
            ("none", "eagle3", "suffix_else_eagle3"),
            "The combination 'suffix_else_eagle3' needs the drafter 'suffix'; add 'suffix' to the "
            "drafters.",
        ),
        (
            ("none", "ngram", "longest_expected"),
            "The combination 'longest_expected' needs two drafters to choose from; add one.",
        ),
        (
            ("none", "ngram", "ngram_else_eagle3", "eagle3"),
            "The combination 'ngram_else_eagle3' stands before a drafter; list combinations last.",
        ),
        (
            ("none", "ngram", "eagle3", "eagle3_else_ngram"),
            "Unknown drafter 'eagle3_else_ngram'; choose from none, ngram, suffix, eagle3, eagle, "
            "draft_model, mtp, combine two as in ngram_else_eagle3, or take longest_expected.",
        ),
    ],
)
def test_combinations_that_cannot_be_are_refused(drafters, sentence):
    with pytest.raises(ContractError) as refusal:
        Contract(drafters, (0, *[4] * (len(drafters) - 1)))
    assert str(refusal.value) == sentence


def test_a_match_that_is_never_looked_for_is_refused():
    contract = Contract(("none", "ngram", "eagle3", "ngram_else_eagle3"), (0, 8, 4, 8))
    with pytest.raises(ConfigError) as refusal:
        check_settings(contract, DrafterSettings(ngram_max_match=4, combination_min_match=5))
    assert str(refusal.value) == (
        "'ngram_else_eagle3' waits for matches of 5 tokens and 'ngram' looks for 4 at most; lower "
        "combination_min_match."
    )
    check_settings(contract, DrafterSettings(ngram_max_match=4, combination_min_match=4))
    with pytest.raises(ConfigError, match="combination_min_match is 0"):
        DrafterSettings(combination_min_match=0)
