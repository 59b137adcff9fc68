"""Replicas, batches and optimizers that tests of `data_parallel` train."""

import torch
import torch.distributed as dist
from torch.optim import AdamW

from common import flatten
from common.modes import MODES
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

PARALLEL = {name: mode.options for name, mode in MODES.items() if not mode.wraps}


def batch(step, rank=None, rows=6, width=12, dtype=torch.float64):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(
        rows, width, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=dtype
    )


def replicas(model, group=None):
    mine = flatten(model.parameters())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return all(torch.equal(mine, other) for other in every)


def adamw(params):
    return {"params": params, "lr": 1e-2, "weight_decay": 0.1}


def one_adamw(model):
    return [adamw(list(model.parameters()))]


def sharded(groups, process_group=None, **options):
    return ZeroRedundancyOptimizer(groups, AdamW, process_group, lr=1e-2, **options)
