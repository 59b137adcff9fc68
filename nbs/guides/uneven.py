"""Train on ranks that have 150, 70 and 23 records, and compare with one process that has them all:

torchrun --nproc-per-node 3 uneven.py --divide-by samples
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from zero_nb import Attendance, Join, ZeroRedundancyOptimizer

SIZES = (150, 70, 23)  # records of ranks 0, 1 and 2, and again of the next three
BATCH = 16  # records of a rank in an iteration
MEANS = ("world_size", "active", "samples")


def make_model() -> nn.Module:
    """Make the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loader_of(rank: int) -> DataLoader[tuple[Tensor, ...]]:
    """Make a rank's records, and the loader of their batches."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(SIZES[rank % 3], 8, generator=draw) + 0.3 * (rank % 3)
    y = x[:, :3].prod(1, keepdim=True) + x.sum(1, keepdim=True)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def train(epochs: int, divide_by: str) -> tuple[nn.Module, Attendance]:
    """Train; gives the model, and which rank had data in which iteration of an epoch."""
    data = loader_of(dist.get_rank())
    ddp = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-2)
    scheduler = ExponentialLR(optimizer, 0.99)
    for _ in range(epochs):
        with Join(
            [ddp, optimizer, scheduler],
            divide_by=divide_by,
            before_step=lambda _: clip_grad_norm_(ddp.parameters(), 1.0),
        ) as join:
            for x, y in join.loader(data):
                optimizer.zero_grad()
                (ddp(x) - y).square().mean().backward()
                optimizer.step()
                scheduler.step()
    return ddp.module, join.attendance


def train_alone(ranks: int, epochs: int) -> nn.Module:
    """Train unsharded in one process: in iteration k, the k-th batches of all ranks as one batch."""
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = ExponentialLR(optimizer, 0.99)
    batches = [list(loader_of(rank)) for rank in range(ranks)]
    for _ in range(epochs):
        for k in range(max(map(len, batches))):
            present = [mine[k] for mine in batches if k < len(mine)]
            x, y = (torch.cat(parts) for parts in zip(*present, strict=True))
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return model


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3, help="(default: 3)")
    parser.add_argument(
        "--divide-by",
        choices=MEANS,
        default="samples",
        help="what the sum of gradients is divided by",
    )
    given = parser.parse_args()
    dist.init_process_group()
    model, attendance = train(given.epochs, given.divide_by)
    if dist.get_rank() == 0:
        alone = train_alone(dist.get_world_size(), given.epochs)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        gap = max((a - b).abs().max().item() for a, b in pairs)
        print(f"{attendance}\n{given.divide_by}: {gap:.0e} from one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
