"""An optimizer that has state, and what it holds."""

import torch
from torch import nn
from torch.optim import AdamW

from common.saving import two_layers
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def stepped():
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    return model, zero


def content(model, zero):
    zero.consolidate_state_dict(None)
    state = zero.state_dict()["state"]
    values = [v for s in state.values() for v in s.values()]
    return [v.double().clone() for v in [*model.state_dict().values(), *values]]


def make(optimizer_class=AdamW, seed=0, sharded=True, named=False, **options):
    """Make a model and its optimizer, of parameters with their names if they are to be `named`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    params = model.named_parameters() if named else model.parameters()
    if not sharded:
        return model, optimizer_class(params, **options)
    options = {**options, "trust_optimizer_class": True}
    return model, ZeroRedundancyOptimizer(params, optimizer_class, **options)


def step(model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def stepped_linear():
    """Give a layer and the plain optimizer that has stepped it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    adamw = AdamW(model.named_parameters(), lr=0.1)
    step(model, adamw)
    return model, adamw
