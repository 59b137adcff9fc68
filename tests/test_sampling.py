"""Which cases a day runs."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from common import sampling
from common.sampling import COLLECTED
from conftest import ALTERNATING, EITHER
from notebooks import LIMITS as NOTEBOOK_LIMITS


@dataclass(frozen=True)
class Item:
    nodeid: str
    turns: int | None
    name: str | None = None
    daily: bool = False

    def get_closest_marker(self, name):
        if name == "daily":
            return self.daily
        assert name == "turns"
        kwargs = {} if self.name is None else {"name": self.name}
        return self.turns and SimpleNamespace(args=(self.turns,), kwargs=kwargs)


ITEMS = [Item(f"a.py::marked[{i}]", 3) for i in range(10)]
ITEMS += [Item(f"a.py::alike[{i}]", 3) for i in range(10)]
ITEMS += [Item("a.py::few[0]", 4), Item("a.py::few[1]", 4), Item("b.py::free", None)]


def runs(monkeypatch, day):
    monkeypatch.setattr(sampling, "SEED", day)
    return [item.nodeid for item in ITEMS if item not in sampling.resting(ITEMS)]


@pytest.mark.parametrize("start", [0, 739_000])
def test_each_case_has_its_day_and_what_is_not_marked_has_all(monkeypatch, start):
    days = [runs(monkeypatch, start + day) for day in range(12)]
    for turns, name in ((3, "marked"), (3, "alike"), (4, "few")):
        for first in range(len(days) - turns + 1):
            seen = itertools.chain(*days[first : first + turns])
            mine = sorted(item for item in seen if f"::{name}[" in item)
            assert mine == sorted(item.nodeid for item in ITEMS if f"::{name}[" in item.nodeid)
    assert all("b.py::free" in day for day in days)
    assert all(len([item for item in day if "::marked" in item]) in (3, 4) for day in days)


def test_the_cases_of_a_day_are_not_at_equal_distances(monkeypatch):
    numbers = [
        [int(item[-2]) for item in runs(monkeypatch, day) if "::marked" in item] for day in range(3)
    ]
    assert any(b - a != 3 for day in numbers for a, b in itertools.pairwise(day))


def test_tests_that_share_a_name_run_the_same_cases(monkeypatch):
    items = [Item(f"a.py::{test}[{i}]", 2, "both") for test in ("one", "other") for i in range(9)]
    monkeypatch.setattr(sampling, "SEED", 5)
    left = sampling.resting(items)
    numbers = [
        {item.nodeid[-2] for item in left if f"::{test}[" in item.nodeid}
        for test in ("one", "other")
    ]
    assert numbers[0] == numbers[1] and 4 <= len(numbers[0]) <= 5


@pytest.fixture
def costs(monkeypatch):
    """Costs of tests of our own, in place of those that are stored."""
    made = {"a/cheap": 0.4, "a/some": 1, "a/much": 2, "a/more": 3, "a/most": 99}
    made |= {"a/daily": 99, "a/marked[0]": 99}
    monkeypatch.setattr(sampling, "COSTS", made)
    sampling.days_of.cache_clear()
    yield made
    sampling.days_of.cache_clear()


def test_what_costs_more_has_fewer_days_unless_it_is_daily(monkeypatch, costs):
    items = [Item(name, 2 if "[" in name else None, daily=name == "a/daily") for name in costs]
    days = dict.fromkeys(costs, 0)
    for day in range(739_000, 739_060):
        monkeypatch.setattr(sampling, "SEED", day)
        for item in set(items) - sampling.resting(items):
            days[item.nodeid] += 1
    assert [*days.values()] == [60, 30, 20, 15, 12, 60, 15]


def test_no_day_costs_much_more_than_another(request, monkeypatch):
    """Of the tests, with those that are in turns or daily, and of the notebooks."""
    items = request.config.stash.get(COLLECTED, None)
    if items is None:
        pytest.skip("of some tests alone one cannot tell")
    notebooks = {name for name in sampling.COSTS if name.startswith("nbs/")}
    loads, shown = [], []
    for day in range(739_000, 739_020):
        monkeypatch.setattr(sampling, "SEED", day)
        runs = {*items} - sampling.resting(items)
        loads.append(sum(sampling.COSTS.get(item.nodeid, 0) for item in runs))
        late = sampling.resting_today(notebooks, NOTEBOOK_LIMITS)
        shown.append(sum(sampling.COSTS[name] for name in notebooks - late))
    assert max(loads) <= 1.25 * min(loads) and max(shown) <= 1.15 * min(shown), (loads, shown)


def test_costs_that_are_written_take_the_place_of_older_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(sampling, "COSTS_FILE", tmp_path / "costs.json")
    monkeypatch.setattr(sampling, "COSTS", {"a": 5, "b": 5, "c": 5})
    sampling.write_costs({"a": 7.44, "b": 0.49, "d": 0.52})
    assert json.loads((tmp_path / "costs.json").read_text()) == {"a": 7.4, "c": 5, "d": 0.5}


def test_no_file_that_chooses_ways_itself_runs_in_both():
    """It would run each of its cases twice where everything runs, in the same way."""
    sources = {name: Path(__file__).with_name(f"test_{name}.py").read_text() for name in EITHER}
    assert len(sources) > 10 and {*ALTERNATING} < sources.keys()
    assert [name for name, source in sources.items() if "take_way(" in source] == []


@pytest.mark.parametrize("seed", ["0", "-3", "900000000000"])
def test_any_number_is_a_day(seed, tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "test_one.py"]
    env = {**os.environ, "ZERO_NB_SEED": seed, "PYTHONPATH": str(sampling.COSTS_FILE.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and f"ZERO_NB_SEED={seed}" in done.stdout, done.stdout


def test_every_cost_is_that_of_a_test_or_a_notebook(request):
    root = sampling.COSTS_FILE.parents[1]
    items = request.config.stash.get(COLLECTED, None)
    files = {name.partition("::")[0] for name in sampling.COSTS}
    assert (
        len(sampling.COSTS) > 100
        and {name for name in files if not (root / name).exists()} == set()
    )
    if items is not None and not os.environ.get("ZERO_NB_ALL"):  # which changes some names
        tests = {name for name in sampling.COSTS if name.startswith("tests/")}
        assert tests - {item.nodeid for item in items} == set()
