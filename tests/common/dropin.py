"""A model that both classes train, and its batches."""

import torch
import torch.distributed as dist
from torch import nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def batches(steps, seed=0):
    data = torch.Generator().manual_seed(
        seed + 100 * dist.get_rank() if dist.is_initialized() else seed
    )
    return [torch.randn(4, 6, generator=data) for _ in range(steps)]


def train(model, optimizer, steps=5, after=lambda: None):
    for batch in batches(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        after()
    return flat(model.parameters())


def flat(params):
    return torch.cat([p.detach().flatten().float() for p in params])


def agree(*values):
    return all(v.equal(values[0]) if torch.is_tensor(v) else v == values[0] for v in values)
