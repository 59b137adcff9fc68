"""Lightning and Fabric give a wrapper that imitates its optimizer's class: what is asked of it is the optimizer's."""

import importlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.checkpoint.full import full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.verify.memory import memory_report

KINDS = {
    "pytorch_lightning.core.optimizer": "LightningOptimizer",
    "lightning_fabric.wrappers": "_FabricOptimizer",
}


class Direct:
    """Steps as a strategy of Lightning and of Fabric does, without their other parts."""

    def optimizer_step(self, optimizer, closure=None):
        return optimizer.step(closure)

    def get_optimizer_state(self, optimizer):
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if dist.get_rank() == 0 else {}


def wrap(place, zero):
    kind = getattr(importlib.import_module(place), KINDS[place])
    if place == "lightning_fabric.wrappers":
        return kind(zero, Direct())
    wrapper = kind(zero)
    wrapper._strategy = Direct()
    return wrapper


def stepped(place, steps=3, overlapped=False):
    """Train through a wrapper; give the model, the optimizer and its wrapper."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=0.1)
    ddp = DistributedDataParallel(net)
    wrapper = wrap(place, zero) if place else zero
    if overlapped:
        overlap(ddp, wrapper)
    for step in range(steps):
        ddp(torch.full((2, 5), 0.1 * step - 0.2)).square().sum().backward()
        wrapper.step()
        wrapper.zero_grad()
    return net, zero, wrapper


def saved_through(place, folder):
    """Save through the wrapper in each way; give the elements of `exp_avg` that each file has."""
    net, zero, wrapper = stepped(place)
    zero.consolidate_state_dict(to=None)
    wanted = zero.state_dict()
    save_sharded(Path(folder, "parts"), net, wrapper, 3)
    full_state_dict(wrapper, to=Path(folder, "whole.pt"))
    other, again, _ = stepped(None, 0)
    load_sharded(Path(folder, "parts"), other, again)
    again.consolidate_state_dict(to=None)
    whole = torch.load(Path(folder, "whole.pt"))
    return [
        sum(state["exp_avg"].numel() for state in found["state"].values())
        for found in (wanted, again.state_dict(), whole)
    ]


@pytest.mark.parametrize("place", KINDS)
def test_what_is_saved_through_a_wrapper_has_the_state(place):
    pytest.importorskip(place.partition(".")[0])
    with tempfile.TemporaryDirectory() as folder:
        assert run(2, saved_through, place, folder) == [[66] * 3] * 2


def asked_through(place):
    """Give what a wrapper answers, and what the optimizer does."""
    net, zero, wrapper = stepped(place)
    wrapper.consolidate_state_dict(to=None)
    consolidated = [len(zero.state_dict()["state"]), wrapper.history == zero.history]
    held = [sum(row.held for row in memory_report(net, each).rows) for each in (wrapper, zero)]
    wrapper.step()
    stale = caught(zero.state_dict)
    return consolidated, len(set(held)), [*wrapper.state] == [*zero.state], "consolidate" in stale


@pytest.mark.parametrize("place", KINDS)
def test_a_wrapper_answers_as_its_optimizer(place):
    pytest.importorskip(place.partition(".")[0])
    assert run(2, asked_through, place) == [([4, True], 1, True, True)] * 2


def after_backward():
    return flatten(stepped(None)[0])


def overlapped_through(place):
    net, zero, _ = stepped(place, overlapped=True)
    return flatten(net), zero.driver.steps_in_backward


@pytest.mark.parametrize("place", KINDS)
def test_a_step_overlaps_through_a_wrapper(place):
    pytest.importorskip(place.partition(".")[0])
    wanted = run(2, after_backward)[0]
    for found, inside in run(2, overlapped_through, place):
        assert inside and torch.equal(found, wanted)
