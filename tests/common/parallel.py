"""Models and modes of `data_parallel` that several tests train."""

import torch
import torch.distributed as dist
from torch import nn

SMALL = {"bucket_cap_mb": 0.0005}  # buckets of 500 bytes: several in a model of this page
MODES = {
    "zero2": {"interleaved": False},
    "zero2, hidden": {"interleaved": False, "hidden": True},
    "zero2-interleaved": {"interleaved": True},
    "zero2-interleaved, hidden": {"interleaved": True, "hidden": True},
}


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(
        6, 8, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64
    )


def linear():
    return nn.Linear(8, 8).double()


def base():
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())


def normed():
    return nn.Sequential(linear(), nn.BatchNorm1d(8).double(), nn.ReLU(), linear())
