"""Join: programs that call backward, no_sync, autograd.grad and forwards alone in any order, through one
model or several: what one process makes of the union of the data."""

import random

import pytest
import torch
import torch.distributed as dist
from common import flatten
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

QUIET = ("forward", "evaluate", "grad")  # calls that add to no gradient
KINDS = ("ddp", "ddp", "ddp unused", "overlap", "overlap unused", "data_parallel")


def loss_of(model, x, call):
    """Give the loss of a batch; some of it is a gradient, which a second backward goes through."""
    if call == "penalty":
        x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    if call == "penalty":
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
    if call == "meta":
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return sum(grad.square().sum() for grad in grads)
    return loss


class Program:
    """Models, and what the loops of all ranks call in two blocks."""

    def __init__(self, seed, size):
        self.chance = random.Random(seed)
        self.size = size
        self.seed = seed
        torch.manual_seed(seed)
        self.kind = self.chance.choice(KINDS)
        self.drives = not self.kind.startswith("ddp")
        count = 1 if self.drives else self.chance.choice([1, 1, 2, 3])
        self.nets = [
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
            for _ in range(count)
        ]
        self.by = self.chance.choice(["world_size", "active", "samples"])
        self.cap = self.chance.choice([25, 1e-5])  # MB of a bucket
        self.samples = [self.chance.randint(1, 4) for _ in range(size)]
        self.blocks = [self.lengths([0, 1, 2, 4]), self.lengths([1, 3])]
        self.iterations = [self.iteration() for _ in range(4)]
        # before each block, on all ranks: what DDP expects after them, it does not tell
        self.warm_up = [self.chance.choice(["", "forward", "evaluate"]) for _ in range(2)]

    def lengths(self, choices):
        """Choose how many batches each rank has, not all the same."""
        found = [self.chance.choice(choices) for _ in range(self.size)]
        return found if len(set(found)) > 1 else self.lengths(choices)

    def iteration(self):
        """Choose calls for each model, and whether the models step."""
        quiet = self.chance.random() < 0.2
        return [(self.calls(quiet), quiet) for _ in self.nets]

    def calls(self, quiet):
        # after a forward that expects a reduction, DDP reduces in the next backward, under no_sync too
        before = [*QUIET] if quiet else [*QUIET, "local"]
        calls = [self.chance.choice(before) for _ in range(self.chance.randint(0, 3))]
        return calls if quiet else [*calls, self.chance.choice(["backward", "penalty", "meta"])]

    def batch(self, block, iteration, rank):
        number = ((self.seed * 2 + block) * 10 + iteration) * 10 + rank
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.samples[rank], 3, dtype=torch.float64, generator=generator)

    def params(self):
        return torch.cat([flatten(net) for net in self.nets])

    def alone(self):
        """Train one process on the union of the data."""
        optimizers = [SGD(net.parameters(), lr=0.1, momentum=0.9) for net in self.nets]
        for number, lengths in enumerate(self.blocks):
            for k in range(max(lengths)):
                there = [rank for rank, n in enumerate(lengths) if n > k]
                weights = {
                    "world_size": dict.fromkeys(there, 1 / self.size),
                    "active": dict.fromkeys(there, 1 / len(there)),
                    "samples": {
                        r: self.samples[r] / sum(self.samples[s] for s in there) for r in there
                    },
                }[self.by]
                batches = [(self.batch(number, k, rank), weights[rank]) for rank in there]
                for net, optimizer, (calls, quiet) in zip(
                    self.nets, optimizers, self.iterations[k], strict=True
                ):
                    for call in calls:
                        if call not in QUIET:
                            loss = sum(loss_of(net, x, call) * weight for x, weight in batches)
                            loss.backward()
                    if not quiet:
                        optimizer.step()
                        optimizer.zero_grad()
        return self.params()


class Trained(Program):
    """The same on several ranks."""

    def wrap(self, net):
        """Give the model to call, the joinable that it is, and its optimizer."""
        if self.drives:
            optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1, momentum=0.9)
        else:
            optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        if self.kind == "data_parallel":
            return net, data_parallel(net, optimizer, bucket_cap_mb=self.cap), optimizer
        unused = self.kind.endswith("unused")
        model = DDP(net, bucket_cap_mb=self.cap, find_unused_parameters=unused)
        if self.drives:
            overlap(model, optimizer)
        return model, model, optimizer

    def play(self):
        """Train in two blocks; the largest error of the gradients that were only asked for."""
        rank = dist.get_rank()
        wrapped = [self.wrap(net) for net in self.nets]
        joinables = [joinable for _, joinable, _ in wrapped]
        joinables += [optimizer for _, _, optimizer in wrapped]
        error = 0.0
        for number, lengths in enumerate(self.blocks):
            for model, joinable, _ in wrapped:
                x = self.batch(number, 9, rank)
                self.train(model, joinable, None, x, [self.warm_up[number]], True)
            with Join(joinables, divide_by=self.by):
                for k in range(lengths[rank]):
                    x = self.batch(number, k, rank)
                    for each, iteration in zip(wrapped, self.iterations[k], strict=True):
                        error = max(error, self.train(*each, x, *iteration))
        return self.params(), error

    def train(self, model, joinable, optimizer, x, calls, quiet):
        error = 0.0
        for call in calls:
            if call == "evaluate":
                with torch.no_grad():
                    model(x)
            elif not call:
                continue
            elif call == "forward":
                model(x)
            elif call == "grad":
                error = max(error, self.gradient_error(model, x))
            elif call == "local":
                with joinable.no_sync():
                    loss_of(model, x, call).backward()
            else:
                loss_of(model, x, call).backward()
        if not quiet:
            optimizer.step()
            optimizer.zero_grad()
        return error

    def gradient_error(self, model, x):
        """Compare gradients that are asked for with those of a model that no other rank trains."""
        twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        params = list(model.parameters())
        with torch.no_grad():
            for mine, trained in zip(twin.parameters(), params, strict=True):
                mine.copy_(trained)
        wanted = torch.autograd.grad(loss_of(twin, x, "grad"), list(twin.parameters()))
        found = torch.autograd.grad(loss_of(model, x, "grad"), params)
        pairs = zip(found, wanted, strict=True)
        return max((one - other).abs().max().item() for one, other in pairs)


def forward_at_last(unused):
    """End a block with a forward alone, and train all ranks under `no_sync`; gradients after each."""
    model = DDP(nn.Linear(1, 1, bias=False), find_unused_parameters=unused)
    nn.init.ones_(model.module.weight)
    found = []
    with Join([model]):
        for _ in range((1, 3)[dist.get_rank()]):
            model(torch.ones(1, 1)).sum().backward()
        model(torch.ones(1, 1))
        if dist.get_rank():
            model(torch.ones(1, 1)).sum().backward()
            model(torch.ones(1, 1))
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.full((1, 1), 2.0 + dist.get_rank())).sum().backward()
        found.append(model.module.weight.grad.item())
        model(torch.ones(1, 1)).sum().backward()
    return found


@pytest.mark.parametrize("unused", [False, True])
def test_a_forward_at_the_end_of_a_block_is_expected_by_all_ranks_or_by_none(unused):
    first, second = run(2, forward_at_last, unused, timeout=30)
    # DDP reduces in the backward that follows a forward, under no_sync too
    assert (first[0], second[0]) in [(2.0, 3.0), (2.5, 2.5)]
    assert (first[1], second[1]) == (2.0, 3.0)


def forward_before(drives, trained):
    """Warm up, or train and warm up, then accumulate in a block in which the last rank has no batch."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 2).double())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    if drives:
        overlap(model, optimizer)
    x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64)
    for _ in range(trained):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = flatten(model).clone()
    model(x)
    with Join([model, optimizer]):
        for _ in range(0 if rank == dist.get_world_size() - 1 else 2):
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return flatten(model) - before


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("drives", [False, True])
def test_a_forward_before_a_block_is_followed_by_a_rank_without_data(drives, trained, size):
    # the gradient of a sum by a weight is its input, twice in a batch; two backwards a step, two steps
    inputs = sum(range(1, size)) / size
    wanted = -0.1 * 2 * 2 * 2 * torch.tensor([inputs] * 6 + [(size - 1) / size] * 2)
    for moved in run(size, forward_before, drives, trained, timeout=30):
        torch.testing.assert_close(moved, wanted.double(), rtol=1e-6, atol=1e-12)


def play(seeds, size):
    return [Trained(seed, size).play() for seed in seeds]


@pytest.mark.turns(4)
@pytest.mark.parametrize("first", range(0, 48, 12))
@pytest.mark.parametrize("size", [2, 3])
def test_any_program_in_a_block_ends_where_one_process_ends(size, first):
    seeds = range(first + 100 * size, first + 100 * size + 12)
    ranks = run(size, play, seeds, size, timeout=120)
    for i, seed in enumerate(seeds):
        program = Program(seed, size)
        wanted = program.alone()
        for rank in ranks:
            params, error = rank[i]
            assert (params - wanted).abs().max() < 1e-12, (seed, vars(program))
            assert error < 1e-12, (seed, "autograd.grad", vars(program))
