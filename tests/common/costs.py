"""What each test file costs, in seconds of the processor: a plugin of pytest.

`PYTHONPATH=tests .venv/bin/python -m pytest -p common.costs -n 2 --dist loadfile` prints a table. Unlike
durations, these numbers hardly depend on what else a machine does. With `--write-costs` they decide
on which days a test runs: see sampling.py."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.sampling import write_costs

TICKS = os.sysconf("SC_CLK_TCK")
COSTS: Counter[str] = Counter()  # seconds, by file and by test
STARTS: dict[str, float] = {}


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--write-costs", action="store_true", help="write tests/costs.json")


def pytest_configure(config: Any) -> None:
    if config.getoption("write_costs") and os.environ.get("ZERO_NB_ALL"):
        raise pytest.UsageError(
            "--write-costs needs the names of an ordinary day: unset ZERO_NB_ALL"
        )


def spent(pid: int = 0) -> float:
    """Give the seconds of this process, of the children that it has waited for, and of those that live."""
    found = 0.0 if pid else sum(os.times()[:4])
    with suppress(OSError):  # it has ended
        for children in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
            with suppress(OSError):  # a thread has
                found += sum(map(_of, map(int, children.read_text().split())))
    return found


def _of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + spent(pid)


def pytest_runtest_logstart(nodeid: str) -> None:
    STARTS[nodeid] = spent()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    if call.when == "teardown":
        item.user_properties.append(("cpu", round(spent() - STARTS[item.nodeid], 2)))


def pytest_runtest_logreport(report: Any) -> None:
    cpu = dict(report.user_properties).get("cpu")
    if cpu is not None:
        COSTS[report.nodeid.partition("::")[0]] += cpu
        COSTS[report.nodeid] += cpu


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    terminalreporter.section("seconds of the processor")
    for words in (False, True):
        for name, cpu in COSTS.most_common():
            if ("::" in name) is words and cpu >= 1:
                terminalreporter.write_line(f"{cpu:8.1f} {name}")
    if config.getoption("write_costs"):
        write_costs({name: cpu for name, cpu in COSTS.items() if "::" in name})
