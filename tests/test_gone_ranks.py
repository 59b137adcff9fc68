"""Ranks that are killed, or end, while others wait for them in an agreement: these hear of it at once, in
a group whose time limit is a minute, and hear nothing of one that is late, or stopped."""

import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught, free_port, take_way

from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.folder import check_folder
from zero_nb.comm import arrivals, ending, exchange, ranks, watcher
from zero_nb.comm import store as stores
from zero_nb.comm.agreement import agree
from zero_nb.comm.ending import abort, fail
from zero_nb.comm.group_store import _has_aborted
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

# seconds in which a rank hears, on a machine that does much else: a group's limit is 60, and it takes 1 to 2
BOUND = 30.0

BEGIN = """
import os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_killed_saves as t
from zero_nb import ZeroRedundancyOptimizer
from zero_nb.comm.agreement import agree
from zero_nb.comm.group_store import GroupStore
from zero_nb.comm.groups import Group
_, tests, store, folder, end = sys.argv
size = int(os.environ["WORLD_SIZE"])
victim = rank == size - 1
dist.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
def leave():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else sys.exit(0)
def raising(f):
    begin = time.monotonic()
    try:
        f()
    except (RuntimeError, OSError) as error:
        print(f"{time.monotonic() - begin:.1f} s: {error}", flush=True)
    else:
        print("returned", flush=True)
"""

WAITS = {
    "first agreement": """
if victim: leave()
raising(lambda: ZeroRedundancyOptimizer([torch.ones(8)], torch.optim.SGD, lr=0.1))
""",
    "second agreement": """
agree(Group(), "the first")
if victim: leave()
raising(lambda: ZeroRedundancyOptimizer([torch.ones(8)], torch.optim.SGD, lr=0.1))
""",
    "first step": """
model = torch.nn.Linear(4, 4)
zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
model(torch.ones(1, 4)).sum().backward()
if victim: leave()
raising(zero.step)
""",
    "load_state_dict": """
model, zero = t.stepped()
state = t.full_state_dict(zero, None)
zero.step()
if victim: leave()
raising(lambda: zero.load_state_dict(state if state else t.full_state_dict(zero, None)))
""",
    **{
        form: f"""
made = t.stepped()
save = t.saver({form!r}, Path(folder), *made)
saving = save(0)
if saving is not None: saving.wait()
if victim: leave()
raising(lambda: save(1))
"""
        for form in ("full", "sharded", "async")
    },
    # rank 0 has decided that all agree, and the victim is gone before rank 0 looks for a part
    "part of an async save": """
import zero_nb.checkpoint.async_save as module
made = t.stepped()
save = t.saver("async", Path(folder), *made)
if victim: module.write_part = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
saving = save(1)
raising(saving.wait if rank == 0 else lambda: (saving.join(), agree(Group(), "the end")))
""",
}


def play(code, starter, folder, size=2, end="killed"):
    """Run a program on ranks of which the last one leaves; give what the others have printed."""
    out = folder / "out"
    out.mkdir()
    store = f"tcp://127.0.0.1:{free_port()}"
    arguments = (str(Path(__file__).parent), store, str(folder), end)
    *others, last = starter.run(BEGIN + code, out, size, arguments, 120.0)
    waits = [float(s) for ended in others for s in re.findall(r"(\S+) s:", ended.stdout)]
    assert max(waits, default=0.0) < BOUND, others
    assert last.code == (-signal.SIGKILL if end == "killed" else 0), last
    return others


@pytest.mark.turns(4)
@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_waits_for_one_that_was_killed_hears_of_it_at_once(
    what, size, way, starter, folder, monkeypatch
):
    take_way(monkeypatch, way)
    for ended in play(WAITS[what], starter, folder, size):
        assert ended.code == 0 and f"rank {size - 1}" in ended.stdout, ended
        assert "died or left the group" in ended.stdout or "nothing came" in ended.stdout, ended


@pytest.mark.parametrize("what", ["first agreement", "second agreement", "sharded"])
def test_a_rank_that_waits_for_one_that_has_ended_hears_of_it_at_once(what, starter, folder):
    for ended in play(WAITS[what], starter, folder, 3, "exits"):
        assert "rank 2 died or left the group" in ended.stdout, ended


LATE = """
agree(Group(), "the first")
if not victim:
    raising(lambda: agree(Group(), "the second"))
    sys.exit()
if end == "late": time.sleep(4)
if end == "stopped":
    if not os.fork():
        time.sleep(4)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
agree(Group(), "the second")
"""


@pytest.mark.parametrize("end", ["late", "stopped"])
def test_a_rank_that_is_late_or_stopped_is_waited_for(end, starter, folder):
    for ended in play(LATE, starter, folder, 3, end):
        assert ended.stdout == "returned\n", ended


NEWS = """
agree(Group(), "the first")
group = Group()
if victim: leave()
raising(lambda: agree(group, "the second"))
raising(lambda: agree(group, "the third"))
"""


def test_all_later_agreements_say_which_rank_is_gone(starter, folder):
    for ended in play(NEWS, starter, folder, 3):
        second, third = ended.stdout.splitlines()
        assert "rank 2 died or left the group" in second and "at 'the second'" in second
        assert "rank 2 died or left the group" in third and "at 'the third'" in third


class Gloo:
    """Stands for a backend; counts what is asked, and refuses what a rank that is gone would send."""

    def __init__(self, gone=()):
        self.gone, self.asked = gone, []

    def recv(self, tensors, peer, tag):
        self.asked.append(peer)
        if peer in self.gone:
            raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("size", [1, 2, 3, 9, 10, 64, 16384])
def test_connections_are_asked_once_a_second_and_eight_at_a_time(size, monkeypatch):
    gloo = Gloo()
    monkeypatch.setattr(arrivals, "_gloo_of", lambda group: gloo)
    rank = size // 2
    connections = arrivals._Connections(SimpleNamespace(size=size, group_rank=rank))
    for tenth in range(10):
        assert connections.look(tenth / 10) == [] and not gloo.asked
    for second in range(1, size // 8 + 2):
        for tenth in range(10):
            connections.look(second + tenth / 10)
        assert len(gloo.asked) == second * min(8, size - 1)
    assert set(gloo.asked) == {*range(size)} - {rank}
    gloo.gone = {0} - {rank}
    for second in range(size, size + size // 8 + 2):
        found = connections.look(second)
    assert found == sorted(gloo.gone)


def after_own_timeout():
    """A collective of this rank takes too long, and gloo closes all its connections."""
    group = Group(dist.new_group(timeout=timedelta(seconds=1)))
    agree(group, "the first")
    if group.group_rank == 1:
        time.sleep(4)
        return caught(lambda: agree(group, "the second"))
    said = caught(lambda: group.recv(torch.ones(1), 1))
    assert said.startswith("RuntimeError"), said
    gloo = arrivals._gloo_of(group)
    return [arrivals._is_closed(gloo, 1)]


def test_a_rank_whose_own_collective_took_too_long_does_not_say_that_others_died():
    assert run(2, after_own_timeout)[0] == [False]


def send_after_waits(tags):
    """Let rank 0 wait for two agreements so long that it looks at connections; then send it messages."""
    group = Group()
    for _ in range(3):
        if group.group_rank == 1:
            time.sleep(1.5)
        agree(group, "the next")
    found = []
    for tag in tags:
        tensor = torch.full((4,), float(group.group_rank))
        if group.group_rank == 1:
            dist.send(tensor, 0, tag=tag)
        else:
            dist.irecv(tensor, 1, tag=tag).wait(timedelta(seconds=10))
        found.append(tensor.tolist())
    return found


def test_a_look_at_connections_takes_no_message_of_the_program():
    tags = (0, 1, 65_534, 65_535, 65_536, (1 << 31) - 1)
    assert run(2, send_after_waits, tags, timeout=60) == [[[1.0] * 4] * len(tags)] * 2


def test_the_tag_that_connections_are_asked_with_is_no_other_message_s():
    nobody = arrivals._NOBODY_TAG
    assert ranks._TAGS[0] * ranks._MARKS > 65_535
    assert ranks._TAGS[-1] * ranks._MARKS + ranks._MARKS <= nobody < 1 << 30
    lowest = exchange._TOP - (0xFFFFFFFF >> 2)
    assert nobody < lowest == 1 << 30


def ask_while_a_client_is_busy(seconds, port):
    """Be three ranks, two of them as on another machine, that wait longer for a text of the first one than
    a request may take; torch's client asks one thing at a time, so the watcher's look waits, too."""
    rank = dist.get_rank()
    dist.barrier()  # gloo may still connect another rank to this one
    dist.destroy_process_group()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "_GLOO_SECONDS", 0.3)
        if rank:
            patch.setattr(stores, "_is_near", lambda host: False)
        patch.setattr(stores, "_timeout", lambda group: timedelta(seconds=seconds / 2))
        group = Group(dist.new_group())
        agree(group, "the model")
        texts = dist.distributed_c10d._get_default_store()
        if rank == 0:
            time.sleep(seconds)
            texts.set("the data is there", "1")
        texts.wait(["the data is there"], timedelta(seconds=60))
        agree(group, "the next step")
        return group._agreements.silent


def test_a_store_that_is_asked_late_is_not_taken_for_one_that_is_gone():
    assert run(3, ask_while_a_client_is_busy, 6.0, free_port()) == [False] * 3


def refuse_to_start(thread):
    raise RuntimeError("can't start new thread")


def agree_without_threads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher._Watcher, "start", refuse_to_start)
        group = Group(dist.new_group())
        agree(group, "the model")
        ones = torch.ones(1)
        group.all_reduce(ones).wait()
    return ones.item()


def test_a_rank_that_can_start_no_watcher_goes_on():
    assert run(3, agree_without_threads) == [3.0] * 3


ABORTED = """
import zero_nb.checkpoint.async_save as module
from zero_nb.comm import watcher
from zero_nb.comm.ending import fail
from zero_nb.comm.group_store import explain_gone
watcher._GLOO_SECONDS = 0.2 if rank == 1 and end == "killed" else 60.0
group, made = Group(), t.stepped()
save, write = t.saver("async", Path(folder), *made), module.write_part
def write_when_aborted(*args):
    while not group._ending.ended: time.sleep(0.05)
    time.sleep(3)  # rank 0 looks at its connections each second
    return write(*args)
if rank == 1: module.write_part = write_when_aborted
saving = save(1)
if victim:
    saving.join()
    leave()
if rank == 1:
    try:
        agree(group, "the next step")
    except RuntimeError as error:
        print(error, flush=True)
        if end == "exits": fail(group, error)
saving.join()
print("error:", saving._outcome.error or saving._outcome.own_error, flush=True)
if rank == 0:
    notes = saving._notes
    print(explain_gone(notes, [1]) or "nothing", explain_gone(notes, [1, 2]), sep="\\n")
"""


# aborted by its watcher, which looks more often than that of rank 0, or by `fail`
@pytest.mark.parametrize("end", ["killed", "exits"])
def test_a_rank_that_writes_on_after_its_connections_closed_is_not_taken_for_dead(
    end, starter, folder
):
    first, second = play(ABORTED, starter, folder, 3, end)
    assert second.stdout.startswith("rank 2 died or left the group: "), second
    assert second.stdout.endswith("error: None\n"), second
    ended, lives, dead = first.stdout.splitlines()
    assert (ended, lives) == ("error: None", "nothing"), first
    assert dead.startswith("rank 2 died or left the group: its connection to rank 0 ended")
    check_folder(newest_checkpoint(folder))


DESTROYED = """
import zero_nb.checkpoint.async_save as module
from zero_nb.comm.ending import fail
group, made = Group(), t.stepped()
save, write = t.saver("async", Path(folder), *made), module.write_part
def write_late(*args):
    if end == "killed": leave()
    fail(group, ValueError("no more data"))
    time.sleep(3)  # rank 0 looks at its connections each second
    return write(*args)
if victim: module.write_part = write_late
saving = save(1)
if rank == 0: dist.destroy_process_group()
saving.join()
error = saving._outcome.error or saving._outcome.own_error
print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_a_rank_that_has_destroyed_its_group_knows_which_ranks_died(end, starter, folder):
    (first,) = play(DESTROYED, starter, folder, 2, end)
    if end == "exits":  # rank 1 has failed, and writes on
        assert first.stdout == "NoneType: None\n", first
        check_folder(newest_checkpoint(folder))
    else:
        said = "RuntimeError: rank 1 died or left the group: its connection to rank 0 ended"
        assert first.stdout.startswith(said), first
        assert "without its part of " in first.stdout, first


BROKEN = """
import zero_nb.checkpoint.async_save as module
from zero_nb.comm import watcher
from zero_nb.comm.ending import fail
watcher._GLOO_SECONDS = 600.0
group, made = Group(), t.stepped()
save = t.saver("async", Path(folder), *made)
if victim: module.write_part = lambda *args: leave()
saving = save(1)
if rank == 1:
    try:
        dist.recv(torch.ones(1), 2)
    except RuntimeError as error:
        fail(group, error)
raising(lambda: (saving.join(), saving._outcome.raise_error(saving._outcome.error)))
"""


def test_a_rank_that_died_is_named_whatever_a_rank_says_that_failed_because_of_it(starter, folder):
    first, second = play(BROKEN, starter, folder, 3)
    assert "rank 2 died or left the group: its connection to rank 0 ended" in first.stdout, first
    assert second.stdout == "returned\n", second


def fail_after(step):
    """Let rank 1 fail, after `abort` or not; give whether its note was there while it let the others end
    what they send to it, and whether it is there now."""
    group = Group(dist.new_group())
    agree(group, "the model")
    seen = []
    if group.group_rank == 1:
        if step == "abort":
            abort(group)
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(sleep=lambda seconds: seen.append(_has_aborted(group, 1)))
            patch.setattr(ending, "time", clock)
            fail(group, ValueError("no more data"))
    dist.barrier()
    return seen, _has_aborted(group, 1)


@pytest.mark.parametrize("step", ["abort", "nothing"])
def test_a_rank_that_fails_notes_at_once_that_it_lives_on(step):
    assert run(2, fail_after, step) == [([], True), ([True] * (step != "abort"), True)]


OUTLIVES = """
from zero_nb.comm import arrivals, watcher
watcher._GLOO_SECONDS = 600.0
group = Group()
agree(group, "the model")
dist.barrier()
if rank == 0:
    leave()  # with the store
while not arrivals._is_closed(arrivals._gloo_of(group), 0):
    time.sleep(0.1)
time.sleep(1)  # the system closes the connections of a process one after the other
print("looks again" if group._ending.watcher._look() else "ends", flush=True)
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_a_watcher_ends_in_silence_when_the_store_s_process_has_ended(end, starter, tmp_path):
    store = f"tcp://127.0.0.1:{free_port()}"
    arguments = (str(Path(__file__).parent), store, "", end)
    first, *others = starter.run(BEGIN + OUTLIVES, tmp_path, 3, arguments, 60.0)
    assert first.code == (-signal.SIGKILL if end == "killed" else 0)
    for ended in others:
        assert (ended.code, ended.stdout, ended.stderr) == (0, "ends\n", ""), ended
