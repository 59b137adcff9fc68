"""An optimizer that has state, and what it holds."""

import torch
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
