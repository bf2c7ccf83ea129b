"""What a head is trained for: the target's distribution and its greedy token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .head import DraftHead
from .unroll import DraftPosition, TargetStates, unroll
from .vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Teacher:
    """The target's last matrix product, over the draft vocabulary alone.

    Attributes:
        embedding: The target's input embedding, `[vocabulary, hidden]`.
        draft_weight: Rows of its output embedding, `[draft vocabulary, hidden]`.
        draft_ids: Draft id of each token, int64 `[vocabulary]`; -1 where there is none.
        greedy_share: Weight of the greedy token in the labels; the rest is the distribution.
    """

    embedding: Tensor
    draft_weight: Tensor
    draft_ids: Tensor
    greedy_share: float

    def labels(self, samples: Sequence[TargetStates]) -> tuple[Tensor, Tensor]:
        """What each row of the samples' `final` should predict.

        Returns:
            Probabilities `[rows, draft vocabulary]`, and the greedy token's draft id `[rows]`,
            -1 where the head can't draft it.
        """
        final = torch.cat([sample.final for sample in samples])
        greedy = self.draft_ids[torch.cat([sample.greedy for sample in samples])]
        probabilities = (final @ self.draft_weight.T).float().softmax(-1)
        probabilities *= 1 - self.greedy_share
        known = (greedy >= 0).nonzero().squeeze(1)
        probabilities[known, greedy[known]] += self.greedy_share
        return probabilities, greedy


def make_teacher(target: object, vocabulary: DraftVocabulary, greedy_share: float) -> Teacher:
    """Take what training needs of a target.

    Args:
        target: Transformers' model.
        vocabulary: What the head drafts.
        greedy_share: As in `Teacher`.
    """
    lm_head = target.lm_head.weight.detach()  # type: ignore[attr-defined]
    embedding = target.model.embed_tokens.weight.detach()  # type: ignore[attr-defined]
    return Teacher(
        embedding.float(), lm_head[vocabulary.token_ids], vocabulary.draft_ids, greedy_share
    )


def unrolled_loss(
    head: DraftHead,
    teacher: Teacher,
    samples: Sequence[TargetStates],
    num_positions: int,
    position_decay: float,
) -> Tensor:
    """Cross-entropy summed over rows, later draft positions counting less.

    A row whose greedy token the head can't draft counts nothing: it would be rejected anyway.

    Args:
        head: The head.
        teacher: Labels.
        samples: A batch.
        num_positions: Draft tokens in a row.
        position_decay: Weight of a position over that of the one before it.
    """
    with torch.no_grad():
        probabilities, greedy = teacher.labels(samples)
    loss = torch.zeros(())
    for number, place in enumerate(unroll(head, teacher.embedding, samples, num_positions)):
        known = greedy[place.targets] >= 0
        rows, targets = place.rows[known], place.targets[known]
        entropies = functional.cross_entropy(
            head.logits(place.hidden[rows]).float(), probabilities[targets], reduction="sum"
        )
        loss = loss + position_decay**number * entropies
    return loss


@torch.inference_mode()
def accepted_shares(
    head: DraftHead,
    teacher: Teacher,
    samples: Sequence[TargetStates],
    num_positions: int,
) -> list[float]:
    """Share of drafts whose tokens up to each position greedy verification would accept.

    Exact for samples written greedily: a draft's tokens are then the sample's own for as long as
    they are accepted, so what the head reads is what it would read in serving.

    Args:
        head: The head.
        teacher: Labels; its distribution isn't used.
        samples: Greedy ones.
        num_positions: Draft tokens in a row.
    """
    num_accepted, num_drafts = torch.zeros(num_positions), 0
    for sample in samples:
        greedy = teacher.draft_ids[sample.greedy]
        alive = torch.ones(sample.num_starts, dtype=torch.bool)
        for number, place in enumerate(unroll(head, teacher.embedding, [sample], num_positions)):
            alive &= _agrees(head, place, greedy, sample.num_starts)
            num_accepted[number] += alive.sum()
        num_drafts += sample.num_starts
    return [float(share) for share in num_accepted / num_drafts]


def _agrees(head: DraftHead, place: DraftPosition, greedy: Tensor, num_starts: int) -> Tensor:
    agrees = torch.zeros(num_starts, dtype=torch.bool)
    drafted = head.logits(place.hidden[place.rows]).argmax(-1)
    agrees[place.rows] = drafted == greedy[place.targets]
    return agrees
