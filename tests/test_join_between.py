"""Join: options of DDP, steps inside backward and checkpoints of activations beside what ranks without data follow."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.join import Join, Joinable, JoinHook
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def with_static_graph(lengths):
    """Train with a static graph in which DDP is to find unused parameters, which it does by itself."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    options = {"static_graph": True, "find_unused_parameters": True}
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=1e-6, **options)
    with Join([model]):
        for _ in range(lengths[dist.get_rank()]):
            model.zero_grad()
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    return [p.grad.item() for p in model.parameters()]


@pytest.mark.parametrize("lengths", [(1, 4), (2, 4)])
def test_a_static_graph_brings_buckets_into_another_order_on_all_ranks(lengths):
    assert run(2, with_static_graph, lengths, timeout=30) == [[0.5, 0.5]] * 2


class Counter(Joinable):
    """Counts the ranks that have data, and announces nothing."""

    announces_iterations = False
    join_device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.found = []

    @property
    def join_process_group(self):
        return dist.group.WORLD

    def count(self, number):
        ranks = torch.tensor([number])
        dist.all_reduce(ranks)
        return int(ranks)

    def join_hook(self, **_):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                counter.count(0)

        return Hook()


def counts(drives):
    """Count ranks after each step; what a rank with data finds."""
    model = DDP(nn.Linear(1, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    if drives:
        overlap(model, optimizer)
    counter = Counter()
    found = []
    with Join([model, optimizer, counter]):
        for _ in range((1, 3)[dist.get_rank()]):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(counter.count(1))
    return found


@pytest.mark.parametrize("drives", [False, True])
def test_what_follows_an_optimizer_follows_a_step_inside_backward(drives):
    assert run(2, counts, drives, timeout=30) == [[2], [2, 1, 1]]
