"""A part of all cases, another one on another day."""

import functools
import itertools
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import pytest

# all workers of pytest and all ranks have the same, also at midnight
SEED = int(os.environ.setdefault("ZERO_NB_SEED", str(date.today().toordinal())))

# seconds of the processor of each test and notebook that takes half of one or more; `pytest -p common.costs
# --write-costs` and `tests/notebooks.py --write-costs` write them
COSTS_FILE = Path(__file__).parents[1] / "costs.json"
COSTS: dict[str, float] = json.loads(COSTS_FILE.read_text(encoding="utf-8"))
LEAST = 0.5  # seconds: what costs less runs every day
LIMITS = (LEAST, 1.5, 2.5, 6)  # seconds: a test that takes 6 or more runs each fifth day
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # what there is, of a run of the whole suite
MUCH = 4  # seconds: cases that take as long, and are in turns already, wait twice as long


def pairs(case: Sequence[Any]) -> set[Any]:
    """Give the pairs of values of a case, each with the number of its axis."""
    return {*itertools.combinations(enumerate(case), 2)}


def covering(
    axes: Sequence[Sequence[Any]],  # of values that can be told apart as text
    random: Random,
    fits: Callable[..., bool] | None = None,  # whether values may come together
) -> list[tuple[Any, ...]]:
    """Choose cases that have every pair of values of any two axes, as far as they may come together."""
    both = itertools.combinations(enumerate(axes), 2)
    left = {((i, a), (j, b)) for (i, one), (j, other) in both for a in one for b in other}
    if fits is not None:
        left = set().union(*(pairs(case) for case in itertools.product(*axes) if fits(*case)))
    cases: list[tuple[Any, ...]] = []
    while left:
        wanted = random.choice(sorted(left, key=str))
        candidates: list[tuple[Any, ...]] = []
        while len(candidates) < 30:
            case = [random.choice(axis) for axis in axes]
            for i, value in wanted:
                case[i] = value
            if fits is None or fits(*case):
                candidates.append(tuple(case))
        cases.append(max(candidates, key=lambda case: len(pairs(case) & left)))
        left -= pairs(cases[-1])
    return cases


def today(name: str, count: int, turns: int) -> set[int]:
    """Choose about one in `turns` of the cases of a test: on as many days that follow each other,
    each case once. Which cases share a day depends on the name alone."""
    deck = [*range(count)]
    Random(name).shuffle(deck)
    first = SEED + zlib.crc32(name.encode())  # some begin a round today, others end it
    return {*deck[first % turns :: turns]}


@functools.cache
def days_of(names: frozenset[str], limits: tuple[float, ...]) -> dict[str, tuple[int, int]]:
    """Give each costly one of some tests or notebooks a number of days, and one of these: it runs on one
    day of as many as one and the limits that its cost reaches, in seconds. All days cost about the same."""
    found = {}
    loads: dict[int, list[float]] = {}
    for name in sorted(names & COSTS.keys(), key=lambda name: (-COSTS[name], name)):
        days = 1 + sum(COSTS[name] >= limit for limit in limits)
        load = loads.setdefault(days, [0] * days)
        day = load.index(min(load))
        load[day] += COSTS[name]
        found[name] = days, day
    return found


def resting_today(names: Iterable[str], limits: tuple[float, ...]) -> set[str]:
    """Give those tests or notebooks whose turn is on another day, by what they cost."""
    table = days_of(frozenset(names), limits)
    return {name for name, (days, day) in table.items() if SEED % days != day}


def way_today(name: str) -> str:
    """Choose the way in which a test's collectives move, the other one eight days later."""
    return ("memory", "messages")[(SEED // 8 + zlib.crc32(name.encode())) % 2]


def resting(items: Iterable[Any]) -> set[Any]:
    """Give the cases of tests marked `turns` that another day runs (tests that give the marker one name
    run the same; where a case costs much, half as many run), and the tests that cost much and are not
    marked `daily`."""
    items = [*items]
    names = defaultdict(set)
    for name in COSTS:
        names[name.partition("[")[0]].add(name)
    cases: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("turns"):
            test = item.nodeid.partition("[")[0]
            often = (
                1 if marker.kwargs else 1 + any(COSTS.get(name, 0) >= MUCH for name in names[test])
            )
            cases[test, marker.kwargs.get("name", test), marker.args[0] * often].append(item)
    marked = ("turns", "daily")
    free = [item for item in items if not any(map(item.get_closest_marker, marked))]
    late = resting_today((item.nodeid for item in free), LIMITS)
    return {item for item in free if item.nodeid in late} | {
        item
        for (_, name, turns), mine in cases.items()
        for i, item in enumerate(mine)
        if i not in today(name, len(mine), turns)
    }


def write_costs(found: Mapping[str, float]) -> None:
    """Store what costs `LEAST` or more, in place of what was known of the same tests and notebooks."""
    new = {name: cost for name, cost in COSTS.items() if name not in found}
    new |= {name: round(cost, 1) for name, cost in found.items() if cost >= LEAST}
    COSTS_FILE.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
