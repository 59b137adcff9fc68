"""A model in DDP, its batches, and the optimizers that step it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import SGD, AdamW

from common import flatten
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

CAP = 0.01  # MiB, so that there are several buckets


class Net(nn.Module):
    """Layers of which some may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x, uses=(0, 1, 2, 3)):
        x = self.first(x).tanh()
        for i in uses:
            x = x + self.middle[i](x).tanh()
        return self.last(x)


def network(dtype=torch.float64):
    return Net().to(dtype)


def batch(step, part=0, dtype=torch.float64):
    return torch.randn(
        4,
        6,
        generator=torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank()),
        dtype=dtype,
    )


def apart(model, group=None):
    """Give how far this rank's parameters are from those of the first rank, bit for bit: 0 or 1."""
    mine = flatten(model)
    first = mine.clone()
    dist.broadcast(first, dist.get_global_rank(group or dist.group.WORLD, 0), group)
    return float(not torch.equal(mine, first))


ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True}


def grouped(model, groups):
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.05}] if groups else params


def unsharded(name, model, groups):
    params = grouped(model, groups)
    return AdamW(params, **ADAMW) if name == "adamw" else SGD(params, **MOMENTUM)


def sharded(name, model, groups, process_group=None, **options):
    kind, defaults = (AdamW, ADAMW) if name == "adamw" else (SGD, MOMENTUM)
    params = grouped(model, groups)
    return ZeroRedundancyOptimizer(params, kind, process_group, **options, **defaults)


def backward(model, step, layers=(0, 1, 2, 3)):
    """Run one iteration's forward and backward."""
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype=dtype), layers).square().mean().backward()


def twice(state, bucket):
    """Do what a hook of the user's with a state may do."""
    bucket.buffer().mul_(state["factor"])
    return default_hooks.allreduce_hook(None, bucket)
