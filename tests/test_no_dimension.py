"""Parameters of no dimension, of which a number for each element looks like a number for all."""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zero_nb import (
    ZeroRedundancyOptimizer,
    full_state_dict,
    load_sharded,
    reshard,
    run,
    save_sharded,
)


class Heavy(Optimizer):
    """Keeps an average of gradients under a name that torch's ASGD has for a single number."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(mu=torch.zeros_like(p), step=torch.zeros(()))
                state["step"] += 1
                state["mu"].mul_(0.9).add_(p.grad)
                p.sub_(state["mu"] * group["lr"])


def made(**options):
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in {"a": (3,), "scale": (), "b": (5,), "shift": ()}.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return model, ZeroRedundancyOptimizer(model.parameters(), Heavy, lr=0.1, **options)


def step(model, zero, t):
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.1 * (i + 1) + t)
    zero.step()


def resumed(way, folder):
    """Train for two steps, go on in another way, and tell whether that is as without it."""
    model, zero = made(shard="even")
    other, again = made(shard="whole" if way == "reshard" else "even")
    for t in range(2):
        step(model, zero, t)
        step(other, again, t)
    if way == "reshard":
        reshard(again, shard="even")
    elif way == "full":
        again.load_state_dict(full_state_dict(zero, to=None))
    else:
        save_sharded(folder, model, zero)
        load_sharded(folder, other, again)
    for t in range(2, 4):
        step(model, zero, t)
        step(other, again, t)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("way", ["full", "sharded", "reshard"])
def test_state_of_a_parameter_of_no_dimension_is_loaded_as_its_class_keeps_it(folder, way):
    assert run(2, resumed, way, folder / "c") == [True, True]
