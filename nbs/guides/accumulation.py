"""Train in any mode, with accumulated and clipped gradients, recomputed activations, a compiled model:

torchrun --nproc-per-node 2 accumulation.py --mode zero2 --accumulate 4 --clip 1 --recompute
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from zero_nb import ZeroRedundancyOptimizer, data_parallel, overlap

WINDOW = 16  # letters that are read to tell the next one
BATCH = 16  # windows of a rank in a backward
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
LETTERS = TEXT.clamp(max=127).long()
MODES = ("zero1", "zero1-overlap", "zero2")


class Block(nn.Module):
    """A residual block, whose activations may be recomputed in backward in the place of being kept."""

    def __init__(self, width: int, recompute: bool):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:  # x and the result: (batch, width)
        """Add to x what the layers make of it."""
        if self.recompute:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)


def make_model(recompute: bool = False, width: int = 64, blocks: int = 4) -> nn.Module:
    """Make a model that guesses the next letter."""
    torch.manual_seed(0)
    start = (nn.Embedding(128, width // WINDOW), nn.Flatten())
    inner = [Block(width, recompute) for _ in range(blocks)]
    return nn.Sequential(*start, *inner, nn.Linear(width, 128))


def batch(step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    """Draw a rank's windows of a part of a step."""
    draw = torch.Generator().manual_seed(10000 * step + 100 * part + rank)
    starts = torch.randint(len(LETTERS) - WINDOW, (BATCH,), generator=draw)
    windows = LETTERS[starts[:, None] + torch.arange(WINDOW + 1)]
    return windows[:, :-1], windows[:, -1]


@dataclass
class Run:
    """What a training came to."""

    losses: list[float] = field(default_factory=list)  # of this rank, of each step
    norms: list[float] = field(default_factory=list)  # of the gradient before it was clipped
    params: Tensor = field(default_factory=lambda: torch.empty(0))  # at the end


def attach(model: nn.Module, mode: str, clip: float | None, group: Any) -> tuple[Any, Any, Any]:
    """Give what is called, its optimizer, and the handle of the mode (None: it has none)."""
    call = model
    if mode != "zero2":
        call = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=3e-3)
    if mode == "zero1":
        return call, optimizer, None
    drive: Callable[..., Any] = data_parallel if mode == "zero2" else overlap
    return call, optimizer, drive(call, optimizer, max_grad_norm=clip)


def train(
    mode: str = "zero1",  # one of `MODES`
    steps: int = 10,
    accumulate: int = 1,  # backwards in a step
    clip: float | None = None,  # largest norm of the gradient
    recompute: bool = False,
    backend: str = "",  # of torch.compile; "": do not compile
    group: Any = None,  # None: all ranks
) -> Run:
    """Train sharded."""
    model = make_model(recompute)
    call, optimizer, handle = attach(model, mode, clip, group)
    compiled = torch.compile(call, backend=backend) if backend else call
    found = Run()
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(step, part, dist.get_rank())
            last = part == accumulate - 1
            # the handle of data_parallel has no_sync as DDP has
            with nullcontext() if last else (handle if mode == "zero2" else call).no_sync():
                loss = cross_entropy(compiled(x), y) / accumulate
                loss.backward()
        if clip is not None:  # with a handle, backward has clipped
            norm = handle.grad_norm if handle else clip_grad_norm_(model.parameters(), clip)
            found.norms.append(float(norm))
        optimizer.step()
        found.losses.append(accumulate * loss.item())
    found.params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return found


def train_alone(ranks: int, steps: int = 10, accumulate: int = 1, clip: float | None = None) -> Run:
    """Train unsharded in one process, with the data of all ranks."""
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    found = Run()
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(step, part, rank) for part in range(accumulate) for rank in range(ranks)]
        loss = cross_entropy(
            model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])
        )
        loss.backward()
        if clip is not None:
            found.norms.append(clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        found.losses.append(loss.item())
    found.params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return found


def main() -> None:
    """Train as the command line says, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="zero1")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1, help="backwards in a step")
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--recompute", action="store_true", help="activations, in backward")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="such as inductor")
    given = parser.parse_args()
    dist.init_process_group()
    told = given.steps, given.accumulate, given.clip
    found = train(given.mode, *told, given.recompute, given.compile)
    gap = (found.params - train_alone(dist.get_world_size(), *told).params).abs().max().item()
    if dist.get_rank() == 0:
        print(f"{given.mode}: loss {found.losses[-1]:.4f}, {gap:.0e} from one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
