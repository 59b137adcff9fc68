"""Collectives that differ between ranks are found before anything is sent."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from common.one_collective import start

from zero_nb.comm.agreement import agree
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.subgroups import clone


def unlike(size: int, kind: str, fault: str):
    """Run a collective in which the last rank's tensor differs; then one in which it does not."""
    g, n = Group(dist.new_group()), dist.get_world_size()
    numel = {"longer": size + n, "shorter": size - n}.get(fault, size)
    dtype = {"longer type": torch.float64, "type": torch.int32}.get(fault, torch.float32)
    odd = torch.ones(numel, dtype=dtype) if g.group_rank == n - 1 else torch.ones(size)
    before = odd.clone()
    said = caught_error(lambda: start(g, kind, odd))
    sent = not odd.equal(before)
    g.all_reduce(x := torch.ones(1))
    return said, sent, x.item()


FAULTS = ["longer", "shorter", "longer type", "type"]
UNLIKE = [
    "all_reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "coalescing",
]


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_that_differ_between_ranks_are_found_before_they_are_sent(size):
    cases = list(itertools.product(UNLIKE, FAULTS))
    ranks = run(size, lambda: {case: unlike(24, *case) for case in cases})
    for kind, fault in cases:
        got = [found[kind, fault] for found in ranks]
        assert [(error[0], sent, total) for error, sent, total in got] == [
            ("ValueError", False, float(size))
        ] * size, (kind, fault)
        (message,) = {error[1] for error, _, _ in got}
        assert "rank 0 has" in message and f"rank {size - 1} has" in message
        assert f"{6 if kind == 'coalescing' else 24} float32" in message
        assert message.count("one_collective.py:") == (1 if kind == "coalescing" else 2)


def test_an_empty_tensor_on_one_rank_is_found():
    def empty():
        return caught_error(lambda: Group().all_reduce(torch.ones(3 * dist.get_rank())))

    for kind, message in run(2, empty):
        assert kind == "ValueError" and "of 0 float32" in message and "of 3 float32" in message


def test_wrong_roots_and_kinds_are_found():
    def wrong():
        g, r = Group(), dist.get_rank()
        calls = [
            lambda: g.broadcast(torch.ones(3), r),
            lambda: g.gather(torch.ones(6), r),
            lambda: (g.all_gather if r else g.reduce_scatter)(torch.ones(6)),
            lambda: g.all_gather(torch.ones(6), [1, 3, 2] if r else [2, 2, 2]),
            lambda: g.all_to_all(torch.ones(6), torch.ones(6), *[[2, 2, 2]] * 2 * min(r, 1)),
        ]
        return [caught_error(call) for call in calls]

    first, second, third = run(3, wrong)
    assert first == second == third and all(
        kind == "ValueError" and "ranks disagree on what comes next" in message
        for kind, message in first
    )


def test_collectives_are_compared_once():
    def once():
        g, turns = Group(), []
        sizes = [1, 2] if g.group_rank else [2, 1]

        def calls():
            for root in range(2):
                g.broadcast(torch.ones(3), root)
            g.all_reduce(torch.ones(3), async_op=True).wait()
            g.all_to_all(torch.zeros(3), torch.ones(3), sizes, sizes)
            with coalescing_manager(g):
                g.all_gather(torch.ones(4))
            turns.append(g._agreements.turn)

        calls()
        calls()
        Group().all_reduce(torch.ones(3))
        turns.append(g._agreements.turn)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        calls()
        return turns

    assert run(2, once) == [[5, 5, 5, 10]] * 2


def test_sizes_that_never_repeat_are_compared_a_while(monkeypatch):
    from zero_nb.comm import comparison

    def ever_new():
        g = Group()
        for i in range(20):
            g.all_reduce(torch.ones(i))
        return g._agreements.turn

    monkeypatch.setattr(comparison, "_COMPARED", 7)
    assert run(2, ever_new) == [7] * 2


@pytest.mark.parametrize(
    ("known", "other"),
    [("all_reduce", "all_gather"), ("all_gather", "all_reduce"), ("gather", "reduce_scatter")],
)
def test_a_rank_that_goes_astray_is_told_of(known, other):
    """The others do what is known, so they cannot wait to compare it: all say where they were when time is up."""

    def astray():
        g, x = clone(Group(), timeout=timedelta(seconds=3)), torch.zeros(12)
        start(g, known, x)
        said = caught_error(lambda: start(g, other if g.group_rank == 1 else known, x))
        dist.barrier()
        return said

    first, second, _ = run(3, astray)
    assert (
        first[0] == second[0] == "RuntimeError" and f"{known}" in first[1] and "failed" in first[1]
    )
    assert (
        f"rank 1 was at '{other} of 12 float32 at one_collective.py:" in first[1]
        and f"waited at '{other} of 12 float32 at" in second[1]
    )


@pytest.mark.usefixtures("way")
def test_known_rings_of_unequal_size_do_not_mix():
    def mixed():
        g = clone(Group(), timeout=timedelta(seconds=3))
        for size in (12, 24):
            g.reduce_scatter(torch.ones(size))
        x = torch.ones(24 if g.group_rank else 12)
        said = caught_error(lambda: g.reduce_scatter(x))
        dist.barrier()
        return said, x.sum().item() == x.numel()

    for rank, ((kind, message), untouched) in enumerate(run(2, mixed)):
        assert (
            kind == "RuntimeError"
            and f"reduce_scatter of {24 if rank else 12} float32 failed" in message
            and untouched
        )


@pytest.mark.parametrize(
    "other", [torch.zeros(4), torch.zeros(3, dtype=torch.int32)], ids=["size", "dtype"]
)
def test_unequal_sends_do_not_mix(other):
    def unequal():
        g = clone(Group(), timeout=timedelta(seconds=3))
        said = caught_error(lambda: g.recv(other, 0) if g.group_rank else g.send(torch.ones(3), 1))
        dist.barrier()
        return said

    sent, received = run(2, unequal)
    assert (
        "sending 3 float32 to group rank 1 failed" in sent[1]
        and f"receiving {len(other)} {str(other.dtype)[6:]} from group rank 0 failed" in received[1]
    )
    assert other.sum() == 0


def test_one_rank_may_record_what_all_compare():
    def some():
        recorded = record() if dist.get_rank() == 1 else None
        g, x = Group(recorded), torch.ones(4)
        g.all_reduce(x)
        g.reduce_scatter(x)
        return x.chunk(2)[g.group_rank].tolist()

    assert run(2, some) == [[4.0, 4.0]] * 2


def test_detail_checks_every_collective():
    def differ():
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        g, errors = Group(), []
        first = g.group_rank == 0
        kind = torch.float64 if first else torch.float32
        division = [3, 1] if first else [1, 3]
        one_of_two = g.all_gather if first else g.reduce_scatter
        calls = [
            lambda: g.all_reduce(torch.zeros(4 + first)),
            lambda: g.all_reduce(torch.zeros(4, dtype=kind)),
            lambda: g.broadcast(torch.zeros(4), int(first)),
            lambda: g.all_gather(torch.zeros(4), division),
            lambda: one_of_two(torch.zeros(4)),
            lambda: agree(g, "the model", []) if first else g.all_reduce(torch.zeros(1)),
        ]
        errors += [caught_error(call) for call in calls]
        x = torch.full((4,), 1.0 + first)
        g.all_reduce(x)
        with coalescing_manager(g):
            g.all_gather(x)
        sizes = [1, 2] if first else [2, 1]
        g.all_to_all(
            torch.zeros(3), torch.arange(3.0), sizes, sizes
        )  # sizes differ between ranks, and may
        return errors, x.tolist()

    a, b = run(2, differ)
    assert a[1] == b[1] == [3.0] * 4
    for (kind, message), (other, same) in zip(a[0], b[0], strict=True):
        assert kind == other == "ValueError" and message == same and "ranks disagree" in message
    assert all("test_checking.py:" in message for _, message in a[0][:5])
