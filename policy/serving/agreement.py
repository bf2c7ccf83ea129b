"""Tensor parallelism: the first rank decides, the others do as it does.

The ranks run the model drafter together, so they must draft alike. Clocks, reloads and rounding
could make them decide differently; what the first rank decided is sent to the others instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..contract import Contract
from ..controllers import admitted_lengths, judges_drafts
from ..step import StepRecord
from .deployment import Deployment


class AgreedController:
    """Takes the first rank's decisions on every rank.

    Args:
        inner: Decides, on the first rank only.
        contract: The action table.
        group: vLLM's tensor-parallel `GroupCoordinator`.
    """

    def __init__(self, inner: Deployment, contract: Contract, group: Any) -> None:
        self._inner = inner
        self._contract = contract
        self._group = group

    def decide(self, record: StepRecord, observation: np.ndarray) -> np.ndarray:
        """Decide on the first rank and share it."""
        actions = np.zeros((record.num_rows, len(self._contract.action_nvec)), np.int64)
        if self._group.is_first_rank:
            actions[:] = self._inner.decide(record, observation)
        return self._share(actions)

    @property
    def judges_drafts(self) -> bool:
        """Whether the deciding controller does; the same on every rank."""
        return judges_drafts(self._inner)

    def admit(self, record: StepRecord, drafts: np.ndarray, survival: np.ndarray) -> np.ndarray:
        """Shorten drafts on the first rank and share it."""
        lengths = drafts[:, 1].copy()
        if self._group.is_first_rank:
            admitted = admitted_lengths(self._inner, record, drafts, survival)
            lengths = lengths if admitted is None else admitted.astype(np.int64)
        return self._share(lengths)

    def _share(self, decided: np.ndarray) -> np.ndarray:
        shared = torch.from_numpy(decided)
        torch.distributed.broadcast(shared, src=self._group.ranks[0], group=self._group.cpu_group)
        return shared.numpy()
