"""Gradients in memory that other tensors have, which autograd does not copy: it takes over a tensor
that nothing else holds, and does not ask who has its memory."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from common import flatten
from common.parallel import MODES
from stream_standin import WatchedStream, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.gradient_buffers import BufferPool
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

SIZE = 32


class Added(nn.Module):
    """Adds a parameter of the same shape: its gradient is a view of what flows on to `low`."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(SIZE, SIZE, bias=False)
        self.pos = nn.ParameterList([nn.Parameter(torch.zeros(SIZE, SIZE))])

    def forward(self, x):
        return self.low(x) + self.pos[0][None]


class Summed(nn.Module):
    """Adds two parameters: the gradients of both are views of one tensor."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(SIZE, SIZE))
        self.b = nn.Parameter(torch.ones(SIZE * SIZE))
        self.low = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x):
        return self.low(x) * (self.a.view(1, SIZE, SIZE) + self.b.view(1, SIZE, SIZE))


class Plain(nn.Module):
    """Shares no gradient with anything."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)])

    def forward(self, x):
        return self.layers(x)


def made(kind, dtype=torch.float64):
    """Make a model whose gradients are small integers, so that sums are exact."""
    torch.manual_seed(0)
    model = kind().to(dtype)
    for p in model.parameters():
        p.data = torch.randint(-1, 2, p.shape).to(dtype)
    return model


def data(i, dtype=torch.float64):
    chance = torch.Generator().manual_seed(10 * i + dist.get_rank())
    return torch.randint(-1, 2, (1, SIZE, SIZE), generator=chance).to(dtype)


def attached(model, pieces=2, **setup):
    """Train with buckets of one parameter each, or of a piece of one."""
    nbytes = SIZE * SIZE * next(model.parameters()).itemsize
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=2.0**-7)
    cut = nbytes / pieces / 2**20
    return zero, data_parallel(model, zero, bucket_cap_mb=cut, cut_mb=cut, **setup)


def beside_ddp(kind, dtype, setup):
    """Give the largest difference of parameters to DDP's, after each step."""
    one, other = made(kind, dtype), made(kind, dtype)
    ddp, optim = DDP(one), SGD(one.parameters(), lr=2.0**-7)
    zero, handle = attached(other, **setup)
    apart = []
    for i in range(4):
        x = data(i, dtype)
        for model, stepped in ((ddp, optim), (other, zero)):
            (model(x) * 2).sum().backward()
            stepped.step()
            stepped.zero_grad()
        handle.wait()
        far = flatten(one.parameters()).double() - flatten(other.parameters()).double()
        apart.append(float(far.abs().max() / flatten(one.parameters()).abs().max()))
    return apart


def all_beside_ddp(kind, dtype):
    return {name: beside_ddp(kind, dtype, setup) for name, setup in MODES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Added, Summed])
@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_that_shares_memory_is_averaged_as_by_ddp(size, kind, dtype):
    limit = 0.02 if dtype is torch.bfloat16 else 1e-5
    for found in run(size, all_beside_ddp, kind, dtype):
        assert all(max(apart) < limit for apart in found.values()), found


def given():
    """Call backward with a gradient of the program's own, which is its own afterwards."""
    model = made(Added)
    zero, _ = attached(model)
    kept = []
    for i in range(3):
        gradient = torch.ones(1, SIZE, SIZE, dtype=torch.float64)
        model(data(i)).backward(gradient)
        zero.step()
        zero.zero_grad()
        kept.append(bool((gradient == 1).all()))
    return kept


def test_a_gradient_that_the_program_gives_to_backward_is_not_written():
    assert run(2, given) == [[True] * 3] * 2


def in_parts(setup):
    """Accumulate two backwards; give the difference to one backward of both."""
    one, other = made(Summed), made(Summed)
    zero, handle = attached(other, **setup)
    optim = SGD(one.parameters(), lr=2.0**-7)
    for i in range(3):
        (one(data(2 * i)) + one(data(2 * i + 1))).sum().backward()
        for p in one.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optim.step()
        optim.zero_grad()
        for k in range(2):
            with handle.no_sync() if k == 0 else contextlib.nullcontext():
                other(data(2 * i + k)).sum().backward()
        zero.step()
        zero.zero_grad()
    handle.wait()
    return float((flatten(one.parameters()) - flatten(other.parameters())).abs().max())


def all_in_parts():
    return {name: in_parts(setup) for name, setup in MODES.items()}


def test_gradients_that_have_added_up_in_one_memory_stay_apart():
    for found in run(2, all_in_parts):
        assert max(found.values()) < 1e-12, found


def buffers_of(kind, pieces):
    """Count the buffers that each backward after the first two takes for copies."""
    taken, take = [], BufferPool.take
    BufferPool.take = lambda pool, like, numel: (taken.append(numel), take(pool, like, numel))[1]
    try:
        model = made(kind)
        zero, _ = attached(model, pieces)
        for i in range(4):
            if i == 2:
                taken.clear()
            (model(data(i)) * 2).sum().backward()
            zero.step()
            zero.zero_grad()
    finally:
        BufferPool.take = take
    return len(taken)


def test_only_a_gradient_that_shares_memory_is_copied():
    pieces = (2, 4)
    for plain, added in run(
        2, lambda: [[buffers_of(k, n) for n in pieces] for k in (Plain, Added)]
    ):
        assert plain == [0, 0] and added == [2 * n for n in pieces]


class Branching(nn.Module):
    """The gradient of `pos` is a view of what flows on to `low`, to which autograd adds what comes
    from `tanh`."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(8, 8).double()
        self.pos = nn.ParameterList([nn.Parameter(torch.zeros(6, 8, dtype=torch.float64))])
        self.written = []

    def forward(self, x):
        h = self.low(x)
        h.register_hook(lambda gradient: self.written.append(gradient.data_ptr()))
        bent = h.tanh() * 3
        moved = h + self.pos[0][None]
        return moved, moved * 2, bent


def with_side_stream(world, setup):
    torch.manual_seed(0)
    model = Branching()
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    handle = data_parallel(model, zero, bucket_cap_mb=1e-5, **setup)
    handle.engine.stream = WatchedStream(world)
    return model, zero, handle


def added_to(setup):
    """Tell in which backwards autograd adds to memory that the side stream may still read; not
    with a stand-in for kernels, for then it never adds in place."""
    model, zero, handle = with_side_stream(World(), setup)
    # the stand-in's asks for the storage, and autograd does not write to one that Python knows
    handle.engine.stream.keep = lambda tensor, stream=None: None
    read = []
    model.pos[0].register_post_accumulate_grad_hook(lambda p: read.append(p.grad.data_ptr()))
    for _ in range(4):
        _, twice, bent = model(torch.ones(1, 6, 8, dtype=torch.float64))
        (twice.square().mean() + bent.square().mean()).backward()
        zero.step()
        zero.zero_grad()
    handle.wait()
    return [a == b for a, b in zip(read, model.written, strict=True)]


def test_autograd_does_not_add_to_a_gradient_that_the_side_stream_still_reads():
    for found in run(2, lambda: {name: added_to(setup) for name, setup in MODES.items()}):
        assert all(added == [False] * 4 for added in found.values()), found


def written_after(setup):
    """Write to the gradient that was given to backward, with a stand-in for streams; give its faults."""
    world = World()
    model, zero, handle = with_side_stream(world, setup)
    with world, world.networked():
        for _ in range(4):
            gradient = torch.ones(1, 6, 8, dtype=torch.float64)
            moved, _, _ = model(torch.ones(1, 6, 8, dtype=torch.float64))
            moved.backward(gradient)
            gradient.zero_()
            zero.step()
            zero.zero_grad()
        handle.wait()
    return world.faults


def test_the_gradient_given_to_backward_may_be_written_when_backward_is_over():
    for found in run(2, lambda: {name: written_after(setup) for name, setup in MODES.items()}):
        assert not any(found.values()), found
