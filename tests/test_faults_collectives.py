"""Collectives of a rank without memory, in threads, in a group that ends, of tensors of other classes."""

import random
import resource
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from common import caught, caught_error
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.ending import destroy
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.messages import _Scratch
from zero_nb.comm.objects import broadcast_object_list


def has_no_memory(async_op):
    """Give what all-reduces say of which rank 1 cannot make the first: there is no memory for a copy."""
    g = Group(dist.new_group())
    said = []
    g.all_reduce(torch.zeros(2048, 8192).t())  # all-reduces of this kind are known from now on
    for step in range(3):
        x = torch.full((2048, 8192), step + 1.0).t()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        if (step, g.group_rank) == (0, 1):
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
        words = caught(lambda x=x: g.all_reduce(x, async_op=async_op).wait())
        resource.setrlimit(resource.RLIMIT_AS, limits)
        said.append(words or x[0, 0].item())
    return said


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.parametrize("async_op", [False, True])
def test_a_rank_without_memory_for_a_copy_ends_the_group(async_op):
    one, other = run(2, has_no_memory, async_op, timeout=60, group_timeout=20)
    assert "can't allocate memory" in other[0]
    for words in (*one, *other[1:]):
        assert "rank 1 failed with RuntimeError" in str(words), (one, other)


def without_memory_in_a_block():
    g = Group(dist.new_group())

    def refuse(*_):
        raise torch.OutOfMemoryError("none is left")

    def block():
        with coalescing_manager(g):
            for _ in range(2):
                g.all_reduce(torch.ones(4))

    block()
    with pytest.MonkeyPatch.context() as patch:
        if g.group_rank == 0:
            patch.setattr(torch, "cat", refuse)
        said = caught_error(block)
    return said, caught_error(block)


def test_a_rank_without_memory_for_a_pack_ends_the_group():
    for found in run(2, without_memory_in_a_block, timeout=60, group_timeout=20):
        for kind, words in found:
            assert kind == "RuntimeError" and "rank 0 failed with OutOfMemoryError" in words


def made_by(what, group):
    if what == "functional":
        return all_gather_tensor(torch.full((2,), group.group_rank + 1.0), 0, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)


def moves_wrapped(what, kind):
    """Give what a collective of a tensor says that holds its numbers in another one."""
    g = Group()
    x = made_by(what, g)
    call = getattr(g, kind)
    said = caught_error(lambda: call(x, 0) if kind == "broadcast" else call(x))
    return said, x.tolist() if said is None else []


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_a_tensor_that_holds_others_is_refused(kind):
    for (error, words), _ in run(2, moves_wrapped, "mesh", kind, timeout=30):
        assert error == "ValueError" and "DTensor" in words and "to_local()" in words


def test_what_functional_collectives_give_can_be_moved():
    sums = [moved for _, moved in run(2, moves_wrapped, "functional", "reduce_scatter", timeout=30)]
    assert sums[0][:2] == [2.0, 2.0] and sums[1][2:] == [4.0, 4.0]
    gathered = run(2, moves_wrapped, "functional", "all_gather", timeout=30)
    assert gathered == [(None, [1.0, 1.0, 2.0, 2.0])] * 2


def destroyed_in_flight():
    """Destroy a group whose block is not over, and use another group."""
    world = Group()
    world.all_reduce(x := torch.ones(1))
    g = Group(dist.new_group())
    with coalescing_manager(g, async_ops=True) as block:
        g.all_reduce(torch.ones(4))
        g.all_gather(torch.ones(4))
    destroy(g)
    other = caught_error(lambda: world.all_reduce(x))
    return other, x.item(), [caught_error(block.wait) for _ in range(2)]


def test_a_group_that_was_destroyed_in_flight_leaves_others_alone():
    for other, total, waits in run(2, destroyed_in_flight, timeout=30):
        assert (other, total) == (None, 4.0)
        for kind, words in waits:
            assert kind == "RuntimeError" and "its group was destroyed on this rank" in words


def test_threads_share_the_memory_that_messages_are_received_into():
    scratch = _Scratch()
    said = []

    def receive(seed):
        dice = random.Random(seed)
        for _ in range(20_000):
            wanted = dice.choice([10, 1000, 100_000])
            buffer = scratch.take(wanted, torch.device("cpu"))
            assert len(buffer) >= wanted
            scratch.give_back(buffer)

    def watched(seed):
        if words := caught(lambda: receive(seed)):
            said.append(words)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=watched, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert said == []


SMALL = """
import sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None): sys.exit(77)
if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=12m"): sys.exit(77)
import torch
from zero_nb.comm.launch import run
from zero_nb.comm.groups import Group
def work():
    g, x, y = Group(), torch.ones(4 << 20), torch.ones(1)
    g.all_reduce(y)
    x[g.group_rank * len(x) // 2 :] = g.group_rank + 1
    gather = g.all_gather(x, async_op=True)
    if g.group_rank: gather.wait()
    g.all_reduce(y)
    gather.wait()
    return x[0].item(), x[-1].item(), g._traffic.transports[0].progress.outbox.pool.size >> 20
print(run(2, work, timeout=60, group_timeout=20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_a_rank_whose_pool_cannot_grow_is_read_before_its_peer_sleeps_elsewhere():
    """A part of 8 MiB through a pool of at most 4: one rank waits for it, the other one for a sum."""
    command = [sys.executable, "-c", SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("may not mount here")
    assert "[(1.0, 2.0, " in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_a_tensor_whose_elements_share_memory_is_refused(kind):
    """Of `expand`: a broadcast had sent it before the copy back failed, and blamed a peer."""

    def expanded():
        x = torch.tensor(3.0).expand(4)
        args = (x, 0) if kind == "broadcast" else (x,)
        refused = caught_error(lambda: getattr(Group(), kind)(*args))
        mine = torch.ones(4)
        Group().all_reduce(mine)
        return refused, mine.tolist()

    for (error, words), after in run(2, expanded, timeout=30):
        assert error == "ValueError" and "contiguous()" in words and after == [2.0] * 4


def test_a_device_may_be_named():
    def named():
        objects = ["a"] if dist.get_rank() == 0 else [None]
        broadcast_object_list(objects, 0, device="cpu")
        return objects

    assert run(2, named, timeout=30) == [["a"]] * 2
