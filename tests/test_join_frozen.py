"""Join: parameters that are frozen and unfrozen after DDP was made."""

import pytest
import torch
import torch.distributed as dist
from common import flatten, largest_gap
from common.joining import batches, network
from common.joining_modes import FEW, prepared
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.comm.launch import run
from zero_nb.join.join import Join

# the layers that need gradients before the block, and in each of its iterations
CASES = {
    "all unfrozen in the loop": ((), ["02", "02", "02"]),
    "a layer unfrozen in the loop": ("2", ["02", "02", "02"]),
    "a layer frozen before the block": ("2", ["2", "2", "2"]),
    "a layer frozen in the loop": ("02", ["02", "2", "2"]),
    "layers frozen in turn": ("02", ["0", "2", "0"]),
}


def train_layers(net, layers):
    for name, param in net.named_parameters():
        param.requires_grad_(name[0] in layers)


def plain(net, unused):
    """Give the model and what is joined."""
    model = DDP(net, find_unused_parameters=unused)
    optimizer = SGD(net.parameters(), lr=1e-2, momentum=0.9)
    return model, optimizer, [model, optimizer]


def stepped_in_backward(net, mode):
    looks = {"find_unused_parameters": True}
    model, optimizer, joinable, _ = prepared(
        mode, net, SGD, zero={"momentum": 0.9}, ddp=looks, parallel=looks
    )
    return model, optimizer, [joinable, optimizer]


def result(net):
    return flatten(net), [param.requires_grad for param in net.parameters()]


def trained(lengths, case, make, *how):
    rank, net = dist.get_rank(), network()
    before, in_loop = CASES[case]
    model, optimizer, joined = make(net, *how)
    train_layers(net, before)
    with Join(joined):
        for k, x in enumerate(batches(lengths[rank])):
            train_layers(net, in_loop[k])
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return result(net)


def trained_alone(lengths, case):
    net = network()
    optimizer = SGD(net.parameters(), lr=1e-2, momentum=0.9)
    data = [batches(length, rank) for rank, length in enumerate(lengths)]
    for k, layers in enumerate(CASES[case][1]):
        train_layers(net, layers)
        optimizer.zero_grad()
        losses = [net(mine[k]).square().mean() for mine in data if len(mine) > k]
        (torch.stack(losses).sum() / len(lengths)).backward()
        optimizer.step()
    return result(net)


def check(ranks, wanted):
    for params, needs in ranks:
        assert largest_gap(params, wanted[0]) < 1e-6 and needs == wanted[1]


@pytest.mark.parametrize("lengths", [(3, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parameters_may_be_frozen_and_unfrozen(case, lengths):
    wanted = trained_alone(lengths, case)
    for unused in {True, "unfrozen" not in case}:  # else DDP waits for the frozen ones
        check(run(2, trained, lengths, case, plain, unused, timeout=30), wanted)


@pytest.mark.parametrize("lengths", [(3, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_ranks_without_data_freeze_what_a_step_inside_backward_leaves_out(case, lengths):
    wanted = trained_alone(lengths, case)
    for mode in FEW:
        check(run(2, trained, lengths, case, stepped_in_backward, mode, timeout=30), wanted)
