"""Train, save every ten steps and after the last, and go on from the newest checkpoint at any number of ranks:

    torchrun --nproc-per-node 4 checkpoints.py runs/letters --steps 30
    torchrun --nproc-per-node 2 checkpoints.py runs/letters --steps 60

Look into a checkpoint, and convert it to plain torch.optim, to safetensors, and to DeepSpeed on two ranks:

    zero-nb ckpt inspect runs/letters/step-60
    zero-nb ckpt convert runs/letters/step-60 runs/optimizer.pt
    zero-nb ckpt convert runs/letters/step-60 runs/letters.safetensors
    zero-nb ckpt convert runs/letters/step-60 runs/deepspeed --format deepspeed --ranks 2
"""

import argparse
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
    layers = (nn.Flatten(), nn.Linear(16 * WINDOW, 256), nn.GELU(), nn.Linear(256, 128))
    return nn.Sequential(nn.Embedding(128, 16), *layers)


def batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the windows of a step, the same at any number of ranks, and give this rank's part."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(LETTERS) - WINDOW, (BATCH,), generator=draw)[rank::world_size]
    windows = LETTERS[starts[:, None] + torch.arange(WINDOW + 1)]
    return windows[:, :-1], windows[:, -1]


def train(folder: Path, steps: int, every: int = 10) -> list[float]:
    """Train up to a step, and save; gives the loss of each step that was left to do."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=3e-3)
    begun = 0
    if newest := newest_checkpoint(folder):
        begun = load_sharded(newest, model, optimizer)["step"]
    losses = []
    for step in range(begun + 1, steps + 1):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(shown := loss.detach() / size)
        losses.append(shown.item())
        if step % every == 0 or step == steps:
            save_sharded(folder / f"step-{step}", model, optimizer, step, extra={"step": step})
    return losses


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default="runs/letters",
        help="has a folder for each checkpoint, such as step-30 (default: runs/letters)",
    )
    parser.add_argument("--steps", type=int, default=60, help="up to which step (default: 60)")
    given = parser.parse_args()
    dist.init_process_group()
    losses = train(given.folder, given.steps)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{ranks} ranks, {len(losses)} steps up to step {given.steps}", end="")
        print(f", loss {losses[-1]:.6f}" if losses else "")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
