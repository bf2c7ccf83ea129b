"""The import of published traces, on files made here and, where they are, on the real ones."""

import gzip
import json

import numpy as np
import pytest

from envs.prompts.prompt import split_of
from envs.published_traces import find_published, read_published
from envs.trace_import import ImportConfig, import_published, to_traces
from envs.traces import read_traces
from policy.errors import ConfigError, TraceError
from policy.serving.ngram import NgramDrafter, drafts_along
from policy.serving.token_drafter import Contexts

from .published import (
    FOLDER,
    needs_published_traces,
    published_line,
    refusal_of,
    run_script,
    write_published,
)


def make_config(src="somewhere", output_dir="elsewhere", **changes):
    values = {"target": "a-model", "output_tokens": 64, "max_model_len": 4096, **changes}
    return ImportConfig(src=str(src), output_dir=str(output_dir), **values)


def make_traces(lines, tmp_path, **changes):
    path = write_published(tmp_path / "run_toy.jsonl", lines)
    return to_traces(read_published(path), "toy", make_config(**changes))


@pytest.mark.parametrize("bounds", [(1, 3), (2, 2), (3, 7)])
def test_drafts_along_an_output_are_those_of_the_serving_drafter(bounds):
    rng = np.random.default_rng(bounds)
    for _ in range(20):
        tokens = rng.integers(0, int(rng.integers(1, 4)), 80).astype(np.int32)
        num_prompt, max_length = int(rng.integers(1, 40)), int(rng.integers(1, 17))
        found, agreement = drafts_along(tokens, num_prompt, *bounds, max_length)
        assert found.shape == (80 - num_prompt, 3)
        for position, (match_length, drafted, accepted) in enumerate(found):
            drafter = NgramDrafter(
                max_length=max_length, min_match=bounds[0], max_match=bounds[1], max_model_len=999
            )
            end = num_prompt + position
            ends, prompts = np.array([end]), np.array([num_prompt])
            contexts = Contexts(("a",), tokens[None], np.zeros(1, np.intp), ends, prompts)
            offer = drafter.offer(contexts)
            (draft,) = drafter.draft(np.array([0]), np.array([99]))
            draft, follows = draft.token_ids, tokens[end:].tolist()
            leading = 0
            while leading < min(len(draft), len(follows)) and draft[leading] == follows[leading]:
                leading += 1
            assert match_length == offer.match_length[0]
            assert agreement[position] == offer.agreement[0]
            assert (drafted, accepted) == (len(draft), leading)


def test_a_request_becomes_a_row_of_the_trace(tmp_path):
    line = {
        "id": 7,
        "prompt_token_ids": [5, 6, 7, 8],
        "generated_token_ids": [9, 5, 6, 7, 8, 9, 1],
        "acc_ngram": {"acc_len": [1, 1, 1, 1, 3, 2, 1]},
        "acc_eagle": {"acc_len": [1, 4, 3, 9, 1, 1, 1]},
    }
    traces = make_traces([line], tmp_path)
    assert traces.request_ids == ("toy-7",)
    assert (traces.kinds, traces.splits) == (("toy",), (split_of("toy-7"),))
    assert traces.prompts[0].tolist() == [5, 6, 7, 8]
    assert traces.outputs(0).tolist() == [9, 5, 6, 7, 8, 9, 1]
    assert traces.is_stopped.tolist() == [True]
    ngram, eagle = traces.drafters["ngram"], traces.drafters["eagle3"]
    # After 9 5 6 7 the earliest 5 6 7 was followed by 8 9 5 6 7, of which 8 9 come.
    assert ngram.match_length.tolist() == [0, 0, 0, 0, 3, 4, 5]
    # Each is alike in one place, where it goes on as the draft does: 1 of it and one assumed.
    assert ngram.agreement.tolist() == [0, 0, 0, 0, 0.5, 0.5, 0.5]
    assert ngram.num_draft_tokens.tolist() == [0, 0, 0, 0, 5, 5, 5]
    assert ngram.num_accepted_tokens.tolist() == [0, 0, 0, 0, 2, 1, 0]
    # EAGLE drafts what remains; more than that cannot be accepted.
    assert eagle.num_draft_tokens.tolist() == [0, 6, 5, 4, 3, 2, 1]
    assert eagle.num_accepted_tokens.tolist() == [0, 3, 2, 4, 0, 0, 0]
    assert eagle.survival.shape == eagle.margin.shape == (7, 16)
    assert np.isnan(eagle.survival).all()


def test_misaligned_lists_are_cut_or_padded_or_their_requests_left_out(tmp_path):
    rng = np.random.default_rng(0)
    lines = [
        published_line(rng, f"r{i}", excess, positions=20) for i, excess in enumerate((0, -9, 9))
    ]
    kept = make_traces(lines, tmp_path)
    for request, line in enumerate(lines):
        accepted = kept.drafters["eagle3"].num_accepted_tokens.reshape(3, 20)[request]
        for position in range(1, 20):
            published = line["acc_eagle"]["acc_len"]
            tokens = published[position] - 1 if position < len(published) else 0
            assert accepted[position] == min(tokens, 16, 20 - position)
    assert make_traces(lines, tmp_path, misaligned="drop").request_ids == ("toy-r0",)
    with pytest.raises(TraceError, match=r"are misaligned; import with misaligned=keep"):
        make_traces(lines[1:], tmp_path, misaligned="drop")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_import_writes_a_trace_and_its_provenance(tmp_path, suffix):
    rng = np.random.default_rng(1)
    lines = [published_line(rng, f"r{i}", -(i % 2)) for i in range(4)]
    lines[1]["acc_eagle"]["acc_len"] = []
    write_published(tmp_path / "in" / f"run_toy{suffix}", lines)
    (imported,) = import_published(make_config(tmp_path / "in", tmp_path / "out"))
    assert imported.path == tmp_path / "out" / "run_toy.parquet"
    stored = json.loads((tmp_path / "out" / "run_toy.json").read_text())
    assert stored == imported.provenance
    assert (stored["source"], stored["num_published"]) == (f"run_toy{suffix}", 4)
    assert stored["misaligned_request_ids"] == ["toy-r1", "toy-r3"]
    traces = read_traces(imported.path)
    assert traces.num_requests == stored["num_requests"] == 4
    assert traces.starts[-1] == stored["num_positions"]
    accepted = traces.drafters["ngram"].num_accepted_tokens
    assert stored["ngram_agreement"] == pytest.approx((accepted == 0).mean())
    assert traces.contract().max_lengths == (0, 16, 16)


def changed(**changes):
    line = published_line(np.random.default_rng(2), "r0", positions=4)
    return {**line, **changes}


DAMAGED = [
    (b"", "holds no request"),
    (json.dumps(changed()).encode()[:-5], "line 1, is cut off or no JSON"),
    (b"\xff\xfe\n", "is cut off or damaged"),
    (b"[1, 2]\n", "is not an object of the published format"),
    (b'{"id": "a"}\n', "line 1, has no 'prompt_token_ids'"),
    ((json.dumps(changed()) + "\n").encode() * 2, "holds the request 'r0' twice"),
]
DAMAGED += [
    (json.dumps(changed(**changes)).encode(), sentence)
    for changes, sentence in [
        ({"acc_eagle": {}}, "has no 'acc_len'"),
        ({"acc_eagle": [1]}, "is not an object"),
        ({"acc_eagle": {"acc_len": [1, -1, 1, 1]}}, "acc_eagle.acc_len holds -1..1"),
        ({"acc_ngram": {"acc_len": [1, 0, 1, 1]}}, "acc_ngram.acc_len holds 0..1"),
        ({"acc_eagle": {"acc_len": [1, 1.5]}}, "acc_eagle.acc_len is no list of whole numbers"),
        ({"generated_token_ids": [-1]}, "generated_token_ids holds -1..-1"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids holds"),
        ({"prompt_token_ids": None}, "prompt_token_ids is no list of whole numbers"),
        ({"generated_token_ids": []}, "has no prompt or no output tokens"),
        ({"generated_token_ids": [0] * 65}, "more than the limit 64; raise output_tokens"),
    ]
]


@pytest.mark.parametrize(("content", "sentence"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_a_damaged_file_is_refused_in_a_sentence_and_nothing_is_written(
    tmp_path, content, sentence
):
    write_published(tmp_path / "in" / "a_good.jsonl", [changed()])
    (tmp_path / "in" / "b_bad.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=r"^[^\n]+; [^\n]+\.$") as refused:
        import_published(make_config(tmp_path / "in", tmp_path / "out"))
    assert sentence in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_cut_off_archive_is_refused(tmp_path):
    content = gzip.compress(json.dumps(changed()).encode())
    for length in (5, len(content) // 2, len(content) - 3):
        (tmp_path / "a.jsonl.gz").write_bytes(content[:length])
        with pytest.raises(TraceError, match="cut off or damaged; download it again"):
            read_published(tmp_path / "a.jsonl.gz")


def test_a_source_must_hold_published_files_each_once(tmp_path):
    for source in (tmp_path, tmp_path / "nothing", write_published(tmp_path / "a.txt", [])):
        with pytest.raises(TraceError, match=r"no .jsonl.gz or .jsonl file at"):
            find_published(source)
    write_published(tmp_path / "a.jsonl", [changed()])
    write_published(tmp_path / "a.jsonl.gz", [changed()])
    with pytest.raises(TraceError, match="holds a twice; keep one of them"):
        find_published(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_length": 17}, "max_length is 17; make it 1 to 16."),
        ({"ngram_min_match": 8}, "do not ascend within 1 to 16; correct them."),
        ({"ngram_max_match": 17}, "do not ascend within 1 to 16; correct them."),
    ],
)
def test_settings_out_of_range_are_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_config(**changes)


def test_the_script_imports_and_says_what(tmp_path):
    rng = np.random.default_rng(3)
    write_published(tmp_path / "run_toy.jsonl.gz", [published_line(rng, f"r{i}") for i in range(3)])
    done = run_script("import_traces.py", f"SRC={tmp_path}", "output_dir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run_toy.parquet: 3 requests" in done.stdout
    assert "0 of 3 published ones misaligned (keep)" in done.stdout
    assert read_traces(tmp_path / "out" / "run_toy.parquet").num_requests == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run_toy.jsonl.gz"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "SRC is missing; give a published file"),
        (["SRC=nothing"], "There is no .jsonl.gz or .jsonl file at nothing;"),
        (["SCR=nothing"], "Unknown key 'SCR'; did you mean 'SRC'?"),
        (["SRC=a.jsonl", "misaligned=dorp"], "misaligned is 'dorp'; did you mean 'drop'?"),
        (["SRC=a.jsonl", "output_dir=a.jsonl/x"], "Cannot write to a.jsonl/x (Not a directory);"),
    ],
)
def test_the_script_refuses_in_a_sentence(tmp_path, arguments, sentence):
    write_published(tmp_path / "a.jsonl", [changed()])
    assert sentence in refusal_of(run_script("import_traces.py", *arguments, cwd=tmp_path))


@needs_published_traces
@pytest.mark.parametrize(
    ("kind", "num_requests", "num_misaligned"),
    [("gsm8k", 300, 126), ("instructcoder", 500, 92), ("sharegpt", 310, 241)],
)
def test_the_published_traces_are_recomputed_almost_everywhere(
    tmp_path, kind, num_requests, num_misaligned
):
    (source,) = FOLDER.glob(f"*_{kind}.jsonl.gz")
    config = make_config(source, tmp_path, output_tokens=8192, max_model_len=131072)
    (imported,) = import_published(config)
    assert imported.provenance["num_requests"] == num_requests
    assert imported.provenance["num_misaligned"] == num_misaligned
    assert imported.provenance["ngram_agreement"] > 0.999
    traces = read_traces(imported.path)
    assert set(traces.kinds) == {kind}
    assert set(traces.splits) == {"train", "eval"}
