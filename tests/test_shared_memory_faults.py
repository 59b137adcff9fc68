"""Shared memory when ranks end, fail, fork or are killed."""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught_error, free_port
from common.shared_files import SHM, connected, files, through

from zero_nb.comm import shared_file
from zero_nb.comm.ending import abort, destroy, fail
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import clone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")


@pytest.mark.parametrize(
    "end",
    [abort, destroy, lambda g: fail(g, ValueError("no data"))],
    ids=["abort", "destroy", "fail"],
)
def test_a_rank_that_ends_the_group_frees_the_others(end):
    def ended():
        g = clone(Group())
        g.reduce_scatter(torch.ones(6))
        dist.barrier()
        start = time.monotonic()
        if g.group_rank == 2:
            time.sleep(0.2)
            end(g)
        said = caught_error(lambda: g.reduce_scatter(torch.ones(6)))
        took = time.monotonic() - start
        dist.barrier()
        return said, took < 15

    for rank, ((kind, message), soon) in enumerate(run(3, ended)):
        assert kind == "RuntimeError" and soon
        assert (
            ("group was" in message)
            if rank == 2
            else ("rank 2" in message and "reduce_scatter of 6 float32 failed" in message)
        )


def test_abort_frees_a_thread_of_its_own_process():
    def aborted():
        g = clone(Group())
        g.all_gather(torch.ones(2))
        said = ("", "")
        if g.group_rank == 0:
            threading.Timer(0.2, g_abort, (g,)).start()
            said = caught_error(lambda: g.all_gather(torch.ones(2)))
        dist.barrier()
        return said

    g_abort = abort
    kind, message = run(2, aborted)[0]
    assert kind == "RuntimeError" and "ended on this rank" in message


def reason(message):
    return message.split("failed: ")[1].split(";")[0]


def test_a_late_rank_is_named_and_nothing_moves_after_that():
    def late():
        g = clone(Group(), timeout=timedelta(seconds=1))
        g.all_gather(torch.ones(2))
        x = torch.ones(2)
        said = caught_error(lambda: g.all_gather(x)) if g.group_rank == 0 else ("", "")
        dist.barrier()
        if g.group_rank == 1:
            caught_error(lambda: g.all_gather(torch.full((2,), 5.0)))
        dist.barrier()
        again = (
            caught_error(lambda: through(g).all_gather(x.split(1)).__next__())
            if g.group_rank == 0
            else ("", "")
        )
        return said, again, x.tolist()

    (kind, message), (_, again), x = run(2, late)[0]
    assert (
        kind == "RuntimeError"
        and "nothing came from rank 1 within 1 s" in message
        and again == f"this group's shared memory ended before: {reason(message)}"
        and x == [1, 1]
    )


def test_a_rank_at_another_collective_is_found_out():
    def other():
        near, x = connected(), torch.ones(4)
        steps = (near.reduce_scatter if dist.get_rank() else near.all_gather)(x.split(2))
        said = caught_error(lambda: list(steps))
        dist.barrier()
        return said

    for kind, message in run(2, other):
        assert kind == "RuntimeError" and "at another collective" in message


def test_a_rank_that_has_left_after_its_last_collective_has_given_its_part():
    """It may end, and be killed, before the others look: all it had to give lies in the segment."""

    def leaves():
        near, x = connected(), torch.full((4,), float(dist.get_rank()))
        if dist.get_rank() == 0:
            near.all_gather(x.split(2)).__next__()
            dist.barrier()
            near.close()
            dist.barrier()
            return None
        dist.barrier()
        dist.barrier()
        for _ in near.all_gather(x.split(2)):
            pass
        return x.tolist()

    assert run(2, leaves)[1] == [0, 0, 1, 1]


KILLED = """
import os, signal, sys, threading
from datetime import timedelta
from zero_nb.comm.groups import Group

SIZE, RAISED, WRONG = 3, 0, 3
store, victims, when = sys.argv[1:]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)
dist.barrier() # torch's own limit: on a loaded machine the ranks need more than 5 s to meet
made = dist.new_group(timeout=timedelta(seconds=5)) # a rank that meets a dead one waits as long
dist.barrier()
if str(rank) in victims: threading.Timer(float(when), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
turn = 0
try:
    while True:
        turn += 1
        g = Group(made)
        g._traffic.transports.clear() # connect again
        for i in range(3):
            x = torch.full((300_000,), float(turn + i + rank))
            g.reduce_scatter(x)
            g.all_gather(x)
            if not x.eq(SIZE * (turn + i) + SIZE * (SIZE - 1) / 2).all(): os._exit(WRONG)
except RuntimeError: os._exit(RAISED)
except BaseException as error: print(repr(error), file=sys.stderr)
os._exit(1)
"""


@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1, 2)], ids=str)
def test_M2_killed_at_any_moment_leaves_no_wrong_number_and_nothing_in_dev_shm(
    victims, starter, tmp_path
):
    """Ranks that connect and move tensors again and again; one of them, or all, are killed. Nobody
    returns with a wrong sum; every survivor raises."""
    seed, before = random.Random(str(victims)), set(files())
    for _ in range(6):
        arguments = (f"tcp://127.0.0.1:{free_port()}", str(victims), str(seed.uniform(0, 0.4)))
        ranks = starter.run(KILLED, tmp_path, size=3, arguments=arguments)
        ended = [rank.code for rank in ranks]
        for rank, code in enumerate(ended):
            # where all are killed, one may have seen another die, and raised, before its own end
            killed = {-signal.SIGKILL} if len(victims) == 1 else {-signal.SIGKILL, 0}
            assert code in (killed if rank in victims else {0}), (
                f"0: it raised; 3: a wrong sum; {ranks}"
            )
        stays = set(files()) - before
        # where rank 1 dies, the others come to the file and take its name away; rank 0 takes the
        # store with it, so that they may never learn that the file is there
        assert not stays or victims != (1,)
        assert all((SHM / name).stat().st_size == 0 for name in stays), (
            "a name may be left if all die at once; never memory"
        )
        shared_file.remove_stale()  # as the next job does
        assert not stays & set(files())


def test_M2_an_error_is_never_a_result():
    """Rank 0 offers its part, leaves at once and overwrites it: rank 1, which owns nothing of it,
    raises or has what was offered."""

    def offered():
        g = clone(Group())
        g.all_gather(torch.ones(4), [4, 0])
        x = torch.full((4,), 7.0 if g.group_rank == 0 else 0.0)
        if g.group_rank == 0:
            work = g.all_gather(x, [4, 0], async_op=True)
            through(g).close()
            x.fill_(float("nan"))
            dist.barrier()
            caught_error(work.wait)
            return None, [7.0] * 4
        dist.barrier()
        return caught_error(lambda: g.all_gather(x, [4, 0])), x.tolist()

    said, x = run(2, offered)[1]
    assert x == [7.0] * 4 if said is None else said[0] == "RuntimeError"


LISTENS = 0x10000  # among the flags of a socket in /proc/net/unix


def listening():
    """Give the numbers of this process's sockets that others could call, whatever their names."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    found = {line.split()[6] for line in lines if int(line.split()[3], 16) & LISTENS}
    for family in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{family}").read_text().splitlines()[1:]
        found |= {line.split()[9] for line in lines if line.split()[3] == "0A"}
    own = set()
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(handle))
    return {number for number in found if f"socket:[{number}]" in own}


def test_M1_no_stranger_can_hold_a_job_up():
    """No rank opens a socket that other users could call, at any moment while it connects."""

    def connects():
        names, seen, of_gloo, over = [], set(), set(), threading.Event()
        sys.addaudithook(lambda event, args: event == "socket.bind" and names.append(args[1]))

        def watch():
            while not over.is_set():
                seen.update(listening())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        said = []
        for _ in range(10):
            g = clone(Group(), timeout=timedelta(seconds=6))
            of_gloo |= listening()  # before the ranks look for memory that they share
            said.append(caught_error(lambda g=g: g.reduce_scatter(torch.ones(2))))
            seen |= listening()
        over.set()
        watcher.join()
        return names, len(seen - of_gloo), len(of_gloo) > 0, set(said)

    assert run(2, connects, timeout=180) == [([], 0, True, {None})] * 2


FORKED = """
import os, sys
from zero_nb.comm.groups import Group
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
g = Group()
g.all_gather(torch.ones(4))
x = torch.full((4,), float(g.group_rank))
if g.group_rank == 0: work = g.all_gather(x, async_op=True) # not there yet: rank 1 has not begun
dist.barrier()
if g.group_rank == 0:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try: work.wait()
        except RuntimeError as error: os.write(write, str(error).encode())
        try: g.all_gather(torch.ones(4))
        except RuntimeError as error: os.write(write, str(error).encode())
        os._exit(0)
    import select
    assert select.select([read], [], [], 10)[0], "the child hangs"
    os.waitpid(pid, 0)
    said = os.read(read, 10000).decode()
    assert said.count("was forked from rank 0") == 2, said
dist.barrier()
if g.group_rank == 1: work = g.all_gather(x, async_op=True)
work.wait()
assert x.tolist() == [0, 0, 1, 1], x
if g.group_rank == 0: print("survived")
dist.destroy_process_group()
"""


def test_M3_a_forked_child_raises_at_once_and_leaves_its_parents_collective_alone(
    starter, tmp_path
):
    ranks = starter.run(FORKED, tmp_path, arguments=(f"file://{tmp_path}/store",))
    assert [rank.code for rank in ranks] == [0, 0] and "survived" in ranks[0].stdout, ranks


WORKERS = """
import os, sys
from zero_nb.comm.groups import Group
from torch.utils.data import DataLoader
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
g = Group()
g.reduce_scatter(torch.ones(4))
for turn in range(3):
    for batch in DataLoader(torch.arange(4), num_workers=2):
        x = torch.ones(4)
        g.reduce_scatter(x)
        assert x[2 * g.group_rank] == 2
pid = os.fork()
if pid == 0:
    g._traffic.drop_transport()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
g.reduce_scatter(torch.ones(4))
if g.group_rank == 0: print("survived")
dist.destroy_process_group()
"""


def test_data_loader_workers_and_a_child_that_closes(starter, tmp_path):
    ranks = starter.run(WORKERS, tmp_path, arguments=(f"file://{tmp_path}/store",))
    assert [rank.code for rank in ranks] == [0, 0] and "survived" in ranks[0].stdout, ranks


def forbid(call, first=None):
    """Let the kernel kill this process, and those it starts, when it makes a system call, perhaps
    with a certain first argument: as systemd's filters do."""
    import struct

    if os.uname().machine != "x86_64":
        pytest.skip("numbers of system calls are those of x86-64")
    load, equal, ret = 0x20, 0x15, 0x06
    kill, allow = (
        struct.pack("HBBI", ret, 0, 0, 0x80000000),
        struct.pack("HBBI", ret, 0, 0, 0x7FFF0000),
    )
    checks = [
        struct.pack("HBBI", load, 0, 0, 0),
        struct.pack("HBBI", equal, 0, 3 if first else 1, call),
    ]
    if first:
        checks += [struct.pack("HBBI", load, 0, 0, 16), struct.pack("HBBI", equal, 0, 1, first)]
    code = b"".join([*checks, kill, allow])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 16
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(
        ctypes.get_errno()
    )


def halves_work():
    g, x = Group(), torch.ones(4)
    g.reduce_scatter(x)
    g.all_gather(x)
    return x.tolist(), through(g) is not None


def test_M4_a_filter_that_kills_who_reads_other_memory_kills_nobody():
    def filtered():
        forbid(310)  # process_vm_readv
        return halves_work()

    assert run(2, filtered) == [([2.0] * 4, True)] * 2


def test_M4_gathered_parameters_are_copied_by_no_such_call_either():
    def filtered():
        from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

        forbid(310)
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(40)]
        for p in params:
            p.grad = torch.ones(3)
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.5).step()
        return [p.tolist() for p in params]

    assert run(2, filtered) == [[[0.5] * 3] * 40] * 2


def test_M5_a_process_that_nobody_may_read_any_more_goes_on():
    """What `PR_SET_DUMPABLE` forbids after the ranks have connected is not needed."""

    def hidden():
        libc, header, sets = (
            ctypes.CDLL(None),
            (ctypes.c_uint32 * 2)(0x20080522, 0),
            (ctypes.c_uint32 * 6)(),
        )
        assert libc.capget(header, sets) == 0
        sets[0] &= ~(1 << 19)  # CAP_SYS_PTRACE, with which root reads everything
        assert libc.capset(header, sets) == 0
        first = halves_work()
        assert libc.prctl(4, 0, 0, 0, 0) == 0
        return first, halves_work()

    assert run(2, hidden) == [(([2.0] * 4, True), ([2.0] * 4, True))] * 2


@pytest.mark.parametrize("setting", ["0", "1"])
def test_M6_no_process_is_given_the_right_to_trace_this_one(setting, monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", setting)

    def filtered():
        forbid(157, 0x59616D61)  # prctl(PR_SET_PTRACER)
        return halves_work()

    assert run(2, filtered) == [([2.0] * 4, setting == "1")] * 2


def test_L6_a_default_device_does_not_decide_how_tensors_move():
    def elsewhere():
        torch.set_default_device("meta")
        g, x = clone(Group()), torch.ones(4, device="cpu")
        g.reduce_scatter(x)
        g.all_gather(x)
        moved = through(g) is not None
        said = caught_error(lambda: abort(g))
        return x.tolist(), moved, said

    assert run(2, elsewhere) == [([2.0] * 4, True, None)] * 2


def test_L7_a_killed_rank_is_noticed_though_its_child_lives():
    """The child has all its parent's files and sockets open. The limit is 60 s."""

    def killed():
        g = clone(Group(), timeout=timedelta(seconds=60))
        g.all_gather(torch.ones(2))
        if g.group_rank == 1:
            if os.fork() == 0:
                time.sleep(25)
                os._exit(0)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        begin = time.monotonic()
        kind, message = caught_error(
            lambda: (
                through(g).all_gather(torch.ones(2).split(1)).__next__()
                or list(through(g).all_gather(torch.ones(2).split(1)))
            )
        )
        Path(folder, "said").write_text(f"{kind}: {message}; {time.monotonic() - begin < 12}")
        return None

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(RuntimeError):
            run(2, killed, timeout=90)
        said = (Path(folder) / "said").read_text()
    assert said.startswith("RuntimeError: nothing came from rank 1") and said.endswith("True")


def test_L8_who_lives_is_told_by_locks_and_not_by_numbers_of_processes():
    """A process that got a dead rank's number has no lock; and neither has a child of it."""

    def lives():
        near = connected()
        other = near.segment.peers[0]
        first = near.segment.alive(other)
        dist.barrier()
        if near.segment.rank == 1:
            if os.fork() == 0:
                time.sleep(10)
                os._exit(0)
            os.close(
                os.dup(near.segment.fd)
            )  # closing any descriptor of a file ends this process's locks
        dist.barrier()
        last = near.segment.alive(other)
        dist.barrier()
        return first, last

    assert run(2, lives) == [(True, False), (True, True)]


def test_L9_there_is_no_thread_to_wait_for():
    def threads():
        before = {t.name for t in threading.enumerate()}
        halves_work()
        return {t.name for t in threading.enumerate()} - before

    assert run(2, threads) == [set()] * 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_process_ends_whatever_is_under_way(waits, starter, tmp_path):
    """Also with a collective that nobody waits for, and with nobody who destroys the group."""
    code = """
import sys
from zero_nb.comm.groups import Group
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
g = Group()
g.all_gather(torch.ones(4))
work = g.all_gather(torch.ones(1 << 24), async_op=True)
if sys.argv[2] == "True": work.wait()
if g.group_rank == 0: print("ends")
"""
    ranks = starter.run(code, tmp_path, arguments=(f"file://{tmp_path}/store", str(waits)))
    assert [rank.code for rank in ranks] == [0, 0] and "ends" in ranks[0].stdout, ranks
    assert not any("terminate called" in rank.stderr for rank in ranks), ranks
