"""Policies for tests, exported as a training would export them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from policy.artifact import save_policy
from policy.contract import Contract
from policy.module import PolicyModule

CONTRACT = Contract(("none", "ngram", "eagle3"), (0, 8, 4))


def export(path: Path, contract: Contract = CONTRACT, action: tuple[int, int] | None = None) -> str:
    """Save an untrained policy, or one that always takes `action`; returns its sha256."""
    torch.manual_seed(0)
    low, high = torch.from_numpy(contract.low), torch.from_numpy(contract.high)
    table = torch.from_numpy(contract.action_table)
    module = PolicyModule(low, high, [16], table)
    if action is not None:
        with torch.no_grad():
            module.action.weight.zero_()
            module.action.bias.zero_()
            module.action.bias[contract.action_table.tolist().index(list(action))] = 1

    def reference(rows: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(rows)).numpy()

    observations = np.stack([contract.low, contract.high])
    return save_policy(
        module, contract, path, reference=reference, observations=observations, provenance={}
    )
