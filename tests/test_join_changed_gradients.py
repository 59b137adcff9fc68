"""Join: what a loop does to gradients between their reduction and the step is repeated on ranks without
data, or an error."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


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


def optimizer_of(kind, params):
    if kind == "plain":
        return SGD(params, lr=0.1, momentum=0.5)
    return ZeroRedundancyOptimizer(params, SGD, lr=0.1, momentum=0.5)


def closes(named):
    """Clip the gradients that a closure makes; rank 0 has one batch. The momentum in the end."""
    model = DDP(weights(1)[0])
    (weight,) = model.parameters()
    optimizer = optimizer_of("plain", [weight])

    def clip(_):
        nn.utils.clip_grad_norm_([weight], 0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(ones(1, 1) * 4).sum()
        loss.backward()
        return loss

    with Join([model, optimizer], before_step=clip):
        for _ in range((1, 3)[dist.get_rank()]):
            loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
            assert loss.requires_grad
    return optimizer.state[weight]["momentum_buffer"].item()


@pytest.mark.parametrize("named", [False, True])
def test_before_step_changes_the_gradients_of_a_closure(named):
    # of three gradients of norm 0.5, each of half the weight of the next
    for momentum in run(2, closes, named, timeout=30):
        assert momentum == pytest.approx(0.875, rel=1e-5)
