"""Collectives against arithmetic on every size of group, in blocks, on backends that lack something,
and compared before they are sent."""

import itertools
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught_error, take_way
from common.collectives import start

from zero_nb.comm import messages, relays
from zero_nb.comm.agreement import agree
from zero_nb.comm.calls import Parts
from zero_nb.comm.coalescing import _PACK, coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.native import _named
from zero_nb.comm.payloads import gather_bytes
from zero_nb.comm.recording import record
from zero_nb.comm.subgroups import clone

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def values(group_rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size * 5) % 7 + group_rank + 1).to(
        dtype
    )  # small whole numbers: sums are exact in every dtype


def every_collective(ranks=None):
    """Compare all collectives with what arithmetic says; return what went wrong."""
    process_group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks:
        return []
    g, wrong = Group(process_group), []
    for dtype in DTYPES:
        everyone = [values(r, g.size, dtype) for r in range(g.size)]
        mine, total = everyone[g.group_rank], torch.stack(everyone).sum(0).to(dtype)
        for async_op in (False, True):
            reduced, sent, scattered, gathered = (
                mine.clone(),
                mine.clone(),
                mine.clone(),
                mine.clone(),
            )
            source = g.size - 1
            works = [
                g.all_reduce(reduced, async_op=async_op),
                g.broadcast(sent, source, async_op=async_op),
            ]
            works += [
                g.reduce_scatter(scattered, async_op=async_op),
                g.all_gather(gathered, async_op=async_op),
            ]
            for work in works:
                work.wait()
            parts = torch.cat([e.chunk(g.size)[r] for r, e in enumerate(everyone)])
            part = slice(5 * g.group_rank, 5 * g.group_rank + 5)
            good = [
                reduced.equal(total),
                sent.equal(everyone[source]),
                scattered[part].equal(total[part]),
                gathered.equal(parts),
            ]
            if not all(good):
                wrong.append((dtype, async_op, good))
    return wrong


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(size):
    assert run(size, every_collective) == [[]] * size


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("ranks", [[2, 3], [3, 1], [1], [3, 0, 2]])
def test_collectives_of_a_subgroup(ranks):
    assert run(4, every_collective, ranks) == [[]] * 4


@pytest.mark.usefixtures("way")
def test_two_groups_at_once():
    def both():
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine, world = Group(pairs[dist.get_rank() % 2]), Group()
        a, b = torch.full((4,), float(dist.get_rank())), torch.full((8,), float(dist.get_rank()))
        works = [mine.all_gather(a, async_op=True), world.all_gather(b, async_op=True)]
        for work in reversed(works):
            work.wait()
        return a.tolist(), b.tolist()

    for rank, (a, b) in enumerate(run(4, both)):
        assert a == [rank % 2] * 2 + [rank % 2 + 2] * 2 and b == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.usefixtures("way")
def test_many_in_flight_and_repeated_waits():
    def many():
        g = Group()
        flats = [torch.full((6,), float(g.group_rank + i)) for i in range(50)]
        works = [
            g.reduce_scatter(f, async_op=True) if i % 2 else g.all_gather(f, async_op=True)
            for i, f in enumerate(flats)
        ]
        for work in works[::-1] + works:
            work.wait()
        return all(
            (
                f.tolist() == [i, i, i + 1, i + 1, i + 2, i + 2]
                if i % 2 == 0
                else f.chunk(3)[g.group_rank].tolist() == [3 * i + 3] * 2
            )
            for i, f in enumerate(flats)
        )

    assert run(3, many) == [True] * 3


def test_empty_tensors_move_nothing():
    def empty():
        for call in (Group().all_reduce, Group().reduce_scatter, Group().all_gather):
            call(torch.empty(0))
        return True

    assert run(2, empty) == [True, True]


@pytest.mark.parametrize("to", [0, 1, 2])
def test_gather_bytes(to):
    def gather():
        g = Group()
        return [
            bytes(part)
            for part in gather_bytes(
                g, bytearray(bytes([g.group_rank]) * (g.group_rank * 100_000)), to
            )
        ]

    got = run(3, gather)
    assert got[to] == [b"", b"\1" * 100_000, b"\2" * 200_000]
    assert all(got[rank] == [] for rank in range(3) if rank != to)


def test_bad_tensors_are_refused_before_anything_is_sent():
    def refused():
        g = Group()
        bad = [
            (g.all_reduce, torch.zeros(4, 4).to_sparse()),
            (g.all_gather, torch.zeros(5)),
            (g.reduce_scatter, torch.zeros(2, 2)),
            (g.all_reduce, torch.zeros(3, device="meta")),
            (g.all_reduce, torch.ones(1)),
        ]  # the last one is good: the group is usable afterwards
        return [caught_error(lambda call=call, tensor=tensor: call(tensor)) for call, tensor in bad]

    for errors in run(2, refused):
        assert [m and m[0] for m in errors] == ["ValueError"] * 4 + [None]
        said = ["dense tensors", "2 equal parts", "tensor of 2 parts", "no backend"]
        for (_, message), words in zip(errors[:4], said, strict=True):
            assert words in message


def test_a_stranger_to_the_group_is_told_so():
    def stranger():
        pair = dist.new_group([1, 2])
        return caught_error(lambda: Group(pair))

    first, *others = run(3, stranger)
    assert (
        first[0] == "ValueError"
        and "global rank 0 is not a member" in first[1]
        and others == [None, None]
    )


MOVED = [
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int16,
    torch.bfloat16,
    torch.float64,
]


def everything(size: int, dtype: torch.dtype, async_op: bool) -> list[str]:
    """Compare every collective of a new group on parts of unequal size with what arithmetic says;
    return the kinds that were wrong."""
    g, wrong = Group(dist.new_group()), []
    r, n = g.group_rank, g.size
    sizes = [size * (1 + rank % 3) if rank != 1 else 0 for rank in range(n)]
    everyone = [((torch.arange(sum(sizes)) + rank) % 5).to(dtype) for rank in range(n)]
    bounds = [sum(sizes[:rank]) for rank in range(n + 1)]
    part = slice(bounds[r], bounds[r + 1])
    parts = torch.cat([everyone[rank][bounds[rank] : bounds[rank + 1]] for rank in range(n)])

    def same(kind: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not got.contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8)):
            wrong.append(kind)

    def on_mine(call, *args, **kwargs):
        mine = everyone[r].clone()
        call(mine, *args, async_op=async_op, **kwargs).wait()
        return mine

    same("broadcast", on_mine(g.broadcast, n - 1), everyone[-1])
    same("all_gather", on_mine(g.all_gather, sizes), parts)
    gathered = on_mine(g.gather, n - 1, sizes)
    same("gather", gathered, parts if r == n - 1 else everyone[r])
    same("scatter", on_mine(g.scatter, 0, sizes)[part], everyone[0][part])
    if dtype not in (
        torch.uint16,
        torch.float8_e4m3fn,
        torch.bool,
    ):  # torch has no addition for these on a CPU
        total = torch.stack(everyone).sum(0).to(dtype)
        same("all_reduce", on_mine(g.all_reduce), total)
        same("reduce_scatter", on_mine(g.reduce_scatter, sizes)[part], total[part])
    output = torch.zeros(n * sizes[r], dtype=dtype)
    g.all_to_all(output, everyone[r], [sizes[r]] * n, sizes, async_op=async_op).wait()
    same("all_to_all", output, torch.cat([everyone[rank][part] for rank in range(n)]))
    return wrong


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_unequal_parts_of_any_dtype(size):
    cases = list(itertools.product(MOVED, (False, True)))
    for found in run(size, lambda: {case: everything(7, *case) for case in cases}):
        assert found == {case: [] for case in cases}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_many_chunks(size):
    assert run(size, everything, 400_000, torch.float64, True) == [[]] * size


@pytest.fixture
def two_hosts(monkeypatch):
    """Let ranks believe that every two of them live on a machine of their own."""
    take_way(monkeypatch, "hosts")


def receivers(group, kind="reduce_scatter", **options):
    """Tell to which ranks this rank sends a part, once for each part."""
    isend, found = dist.isend, []

    def spy(tensor, dst, *args):
        found.append(dst)
        return isend(tensor, dst, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", spy)
        getattr(group, kind)(torch.ones(1000 * group.size), **options)
    return sorted(found)


def passed(size):
    """Reduce and gather by relay, several in flight at once; give what went wrong."""
    g = Group()
    wrong = []
    for dtype, n in itertools.product([*DTYPES, torch.complex64], (7, 1000)):
        sizes = [n * (r + 1) % 1001 for r in range(size)]
        own = slice(sum(sizes[: g.group_rank]), sum(sizes[: g.group_rank + 1]))
        everyone = [(torch.arange(sum(sizes)) % 5 + r).to(dtype) for r in range(size)]
        total = torch.stack(everyone).sum(0).to(dtype)
        tensors = [everyone[g.group_rank].clone() for _ in range(3)]
        options = {"sizes": sizes, "async_op": True, "relay": True}
        works = [g.reduce_scatter(x, **options) for x in tensors]
        for work in works:
            work.wait()
        if not all(x[own].equal(total[own]) for x in tensors):
            wrong.append(("reduce_scatter", dtype, n))
        works = [g.all_gather(x, **options) for x in tensors]
        for work in works:
            work.wait()
        if not all(x.equal(total) for x in tensors):
            wrong.append(("all_gather", dtype, n))
    return wrong


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("ahead", [32 << 20, 4096], ids=["whole", "in turns"])
def test_ranks_on_several_hosts_pass_parts_on(size, ahead, monkeypatch):
    monkeypatch.setattr(relays, "_AHEAD", ahead)
    assert run(size, passed, size) == [[]] * size


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_part_crosses_once_between_hosts(kind):
    """Ranks 0 and 1 live apart from 2, 3 and 4, which share a host for once."""

    def crossings():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relays, "_host", lambda: "ab"[dist.get_rank() > 1] * 8)
            g = Group()
            sent = receivers(g, kind, relay=True)
            straight = receivers(g, kind)
        hosts = [rank > 1 for rank in range(5)]
        away = lambda found: sum(hosts[dst] != hosts[g.group_rank] for dst in found)
        return away(sent), away(straight)

    found = run(5, crossings)
    # three parts leave the first host, two the second one (gathered: two and three)
    here, there = (3, 2) if kind == "reduce_scatter" else (2, 3)
    assert [sum(n for n, _ in ranks) for ranks in (found[:2], found[2:])] == [here, there]
    assert [sum(n for _, n in ranks) for ranks in (found[:2], found[2:])] == [6, 6]


@pytest.mark.usefixtures("two_hosts")
def test_what_is_passed_on_leaves_when_the_next_collective_starts():
    """Rank 0 waits for a part that rank 1 has to pass on; rank 1 is in another collective by then."""

    def goes_on():
        g = clone(Group(), timeout=timedelta(seconds=20))
        first, second = torch.ones(4 * 1000), torch.ones(4)
        g.all_reduce(torch.ones(3))  # known, so it is not compared
        work = g.reduce_scatter(first, async_op=True, relay=True)
        other = g.all_reduce(torch.ones(3), async_op=True)
        if g.group_rank == 0:
            work.wait()
            dist.barrier()
        else:
            dist.barrier()
            work.wait()
        other.wait()
        g.reduce_scatter(second)
        return first.chunk(4)[g.group_rank].eq(4).all().item()

    assert run(4, goes_on) == [True] * 4


@pytest.mark.usefixtures("two_hosts")
def test_a_relay_that_fails_says_so_when_it_is_waited_for():
    """Rank 3 never comes; the others go on to the next collective first."""

    def fails():
        g = clone(Group(), timeout=timedelta(seconds=3))
        x = torch.ones(4000)
        g.reduce_scatter(torch.ones(4000), relay=True)
        g.all_reduce(torch.ones(3))
        if g.group_rank == 3:
            dist.barrier()
            return None
        work = g.reduce_scatter(x, async_op=True, relay=True)
        said = [caught_error(lambda: g.all_reduce(torch.ones(3))), caught_error(work.wait)]
        dist.barrier()
        return said

    for said in run(4, fails)[:3]:
        assert [kind for kind, _ in said] == ["RuntimeError"] * 2
        assert "reduce_scatter of 4000 float32 failed" in said[1][1]


def test_ranks_that_share_a_host_or_have_one_each_send_parts_straight(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    others = [[1, 2], [0, 2], [0, 1]]
    for host in (lambda: "00000000", lambda: f"{dist.get_rank():08x}"):
        monkeypatch.setattr(relays, "_host", host)
        assert run(3, lambda: receivers(Group())) == others


def sums(sizes, dtype):
    """Reduce tensors of random numbers, whose sum depends on the order of the additions."""
    g = Group(dist.new_group())
    found = []
    for n in sizes:
        x = torch.randn(n, generator=torch.Generator().manual_seed(g.group_rank)).to(dtype)
        parts = Parts(g.size, n, -(-n // g.size))
        g.reduce_scatter(x, parts)
        found.append(x[slice(*parts.part(g.group_rank))])
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_messages_add_up_to_the_bits_of_shared_memory(size, dtype, monkeypatch):
    sizes = (5, 1000, 100_003)
    monkeypatch.setenv("ZERO_NB_MEMORY", "1")
    shared = run(size, sums, sizes, dtype)
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    monkeypatch.setattr(relays, "_AHEAD", 1 << 16)  # so that the last one takes turns
    for ours, theirs in zip(run(size, sums, sizes, dtype), shared, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_rank_that_does_not_wait_holds_nobody_up(kind, monkeypatch):
    """What has started goes on: rank 1 waits when all others have their result."""
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")

    def late():
        g = clone(Group(), timeout=timedelta(seconds=20))
        x = torch.full((3_000_000,), g.group_rank + 1.0)
        work = getattr(g, kind)(x, async_op=True)
        if g.group_rank != 1:
            work.wait()
            dist.barrier()
        else:
            dist.barrier()
            work.wait()
        wanted = 6.0 if kind == "reduce_scatter" else g.group_rank + 1.0
        return x.chunk(g.size)[g.group_rank].eq(wanted).all().item()

    assert run(3, late) == [True] * 3


@pytest.mark.usefixtures("way")
def test_what_is_not_passed_on_is_not_waited_for_by_the_next_collective():
    """Ranks of one host may relay, and need not: rank 0 starts two before rank 1 starts the first."""

    def ahead():
        g = clone(Group(), timeout=timedelta(seconds=20))
        for relay in (True, False):
            g.reduce_scatter(torch.ones(20), relay=relay)  # known, so they are not compared
        x, y = torch.ones(20), torch.ones(20)
        if g.group_rank == 1:
            dist.barrier()
        works = [g.reduce_scatter(t, async_op=True, relay=True) for t in (x, y)]
        if g.group_rank == 0:
            dist.barrier()
        for work in works:
            work.wait()
        return [t.chunk(2)[g.group_rank].eq(2).all().item() for t in (x, y)]

    assert run(2, ahead) == [[True, True]] * 2


def test_scratch_memory_is_used_again_and_bounded(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    monkeypatch.setattr(relays, "_AHEAD", 1 << 20)

    def held():
        g = Group(dist.new_group())
        lengths = lambda: sorted(map(len, g._wire.scratch[0].free))
        flats = [torch.ones(n) for n in (1_000, 300_000, 2_000_000, 5_000, 3_000_000)]
        found = []
        for _ in range(2):
            for flat in flats:
                g.reduce_scatter(flat)
                found.append(lengths())
        works = [g.reduce_scatter(flat, async_op=True) for flat in flats[:2]]
        under_way = lengths()
        for work in works:
            work.wait()
        return found, under_way, lengths()

    for found, under_way, after in run(2, held):
        assert max(map(len, found)) == 2 and max(itertools.chain(*found)) <= 1 << 20
        assert found[4:] == [found[4]] * 6  # the second time nothing is allocated
        assert (under_way, len(after)) == ([], 2)


def test_little_scratch_memory_is_kept_when_nothing_is_received(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    monkeypatch.setattr(messages, "_KEPT", 1 << 20)

    def held():
        g = Group(dist.new_group())
        lengths = lambda: sorted(map(len, g._wire.scratch[0].free))
        works = [g.reduce_scatter(torch.ones(n), async_op=True) for n in (200_000, 400_000, 10)]
        works[1].wait()
        works[0].wait()
        before = lengths()
        works[2].wait()
        return before, lengths()

    assert run(2, held) == [([400_000, 800_000], [20, 400_000])] * 2


@pytest.mark.usefixtures("way")
def test_a_tensor_with_gaps_is_handled():
    def gaps():
        g = Group()
        whole = torch.full((6, 4), float(g.group_rank + 1))
        g.all_reduce(whole[:, 1])
        g.broadcast(whole.t()[2:3], group_rank=1, async_op=True).wait()
        flat = torch.full((8,), float(g.group_rank))[::2]
        g.all_gather(flat)
        return whole[0].tolist(), flat.tolist()

    assert run(2, gaps) == [
        ([1.0, 3.0, 2.0, 1.0], [0.0, 0.0, 1.0, 1.0]),
        ([2.0, 3.0, 2.0, 2.0], [0.0, 0.0, 1.0, 1.0]),
    ]


def test_messages_of_a_pair_keep_their_order():
    def order():
        g, got = Group(), [torch.zeros(2) for _ in range(20)]

        def send(i):
            return g.send(torch.full((2,), float(i)), 1, async_op=True)

        works = [
            send(i) if g.group_rank == 0 else g.recv(t, 0, async_op=True) for i, t in enumerate(got)
        ]
        flat = torch.full((4,), float(g.group_rank))
        g.all_gather(flat)  # a collective between the two is not confused with them
        for work in reversed(works):
            work.wait()
        return [t[0].item() for t in got], flat.tolist()

    (_, first), (received, second) = run(2, order)
    assert received == [float(i) for i in range(20)] and first == second == [0.0, 0.0, 1.0, 1.0]


# ---- coalescing ----


def coalesced(seed: int, async_ops: bool) -> list[bool]:
    """Run a random block on a new group and the same calls one by one; compare."""
    g, dice = Group(dist.new_group()), random.Random(seed)
    plan = []
    for _ in range(dice.randint(1, 30)):
        kind, dtype = (
            dice.choice(["all_reduce", "broadcast", "reduce_scatter", "all_gather"]),
            dice.choice([torch.float32, torch.bfloat16, torch.int64]),
        )
        sizes = (
            [dice.choice([0, 1, 5, 300]) for _ in range(g.size)]
            if dice.random() < 0.9
            else [_PACK // 4] * g.size
        )
        plan.append((kind, dtype, sizes, dice.randrange(g.size)))
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


def test_blocks_that_cannot_be():
    def bad():
        g, x = Group(), torch.ones(8)
        other = clone(g)

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

        errors = [caught_error(f) for f in (unsupported, overlapping, nested, early, gaps)]
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

        forget()
        return caught_error(lambda: g.all_reduce(torch.ones(1)))

    for kind, message in run(2, forgets):
        assert kind == "RuntimeError" and "never waited for" in message
        assert ("1 x all_reduce" if coalesce else "reduce_scatter of 4 float32") in message and (
            "test_collectives.py:" in message
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
        assert message.count("test_collectives.py:") == (1 if kind == "coalescing" else 2)


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
            turns.append(g._wire.turn)

        calls()
        calls()
        Group().all_reduce(torch.ones(3))
        turns.append(g._wire.turn)
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
        return g._wire.turn

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
        f"rank 1 was at '{other} of 12 float32 at test_collectives.py:" in first[1]
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
        calls = [
            lambda: g.all_reduce(torch.zeros(4 + first)),
            lambda: g.all_reduce(torch.zeros(4, dtype=kind)),
            lambda: g.broadcast(torch.zeros(4), int(first)),
            lambda: g.all_gather(torch.zeros(4), [3, 1] if first else [1, 3]),
            lambda: (g.all_gather if first else g.reduce_scatter)(torch.zeros(4)),
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
    assert all("test_collectives.py:" in message for _, message in a[0][:5])


# ---- other backends ----


class Few(dist.ProcessGroup if dist.is_available() else object):
    """A backend with nothing but broadcast and all-reduce, made of gloo's."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self):
        return "few"

    def allreduce(self, *args):
        return self.inner.allreduce(*args)

    def broadcast(self, *args):
        return self.inner.broadcast(*args)


def with_backend(make):
    """Give the group of a backend that `make` makes of a gloo group."""
    inner = dist.new_group()
    dist.Backend.register_backend("few", lambda *args: make(inner), devices=["cpu"])
    return Group(dist.new_group(backend="few"))


def test_a_backend_with_broadcast_and_all_reduce_only():
    def few():
        g = with_backend(Few)
        flat, whole = torch.full((6,), float(g.group_rank)), torch.arange(7.0)
        g.all_gather(flat)
        g.reduce_scatter(whole, [1, 2, 4])
        return g.backends["cpu"], flat.tolist(), whole.split([1, 2, 4])[g.group_rank].tolist()

    got = run(3, few)
    assert {backend for backend, *_ in got} == {"few"} and all(
        flat == [0, 0, 1, 1, 2, 2] for _, flat, _ in got
    )
    assert [part for *_, part in got] == [[0.0], [3.0, 6.0], [9.0, 12.0, 15.0, 18.0]]


class Grumpy(Few):
    """Refuses the halves in words of its own."""

    calls = 0

    def refuse(self, *args):
        self.calls, _ = self.calls + 1, self.no()

    def no(self):
        raise RuntimeError("not today")

    def __getattribute__(self, name):
        if name.startswith(
            (
                "all_gather_single",
                "_allgather_base",
                "reduce_scatter_single",
                "_reduce_scatter_base",
            )
        ):
            return self.refuse
        return super().__getattribute__(name)


class Tired(Few):
    """Has the halves, and fails at the second."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = 0

    def gather(self, *args):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("this backend does not support being called twice")
        return (
            self.inner.all_gather_single(*args)
            if hasattr(self.inner, "all_gather_single")
            else self.inner._allgather_base(*args)
        )

    def all_gather_single(self, *args):
        return self.gather(*args)

    def _allgather_base(self, *args):
        return self.gather(*args)


def test_what_a_backend_refuses_is_asked_for_once():
    def refused():
        g, sums = with_backend(Grumpy), []
        for _ in range(3):
            flat = torch.full((6,), float(g.group_rank))
            g.reduce_scatter(flat)
            g.all_gather(flat)
            sums.append(flat.tolist())
        return sums, list(g._state.lacks.values())

    assert run(2, refused) == [([[1.0] * 6] * 3, [True, True])] * 2


def test_a_failure_of_what_a_backend_has_is_an_error():
    def fails():
        g = with_backend(Tired)
        return [caught_error(lambda: g.all_gather(torch.ones(4))), list(g._state.lacks.values())]

    for (kind, message), lacks in run(2, fails):
        assert (
            kind == "RuntimeError"
            and "all_gather of 4 float32 failed: this backend does not support being called twice"
            in message
            and lacks == [False]
        )


def test_both_spellings_of_torch_are_found():
    class Old:
        def reduce_scatter_tensor():
            return "old"

    class New(Old):
        def reduce_scatter_single():
            return "new"

    assert [_named(m, "reduce_scatter_single", "reduce_scatter_tensor")() for m in (Old, New)] == [
        "old",
        "new",
    ]
