"""Train with Muon and AdamW in one optimizer, and save both in one checkpoint:

torchrun --nproc-per-node 2 muon.py runs/muon --steps 40
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LinearLR

from zero_nb import ZeroRedundancyOptimizer, load_sharded, newest_checkpoint, overlap, save_sharded

WINDOW = 16  # letters that are read to tell the next one
BATCH = 32  # windows of a rank in a step
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
LETTERS = TEXT.clamp(max=127).long()


class Block(nn.Module):
    """A residual block with a square matrix, and a table of as many elements that it looks things up in."""

    def __init__(self, width: int, entries: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.square = nn.Linear(width, width)
        self.query = nn.Linear(width, inner, bias=False)
        self.table = nn.Linear(inner, entries, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x and the result: (batch, width)
        """Add to x what the block makes of it."""
        hidden = gelu(self.square(self.norm(x)))
        found = self.table(self.query(hidden)).softmax(-1) @ self.table.weight
        return x + hidden + self.out(found)


def make_model(width: int = 128, blocks: int = 4) -> nn.Module:
    """Make a model that guesses the next letter."""
    torch.manual_seed(0)
    inner = [Block(width, width * width // 16, 16) for _ in range(blocks)]
    return nn.Sequential(
        nn.Embedding(128, width // WINDOW), nn.Flatten(), *inner, nn.Linear(width, 128)
    )


def param_groups(model: nn.Module) -> list[dict]:
    """Give Muon the matrices of the blocks, and AdamW the embedding, the head, norms and biases."""
    matrices = []
    others = []
    for name, p in model.named_parameters():
        part = model[int(name.split(".")[0])]
        chosen = matrices if isinstance(part, Block) and p.dim() == 2 else others
        chosen.append((name, p))
    return [
        {"params": matrices, "optimizer_class": Muon, "lr": 0.02, "weight_decay": 0.0},
        {"params": others, "lr": 3e-3},
    ]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Draw a rank's windows of a step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(LETTERS) - WINDOW, (BATCH,), generator=draw)
    windows = LETTERS[starts[:, None] + torch.arange(WINDOW + 1)]
    return windows[:, :-1], windows[:, -1]


def train(folder: Path, steps: int) -> list[float]:
    """Train up to a step from the newest checkpoint, and save; gives the losses of the new steps."""
    ddp = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(param_groups(ddp.module), AdamW)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    overlap(ddp, optimizer)  # one optimizer, so that both classes step inside backward
    begun = 0
    if newest := newest_checkpoint(folder):
        extra = load_sharded(newest, ddp.module, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        begun = extra["step"]
    losses = []
    for step in range(begun + 1, steps + 1):
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        dist.all_reduce(shown := loss.detach() / dist.get_world_size())
        losses.append(shown.item())
    extra = {"step": steps, "scheduler": scheduler.state_dict()}
    save_sharded(folder / f"step-{steps}", ddp.module, optimizer, steps, extra=extra)
    return losses


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default="runs/muon",
        help="of the checkpoints (default: runs/muon)",
    )
    parser.add_argument("--steps", type=int, default=40, help="up to which step (default: 40)")
    given = parser.parse_args()
    dist.init_process_group()
    losses = train(given.folder, given.steps)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{ranks} ranks, {len(losses)} steps up to step {given.steps}", end="")
        print(f", loss {losses[-1]:.3f}" if losses else "")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
