"""Collectives against arithmetic on every size of group, in blocks, on backends that lack something,"""

import itertools
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import caught, caught_error, take_way

from zero_nb.comm import messages, relays
from zero_nb.comm.calls import Parts
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.payloads import gather_bytes
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
        and "Global rank 0 is not part of group" in first[1]
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


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_unequal_parts_of_any_dtype(size):
    cases = list(itertools.product(MOVED, (False, True)))
    for found in run(size, lambda: {case: everything(7, *case) for case in cases}):
        assert found == {case: [] for case in cases}


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_many_chunks(size):
    assert run(size, everything, 400_000, torch.float64, True) == [[]] * size


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("/tmp/ipykernel_71/4142857171.py", "cell"),
        ("/tmp/ipython-input-829-3.py", "cell"),
        ("<ipython-input-1-54ed1df0>", "cell"),
        ("<In [3]>", "cell"),
        ("/home/ada/train.py", "train.py"),
    ],
)
def test_an_error_names_the_line_of_a_file_or_of_a_cell(name, place):
    space = {"torch": torch}
    source = "def differs(group):\n    group.all_reduce(torch.ones(4 + group.group_rank))"
    exec(compile(source, name, "exec"), space)
    for _, said in run(2, lambda: caught_error(lambda: space["differs"](Group()))):
        assert f"all_reduce of 5 float32 at {place}:2'" in said


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


def padded(parts, n):
    """Reduce a tensor of more elements than all parts have together."""
    return caught_error(lambda: Group().reduce_scatter(torch.ones(n), parts))


def test_only_parts_by_a_rule_may_be_padded():
    """A backend that moves equal parts would take others from the wrong place."""
    assert run(2, padded, Parts(2, 3, 2), 4) == [None] * 2
    for kind, words in run(2, padded, Parts.of([1, 2]), 4):
        assert kind == "ValueError" and "add up to the tensor's 4 elements" in words


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
        lengths = lambda: sorted(map(len, g._traffic.scratch.free))
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
        lengths = lambda: sorted(map(len, g._traffic.scratch.free))
        works = [g.reduce_scatter(torch.ones(n), async_op=True) for n in (200_000, 400_000, 10)]
        works[1].wait()
        works[0].wait()
        before = lengths()
        works[2].wait()
        return before, lengths()

    assert run(2, held) == [([400_000, 800_000], [20, 400_000])] * 2


def refuse_to_add(*_):
    raise RuntimeError("no sum")


@pytest.mark.parametrize("relay", [False, True])
def test_sums_that_fail_on_their_rank_lose_no_message_and_keep_no_memory(monkeypatch, relay):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    monkeypatch.setattr(messages, "_KEPT", 1 << 20)
    monkeypatch.setattr(relays, "_hosts", lambda group, device: ("a", "a", "b", "b"))

    def fails():
        g = Group(dist.new_group())
        for _ in range(50):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no sum"):
                patch.setattr(messages._Messages, "add_up", refuse_to_add)
                g.reduce_scatter(torch.ones(400_000), relay=relay)
        ours = torch.ones(400_000)
        g.reduce_scatter(ours, relay=relay)
        mine = ours.chunk(4)[g.group_rank]
        return mine.unique().tolist(), sum(map(len, g._traffic.scratch.free)) <= 1 << 20

    assert run(4, fails, timeout=60) == [([4.0], True)] * 4


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


@pytest.mark.usefixtures("way")
def test_a_dtype_that_cannot_be_added_is_refused_before_anything_moves():
    def sums():
        g = clone(Group())
        dtypes = (torch.float32, torch.uint16, torch.float8_e5m2, torch.bool, torch.int16)
        cases = itertools.product(dtypes, (g.all_reduce, g.reduce_scatter))
        said = [caught(partial(call, torch.ones(4).to(dtype))) for dtype, call in cases]
        with pytest.raises(ValueError, match="no uint16"), coalescing_manager(g):
            g.reduce_scatter(torch.ones(4))
            g.reduce_scatter(torch.ones(4).to(torch.uint16))
        x = torch.ones(4)
        g.reduce_scatter(x)
        return said, x[2 * g.group_rank].item()

    for said, total in run(2, sums):
        refused = [text for text in said if text]
        assert len(refused) == 4 and said[2:6] == refused and total == 2
        assert refused[1].startswith(
            "ValueError: reduce_scatter of 4 uint16 adds numbers, and torch adds no uint16 on cpu; cast"
        )


@pytest.mark.usefixtures("way")
def test_numbers_that_are_conjugated_when_they_are_read():
    def moved():
        g = Group()
        r = g.group_rank
        made = [torch.complex(torch.ones(4), torch.full((4,), 1.0 + r)).conj() for _ in range(4)]
        g.broadcast(made[0], 1)
        g.all_reduce(made[1])
        g.reduce_scatter(made[2])
        g.all_gather(made[3])
        said = caught_error(lambda: in_a_block(g, made[0]))
        return [x.resolve_conj().tolist() for x in made], r, said

    def in_a_block(g, x):
        with coalescing_manager(g):
            g.broadcast(x, 0)

    for (sent, total, part, gathered), r, said in run(2, moved):
        assert sent == [1 - 2j] * 4 and total == [2 - 3j] * 4
        assert part[2 * r : 2 * r + 2] == [2 - 3j] * 2
        assert gathered == [1 - 1j] * 2 + [1 - 2j] * 2
        assert said[0] == "ValueError" and "resolve_conj()" in said[1]
