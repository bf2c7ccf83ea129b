"""What is trained when: the order of samples, the draft positions, the learning rate."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def shuffled(numbers: Sequence[int], epochs: int, seed: int) -> Iterator[list[int]]:
    """The numbers once an epoch, in an order of each epoch's own."""
    draw = random.Random(seed)
    for _ in range(epochs):
        order = list(numbers)
        draw.shuffle(order)
        yield order


def in_batches(
    numbers: Sequence[int], sizes: Sequence[int], least_size: int
) -> Iterator[list[int]]:
    """Consecutive numbers, in batches that just reach a size; the last may fall short of it.

    Args:
        numbers: What is batched.
        sizes: Size of each, by number.
        least_size: Of a batch.

    Example:
        >>> list(in_batches([2, 0, 1, 3], sizes=[5, 1, 3, 4], least_size=6))
        [[2, 0], [1, 3]]
    """
    batch: list[int] = []
    for number in numbers:
        batch.append(number)
        if sum(sizes[one] for one in batch) >= least_size:
            yield batch
            batch = []
    if batch:
        yield batch


def positions_at(progress: float, num_positions: int) -> int:
    """Draft positions trained at once: one at first, all of them from the middle on.

    Example:
        >>> [positions_at(progress, 4) for progress in (0, 0.17, 0.34, 0.5, 0.99)]
        [1, 2, 3, 4, 4]
    """
    return min(num_positions, 1 + int(2 * progress * (num_positions - 1)))


def learning_rate_share(progress: float, warmup_share: float) -> float:
    """Share of the peak learning rate: a rise from 0, then a linear fall to 0.

    Example:
        >>> [learning_rate_share(progress, 0.2) for progress in (0.1, 0.2, 0.6)]
        [0.5, 1.0, 0.5]
    """
    if progress < warmup_share:
        return progress / warmup_share
    return (1 - progress) / (1 - warmup_share)
