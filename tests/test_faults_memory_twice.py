"""Memory that one call, or one block, uses twice."""

import pytest
import torch
from common import caught_error

from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run


def all_to_all_in_place(start):
    """Give how many elements are wrong where the output and the source share memory from `start` on."""
    g = Group()
    n = 1 << 22
    memory = torch.arange(2 * n + start, dtype=torch.int32) + g.group_rank * 10**8
    source = memory[start:]
    wanted = [source[g.group_rank * n :][:n] + (r - g.group_rank) * 10**8 for r in range(2)]
    wanted = torch.cat(wanted)
    output = memory[: 2 * n]
    g.all_to_all(output, source)
    return int((output != wanted).sum())


@pytest.mark.parametrize("start", [0, 1000])
def test_an_all_to_all_in_place_sends_what_was_there(start):
    assert run(2, all_to_all_in_place, start, timeout=60) == [0, 0]


def exchanges_in_place():
    """Swap in place, in a call and in a block; receive twice into the same; and what is no fault."""
    g = Group()
    x = torch.full((1 << 22,), float(g.group_rank))
    peer = 1 - g.group_rank

    def in_a_block():
        with coalescing_manager(g):
            g.send(x[2:], peer)
            g.recv(x[:3], peer)

    said = [
        caught_error(lambda: g.exchange([(x, peer)], [(x, peer)])),
        caught_error(lambda: g.exchange([], [(x[:4], peer), (x[3:], peer)])),
        caught_error(in_a_block),
    ]
    g.exchange([(x[:4], peer), (x[2:4], peer)], [(x[4:8], peer), (x[8:10], peer)])
    return said, x[:12].tolist()


def test_an_exchange_in_place_is_refused():
    for rank, (said, got) in enumerate(run(2, exchanges_in_place, timeout=60)):
        assert [kind for kind, _ in said] == ["ValueError"] * 3
        assert all("memory apart" in words for _, words in said)
        assert got == [float(rank)] * 4 + [1.0 - rank] * 6 + [float(rank)] * 2


def sends_before_a_sum(together):
    """Send or receive a tensor, and add it up in the same block; the other order is no fault."""
    g = Group()
    x = torch.full((4,), 1.0 + g.group_rank)

    def block(first):
        with coalescing_manager(g):
            if not first:
                g.all_reduce(x)
            if together or g.group_rank == 0:
                g.send(x, 1) if g.group_rank == 0 else g.recv(x, 0)
            if first:
                g.all_reduce(x)

    said = caught_error(lambda: block(first=True))
    if together:
        block(first=False)
    g.all_reduce(x)
    return said, x[0].item()


@pytest.mark.parametrize("together", [True, False])
def test_a_send_before_a_collective_of_its_memory_is_refused_on_every_rank(together):
    for (kind, words), total in run(2, sends_before_a_sum, together, timeout=20):
        assert kind == "ValueError" and "runs after its collectives" in words
        assert total == (6.0 if together else 3.0)
