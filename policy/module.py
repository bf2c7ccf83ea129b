"""The exported network: bounds in, normalisation, a small MLP, and the likeliest action out."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Self

import torch
from torch import nn

from .contract import Contract
from .errors import ContractError


def normalise(observation: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Clip observations to their field bounds and map those to [-1, 1].

    Args:
        observation: float32 `[rows, fields]`.
        low: Lower field bounds, float32 `[fields]`.
        high: Upper field bounds, float32 `[fields]`.
    """
    clipped = torch.minimum(torch.maximum(observation, low), high)
    return (clipped - low) / (high - low) * 2.0 - 1.0


class PolicyModule(nn.Module):
    """`forward(observation [rows, fields]) -> int64 [rows, action]`: the likeliest of the table.

    Args:
        low: Lower field bounds, float32 `[fields]`.
        high: Upper field bounds, float32 `[fields]`.
        layers: Widths of the hidden layers.
        action_table: The actions to choose from, int64 `[actions, action]`.
    """

    # Types rather than their names: TorchScript reads them.
    low: torch.Tensor
    high: torch.Tensor
    action_table: torch.Tensor

    def __init__(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        layers: Sequence[int],
        action_table: torch.Tensor,
    ) -> None:
        super().__init__()
        self.register_buffer("low", low.clone())
        self.register_buffer("high", high.clone())
        self.register_buffer("action_table", action_table.clone())
        widths = [len(low), *layers]
        hidden: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            hidden += [nn.Linear(inputs, outputs), nn.Tanh()]
        self.hidden = nn.Sequential(*hidden)
        self.action = nn.Linear(widths[-1], len(action_table))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Choose an action for every row."""
        logits = self.action(self.hidden(normalise(observation, self.low, self.high)))
        return self.action_table[logits.argmax(dim=1)]

    @classmethod
    def from_weights(cls, weights: Mapping[str, torch.Tensor], contract: Contract) -> Self:
        """Rebuild the module from plain weights, without TorchScript.

        Args:
            weights: The module's `state_dict`, as stored in safetensors.
            contract: The contract stored beside them.

        Raises:
            ContractError: If the weights normalise by other bounds than the contract's, or choose
                from other actions.
        """
        low, high = torch.from_numpy(contract.low), torch.from_numpy(contract.high)
        action_table = torch.from_numpy(contract.action_table)
        if not torch.equal(weights["low"], low) or not torch.equal(weights["high"], high):
            raise ContractError("The weights normalise by other bounds than the contract's.")
        if not torch.equal(weights["action_table"], action_table):
            raise ContractError("The weights choose from other actions than the contract's.")
        biases = {
            int(name.split(".")[1]): bias
            for name, bias in weights.items()
            if name.startswith("hidden.") and name.endswith(".bias")
        }
        widths = [len(biases[position]) for position in sorted(biases)]
        module = cls(low, high, widths, action_table)
        module.load_state_dict(dict(weights))
        return module.eval()
