"""Objects between ranks: any object, any group, any error on all ranks; and nothing but plain
values where that was asked."""

import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from common import caught_error

from zero_nb.comm import objects
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list, gather_object, scatter_object_list
from zero_nb.comm.payloads import exchange_bytes, gather_bytes
from zero_nb.comm.subgroups import split

PLAIN = [
    None,
    True,
    3,
    2.5,
    "text",
    b"bytes",
    [1, [2]],
    (1, "a"),
    {"k": {1: 2}},
    {1, 2},
    OrderedDict(a=1),
    torch.Size([2, 3]),
    torch.float16,
    1 << 70,
]


class Odd:
    """Can be sent, if anything may be."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Unreadable:
    """Can be pickled, but not read back."""

    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_plain_values_arrive(size, weights_only):
    def send():
        g = Group()
        objects = list(PLAIN) if g.group_rank == size - 1 else [None] * len(PLAIN)
        broadcast_object_list(objects, src=size - 1, weights_only=weights_only)
        every, mine = [None] * size if g.group_rank == 0 else None, [None]
        gather_object((g.group_rank, PLAIN), every, weights_only=weights_only)
        scatter_object_list(
            mine,
            [PLAIN[rank:] for rank in range(size)] if g.group_rank == 0 else None,
            weights_only=weights_only,
        )
        return (
            objects == PLAIN,
            every is None or every == [(rank, PLAIN) for rank in range(size)],
            mine[0] == PLAIN[g.group_rank :],
        )

    assert run(size, send) == [(True, True, True)] * size


def test_any_object_as_torchs_does():
    def send():
        objects = [Odd(1), [Odd(2)]] if dist.get_rank() == 0 else [None, None]
        theirs = list(objects)
        broadcast_object_list(objects)
        dist.broadcast_object_list(theirs)
        return objects == theirs == [Odd(1), [Odd(2)]]

    assert run(3, send) == [True] * 3


def test_tensors_keep_what_they_share_and_arrive_where_asked():
    def send():
        base = torch.arange(6.0)
        value = {
            "whole": base,
            "part": base[2:4],
            "grid": base.view(2, 3).t(),
            "half": base.bfloat16(),
            "parameter": torch.nn.Parameter(base.clone()),
        }
        objects = [value if dist.get_rank() == 0 else None]
        broadcast_object_list(objects)
        got = objects[0]
        got["whole"][2] = 7
        elsewhere = [value if dist.get_rank() == 0 else None]
        broadcast_object_list(elsewhere, map_location="meta")
        return (
            got["part"].tolist(),
            tuple(got["grid"].stride()),
            got["half"].dtype,
            type(got["parameter"]).__name__,
            str(elsewhere[0]["whole"].device),
        )

    first, second = run(2, send)
    assert first[:4] == second[:4] == ([7.0, 3.0], (1, 3), torch.bfloat16, "Parameter") and (
        first[4],
        second[4],
    ) == ("cpu", "meta")


@pytest.mark.parametrize("ranks", [[2, 3], [3, 1], [1]])
def test_subgroups_take_global_or_group_ranks(ranks):
    def send():
        group = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            return None
        last = dist.get_process_group_ranks(group)[-1]
        by_global, by_group = [dist.get_rank()], [dist.get_rank()]
        broadcast_object_list(by_global, src=last, group=group)
        broadcast_object_list(by_group, group=Group(group), group_src=len(ranks) - 1)
        every = [None] * len(ranks) if dist.get_rank() == last else None
        gather_object(dist.get_rank(), every, dst=last, group=group)
        return by_global == by_group == [
            last
        ], every is None or every == dist.get_process_group_ranks(group)

    assert [r for r in run(4, send) if r] == [(True, True)] * len(ranks)


def test_large_and_empty_objects():
    def send():
        g = Group()
        objects = [torch.arange(5_000_000) if g.group_rank == 0 else None, []]
        broadcast_object_list(objects)
        nothing: list = []
        broadcast_object_list(nothing)
        parts = [len(part) for part in gather_bytes(g, bytearray(g.group_rank * 3_000_000), to=0)]
        return objects[0].sum().item(), nothing, parts

    total = 4_999_999 * 5_000_000 // 2
    assert run(3, send) == [
        (total, [], [0, 3_000_000, 6_000_000]),
        (total, [], []),
        (total, [], []),
    ]


@pytest.mark.parametrize("ranks", [[0], [1, 2], [2, 0], [3, 1, 2], [0, 1, 2, 3]])
def test_each_rank_gets_its_own_bytes_from_each(ranks):
    def send():
        g = split(Group(), [ranks])
        if g is None:
            return None

        def text(source, to):
            return (
                b"%d%d" % (source, to) * (500_000 if (source, to) == (0, 1) else (source + to) % 3)
            )

        found = exchange_bytes(
            g, {peer: bytearray(text(g.group_rank, peer)) for peer in range(g.size)}, range(g.size)
        )
        return {peer: bytes(part) for peer, part in found.items()} == {
            peer: text(peer, g.group_rank) for peer in range(g.size)
        }

    assert [r for r in run(4, send) if r is not None] == [True] * len(ranks)


def test_what_fails_on_one_rank_fails_on_all():
    def bad():
        g, r = Group(), dist.get_rank()
        lists = [1, 2] if r == 0 else [1]

        def first(values):
            return values if r == 0 else None

        calls = [
            lambda: broadcast_object_list([lambda: 1]),
            lambda: broadcast_object_list([Unreadable()]),
            lambda: broadcast_object_list(lists),
            lambda: broadcast_object_list([1], src=5),
            lambda: broadcast_object_list([1], src=0, group_src=0),
            lambda: broadcast_object_list([1], group_src=3),
            lambda: broadcast_object_list([1], src=r),
            lambda: broadcast_object_list([Odd(1)], weights_only=True),
            lambda: broadcast_object_list([torch.ones(1)], map_location="nowhere"),
            lambda: gather_object(1, [None]),
            lambda: gather_object(1, None),
            lambda: gather_object(Unreadable(), first([None] * 2)),
            lambda: gather_object(Odd(1) if r else 1, first([None] * 2), weights_only=True),
            lambda: scatter_object_list([None], first([1])),
            lambda: scatter_object_list([None], [1, 2]),
            lambda: scatter_object_list([], first([1, 2])),
            lambda: scatter_object_list([None]),
        ]
        errors = [caught_error(call) for call in calls]
        x = torch.ones(1)
        g.all_reduce(x)
        return errors, x.item()

    (first, one), (second, two) = run(2, bad)
    assert one == two == 2.0 and None not in first and None not in second
    assert (
        [kind for kind, _ in first[2:7]] == ["ValueError"] * 5
        and "a list of 2" in first[2][1]
        and "a list of 1" in first[2][1]
    )
    assert first[7][0] == second[7][0] == "TypeError" and "test_objects.Odd" in second[7][1]


def test_a_rank_that_is_not_in_the_group_is_warned_as_by_torch():
    def outside():
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            return None
        said = []
        for module in (dist, objects):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                given = [1]
                assert module.broadcast_object_list(given, src=0, group=group) is None
                assert module.gather_object(2, None, dst=0, group=group) is None
                assert module.scatter_object_list(given, None, src=0, group=group) is None
            assert given == [1]
            said.append([(w.category, str(w.message)) for w in caught])
            assert module is dist or {w.filename for w in caught} == {__file__}
        return said

    theirs, ours = run(2, outside)[1]
    assert ours == theirs and len(ours) == 3
