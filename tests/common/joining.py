"""What the tests of `Join` train, and one process that sees the data of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import AdamW

from common.models import flatten
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def network(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), *between, nn.Tanh(), nn.Linear(9, 5))


def batches(n, rank=None, size=4):
    data = torch.Generator().manual_seed(100 * (dist.get_rank() if rank is None else rank))
    return [torch.randn(size, 6, generator=data) for _ in range(n)]


def optimizer_of(kind, params, group=None):
    if kind == "plain":
        return AdamW(params, lr=1e-2)
    return {"ours": ZeroRedundancyOptimizer, "torch": TorchZero}[kind](
        params, AdamW, group, lr=1e-2
    )


def reference(counts, by, kind=AdamW, clip=None, every=1, rounds=1, sizes=None):
    """Train in one process on the union of all data; parameters and state."""
    model = network()
    optimizer = kind(model.parameters(), lr=1e-2)
    data = [
        batches(count, rank, 4 + rank if sizes is None else sizes[rank])
        for rank, count in enumerate(counts)
    ]
    for k in [*range(max(counts))] * rounds:
        there = [mine[k] for mine in data if len(mine) > k]
        if by == "samples":
            loss = model(torch.cat(there)).square().mean()
        else:
            loss = sum(model(x).square().mean() for x in there) / (
                len(there) if by == "active" else len(counts)
            )
        (loss / every).backward()
        if (k + 1) % every:
            continue
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return flatten(model), optimizer.state_dict()["state"]


def alone(counts, by, sizes=None, **how):
    return reference(counts, by, sizes=sizes, **how)[0]


class Branches(nn.Module):
    """Uses one of two layers, or a third that nobody does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x, which):
        return {"out": self.layers[which](x), "aside": "text"}


def alone_with_branches(counts):
    model = Branches()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data = [batches(n, rank, 4 + rank) for rank, n in enumerate(counts)]
    for k in range(max(counts)):
        optimizer.zero_grad()
        there = [(mine[k], (k + rank) % 2) for rank, mine in enumerate(data) if len(mine) > k]
        torch.cat([model(x, which)["out"] for x, which in there]).square().mean().backward()
        optimizer.step()
    return flatten(model)


class Own(Exception):
    """A user's."""
