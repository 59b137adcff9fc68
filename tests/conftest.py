"""What several files of tests share."""

import gc
import os
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from datetime import date
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from common import take_way
from common.huge_pages import collapse_memory
from common.sampling import COLLECTED, SEED, resting, way_today
from common.starter import Starter

from zero_nb.comm import launch

LONG = (
    "cli",
    "faults_classes",
    "faults_launch",
    "histories",
    "join_blocks",
    "join_histories",
    "join_modes",
    "lab",
    "overlap_errors",
    "package",
    "pages",
    "recipes",
    "round_trips",
    "sharded_faults",
    "surviving",
    "two_machines",
    "watchdog",
)

# what trains, and asks for neither way: by shared memory on some days, by messages on others
EITHER = (
    "faults_between",
    "faults_cells",
    "faults_edits",
    "faults_gradients",
    "faults_halves",
    "faults_join_gradients",
    "faults_late",
    "faults_optimizer",
    "faults_overlap",
    "faults_parallel",
    "faults_steps",
    "faults_streams",
    "faults_waiting",
    "histories",
    "join_blocks",
    "join_histories",
    "join_modes",
    "parallel",
    "parity",
    "random_programs",
)

# of those, what goes through random histories, dozens for each number of ranks: each in one way at a time,
# also where everything runs
ALTERNATING = ("histories", "join_histories")

if hasattr(os, "SCHED_BATCH"):
    # All that a test forks or starts inherits it. Linux then lets a thread run on when another one wakes:
    # ranks hand small pieces of work to gloo's threads and back, and each hand-over costs a switch less.
    # It also makes some orders of events rarer; `make notebooks` runs under the usual policy.
    with suppress(OSError):  # where the system forbids it, tests are slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_configure(config):
    """Let a worker of pytest compute with one thread, as the ranks that it forks do: of several
    workers on a few cores, each one's threads would wait for the others' by spinning.

    Show GPUs only to the tests that need one, which `-m cuda` runs.
    The first `backward()` of a process starts a thread for each GPU that it sees, and its forks
    then cannot call `backward()`; but most tests fork ranks, and many compute a reference before.
    Where torch is built for CUDA and sees no GPU, its compiler puts a stand-in for GPUs in place,
    which a first `backward()` after it would take for real ones: call one now."""
    torch.set_num_threads(1)
    if config.option.markexpr == "cuda":
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.ones((), requires_grad=True).backward()


def pytest_report_header(config):
    """Say how to run the same cases on another day."""
    day = f" (day {date.fromordinal(SEED)})" if 1 <= SEED <= date.max.toordinal() else ""
    return f"ZERO_NB_SEED={SEED}{day}"


def pytest_collection_modifyitems(config, items):
    """Of the whole suite, leave out the cases whose turn it is not, unless `ZERO_NB_ALL` is set.

    Begin with files of few tests that take long, and go on with those of many: no worker of
    pytest-xdist is left with a long file when the others have nothing to do."""
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    if whole:
        config.stash[COLLECTED] = [*items]
    if whole and not os.environ.get("ZERO_NB_ALL"):
        late = resting(items)
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]
    tests = Counter(item.path for item in items)
    long = {f"test_{name}" for name in LONG}
    items.sort(key=lambda item: (item.path.stem not in long, -tests[item.path]))


def pytest_collection_finish(session):
    """Leave half a million objects of modules out of each later search for garbage, which takes 0.6 s
    with them; ranks search when they end, and tests of memory ask for it.

    Gather what the ranks of all tests will share: a `run` of two then costs 54 ms of the processor for 70."""
    gc.collect()
    gc.freeze()
    collapse_memory()


@pytest.fixture(params=["memory", "messages"])
def way(request, monkeypatch):
    """Run a test in both ways to move a reduce-scatter or an all-gather: as on one machine, and as between machines."""
    take_way(monkeypatch, request.param)


def is_either(path, fixtures, files=EITHER):
    """Tell whether the tests of a file run in one way to move, or in the other one."""
    chosen = "way" in fixtures or "ZERO_NB_MEMORY" in os.environ
    return not chosen and path.stem.removeprefix("test_") in files


def pytest_generate_tests(metafunc):
    """Run what may move in either way in both, if everything is to run."""
    path = metafunc.definition.path
    both = {*EITHER} - {*ALTERNATING}
    if "ZERO_NB_ALL" in os.environ and is_either(path, metafunc.fixturenames, both):
        metafunc.parametrize("way_of_the_day", ["memory", "messages"], indirect=True)


@pytest.fixture(autouse=True)
def way_of_the_day(request):
    """Let the tests of some files run in one way to move, each in the other one eight days later (so that
    a case that has its turn each second or fourth day has both). The variable chooses for all."""
    if not is_either(request.path, request.fixturenames):
        yield
        return
    way = getattr(request, "param", None) or way_today(request.node.nodeid)
    print(f"by {way} on day ZERO_NB_SEED={SEED}")  # shown if the test fails
    # not the test's own, which would then be undone after fixtures that it must be undone before
    with pytest.MonkeyPatch.context() as patch:
        take_way(patch, way)
        yield


@pytest.fixture
def folder():
    """Give an empty folder, gone after the test: checkpoints of many tests would fill a disk."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def small_pool(monkeypatch):
    """Let a group share 4 MiB a rank at most. The system counts what is shared as memory of each
    rank that has touched it."""
    monkeypatch.setenv("ZERO_NB_MEMORY_MB", "4")


@pytest.fixture
def manager(tmp_path):
    """Of a kernel that has no ports, which another kernel might take."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path / "kernel"))
    yield manager
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.fixture(scope="session")
def starter():
    """Run programs on ranks that end as interpreters end; one import of torch serves all tests of a worker."""
    made = Starter()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def compiler():
    """Import what torch.compile imports at its first call, hundreds of modules, before ranks are
    forked: each of them would do it, for 0.4 s with the backend eager and 1.1 s with aot_eager."""
    for backend in ("eager", "aot_eager"):
        torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    torch._dynamo.reset()


@pytest.fixture
def nothing_left():
    """No test leaves a child, a thread, an open file or a process group."""
    me = psutil.Process()
    launch._warm()
    children = set(me.children(recursive=True))  # other files may share a process for their ranks
    before, files = threading.active_count(), len(me.open_files())
    yield
    assert [
        child
        for child in me.children(recursive=True)
        if child not in children and "resource_tracker" not in " ".join(child.cmdline())
    ] == []
    assert (threading.active_count(), len(me.open_files())) == (before, files)
    assert not dist.is_initialized() and "RANK" not in os.environ
