"""Some of all combinations, in which every two values come together."""

import itertools
import os
from collections.abc import Callable, Sequence
from datetime import date
from random import Random
from typing import Any

# another sample on another day; all workers of pytest and all ranks have the same
SEED = int(os.environ.get("ZERO_NB_SEED", date.today().toordinal()))


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
