"""The ladder of draft lengths, step by step."""

import re

import numpy as np
import pytest

from policy.baselines.ema_tiers import EmaTiersConfig, EmaTiersController
from policy.contract import Contract
from policy.errors import ConfigError

from .step_history import DRAFTERS, LENGTHS, step_of

CONTRACT = Contract(DRAFTERS, LENGTHS)
NGRAM, EAGLE = 1, 2


def ladder(drafter="ngram", **settings):
    return EmaTiersController(CONTRACT, EmaTiersConfig(drafter, **settings))


def length_after(controller, drafts, load=1, drafter=NGRAM):
    """The decision after a step with these drafts, `(drafted, accepted)`."""
    record = step_of(
        [(drafter if drafted else 0, drafted, accepted) for drafted, accepted in drafts],
        num_running_reqs=load,
    )
    ((chosen, length),) = controller.decide(record, None).tolist()
    assert chosen == (drafter if length else 0)
    return length


def run(controller, steps, load=1, accepted=None):
    """Lengths of so many steps; all of a draft is accepted, or so many tokens of it."""
    lengths = []
    for _ in range(steps):
        length = getattr(controller, "last", 0)
        right = length if accepted is None else min(accepted, length)
        controller.last = length_after(controller, [(length, right)], load)
        lengths.append(controller.last)
    return lengths


def test_a_request_alone_worked_by_hand():
    controller = ladder()
    assert run(controller, 9) == [1] * 9  # warming up; the average is 1
    assert run(controller, 1) == [3]  # 1 > 1 - .5
    # All three are accepted: 3 - 2 * .8^n is 2.34 after five steps and 2.79 after ten.
    assert run(controller, 9) == [3] * 9
    assert run(controller, 1) == [5]  # 2.79 > 3 - .5, and 2.34 was not
    # None is accepted: 2.79 * .8^5 = .91 <= 3 - .5 - .25, then .30 and .098 against .25.
    assert run(controller, 5, accepted=0) == [5, 5, 5, 5, 3]
    assert run(controller, 5, accepted=0) == [3] * 5
    assert run(controller, 5, accepted=0) == [3, 3, 3, 3, 1]
    assert run(controller, 30, accepted=0) == [1] * 30, "below the lowest rung is nothing"


def test_above_a_request_alone_worked_by_hand():
    controller = ladder()
    assert run(controller, 9, load=8) == [1] * 9
    assert run(controller, 1, load=8) == [3]
    # 1 * .8^5 = .33 <= 1 - .5 + 0, which the hysteresis of a request alone would have spared
    # at .25; then from 1 to 0 at .5.
    assert run(controller, 5, load=8, accepted=0) == [3, 3, 3, 3, 1]
    assert run(controller, 5, load=8, accepted=0) == [1, 1, 1, 1, 0]
    # Without a draft there is no news, and 0 is left at the next occasion to look again.
    assert run(controller, 5, load=8) == [0, 0, 0, 0, 1]


def test_a_new_load_takes_the_longest_rung_that_is_no_longer():
    controller = ladder(warm_up_steps=1000)
    controller._length = 5
    for load, length in [(1, 5), (7, 5), (8, 3), (31, 3), (32, 1), (63, 1), (64, 0), (200, 0)]:
        assert length_after(controller, [(0, 0)], load) == length
    assert length_after(controller, [(0, 0)], 1) == 1  # none is as short as 0
    assert length_after(controller, [(0, 0)], 8) == 1


def reference(config, longest, steps):
    """The formula, retold: `steps` are `(load, mean accepted or None)`."""
    tiers = {int(load): lengths for load, lengths in config.tiers.items()}
    first = [min(n, longest) for n in tiers[1]]
    length, ema, told = first[0], float(first[0]), []
    for number, (load, mean) in enumerate(steps, start=1):
        tier = [min(n, longest) for n in tiers[max(low for low in tiers if low <= load)]]
        tier = list(dict.fromkeys(tier))
        if mean is not None:
            ema = 0.8 * ema + 0.2 * mean
        length = max([n for n in tier if n <= length], default=tier[0])
        if number >= 10 and (number - 10) % 5 == 0:
            i = tier.index(length)
            down_h = -0.25 if load < 8 else 0.0
            previous = tier[i - 1] if i else None
            if previous is not None and ema <= (previous - 0.5 if previous else 0.5) + down_h:
                length = previous
            elif i + 1 < len(tier) and ema > length - 0.5:
                length = tier[i + 1]
        told.append(length)
    return told


@pytest.mark.parametrize("drafter", [NGRAM, EAGLE])
@pytest.mark.parametrize("seed", range(5))
def test_it_climbs_as_the_formula_says(seed, drafter):
    rng = np.random.default_rng(seed)
    controller = ladder(DRAFTERS[drafter])
    steps, lengths, load, length, luck = [], [], 1, 0, 0.9
    for index in range(2000):
        if index % 60 == 0:
            load, luck = int(rng.choice([1, 1, 1, 7, 8, 20, 40, 70])), rng.choice([0.2, 0.7, 0.999])
        drafts = [(0, 0)]  # one request waits without a draft and must not count
        if length and rng.random() < 0.9:
            drafts += [(length, min(length, rng.geometric(1 - luck) - 1)) for _ in range(3)]
        mean = np.mean([accepted for _, accepted in drafts[1:]]) if drafts[1:] else None
        steps.append((load, mean))
        length = length_after(controller, drafts, load, drafter)
        lengths.append(length)
    assert lengths == reference(EmaTiersConfig("-"), LENGTHS[drafter], steps)
    assert set(lengths) >= ({0, 1, 3, 5, 7} if drafter == NGRAM else {0, 1, 3, 4})


def test_the_thresholds_themselves_lead_down_and_not_up():
    for num_accepted, length in [(1, 1), (2, 3), (10, 3), (11, 5)]:  # .25 .5 2.5 2.75 of 3
        controller = ladder(warm_up_steps=2, interval_steps=100, decay=0.0)
        controller._length = 3
        rights = [num_accepted // 4 + (row < num_accepted % 4) for row in range(4)]
        length_after(controller, [(0, 0)])
        assert length_after(controller, [(3, right) for right in rights]) == length


def test_another_drafter_tells_nothing():
    controller = ladder("eagle3", warm_up_steps=0, interval_steps=1, up_hysteresis=10.0)
    record = step_of([(NGRAM, 8, 8)])
    assert all(controller.decide(record, None).tolist() == [[EAGLE, 1]] for _ in range(50))
    assert controller._ema == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"tiers": {}},
        {"tiers": {"2": (1,)}},
        {"tiers": {"1": (1,), "one": (1,)}},
        {"tiers": {"1": (1,), "²": (1,)}},
        {"tiers": {"8": (1,), "1": (1,)}},
        {"tiers": {"1": ()}},
        {"tiers": {"1": (3, 1)}},
        {"tiers": {"1": (-1, 1)}},
        {"decay": 1.0},
        {"decay": float("nan")},
        {"warm_up_steps": -1},
        {"interval_steps": 0},
    ],
    ids=str,
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ConfigError) as refusal:
        EmaTiersConfig("ngram", **wrong)
    assert re.fullmatch(r"[^\n]+; [^\n]+\.", str(refusal.value))
