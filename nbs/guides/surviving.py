"""Lose rank 1 in the middle of a training, and go on from the checkpoint when torchrun starts the ranks again:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 3 surviving.py runs/killed --kill 12
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, load_sharded, newest_checkpoint, save_sharded

WINDOW = 16  # letters that are read to tell the next one
BATCH = 48  # windows in a step, of all ranks together, whose number divides it
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
LETTERS = TEXT.clamp(max=127).long()


def make_model() -> nn.Module:
    """Make a model that guesses the next letter."""
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(16 * WINDOW, 64), nn.GELU(), nn.Linear(64, 128))
    return nn.Sequential(nn.Embedding(128, 16), *layers)


def batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the windows of a step, the same at any number of ranks, and give this rank's part."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(LETTERS) - WINDOW, (BATCH,), generator=draw)[rank::world_size]
    windows = LETTERS[starts[:, None] + torch.arange(WINDOW + 1)]
    return windows[:, :-1], windows[:, -1]


def train(folder: Path | None, steps: int, kill: int = 0, every: int = 5) -> list[float]:
    """Begin, or go on from the newest checkpoint, up to a step; gives the loss of every step since the first.

    Without a folder, begin and save nothing. Rank 1 is killed before step `kill`, unless it goes on from a checkpoint.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=3e-3)
    losses: list[float] = []
    if folder and (newest := newest_checkpoint(folder)):
        losses = load_sharded(newest, model, optimizer)["losses"]
    before = len(losses)
    if folder and rank == 0:
        print(f"{size} ranks, steps taken before: {before}", flush=True)
    for step in range(before + 1, steps + 1):
        if (step, rank, before) == (kill, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(shown := loss.detach() / size)
        losses.append(shown.item())
        if folder and step % every == 0:
            save_sharded(folder / f"step-{step}", model, optimizer, step, extra={"losses": losses})
    return losses


def main() -> None:
    """Train as the command line says, and compare with a training in which no rank is killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default="runs/killed",
        help="has a folder for each checkpoint, such as step-10 (default: runs/killed)",
    )
    parser.add_argument("--steps", type=int, default=30, help="up to which step (default: 30)")
    parser.add_argument("--kill", type=int, default=0, help="the step that rank 1 does not take")
    given = parser.parse_args()
    dist.init_process_group()
    losses = train(given.folder, given.steps, given.kill)
    unbroken = train(None, given.steps)
    gap = max(abs(a - b) for a, b in zip(losses, unbroken, strict=True))
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, loss {losses[-1]:.6f}, {gap:.0e} from the run without a kill")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
