"""Checkpoints that are written while training goes on: what is in them, when they are there, and who is
told when they are not."""

import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught, free_port, run_each
from common.modes import MODES
from common.saving import (
    RECIPES,
    Recipe,
    begin,
    check,
    inputs,
    kill_again_and_again,
    limit_of,
    parameters,
    train,
    two_layers,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from zero_nb.checkpoint import async_save
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.folder import check_folder
from zero_nb.checkpoint.resharding import reshard
from zero_nb.checkpoint.sharded import load_sharded
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Held:
    """Threads that write go on when the block lets them, or ends."""

    def __init__(self):
        self.go_on = threading.Event()
        self.write = async_save.write_part

    def __enter__(self):
        def write_later(*args):
            assert self.go_on.wait(30)
            return self.write(*args)

        async_save.write_part = write_later
        return self.go_on.set

    def __exit__(self, *_):
        self.go_on.set()
        async_save.write_part = self.write


def save(folder, recipe, mode):
    """Train, begin to save, train on, and only then let the files be written; twice, for the memory of
    the copies is used again."""
    attached = begin(recipe, mode)
    extra = {"seen": [1]}
    with AsyncCheckpointer(attached.call, attached.optimizer) as checkpoints:
        train(attached, inputs(recipe, 7, 1))
        checkpoints.save(folder.with_name(f"{folder.name} before"), 1)
        train(attached, inputs(recipe, 1, 2))
        with Held() as go_on:
            saving = checkpoints.save(folder, 3, extra)
            extra["seen"].append(2)
            train(attached, inputs(recipe, 2))
            assert not folder.exists()
            go_on()
            assert saving.wait() == folder and folder.exists()
    assert attached.optimizer.state_dict_type == "consolidated"
    return parameters(attached)


def load(folder, recipe, mode):
    attached = begin(recipe, mode)
    assert load_sharded(folder, attached.call, attached.optimizer) == {"seen": [1]}
    train(attached, inputs(recipe, 2))
    return parameters(attached)


CASES = {
    **{mode: ("AdamW", mode) for mode in MODES},
    **{f"{name}, overlap": (name, "zero1-overlap") for name in RECIPES},
    "master copies, hidden": ("master copies", "zero2-interleaved, hidden"),
    "Muon and AdamW, hidden": ("Muon and AdamW", "zero2, hidden"),
}


def test_nothing_of_later_steps_is_saved_in_any_mode_or_class(folder):
    cases = {name: (folder / name, RECIPES[of], mode) for name, (of, mode) in CASES.items()}
    saved = run_each(2, save, cases)
    modes = [*MODES]
    others = {
        name: (path, recipe, modes[(modes.index(mode) + 1) % len(modes)])
        for name, (path, recipe, mode) in cases.items()
    }
    loaded = run_each(3, load, others)
    for name, (_, recipe, _) in cases.items():
        for got in loaded[name]:
            check(saved[name][0], got, limit_of(recipe))


def test_two_levels_save_each_part_once(folder):
    [wanted, *_] = run(4, save, folder / "one", Recipe(levels=True), "zero1")
    for got in run(2, load, folder / "one", RECIPES["AdamW"], "zero2"):
        check(wanted, got)


def fsdp(folder):
    recipe = Recipe(model=two_layers)
    model = two_layers()
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def steps(seed):
        for x in inputs(recipe, seed):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    steps(1)
    with AsyncCheckpointer(model, optimizer) as checkpoints, Held():
        checkpoints.save(folder, 3, {"seen": [1]})
        steps(2)
    return [p.full_tensor().detach() for p in model.parameters()]


def test_fsdp2_saves_so_too(folder):
    [wanted, *_] = run(2, fsdp, folder / "one")
    for got in run(3, load, folder / "one", Recipe(model=two_layers), "zero1"):
        check(wanted, got)


def stepped(**options):
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    return model, zero


def fail_on(rank, name, error):
    """Let a call of the system fail on one rank; gives what ends that."""
    real = getattr(os, name)

    def fails(*args):
        raise error

    setattr(os, name, fails if dist.get_rank() == rank else real)
    return lambda: setattr(os, name, real)


FULL = OSError(errno.ENOSPC, "No space left on device")


def failing(parent, rank, name, then):
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    checkpoints.save(parent / "first", 1).wait()
    heal = fail_on(rank, name, FULL)
    saving = checkpoints.save(parent / "second", 2)
    zero.step()  # goes on
    if then == "wait":
        said = [caught(saving.wait), caught(saving.wait), caught(checkpoints.wait)]
        assert said.pop() is None  # it was raised by the save itself
        said.append(said[0])
        heal()
    else:  # the error is not lost if nobody waited
        said = [caught(lambda: checkpoints.save(parent / "third", 3))] * 3
        heal()
    dist.barrier()
    left = sorted(path.name for path in parent.iterdir())
    dist.barrier()
    said.append(caught(checkpoints.wait) or "")  # it was raised once
    checkpoints.save(parent / "second", 2)
    checkpoints.close()
    check_folder(parent / "second")
    return said, left


def test_an_error_on_any_rank_is_one_on_every_rank_when_waited_for_or_at_the_next_save(folder):
    ways = [*itertools.product((0, 2), ("fsync",), ("wait", "save")), (0, "rename", "wait")]
    cases = {way: (folder / str(i), *way) for i, way in enumerate(ways)}
    for i in range(len(ways)):
        (folder / str(i)).mkdir()
    for ranks in run_each(3, failing, cases).values():
        for (first, again, pending, later), left in ranks:
            assert str(FULL) in first and again == pending == first and not later
            assert left == ["first"]


def without_threads(parent, rank):
    """Save where the system allows one rank no more threads."""
    model, zero = stepped()
    start = threading.Thread.start

    def fails(thread):
        if dist.get_rank() == rank and thread.name == "zero_nb checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = fails
    with AsyncCheckpointer(model, zero) as checkpoints:
        found = [checkpoints.save(parent / str(i), i).wait().name for i in range(2)]
    threading.Thread.start = start
    return found, newest_checkpoint(parent).name


def test_a_rank_without_threads_writes_before_it_goes_on(folder):
    cases = {rank: (folder / f"rank {rank}", rank) for rank in range(2)}
    for ranks in run_each(2, without_threads, cases).values():
        assert ranks == [(["0", "1"], "1")] * 2


def in_a_row(parent):
    """Begin a save while one is under way, and while the one that is under way is held up."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    join = async_save.Saving.join
    found = []
    with Held() as go_on:

        def let_go(saving):
            async_save.Saving.join = join
            found.append((parent / "1").exists())
            go_on()
            return join(saving)

        async_save.Saving.join = let_go
        checkpoints.save(parent / "1", 1)
        checkpoints.save(parent / "2", 2)
        found.append((parent / "1").exists())
    memory = checkpoints.staged._memory
    checkpoints.save(parent / "3", 3)
    found.append(checkpoints.staged._memory is memory)
    checkpoints.close()
    return found, checkpoints.staged.nbytes, newest_checkpoint(parent).name, memory.nbytes


def test_a_save_waits_for_the_one_before_and_uses_its_memory(folder):
    written = 0
    for found, after, newest, staged in run(2, in_a_row, folder):
        assert found == [False, True, True] and after == 0 and newest == "3"
        written += staged
    whole = sum(p.nbytes for p in two_layers().parameters()) * 3
    assert whole <= written <= 1.2 * whole  # each box is copied by the rank that writes it


def bad_calls(parent):
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    checkpoints.save(parent / "one")
    rank = dist.get_rank()
    said = [
        caught(lambda: checkpoints.save(parent / "one")),
        caught(lambda: checkpoints.save(parent / f"rank{rank}")),
        caught(lambda: checkpoints.save(parent / "two", extra={1: 2})),
        caught(lambda: checkpoints.save(parent / "two", extra=[model] * rank)),
        caught(lambda: checkpoints.save("/proc/one")),
        caught(lambda: AsyncCheckpointer(two_layers(), zero).save(parent / "two")),
    ]
    checkpoints.save(parent / "two")
    checkpoints.close()
    return said


def test_bad_calls_are_errors_on_every_rank_and_begin_nothing(folder):
    words = ["folder of its own", "rank0", "JSON", "", "Error", ""]
    for said in run(2, bad_calls, folder):
        assert all(w in (s or "") and s for w, s in zip(words, said, strict=True)), said
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]


def kept_and_moved(parent):
    """Keep what `save` gives, go to another folder while it is written, and give steps that are none."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    os.chdir(parent)
    with Held() as go_on:
        saving = checkpoints.save("one")
        os.chdir("/")
        go_on()
        saving.wait()
    said = [caught(lambda s=s: checkpoints.save(parent / "no", s)) for s in ("last", None, 1.5)]
    memory = checkpoints.staged._memory
    checkpoints.close()
    first = memory.data_ptr()
    places = (o.data_ptr() for o in gc.get_objects() if type(o) is torch.Tensor and o is not memory)
    return said, sum(first <= place < first + memory.nbytes for place in places)


def test_a_save_that_is_kept_keeps_no_copies_and_needs_no_working_folder(folder):
    for said, held in run(2, kept_and_moved, folder):
        assert all("step must be an int" in (words or "") for words in said) and held == 0
    assert [path.name for path in folder.iterdir()] == ["one"]


def quiet(parent):
    """What the threads say to each other goes by no collective."""
    group = record()
    model, zero = stepped(process_group=group)
    checkpoints = AsyncCheckpointer(model, zero, group)
    with Held() as go_on:
        saving = checkpoints.save(parent / "one")
        with group.recording() as log:
            go_on()
            saving._thread.join()
    saving.wait()
    return len(log.collectives())


def test_threads_use_no_collective(folder):
    assert run(2, quiet, folder) == [0, 0]


def lost(parent):
    """A rank does not write its part within the time limit of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model, zero = stepped(process_group=group)
    checkpoints = AsyncCheckpointer(model, zero, group)
    rank = dist.get_rank()
    with Held() as go_on:
        saving = checkpoints.save(parent / "one")
        if rank == 0:
            go_on()
            said = caught(saving.wait)
        dist.barrier()
    if rank == 1:
        said = caught(saving.wait)
    return said, saving._outcome.error, [*parent.iterdir()]


def test_a_rank_that_does_not_write_is_named_and_nothing_is_left(folder):
    [(first, error, left), (second, _, _)] = run(2, lost, folder)
    assert "rank 1" in first and "[1] did not write" in str(error) and left == []
    assert second


PROGRAM = """
import os, sys
from zero_nb import AsyncCheckpointer, ZeroRedundancyOptimizer
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
how, folder = sys.argv[1:]
with AsyncCheckpointer(model, zero) as checkpoints:
    model(torch.ones(2, 300)).sum().backward()
    zero.step()
    checkpoints.save(folder, 1)
    if how == "raise":
        raise KeyError("in training")
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "destroy":
        dist.destroy_process_group()
    sys.exit()
"""


def test_a_program_that_ends_finishes_its_save(starter, folder, tmp_path):
    for number, (how, code) in enumerate({"end": 0, "destroy": 0, "raise": 1, "kill": -9}.items()):
        (tmp_path / how).mkdir()
        path = folder / how
        ranks = starter.run(
            PROGRAM,
            tmp_path / how,
            arguments=(how, str(path)),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )
        codes = {rank.code for rank in ranks}
        # a rank that comes to its save when the store has died with rank 0 has an error instead
        assert codes == {code} or (how == "kill" and codes == {code, 1}), (number, ranks)
        if how == "kill":
            assert not path.exists() or check_folder(path)
        else:
            assert check_folder(path)["step"] == 1 and not [*folder.glob(".*")], how


def save_on_and_on(parent):
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    for step in itertools.count(int(newest_checkpoint(parent).name) + 1):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
        checkpoints.save(parent / str(step), step)


def test_kills_at_random_moments_leave_complete_checkpoints(folder):
    AsyncCheckpointer(*stepped()).save(folder / "0").wait()
    newest = 0
    for found in kill_again_and_again(
        lambda: save_on_and_on(folder), folder, lambda: int(newest_checkpoint(folder).name), 30
    ):
        check_folder(folder / str(found))
        assert found >= newest
        newest = found
        assert len([*folder.glob(".*")]) <= 2  # a folder and its lock
    assert newest >= 3
    model, zero = stepped()
    load_sharded(folder / str(newest), model, zero)
    assert all((p == newest).all() for p in model.parameters())


def saved_after_reshard(folder):
    model = nn.Linear(5, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    with AsyncCheckpointer(model, optimizer) as checkpointer:
        checkpointer.save(folder / "1", 1)
        two = dist.new_group([0, 1])
        reshard(optimizer, two)
        if dist.get_rank() == 2:
            return caught(optimizer.state_dict), None
        said = caught(lambda: checkpointer.save(folder / "2", 2))
        anew = AsyncCheckpointer(model, optimizer, two)
        anew.save(folder / "3", 3)
        anew.close()
        return said, None
    return None


def test_a_checkpointer_does_not_outlive_its_ranks(folder):
    """The first two ranks waited for the third, which was gone."""
    *stayed, (left, _) = run(3, saved_after_reshard, folder, timeout=60)
    assert all("reshard() has moved the optimizer" in said for said, _ in stayed)
    assert "has left this optimizer" in left
    assert newest_checkpoint(folder) == folder / "3"


NOBODY_WAITS = """
import errno, os, sys
from pathlib import Path
import torch
from torch import nn
from zero_nb import AsyncCheckpointer, ZeroRedundancyOptimizer

model = nn.Linear(3, 2)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
checkpointer = AsyncCheckpointer(model, optimizer)

def full(_):
    raise OSError(errno.ENOSPC, "No space left on device")

os.fsync = full
checkpointer.save(Path(sys.argv[1], "1"), 1)
print("training done")
"""


def test_an_error_that_nobody_waits_for_is_written_to_stderr(folder):
    """The program ended with nothing but its own last word, and there was no checkpoint."""
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_WAITS, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "training done" in done.stdout
    assert f"{folder / '1'} was not saved (OSError" in done.stderr
    assert [*folder.iterdir()] == []


class Preempted(Exception):
    """What a signal handler raises."""


@contextmanager
def alarms(error):
    """Let an alarm, once it is set, raise an error wherever the main thread is."""

    def handle(*_):
        raise error

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def filled(model, value):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


def loaded_values(*folders):
    found = []
    for path in folders:
        model, zero = stepped()
        load_sharded(path, model, zero)
        found.append({*torch.cat([p.flatten() for p in model.parameters()]).tolist()})
    return found


def interrupted(parent, way, ranks, error):
    """Leave a wait twice by an exception of a handler, and save the next step."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    filled(model, 1)
    with Held() as go_on, alarms(error) as set_alarm:
        saving = checkpoints.save(parent / "1", 1)
        wait = {
            "saving": saving.wait,
            "checkpointer": checkpoints.wait,
            "save": lambda: checkpoints.save(parent / "x", 3),
        }[way]
        for _ in range(2 if dist.get_rank() in ranks else 0):
            with pytest.raises(error):
                set_alarm()
                wait()
        filled(model, 2)
        threading.Timer(0.1, go_on).start()
        checkpoints.save(parent / "2", 2)
    saving.wait()
    checkpoints.close()
    return loaded_values(parent / "1", parent / "2"), sorted(p.name for p in parent.iterdir())


def test_a_save_after_an_interrupted_wait_leaves_the_one_before_alone(folder):
    """The numbers of the next step were written into a checkpoint that was complete and whole."""
    cases = {
        f"{way} {ranks} {error.__name__}": (folder / f"{way}{i}{error.__name__}", way, ranks, error)
        for way in ("saving", "checkpointer", "save")
        for i, ranks in enumerate(((0, 1), (0,), (1,)))
        for error in (Preempted, KeyboardInterrupt)
    }
    for parent, *_ in cases.values():
        parent.mkdir()
    for name, found in run_each(2, interrupted, cases).items():
        assert found == [([{1.0}, {2.0}], ["1", "2"])] * 2, name


def interrupted_start(parent, when):
    """Leave `save` by an exception just before or just after its thread starts."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    filled(model, 1)
    start = threading.Thread.start

    def interrupt(thread):
        if when == "after":
            start(thread)
        raise KeyboardInterrupt

    threading.Thread.start = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(parent / "1", 1)
    finally:
        threading.Thread.start = start
    filled(model, 2)
    checkpoints.save(parent / "2", 2).wait()
    return loaded_values(parent / "1", parent / "2"), sorted(p.name for p in parent.iterdir())


def test_a_save_whose_start_was_interrupted_is_written_before_the_next(folder):
    for when in ("before", "after"):
        (folder / when).mkdir()
        found = run(2, interrupted_start, folder / when, when)
        assert found == [([{1.0}, {2.0}], ["1", "2"])] * 2, when


def interrupted_before(parent):
    """Leave `save` by an exception after the copy, before there is a thread."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    made = async_save.GroupStore

    def interrupt(*_):
        raise KeyboardInterrupt

    async_save.GroupStore = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(parent / "1", 1)
    finally:
        async_save.GroupStore = made
    gc.collect()
    dist.barrier()
    left = [path.name for path in parent.iterdir()]
    dist.barrier()
    filled(model, 2)
    checkpoints.save(parent / "1", 2)
    checkpoints.close()
    return left, loaded_values(parent / "1")


def test_a_save_that_was_interrupted_before_it_had_a_thread_leaves_nothing(folder):
    assert run(2, interrupted_before, folder) == [([], [{2.0}])] * 2


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from zero_nb import AsyncCheckpointer, ZeroRedundancyOptimizer

model = nn.Linear(3, 2)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
checkpointer = AsyncCheckpointer(model, optimizer)
flush = os.fsync

def slow(handle):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    flush(handle)

os.fsync = slow
saving = checkpointer.save(Path(sys.argv[1], "1"), 1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    saving.wait()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_program_that_ends_after_an_interrupted_wait_finishes_its_save(folder):
    """`Thread.join` takes a thread for ended once it was interrupted, so Python did not wait for it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "interrupted" in done.stdout, done.stderr
    assert check_folder(folder / "1")["step"] == 1 and [*folder.iterdir()] == [folder / "1"]
