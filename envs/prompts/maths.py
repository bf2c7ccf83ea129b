"""Kind `maths`: word problems from templates and seeded numbers."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from .prompt import Prompt, user_prompt

_VARIANTS_PER_TEMPLATE = 20
_NAMES = (
    "Amina", "Bruno", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kavya",
    "Leila", "Mateo", "Noor", "Olga", "Pedro", "Quinn", "Rosa", "Samir", "Tomoko", "Uma", "Viktor",
    "Wanjiru", "Yusuf",
)  # fmt: skip
_ENDINGS = (
    "Show each step of the calculation on its own line and finish with the answer.",
    "Explain your reasoning step by step, then give the final number.",
    "Write down what is known, set up the equation, and solve it.",
)


@dataclass(frozen=True)
class _Template:
    """A problem with places for a name and for numbers.

    Attributes:
        name: Short name, part of the source item.
        text: Problem text with `{name}` and one place per number.
        ranges: Inclusive bounds of each number, by its place's name.
    """

    name: str
    text: str
    ranges: dict[str, tuple[int, int]]


_TEMPLATES = (
    _Template(
        "bakery",
        "{name} bakes {trays} trays of rolls in the morning, with {rolls} rolls on each tray. "
        "{given} rolls go to a school and the rest are sold at {price} cents each. How much money, "
        "in euros, does {name} take if every remaining roll is sold?",
        {"trays": (6, 14), "rolls": (12, 24), "given": (10, 60), "price": (35, 95)},
    ),
    _Template(
        "train",
        "A train leaves the coast at {hour}:00 and travels at {speed} kilometres per hour for "
        "{first} hours. It then slows down by {slower} kilometres per hour for another {second} "
        "hours because of snow. How far has the train gone when {name} gets off at the end?",
        {
            "hour": (5, 11),
            "speed": (80, 160),
            "first": (2, 5),
            "slower": (15, 50),
            "second": (1, 4),
        },
    ),
    _Template(
        "savings",
        "{name} has {start} euros and saves {weekly} euros every week. After {weeks} weeks {name} "
        "buys a bicycle for {cost} euros and keeps saving as before. How much does {name} have "
        "{later} weeks after buying the bicycle?",
        {
            "start": (120, 480),
            "weekly": (15, 60),
            "weeks": (8, 20),
            "cost": (110, 230),
            "later": (3, 12),
        },
    ),
    _Template(
        "garden",
        "{name} wants to fence a rectangular garden that is {length} metres long and {width} "
        "metres wide, leaving a gate of {gate} metres open. Fencing costs {price} euros per metre. "
        "What does the fence cost, and what is the area of the garden?",
        {"length": (12, 40), "width": (6, 24), "gate": (1, 4), "price": (9, 28)},
    ),
    _Template(
        "discount",
        "A shop sells a coat for {price} euros. In the first week of the sale it is reduced by "
        "{first} percent, and in the second week the reduced price falls by another {second} "
        "percent. How much does {name} pay in the second week for {coats} coats?",
        {"price": (60, 320), "first": (10, 40), "second": (5, 30), "coats": (1, 5)},
    ),
    _Template(
        "tank",
        "A water tank holds {volume} litres. One pipe fills it at {fill} litres per minute while a "
        "leak loses {leak} litres per minute. {name} opens the pipe when the tank already contains "
        "{start} litres. How many minutes pass before it is full?",
        {"volume": (900, 3000), "fill": (25, 60), "leak": (2, 12), "start": (50, 400)},
    ),
    _Template(
        "ages",
        "{name} is {times} times as old as a cousin, who is {young} years old today. How old will "
        "each of them be in {years} years, what will the sum of their ages be then, and how old "
        "was {name} when the cousin was born?",
        {"times": (2, 6), "young": (4, 14), "years": (3, 19)},
    ),
    _Template(
        "library",
        "A library has {shelves} shelves with {books} books on each. On Monday {borrowed} books "
        "are borrowed and {returned} are returned; on Tuesday twice as many are borrowed and none "
        "come back. How many books does {name}, the librarian, count on Tuesday evening?",
        {"shelves": (18, 45), "books": (25, 60), "borrowed": (40, 120), "returned": (10, 39)},
    ),
    _Template(
        "recipe",
        "A recipe for {serves} people needs {flour} grams of flour, {sugar} grams of sugar and "
        "{eggs} eggs. {name} cooks for {guests} people. How much of each ingredient is needed, and "
        "how many boxes of six eggs must be bought?",
        {
            "serves": (2, 6),
            "flour": (180, 500),
            "sugar": (60, 200),
            "eggs": (1, 5),
            "guests": (8, 30),
        },
    ),
    _Template(
        "marks",
        "{name} scored {a}, {b}, {c} and {d} points in four tests of 100 points. What is the mean, "
        "what is the median, and how many points are needed in a fifth test to bring the mean to "
        "{goal}? Is that possible?",
        {"a": (45, 80), "b": (50, 95), "c": (55, 98), "d": (40, 90), "goal": (70, 78)},
    ),
    _Template(
        "factory",
        "A factory has {machines} machines, and each makes {rate} screws per minute. {name} turns "
        "{broken} of them off for repair after {first} hours and lets the others run for {second} "
        "more hours. How many screws are made in total, and how many full boxes of {box} is that?",
        {
            "machines": (6, 15),
            "rate": (20, 75),
            "broken": (1, 5),
            "first": (2, 5),
            "second": (1, 6),
            "box": (100, 400),
        },
    ),
    _Template(
        "tickets",
        "A theatre sells adult tickets for {adult} euros and child tickets for {child} euros. One "
        "evening {people} people come, {children} of them children, and {name} counts the money. "
        "How much is it, and how much more would it be if every child had paid the adult price?",
        {"adult": (14, 35), "child": (5, 13), "people": (150, 420), "children": (30, 140)},
    ),
    _Template(
        "sequence",
        "{name} writes down a sequence of numbers. The first number is {first} and each following "
        "number is {step} greater than the one before. What is the {n}th number, and what is the "
        "sum of the first {n} numbers?",
        {"first": (3, 40), "step": (4, 19), "n": (24, 30)},
    ),
    _Template(
        "marbles",
        "A bag holds {red} red, {blue} blue and {green} green marbles. {name} takes one marble, "
        "looks at it, and takes a second one without putting the first back. What is the "
        "probability that both are red, and what is the probability that neither is green?",
        {"red": (3, 12), "blue": (4, 15), "green": (2, 10)},
    ),
    _Template(
        "hike",
        "{name} hikes {up} kilometres up a mountain at {slow} kilometres per hour, rests for "
        "{rest} minutes, and walks back down the same way at {fast} kilometres per hour. How long "
        "is the whole trip in hours and minutes, and what is the average speed without the rest?",
        {"up": (6, 18), "slow": (2, 3), "rest": (15, 75), "fast": (4, 6)},
    ),
)


@functools.cache
def maths_prompts() -> tuple[Prompt, ...]:
    """Return 20 problems from each of the templates, the same ones on every machine.

    The source item is the template with its numbers: the same numbers under another name would be
    the same problem.
    """
    return tuple(
        _problem(template, variant)
        for template in _TEMPLATES
        for variant in range(_VARIANTS_PER_TEMPLATE)
    )


def _problem(template: _Template, variant: int) -> Prompt:
    draw = random.Random(f"maths {template.name} {variant}")
    numbers = {place: draw.randint(low, high) for place, (low, high) in template.ranges.items()}
    values = ",".join(str(number) for number in numbers.values())
    problem = template.text.format(name=draw.choice(_NAMES), **numbers)
    return user_prompt(
        kind="maths",
        prompt_id=f"maths:{template.name}:{variant}",
        item=f"maths:{template.name}:{values}",
        text=f"{problem} {draw.choice(_ENDINGS)}",
    )
