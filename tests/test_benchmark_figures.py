"""The benchmark's pictures: legends cover no point, and the heat map shows what a policy does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from envs.served import STEP, Served
from policy.artifact import PolicyArtifact
from policy.contract import Contract
from policy.training.benchmark_figures import draw_acceptance, draw_speedups, draw_timeline
from policy.training.benchmark_tables import BenchmarkCell
from policy.training.bootstrap import SpeedRatio
from policy.training.heat_map import ACCEPTANCE, LOADS, actions_by_load, draw_heat_map

CONTRACT = Contract(("none", "ngram", "eagle3"), (0, 8, 4))
NAMES = [f"a_contender_with_a_long_name_{index}" for index in range(14)]


@pytest.fixture
def drawn(monkeypatch):
    """Figures in the order they were saved."""
    figures = []
    save = Figure.savefig

    def keep(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def cell(scenario, contender, ratio):
    one = SpeedRatio(ratio, 0.9 * ratio, 1.1 * ratio)
    none = (0.0, 0.0)
    return BenchmarkCell(scenario, contender, 1.0, one, one, one, 0.5, 0.0, none, none, 0.5, 0.0)


def check_legend(figure):
    """The legend overlaps no axes, is whole, and names nothing twice."""
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert all(not box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == len(set(texts))
    return texts


def test_speedups_are_drawn_against_the_batch_and_by_scenario(drawn, tmp_path):
    loads = {f"constant_{load}": load for load in (1, 2, 4, 8, 16, 32, 64)}
    cells = [
        cell(scenario, name, 1 + 0.1 * index)
        for scenario in [*loads, "steps", "ramp", "poisson"]
        for index, name in enumerate(NAMES)
    ]
    draw_speedups(tmp_path / "speedups.png", cells, loads, NAMES[-6:], "Speed")
    (figure,) = drawn
    assert check_legend(figure) == ["other contenders", *NAMES[-6:]]
    against_batch, by_scenario = figure.axes
    assert [tick.get_text() for tick in against_batch.get_xticklabels()] == list(
        map(str, loads.values())
    )
    assert [tick.get_text() for tick in by_scenario.get_xticklabels()] == [
        "steps",
        "ramp",
        "poisson",
    ]
    greys = [line for line in against_batch.lines if line.get_label() == "other contenders"]
    assert len(greys) == len(NAMES) - 6
    assert all(line.get_linewidth() < 1 for line in greys)


def test_one_panel_is_enough_without_changing_loads(drawn, tmp_path):
    draw_speedups(tmp_path / "a.png", [cell("one", "x", 1.2)], {"one": 1}, ["x"], "Speed")
    assert len(drawn[0].axes) == 1


def test_the_time_line_shows_shares_of_drafters_beneath_the_load(drawn, tmp_path):
    steps = np.zeros(400, STEP)
    steps["end_s"] = np.linspace(0.1, 40, 400)
    steps["num_running_reqs"] = np.where(np.arange(400) < 200, 1, 16)
    steps["drafter"] = np.where(np.arange(400) < 200, 1, 2)
    steps["num_draft_tokens"], steps["num_tokens"] = 3, 5
    served = Served((), steps, 40.0, 0.0, {}, {})
    draw_timeline(tmp_path / "timeline.png", served, CONTRACT.drafters, "Time line")
    assert check_legend(drawn[0]) == ["none", "ngram", "eagle3"]
    share = drawn[0].axes[2]
    heights = {
        container.get_label(): [patch.get_height() for patch in container]
        for container in share.containers
    }
    total = np.sum([*heights.values()], axis=0)
    np.testing.assert_allclose(total, 100)
    assert set(heights["ngram"][:28]) == {100}
    assert set(heights["eagle3"][31:]) == {100}


def test_acceptance_is_drawn_position_by_position(drawn, tmp_path):
    names = [f"{drafter}, chosen by {NAMES[0]}" for drafter in ("ngram", "eagle3")]
    shares = dict(zip(names, ([0.6, 0.5, 0.4], [0.5]), strict=True))
    draw_acceptance(tmp_path / "acceptance.png", shares, "Acceptance")
    assert check_legend(drawn[0]) == list(shares)
    lines = [line.get_ydata().tolist() for line in drawn[0].axes[0].lines]
    assert lines == [[0.6, 0.5, 0.4], [0.5]]


class Rule(torch.nn.Module):
    """EAGLE of 4 beyond an acceptance of .55 below eight requests, else n-gram of 1 + waiting."""

    def forward(self, rows):
        name = CONTRACT.field_names.index
        is_eagle = (rows[:, name("eagle3_acceptance_rate_pos_1")] > 0.55) & (
            rows[:, name("num_running_reqs_log2")] < np.log2(1 + 8) - 0.01
        )
        waiting = rows[:, name("num_waiting_reqs_log2")].round().long()
        drafter = torch.where(is_eagle, 2, 1)
        return torch.stack((drafter, torch.where(is_eagle, 4, 1 + waiting)), dim=1)


def test_the_heat_map_moves_load_and_acceptance_and_nothing_else(drawn, tmp_path):
    observations = np.zeros((5, len(CONTRACT.fields)), np.float32)
    observations[:, CONTRACT.field_names.index("num_waiting_reqs_log2")] = [0, 9, 2, 9, 0]
    artifact = PolicyArtifact(Rule(), CONTRACT, "0" * 64, tmp_path / "policy.pt")
    moved = actions_by_load(artifact, observations, "eagle3")
    for row, column in np.ndindex(moved.shape[:2]):
        is_eagle = ACCEPTANCE[row] > 0.55 and LOADS[column] < 8
        assert moved[row, column].tolist() == ([2, 4] if is_eagle else [1, 3])
    assert (actions_by_load(artifact, observations, "ngram") == [1, 3]).all()
    draw_heat_map(tmp_path / "map.png", artifact, observations, "Map")
    assert check_legend(drawn[0]) == ["none", "ngram", "eagle3"]
    left, right = drawn[0].axes
    assert {text.get_text() for text in left.texts} == {"3"}
    assert {text.get_text() for text in right.texts} == {"3", "4"}


def test_the_fields_that_tell_of_acceptance_move_together(tmp_path):
    seen = []

    class Keep(Rule):
        def forward(self, rows):
            seen.append(rows.numpy().reshape(len(ACCEPTANCE), len(LOADS), -1))
            return super().forward(rows)

    observations = np.tile(CONTRACT.high / 2, (3, 1)).astype(np.float32)
    artifact = PolicyArtifact(Keep(), CONTRACT, "0" * 64, tmp_path / "policy.pt")
    actions_by_load(artifact, observations, "eagle3")
    row = dict(zip(CONTRACT.field_names, seen[0][5, 3], strict=True))  # acceptance .5, load 4
    assert row["num_running_reqs_log2"] == pytest.approx(np.log2(5))
    assert [row[f"eagle3_acceptance_rate_pos_{at}"] for at in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert row["eagle3_mean_acceptance_length"] == 1 + 0.5 + 0.25 + 0.125 + 0.0625
    assert row["eagle3_expected_accepted_tokens"] == 0.9375
    moved = {"num_running_reqs_log2"} | {name for name in row if name.startswith("eagle3_")}
    moved -= {f"eagle3_{name}" for name in ("fresh_share", "pending_tokens_log2")}
    for name, usual in zip(CONTRACT.field_names, observations[0], strict=True):
        if name not in moved:
            assert row[name] == usual
