"""Full state dicts of a class whose state has numbers that are no tensors, by the functions of torch's FSDP."""

import pytest
import torch
from test_full import Net, net_steps
from torch.optim import SGD

from zero_nb.checkpoint.full import full_optim_state_dict, shard_full_optim_state_dict
from zero_nb.comm.launch import run
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
