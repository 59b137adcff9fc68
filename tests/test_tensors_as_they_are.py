"""Tensors that autograd watches, that have gaps, or that are conjugated when they are read."""

import pytest
import torch
from common import caught_error
from torch import nn

from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run


def swapped(source):
    """Send each rank its part of what `source` gives for this rank."""
    group = Group()
    x = source(group.group_rank)
    output = torch.zeros(4, dtype=x.dtype)
    group.all_to_all(output, x)
    return output.requires_grad, torch.view_as_real(output + 0j).tolist()


def gaps_on_one_rank(rank):
    return torch.arange(4.0) + 4 if rank else torch.arange(8.0)[::2]


def conjugated_on_one_rank(rank):
    x = torch.arange(4.0) + 1j
    return x if rank else x.conj()


def watched(rank):
    return torch.arange(4.0, requires_grad=True)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (gaps_on_one_rank, ([0, 2, 4, 5], [4, 6, 6, 7])),
        (conjugated_on_one_rank, ([-1j, 1 - 1j, 1j, 1 + 1j], [2 - 1j, 3 - 1j, 2 + 1j, 3 + 1j])),
        (watched, ([0, 1, 0, 1], [2, 3, 2, 3])),
    ],
)
def test_all_to_all_takes_any_source(source, wanted):
    parts = [[[complex(z).real, complex(z).imag] for z in part] for part in wanted]
    assert run(2, swapped, source, timeout=20) == [(False, part) for part in parts]


def sends_conjugated():
    group = Group()
    x = torch.full((2,), 1 + 1j)
    peer = 1 - group.group_rank
    said = caught_error(lambda: group.exchange([(x.conj(), peer)], [(x, peer)]))
    group.exchange([(x.conj().resolve_conj(), peer)], [(y := torch.zeros_like(x), peer)])
    return said, y.tolist()


def test_a_conjugated_tensor_is_refused_before_it_is_sent():
    for (kind, words), got in run(2, sends_conjugated, timeout=20):
        assert kind == "ValueError" and "resolve_conj()" in words
        assert got == [1 - 1j] * 2


def parameters():
    """Move parameters of several layouts, in grad mode, one by one and in a block."""
    group = Group()
    torch.manual_seed(group.group_rank)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    linear = nn.Linear(4, 4)
    group.broadcast(conv.weight, 0)
    with coalescing_manager(group):
        for p in linear.parameters():
            group.broadcast(p, 0)
    flat = torch.ones(4, requires_grad=True)
    group.reduce_scatter(flat)
    moved = [conv.weight, *linear.parameters()]
    sums = [p.double().sum().item() for p in moved]
    return sums, all(p.is_leaf and p.grad_fn is None for p in (*moved, flat)), flat.max().item()


def test_parameters_travel_in_grad_mode(way):
    first, second = run(2, parameters, timeout=20)
    assert first == second and first[1:] == (True, 2.0)
