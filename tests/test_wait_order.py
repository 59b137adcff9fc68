"""Works that are more than one collective, waited for in another order on each rank."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from zero_nb.comm import relays
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list

KINDS = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")


def started(group, kind, tensor):
    root = {"group_rank": 0} if kind == "broadcast" else {}
    return getattr(group, kind)(tensor, async_op=True, **root)


def in_a_block(group, kinds, first):
    tensors = [torch.full((6,), float(first + group.group_rank)) for _ in kinds]
    with coalescing_manager(group, async_ops=True) as block:
        for kind, tensor in zip(kinds, tensors, strict=True):
            started(group, kind, tensor)
    return block, tensors


def waited(group, works, turned):
    """Wait from the last to the first on every rank but rank 0, if they are to be turned round."""
    for work in works[:: -1 if turned and group.group_rank else 1]:
        work.wait()


def blocks(turned):
    group = Group()
    found = []
    for kinds in itertools.permutations(KINDS, 3):
        made = [in_a_block(group, kinds, first) for first in (0, 100, 200)]
        waited(group, [block for block, _ in made], turned)
        mine = [t[2 * group.group_rank :][:2] for _, tensors in made for t in tensors]
        found.append(torch.stack(mine).tolist())
    return found


def test_blocks_of_several_kinds(way):
    for turned, wanted in zip(run(3, blocks, True), run(3, blocks, False), strict=True):
        assert turned == wanted


def sums(dtype, turned):
    group = Group()
    found = []
    for sizes in ((4, 4, 4), (4, 9, 1)):
        tensors = [
            torch.full((size,), 10**i * (group.group_rank + 1)).to(dtype)
            for i, size in enumerate(sizes)
        ]
        waited(group, [group.all_reduce(t, async_op=True) for t in tensors], turned)
        found += [t.tolist() for t in tensors]
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64], ids=str)
def test_sums_that_gloo_cannot_make(way, dtype):
    wanted = [[sum(10**i * (r + 1) for r in range(3))] for i in range(3)]
    for found in run(3, sums, dtype, True):
        assert found == run(3, sums, dtype, False)[0]
        numbers = [[int(bool(w[0])) if dtype == torch.bool else w[0]] for w in wanted]
        assert [t[:1] for t in found[:3]] == numbers


def between(turned):
    """Start another collective before a work is waited for on some ranks, and after it on others."""
    group = Group()
    block, tensors = in_a_block(group, ("broadcast", "all_reduce"), 0)
    other = torch.full((6,), 100.0 + group.group_rank)
    if turned and group.group_rank:
        work = group.all_reduce(other, async_op=True)
        block.wait()
    else:
        block.wait()
        work = group.all_reduce(other, async_op=True)
    work.wait()
    return [t.tolist() for t in (*tensors, other)]


def test_a_collective_between_start_and_wait(way):
    assert run(3, between, True) == run(3, between, False)
    assert run(3, between, True)[0] == [[0.0] * 6, [3.0] * 6, [303.0] * 6]


def around_another_group(kind, turned):
    """Let rank 1 wait for a work first, and call another group then; the others do it the other way round."""
    group = Group()
    second = Group(torch.distributed.new_group())
    if kind == "block":
        work, tensors = in_a_block(group, ("all_reduce", "broadcast"), 1)
    else:
        tensors = [torch.full((6,), 1 + group.group_rank, dtype=torch.int16)]
        work = group.all_reduce(tensors[0], async_op=True)
    other = torch.full((3,), 10.0 + group.group_rank)
    for act in (work.wait, lambda: second.all_reduce(other))[:: -1 if turned else 1]:
        act()
    return [t.tolist() for t in (*tensors, other)]


def around(kind):
    return around_another_group(kind, Group().group_rank != 1)


@pytest.mark.parametrize("kind", ["block", "int16"])
def test_a_collective_of_another_group_between_start_and_wait(way, kind):
    wanted = [[3] * 6, [1] * 6][: 2 if kind == "block" else 1]
    assert run(2, around, kind, timeout=60) == [[*wanted, [21.0] * 3]] * 2


def in_a_thread(kind):
    """Wait in one thread for a work of which something is left to start, and start more in another."""
    group = Group()
    store = torch.distributed.distributed_c10d._get_default_store()
    found = []
    for late in (False, True):  # at first all calls are compared
        if late and group.group_rank:
            store.wait(["both"])
        if kind == "block":
            work, tensors = in_a_block(group, ("all_reduce", "broadcast"), 1)
        else:
            tensors = [torch.full((6,), 1 + group.group_rank, dtype=torch.int16)]
            work = group.all_reduce(tensors[0], async_op=True)
        other = torch.full((3,), 10.0 + group.group_rank)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(work.wait)
            if late and not group.group_rank:
                time.sleep(0.2)  # the thread waits by now
                store.set("both", "")
            group.all_reduce(other)
            waiting.result()
        found = [t.tolist() for t in (*tensors, other)]
    return found


@pytest.mark.parametrize("kind", ["block", "int16"])
def test_a_thread_waits_while_another_goes_on(way, kind):
    wanted = [[3] * 6, [1] * 6][: 2 if kind == "block" else 1]
    assert run(2, in_a_thread, kind, timeout=60) == [[*wanted, [21.0] * 3]] * 2


def late_runs(tensor):
    """Start a block of two runs and another collective, before which rank 1 waits for the block or copies a tensor."""
    group = Group()
    mine = 1.0 + group.group_rank
    found = []
    for _ in range(2):  # at first all calls are compared
        gathered = torch.full((4,), 10 * mine)
        other = torch.full((8,), 20 * mine)[:: 2 if tensor == "copied" else 1][:4]
        with coalescing_manager(group, async_ops=True) as block:
            group.reduce_scatter(torch.ones(4))
            group.all_gather(gathered)
        if group.group_rank and tensor == "as it is":
            block.wait()
        group.all_gather(other)
        block.wait()
        found += [gathered.tolist(), other.tolist()]
    return found


def one_copies():
    return late_runs("copied" if Group().group_rank else "as it is")


@pytest.mark.parametrize(
    "work", [partial(late_runs, "as it is"), one_copies], ids=["alike", "gaps"]
)
def test_a_later_run_of_a_block_is_not_taken_for_the_next_collective(way, work):
    wanted = [[10.0, 10.0, 20.0, 20.0], [20.0, 20.0, 40.0, 40.0]]
    assert run(2, work, timeout=60) == [wanted * 2] * 2


def large_work(group):
    """Start a work of which something is left to start, by messages and in a pool that is too small for it."""
    relays._AHEAD = 1 << 18
    x = torch.full((1 << 20,), 1.0 + group.group_rank)
    return group.reduce_scatter(x, async_op=True), x[group.group_rank << 19 :][:4]


def second_half(group):
    x = torch.full((4,), 1 + group.group_rank).to(torch.complex64)
    return group.all_reduce(x, async_op=True), x.real


def summed(group, x):
    group.all_reduce(x)


def summed_later(group, x):
    group.all_reduce(x, async_op=True).wait()


def agreed(group, x):
    broadcast_object_list([0], group=group)
    x *= group.size


def on_different_sides(start, act):
    """Let rank 0 wait for a work before it does something with all ranks, and rank 1 afterwards."""
    group = Group()
    store = torch.distributed.distributed_c10d._get_default_store()
    x = torch.ones(2)
    for turn in ("first", "second"):  # at first all calls are compared
        if group.group_rank == 0 and turn == "second":
            store.wait(["started"])
        work, mine = start(group)
        if group.group_rank and turn == "second":
            store.set("started", "")
        acts = [work.wait, partial(act, group, x)]
        for each in acts[:: -1 if group.group_rank and turn == "second" else 1]:
            each()
    return mine.tolist(), x.tolist()


@pytest.mark.parametrize("act", [summed, summed_later, agreed])
@pytest.mark.parametrize("start", [large_work, second_half])
def test_all_is_started_before_a_rank_waits_for_something_else(way, monkeypatch, start, act):
    monkeypatch.setenv("ZERO_NB_MEMORY_MB", "1")
    found = run(2, on_different_sides, start, act, timeout=60)
    assert found == [([3.0] * 4, [4.0] * 2)] * 2


def receives_before_a_peer_starts():
    """Receive between start and wait what a peer sends before it starts."""
    group = Group()
    large_work(group)[0].wait()  # it is compared
    x = torch.ones(2)
    if group.group_rank:
        group.send(x + 1, 0)
        work, mine = large_work(group)
    else:
        work, mine = large_work(group)
        group.recv(x, 1)
    work.wait()
    return mine.tolist(), x.tolist()


def test_a_receive_does_not_wait_for_a_work_that_its_peer_starts_later(way, monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY_MB", "1")
    first, second = run(2, receives_before_a_peer_starts, timeout=60)
    assert first == ([3.0] * 4, [2.0] * 2) and second == ([3.0] * 4, [1.0] * 2)


def in_turns(relay, turned):
    relays._AHEAD = 256
    if relay:
        relays._host = lambda: f"{torch.distributed.get_rank() // 2:08x}"
    group = Group()
    tensors = [torch.arange(400.0) * (group.group_rank + 1) + i for i in range(3)]
    works = [group.reduce_scatter(t, async_op=True, relay=relay) for t in tensors]
    waited(group, works, turned)
    start = 100 * group.group_rank
    return [t[start : start + 100].tolist() for t in tensors]


@pytest.mark.parametrize("relay", [False, True])
def test_tensors_that_travel_in_turns(monkeypatch, relay):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    found = run(4, in_turns, relay, True)
    assert found == run(4, in_turns, relay, False)
    assert found[1][0][:2] == [1000.0, 1010.0]
