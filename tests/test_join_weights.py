"""Join with a weight for each rank: all of a gradient is weighted once, however it comes to a parameter."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import flatten
from common.modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Outputs(nn.Module):
    """Gives its loss and what leads to it, in several containers."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
        self.kind = kind

    def forward(self, x):
        hidden = self.first(x).tanh()
        y = self.second(hidden)
        loss = (y - x.roll(1, 1)).square().mean()
        self.auxiliary = hidden.square().mean()
        if self.kind == "an object":
            return SimpleNamespace(loss=loss)
        return {"loss": loss, "logits": y, "again": loss, "hidden": [hidden]}


def loss_of_outputs(call, module, x):
    """Give the loss of a batch, of which some reaches the weights past the output."""
    output = call(x)
    loss = output.loss if module.kind == "an object" else output["loss"]
    penalty = sum(p.square().sum() for p in module.parameters())
    return loss + 0.3 * penalty + 0.2 * module.auxiliary


LENGTHS = (4, 1, 2)


def rows(iteration, rank):
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    return torch.randn(2 + rank + iteration, 4, dtype=torch.float64, generator=generator)


def with_outputs(mode, kind, by):
    rank = dist.get_rank()
    made = MODES[mode].attach(
        Outputs(kind), lambda model: ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    )
    module = made.call.module if MODES[mode].wraps else made.call
    with Join([made.joinable, made.optimizer], divide_by=by):
        for iteration in range(LENGTHS[rank]):
            made.optimizer.zero_grad()
            loss_of_outputs(made.call, module, rows(iteration, rank)).backward()
            made.optimizer.step()
    return flatten(module)


def with_outputs_alone(kind, by):
    model = Outputs(kind)
    optimizer = SGD(model.parameters(), lr=0.1)
    for iteration in range(max(LENGTHS)):
        batches = [rows(iteration, r) for r, n in enumerate(LENGTHS) if iteration < n]
        weights = [len(batch) if by == "samples" else 1 for batch in batches]
        optimizer.zero_grad()
        for batch, weight in zip(batches, weights, strict=True):
            (loss_of_outputs(model, model, batch) * weight / sum(weights)).backward()
        optimizer.step()
    return flatten(model)


@pytest.mark.parametrize("by", ["active", "samples"])
@pytest.mark.parametrize("kind", ["a dict", "an object"])
@pytest.mark.parametrize("mode", ["zero1", "zero1-overlap", "zero2", "zero2-interleaved"])
def test_all_of_a_gradient_is_weighted_once(mode, kind, by):
    """Through outputs that lead to each other, and past them."""
    expected = with_outputs_alone(kind, by)
    for found in run(3, with_outputs, mode, kind, by):
        assert (found - expected).abs().max() < 1e-12


def models():
    torch.manual_seed(0)
    return [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]


def loss_of_models(first, second, x):
    """Go through both, and twice through one of them, with fewer samples."""
    return (second(first(x)) - x).square().mean() + second(x[:1]).square().mean()


def two_models(by):
    rank, pair = dist.get_rank(), models()
    wrapped = [DDP(model) for model in pair]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in pair]
    with Join([*wrapped, *optimizers], divide_by=by):
        for iteration in range(LENGTHS[rank]):
            with torch.enable_grad():
                wrapped[0](rows(9, rank))  # whose gradient nobody asks for
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of_models(*wrapped, rows(iteration, rank)).backward()
            for optimizer in optimizers:
                optimizer.step()
    return torch.cat([flatten(model) for model in pair])


def two_models_alone(by):
    pair = models()
    for iteration in range(max(LENGTHS)):
        batches = [rows(iteration, r) for r, n in enumerate(LENGTHS) if iteration < n]
        losses = [loss_of_models(*pair, batch) for batch in batches]
        for model, more in zip(pair, (0, 1), strict=True):  # the second one sees another sample
            weights = [len(batch) + more if by == "samples" else 1 for batch in batches]
            loss = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
            for p in model.parameters():
                p.grad = torch.autograd.grad(loss, p, retain_graph=True)[0]
        for model in pair:
            SGD(model.parameters(), lr=0.1).step()
    return torch.cat([flatten(model) for model in pair])


@pytest.mark.parametrize("by", ["active", "samples"])
def test_of_two_models_the_gradient_that_passes_both_is_weighted_once(by):
    expected = two_models_alone(by)
    for found in run(3, two_models, by):
        assert (found - expected).abs().max() < 1e-12
