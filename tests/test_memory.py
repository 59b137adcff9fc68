"""Ranks of one machine that read each other's memory."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zero_nb import memory
from zero_nb.launch import run
from zero_nb.memory import Spread, all_gather, connect, read, reduce_scatter
from zero_nb.process_group import Group, abort, clone, destroy, fail, split
from zero_nb.record import record

pytestmark = pytest.mark.skipif(memory._reader() is None, reason="needs a system on which one process may read another's memory")


def swap(text):
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def mesh_of_all(limit=20): return connect(dist.get_rank(), range(dist.get_world_size()), swap, limit)


def told(f):
    try: f()
    except (RuntimeError, OSError, ValueError) as e: return type(e).__name__, str(e)
    return "", "no error"


def through(group):
    """Give the mesh that a group uses, or None."""
    return next(iter(group._wire.meshes), None)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.complex64, torch.bool, torch.uint8])
def test_both_halves_are_exact(size, dtype):
    def halves():
        rank, mesh = dist.get_rank(), mesh_of_all()
        out = []
        for sizes in ([5] * size, [0, 7, 3, 1][:size], [0] * (size - 1) + [9], [100_003, 1, 70_000, 65_536][:size]):
            ranks = [(torch.arange(sum(sizes)) % 3 + r).to(dtype) for r in range(size)]
            x = ranks[rank].clone()
            for _ in reduce_scatter(mesh, x.split(sizes)): pass
            for _ in all_gather(mesh, x.split(sizes)): pass
            total = ranks[0].clone()
            for term in ranks[1:]: total += term
            out.append(x.equal(total))
        return out, len(mesh.notes) + len(mesh.flying)

    assert run(size, halves) == [([True] * 4, 0)] * size


def test_a_sum_does_not_depend_on_its_owner():
    """Element by element, in the order of the ranks: no cut and no owner changes a bit of it."""
    def summed():
        rank, mesh = dist.get_rank(), mesh_of_all()
        torch.manual_seed(rank)
        x, sums = torch.randn(300_000) * 10 ** (rank * 3), []
        for sizes in ([100_000] * 3, [1, 299_998, 1], [0, 0, 300_000]):
            y = x.clone()
            for _ in reduce_scatter(mesh, y.split(sizes)): pass
            for _ in all_gather(mesh, y.split(sizes)): pass
            sums.append(y)
        every = [torch.empty_like(x) for _ in range(3)]
        dist.all_gather(every, x)
        return [y.equal((every[0] + every[1]) + every[2]) for y in sums]

    assert run(3, summed) == [[True] * 3] * 3


def test_many_in_flight_waited_for_in_any_order():
    """Hundreds of notes, more than a socket holds, between ranks that look at none until all have started."""
    def flying(count):
        rank, g = dist.get_rank(), Group()
        xs = [torch.full((4,), float(i + rank)) for i in range(count)]
        works = [g.reduce_scatter(x, async_op=True) for x in xs]
        order = list(range(count))
        if rank: order.reverse()
        for i in order: works[i].wait()
        return all(x[2 * rank:2 * rank + 2].eq(2 * i + 1).all() for i, x in enumerate(xs)), len(through(g).notes) + len(through(g).flying)

    assert run(2, flying, 1500, timeout=60) == [(True, 0)] * 2


def test_threads_wait_for_different_collectives():
    def threaded():
        g = Group()
        g.reduce_scatter(torch.ones(8))
        xs = [torch.full((8,), float(i)) for i in range(40)]
        works = [g.reduce_scatter(x, async_op=True) for x in xs]
        half = [threading.Thread(target=lambda mine: [w.wait() for w in mine], args=(works[i::4],), daemon=True) for i in range(4)]
        for t in half: t.start()
        for t in half: t.join(20)
        part = slice(4 * g.group_rank, 4 * g.group_rank + 4)
        return [w.done for w in works], [x[part].eq(2 * i).all().item() for i, x in enumerate(xs)]

    assert run(2, threaded) == [([True] * 40, [True] * 40)] * 2


def test_nobody_may_write_before_all_have_read():
    """A rank that is back from a collective overwrites all it has, while its peers are late."""
    def late():
        g, out = Group(), []
        for turn in range(6):
            x = torch.full((6,), float(g.group_rank + turn))
            work = g.reduce_scatter(x, async_op=True)
            if turn % 3 == g.group_rank: time.sleep(0.1)
            work.wait()
            mine = x[2 * g.group_rank:2 * g.group_rank + 2].clone()
            x.fill_(float("nan"))
            y = torch.full((3,), float("nan"))
            y[g.group_rank] = mine[0]
            work = g.all_gather(y, async_op=True)
            if turn % 3 == g.group_rank: time.sleep(0.1)
            work.wait()
            out.append(y.tolist())
            y.fill_(float("nan"))
        return out

    assert run(3, late) == [[[3.0 + 3 * turn] * 3 for turn in range(6)]] * 3


def test_a_group_uses_memory_and_says_what_it_moved():
    def used():
        with record() as pg:
            g, x = Group(pg), torch.ones(10)
            g.reduce_scatter(x, [1, 2, 7])
            g.all_gather(x, [1, 2, 7])
            kinds = [(e.kind, e.bytes, int(e.wire), e.end is not None) for e in pg.log]
        return x.eq(3).all().item(), kinds, through(g) is not None

    for rank, (right, kinds, near) in enumerate(run(3, used)):
        mine = (1, 2, 7)[rank]
        assert right and near and kinds == [("reduce_scatter", 40, 4 * (10 - mine), True), ("all_gather", 40, 8 * mine, True)]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_rank_that_cannot_is_enough(who, monkeypatch):
    def mixed():
        if dist.get_rank() == who: os.environ["ZERO_NB_MEMORY"] = "0"
        g, x = Group(), torch.ones(12)
        g.reduce_scatter(x)
        g.all_gather(x)
        return through(g), x.tolist()

    assert run(3, mixed) == [(None, [3.0] * 12)] * 3


@pytest.mark.parametrize("how", ["refused", "elsewhere", "other memory"])
def test_ranks_that_cannot_read_each_other_send_messages(how):
    """A system that forbids it, a process on another machine, and one whose number means another process here."""
    def forbidden():
        if dist.get_rank() == 1 and how == "refused":
            def refuse(*_): raise PermissionError(1, "Operation not permitted")
            memory.read = refuse
        if dist.get_rank() == 1 and how == "elsewhere":
            listen = socket.socket.bind
            socket.socket.bind = lambda self, name: listen(self, name + "x")
            socket.socket.getsockname = lambda self: b"\0zero_nb/not here"
        if dist.get_rank() == 1 and how == "other memory": memory._process = lambda link: os.getpid()
        g, x = Group(), torch.ones(12)
        g.reduce_scatter(x)
        return through(g), x[4 * g.group_rank].item()

    assert run(3, forbidden) == [(None, 3.0)] * 3


def test_a_stranger_is_not_let_in():
    def visited():
        rank, seen = dist.get_rank(), []
        def gossip(text):
            texts = swap(text)
            if rank == 1 and not seen: # before it connects itself
                seen.append(texts)
                for words in (b"", b"x" * 16, b"y" * 5):
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    stranger.connect(bytes.fromhex(json.loads(texts[0])[0]))
                    if words: stranger.send(words)
                    stranger.close()
            return texts
        mesh, x = connect(rank, range(2), gossip, 20), torch.ones(4)
        for _ in reduce_scatter(mesh, x.split(2)): pass
        return x[2 * rank].item()

    assert run(2, visited) == [2.0, 2.0]


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


def test_more_than_one_call_can_move_and_a_wrong_address(monkeypatch):
    x = torch.arange(8.0)
    for pid, address, message in ((os.getpid(), 8, "address"), (2 ** 22 + 1, x.data_ptr(), "process")):
        with pytest.raises(OSError, match=message): read(pid, address, torch.empty(3))
    short, call = [], memory._reader()
    def bit_by_bit(pid, here, one, there, other, flags):
        for span in (here._obj, there._obj): span.size = min(span.size, 8)
        short.append(here._obj.size)
        return call(pid, here, one, there, other, flags)
    monkeypatch.setattr(memory, "_reader", lambda: bit_by_bit)
    y = torch.zeros(7)
    read(os.getpid(), x.data_ptr(), y)
    assert short == [8, 8, 8, 4] and y.equal(x[:7])


@pytest.mark.parametrize("end", [abort, destroy, lambda g: fail(g, ValueError("no data"))], ids=["abort", "destroy", "fail"])
def test_a_rank_that_ends_the_group_frees_the_others(end):
    def ended():
        g = clone(Group())
        g.reduce_scatter(torch.ones(6))
        dist.barrier()
        start = time.monotonic()
        if g.group_rank == 2:
            time.sleep(0.2)
            end(g)
            said = told(lambda: g.reduce_scatter(torch.ones(6)))
        else: said = told(lambda: g.reduce_scatter(torch.ones(6)))
        took = time.monotonic() - start
        dist.barrier()
        return said, took < 15

    for rank, ((kind, message), soon) in enumerate(run(3, ended)):
        assert kind == "RuntimeError" and soon
        assert ("group was" in message) if rank == 2 else ("rank 2" in message and "reduce_scatter of 6 float32 failed" in message)


def test_a_late_rank_is_named():
    def late():
        g = clone(Group(), timeout=timedelta(seconds=1))
        g.all_gather(torch.ones(2))
        said = told(lambda: g.all_gather(torch.ones(2))) if g.group_rank == 0 else ("", "")
        dist.barrier()
        return said

    (kind, message), _ = run(2, late)
    assert kind == "RuntimeError" and "nothing came from rank 1 within 1 s" in message


FORKS = """
import os, sys, time
import torch, torch.distributed as dist
from zero_nb.process_group import Group
dist.init_process_group("gloo")
g = Group()
g.reduce_scatter(torch.ones(4))
from torch.utils.data import DataLoader
for turn in range(3):
    for batch in DataLoader(torch.arange(4), num_workers=2):
        x = torch.ones(4)
        g.reduce_scatter(x)
        assert x[2 * g.group_rank] == 2
pid = os.fork()
if pid == 0:
    g._wire.meshes[0].close()
    del g
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
g.reduce_scatter(torch.ones(4))
if g.group_rank == 0: print("survived")
dist.destroy_process_group()
"""


def test_processes_that_are_forked_leave_the_connections_alone(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "forks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr[-2000:]


def test_nothing_stays_open():
    def opened():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            for _ in all_gather(mesh_of_all(), torch.ones(2).split(1)): pass
        return len(os.listdir("/proc/self/fd")) - before

    assert run(2, opened) == [0, 0]


def test_yama_is_told_whose_children_may_read(monkeypatch):
    """Where a rule of the system lets only parents read, the launcher's other children are named."""
    calls = []
    class Library:
        process_vm_readv = type("call", (), {"restype": None})()
        def prctl(self, *args): calls.append(args)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
    memory._reader.__wrapped__()
    (option, parent, *rest), = calls
    assert option == int.from_bytes(b"amaY", "little") == 0x59616D61 and parent.value == os.getppid() and rest == [0, 0, 0]


def test_a_rank_that_computes_lets_the_others_go_on():
    """Nobody waits for a rank that waits for something else, or that never waits."""
    def busy():
        g, x = Group(), torch.full((6,), float(dist.get_rank()))
        works = [g.all_gather(x, async_op=True), g.reduce_scatter(torch.ones(6), async_op=True)]
        if g.group_rank == 0:
            dist.barrier() # the others come here when they have all they wait for
            late = [through(g).flying, x.tolist()]
            for work in works: work.wait()
            return late
        for work in works: work.wait()
        dist.barrier()
        return [{}, x.tolist()]

    assert run(3, busy, timeout=60) == [[{}, [0, 0, 1, 1, 2, 2]]] * 3


def test_what_goes_wrong_while_nobody_waits_is_told_to_who_does():
    def wrong():
        g = clone(Group())
        g.all_gather(torch.ones(6))
        if g.group_rank == 1: # never comes to the second
            dist.barrier()
            abort(g)
            return None
        work = g.all_gather(torch.ones(6), async_op=True)
        dist.barrier()
        time.sleep(0.3)
        return told(work.wait)

    first, _, last = run(3, wrong)
    for kind, message in (first, last): assert kind == "RuntimeError" and "all_gather of 6 float32 failed" in message and "rank 1" in message


def test_a_group_that_recorded_leaves_the_one_it_wraps_connected():
    def recorded():
        plain = Group()
        seen, x = Group(record()), torch.ones(4)
        seen.reduce_scatter(x)
        destroy(seen)
        plain.all_gather(x)
        return x.tolist(), through(plain) is not None

    assert run(2, recorded) == [([2.0] * 4, True)] * 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_process_ends_whatever_is_under_way(waits, tmp_path):
    """Also in the middle of a read, and with nobody who destroys the group."""
    (tmp_path / "ends.py").write_text(f"""
import torch, torch.distributed as dist
from zero_nb.process_group import Group
dist.init_process_group("gloo")
g = Group()
g.all_gather(torch.ones(4))
work = g.all_gather(torch.ones(1 << 24), async_op=True)
if {waits}: work.wait()
if g.group_rank == 0: print("ends")
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "ends.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ends" in done.stdout and "terminate called" not in done.stderr, done.stderr[-2000:]


# ---- into many places ----

def counted(monkeypatch, answer=None):
    """Count what the system is asked to copy; `answer`: what it says instead of doing so."""
    seen, call = [], memory._reader()
    def calls(pid, here, count, there, one, flags):
        seen.append(count)
        return call(pid, here, count, there, one, flags) if answer is None else answer
    monkeypatch.setattr(memory, "_reader", lambda: calls)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize(("lengths", "calls"), [([3] * 8, [8]), ([1, 0, 7, 100_000, 2, 0, 0, 5], [8]), ([2] * 2500, [1024, 1024, 452]), ([4] * 7, [])])
def test_one_tensor_is_dealt_out_to_many(monkeypatch, lengths, calls, dtype):
    seen = counted(monkeypatch)
    flat = (torch.arange(sum(lengths)) % 2).to(dtype)
    around = torch.full((sum(lengths) + len(lengths),), 1).to(dtype) # one element between any two
    runs = [piece[:-1] for piece in around.split([n + 1 for n in lengths])]
    Spread(runs)(flat)
    assert torch.cat(runs).equal(flat) and all(piece[-1] == 1 for piece in around.split([n + 1 for n in lengths])) and seen == calls


@pytest.mark.parametrize("answer", [-1, 5])
def test_what_the_system_refuses_torch_copies(monkeypatch, answer):
    seen, flat = counted(monkeypatch, answer), torch.arange(40.0)
    spread = Spread([torch.zeros(4) for _ in range(10)])
    spread(flat)
    spread(flat)
    assert torch.cat(spread.runs).equal(flat) and len(seen) == 1, "asked once"


def test_no_other_memory_is_dealt_to_where_it_is_forbidden(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    seen, flat = counted(monkeypatch), torch.arange(40.0)
    spread = Spread([torch.zeros(4) for _ in range(10)])
    spread(flat)
    assert torch.cat(spread.runs).equal(flat) and not seen


@pytest.mark.parametrize("count", [2, 20])
def test_backward_hears_that_a_tensor_was_dealt_to(count):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    loss = sum((w * w).sum() for w in weights)
    Spread([w.detach() for w in weights])(torch.zeros(3 * count))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"): loss.backward()
