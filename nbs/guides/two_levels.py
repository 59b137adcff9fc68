"""Shard inside each node, replicate across nodes, and count what travels where:

torchrun --nproc-per-node 4 two_levels.py --per-node 2

Between real nodes, leave --per-node out: it is the number of ranks that torchrun starts on each.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, data_parallel, record, two_level
from zero_nb.comm.groups import Group
from zero_nb.comm.subgroups import TwoLevel


def make_model(width: int = 256) -> nn.Sequential:
    """Make the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def record_one_level(per_node: int):
    """Give a group of all ranks, and the bytes that this rank sends in it: inside its node, across."""
    group = record()
    send = group.send
    sent = [0, 0]

    def counted(tensors, peer, tag):
        sent[peer // per_node != dist.get_rank() // per_node] += sum(t.nbytes for t in tensors)
        return send(tensors, peer, tag)

    group.send = counted

    def clear() -> None:
        sent[:] = 0, 0

    return group, lambda: list(sent), clear


def record_two_levels(per_node: int):
    """Give the groups of `two_level(per_node)`, and the bytes that this rank sends in each."""
    groups = [record(level.process_group) for level in two_level(per_node)]

    def clear() -> None:
        for group in groups:
            group.log.clear()

    return TwoLevel(*map(Group, groups)), lambda: [int(g.log.wire) for g in groups], clear


def train(per_node: int, levels: bool = True, steps: int = 3, width: int = 256):
    """Train; gives the loss, this rank's bytes of state, and those a step sends inside and across."""
    os.environ["ZERO_NB_MEMORY"] = "0"  # send messages, that can be counted
    make_group = record_two_levels if levels else record_one_level
    group, count, clear = make_group(per_node)  # without the counting: group = two_level(per_node)
    model = make_model(width)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=1e-3)
    data_parallel(model, optimizer)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        clear()
        x = torch.randn(16, width, generator=data)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    inside, across = count()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    state = sum(v.nbytes for kept in optimizer.optim.state.values() for v in kept.values())
    return mean.item(), state, inside, across


def main() -> None:
    """Compare one level with two, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-node", type=int, default=int(os.environ["LOCAL_WORLD_SIZE"]))
    parser.add_argument("--width", type=int, default=256, help="of the layers (default: 256)")
    given = parser.parse_args()
    dist.init_process_group()
    for name, levels in (("one level", False), ("two levels", True)):
        loss, state, inside, across = train(given.per_node, levels, width=given.width)
        if dist.get_rank() == 0:
            print(f"{name:<10}  loss {loss:.6f}  state {state:,} B", end="")
            print(f"  sent inside the node {inside:,} B, across {across:,} B")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
