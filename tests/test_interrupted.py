"""Exceptions that come between two lines, as from Ctrl-C: they arrive as they are, and later errors name them."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn

from zero_nb import convert_checkpoint, newest_checkpoint, verify_checkpoint
from zero_nb.checkpoint import checksums
from zero_nb.checkpoint.async_save import AsyncCheckpointer, StagingMemory
from zero_nb.checkpoint.folder import PlainPlanner
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

ROOM = os.sep + os.path.join("zero_nb", "checkpoint") + os.sep


def trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW)
    model(torch.ones(1, 8)).sum().backward()
    zero.step()
    return model, zero


def save(folder):
    save_sharded(folder, *trained(), 1)


def load(folder):
    load_sharded(folder, *trained())


class Interrupts:
    """A trace that raises `KeyboardInterrupt` at one of the lines that this thread runs in a room."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, arg):
        if ROOM not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def outcomes(action, stride, most=40):
    """Interrupt an action at some of its lines; give what came out, but for interrupts."""
    found = []
    for at in range(1, most * stride, stride):
        try:
            sys.settrace(Interrupts(at))
            action()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                found.append((at, repr(error)))
            continue
        finally:
            sys.settrace(None)
        break
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step_1"
    run(2, save, path)
    return path


@pytest.mark.parametrize("what", ("verify", "newest", "convert", "convert back"))
def test_an_interrupt_while_a_checkpoint_is_read_arrives_as_one(folder, tmp_path, what):
    plain = tmp_path / "plain.pt"
    convert_checkpoint(folder, plain)
    action = {
        "verify": partial(verify_checkpoint, folder),
        "newest": partial(newest_checkpoint, folder.parent),
        "convert": partial(convert_checkpoint, folder, tmp_path / "again.pt"),
        "convert back": partial(convert_checkpoint, plain, tmp_path / "folder"),
    }[what]
    assert outcomes(action, {"newest": 13}.get(what, 37)) == []


def test_an_interrupt_while_a_checkpoint_is_loaded_arrives_as_one(folder):
    assert run(1, outcomes, partial(load, folder), 61) == [[]]


def load_interrupted(folder, rank):
    model, zero = trained()

    def interrupting(*args):
        raise KeyboardInterrupt

    if Group().group_rank == rank:
        PlainPlanner.resolve_tensor = interrupting
    try:
        load_sharded(folder, model, zero)
    except BaseException as error:
        raised = (type(error).__name__, str(error))
    if Group().group_rank == rank:
        del PlainPlanner.resolve_tensor
    load_sharded(folder, model, zero)
    return *raised, [p.tolist() for p in model.parameters()]


def test_an_interrupt_while_numbers_are_read_is_no_error_of_the_checkpoint(folder):
    names, words, values = zip(*run(2, load_interrupted, folder, 1), strict=True)
    assert names == ("RuntimeError", "KeyboardInterrupt")
    assert "KeyboardInterrupt on rank 1" in words[0] and "load again" in words[0]
    assert values[0] == values[1]


def test_threads_that_check_a_folder_stop_after_an_interrupt(folder, monkeypatch):
    plain = checksums.crc32
    told = []
    maps = Path("/proc/self/maps")

    def interrupting(*args):
        in_pool = threading.current_thread() is not threading.main_thread()
        if in_pool and not told and sys._getframe(1).f_code.co_name == "crc_of":
            told.append(os.kill(os.getpid(), signal.SIGINT))
            time.sleep(0.3)  # the main thread has the exception by now
        return plain(*args)

    monkeypatch.setattr(checksums, "crc32", interrupting)
    # torch's launcher may have left its own in a test before
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            verify_checkpoint(folder)
    finally:
        signal.signal(signal.SIGINT, before)
    while maps.exists() and str(folder) in maps.read_text():  # they stop, and let go of the files
        gc.collect()
        time.sleep(0.05)
    assert told


def save_inside_a_save(folder, ranks):
    """Let a signal handler save while this rank copies what goes to another checkpoint."""
    model, zero = trained()
    saver = AsyncCheckpointer(model, zero)
    plain = StagingMemory.copy

    def copy(self, planned):
        StagingMemory.copy = plain
        if dist.get_rank() in ranks:
            signal.raise_signal(signal.SIGUSR1)
        return plain(self, planned)

    StagingMemory.copy = copy
    signal.signal(signal.SIGUSR1, lambda *_: saver.save(folder / "inner", 2))
    said = caught(lambda: saver.save(folder / "outer", 1)) or ""
    saver.save(folder / "next", 3).wait()
    return "save() of an AsyncCheckpointer was called while it was running" in said


@pytest.mark.parametrize("ranks", ((0, 1), (1,)), ids=str)
def test_a_save_in_a_signal_handler_inside_a_save_is_refused_on_all_ranks(tmp_path, ranks):
    assert run(2, save_inside_a_save, tmp_path, ranks) == [True, True]
    assert os.listdir(tmp_path) == ["next"]


def drop_a_gather():
    """Interrupt a call between the start of a gather and the wait; give what the next one says."""
    group = Group()
    group.all_gather(torch.zeros(4))
    with pytest.raises(KeyboardInterrupt):
        work = group.all_gather(torch.zeros(4), async_op=True)
        raise KeyboardInterrupt
    del work
    return caught(lambda: group.all_gather(torch.zeros(4)))


def test_the_words_for_a_dropped_collective_name_both_reasons():
    for said in run(2, drop_a_gather):
        assert "was started and never waited for" in said
        assert "as from Ctrl-C, ended the call that started it, or its Work was not kept" in said


class Stopped(Exception):
    """What a signal handler of the user's raises."""


def interrupt_at(store, place):
    """Send this process a signal once its main thread is in a function; then let rank 1 come."""
    main = threading.main_thread().ident
    names = []
    while place not in names:
        time.sleep(0.01)
        stack = traceback.walk_stack(sys._current_frames()[main])
        names = [frame.f_code.co_name for frame, _ in stack]
    os.kill(os.getpid(), signal.SIGALRM)
    store.set("interrupted", "")


def wait_twice(error, in_a_block):
    """Let a signal end rank 0's wait for a peer that comes later; wait two times more."""
    group = Group()
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((4,), 1.0 + group.group_rank)
    for given in (torch.zeros(4), torch.zeros(4), tensor):  # the first is compared at its start
        if given is tensor and group.group_rank:
            store.wait(["interrupted"])
        with coalescing_manager(group, async_ops=True) if in_a_block else nullcontext() as block:
            work = group.all_gather(given, async_op=True)
        work = block or work
        if given is not tensor or group.group_rank:
            work.wait()

    if group.group_rank:
        return tensor.tolist(), []

    def handler(*_):
        raise error

    signal.signal(signal.SIGALRM, handler)
    threading.Thread(target=interrupt_at, args=(store, "_advance"), daemon=True).start()
    with pytest.raises(error):
        work.wait()
    said = [caught(work.wait), caught(work.wait)]
    assert "all_gather" in caught(lambda: group.all_reduce(torch.zeros(1))), (
        "its messages would be mixed up"
    )
    return tensor.tolist(), said


@pytest.mark.parametrize("in_a_block", (False, True), ids=("alone", "block"))
@pytest.mark.parametrize("error", (KeyboardInterrupt, Stopped))
def test_a_wait_that_a_signal_ended_raises_when_it_is_repeated(way, error, in_a_block):
    (_, said), (other, _) = run(2, wait_twice, error, in_a_block)
    for text in said:
        assert "all_gather" in text and f"was ended by {error.__name__}" in text, text
    assert other == [1.0, 1.0, 2.0, 2.0]


def interrupt_a_step(error):
    """Let a signal end rank 0's step while it waits for what rank 1 has stepped, and go on."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW)
    store = dist.distributed_c10d._get_default_store()

    def handler(*_):
        raise error

    signal.signal(signal.SIGALRM, handler)
    for step in range(2):
        model(torch.ones(1, 8)).sum().backward()
        if step and zero.rank:
            store.wait(["interrupted"])
        if step and not zero.rank:
            waiting = threading.Thread(target=interrupt_at, args=(store, "gather_parameters"))
            waiting.start()
            with pytest.raises(error):
                zero.step()
            waiting.join()
        else:
            said = caught(zero.step)  # what rank 0 sent before it may be all that rank 1 needs
    return said if zero.rank and said else caught(zero.step)


@pytest.mark.parametrize("error", (KeyboardInterrupt, Stopped))
def test_no_rank_goes_on_after_a_step_that_a_signal_ended(way, error):
    for said in run(2, interrupt_a_step, error, timeout=60):
        assert f"rank 0 failed with {error.__name__}" in said, said
