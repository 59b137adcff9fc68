"""Collectives against arithmetic on every size of group, and agreement against every way to disagree."""
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zero_nb.launch import run
from zero_nb.objects import gather_bytes
from zero_nb.process_group import Group, agree, agreeing

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def values(group_rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size * 5) % 7 + group_rank + 1).to(dtype)  # small whole numbers: sums are exact in every dtype


def every_collective(ranks=None):
    """Compare all collectives with what arithmetic says; return what went wrong."""
    process_group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks: return []
    g, wrong = Group(process_group), []
    for dtype in DTYPES:
        everyone = [values(r, g.size, dtype) for r in range(g.size)]
        mine, total = everyone[g.group_rank], torch.stack(everyone).sum(0).to(dtype)
        for async_op in (False, True):
            reduced, sent, scattered, gathered = mine.clone(), mine.clone(), mine.clone(), mine.clone()
            source = g.size - 1
            works = [g.all_reduce(reduced, async_op=async_op), g.broadcast(sent, source, async_op=async_op)]
            works += [g.reduce_scatter(scattered, async_op=async_op), g.all_gather(gathered, async_op=async_op)]
            for work in works: work.wait()
            parts = torch.cat([e.chunk(g.size)[r] for r, e in enumerate(everyone)])
            part = slice(5 * g.group_rank, 5 * g.group_rank + 5)
            good = [reduced.equal(total), sent.equal(everyone[source]), scattered[part].equal(total[part]), gathered.equal(parts)]
            if not all(good): wrong.append((dtype, async_op, good))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(size): assert run(size, every_collective) == [[]] * size


@pytest.mark.parametrize("ranks", [[2, 3], [3, 1], [1], [3, 0, 2]])
def test_collectives_of_a_subgroup(ranks): assert run(4, every_collective, ranks) == [[]] * 4


def test_two_groups_at_once():
    def both():
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine, world = Group(pairs[dist.get_rank() % 2]), Group()
        a, b = torch.full((4,), float(dist.get_rank())), torch.full((8,), float(dist.get_rank()))
        works = [mine.all_gather(a, async_op=True), world.all_gather(b, async_op=True)]
        for work in reversed(works): work.wait()
        return a.tolist(), b.tolist()

    for rank, (a, b) in enumerate(run(4, both)):
        assert a == [rank % 2] * 2 + [rank % 2 + 2] * 2 and b == [0, 0, 1, 1, 2, 2, 3, 3]


def test_many_in_flight_and_repeated_waits():
    def many():
        g = Group()
        flats = [torch.full((6,), float(g.group_rank + i)) for i in range(50)]
        works = [g.reduce_scatter(f, async_op=True) if i % 2 else g.all_gather(f, async_op=True) for i, f in enumerate(flats)]
        for work in works[::-1] + works: work.wait()
        return all(f.tolist() == [i, i, i + 1, i + 1, i + 2, i + 2] if i % 2 == 0 else f.chunk(3)[g.group_rank].tolist() == [3 * i + 3] * 2
                   for i, f in enumerate(flats))

    assert run(3, many) == [True] * 3


def test_empty_tensors_move_nothing():
    def empty():
        for call in (Group().all_reduce, Group().reduce_scatter, Group().all_gather): call(torch.empty(0))
        return True

    assert run(2, empty) == [True, True]


@pytest.mark.parametrize("to", [0, 1, 2])
def test_gather_bytes(to):
    def gather():
        g = Group()
        return [bytes(part) for part in gather_bytes(g, bytearray(bytes([g.group_rank]) * (g.group_rank * 100_000)), to)]

    got = run(3, gather)
    assert got[to] == [b"", b"\1" * 100_000, b"\2" * 200_000]
    assert all(got[rank] == [] for rank in range(3) if rank != to)


def told(f):
    try: return f() and None
    except Exception as e: return type(e).__name__, str(e)


def test_bad_tensors_are_refused_before_anything_is_sent():
    def refused():
        g = Group()
        bad = [(g.all_reduce, torch.zeros(4, 4).to_sparse()), (g.all_gather, torch.zeros(5)), (g.reduce_scatter, torch.zeros(2, 2)),
               (g.all_reduce, torch.zeros(3, device="meta")), (g.all_reduce, torch.ones(1))]  # the last one is good: the group is usable afterwards
        return [told(lambda call=call, tensor=tensor: call(tensor)) for call, tensor in bad]

    for messages in run(2, refused):
        assert [m and m[0] for m in messages] == ["ValueError"] * 4 + [None]
        said = ["dense tensors", "2 equal parts", "tensor of 2 parts", "no backend"]
        for (_, message), words in zip(messages[:4], said, strict=True): assert words in message


def test_a_stranger_to_the_group_is_told_so():
    def stranger():
        pair = dist.new_group([1, 2])
        return told(lambda: Group(pair))

    first, *others = run(3, stranger)
    assert first[0] == "ValueError" and "global rank 0 is not a member" in first[1] and others == [None, None]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("who", [0, 1])
def test_one_ranks_error_is_everybodys(size, who):
    def fails():
        g = Group()
        def work():
            with agreeing(g, "the work"):
                if g.group_rank == who: raise KeyError("lost")
        return told(work), told(lambda: agree(g, "more work", ["the same"]))  # and the group is usable afterwards

    for rank, (error, after) in enumerate(run(size, fails)):
        assert error[0] == "KeyError" and "lost" in error[1] and after is None
        assert rank == who or f"rank {who} failed at the work" in error[1]


def test_an_error_that_has_no_builtin_name_is_a_runtime_error_elsewhere():
    class Odd(Exception): pass

    def fails():
        g = Group()
        return told(lambda: agree(g, "the work", [], Odd("odd") if g.group_rank == 0 else None))

    assert [kind for kind, _ in run(2, fails)] == ["Odd", "RuntimeError"]


def test_the_first_line_that_differs_is_named():
    def differs():
        g = Group()
        lines = [f"layer {i}" for i in range(2000)]
        if g.group_rank == 2: lines[1500] = "layer of another kind"
        return told(lambda: agree(g, "the model", lines))

    for kind, message in run(3, differs):
        assert kind == "ValueError" and "rank 0 has 'layer 1500', rank 2 has 'layer of another kind'" in message


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_does_not_come_is_named(gone):
    def waits():
        dist.barrier()
        g = Group(dist.new_group(timeout=timedelta(seconds=3)))
        dist.barrier()  # all are here, so that only the one that leaves can be late
        if g.group_rank == gone: return None
        return told(lambda: agree(g, "the work", []))

    for rank, error in enumerate(run(3, waits)):
        assert error is None if rank == gone else error[0] == "RuntimeError" and f"rank {gone} did not arrive within 3 s" in error[1]


def test_a_group_of_one_needs_nothing():
    assert not dist.is_initialized() and "RANK" not in os.environ
    g, x = Group(), torch.arange(3.0)
    for call in (g.all_reduce, g.all_gather, g.reduce_scatter): call(x, async_op=True).wait()
    assert (g.ranks, g.size, g.group_rank, g.global_rank, x.tolist()) == ((0,), 1, 0, 0, [0, 1, 2])
    assert [bytes(b) for b in gather_bytes(g, bytearray(b"abc"), 0)] == [b"abc"]
    with pytest.raises(ZeroDivisionError), agreeing(g, "a division"): 1 / 0


def test_agreement_leaves_nothing_in_the_store():
    def keys():
        g = Group()
        store = dist.distributed_c10d._get_process_group_store(g.process_group)
        dist.barrier()
        before = store.num_keys()
        dist.barrier()
        for i in range(3): agree(g, "the work", [str(i)])
        assert told(lambda: agree(g, "the work", [str(g.group_rank)]))[0] == "ValueError"
        dist.barrier()
        return store.num_keys() - before

    assert run(3, keys) == [0, 0, 0]
