"""Train a small transformer on letters, with the optimizer's state divided over the ranks:

torchrun --nproc-per-node 2 drop_in.py optimizer.pt --steps 60
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from zero_nb import ZeroRedundancyOptimizer, full_state_dict

WINDOW = 32  # letters in a sequence
BATCH = 8  # sequences in a step, on each rank
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
LETTERS = TEXT.clamp(max=127).long()


class Letters(nn.Module):
    """Guesses the next letter at each place of a sequence."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.places = nn.Parameter(torch.randn(WINDOW, width) / 50)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Score the 128 letters at each place."""
        x = self.embed(letters) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


def make_model(width: int = 128) -> nn.Module:
    """Make the model, the same on every rank."""
    torch.manual_seed(0)
    return Letters(width)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw this rank's sequences of a step, and the letters that follow."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(LETTERS) - WINDOW, (BATCH,), generator=draw)
    windows = LETTERS[starts[:, None] + torch.arange(WINDOW + 1)]
    return windows[:, :-1], windows[:, 1:]


def train(path: Path, steps: int = 60, width: int = 128):
    """Train, and save the optimizer; gives the losses, the model and the optimizer."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(make_model(width), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=3e-3)
    scheduler = OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        dist.all_reduce(shown := loss.detach() / dist.get_world_size())
        losses.append(shown.item())
    full_state_dict(optimizer, to=path)
    return losses, ddp, optimizer


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        default="optimizer.pt",
        help="file for the optimizer's state dict (default: optimizer.pt)",
    )
    parser.add_argument("--steps", type=int, default=60, help="how many (default: 60)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128)")
    given = parser.parse_args()
    dist.init_process_group()
    losses, ddp, optimizer = train(given.path, given.steps, given.width)
    if dist.get_rank() == 0:
        kept = sum(v.nbytes for s in optimizer.optim.state.values() for v in s.values())
        print(f"{given.steps} steps, loss {losses[-1]:.4f}, {kept:,} bytes of state on rank 0")
    del ddp, optimizer  # they must not outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
