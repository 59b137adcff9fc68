"""Join: options of DDP, steps inside backward and checkpoints of activations beside what ranks without data follow."""

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.join import Join, Joinable, JoinHook
from zero_nb.join.own_joinables import shadowed_by
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


def add_nothing(_):
    dist.all_reduce(torch.zeros(4))


class Shifted(nn.Module):
    """Subtracts the sum over all ranks."""

    @shadowed_by(add_nothing)
    def forward(self, x):
        total = x.detach().sum(0)
        dist.all_reduce(total)
        return x - total


class Recomputed(nn.Module):
    """Runs a module that sends again inside backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shifted = Shifted()
        self.reentrant = reentrant

    def forward(self, x):
        def shift(x):
            return self.shifted(x).tanh()

        return self.last(checkpoint(shift, self.first(x), use_reentrant=self.reentrant))


def recomputes(reentrant, policy, lengths):
    model = DDP(Recomputed(reentrant), bucket_cap_mb=1e-6)
    done = []

    def train():
        with Join([model], policy=policy):
            for _ in range(lengths[dist.get_rank()]):
                model.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                done.append(1)

    return caught_error(train), len(done)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_sends_inside_backward_cannot_be_followed(reentrant):
    for error, _ in run(2, recomputes, reentrant, "shadow", (1, 3), timeout=30):
        assert error is not None and error[0] == "RuntimeError"
        assert "Shifted" in error[1] and "checkpoint" in error[1]
    ranks = run(2, recomputes, reentrant, "stop", (1, 3), timeout=30)
    assert ranks == [(None, 1), (None, 1)]
