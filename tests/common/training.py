"""What tests of the optimizer train and compare."""

import torch
from torch import nn

STEPS, GLOBAL_BATCH = 20, 12  # 12 divides by 1, 2, 3 and 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 33),
        nn.Tanh(),
        nn.Linear(33, 17, bias=False),
        nn.LayerNorm(17),
        nn.Linear(17, 7),
    )


def stepped_once(optimizer):
    optimizer.step()
    return optimizer


def train(model, optimizer, rank, size, steps=STEPS):
    """Train on this rank's rows of a global batch that does not depend on the number of ranks."""
    data = torch.Generator().manual_seed(5)
    for _ in range(steps):
        batch = torch.randn(GLOBAL_BATCH, 20, generator=data)
        optimizer.zero_grad()
        model(batch.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def difference(these, those) -> float:
    """Largest difference, relative to the largest value of each parameter."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(these, those, strict=True)
    )
