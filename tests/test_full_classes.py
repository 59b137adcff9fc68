"""Full state dicts of classes whose state has numbers that are no tensors, by the functions of torch's FSDP,
or tensors that are larger than their parameter."""

import pytest
import torch
from test_full import Net, net_steps
from torch import nn
from torch.optim import SGD

from zero_nb.checkpoint.full import (
    full_optim_state_dict,
    full_state_dict,
    load_full_state_dict,
    shard_full_optim_state_dict,
)
from zero_nb.comm.launch import run
from zero_nb.optim import state_runs
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

TRUSTED = {"trust_optimizer_class": True, "shard": "whole"}


class Counting(SGD):
    """Keeps a count, a number and nothing beside a tensor, and steps by them."""

    def step(self, closure=None):
        super().step()
        params = [p for group in self.param_groups for p in group["params"]]
        for p in (p for p in params if p.grad is not None):
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            state["scale"] = 0.5 * state["count"]
            state["none"] = None
            p.data.mul_(1 - 1e-2 * state["scale"])


def made(model, sharded, turned):
    groups = model.groups(turned)
    for group in groups:
        del group["lr"]  # one of both is enough here
    options = {"lr": 1e-2, "momentum": 0.9}
    if sharded:
        return ZeroRedundancyOptimizer(groups, Counting, **TRUSTED, **options)
    return Counting(groups, **options)


def save(path, sharded, by_name):
    model = Net()
    optimizer = made(model, sharded, False)
    net_steps(model, optimizer, 0)
    full = full_optim_state_dict(model, optimizer, model.groups(False), by_name)
    if full:
        torch.save({"model": model.state_dict(), "optimizer": full}, path)
    return net_steps(model, optimizer, 1)


def load(path, sharded):
    model = Net()
    optimizer = made(model, sharded, True)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    full = shard_full_optim_state_dict(saved["optimizer"], model, model.groups(True))
    optimizer.load_state_dict(full)
    return full, net_steps(model, optimizer, 1)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)], ids=str)
def test_fsdps_functions_bring_what_is_no_tensor(folder, ways, by_name):
    [wanted, *_] = run(3, save, folder / "net.pt", ways[0], by_name)
    for full, got in run(2, load, folder / "net.pt", ways[1]):
        for state in full["state"].values():
            assert (state["count"], state["scale"], state["none"]) == (3, 1.5, None)
            assert state["momentum_buffer"].dim()
        assert all(
            torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(wanted, got, strict=True)
        )


class Gram(torch.optim.Optimizer):
    """Keeps a square matrix for each parameter, as Shampoo and SOAP do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        for p in (p for p in params if p.grad is not None):
            gram = self.state[p].setdefault("gram", torch.zeros(len(p), len(p)))
            gram.addmm_(p.grad, p.grad.T)
            p.sub_(p.grad, alpha=0.1)


def saved_in_parts(path):
    """Bring state together in messages that hold all of a parameter, and a part of its state."""
    state_runs.MESSAGE = state_runs._ALONE = 400  # bytes: 100 elements
    params = [nn.Parameter(torch.ones(shape)) for shape in ((20, 3), (11, 0), (30, 2), (4, 4))]
    zero = ZeroRedundancyOptimizer(params, Gram)
    for i, p in enumerate(params):
        p.grad = torch.arange(p.numel()).view_as(p) + i + 1.0
    zero.step()
    wanted = [p.grad @ p.grad.T for p in params]
    full_state_dict(zero, path)
    zero.consolidate_state_dict(None)
    found = [zero.state_dict(), full_state_dict(zero, None), torch.load(path)]
    with zero.giving_state_dicts("full"):
        zero.step()  # of which nothing is consolidated yet
        found.append(zero.state_dict())
    load_full_state_dict(zero, path)
    found.append(full_state_dict(zero, None))
    for full, steps in zip(found, (1, 1, 1, 2, 1), strict=True):
        for i, gram in enumerate(wanted):
            assert torch.equal(full["state"][i]["gram"], steps * gram), (i, steps)


@pytest.mark.parametrize("size", [1, 2])
def test_state_that_is_larger_than_its_parameter_and_than_a_message_is_saved(folder, size):
    """The second message began behind the parameter's last element, and the save ended the job."""
    run(size, saved_in_parts, folder / "gram.pt", timeout=60)
