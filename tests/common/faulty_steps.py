"""What tests of the optimizer's faults train."""

import torch
import torch.distributed as dist
from torch import nn

from common import caught


def network(dtype=torch.float32) -> nn.Module:
    """Small and large parameters, of one and of two dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 40),
        nn.Tanh(),
        nn.Linear(40, 50, bias=False),
        nn.LayerNorm(50),
        nn.Linear(50, 5),
    ).to(dtype)


def batch(step, dtype=torch.float32):
    return torch.randn(
        6, 12, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ).to(dtype)


def refused(loss, x) -> bool:
    return "inplace operation" in (caught(lambda: torch.autograd.grad(loss, x)) or "")
