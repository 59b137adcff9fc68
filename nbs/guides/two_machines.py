"""Measure what crosses the link between machines in a step, and whether the link is the limit. On both machines:

torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
    --rdzv-id=job two_machines.py --mbit 1000
"""

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, data_parallel, overlap

MODES = ("ddp", "zero1", "zero1-overlap", "zero2")


def make_model(width: int) -> nn.Module:
    """Make four square layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def attach(model: nn.Module, mode: str) -> tuple[nn.Module, Any]:
    """Give what is called, and its optimizer."""
    if mode == "zero2":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)
        data_parallel(model, optimizer)
        return model, optimizer
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if mode == "ddp":
        return ddp, AdamW(ddp.parameters(), lr=1e-3, fused=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-3)
    if mode == "zero1-overlap":
        overlap(ddp, optimizer)
    return ddp, optimizer


def sent_bytes() -> int:
    """Count what this machine has sent by the interface that gloo was told to use; 0: not known."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    counter = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return int(counter.read_text()) if name and counter.exists() else 0


def measure(step: Callable[[], object], steps: int) -> tuple[float, int]:
    """Give the seconds of a step, and the bytes this machine sends in it; medians."""
    seconds = []
    sent = []
    for _ in range(steps + 2):
        dist.barrier()
        time.sleep(0.05)  # the last acknowledgements of the barrier
        before = sent_bytes()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        dist.barrier()
        time.sleep(0.05)
        sent.append(sent_bytes() - before)
    return statistics.median(seconds[2:]), int(statistics.median(sent[2:]))


def stepping(call: nn.Module, optimizer: Any, width: int, batch: int) -> Callable[[], None]:
    """Give a function that takes a step."""
    x = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()

    return step


def compare(width: int, batch: int, steps: int) -> dict[str, Any]:
    """Measure each mode, and a step that sends nothing."""
    model = make_model(width)
    alone = stepping(model, AdamW(model.parameters(), lr=1e-3, fused=True), width, batch)
    found = {"nothing sent": measure(alone, steps)}
    for mode in MODES:
        call, optimizer = attach(make_model(width), mode)
        found[mode] = measure(stepping(call, optimizer, width, batch), steps)
    size = 4 * sum(p.numel() for p in model.parameters())
    return {"bytes of the parameters": size, "ranks": dist.get_world_size(), "found": found}


def table(said: dict[str, Any], mbit: float) -> str:
    """Set out what was measured; mbit is the rate of the link in Mbit/s, 0 if it is not known."""
    lines = [f"{said['ranks']} ranks", f"{'':14}  seconds  sent / parameters  link in use"]
    for name, (seconds, sent) in said["found"].items():
        share = sent / said["bytes of the parameters"]
        used = f"{100 * 8 * sent / seconds / (mbit * 1e6):9.0f} %" if mbit and sent else ""
        lines.append(f"{name:14}  {seconds:7.3f}  {share:17.2f}  {used}".rstrip())
    return "\n".join(lines)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1000, help="of the layers")
    parser.add_argument("--batch", type=int, default=64, help="rows of a rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=0, help="rate of the link, in Mbit/s")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("zero_nb").setLevel(logging.INFO)  # rank 0 says which transport is used
    torch.set_num_threads(1)
    dist.init_process_group()
    said = compare(given.width, given.batch, given.steps)
    if dist.get_rank() == 0:
        print(table(said, given.mbit), flush=True)
        if given.out:
            given.out.write_text(json.dumps({**said, "mbit": given.mbit}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
