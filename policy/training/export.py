"""Export of a trained actor to `policy.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO

from ..artifact import save_policy
from ..contract import Contract
from .ppo import to_module


def export_policy(
    model: PPO,
    contract: Contract,
    path: Path,
    *,
    observations: np.ndarray,
    provenance: dict[str, Any],
    drafter_settings: Mapping[str, Any] | None = None,
) -> str:
    """Write `policy.pt` and `policy.json`.

    Args:
        model: Trained PPO.
        contract: The contract it was trained on.
        path: Where `policy.pt` goes.
        observations: Recorded observations on which both must decide alike, `[n, fields]`.
        provenance: How the policy came to be, JSON-ready.
        drafter_settings: How the drafters worked, JSON-ready.

    Returns:
        The file's sha256 in hex.

    Raises:
        ArtifactError: If the exported module decides otherwise than the trained actor.
    """

    def actor(rows: np.ndarray) -> np.ndarray:
        """The likeliest actions by the actor's logits; its probabilities round near-ties away."""
        actor_critic = model.policy
        with torch.inference_mode():
            features = actor_critic.pi_features_extractor(torch.from_numpy(rows))
            latent = actor_critic.mlp_extractor.forward_actor(features)
            likeliest = actor_critic.action_net(latent).argmax(dim=1).numpy()
        return contract.action_table[likeliest]

    return save_policy(
        to_module(model, contract),
        contract,
        path,
        reference=actor,
        observations=observations,
        provenance=provenance,
        drafter_settings=drafter_settings,
    )
