"""What is written is read back; a file that no run can have written is refused in a sentence."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import envs.traces
from envs.traces import DrafterTrace, Traces, concatenate, read_traces
from policy.errors import TraceError

from .synthetic_traces import LENGTHS, make_traces, with_suffix

DTYPES = {
    "num_draft_tokens": np.uint8,
    "num_accepted_tokens": np.uint8,
    "match_length": np.uint8,
    "agreement": np.float32,
    "survival": np.float32,
    "margin": np.float32,
    "target_probability": np.float32,
}


def sampled_traces():
    """Traces of temperature 0.7, with unknown survivals among the known ones."""
    traces = make_traces(seed=4, temperature=0.7)
    rng = np.random.default_rng(4)
    unknown = traces.drafters["eagle3"].num_draft_tokens == 0
    drafters = {
        name: replace(drafter, target_probability=rng.random(len(unknown)).astype(np.float32))
        for name, drafter in traces.drafters.items()
    }
    drafters["eagle3"].survival[unknown] = np.nan
    return replace(traces, drafters=drafters)


def assert_same(ours, theirs):
    for name in vars(Traces(**vars(ours))):
        if name not in ("drafters", "prompts"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert len(ours.prompts) == len(theirs.prompts)
    for our, their in zip(ours.prompts, theirs.prompts, strict=True):
        np.testing.assert_array_equal(our, their)
    assert list(ours.drafters) == list(theirs.drafters)
    for name, drafter in ours.drafters.items():
        for part, values in vars(drafter).items():
            np.testing.assert_array_equal(
                values, getattr(theirs.drafters[name], part), err_msg=f"{name}_{part}"
            )


def refused(act, *arguments, **keywords):
    """The sentence that refuses; it ends with what to do."""
    with pytest.raises(TraceError) as refusal:
        act(*arguments, **keywords)
    sentence = str(refusal.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no sentence with a mend: {sentence}"
    return sentence


@pytest.mark.parametrize(
    "traces",
    [make_traces(), sampled_traces(), with_suffix(make_traces())],
    ids=["greedy", "sampled", "suffix"],
)
def test_a_file_is_read_back_as_it_was_written(traces, tmp_path):
    path = tmp_path / "deep" / "down.parquet"
    traces.write(path)
    again = read_traces(path)
    assert_same(again, traces)
    assert again.header == traces.header
    assert again.starts.dtype == np.int64
    assert again.is_stopped.dtype == np.bool_
    assert again.output_token_ids.dtype == np.int32
    assert {prompt.dtype for prompt in again.prompts} == {np.dtype(np.int32)}
    for drafter in again.drafters.values():
        for part, values in vars(drafter).items():
            assert values is None or values.dtype == DTYPES[part]
    (has_probability,) = {
        drafter.target_probability is not None for drafter in again.drafters.values()
    }
    assert has_probability == (traces.header.temperature > 0)


def test_a_reader_without_draftgym_finds_the_documented_columns(tmp_path):
    traces = with_suffix(make_traces())
    traces.write(tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert pq.read_metadata(tmp_path / "t.parquet").row_group(0).column(0).compression == "ZSTD"
    for name in table.column_names:
        described = re.sub("^(ngram|suffix|eagle3)_", "DRAFTER_", name)
        assert f"`{described}`" in envs.traces.__doc__
    for drafter, parts in traces.drafters.items():
        there = {part for part, values in vars(parts).items() if values is not None}
        assert there == {part for part in DTYPES if f"{drafter}_{part}" in table.column_names}
    start, end = traces.starts[5:7]
    row = table.slice(5, 1).to_pylist()[0]
    assert row["request_id"] == "request-5"
    assert row["prompt_token_ids"] == traces.prompts[5].tolist()
    assert row["output_token_ids"] == traces.output_token_ids[start:end].tolist()
    assert row["is_stopped"] is True
    for drafter, part in (("ngram", "agreement"), ("eagle3", "num_accepted_tokens")):
        values = getattr(traces.drafters[drafter], part)[start:end]
        assert row[f"{drafter}_{part}"] == values.tolist()
    survival = traces.drafters["eagle3"].survival[start:end]
    assert row["eagle3_survival"] == survival.ravel().tolist()
    header = json.loads(table.schema.metadata[b"draftgym"])
    assert (header["max_lengths"], header["target"]) == (LENGTHS | {"suffix": 12}, "a-model")


def test_several_files_are_read_as_one(tmp_path):
    whole = make_traces()
    for name, requests in (("a", [0, 1, 2]), ("b", [3]), ("c", range(4, 12))):
        whole.select(list(requests)).write(tmp_path / name)
    assert_same(read_traces(*(tmp_path / name for name in "abc")), whole)


def table_of(traces, **columns):
    """The table of traces, with some columns replaced, or dropped where None."""
    table = traces.table()
    for name, values in columns.items():
        index = table.column_names.index(name)
        table = table.remove_column(index)
        if values is not None:
            table = table.append_column(name, values)
    return table


def with_header(table, **changes):
    header = json.loads(table.schema.metadata[b"draftgym"])
    return table.replace_schema_metadata({b"draftgym": json.dumps({**header, **changes}).encode()})


def lists_of(traces, drafter, part, change, dtype):
    """A column of a drafter with its values changed."""
    values = change(getattr(traces.drafters[drafter], part).astype(int))
    spans = zip(traces.starts[:-1], traces.starts[1:], strict=True)
    return pa.array([values[first:last].tolist() for first, last in spans], pa.list_(dtype))


def negative(values):
    return np.where(np.arange(len(values)) == 7, -1, values)


def one_more(values):
    return values + (np.arange(len(values)) == 7)


def none_drafted(values):
    return np.zeros_like(values)


def damaged_tables():
    traces = make_traces()
    whole = traces.table()
    for drafter in LENGTHS:
        for part in ("num_draft_tokens", "num_accepted_tokens"):
            column = lists_of(traces, drafter, part, negative, pa.int8())
            table = table_of(traces, **{f"{drafter}_{part}": column})
            yield f"negative {drafter} {part}", table, f"negative lengths of '{drafter}'"
    column = lists_of(traces, "eagle3", "num_draft_tokens", none_drafted, pa.uint8())
    table = table_of(traces, eagle3_num_draft_tokens=column)
    yield "accepted without a draft", table, "more tokens of 'eagle3' accepted than drafted"
    column = lists_of(traces, "eagle3", "num_draft_tokens", one_more, pa.uint8())
    table = table_of(traces, eagle3_num_draft_tokens=column)
    yield "drafted beyond the longest", table, "more drafted than 4"
    for missing in ("eagle3_survival", "ngram_agreement", "kind", "output_token_ids"):
        yield f"without {missing}", table_of(traces, **{missing: None}), "lacks a part of a trace"
    yield (
        "no drafter column",
        whole.drop_columns([name for name in whole.column_names if name.startswith("ngram")]),
        "lacks a part",
    )
    yield "another trace version", with_header(whole, trace_version=1), "trace_version 1"
    yield "another contract", with_header(whole, contract_version=99), "contract_version 99"
    yield "a header with more", with_header(whole, colour="red"), "colour"
    header = json.loads(whole.schema.metadata[b"draftgym"])
    del header["target"]
    fewer = whole.replace_schema_metadata({b"draftgym": json.dumps(header).encode()})
    yield "a header with less", fewer, "target"
    yield "no header", whole.replace_schema_metadata({}), "not a trace file of draftgym"
    yield "no requests", whole.slice(0, 0), "request without output tokens"
    column = pa.array([[]] * traces.num_requests, pa.list_(pa.uint8()))
    table = table_of(traces, ngram_match_length=column)
    yield "no values", table, "0 values of ngram_match_length"
    column = pa.array([[0.5]] * traces.num_requests, pa.list_(pa.float32()))
    yield "too few survivals", table_of(traces, eagle3_survival=column), "eagle3_survival"


DAMAGED = {name: (table, said) for name, table, said in damaged_tables()}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_no_run_can_have_written_is_refused_by_name(damage, tmp_path):
    table, said = DAMAGED[damage]
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    sentence = refused(read_traces, path)
    assert said in sentence
    assert str(path) in sentence


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(share, tmp_path):
    path = tmp_path / "t.parquet"
    make_traces().write(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert f"{path} is cut off" in refused(read_traces, path)


def test_what_is_no_file_of_ours_is_refused(tmp_path):
    assert "There is no trace file" in refused(read_traces, tmp_path / "nowhere.parquet")
    (tmp_path / "text.parquet").write_text("not a table\n" * 100)
    assert "damaged" in refused(read_traces, tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "other.parquet")
    assert "not a trace file" in refused(read_traces, tmp_path / "other.parquet")
    assert "No trace file was named" in refused(read_traces)


def test_a_killed_write_leaves_the_earlier_file_whole_and_no_broken_one(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die_half_way(table, where, **settings):
        where.write_bytes(b"PAR1 and so on")
        raise Killed

    earlier, later = make_traces(seed=1), make_traces(seed=2)
    earlier.write(tmp_path / "t.parquet")
    monkeypatch.setattr(envs.traces.pq, "write_table", die_half_way)
    for name in ("t.parquet", "new.parquet"):
        with pytest.raises(Killed):
            later.write(tmp_path / name)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["t.parquet"]
    assert_same(read_traces(tmp_path / "t.parquet"), earlier)
    later.write(tmp_path / "t.parquet")
    assert_same(read_traces(tmp_path / "t.parquet"), later)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("target", "another-model"),
        ("output_tokens", 41),
        ("max_lengths", {"ngram": 8, "eagle3": 3}),
        ("ngram_min_match", 3),
    ],
)
def test_traces_of_other_settings_do_not_go_together(name, value):
    ours = make_traces().select([0, 1])
    theirs = make_traces().select([2, 3])
    theirs = replace(theirs, header=replace(theirs.header, **{name: value}))
    assert f"with {name} " in refused(concatenate, [ours, theirs])


def test_a_request_may_be_there_but_once(tmp_path):
    traces = make_traces()
    assert "twice" in refused(concatenate, [traces.select([0, 1]), traces.select([1, 2])])
    traces.write(tmp_path / "t.parquet")
    assert "twice" in refused(read_traces, tmp_path / "t.parquet", tmp_path / "t.parquet")


def test_selected_requests_are_the_same_in_the_given_order():
    traces = make_traces()
    chosen = [7, 2, 11]
    some = traces.select(chosen)
    assert some.request_ids == ("request-7", "request-2", "request-11")
    assert some.num_output_tokens.tolist() == traces.num_output_tokens[chosen].tolist()
    for index, request in enumerate(chosen):
        np.testing.assert_array_equal(some.outputs(index), traces.outputs(request))
        np.testing.assert_array_equal(some.prompts[index], traces.prompts[request])
        assert some.is_stopped[index] == traces.is_stopped[request]
        ours = slice(*some.starts[index : index + 2])
        theirs = slice(*traces.starts[request : request + 2])
        for name, drafter in some.drafters.items():
            for part, values in vars(drafter).items():
                if values is not None:
                    whole = getattr(traces.drafters[name], part)
                    np.testing.assert_array_equal(values[ours], whole[theirs])
    assert traces.select([]).num_requests == 0


def test_a_split_is_the_requests_of_its_name():
    traces = make_traces()
    assert traces.of_split("eval").request_ids == ("request-3", "request-7", "request-11")
    train = traces.of_split("train")
    assert train.num_requests == 9
    assert set(train.splits) == {"train"}
    assert "no request of the eval split" in refused(train.of_split, "eval")


def test_the_contract_holds_what_was_recorded_or_less():
    traces = make_traces()
    contract = traces.contract()
    assert contract.drafters == ("none", "ngram", "eagle3")
    assert contract.max_lengths == (0, 8, 4)
    assert contract.granularity == "batch"
    less = traces.contract({"ngram": 3}, "request")
    assert (less.drafters, less.max_lengths) == (("none", "ngram"), (0, 3))
    assert less.granularity == "request"


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"ngram": 9}, "'ngram' up to 8 tokens, not 9"),
        ({"ngram": 8, "eagle3": 5}, "'eagle3' up to 4 tokens, not 5"),
        ({"draft_model": 1}, "'draft_model' up to 0 tokens, not 1"),
    ],
)
def test_drafts_that_were_not_recorded_cannot_be_asked_for(lengths, said):
    assert said in refused(make_traces().contract, lengths)


def test_a_drafter_without_a_part_is_changed_in_the_others():
    drafter = DrafterTrace(np.ones(3, np.uint8), np.zeros(3, np.uint8))
    doubled = drafter.changed(lambda name, values: np.repeat(values, 2))
    assert len(doubled.num_draft_tokens) == len(doubled.num_accepted_tokens) == 6
    assert doubled.survival is None
