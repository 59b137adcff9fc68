"""Train in low precision, in one of five ways, and say what it took and what it lost:

torchrun --nproc-per-node 2 low_precision.py masters --steps 100
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, data_parallel, memory_report, record

WINDOW = 16  # letters that are read to tell the next one
BATCH = 64  # windows of a rank in a step
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
LETTERS = TEXT.clamp(max=127).long()


@dataclass(frozen=True)
class Recipe:
    """Which dtype is used for what."""

    params: torch.dtype = torch.float32  # and gradients
    master: torch.dtype | None = None  # of the copy that is stepped
    autocast: torch.dtype | None = None  # of matrix products in forward and backward
    reduce: torch.dtype | None = None  # in which gradients are sent and added; None: their own
    scaler: bool = False


RECIPES = {
    "float32": Recipe(),
    "autocast": Recipe(autocast=torch.bfloat16, reduce=torch.bfloat16),
    "scaler": Recipe(autocast=torch.float16, scaler=True),
    "bfloat16": Recipe(params=torch.bfloat16),
    "masters": Recipe(params=torch.bfloat16, master=torch.float32),
}


@dataclass
class Result:
    """What a training took and came to."""

    losses: list[float]  # mean of the ranks, of each step
    bytes: dict[str, int]  # that each of the ranks holds after a backward, by category; the largest
    wire: int  # bytes that a rank sends in a step


def make_model() -> nn.Module:
    """Make a model that guesses the next letter."""
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(16 * WINDOW, 256), nn.GELU(), nn.Linear(256, 128))
    return nn.Sequential(nn.Embedding(128, 16), *layers)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Draw a rank's windows of a step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(LETTERS) - WINDOW, (BATCH,), generator=draw)
    windows = LETTERS[starts[:, None] + torch.arange(WINDOW + 1)]
    return windows[:, :-1], windows[:, -1]


def train(recipe: Recipe, steps: int, lr: float = 1e-3) -> Result:
    """Train with the step inside backward, and gradients and state sharded."""
    model = make_model().to(recipe.params)
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.scaler)
    losses = []
    with record() as group:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), AdamW, group, lr=lr, master_dtype=recipe.master
        )
        data_parallel(
            model,
            optimizer,
            reduce_dtype=recipe.reduce,
            scaler=scaler if recipe.scaler else None,
        )
        for step in range(steps):
            x, y = batch(step, dist.get_rank())
            optimizer.zero_grad()
            with (
                group.recording() as log,
                torch.autocast("cpu", recipe.autocast, enabled=recipe.autocast is not None),
            ):
                loss = cross_entropy(model(x).float(), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)  # without a scaler: optimizer.step()
                scaler.update()
            dist.all_reduce(shown := loss.detach() / dist.get_world_size())
            losses.append(shown.item())
        rows = memory_report(model, optimizer).rows
    held = {
        kind: max(r.held for r in rows if r.category == kind)
        for kind in ("parameters", "state", "master")
    }
    return Result(losses, held, int(log.wire))


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "recipe", nargs="?", choices=RECIPES, default="masters", help="(default: masters)"
    )
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    dist.init_process_group()
    result = train(RECIPES[given.recipe], given.steps)
    if dist.get_rank() == 0:
        print(
            f"{given.recipe}: loss {sum(result.losses[-10:]) / len(result.losses[-10:]):.4f},",
            end=" ",
        )
        print(f"{sum(result.bytes.values()):,} bytes held, {result.wire:,} sent in a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
