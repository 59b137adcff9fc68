"""Train with torch's classes, save as they do, and go on with ours:

torchrun --nproc-per-node 2 coming_from.py runs/moved
"""

import argparse
import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, convert_checkpoint, load_sharded

WIDTH = 16


def make_model() -> nn.Sequential:
    """Make the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))


def steps(model, optimizer, first: int, count: int = 3) -> list[float]:
    """Take steps; gives the mean loss of each over the ranks."""
    rank = dist.get_rank()
    losses = []
    for step in range(first, first + count):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses


def train_torch_zero(folder: Path) -> list[float]:
    """Train with torch's class, save after three steps, and go on."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = TorchZero(ddp.parameters(), AdamW, lr=1e-2)
    steps(ddp, optimizer, 0)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / "torch_zero.pt")
    dist.barrier()
    return steps(ddp, optimizer, 3)


def continue_torch_zero(folder: Path) -> list[float]:
    """Go on from its file: the same calls with our class."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-2)
    saved = torch.load(folder / "torch_zero.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return steps(ddp, optimizer, 3)


def train_fsdp2(folder: Path) -> list[float]:
    """Train with FSDP2, save after three steps, and go on."""
    model = make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "fsdp2")
    return steps(model, optimizer, 3)


def continue_fsdp2(folder: Path) -> list[float]:
    """Go on from its folder, converted once: it gets a manifest with checksums."""
    if dist.get_rank() == 0:
        convert_checkpoint(folder / "fsdp2", folder / "ours", "sharded")
    dist.barrier()
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-2)
    load_sharded(folder / "ours", model, optimizer)
    return steps(ddp, optimizer, 3)


PAIRS = {
    "torch's ZeroRedundancyOptimizer": (train_torch_zero, continue_torch_zero),
    "FSDP2": (train_fsdp2, continue_fsdp2),
}


def main() -> None:
    """Move from each of torch's classes, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default="runs/coming_from",
        help="for the checkpoints; it must not be there yet (default: runs/coming_from)",
    )
    folder = parser.parse_args().folder
    dist.init_process_group()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    for name, (theirs, ours) in PAIRS.items():
        went_on = theirs(folder)
        moved = ours(folder)
        gap = max(abs(a - b) for a, b in zip(went_on, moved, strict=True))
        if dist.get_rank() == 0:
            print(f"{name}: losses {[round(loss, 6) for loss in moved]}, largest gap {gap:.0e}")
    dist.destroy_process_group()


def end_at_once() -> None:
    """End without what an interpreter does last: FSDP2 keeps the process group after it was destroyed,
    and one of gloo's threads may abort it (https://github.com/pytorch/pytorch/issues/179291)."""
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    atexit.register(end_at_once)
