"""What a policy chooses by load and recent acceptance, all else as it usually is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..artifact import PolicyArtifact
from ..contract import NUM_ACCEPTANCE_POSITIONS, Contract
from .figures import DPI, WIDTH_PX

LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ACCEPTANCE = tuple(np.linspace(0, 1, 11).tolist())
_HUES = ("Oranges", "Greens", "Purples", "Blues")


@torch.inference_mode()
def actions_by_load(artifact: PolicyArtifact, observations: np.ndarray, drafter: str) -> np.ndarray:
    """The policy's actions where a drafter's recent acceptance and the load take every value.

    A drafter of acceptance a has each token accepted with probability a given those before it: its
    rate at position j is a^j, its mean acceptance length the sum of these and 1, and the accepted
    tokens that are expected of it their sum. All other fields are the medians of the observations.
    Where every request decides for itself, its own acceptance is the batch's.

    Args:
        artifact: The policy.
        observations: Recorded ones, float32 `[rows, fields]`.
        drafter: Whose acceptance varies.

    Returns:
        Actions of the contract, int64 `[ACCEPTANCE, LOADS, action]`.
    """
    contract = artifact.contract
    rows = np.tile(np.median(observations, axis=0), (len(ACCEPTANCE), len(LOADS), 1))
    column = {name: index for index, name in enumerate(contract.field_names)}
    rows[..., column["num_running_reqs_log2"]] = np.log2(1 + np.array(LOADS))
    acceptance = np.array(ACCEPTANCE)[:, None]
    longest = contract.max_lengths[contract.drafters.index(drafter)]
    expected = (acceptance ** np.arange(1, longest + 1)).sum(axis=1, keepdims=True)
    told = {
        f"{drafter}_acceptance_rate_pos_{position}": acceptance**position
        for position in range(1, NUM_ACCEPTANCE_POSITIONS + 1)
    }
    told[f"{drafter}_mean_acceptance_length"] = 1 + expected
    for name in ("counterfactual_accepted_tokens", "expected_accepted_tokens"):
        told[f"{drafter}_{name}"] = expected
    for name, values in told.items():
        for whose in ("", "request_"):
            if (field := column.get(f"{whose}{name}")) is not None:
                rows[..., field] = values
    flat = torch.from_numpy(rows.reshape(-1, rows.shape[-1]).astype(np.float32))
    actions = contract.canonical_actions(artifact.module(flat).numpy())
    return actions.reshape(len(ACCEPTANCE), len(LOADS), -1)


def draw_heat_map(
    path: Path, artifact: PolicyArtifact, observations: np.ndarray, title: str
) -> None:
    """A panel for each drafter whose acceptance varies: hue by drafter, number and shade by length.

    Args:
        path: The PNG.
        artifact: The policy.
        observations: Recorded ones, float32 `[rows, fields]`.
        title: Heading.
    """
    contract = artifact.contract
    drafters = contract.proposers
    figure = Figure((WIDTH_PX / DPI, 5.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, drafter in zip(
        figure.subplots(1, len(drafters), squeeze=False)[0], drafters, strict=True
    ):
        actions = actions_by_load(artifact, observations, drafter)
        axes.imshow(_colors(actions, contract), origin="lower", aspect="auto")
        for row, column in np.ndindex(actions.shape[:2]):
            length = actions[row, column, 1]
            axes.text(column, row, length or "", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(LOADS)), map(str, LOADS))
        axes.set_yticks(range(len(ACCEPTANCE)), [f"{share:.1f}" for share in ACCEPTANCE])
        axes.set_xlabel("running requests")
        axes.set_ylabel(f"recent acceptance of {drafter}")
    figure.suptitle(title, fontweight="bold")
    for index, name in enumerate(contract.drafters):
        axes.scatter(
            [], [], marker="s", s=80, color=_color(index, 0.6), label=name, edgecolor="0.6"
        )
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(contract.drafters),
        frameon=False,
        title="drafter chosen; the number is its draft length",
    )
    figure.savefig(path)


def _colors(actions: np.ndarray, contract: Contract) -> np.ndarray:
    """RGBA of each action, float64 `[..., 4]`."""
    colors = np.zeros((*actions.shape[:-1], 4))
    for at in np.ndindex(actions.shape[:-1]):
        drafter, length = actions[at][:2]
        longest = contract.max_lengths[drafter] or 1
        colors[at] = _color(drafter, 0.25 + 0.45 * length / longest)
    return colors


def _color(drafter: int, shade: float) -> tuple[float, ...]:
    if drafter == 0:
        return (0.95, 0.95, 0.95, 1.0)
    return tuple(colormaps[_HUES[(drafter - 1) % len(_HUES)]](shade))
