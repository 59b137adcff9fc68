"""Join: what a loop does to gradients between their reduction and the step is repeated on ranks without
data, or an error."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.comm.launch import run
from zero_nb.join.join import Join


def ones(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def weights(count):
    """Give linear layers of one weight, which is 1."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(count)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return layers


class Towers(nn.Module):
    """Gives two outputs that share no weight, and a weight that neither uses."""

    def __init__(self, unused):
        super().__init__()
        self.towers = nn.ModuleList(weights(2))
        self.unused = nn.ModuleList(weights(unused))

    def forward(self, x):
        return [tower(x) for tower in self.towers]


def adds_up():
    """Train with a backward for each output, of gradients that nothing clears; rank 0 has no batch."""
    model = DDP(Towers(0))
    with Join([model]):
        for _ in range((0, 2)[dist.get_rank()]):
            first, second = model(ones(1, 1))
            first.sum().backward()
            second.sum().backward()
    return [p.grad.item() for p in model.parameters()]


def test_a_reduction_that_takes_two_backwards_adds_up():
    # each reduction adds the mean of 1 and nothing
    assert run(2, adds_up, timeout=30) == [[1.0, 1.0]] * 2
