"""What tests of steps beside backward attach and train."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

HALVES = [torch.float16, torch.bfloat16]
MODES = ["overlap", "interleaved", "parallel", "parallel interleaved"]
HIDDEN = ["parallel hidden", "parallel hidden interleaved"]


class Sums(nn.Module):
    """Parameters of which each has the input as its gradient."""

    def __init__(self, dtype, sizes=(40, 7, 300, 64)):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(n, dtype=dtype) for n in sizes)

    def forward(self, x):
        return sum((w * x).sum() for w in self.weights)


def attach(mode, module, zero, process_group=None, bucket_cap_mb=0.0003, **options):
    """Give the model to call, and what steps inside its backward, which "step" has not; a bucket
    holds few parameters."""
    if mode.startswith("parallel"):
        hidden = {"hidden": True} if "hidden" in mode else {}
        options = {"bucket_cap_mb": bucket_cap_mb, **hidden, **options}
        return module, data_parallel(module, zero, interleaved="interleaved" in mode, **options)
    ddp = DDP(module, process_group=process_group, bucket_cap_mb=bucket_cap_mb)
    if mode == "step":
        return ddp, None
    return ddp, overlap(ddp, zero, interleaved="interleaved" in mode, **options)


def backward_of(model):
    model(torch.ones(())).backward()


def trained(mode, dtype=torch.float32, process_group=None, **options):
    """Give a module, its optimizer, the model to call, and the handle."""
    module = Sums(dtype)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, process_group, lr=0.125)
    return module, zero, *attach(mode, module, zero, process_group, **options)


class Blocks(nn.Module):
    """Layers that may be called one by one; a choice of them may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))

    def forward(self, x, uses=range(5)):
        for i in uses:
            x = x + self.layers[i](x).tanh()
        return x


def data(step):
    return torch.randn(
        3,
        6,
        generator=torch.Generator().manual_seed(10 * step + dist.get_rank()),
        dtype=torch.float64,
    )


def plainly(model, step):
    model(data(step)).square().mean().backward()
