"""Several collectives as one block, by whom it is waited for, and under a compiler."""

import random
import threading

import pytest
import torch
import torch.distributed as dist
from common import caught_error

from zero_nb.comm.coalescing import _PACK, coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import clone

# ---- coalescing ----


def random_call(dice: random.Random, size: int) -> tuple[str, torch.dtype, list[int], int]:
    """Draw a kind, a dtype, the elements of each rank and a root."""
    kind = dice.choice(["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
    dtype = dice.choice([torch.float32, torch.bfloat16, torch.int64])
    uneven = dice.random() < 0.9
    sizes = [dice.choice([0, 1, 5, 300]) if uneven else _PACK // 4 for _ in range(size)]
    return kind, dtype, sizes, dice.randrange(size)


def coalesced(seed: int, async_ops: bool) -> list[bool]:
    """Run a random block on a new group and the same calls one by one; compare."""
    g, dice = Group(dist.new_group()), random.Random(seed)
    plan = [random_call(dice, g.size) for _ in range(dice.randint(1, 30))]
    inputs = [
        ((torch.arange(sum(sizes)) + g.group_rank) % 7).to(dtype) for _, dtype, sizes, _ in plan
    ]

    def all_calls(tensors):
        for (kind, _, sizes, root), t in zip(plan, tensors, strict=True):
            if kind == "all_reduce":
                g.all_reduce(t)
            elif kind == "broadcast":
                g.broadcast(t, root)
            else:
                getattr(g, kind)(t, sizes)

    one_by_one, together = [t.clone() for t in inputs], [t.clone() for t in inputs]
    all_calls(one_by_one)
    with coalescing_manager(g, async_ops=async_ops) as block:
        all_calls(together)
        assert all(t.equal(i) for t, i in zip(together, inputs, strict=True)), (
            "something was sent inside the block"
        )
    if async_ops:
        block.wait()
    same = []
    for (kind, _, sizes, _), a, b in zip(plan, one_by_one, together, strict=True):
        mine = a.split(sizes)[g.group_rank].equal(b.split(sizes)[g.group_rank])
        same.append(mine if kind == "reduce_scatter" else a.equal(b))
    return same


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_block_is_its_calls(size):
    def several():
        return {seed: coalesced(seed, seed // 4 % 2 == 0) for seed in range(size - 1, 12, 4)}

    for found in run(size, several):
        assert len(found) == 3 and all(map(all, found.values())), found


def test_sends_in_a_block():
    def ping():
        g, got = Group(), [torch.zeros(3) for _ in range(4)]
        peer = 1 - g.group_rank
        with coalescing_manager(g):
            for i, t in enumerate(got):
                g.send(torch.full((3,), float(10 * g.group_rank + i)), peer)
                g.recv(t, peer)
        return [t[0].item() for t in got]

    assert run(2, ping) == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def test_an_exception_in_a_block_sends_nothing():
    def fails():
        g, x = Group(), torch.ones(4)

        def block():
            with coalescing_manager(g):
                g.all_reduce(x)
                raise KeyError("lost")

        said = caught_error(block)
        before = x.tolist()
        g.all_reduce(x)
        return said, before, x.tolist()

    assert run(2, fails) == [(("KeyError", "'lost'"), [1.0] * 4, [2.0] * 4)] * 2


def bad_blocks(g: Group, other: Group, x: torch.Tensor):
    """Give blocks of one group that cannot be, as functions."""

    def unsupported():
        with coalescing_manager(g):
            g.gather(x, 0)

    def overlapping():
        with coalescing_manager(g):
            [g.all_reduce(t) for t in (x[:5], x[4:])]

    def nested():
        with coalescing_manager(g), coalescing_manager(other):
            pass

    def early():
        with coalescing_manager(g, async_ops=True):
            g.all_reduce(x).wait()

    def gaps():
        with coalescing_manager(g):
            g.all_reduce(x[::2])

    return unsupported, overlapping, nested, early, gaps


def overlapping_on_one():
    g, x = Group(dist.new_group()), torch.ones(8)
    start = 4 if g.group_rank else 5

    def block():
        with coalescing_manager(g):
            for part in (x[:5], x[start : start + 3]):
                g.all_reduce(part)

    return caught_error(block)


def test_memory_that_overlaps_on_one_rank_is_told_to_the_others():
    for kind, words in run(2, overlapping_on_one, timeout=20):
        assert kind == "ValueError" and "same memory appears twice" in words


def test_blocks_that_cannot_be():
    def bad():
        g, x = Group(), torch.ones(8)
        other = clone(g)
        errors = [caught_error(f) for f in bad_blocks(g, other, x)]
        with coalescing_manager(g):
            g.all_reduce(x)
            other.all_gather(
                y := torch.full((2,), float(g.group_rank))
            )  # another group's collectives are not this block's
            during = y.tolist()
        return errors, during, x[0].item()

    for errors, during, total in run(2, bad):
        assert (
            [kind for kind, _ in errors] == ["ValueError"] * 3 + ["RuntimeError", "ValueError"]
            and during == [0.0, 1.0]
            and total == 2.0
        )
        said = [
            "gather cannot be coalesced",
            "same memory appears twice",
            "already inside",
            "has not ended",
            "contiguous",
        ]
        for (_, message), words in zip(errors, said, strict=True):
            assert words in message


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("coalesce", [False, True])
def test_a_collective_nobody_waited_for(coalesce):
    def forgets():
        g, x = Group(), torch.ones(4)

        def forget():
            if not coalesce:
                return g.reduce_scatter(x, async_op=True) and None
            with coalescing_manager(g, async_ops=True):
                g.all_reduce(x)

        def go_on():
            forget()  # raises if the other rank has forgotten before this one has begun
            g.all_reduce(torch.ones(1))

        return caught_error(go_on)

    for kind, message in run(2, forgets):
        assert kind == "RuntimeError" and "never waited for" in message
        assert ("1 x all_reduce" if coalesce else "reduce_scatter of 4 float32") in message and (
            "test_coalescing.py:" in message
        ) == coalesce


def test_a_block_belongs_to_its_thread():
    def threads():
        g, twin, log = Group(), None, []
        twin = clone(g)

        def elsewhere():
            y = torch.ones(2)
            twin.all_reduce(y)
            log.append(y.tolist())

        with coalescing_manager(twin):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return log

    assert run(2, threads) == [[[2.0, 2.0]]] * 2


# ---- compilers ----


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake():
        g = Group()
        with FakeTensorMode():
            x = torch.ones(6)
            for call in (g.all_reduce, g.reduce_scatter, g.all_gather):
                call(x)
            return tuple(x.shape), caught_error(lambda: g.gather(x, 0))[0]

    assert run(2, fake) == [((6,), "NotImplementedError")] * 2
