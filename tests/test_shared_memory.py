"""Ranks of one machine that share memory, and what the transport before it, which read other
processes' memory, did wrong."""

import ctypes
import itertools
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught_error, free_port

from zero_nb.comm import blocks, shared_file, shared_memory, transport
from zero_nb.comm.ending import abort, destroy, fail
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.subgroups import clone, split

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
SHM = Path("/dev/shm")


def through(group):
    """Give what a group uses in the place of messages, or None."""
    return next(iter(group._wire.transports), None)


def files():
    """Names that were left behind: no process has a lock on them, and another test has not made them this moment."""

    def unlocked():
        found = set()
        for path in SHM.glob("zero_nb*"):
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            if not shared_file._locked(fd, 0, 0):
                found.add(path.name)
            os.close(fd)
        return found

    first = unlocked()
    if first:
        time.sleep(0.3)
    return sorted(first & unlocked()) if first else []


def idle(near):
    """Tell that a transport keeps nothing of collectives that are over."""
    progress = near.progress
    progress.outbox.collect()
    return (
        not progress.under_way
        and not progress.early
        and not progress.unpublished
        and not progress.outbox.unread_by()
    )


class Meeting:
    """All ranks of the job, through torch's own collectives."""

    def __init__(self, limit=20.0):
        self.rank, self.ranks, self.limit = (
            dist.get_rank(),
            tuple(range(dist.get_world_size())),
            limit,
        )

    def swap(self, text):
        texts = [None] * len(self.ranks)
        dist.all_gather_object(texts, text)
        return texts

    def propose(self, text):
        return self.swap(text)[0]

    def agree(self, refusal):
        return next(filter(None, self.swap(refusal)), "")


def connected(limit=20.0):
    return shared_memory.connect_shared_memory(Meeting(limit))


# ---- what it moves ----


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int16,
        torch.complex64,
        torch.bool,
        torch.uint8,
    ],
)
def test_both_halves_are_exact(size, dtype):
    def halves():
        near, rank = connected(), dist.get_rank()
        out = []
        for sizes in (
            [5] * size,
            [0, 7, 3, 1][:size],
            [0] * (size - 1) + [9],
            [100_003, 1, 70_000, 65_536][:size],
        ):
            ranks = [(torch.arange(sum(sizes)) % 3 + r).to(dtype) for r in range(size)]
            x = ranks[rank].clone()
            for _ in near.reduce_scatter(x.split(sizes)):
                pass
            for _ in near.all_gather(x.split(sizes)):
                pass
            total = ranks[0].clone()
            for term in ranks[1:]:
                total += term
            out.append(x.equal(total))
        dist.barrier()
        return out, idle(near)

    assert run(size, halves) == [([True] * 4, True)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_larger_than_the_pool_and_many_of_them_at_once(size, monkeypatch):
    """1 MB for each rank: one block. Eight collectives of 5 MB are under way together, and waited
    for in another order on each rank."""
    monkeypatch.setenv("ZERO_NB_MEMORY_MB", "1")

    def large():
        near, rank = connected(), dist.get_rank()
        sizes = (
            [500_000] * (size - 1) + [1_250_003 - 500_000 * (size - 1)]
            if size == 2
            else [700_001, 2, 550_000]
        )
        flats = [torch.arange(float(sum(sizes))) + rank + i for i in range(8)]
        steps = [near.reduce_scatter(x.split(sizes)) for x in flats]
        for s in steps:
            next(s)
        for i in random.Random(rank).sample(range(8), 8):
            assert next(steps[i], "end") == "end"
        steps = [near.all_gather(x.split(sizes)) for x in flats]
        for s in steps:
            next(s)
        for i in random.Random(9 - rank).sample(range(8), 8):
            assert next(steps[i], "end") == "end"
        total = [
            sum(torch.arange(float(sum(sizes))) + r + i for r in range(size)) for i in range(8)
        ]
        return [
            x.equal(t) for x, t in zip(flats, total, strict=True)
        ], near.progress.outbox.pool.size

    assert run(size, large, timeout=60) == [([True] * 8, 1 << 20)] * size


def test_a_sum_does_not_depend_on_its_owner():
    """Element by element, in the order of the ranks: no cut and no owner changes a bit of it."""

    def summed():
        near, rank = connected(), dist.get_rank()
        torch.manual_seed(rank)
        x, sums = torch.randn(300_000) * 10 ** (rank * 3), []
        for sizes in ([100_000] * 3, [1, 299_998, 1], [0, 0, 300_000]):
            y = x.clone()
            for _ in near.reduce_scatter(y.split(sizes)):
                pass
            for _ in near.all_gather(y.split(sizes)):
                pass
            sums.append(y)
        every = [torch.empty_like(x) for _ in range(3)]
        dist.all_gather(every, x)
        return [y.equal((every[0] + every[1]) + every[2]) for y in sums]

    assert run(3, summed) == [[True] * 3] * 3


def test_many_in_flight_waited_for_in_any_order():
    """More than a rank may have published, between ranks that read none until all have started."""

    def flying(count):
        rank, g = dist.get_rank(), Group()
        xs = [torch.full((4,), float(i + rank)) for i in range(count)]
        works = [g.reduce_scatter(x, async_op=True) for x in xs]
        order = list(range(count))
        if rank:
            order.reverse()
        for i in order:
            works[i].wait()
        dist.barrier()
        return all(x[2 * rank : 2 * rank + 2].eq(2 * i + 1).all() for i, x in enumerate(xs)), idle(
            through(g)
        )

    assert run(2, flying, 1500, timeout=60) == [(True, True)] * 2


def test_threads_wait_for_different_collectives():
    def threaded():
        g = Group()
        g.reduce_scatter(torch.ones(8))
        xs = [torch.full((8,), float(i)) for i in range(40)]
        works = [g.reduce_scatter(x, async_op=True) for x in xs]
        half = [
            threading.Thread(
                target=lambda mine: [w.wait() for w in mine], args=(works[i::4],), daemon=True
            )
            for i in range(4)
        ]
        for t in half:
            t.start()
        for t in half:
            t.join(20)
        part = slice(4 * g.group_rank, 4 * g.group_rank + 4)
        return [w.done for w in works], [x[part].eq(2 * i).all().item() for i, x in enumerate(xs)]

    assert run(2, threaded) == [([True] * 40, [True] * 40)] * 2


def test_a_tensor_may_be_written_over_when_its_collective_is_over():
    """A rank that is back from a collective overwrites all it has, while its peers are late."""

    def late():
        g, out = Group(), []
        for turn in range(6):
            x = torch.full((6,), float(g.group_rank + turn))
            work = g.reduce_scatter(x, async_op=True)
            if turn % 3 == g.group_rank:
                time.sleep(0.1)
            work.wait()
            mine = x[2 * g.group_rank : 2 * g.group_rank + 2].clone()
            x.fill_(float("nan"))
            y = torch.full((3,), float("nan"))
            y[g.group_rank] = mine[0]
            work = g.all_gather(y, async_op=True)
            if turn % 3 == g.group_rank:
                time.sleep(0.1)
            work.wait()
            out.append(y.tolist())
            y.fill_(float("nan"))
        return out

    assert run(3, late) == [[[3.0 + 3 * turn] * 3 for turn in range(6)]] * 3


def test_a_rank_that_computes_lets_the_others_go_on():
    """Its part lies in the segment since it has started: the others end their collective while it
    waits for something else."""

    def busy():
        g, x = Group(), torch.full((6,), float(dist.get_rank()))
        works = [g.all_gather(x, async_op=True), g.reduce_scatter(torch.ones(6), async_op=True)]
        if g.group_rank == 0:
            dist.barrier()  # the others come here when they have all they wait for
        for work in works:
            work.wait()
        if g.group_rank:
            dist.barrier()
        return x.tolist()

    assert run(3, busy, timeout=60) == [[0, 0, 1, 1, 2, 2]] * 3


def test_a_group_that_records_says_what_it_moved():
    def used():
        with record() as pg:
            g, x = Group(pg), torch.ones(10)
            g.reduce_scatter(x, [1, 2, 7])
            g.all_gather(x, [1, 2, 7])
            kinds = [(e.kind, e.bytes, int(e.wire), e.end is not None) for e in pg.log]
        return x.eq(3).all().item(), kinds, through(g) is not None

    for rank, (right, kinds, near) in enumerate(run(3, used)):
        mine = (1, 2, 7)[rank]
        assert (
            right
            and near
            and kinds
            == [
                ("reduce_scatter", 40, 4 * (10 - mine), True),
                ("all_gather", 40, 8 * mine, True),
            ]
        )


def test_a_group_that_recorded_leaves_the_one_it_wraps_connected():
    def recorded():
        plain = Group()
        seen, x = Group(record()), torch.ones(4)
        seen.reduce_scatter(x)
        destroy(seen)
        plain.all_gather(x)
        return x.tolist(), through(plain) is not None

    assert run(2, recorded) == [([2.0] * 4, True)] * 2


def test_subgroups_and_groups_in_another_order():
    def grouped():
        g = Group()
        part = split(g, [[3, 1], [2, 0]])
        x = torch.arange(4.0) + 10 * g.global_rank
        part.reduce_scatter(x)
        part.all_gather(x)
        return x.tolist(), through(part) is not None, through(g)

    even, odd = [20.0, 22.0, 24.0, 26.0], [40.0, 42.0, 44.0, 46.0]
    assert run(4, grouped) == [(even, True, None), (odd, True, None)] * 2


# ---- its memory ----


def test_places_are_reused_lowest_first_and_never_overlap():
    fd = os.memfd_create("pool")
    try:
        pool, held, seed = blocks.Pool(fd, 4096, 8 << 20), [], random.Random(0)
        assert pool.size == 2 << 20, "it begins small"
        for _ in range(3000):
            if held and seed.random() < 0.5:
                pool.free(*held.pop(seed.randrange(len(held))))
            elif place := pool.reserve(seed.choice([1, 64, 1000, 1 << 16, 1 << 20])):
                held.append(place)
            spans = sorted(held)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)) and all(
                first % 64 == 0 for first, _ in held
            )
            assert sum(end - first for first, end in (*held, *pool.holes)) == pool.size <= 8 << 20
        for place in held:
            pool.free(*place)
        assert pool.holes == [(4096, 4096 + pool.size)] and pool.reserve(1) == (4096, 4160)
        assert (
            pool.reserve(9 << 20) is None and pool.size == 8 << 20 == os.fstat(fd).st_blocks * 512
        ), "it is all there: no access can fail"
    finally:
        os.close(fd)


def test_little_memory_left_is_not_taken(monkeypatch):
    """The pool grows by no more than a quarter of what is free, and not at all when the system
    refuses; what it has is enough."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    fd = os.memfd_create("pool")
    try:
        pool = blocks.Pool(fd, 0, 8 << 20)
        assert pool.reserve(2 << 20) == (0, 2 << 20)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert pool.reserve(1) is None and pool.size == pool.limit == 2 << 20
        pool.free(0, 2 << 20)
        assert pool.reserve(1 << 20) == (0, 1 << 20)
    finally:
        os.close(fd)


def test_ranks_that_run_out_of_shared_memory_go_on_with_what_they_have():
    """A file system of 12 MB at /dev/shm, as in a container; four collectives of 40 MB through it."""
    program = """
import os, sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None): sys.exit(77)
if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=SIZE"): sys.exit(77)
import torch, torch.distributed as dist, logging
from zero_nb.comm.launch import run
from zero_nb.comm.groups import Group
def work():
    logging.basicConfig(level="INFO", force=True, stream=sys.stdout)
    g, xs = Group(), [torch.ones(10_000_000) for _ in range(4)]
    for x in [g.reduce_scatter(x, async_op=True) for x in xs]: x.wait()
    for x in [g.all_gather(x, async_op=True) for x in xs]: x.wait()
    near = g._wire.transports[0]
    return all(x.eq(2).all().item() for x in xs), near and near.progress.outbox.pool.size <= 4 << 20
print(run(2, work))
"""
    for size, way in (
        ("12m", "[(True, True), (True, True)]"),
        ("2m", "[(True, None), (True, None)]"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("SIZE", size)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode == 77:
            pytest.skip("may not mount here")
        assert way in done.stdout, done.stdout + done.stderr[-2000:]
    assert (
        "No space left on device" in done.stdout
        and done.stdout.count("shared memory cannot be used") == 1
    ), done.stdout


def test_nothing_stays_open():
    def opened():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            for _ in connected().all_gather(torch.ones(2).split(1)):
                pass
        dist.barrier()
        return (
            len(os.listdir("/proc/self/fd")) - before,
            sum("zero_nb" in line for line in Path("/proc/self/maps").read_text().splitlines()),
            files(),
        )

    assert run(2, opened) == [(0, 0, [])] * 2


def test_a_destroyed_group_gives_its_memory_back():
    def destroyed():
        g = clone(Group())
        g.all_gather(torch.ones(2))
        mapped = Path("/proc/self/maps").read_text().count("/dev/shm/zero_nb")
        destroy(g)
        return mapped, Path("/proc/self/maps").read_text().count("/dev/shm/zero_nb")

    assert run(2, destroyed) == [(1, 0)] * 2


# ---- who may use it ----


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_rank_that_may_not_is_enough(who):
    def mixed():
        logs = []
        handler = logging.Handler()
        handler.emit = lambda entry: logs.append(entry.getMessage())
        logging.getLogger("zero_nb").addHandler(handler)
        logging.getLogger("zero_nb").setLevel("INFO")
        if dist.get_rank() == who:
            os.environ["ZERO_NB_MEMORY"] = "0"
        g, x = Group(), torch.ones(12)
        for _ in range(2):
            g.reduce_scatter(x)
            g.all_gather(x)
        return through(g), x.tolist(), [text for text in logs if "sends messages" in text]

    first, *others = run(3, mixed)
    assert first[:2] == (None, [9.0] * 12) and others == [(None, [9.0] * 12, [])] * 2
    assert len(first[2]) == 1 and f"rank {who}: ZERO_NB_MEMORY=0 forbids it" in first[2][0]


@pytest.mark.parametrize(
    "how", ["elsewhere", "other file", "other user", "no memory", "bad setting"]
)
def test_ranks_that_cannot_share_send_messages(how):
    """Another machine, one that looks alike and is not, a user who may not open the file, no
    memory, and a setting that is no number."""

    def apart():
        def refuse(*_):
            raise OSError(28, "No space left on device")

        if dist.get_rank() == 1:
            if how == "elsewhere":
                shared_memory._place = lambda _: "there"
            if how == "other file":
                shared_file._open_locked = lambda path, byte: shared_file.os.memfd_create(
                    "elsewhere"
                )
            if how == "other user":
                shared_memory.os.geteuid = lambda: 65533
            if how == "no memory":
                shared_memory.os.posix_fallocate = refuse
            if how == "bad setting":
                os.environ["ZERO_NB_MEMORY_MB"] = "many"
        shared_file._OPEN_TIMEOUT = 0.5
        g, x = Group(), torch.ones(12)
        g.reduce_scatter(x)
        return through(g), x[4 * g.group_rank].item(), files()

    assert run(3, apart) == [(None, 3.0, [])] * 3


def test_the_file_is_this_users_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    fd = shared_file._open_locked(tmp_path / "own", 5)
    assert os.fstat(fd).st_mode & 0o777 == 0o600 and os.fstat(fd).st_size == 0
    os.close(fd)
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o666)
    with pytest.raises(PermissionError, match="alone"):
        shared_file._open_locked(tmp_path / "open", 5)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="symbolic"):
        shared_file._open_locked(tmp_path / "link", 5)


def slow_to_look():
    """Open a file on two ranks of which one takes its time after its first lock."""
    real = os.fstat

    def slow(fd):
        time.sleep(0.3)
        return real(fd)

    os.fstat = slow if dist.get_rank() else real
    try:
        fd, locks = shared_file.open_together(f"slow {os.getppid()}", dist.get_rank(), range(2))
    finally:
        os.fstat = real
    same = [None, None]
    dist.all_gather_object(same, os.fstat(fd).st_ino)
    return same[0] == same[1] and shared_file._locked(fd, locks + 1 - dist.get_rank())


def test_a_rank_that_is_slow_to_look_at_the_file_has_the_same_file():
    assert run(2, slow_to_look, timeout=30) == [True, True]


HOLDS = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(fd, fcntl.LOCK_EX, 1, 10 ** 12)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_file_that_was_left_is_removed_and_one_in_use_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    used, mine = tmp_path / "zero_nb-used", tmp_path / "zero_nb-mine"
    for path in (used, mine, tmp_path / "zero_nb-left", tmp_path / "other"):
        path.touch(0o600)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(used)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        monkeypatch.setattr(shared_file, "_NAMED", {mine.name})
        assert shared_file.remove_stale() == ["zero_nb-left"]
    finally:
        holder.kill()
        holder.wait()
    assert shared_file.remove_stale() == ["zero_nb-used"] and sorted(
        path.name for path in tmp_path.iterdir()
    ) == ["other", "zero_nb-mine"]


def test_connecting_costs_a_few_requests_whatever_the_number_of_ranks():
    """Counted on a store, with one thread for each of 40 ranks that are on two machines: they find
    out before any of them makes a file."""
    from zero_nb.comm import agreement, meeting, ranks
    from zero_nb.comm import store as store_module

    class Counted:
        def __init__(self, store):
            self.store, self.requests, self.bytes = store, 0, 0

        def __getattr__(self, name):
            def call(*args):
                self.requests += "\0" not in args  # a look whether something is there
                self.bytes += sum(len(arg) for arg in args if isinstance(arg, str))
                return getattr(self.store, name)(*args)

            return call

    size, store, told_of = 40, dist.HashStore(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_store", lambda group: group.process_group)
        for module in (store_module, agreement, meeting):
            patch.setattr(module, "_timeout", lambda group: timedelta(seconds=30))
        patch.setattr(
            shared_memory, "_place", lambda _: f"machine {threading.current_thread().name}"
        )

        def rank(r):
            group = object.__new__(ranks.Ranks)
            group.group_rank, group.ranks, group.size, group.process_group = (
                r,
                tuple(range(size)),
                size,
                Counted(store),
            )
            group._state = group._wire = ranks._State()
            told_of.append(
                (
                    transport.find_transport(meeting._Meeting(group)),
                    group.process_group.requests,
                    group.process_group.bytes,
                )
            )

        threads = [
            threading.Thread(target=rank, args=(r,), name=str(r % 2), daemon=True)
            for r in range(size)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert (
        len(told_of) == size
        and {said[0] for said, _, _ in told_of} == {None}
        and len({said for said, _, _ in told_of}) == 1
    )
    assert (
        max(requests for _, requests, _ in told_of) <= 14
        and sum(nbytes for _, _, nbytes in told_of) < 1000 * size
    )
    assert store.num_keys() <= 1 and not files()  # the store keeps one of its own


# ---- what goes wrong ----


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
        and "rank 1 within 1 s" in again
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
        g._wire.transports.clear() # connect again
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


def test_M1_no_stranger_can_hold_a_job_up():
    """No rank has a socket that other users could call, at any moment while it connects; and one
    that is called by a silent stranger goes on."""

    def visited():
        calls, kept, over = set(), [], threading.Event()

        def own():
            return {
                os.readlink(f"/proc/self/fd/{name}")
                for name in os.listdir("/proc/self/fd")
                if os.path.islink(f"/proc/self/fd/{name}")
            }

        def stranger():
            while not over.is_set():
                for line in Path("/proc/net/unix").read_text().splitlines():
                    *_, inode, name = line.split()
                    if "@zero_nb/" not in name or name in calls or f"socket:[{inode}]" not in own():
                        continue
                    calls.add(name)
                    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    kept[-1].setblocking(False)
                    kept[-1].connect("\0" + name[1:])

        threading.Thread(target=stranger, daemon=True).start()
        said = []
        for _ in range(10):
            g = clone(Group(), timeout=timedelta(seconds=6))
            said.append(caught_error(lambda g=g: g.reduce_scatter(torch.ones(2))))
        over.set()
        return len(calls), set(said)

    assert run(2, visited, timeout=180) == [(0, {None})] * 2


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
    g._wire.transports[0].close()
    g._wire.transports.clear()
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
