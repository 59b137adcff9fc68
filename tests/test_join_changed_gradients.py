"""Join: what a loop does to gradients between their reduction and the step is repeated on ranks without
data, or an error."""

import pytest
import torch
import torch.distributed as dist
from common import caught_error
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


def change(how, params):
    """Change gradients that DDP has reduced."""
    if how == "penalty":
        sum(p.square().sum() for p in params if p.grad is not None).backward()
    if how == "taken away":
        params[1].grad = None
    if how == "given":
        params[2].grad = torch.ones_like(params[2])


def changes(kind, how, told):
    """Change gradients before each step; rank 0 has one batch. Parameters, or the error."""
    model = DDP(Towers(1), find_unused_parameters=True)
    params = list(model.parameters())
    optimizer = optimizer_of(kind, params)

    def train():
        with Join(
            [model, optimizer], before_step=(lambda _: change(how, params)) if told else None
        ):
            for k in range((1, 3)[dist.get_rank()]):
                optimizer.zero_grad()
                loss = sum(out.sum() for out in model(ones(1, 1)))
                if how != "no backward" or k != 1:
                    loss.backward()
                if not told:
                    change(how, params)
                optimizer.step()

    return caught_error(train), [p.item() for p in params]


@pytest.mark.parametrize("kind", ["plain", "ours"])
@pytest.mark.parametrize("how", ["penalty", "taken away", "given", "no backward"])
def test_gradients_that_are_not_those_of_the_reduction_are_an_error(kind, how):
    for error, _ in run(2, changes, kind, how, False, timeout=30):
        assert error is not None and error[0] == "RuntimeError"
        assert "gradients were changed between backward and step" in error[1]


def trained_alone(how):
    """Train one process on the mean of both ranks, of which one has the first batch alone."""
    model = Towers(1)
    params = list(model.parameters())
    optimizer = optimizer_of("plain", params)
    for k in range(3):
        optimizer.zero_grad()
        loss = sum(out.sum() for out in model(ones(1, 1)))
        (loss if k == 0 else loss / 2).backward()
        change(how, params)
        optimizer.step()
    return [p.item() for p in params]


@pytest.mark.parametrize("kind", ["plain", "ours"])
@pytest.mark.parametrize("how", ["penalty", "taken away", "given"])
def test_before_step_changes_gradients_on_all_ranks(kind, how):
    for error, params in run(2, changes, kind, how, True, timeout=30):
        assert error is None
        assert params == pytest.approx(trained_alone(how), rel=1e-12)


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
