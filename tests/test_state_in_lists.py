"""Optimizers that keep tensors in lists and dicts: reports count them, and comparisons name them."""

import pytest
import torch
import torch.distributed as dist
from common import caught
from pytorch_optimizer import SOAP
from torch import nn

from zero_nb import ZeroRedundancyOptimizer, assert_parity, memory_report, run
from zero_nb.plan.states import state_rule
from zero_nb.verify.rounding import STEP, find_difference


class Averages(torch.optim.Optimizer):
    """Two moving averages in a list, and a number and a word in a dict; `apart`: other ones on each rank."""

    def __init__(self, params, lr=0.1, apart=False):
        super().__init__(params, {"lr": lr, "apart": apart})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_one(group, p)

    def step_one(self, group, p):
        state = self.state[p]
        if not state:
            state["m"] = [torch.zeros_like(p), torch.zeros_like(p)]
            state["more"] = {"count": torch.zeros(()), "kind": "two"}
        for average, beta in zip(state["m"], (0.5, 0.9), strict=True):
            average.mul_(beta).add_(p.grad)
        if group["apart"]:
            state["m"][1].add_(dist.get_rank())
        state["more"]["count"].add_(1)
        p.sub_(state["m"][0] - 0.1 * state["m"][1], alpha=group["lr"])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12)).double()


def tensors_below(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (dict, list, tuple)):
        return []
    members = value.values() if isinstance(value, dict) else value
    return [t for member in members for t in tensors_below(member)]


def reported(kind):
    """Compare what a report says of the state with what there is, sharded and not."""
    found = []
    for sharded in (True, False):
        model = net()
        params = model.parameters()
        optimizer = ZeroRedundancyOptimizer(params, kind) if sharded else kind(params)
        for _ in range(2):
            model(torch.ones(4, 12).double()).square().mean().backward()
            optimizer.step()
        local = [*optimizer.local.by_class.values()] if sharded else [optimizer]
        there = [t.nbytes for one in local for s in one.state.values() for t in tensors_below(s)]
        row = memory_report(model, optimizer).row(dist.get_rank(), "state")
        found.append((row.held, sum(there), row.planned, row.reason))
    return found


@pytest.mark.parametrize("kind", [Averages, SOAP])
def test_a_report_counts_state_in_lists(kind):
    for found in run(2, reported, kind):
        for held, there, planned, reason in found:
            assert held == there > 0
            assert planned == held or (planned is None and reason), (planned, reason)


def test_the_planner_counts_them_or_says_that_it_cannot():
    rule = state_rule(Averages)
    assert rule is not None and state_rule(Averages)(None).per_element == 2
    with pytest.raises(ValueError, match="follow no rule known here"):
        state_rule(SOAP)


def batch(step, rank):
    seed = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 12, dtype=torch.float64, generator=seed)


def parity(kind, **options):
    return caught(
        lambda: assert_parity(
            net, (kind, options), batch, 4, 2, loss=lambda model, x: model(x).square().mean()
        )
    )


@pytest.mark.parametrize("kind", [Averages, SOAP])
def test_training_with_them_is_compared(kind):
    assert parity(kind) is None


def test_a_difference_in_one_is_named():
    said = parity(Averages, apart=True, lr=0.0)
    assert "state m[1] of 0." in said, said


@pytest.mark.parametrize(
    "mine, other, name",
    [
        ([1.0, 2.0], [1.0, 3.0], "state[1]"),
        ({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, "state['a'][0]"),
        ([1.0], [1.0, 2.0], "state[1]"),
        ("one", "two", "state"),
        (torch.ones(2), [1.0], "state"),
        ([1.0, "a", None], [1.0, "a", None], None),
    ],
    ids=str,
)
def test_values_in_containers_are_compared_one_by_one(mine, other, name):
    found = find_difference(1, "state", mine, other, STEP)
    assert (found and found.what) == name
