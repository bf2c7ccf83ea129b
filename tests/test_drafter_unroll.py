"""The unrolled head against one draft at a time, computed row by row as a server would."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from policy.training.drafter.head import DraftHead, HeadShape
from policy.training.drafter.unroll import TargetStates, unroll

SHAPE = HeadShape(
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    norm_eps=1e-5,
    rope_theta=100.0,
    num_aux=3,
    draft_vocab_size=9,
)
VOCAB_SIZE, NUM_POSITIONS = 17, 4


def make_sample(num_tokens, num_prompt_tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    num_starts = num_tokens - num_prompt_tokens - 1
    return TargetStates(
        token_ids=torch.randint(VOCAB_SIZE, (num_tokens,), generator=draw),
        num_prompt_tokens=num_prompt_tokens,
        aux=torch.randn(num_tokens, 3 * SHAPE.hidden_size, generator=draw),
        final=torch.randn(num_starts, SHAPE.hidden_size, generator=draw),
        greedy=torch.randint(VOCAB_SIZE, (num_starts,), generator=draw),
    )


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(3)
    head = DraftHead(SHAPE)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head.eval()


@pytest.fixture(scope="module")
def embedding():
    return torch.randn(VOCAB_SIZE, SHAPE.hidden_size, generator=torch.Generator().manual_seed(5))


def rms(x, weight):
    return x / math.sqrt(float((x**2).mean()) + SHAPE.norm_eps) * weight


def rotate(vector, position):
    """Rotary embedding of one head by complex numbers: the two halves are real and imaginary."""
    half = SHAPE.head_dim // 2
    pairs = torch.complex(vector[:half].double(), vector[half:].double())
    for index in range(half):
        angle = position * SHAPE.rope_theta ** (-index / half)
        pairs[index] *= complex(math.cos(angle), math.sin(angle))
    return torch.cat([pairs.real, pairs.imag]).float()


class Server:
    """The head on one request: a cache of keys and values, a row at a time."""

    def __init__(self, head, embedding):
        self.weights, self.embedding = dict(head.named_parameters()), embedding
        self.cache = []

    def read(self, token_id, hidden, position):
        w = self.weights
        residual = rms(hidden, w["midlayer.hidden_norm.weight"])
        embed = rms(self.embedding[token_id], w["midlayer.input_layernorm.weight"])
        row = torch.cat([embed, residual])
        q, k, v = (
            (w[f"midlayer.self_attn.{name}_proj.weight"] @ row).view(-1, SHAPE.head_dim)
            for name in "qkv"
        )
        self.cache.append(([rotate(one, position) for one in k], list(v)))
        attended = []
        for number, query in enumerate(q):
            group = number // (SHAPE.num_heads // SHAPE.num_kv_heads)
            query = rotate(query, position) / math.sqrt(SHAPE.head_dim)
            shares = torch.stack([query @ keys[group] for keys, _ in self.cache]).softmax(0)
            attended.append(sum(s * v[group] for s, (_, v) in zip(shares, self.cache, strict=True)))
        residual = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        x = rms(residual, w["midlayer.post_attention_layernorm.weight"])
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return residual + down @ (functional.silu(gate @ x) * (up @ x))

    def combined(self, aux):
        parts = [
            rms(part, self.weights[f"fc_norm.{number}.weight"])
            for number, part in enumerate(aux.split(SHAPE.hidden_size))
        ]
        return self.weights["fc.weight"] @ torch.cat(parts)


def drafted(head, embedding, sample, start):
    """Layer outputs at each position of the draft that starts at a row."""
    server = Server(head, embedding)
    tokens = sample.token_ids
    for row in range(start + 1):
        hidden = server.read(tokens[row + 1], server.combined(sample.aux[row]), row)
    outputs = [hidden]
    while len(outputs) < NUM_POSITIONS and start + len(outputs) + 1 < len(tokens):
        position = start + len(outputs)
        outputs.append(server.read(tokens[position + 1], outputs[-1], position))
    return outputs


@torch.no_grad()
def test_every_draft_of_a_packed_batch_is_what_a_server_computes(head, embedding):
    samples = [make_sample(9, 3, seed=0), make_sample(6, 4, seed=1), make_sample(11, 2, seed=2)]
    places = list(unroll(head, embedding, samples, NUM_POSITIONS))
    assert len(places) == NUM_POSITIONS
    row = 0
    for sample in samples:
        for start in range(sample.num_prompt_tokens - 1, len(sample.token_ids) - 2):
            for place, expected in zip(
                places, drafted(head, embedding, sample, start), strict=False
            ):
                torch.testing.assert_close(place.hidden[row], expected, rtol=1e-4, atol=1e-4)
            row += 1
    assert row == len(places[0].hidden)


@torch.no_grad()
def test_rows_and_their_targets_name_the_token_that_is_drafted(head, embedding):
    samples = [make_sample(9, 3, seed=0), make_sample(6, 4, seed=1)]
    # What `final` predicts, by packed row: the token after each of them.
    predicted = np.concatenate(
        [sample.token_ids[sample.num_prompt_tokens + 1 :] for sample in samples]
    )
    starts = [
        (sample, start)
        for sample in samples
        for start in range(sample.num_prompt_tokens - 1, len(sample.token_ids) - 2)
    ]
    for position, place in enumerate(unroll(head, embedding, samples, NUM_POSITIONS), 1):
        expected = {
            row: int(sample.token_ids[start + position + 1])
            for row, (sample, start) in enumerate(starts)
            if start + position + 1 < len(sample.token_ids)
        }
        found = dict(zip(place.rows.tolist(), predicted[place.targets].tolist(), strict=True))
        assert found == expected
