"""Train in one mode, and say what each rank holds and sends:

torchrun --nproc-per-node 2 which_mode.py --mode zero2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, data_parallel, memory_report, overlap, record

MODES = ("ddp", "zero1", "zero1-overlap", "zero2", "zero2-interleaved")


def make_model(width: int = 700, layers: int = 8) -> nn.Sequential:
    """Make the model, the same on every rank."""
    torch.manual_seed(0)
    hidden = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    return nn.Sequential(*hidden)


def build(mode: str, module: nn.Module, group=None, lr: float = 1e-3):
    """Give what to call instead of the module, and the optimizer."""
    if mode.startswith("zero2"):
        optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, group, lr=lr)
        data_parallel(module, optimizer, interleaved=mode.endswith("interleaved"), bucket_cap_mb=2)
        return module, optimizer
    ddp = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=2, gradient_as_bucket_view=True
    )
    if mode == "ddp":
        return ddp, AdamW(module.parameters(), lr=lr, fused=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, group, lr=lr)
    if mode == "zero1-overlap":
        overlap(ddp, optimizer)
    return ddp, optimizer


def train(mode: str, steps: int = 4, width: int = 700):
    """Train; gives the last loss, a report of memory, and the bytes that a step sends by kind."""
    group = record()
    model, optimizer = build(mode, make_model(width), group)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        group.log.clear()
        x = torch.randn(64, width, generator=data)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    sent = {kind: int(group.log.only(kind).wire) for kind in group.log.count()}
    return loss.item(), memory_report(model, optimizer), sent


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="zero1", help="(default: zero1)")
    parser.add_argument("--steps", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--width", type=int, default=700, help="of the layers (default: 700)")
    given = parser.parse_args()
    dist.init_process_group()
    loss, report, sent = train(given.mode, given.steps, given.width)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}\nbytes that rank 0 sends in a step: {sent}\n{report}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
