"""Classes that free or zero gradients in their own `step`, in loops that do not."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Frees(SGD):
    """Frees each gradient as soon as it was used."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
        return loss


class Clears(AdamW):
    """Leaves no gradient behind."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad()
        return loss


class Zeroes(SGD):
    """Leaves zeros behind."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad(set_to_none=False)
        return loss


class InTurns(SGD):
    """Frees gradients in every second step, and leaves them to the next one."""

    steps = 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            self.zero_grad()
        return loss


KINDS = {kind.__name__: kind for kind in (Frees, Clears, Zeroes, InTurns)}


def network():
    torch.manual_seed(0)
    layers = nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 4)
    return nn.Sequential(*layers)


def batches(count):
    chance = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(5, 12, generator=chance) for _ in range(count)]


def train(make, passes=1, views=False):
    """Train without a call of `zero_grad`; give the parameters, and which gradients are left."""
    model = network()
    ddp = DDP(model, gradient_as_bucket_view=views)
    optimizer = make(model)
    for i, x in enumerate(batches(6 * passes), 1):
        ddp.require_backward_grad_sync = i % passes == 0
        ddp(x).square().mean().backward()
        if i % passes == 0:
            optimizer.step()
    left = [p.grad is None or not p.grad.any().item() for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()], left


def unsharded(kind, model):
    return kind(model.parameters(), lr=0.1)


def sharded(kind, options, model):
    return ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1, **options)


def beside_unsharded(name, ways, **loop):
    """Give the ways in which sharded and unsharded training end otherwise."""
    wanted, left = train(partial(unsharded, KINDS[name]), **loop)
    apart = []
    for way in ways:
        got, ours = train(partial(sharded, KINDS[name], way), **loop)
        close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
        if not close or ours != left:
            apart.append((way, ours))
    return apart


def by_groups(kind, how, model):
    """Make an optimizer with groups of which some ranks own nothing."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": weights[:1]}, {"params": others}, {"params": weights[1:], "lr": 0.05}]
    if how == "unsharded":
        return kind(groups, lr=0.1)
    group = two_level(dist.get_world_size() // 2) if how == "two levels" else None
    return ZeroRedundancyOptimizer(groups, kind, group, lr=0.1)


def groups_beside_unsharded(name, hows):
    """Give the ways in which groups that some ranks own nothing of end otherwise."""
    wanted = train(partial(by_groups, KINDS[name], "unsharded"))
    found = {how: train(partial(by_groups, KINDS[name], how)) for how in hows}
    return [
        how
        for how, (got, left) in found.items()
        if left != wanted[1]
        or not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted[0], strict=True))
    ]


WAYS = [
    *({"shard": shard} for shard in ("auto", "even", "whole", "greedy")),
    {"parameters_as_bucket_view": True},
    {"shard": "even", "parameters_as_bucket_view": True},
    {"trust_optimizer_class": True},
    {"master_dtype": torch.float64},
    {"shard": "even", "master_dtype": torch.float64},
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", (2, 3))
def test_gradients_that_a_class_frees_or_zeroes_are_gone_on_all_ranks(ranks, name):
    ways = [way for way in WAYS if "trust_optimizer_class" not in way or name != "Zeroes"]
    assert run(ranks, beside_unsharded, name, ways) == [[]] * ranks


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("loop", ({"passes": 2}, {"views": True}), ids=str)
def test_the_same_with_accumulation_and_with_views_of_ddps_buckets(name, loop):
    ways = [{"shard": "auto"}, {"shard": "even"}]
    assert run(2, partial(beside_unsharded, **loop), name, ways) == [[]] * 2


@pytest.mark.parametrize("name", ("Frees", "Clears", "Zeroes"))
def test_the_same_where_a_rank_owns_nothing_of_a_group(name):
    assert run(3, groups_beside_unsharded, name, ["one level"]) == [[]] * 3
    assert run(4, groups_beside_unsharded, name, ["one level", "two levels"]) == [[]] * 4


def in_backward(interleaved, plain_module):
    """Train with steps inside backward; give whether the parameters are those of unsharded training."""
    wanted, _ = train(partial(unsharded, Frees))
    model = network()
    zero = ZeroRedundancyOptimizer(model.parameters(), Frees, lr=0.1)
    forward = model if plain_module else DDP(model)
    handle = (
        data_parallel(model, zero)
        if plain_module
        else overlap(forward, zero, interleaved=interleaved)
    )
    for x in batches(6):
        forward(x).square().mean().backward()
        zero.step()
    handle.detach()
    got = model.parameters()
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("how", ((False, False), (True, False), (False, True)), ids=str)
def test_such_a_class_steps_inside_backward(how):
    assert run(2, in_backward, *how) == [True, True]


def without_data():
    """Train with less data on rank 1; give whether all parameters are those of a loop that zeroes."""
    found = []
    for kind in (Frees, SGD):
        model = network()
        ddp = DDP(model)
        zero = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1)
        with Join([ddp, zero]):
            for x in batches(6 - 2 * dist.get_rank()):
                if kind is SGD:
                    zero.zero_grad()
                ddp(x).square().mean().backward()
                zero.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


def test_a_rank_without_data_frees_them_as_well():
    assert run(2, without_data) == [True, True]


def applies():
    """Apply a function to a gradient that a step inside backward has freed."""
    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    data_parallel(model, zero)
    model(torch.ones(2, 4)).sum().backward()
    return caught(lambda: model.weight.grad.apply_(lambda value: value))


def test_a_function_is_not_applied_to_a_gradient_that_is_gone():
    for said in run(2, applies):
        assert said and "this gradient is gone" in said
