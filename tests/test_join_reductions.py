"""Join: what DDP sends because of a forward before the block, and in a block inside another."""

import pytest
import torch
import torch.distributed as dist
from common import flatten
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def generator_and_critic(size):
    """Warm up two models, one through the other, and train the second in a block, on rank 0 alone."""
    torch.manual_seed(0)
    first = DDP(nn.Linear(2, 2, bias=False).double())
    second = DDP(nn.Linear(2, size, bias=False).double())
    params = [*first.parameters(), *second.parameters()]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    x = torch.ones(1, 2, dtype=torch.float64)
    for _ in range(2):
        second(first(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    start = [p.detach().clone() for p in params]
    second(first(x))
    with Join([first, second, optimizer]):
        for _ in range(1 - dist.get_rank()):
            with second.no_sync():
                second(first(x)).sum().backward()
            optimizer.step()
    return start, [p.detach().clone() for p in params]


@pytest.mark.parametrize("size", [2, 3])  # of the second model; the first one's is 2
def test_the_reduction_of_one_model_is_announced_before_that_of_the_next(size):
    for start, trained in run(2, generator_and_critic, size, timeout=30):
        weights = [w.clone().requires_grad_() for w in start]
        x = torch.ones(1, 2, dtype=torch.float64)
        (x @ weights[0].T @ weights[1].T).sum().backward()
        for w, found in zip(weights, trained, strict=True):  # one of two ranks has data
            torch.testing.assert_close(found, w.detach() - 0.1 * w.grad / 2, rtol=1e-9, atol=1e-12)


def waits_in_backward(interleaved, layers):
    """Train an iteration in a block, on rank 0 alone, whose forward came before the block."""
    torch.manual_seed(0)
    # a bucket for each parameter
    net = nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(layers)])
    model = DDP(net, bucket_cap_mb=1e-5)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    overlap(model, optimizer, interleaved=interleaved)
    x = torch.ones(1, 4, dtype=torch.float64)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
    start = [p.detach().clone() for p in net.parameters()]
    loss = model(x).sum()
    with Join([model, optimizer]):
        if dist.get_rank() == 0:
            loss.backward()
            optimizer.step()
    return start, flatten(net)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_step_in_the_middle_of_backward_does_not_wait_for_ranks_that_heard_nothing(interleaved):
    for start, trained in run(2, waits_in_backward, interleaved, 5, timeout=30):
        net = nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(5)])
        with torch.no_grad():
            for p, value in zip(net.parameters(), start, strict=True):
                p.copy_(value)
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        wanted = torch.cat([(p - 0.1 * p.grad / 2).detach().flatten() for p in net.parameters()])
        torch.testing.assert_close(trained, wanted, rtol=1e-9, atol=1e-12)


class Branches(nn.Module):
    """Uses one of two weights."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (nn.Linear(1, 1, bias=False).double() for _ in range(2))
        for weight in self.parameters():
            nn.init.ones_(weight)

    def forward(self, x):
        return self.used(x)


def accumulates_with_unused(warm_up):
    """Accumulate after a forward that DDP expects a reduction for, in the overlap, on rank 0 alone."""
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    overlap(model, optimizer)
    x = torch.ones(1, 1, dtype=torch.float64)
    if warm_up == "before":
        model(x)
    with Join([model, optimizer]):
        for _ in range(1 - dist.get_rank()):
            if warm_up == "inside":
                model(x)
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
    return flatten(model.module)


@pytest.mark.parametrize("warm_up", ["", "inside", "before"])
def test_unused_parameters_are_looked_for_on_all_ranks_in_an_accumulation(warm_up):
    for trained in run(2, accumulates_with_unused, warm_up, timeout=30):
        # two gradients of 1, halved, by a rate of 0.1
        torch.testing.assert_close(trained, torch.tensor([0.9, 1.0], dtype=torch.float64))


def forward_before_an_empty_block(settled):
    """Leave a forward without a backward, then a block in which rank 1 has no batch; gradients after it."""
    model = DDP(nn.Linear(1, 1, bias=False).double())
    x = torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64)
    for _ in range(2 * settled):
        model(x).sum().backward()
    model(x)
    with Join([model]):
        if dist.get_rank() == 0:
            model(x).sum().backward()
    model.zero_grad()
    found = []
    for _ in range(2):
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        found.append(model.module.weight.grad.item())
        model.zero_grad()
    return found


@pytest.mark.parametrize("settled", [False, True])
def test_a_rank_without_a_batch_ends_a_block_with_what_the_others_expect(settled):
    # two gradients of 1 and of 2: 3 on average
    assert run(2, forward_before_an_empty_block, settled, timeout=30) == [[3.0, 3.0]] * 2


def nested(depth):
    """Count batches by a buffer, in blocks inside blocks; what DDP's option is in the end."""
    model = DDP(nn.BatchNorm1d(2))
    seen = []

    def train():
        for _ in range(3 - 2 * dist.get_rank()):
            model(torch.ones(4, 2)).sum().backward()

    def enter(left):
        with Join([model]):
            enter(left - 1) if left > 1 else train()
        seen.append(int(model.module.num_batches_tracked))

    enter(depth)
    return seen, model.broadcast_buffers, getattr(model, "forward_sync_buffers", True)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_inside_blocks_send_buffers(depth):
    assert run(2, nested, depth, timeout=30) == [([3] * depth, True, True)] * 2


def two_in_one():
    """Train in two blocks inside one, and between them."""
    model = DDP(nn.BatchNorm1d(2))
    with Join([model]):
        for _ in range(2):
            with Join([model]):
                for _ in range(3 - 2 * dist.get_rank()):
                    model(torch.ones(4, 2)).sum().backward()
            model(torch.ones(4, 2)).sum().backward()
    return int(model.module.num_batches_tracked)


def test_a_block_sends_buffers_again_after_one_inside_it():
    assert run(2, two_in_one, timeout=30) == [8, 8]
