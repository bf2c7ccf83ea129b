"""From a tiny target's states to an exported head: labels, loss, acceptance, resuming."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from policy.contract import Contract
from policy.errors import ConfigError
from policy.step import StepRecord
from policy.training.drafter.acceptance import Acceptance, AcceptanceCounter, mean_over_kinds
from policy.training.drafter.export import export_head, read_head
from policy.training.drafter.fit import FitConfig, fit_head
from policy.training.drafter.initial import check_target, initial_head
from policy.training.drafter.objective import accepted_shares, make_teacher, unrolled_loss
from policy.training.drafter.report import table
from policy.training.drafter.samples import Sample
from policy.training.drafter.target_states import StatesFolder, compute_states, write_states
from policy.training.drafter.unroll import unroll
from policy.training.drafter.vocabulary import DraftVocabulary, most_frequent

AUX_LAYERS = (1, 2, 3)
VOCAB_SIZE = 40
VOCABULARY = DraftVocabulary(torch.arange(0, VOCAB_SIZE, 2), VOCAB_SIZE)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def samples(target):
    """Answers the target wrote greedily."""
    draw = torch.Generator().manual_seed(1)
    written = []
    for number in range(40):
        prompt = torch.randint(VOCAB_SIZE, (1, 3 + number % 3), generator=draw)
        ids = prompt
        for _ in range(12):
            with torch.no_grad():
                following = target(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, following], dim=1)
        written.append(Sample(ids[0].numpy().astype(np.int32), prompt.shape[1], "code"))
    return written


@pytest.fixture(scope="module")
def states(target, samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    write_states(target, samples, AUX_LAYERS, folder)
    return StatesFolder(folder)


@pytest.fixture
def head(target, states):
    return initial_head(target, VOCABULARY, states[0].aux)


def test_states_are_what_the_layers_put_out(target, samples):
    sample, outputs = samples[4], []
    hooks = [
        target.model.layers[layer - 1].register_forward_hook(
            lambda _, __, output: outputs.append(
                (output if isinstance(output, torch.Tensor) else output[0])[0]
            )
        )
        for layer in AUX_LAYERS
    ]
    states = compute_states(target, sample, AUX_LAYERS)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(states.aux, torch.cat(outputs[:3], dim=-1))
    with torch.no_grad():
        logits = target(torch.from_numpy(sample.token_ids).long()[None]).logits[0]
    first = sample.num_prompt_tokens
    torch.testing.assert_close(target.lm_head(states.final), logits[first:-1])
    # The text is greedy, so the likeliest token is the one that follows.
    assert states.greedy.tolist() == sample.token_ids[first + 1 :].tolist()
    assert states.num_starts == len(states.greedy) == 11


def test_states_come_back_in_order_and_are_not_computed_twice(target, samples, states, tmp_path):
    assert len(states) == 40
    assert states.num_starts() == [11] * 40
    for number in (0, 17, 39):
        expected = compute_states(target, samples[number], AUX_LAYERS)
        for name, value in vars(expected).items():
            torch.testing.assert_close(vars(states[number])[name], value)
    write_states(target, samples[:3], AUX_LAYERS, tmp_path)
    write_states(None, samples[:3], AUX_LAYERS, tmp_path)
    assert len(StatesFolder(tmp_path)) == 3


def test_the_vocabulary_is_what_answers_use_most_then_prompts_then_low_ids():
    samples = [
        Sample(np.array([7, 7, 7, 5, 9, 9], np.int32), 4, "code"),
        Sample(np.array([7, 3, 9], np.int32), 1, "code"),
    ]
    # Answers: 9 three times, 3 once. Prompts: 7 four times, 5 once. Then 0.
    assert most_frequent(samples, 5, 12).token_ids.tolist() == [0, 3, 5, 7, 9]
    vocabulary = most_frequent(samples, 3, 12)
    assert vocabulary.token_ids.tolist() == [3, 7, 9]
    assert vocabulary.offsets.tolist() == [3, 6, 7]
    assert vocabulary.is_drafted.nonzero().squeeze(1).tolist() == [3, 7, 9]
    assert vocabulary.draft_ids.tolist() == [-1, -1, -1, 0, -1, -1, -1, 1, -1, 2, -1, -1]


def test_labels_mix_the_distribution_and_the_greedy_token(target, states):
    labels, greedy = make_teacher(target, VOCABULARY, 0.25).labels([states[3], states[8]])
    row = 0
    for number in (3, 8):
        for final, token in zip(states[number].final, states[number].greedy, strict=True):
            expected = 0.75 * (target.lm_head(final)[::2]).softmax(0)
            if token % 2 == 0:
                expected[token // 2] += 0.25
            torch.testing.assert_close(labels[row], expected)
            assert greedy[row] == (token // 2 if token % 2 == 0 else -1)
            row += 1
    assert row == len(labels)


@torch.no_grad()
def test_the_loss_weighs_positions_and_skips_what_cannot_be_drafted(target, states, head):
    teacher, some = make_teacher(target, VOCABULARY, 0.5), [states[3], states[8]]
    labels, greedy = teacher.labels(some)
    expected = 0.0
    for number, place in enumerate(unroll(head, teacher.embedding, some, 3)):
        for row, label in zip(place.rows.tolist(), place.targets.tolist(), strict=True):
            if greedy[label] >= 0:
                log_shares = head.logits(place.hidden[row]).log_softmax(0)
                expected -= 0.7**number * float((labels[label] * log_shares).sum())
    loss = float(unrolled_loss(head, teacher, some, 3, 0.7))
    assert (greedy < 0).any()
    assert loss == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_acceptance_counts_the_leading_agreeing_tokens(target, states, head):
    teacher = make_teacher(target, VOCABULARY, 0.5)
    shares = accepted_shares(head, teacher, [states[3], states[8]], 3)
    num_accepted, num_drafts = np.zeros(3), 0
    for number in (3, 8):
        one = states[number]
        places = list(unroll(head, teacher.embedding, [one], 3))
        for start in range(one.num_starts):
            num_drafts += 1
            for position in range(3):
                if start + position >= one.num_starts:
                    break
                drafted = 2 * int(head.logits(places[position].hidden[start]).argmax())
                if drafted != int(one.greedy[start + position]):
                    break
                num_accepted[position] += 1
    assert shares == pytest.approx((num_accepted / num_drafts).tolist())


def fit_config(**settings):
    return FitConfig(
        **{
            "epochs": 12,
            "rows_per_step": 60,
            "num_positions": 2,
            "muon_learning_rate": 0.01,
            "adam_learning_rate": 0.003,
            "num_validation_samples": 4,
            "steps_per_check": 7,
            **settings,
        }
    )


def test_fitting_helps_and_goes_on_where_it_was_killed(target, states, head, tmp_path):
    teacher = make_teacher(target, VOCABULARY, 0.5)
    some = [states[number] for number in range(20, 30)]
    before = float(unrolled_loss(head, teacher, some, 2, 1.0).detach())
    path = tmp_path / "fit" / "checkpoint.pt"
    shares = fit_head(fit_config(), head, teacher, states, path)
    assert float(unrolled_loss(head, teacher, some, 2, 1.0).detach()) < 0.8 * before
    fitted = {name: p.clone() for name, p in head.state_dict().items()}
    resumed = initial_head(target, VOCABULARY, states[0].aux)
    # Nothing is left to do, so the second run only reads the first one's result.
    assert fit_head(fit_config(), resumed, teacher, states, path) == shares
    for name, parameter in resumed.state_dict().items():
        torch.testing.assert_close(parameter, fitted[name])
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, "done": saved["done"] - 7}, path)
    fit_head(fit_config(), resumed, teacher, states, path)
    assert torch.load(path, weights_only=True)["done"] == saved["done"]
    assert not torch.equal(resumed.fc.weight, fitted["fc.weight"])


@pytest.mark.parametrize(
    ("aux_layers", "draft_vocab_size", "model_type", "sentence"),
    [
        ((1, 5), 20, "llama", "aux_layers is [1, 5] and the target has 4 layers; lower them."),
        ((1, 4), 41, "llama", "draft_vocab_size is 41 and the target has 40 tokens; lower it."),
        ((1, 4), 20, "qwen3", "is of type 'qwen3'; choose a Llama as model.target."),
    ],
)
def test_a_target_no_head_can_be_made_for_is_refused(
    target, aux_layers, draft_vocab_size, model_type, sentence
):
    config = SimpleNamespace(**{**target.config.to_dict(), "model_type": model_type})
    with pytest.raises(ConfigError) as refused:
        check_target(config, aux_layers, draft_vocab_size)
    assert str(refused.value).endswith(sentence)
    check_target(target.config, (1, 4), 40)


def test_an_exported_head_is_read_back_as_bfloat16(target, head, tmp_path):
    torch.nn.init.normal_(head.fc.weight)
    export_head(head, VOCABULARY, target.config, AUX_LAYERS, tmp_path)
    read, vocabulary = read_head(tmp_path, target.config)
    assert torch.equal(vocabulary.token_ids, VOCABULARY.token_ids)
    for name, parameter in read.state_dict().items():
        assert torch.equal(parameter, head.state_dict()[name].bfloat16().float())
    tensors = load_file(tmp_path / "model.safetensors")
    assert (torch.arange(20) + tensors["d2t"]).tolist() == list(range(0, 40, 2))
    assert tensors["t2d"].tolist() == [True, False] * 20
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (40, 20)


def test_tensors_are_named_as_in_the_head_that_ships(target, head, tmp_path):
    from envs.live import DEFAULT_HEAD

    export_head(head, VOCABULARY, target.config, AUX_LAYERS, tmp_path)
    ours, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path, DEFAULT_HEAD))
    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in shipped.items()
    }
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, DEFAULT_HEAD)
    ]
    assert configs[0].keys() == configs[1].keys()


def step_record(num_draft_tokens, num_accepted_tokens):
    rows = len(num_draft_tokens)
    return StepRecord(
        num_running_reqs=rows,
        num_waiting_reqs=0,
        kv_cache_usage=0.0,
        num_prefill_tokens=0,
        num_scheduled_tokens=rows,
        req_ids=tuple("abcdef"[:rows]),
        num_context_tokens=np.full(rows, 9, np.int32),
        num_emitted_tokens=np.array(num_accepted_tokens, np.int32) + 1,
        temperature=np.zeros(rows, np.float32),
        drafter=np.array(num_draft_tokens, np.int32).clip(max=1),
        num_draft_tokens=np.array(num_draft_tokens, np.int32),
        num_accepted_tokens=np.array(num_accepted_tokens, np.int32),
    )


def test_accepted_tokens_are_counted_by_position_and_rows_without_a_draft_are_not():
    contract = Contract(("none", "eagle3"), (0, 3))
    counter = AcceptanceCounter(contract, 3)
    for record in (step_record([3, 0, 3], [2, 0, 0]), step_record([3, 3], [3, 1])):
        assert counter.decide(record, np.zeros((1, 1))).tolist() == [[1, 3]]
    assert counter.acceptance() == Acceptance(4, (3, 2, 1))
    assert counter.acceptance().mean_acceptance_length == pytest.approx(1 + 6 / 4)


def test_the_table_says_mean_acceptance_length_by_kind_and_head():
    new, present = Acceptance(10, (5, 3)), Acceptance(8, (2, 0))
    measured = {
        "new": {"code": new, "chat": present},
        "present": {"code": present, "chat": present},
    }
    assert new.mean_acceptance_length == pytest.approx(1.8)
    assert mean_over_kinds(measured["new"]) == pytest.approx((1.8 + 1.25) / 2)
    assert "| code | new | 10 | 0.500 | 0.300 | 1.80 |\n" in table(measured)
    assert "| mean | present |   |   |   | 1.25 |\n" in table(measured)


@pytest.mark.parametrize(
    "settings",
    [{"epochs": 0}, {"greedy_share": 1.5}, {"muon_learning_rate": 0.0}, {"position_decay": -1.0}],
)
def test_a_fit_that_cannot_work_is_refused(settings):
    with pytest.raises(ConfigError, match=r"^fit\..* make it "):
        FitConfig(**settings)


def test_a_text_that_validation_uses_up_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"The text has 3 samples .*; lower fit\."):
        fit_head(fit_config(), None, None, [None] * 3, tmp_path / "none")
