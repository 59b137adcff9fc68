"""Break a training on purpose, and read what each rank is told:

torchrun --nproc-per-node 2 debugging.py skips --timeout 5
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from zero_nb import (
    Group,
    ZeroRedundancyOptimizer,
    assert_same,
    data_parallel,
    fail,
    report_step,
    watch_divergence,
)

CULPRIT = 1  # the rank that goes wrong
STEP = 3  # in which it does, counted from 0


def make_model(width: int = 32) -> nn.Module:
    """Make a small model, the same on every rank that asks for the same width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def flip(tensor: Tensor) -> None:
    """Flip a bit of the first element, as a broken memory would: PyTorch does not notice."""
    tensor.detach().numpy().reshape(-1).view("int32")[0] ^= 1 << 10


def train(
    fault: str,  # one of `FAULTS`
    group: Any = None,  # None: all ranks
    compare: int = 0,  # updates from one comparison of the step to the next; 0: none
    steps: int = 10,
) -> str:
    """Train with the step inside backward; one rank does something wrong in one step."""
    rank = dist.get_rank()
    bad = rank == CULPRIT
    model = make_model(33 if bad and fault == "model" else 32)
    lr = 1e-2 if bad and fault == "settings" else 1e-3
    assert_same(group, {"lr": lr, "steps": steps}, "the settings")
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, group, lr=lr)
    data_parallel(model, optimizer)
    watch_divergence(model, optimizer, every=5)
    updates = 0
    for step in range(steps):
        x = torch.ones(4, 8) * (rank + step)
        if bad and step == STEP:
            if fault == "skips":
                continue
            if fault in ("raises", "raises, and tells"):
                raise ValueError("record 54 has no target")
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(3600)
            if fault == "flips":
                flip(model[0].weight)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        report_step(step=step, loss=loss, tokens=len(x))  # shown by a notebook that runs this
        updates += 1
        if compare and updates % compare == 0:
            assert_same(group, step, f"the step of update {updates}")
    return "nothing went wrong"


def telling(work: Callable[[], str], group: Any = None) -> str:
    """Let the other ranks know at once when this one leaves because of an error."""
    try:
        return work()
    except Exception as error:
        fail(Group(group), error)
        raise


FAULTS = (
    "none",
    "skips",
    "model",
    "settings",
    "raises",
    "raises, and tells",
    "killed",
    "hangs",
    "flips",
)


def attempt(fault: str, group: Any = None, compare: int = 0) -> str:
    """Train with a fault, and give what this rank is told."""
    try:
        if fault == "raises, and tells":
            return telling(lambda: train(fault, group, compare), group)
        return train(fault, group, compare)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Train as the command line says; each rank prints what it is told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "fault", nargs="?", choices=FAULTS, default="skips", help="(default: skips)"
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="of a collective, in seconds")
    parser.add_argument("--compare", type=int, default=0, help="updates between two comparisons")
    given = parser.parse_args()
    dist.init_process_group(timeout=timedelta(seconds=given.timeout))
    said = attempt(given.fault, compare=given.compare)
    print(f"rank {dist.get_rank()}: {said}\n", end="", flush=True)  # one write: ranks share a pipe


if __name__ == "__main__":
    main()
