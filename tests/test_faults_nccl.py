"""The stand-in for NCCL: each of its rules, seen kept and seen broken; and what the package does under them."""

import threading

import pytest
import torch
import torch.distributed as dist
from common import caught
from nccl_like import nccl_like, synchronize

from zero_nb.comm.agreement import agree
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.ending import fail
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import clone, split


def nan(x: torch.Tensor) -> bool:
    return bool(x.isnan().all())


# ---- the stand-in ----


def results_in_time():
    """Read results before and after waiting and synchronizing."""
    g = nccl_like(connect=True)
    pg, rank = g.process_group, float(dist.get_rank())
    x, y, z = (torch.full((4,), rank + i) for i in range(3))
    seen = [g.backends, type(pg).__mro__[1].__name__]
    waited = pg.allreduce([x])
    seen.append(nan(x))
    waited.wait()
    seen.append(nan(x))  # it only orders the stream
    synchronize()
    forgotten, whole = pg.allreduce([y]), torch.tensor([3])
    synchronize()
    seen += [x.tolist(), nan(y)]
    pg.allreduce([whole]).wait()
    seen.append(whole.item() == torch.iinfo(torch.int64).max)
    synchronize()  # later works of one stream end after earlier ones
    seen += [whole.item(), y.tolist(), forgotten.is_completed()]
    pg.allreduce([z])  # not waited for: the second reads the first's result, on one stream
    pg.allreduce([z]).wait()
    synchronize()
    return [*seen, z.tolist()]


def test_results_are_there_after_waiting_and_synchronizing_only():
    assert (
        run(2, results_in_time)
        == [
            [
                {"cpu": "nccl"},
                "NcclLike",
                True,
                True,
                [1.0] * 4,
                True,
                True,
                6,
                [3.0] * 4,
                True,
                [10.0] * 4,
            ]
        ]
        * 2
    )


def test_the_host_can_play_the_stream():
    def at_once():
        g = nccl_like(host_waits=True)
        x = torch.ones(4)
        g.all_reduce(x)
        work = g.all_reduce(y := torch.ones(4), async_op=True)
        early = nan(y)
        work.wait()
        return x.tolist(), early, y.tolist()

    assert run(2, at_once) == [([2.0] * 4, True, [2.0] * 4)] * 2


def test_nothing_of_a_block_runs_before_its_end():
    def block():
        g = nccl_like(connect=True)
        pg, x, y = g.process_group, torch.ones(2), torch.ones(3)
        pg._start_coalescing(torch.device("cpu"))
        inside = pg.allreduce([x])
        pg.allreduce([y])
        before = [
            len(pg.launches),
            "waited inside the block" in str(caught(inside.wait)),
            "no order in a block" in str(caught(lambda: pg.allreduce([x]))),
        ]
        pg._end_coalescing(torch.device("cpu")).wait()
        synchronize()
        return [*before, pg.launches, x.tolist(), y.tolist()]

    assert (
        run(2, block) == [[0, True, True, [["allreduce", "allreduce"]], [2.0] * 2, [2.0] * 3]] * 2
    )


def block_in_a_block(kind):
    """Start an uneven collective, which is a block of its own, inside a block; what is there after waiting for
    both."""
    g = nccl_like(connect=True)
    pg, rank = g.process_group, dist.get_rank()

    def parts():
        return [torch.full((r + 1,), float(rank + 1)) for r in range(2)]

    def uneven(p):
        if kind == "all_gather":
            return dist.all_gather(p, p[rank].clone(), group=pg, async_op=True)
        return dist.reduce_scatter(p[rank], p, group=pg, async_op=True)

    alone = parts()
    uneven(alone).wait()
    synchronize()
    inside, before, after = parts(), torch.ones(1), torch.ones(1)
    pg._start_coalescing(torch.device("cpu"))
    pg.allreduce([before])
    work = uneven(inside)
    late = pg.allreduce([after])
    ended = pg._end_coalescing(torch.device("cpu"))
    work.wait()
    late.wait()
    synchronize()
    lost = [
        ended is None,
        nan(inside[1 - rank] if kind == "all_gather" else inside[rank]),
        nan(before),
        nan(after),
    ]
    pg.allreduce([torch.ones(1)]).wait()  # a later event finds all of them done
    synchronize()
    mine = slice(None) if kind == "all_gather" else slice(rank, rank + 1)
    return (
        lost,
        [p.tolist() for p in alone[mine]] == [p.tolist() for p in inside[mine]],
        after.item(),
        len(pg.launches),
    )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_an_inner_block_makes_the_outer_one_wait_for_nothing(kind):
    assert run(2, block_in_a_block, kind) == [([True] * 4, True, 2.0, 3)] * 2


def test_the_first_use_is_everybodys():
    def first():
        rank, errors = dist.get_rank(), []
        g = nccl_like(first_use_limit=1)

        def message(group, *ops):  # past the package, which refuses it as the first use
            for work in dist.batch_isend_irecv(
                [dist.P2POp(op, x, peer, group.process_group) for op, x, peer in ops]
            ):
                work.wait()

        def pass_on():
            message(g, (dist.irecv if rank else dist.isend, torch.ones(1), 1 - rank))

        if rank < 2:
            errors.append(caught(pass_on))
        dist.barrier()
        if rank < 2:
            errors.append(caught(pass_on))
        dist.barrier()
        errors.append(
            caught(lambda: g.all_reduce(torch.ones(1)))
        )  # rank 2's first use, which the others began with messages
        ring = nccl_like(host_waits=True)
        got = torch.zeros(1)
        message(
            ring,
            (dist.isend, torch.ones(1) * rank, (rank + 1) % 3),
            (dist.irecv, got, (rank - 1) % 3),
        )
        return errors, got.item()

    found = run(3, first)
    for errors, _ in found[:2]:
        assert all("NCCL stand-in" in e and "ranks [2] do not" in e for e in errors[:2]), errors
    assert all(
        "NCCL stand-in: the first use of a communicator differs" in errors[-1]
        for errors, _ in found
    ), found
    assert [got for _, got in found] == [2.0, 0.0, 1.0]


def test_a_single_message_has_a_communicator_of_two():
    def pair():
        rank, g = dist.get_rank(), nccl_like(first_use_limit=1)
        x = torch.full((2,), float(rank))
        if rank == 0:
            dist.send(x, 2, group=g.process_group)
        if rank == 2:
            dist.recv(x, 0, group=g.process_group)
        synchronize()
        return x.tolist(), g.process_group.launches

    assert run(3, pair) == [([0.0] * 2, []), ([1.0] * 2, []), ([0.0] * 2, [])]


@pytest.mark.parametrize("end", ["raise", "destroy"])
def test_errors_do_not_travel(end):
    def leave():
        g = nccl_like(connect=True)
        if dist.get_rank() == 1:
            if end == "destroy":
                dist.destroy_process_group(g.process_group)
            return None
        x, pg = torch.ones(2), g.process_group
        work = pg.allreduce([x])
        work.wait()  # raises nothing
        waits = threading.Thread(target=synchronize, daemon=True)
        waits.start()
        waits.join(1)
        stuck = waits.is_alive()
        pg.abort()
        waits.join(10)
        synchronize()
        return stuck, waits.is_alive(), nan(x), caught(lambda: pg.allreduce([x]))

    (stuck, alive, lost, error), _ = run(2, leave)
    assert stuck and not alive and lost and "NCCL communicator was aborted on rank 0" in error


def test_groups_made_of_it_and_on_it_are_like_it():
    def made():
        g = nccl_like(host_waits=True)
        twin, pair, own = clone(g), split(g, [[2, 0], [1]]), Group(g.process_group)
        x = torch.full((2,), float(dist.get_rank()))
        if pair is not None and pair.size == 2:
            pair.all_reduce(x)
        y = torch.ones(1)
        twin.all_reduce(y)
        return twin.backends, own.backends, pair.backends["cpu"], x.tolist(), y.item()

    nccl = {"cpu": "nccl"}
    assert run(3, made) == [(nccl, nccl, "nccl", x, 3.0) for x in ([2.0] * 2, [1.0] * 2, [2.0] * 2)]


def test_another_communicator_must_be_waited_for():
    def both():
        one = nccl_like(connect=True)
        two, x = clone(one), torch.ones(2)
        two.process_group._connect("collectives")
        work = one.process_group.allreduce([x])
        error = caught(lambda: two.process_group.allreduce([x]))
        work.wait()
        two.process_group.allreduce([x]).wait()
        synchronize()
        return error, x.tolist()

    for error, x in run(2, both):
        assert (
            "of another communicator writes, and nobody waited for that" in error and x == [4.0] * 2
        )


# ---- the package over it ----


def all_kinds(g, dtype, uneven, async_op):
    """Run each kind of collective on parts of equal and unequal size; the results of this rank."""
    n, me = g.size, g.group_rank
    sizes = [r + 1 for r in range(n)] if uneven else [2] * n

    def full():
        return (torch.arange(sum(sizes)) * (me + 1) % 13).to(dtype)

    def mine(flat):
        return flat.split(sizes)[me]

    a, b, c, d, e, f = (full() for _ in range(6))
    out, right, left = (
        torch.zeros(n * sizes[me], dtype=dtype),
        full()[:1],
        torch.zeros(1, dtype=dtype),
    )
    works = [
        g.all_reduce(a, async_op=async_op),
        g.broadcast(b, n - 1, async_op=async_op),
        g.reduce_scatter(c, sizes, async_op=async_op),
        g.all_gather(d, sizes, async_op=async_op),
        g.gather(e, n - 1, sizes, async_op=async_op),
        g.scatter(f, 0, sizes, async_op=async_op),
        g.all_to_all(out, full(), [sizes[me]] * n, sizes, async_op=async_op),
    ]
    if n > 1:
        works.append(g.exchange([(right, (me + 1) % n)], [(left, (me - 1) % n)], async_op=async_op))
    for work in works:
        work.wait()
    synchronize()
    return [
        x.tolist() for x in (a, b, mine(c), d, e if me == n - 1 else mine(e), mine(f), out, left)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_collectives_equal_what_gloo_does(size):
    def both():
        like, padded, plain = (
            nccl_like(),
            nccl_like(host_waits=True),
            Group(),
        )  # unequal parts are copied after they came, here by the host
        cases = [
            (dtype, uneven, async_op)
            for dtype in (torch.float32, torch.int64)
            for uneven in (False, True)
            for async_op in (False, True)
        ]
        return [
            case
            for case in cases
            if all_kinds(padded if case[1] else like, *case) != all_kinds(plain, *case)
        ]

    assert run(size, both) == [[]] * size


def moved(g, dtype, uneven):
    """Move tensors of a dtype that NCCL may not know, and add complex ones up; the results of this rank."""
    n, me = g.size, g.group_rank
    sizes = [r + 1 for r in range(n)] if uneven else [2] * n

    def full():
        return (torch.arange(sum(sizes)) * (me + 1) % 13).to(dtype)

    a, b, c, d, e, f, left = (
        full(),
        full(),
        full(),
        full(),
        full(),
        full(),
        torch.zeros(1, dtype=dtype),
    )
    works = [
        g.broadcast(a, n - 1),
        g.all_gather(b, sizes),
        g.gather(c, n - 1, sizes),
        g.exchange([(full()[:1], (me + 1) % n)], [(left, (me - 1) % n)]),
    ]
    with coalescing_manager(g) as block:
        g.all_gather(d, sizes)
    if dtype.is_complex:
        works += [g.all_reduce(e), g.reduce_scatter(f, sizes)]
    for work in (*works, block):
        work.wait()
    out = (a, b, c if me == n - 1 else c.split(sizes)[me], d, e, f.split(sizes)[me], left)
    return [x.view(torch.uint8).tolist() for x in out]


@pytest.mark.parametrize("uneven", [False, True])
def test_dtypes_that_nccl_does_not_know_are_moved_as_bytes(uneven):
    def both():
        like, plain = nccl_like(host_waits=True), Group()
        dtypes = [torch.int16, torch.complex64, torch.float8_e5m2, torch.bool]
        return [
            dtype for dtype in dtypes if moved(like, dtype, uneven) != moved(plain, dtype, uneven)
        ]

    assert run(3, both) == [[]] * 3


def test_a_call_that_nccl_refuses_does_not_leave_a_block_open():
    def refused():
        g, x, y = nccl_like(host_waits=True), torch.ones(2), torch.ones(2)

        def block():
            with coalescing_manager(g):
                g.all_reduce(x)
                g.all_reduce(torch.ones(2, dtype=torch.int16))

        said = caught(block)
        g.all_reduce(y)
        return said, y.tolist()

    for said, y in run(2, refused, timeout=30):
        assert said.startswith("TypeError: Input tensor data type") and y == [2.0, 2.0]


def test_a_block_is_one_launch_for_each_kind():
    def block():
        like, rank = nccl_like(), float(dist.get_rank())
        sums, parts, halves = ([torch.full((4,), rank + i) for i in range(3)] for _ in range(3))
        for async_ops in (False, True):
            with coalescing_manager(like, async_ops=async_ops) as cm:
                for x in sums:
                    like.all_reduce(x)
                for x in parts:
                    like.all_gather(x)
                for x in halves:
                    like.reduce_scatter(x)
            cm.wait()
            synchronize()
        launches = list(like.process_group.launches)
        with pytest.raises(ZeroDivisionError), coalescing_manager(like):
            like.all_reduce(sums[0]).wait(1 / 0)
        return (
            [len(b) for b in launches],
            [len(set(b)) for b in launches],
            sums[0].tolist(),
            parts[0].tolist(),
        )

    for lengths, kinds, sums, parts in run(2, block):
        assert (
            lengths == [3] * 6
            and kinds == [1] * 6
            and sums == [2.0] * 4
            and parts == [0.0, 0.0, 1.0, 1.0]
        )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_to_fail_in_a_group_that_torch_has_destroyed_raises_nothing(backend):
    def fail_late():
        g = nccl_like(connect=True) if backend == "nccl" else Group(dist.new_group())
        agree(g, "the model")
        dist.destroy_process_group(g.process_group)
        return caught(lambda: fail(g, ValueError("no more data"))), g._ending.ended

    assert run(2, fail_late) == [(None, "aborted")] * 2


def test_the_stand_in_stays_on_the_ranks_of_run():
    with pytest.raises(RuntimeError, match="on the ranks of run"):
        nccl_like()
