"""The contract: its action table, its fields, and what it refuses to read."""

import itertools
import json
import re

import numpy as np
import pytest

from policy.contract import MAX_TOKEN_DRAFT_LENGTH, MODEL_DRAFTERS, Contract
from policy.errors import ContractError

CONTRACTS = [
    Contract(("none",), (0,)),
    Contract(("none", "ngram"), (0, 16)),
    Contract(("none", "eagle3"), (0, 3), "request"),
    Contract(("none", "ngram", "eagle3"), (0, 8, 4), "request"),
    Contract(("none", "draft_model", "ngram"), (0, 5, 1)),
    Contract(("none", "suffix", "eagle3"), (0, 16, 4)),
]
every_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: "+".join(c.drafters))


def valid_pairs(contract):
    """Written out anew: no speculation, or a drafter with 1..its maximum."""
    pairs = {(0, 0)}
    for index, drafter in enumerate(contract.drafters):
        if drafter != "none":
            pairs |= {(index, length + 1) for length in range(contract.max_lengths[index])}
    return pairs


@every_contract
def test_every_action_becomes_one_valid_pair(contract):
    """T1: no pair of drafter and length that the engine could not take."""
    longest = 2 * MAX_TOKEN_DRAFT_LENGTH
    table = itertools.product(range(len(contract.drafters)), range(longest + 1))
    reached = set()
    for drafter, length in table:
        pair = contract.canonical_action((drafter, length))
        reached.add(pair)
        assert pair in valid_pairs(contract)
        assert contract.canonical_action(pair) == pair
        assert [type(number) for number in pair] == [int, int]
        if (drafter, length) in valid_pairs(contract):
            assert pair == (drafter, length)
        elif pair != (0, 0):
            assert pair == (drafter, contract.max_lengths[drafter]), "a longer draft is cut"
        else:
            assert drafter == 0 or length == 0
    assert reached == valid_pairs(contract)


@every_contract
def test_whole_tables_are_mapped_like_single_actions(contract):
    table = list(itertools.product(range(len(contract.drafters)), range(40)))
    for dtype in (np.int64, np.int32, np.int8):
        mapped = contract.canonical_actions(np.array(table, dtype))
        assert (mapped.dtype, mapped.shape) == (np.int64, (len(table), 2))
        assert [tuple(row) for row in mapped.tolist()] == [
            contract.canonical_action(action) for action in table
        ]


@every_contract
@pytest.mark.parametrize(
    "action", [(-1, 1), (9, 0), (0, -1), (1.0, 2), (np.nan, 0), (1,), (0, 0, 0)]
)
def test_actions_outside_the_table_are_refused(contract, action):
    with pytest.raises(ContractError, match=r"outside the table|is no action"):
        contract.canonical_action(action)
    with pytest.raises(ContractError, match=r"outside the table|give integers \[rows, 2\]"):
        contract.canonical_actions(np.array([(0, 0)[: len(action)], action][1:]))


def test_one_bad_row_among_good_ones_is_refused_and_named():
    contract = CONTRACTS[3]
    actions = np.array([(0, 0), (1, 8), (3, 2), (2, 4)])
    with pytest.raises(ContractError, match=r"^Action \(3, 2\) is outside the table; .* 0\.\.2 "):
        contract.canonical_actions(actions)


def test_an_action_may_choose_a_cutoff_where_its_drafter_tells_survival():
    contract = Contract(
        ("none", "ngram", "eagle3", "ngram_else_eagle3"), (0, 2, 3, 3), cutoffs=(0.2, 0.5)
    )
    assert contract.action_nvec == (4, 4, 3)
    triples = {
        (drafter, length, cutoff)
        for drafter, longest in ((1, 2), (2, 3), (3, 3))
        for length in range(1, longest + 1)
        for cutoff in range(1 if drafter == 1 else 3)
    }
    assert set(map(tuple, contract.action_table.tolist())) == triples | {(0, 0, 0)}
    for action, canonical in {
        (1, 9, 2): (1, 2, 0),
        (2, 9, 2): (2, 3, 2),
        (2, 0, 2): (0, 0, 0),
        (0, 3, 1): (0, 0, 0),
        (3, 1): (3, 1, 0),
    }.items():
        assert contract.canonical_action(action) == canonical
        np.testing.assert_array_equal(contract.canonical_actions(np.array([action])), [canonical])
    values = contract.cutoff_values(np.array([(2, 3, 2), (1, 2, 0), (3, 1, 1)]))
    np.testing.assert_array_equal(values, np.array([0.5, 0, 0.2], np.float32))
    assert Contract.from_dict(contract.to_dict()) == contract
    for action in ((2, 1, 3), (2, 1, -1)):
        with pytest.raises(ContractError, match=r"outside the table; .* a cutoff in 0\.\.2"):
            contract.canonical_action(action)


@pytest.mark.parametrize(
    ("drafters", "cutoffs"),
    [("eagle3", (0.5, 0.5)), ("eagle3", (0.5, 0.2)), ("eagle3", (0.0,)), ("eagle3", (1.0,)),
     ("eagle3", ("a",)), ("ngram", (0.5,))],
)  # fmt: skip
def test_cutoffs_that_cut_nothing_or_in_no_order_are_refused(drafters, cutoffs):
    with pytest.raises(ContractError, match="mend or empty them"):
        Contract(("none", drafters), (0, 4), cutoffs=cutoffs)


@every_contract
def test_fields_are_unique_bounded_and_explained(contract):
    names = contract.field_names
    assert len(set(names)) == len(names) == len(contract.fields)
    for field in contract.fields:
        assert re.fullmatch(r"[a-z0-9_]+", field.name)
        assert field.low < field.high, f"{field.name} cannot be normalised"
        assert field.unit
        assert field.meaning[0].isupper()
        assert field.meaning.endswith(".")
        assert field.name.endswith("_log2") == field.unit.startswith("log2(1 + ")
    assert contract.low.dtype == contract.high.dtype == np.float32
    assert contract.low.tolist() == [field.low for field in contract.fields]
    assert contract.high.tolist() == [field.high for field in contract.fields]


def test_the_order_of_the_observation_is_fixed():
    """A policy reads columns by position: this list changes only with the contract's version."""
    assert Contract(("none", "ngram", "eagle3"), (0, 8, 4)).field_names == (
        "num_running_reqs_log2",
        "num_waiting_reqs_log2",
        "kv_cache_usage",
        "num_context_tokens_log2",
        "num_prefill_tokens_log2",
        "temperature",
        "ngram_acceptance_rate_pos_1",
        "ngram_acceptance_rate_pos_2",
        "ngram_acceptance_rate_pos_3",
        "ngram_mean_acceptance_length",
        "ngram_steps_since_draft_log2",
        "ngram_draft_share",
        "ngram_match_length",
        "ngram_agreement",
        "ngram_draft_tokens_on_offer",
        "ngram_counterfactual_accepted_tokens",
        "eagle3_acceptance_rate_pos_1",
        "eagle3_acceptance_rate_pos_2",
        "eagle3_acceptance_rate_pos_3",
        "eagle3_mean_acceptance_length",
        "eagle3_steps_since_draft_log2",
        "eagle3_fresh_share",
        "eagle3_pending_tokens_log2",
        "eagle3_top1_probability",
        "eagle3_expected_accepted_tokens",
        "last_share_none",
        "last_share_ngram",
        "last_share_eagle3",
        "last_num_speculative_tokens",
        "last_emitted_tokens",
    )


def test_a_drafter_that_tells_survival_has_no_count_of_matches():
    contract = Contract(("none", "suffix"), (0, 16))
    assert contract.field_names[11:16] == (
        "suffix_draft_share",
        "suffix_match_length",
        "suffix_expected_accepted_tokens",
        "suffix_draft_tokens_on_offer",
        "suffix_counterfactual_accepted_tokens",
    )


def test_bounds_of_lengths_follow_each_drafter():
    contract = Contract(("none", "ngram", "eagle3"), (0, 8, 4))
    high = dict(zip(contract.field_names, contract.high.tolist(), strict=True))
    assert (high["ngram_mean_acceptance_length"], high["eagle3_mean_acceptance_length"]) == (9, 5)
    assert (high["last_num_speculative_tokens"], high["last_emitted_tokens"]) == (8, 9)
    assert contract.action_nvec == (3, 9)


@every_contract
def test_a_stored_contract_is_read_back_unchanged(contract):
    stored = json.loads(json.dumps(contract.to_dict()))
    read = Contract.from_dict(stored)
    assert read == contract
    assert read.fields == contract.fields
    assert hash(read) == hash(contract)


def swap(fields):
    fields[7], fields[9] = fields[9], fields[7]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda d: swap(d["fields"]),
            "Field 7 of the policy is 'ngram_mean_acceptance_length' where this version has "
            "'ngram_acceptance_rate_pos_2' or other bounds; export the policy again with this "
            "version.",
        ),
        (
            lambda d: d["fields"][3].update(high=20),
            "Field 3 of the policy is 'num_context_tokens_log2' where this version has "
            "'num_context_tokens_log2' or other bounds; export the policy again with this version.",
        ),
        (
            lambda d: d["fields"].pop(),
            "The policy reads 19 fields, this version gives 20; export the policy again with "
            "this version.",
        ),
        (
            lambda d: d.update(contract_version=2),
            "The policy speaks contract version 2, this draftgym 1; export the policy again with "
            "this version.",
        ),
        (
            lambda d: (d.pop("fields"), d.pop("drafters")),
            "The policy carries no drafters, fields; export it again.",
        ),
    ],
    ids=["reordered", "other bounds", "one less", "other version", "incomplete"],
)
def test_a_contract_of_another_version_is_refused_with_its_first_difference(change, sentence):
    stored = CONTRACTS[1].to_dict()
    change(stored)
    with pytest.raises(ContractError) as refusal:
        Contract.from_dict(stored)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    "change",
    [
        {"fields": None},
        {"fields": [None]},
        {"fields": ["temperature"]},
        {"fields": [{"name": "temperature"}]},
        {"drafters": 3},
        {"max_lengths": None},
        {"max_lengths": [0, "16"]},
        {"max_lengths": [0, 16.0]},
        {"granularity": ["batch"]},
        {"contract_version": "1"},
    ],
    ids=str,
)
def test_damaged_contracts_are_refused_with_a_sentence(change):
    with pytest.raises(ContractError, match=r"^[A-Z][^\n]*\.$"):
        Contract.from_dict({**CONTRACTS[1].to_dict(), **change})


@pytest.mark.parametrize("stored", [None, 3, "contract", ["drafters"]])
def test_what_is_no_mapping_is_no_contract(stored):
    with pytest.raises(ContractError, match="no mapping; export"):
        Contract.from_dict(stored)


@pytest.mark.parametrize(
    ("drafters", "lengths", "sentence"),
    [
        ((), (), "The first drafter must be 'none'; put it in front of the list."),
        (
            ("ngram", "none"),
            (4, 0),
            "The first drafter must be 'none'; put it in front of the list.",
        ),
        (
            ("none", "eagle3", "draft_model"),
            (0, 4, 4),
            "vLLM loads one model drafter, not eagle3 and draft_model; keep one.",
        ),
        (
            ("none", "oracle"),
            (0, 4),
            "Unknown drafter 'oracle'; choose from none, ngram, suffix, eagle3, eagle, "
            "draft_model, mtp, combine two as in ngram_else_eagle3, or take longest_expected.",
        ),
        (
            ("none", 5),
            (0, 4),
            "Unknown drafter '5'; choose from none, ngram, suffix, eagle3, eagle, draft_model, "
            "mtp, combine two as in ngram_else_eagle3, or take longest_expected.",
        ),
        (
            ("none", "ngram", "ngram"),
            (0, 4, 4),
            "A drafter is listed twice; name each drafter once.",
        ),
        (("none", "ngram"), (0,), "Give one maximal length per drafter, 0 for 'none'."),
        (
            ("none", "ngram"),
            (0, 17),
            "The maximal length of 'ngram' must be a whole number in 1..16, not 17.",
        ),
        (
            ("none", "eagle3"),
            (0, 0),
            "The maximal length of 'eagle3' must be a whole number in 1..16, not 0.",
        ),
        (
            ("none", "ngram"),
            (1, 4),
            "The maximal length of 'none' must be a whole number in 0..0, not 1.",
        ),
    ],
)
def test_drafters_the_hook_cannot_serve_are_refused(drafters, lengths, sentence):
    with pytest.raises(ContractError) as refusal:
        Contract(drafters, lengths)
    assert str(refusal.value) == sentence


def test_an_unknown_granularity_is_refused():
    with pytest.raises(ContractError, match="choose 'batch' or 'request'"):
        Contract(("none",), (0,), "token")


def test_every_model_drafter_may_be_the_one():
    for drafter in MODEL_DRAFTERS:
        contract = Contract(("none", "ngram", drafter), (0, 8, 4))
        assert contract.model_drafters == (drafter,)
