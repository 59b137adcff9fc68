"""Optimizer classes of a user's that write otherwise than in place, in every mode beside plain DDP."""

import pytest
import torch
from common import caught_error, flatten, run_each
from common.modes import MODES
from common.overlapping import Blocks, plainly
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb import ZeroRedundancyOptimizer
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level


class Plain(torch.optim.Optimizer):
    """Calls `write` for each parameter that has a gradient."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.write(p, self.state[p], group["lr"])

    def write(self, p, state, lr):
        p.sub_(p.grad, alpha=lr)


class Sets(Plain):
    """Sets data, gradient and state to new tensors."""

    def write(self, p, state, lr):
        p.grad = p.grad + 0.1 * p
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
        p.data = p.data - lr * state["m"]


class Exchanges(Plain):
    """Exchanges the data of a parameter with state: each of the two is stepped in turn."""

    def write(self, p, state, lr):
        state.setdefault("other", p.clone()).sub_(p.grad, alpha=lr).lerp_(p, 0.3)
        p.data, state["other"] = state["other"], p.data


class Remembers(Plain):
    """Keeps what data was before, in a list."""

    def write(self, p, state, lr):
        past = state.setdefault("past", [])
        past.append(p.data)
        p.data = 0.1 * past[0] + 0.9 * past[-1] - lr * p.grad


class Narrows(Plain):
    def write(self, p, state, lr):
        p.data = (p.data - lr * p.grad).float()


class Flattens(Plain):
    def write(self, p, state, lr):
        p.data = (p.data - lr * p.grad).flatten()[:1]


class Shares(Plain):
    """Has the data of a parameter as its state, and steps that."""

    def write(self, p, state, lr):
        if not state:
            state["same"] = p.data = p.data.clone()
        state["same"].sub_(p.grad, alpha=lr)


# of a layer or two
BUCKETS = {"ddp": {"bucket_cap_mb": 0.0005}, "parallel": {"bucket_cap_mb": 0.0005}}
WAYS = {
    "by default": {},
    "even": {"shard": "even"},
    "views": {"parameters_as_bucket_view": True},
    "copies": {"master_dtype": torch.float64},
}


def beside_ddp(kind, mode, way, nodes=False):
    """Train beside plain DDP; give the largest difference, and whether parameters stayed in memory."""
    low = way == "copies"
    plain, ours = (Blocks().to(torch.float32 if low else torch.float64) for _ in range(2))
    options = {**WAYS[way], **({"process_group": two_level(2)} if nodes else {})}
    reference = DDP(plain, bucket_cap_mb=0.0005)
    optimizer = kind(reference.parameters())
    attached = MODES[mode].attach(
        ours,
        lambda model: ZeroRedundancyOptimizer(model.parameters(), kind, **options),
        **BUCKETS,
    )
    places = []
    for step in range(6):
        for model, optim in ((reference, optimizer), (attached.call, attached.optimizer)):
            optim.zero_grad()
            plainly(lambda x, model=model: model(x.float() if low else x), step)
            optim.step()
        places.append([p.data_ptr() for p in ours.parameters()])
    gap = (flatten(plain) - flatten(ours)).abs().max().item()
    return gap < (1e-5 if low else 1e-12) or gap, places[2] == places[-1]


@pytest.mark.parametrize("mode", MODES)
def test_a_class_may_set_data_to_new_tensors(mode):
    kinds = (Sets, Exchanges, Remembers)
    cases = {(kind.__name__, way): (kind, mode, way) for kind in kinds for way in WAYS}
    if mode.startswith("zero1-"):
        del cases["Remembers", "even"]  # a list of tensors belongs to a whole parameter
    found = run_each(2, beside_ddp, cases)
    assert {case: ranks for case, ranks in found.items() if ranks != [(True, True)] * 2} == {}


@pytest.mark.parametrize("mode", ["zero1", "zero1-interleaved", "zero2"])
def test_a_class_may_set_data_to_new_tensors_in_two_levels(mode):
    assert run(4, beside_ddp, Sets, mode, "by default", True) == [(True, True)] * 4


def refused(kind, mode):
    attached = MODES[mode].attach(
        Blocks(),
        lambda model: ZeroRedundancyOptimizer(model.parameters(), kind, trust_optimizer_class=True),
    )

    def iterate():
        plainly(attached.call, 0)
        attached.optimizer.step()

    return caught_error(iterate)


WORDS = {
    Narrows: "that is torch.float32 (6, 6) on cpu, and was torch.float64 (6, 6) on cpu",
    Flattens: "that is torch.float64 (1,) on cpu, and was torch.float64 (6, 6) on cpu",
    Shares: "that is in its state as well",
}


@pytest.mark.parametrize("mode", ["zero1", "zero1-overlap", "zero2-interleaved"])
@pytest.mark.parametrize("kind", WORDS)
def test_data_that_cannot_be_gathered_is_refused_on_every_rank(kind, mode):
    errors = run(2, refused, kind, mode)
    assert all(errors)
    assert any(WORDS[kind] in message for _, message in errors), errors
    assert all("has set the data of parameter" in message for _, message in errors), errors
