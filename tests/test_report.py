import json
import math
import random
import statistics
import struct
import sys
from collections import Counter

import pytest

from policy.training.comparison import best_settings, compare, compare_settings
from policy.training.hardware import describe_hardware
from policy.training.measurement import Measurement, MeasurementError, count_actions
from policy.training.report import format_table, write_report
from policy.training.statistics import ratio_interval, student_t_quantile, verdict

CELL_KEYS = [
    "setting",
    "concurrency",
    "tokens",
    "seconds",
    "tok_per_s",
    "speedup",
    "ci_low",
    "ci_high",
    "num_repeats",
    "draft_acceptance_rate",
    "mean_acceptance_length",
]


def run(setting, concurrency, repeat, num_tokens, seconds, drafts=(0, 0, 0), **changes):
    num_drafts, num_draft_tokens, num_accepted_tokens = drafts
    values = {
        "num_steps": 100,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "num_drafts": num_drafts,
        "actions": {"none:0": 100 - num_drafts, "ngram:4": num_drafts},
    }
    return Measurement(setting, concurrency, repeat, num_tokens, seconds, **(values | changes))


def small_data():
    return [
        run("none", 1, 0, 1000, 10.0),
        run("policy", 1, 0, 1010, 8.0, (40, 160, 60)),
        run("none", 1, 1, 2000, 19.0),
        run("policy", 1, 1, 2000, 17.0, (60, 200, 90)),
        run("none", 1, 2, 1500, 16.0),
        run("policy", 1, 2, 1490, 12.0, (20, 40, 30)),
        run("none", 4, 0, 4000, 10.0),
        run("policy", 4, 0, 4000, 10.5),
        run("none", 4, 1, 4000, 11.0),
        run("policy", 4, 1, 4000, 11.7),
        run("none", 4, 2, 4000, 10.2),
        run("policy", 4, 2, 4000, 10.6),
    ]


def noisy_data(rng, speeds, concurrencies=(1, 8), repeats=4, noise=0.03):
    runs = []
    for repeat in range(repeats):
        for concurrency in concurrencies:
            slow_hour = rng.uniform(0.5, 1.5)
            for setting, speed in speeds.items():
                seconds = slow_hour / speed * math.exp(rng.gauss(0, noise))
                runs.append(run(setting, concurrency, repeat, 100, seconds))
    return runs


def relabel(runs, names):
    return [Measurement(**(vars(one) | {"setting": names[one.setting]})) for one in runs]


def cell_of(cells, setting, concurrency):
    (found,) = [c for c in cells if (c.setting, c.concurrency) == (setting, concurrency)]
    return found


@pytest.mark.parametrize(
    ("num_degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (10, 2.2281), (60, 2.0003)],
)
def test_quantile_is_that_of_the_printed_tables(num_degrees, quantile):
    assert student_t_quantile(num_degrees) == pytest.approx(quantile, abs=5e-5)


def test_a_cell_is_what_a_hand_would_compute():
    cell = cell_of(compare(small_data()), "policy", 1)
    assert cell.tokens == 4500
    assert cell.seconds == 37.0
    assert cell.tok_per_s == pytest.approx(4500 / 37)
    assert cell.speedup == pytest.approx((4500 / 37) / (4500 / 45))
    logs = [
        math.log(ratio) for ratio in ((1010 / 8) / (1000 / 10), 19 / 17, (1490 / 12) / (1500 / 16))
    ]
    half_width = 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    assert cell.ci_low == pytest.approx(math.exp(statistics.mean(logs) - half_width), rel=1e-5)
    assert cell.ci_high == pytest.approx(math.exp(statistics.mean(logs) + half_width), rel=1e-5)
    assert cell.num_repeats == 3
    assert cell.draft_acceptance_rate == pytest.approx(180 / 400)
    assert cell.mean_acceptance_length == pytest.approx(1 + 180 / 120)


def test_nothing_drafted_has_no_acceptance_and_uncounted_drafts_no_length():
    idle = cell_of(compare(small_data()), "none", 1)
    assert (idle.draft_acceptance_rate, idle.mean_acceptance_length) == (None, None)
    uncounted = run("none", 1, 0, 10, 1.0, (5, 20, 10), num_drafts=None)
    (cell,) = compare([uncounted])
    assert (cell.draft_acceptance_rate, cell.mean_acceptance_length) == (0.5, None)


def test_the_baseline_is_one_and_cells_come_by_concurrency():
    cells = compare(small_data())
    assert [(cell.concurrency, cell.setting) for cell in cells] == [
        (1, "none"),
        (1, "policy"),
        (4, "none"),
        (4, "policy"),
    ]
    baseline = cells[0]
    assert (baseline.speedup, baseline.ci_low, baseline.ci_high) == (1, 1, 1)
    assert baseline.verdict == "tie"
    assert cell_of(cells, "policy", 4).verdict == "behind"


def test_overall_is_the_geometric_mean_with_a_repeat_as_the_sample():
    overall = compare_settings(small_data(), "policy", "none").overall
    cells = compare(small_data())
    speedups = [cell_of(cells, "policy", at).speedup for at in (1, 4)]
    assert overall.ratio == pytest.approx(math.sqrt(math.prod(speedups)))
    at_1 = [(1010 / 8) / (1000 / 10), 19 / 17, (1490 / 12) / (1500 / 16)]
    at_4 = [10 / 10.5, 11 / 11.7, 10.2 / 10.6]
    means = [(math.log(a) + math.log(b)) / 2 for a, b in zip(at_1, at_4, strict=True)]
    half_width = 4.30265 * statistics.stdev(means) / math.sqrt(3)
    assert overall.ci_low == pytest.approx(math.exp(statistics.mean(means) - half_width), rel=1e-5)
    assert overall.ci_high == pytest.approx(math.exp(statistics.mean(means) + half_width), rel=1e-5)


def test_swapping_two_labels_swaps_their_results():
    speeds = {"none": 1.0, "ngram_fixed": 1.1, "policy": 1.3}
    runs = noisy_data(random.Random(3), speeds)
    swap = {"none": "none", "ngram_fixed": "policy", "policy": "ngram_fixed"}
    before, after = compare(runs), compare(relabel(runs, swap))
    for cell in before:
        other = cell_of(after, swap[cell.setting], cell.concurrency)
        assert vars(other) | {"setting": cell.setting} == vars(cell)
    forward = compare_settings(runs, "policy", "ngram_fixed").overall
    backward = compare_settings(runs, "ngram_fixed", "policy").overall
    assert forward.ratio == pytest.approx(1 / backward.ratio)
    assert forward.ci_low == pytest.approx(1 / backward.ci_high)
    assert (forward.verdict, backward.verdict) == ("ahead", "behind")


def test_a_setting_against_itself_ties_at_the_promised_rate():
    rng = random.Random(0)
    verdicts = Counter()
    for _ in range(400):
        comparison = compare_settings(noisy_data(rng, {"a": 1.0, "b": 1.0}), "a", "b")
        verdicts[comparison.overall.verdict] += 1
        verdicts.update(ratio.verdict for ratio in comparison.ratios)
    assert verdicts["tie"] / verdicts.total() == pytest.approx(0.95, abs=0.02)


def test_pairing_sees_through_slow_hours():
    runs = noisy_data(random.Random(1), {"none": 1.0, "policy": 1.15})
    assert all(cell.verdict == "ahead" for cell in compare(runs) if cell.setting == "policy")


def test_one_repeat_has_no_interval():
    runs = [one for one in small_data() if one.repeat == 0]
    cell = cell_of(compare(runs), "policy", 1)
    assert math.isnan(cell.ci_low)
    assert math.isnan(cell.ci_high)
    assert cell.verdict == "undecided"
    assert all(math.isnan(end) for end in ratio_interval([]))


@pytest.mark.parametrize(
    ("interval", "expected"),
    [((1.01, 1.2), "ahead"), ((0.9, 1.0), "tie"), ((1.0, 1.1), "tie"), ((0.8, 0.99), "behind")],
)
def test_an_interval_that_contains_one_is_a_tie(interval, expected):
    assert verdict(*interval) == expected


def test_the_best_setting_may_differ_from_cell_to_cell():
    runs = [
        run(setting, at, repeat, 100, seconds + repeat / 100)
        for repeat in range(3)
        for at, times in {1: (10, 7, 6, 5), 16: (5, 6, 7, 5)}.items()
        for setting, seconds in zip(("none", "ngram", "eagle3", "policy"), times, strict=True)
    ]
    best = best_settings(compare(runs), ("none", "ngram", "eagle3"))
    assert best == {1: "eagle3", 16: "none"}
    comparison = compare_settings(runs, "policy", best, against_name="the best fixed")
    assert [ratio.against for ratio in comparison.ratios] == ["eagle3", "none"]
    assert [ratio.verdict for ratio in comparison.ratios] == ["ahead", "tie"]
    assert comparison.against == comparison.overall.against == "the best fixed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0.0}, "took 0.0 seconds; measure it again"),
        ({"seconds": math.nan}, "took nan seconds"),
        ({"num_tokens": 0}, "emitted no token"),
        ({"concurrency": 0}, "use a concurrency >= 1"),
        ({"num_accepted_tokens": 1}, "accepted 1 of 0 draft tokens"),
        ({"num_drafts": 3}, "3 drafts of 0 tokens"),
    ],
)
def test_an_impossible_run_is_refused(change, message):
    with pytest.raises(MeasurementError, match=message):
        Measurement(**(vars(small_data()[0]) | change))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda one: False, "Nothing was measured"),
        (lambda one: one.setting != "none", "'none' was not measured at concurrency 1"),
        (lambda one: one.setting != "none" or one.concurrency != 4, "at concurrency 4"),
        (lambda one: one.setting != "none" or one.repeat != 2, "has repeat 2 at concurrency 1"),
    ],
)
def test_runs_without_a_partner_are_refused(keep, message):
    with pytest.raises(MeasurementError, match=message):
        compare(filter(keep, small_data()))


def test_a_repeat_measured_twice_is_refused():
    with pytest.raises(MeasurementError, match="is there twice; number the repeats apart"):
        compare([*small_data(), small_data()[0]])


def test_settings_that_share_nothing_are_not_compared():
    apart = [one for one in small_data() if (one.setting == "none") == (one.concurrency == 1)]
    with pytest.raises(MeasurementError, match="no concurrency in common"):
        compare_settings(apart, "policy", "none")
    shifted = [one for one in small_data() if (one.repeat == 0) == (one.concurrency == 1)]
    with pytest.raises(MeasurementError, match="number the repeats alike"):
        compare_settings(shifted, "policy", "none")


def test_terminal_table_is_aligned_and_ends_in_verdicts():
    lines = format_table(compare(small_data())).splitlines()
    assert lines[-2:] == ["Against none:", "  policy   0 ahead, 1 tied, 1 behind"]
    rows = [line for line in lines[:-3] if line]
    assert [row.split()[1] for row in rows[1:]] == ["none", "policy", "none", "policy"]
    interval_end = rows[0].index("interval") + len("interval")
    assert all(row[interval_end - 1] == "]" for row in rows[1:])
    assert "45%" in rows[2]


@pytest.mark.parametrize("num_repeats", [1, 3])
def test_the_report_holds_everything_and_no_nan(tmp_path, num_repeats):
    runs = [one for one in small_data() if one.repeat < num_repeats]
    comparison = compare_settings(runs, "policy", "none")
    paths = write_report(
        tmp_path / "new" / "folder",
        compare(runs),
        [comparison],
        title="First comparison",
        hardware=describe_hardware(),
        command="make train ARGS='seed=1'",
        notes=["Prompts are disjoint."],
        details={"policy": "trained for 1,000 steps"},
        action_counts=count_actions(runs),
    )

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads(paths.json.read_text(), parse_constant=refuse)
    assert [list(cell) for cell in stored["cells"]] == [CELL_KEYS] * 4
    assert (stored["cells"][1]["ci_low"] is None) == (num_repeats == 1)
    assert stored["cells"][1]["speedup"] == cell_of(compare(runs), "policy", 1).speedup
    assert stored["comparisons"][0]["overall"]["verdict"] == comparison.overall.verdict
    assert stored["hardware"]["num_cores"] >= 1
    assert stored["hardware"]["ram_gib"] > 0
    assert set(stored["versions"]) == {"python", "draftgym", "torch", "vllm"}
    assert sum(stored["policy_actions"]["4"].values()) == 100 * num_repeats

    text = paths.markdown.read_text()
    assert "nan" not in text
    for part in ("| setting | 1 | 4 |", "make train ARGS='seed=1'", "Prompts are disjoint."):
        assert part in text
    assert "**policy** against **none**: " in text
    assert ("[one repeat]" in text) == (num_repeats == 1)

    image = paths.figure.read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000
    assert struct.unpack(">II", image[16:24]) == (1200, 560)


def test_a_report_needs_no_actions_and_leaves_pyplot_alone(tmp_path):
    paths = write_report(
        tmp_path,
        compare(small_data()[:2]),
        [],
        title="Alone",
        hardware={},
        command="make train",
    )
    assert paths.figure.stat().st_size > 0
    assert "Comparisons" not in paths.markdown.read_text()
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_rare_actions_are_merged_but_none_is_lost():
    from policy.training.figures import MAX_ACTIONS, _merge_rare

    taken = {f"ngram:{length}": 100 - length for length in range(1, 17)} | {"none:0": 50}
    merged = _merge_rare({4: taken, 1: {"none:0": 3}})
    assert list(merged) == [1, 4]
    assert merged[4].total() == sum(taken.values())
    assert len(merged[4]) <= MAX_ACTIONS + 1
    assert merged[4]["ngram:other"] > 0
