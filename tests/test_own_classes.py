"""Optimizer classes of a user's that write otherwise than in place, in every mode beside plain DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, run_each
from common.modes import MODES
from common.optimizers import SignSGD
from common.overlapping import Blocks, plainly
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb import Join, ZeroRedundancyOptimizer
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


class Keeps(Plain):
    """Keeps the gradient itself for the next step, without a copy."""

    def write(self, p, state, lr):
        p.sub_(2 * p.grad - state.get("last", p.grad), alpha=lr)
        state["last"] = p.grad


class SetsInInit(Plain):
    """Lays data out anew when it is made."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            p.data = p.data.clone()


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
    kinds = (Sets, Exchanges, Remembers, SetsInInit)
    cases = {(kind.__name__, way): (kind, mode, way) for kind in kinds for way in WAYS}
    if mode.startswith("zero1-"):
        del cases["Remembers", "even"]  # a list of tensors belongs to a whole parameter
    found = run_each(2, beside_ddp, cases)
    assert {case: ranks for case, ranks in found.items() if ranks != [(True, True)] * 2} == {}


@pytest.mark.parametrize("mode", MODES)
def test_a_class_may_keep_gradients(mode):
    found = run_each(2, beside_ddp, {way: (Keeps, mode, way) for way in WAYS})
    assert {way: ranks for way, ranks in found.items() if ranks != [(True, True)] * 2} == {}


def copies(mode):
    """Tell which classes are given copies of gradients."""
    found = {}
    for kind, trusted in ((Keeps, False), (Sets, False), (Sets, True), (AdamW, True)):
        attached = MODES[mode].attach(
            Blocks(),
            lambda model, kind=kind, trusted=trusted: ZeroRedundancyOptimizer(
                model.parameters(), kind, trust_optimizer_class=trusted
            ),
        )
        found[kind.__name__, trusted] = attached.optimizer.local.tried.may_keep_gradients
    return found


@pytest.mark.parametrize("mode", ["zero1-overlap", "zero2"])
def test_only_a_class_that_may_keep_gradients_is_given_copies(mode):
    wanted = {
        ("Keeps", False): True,
        ("Sets", False): False,
        ("Sets", True): True,
        ("AdamW", True): False,
    }
    assert run(2, copies, mode) == [wanted] * 2


@pytest.mark.parametrize("mode", ["zero1", "zero1-overlap, interleaved", "zero2"])
def test_a_class_may_set_data_to_new_tensors_in_two_levels(mode):
    assert run(4, beside_ddp, Sets, mode, "by default", True) == [(True, True)] * 4


def alone(kind):
    """Set the data of the only parameter, which one rank owns, when the optimizer is made."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 4, bias=False))
    zero = ZeroRedundancyOptimizer(model.parameters(), kind)
    before = model.module.weight.sum().item()
    model(torch.ones(1, 4)).sum().backward()
    zero.step()
    return before - model.module.weight.sum().item()


def test_a_constructor_may_set_data_where_a_rank_owns_nothing():
    assert run(2, alone, SetsInInit) == [pytest.approx(16 * 0.05)] * 2


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


class Counts(Plain):
    """Counts steps in a tensor that it makes in its first one, and writes its learning rate in place."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, torch.tensor(lr, dtype=torch.float64))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(())).add_(1)
            group["lr"].mul_(0.9)
            group["warm"] = torch.clamp(group["count"] / 4, max=1.0)
        super().step()

    def write(self, p, state, lr):
        p.sub_(lr * p.grad)


def shown(optimizer):
    """Give the options of the param group, and those of a state dict, as numbers."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=None)
    groups = (optimizer.param_groups[0], optimizer.state_dict()["param_groups"][0])
    return [{k: float(g[k]) for k in ("lr", "count", "warm")} for g in groups]


def counted_beside_ddp(mode):
    """Train beside plain DDP, and load a state dict on the way; give the difference and the options."""
    plain, module = Blocks(), Blocks()
    reference = DDP(plain)
    optimizer = Counts(reference.parameters())
    attached = MODES[mode].attach(
        module, lambda model: ZeroRedundancyOptimizer(model.parameters(), Counts), **BUCKETS
    )
    for step in range(6):
        for model, optim in ((reference, optimizer), (attached.call, attached.optimizer)):
            optim.zero_grad()
            plainly(model, step)
            optim.step()
        if step == 3:
            saved = shown(attached.optimizer)
            whole = copy.deepcopy(attached.optimizer.state_dict())
            attached.optimizer.param_groups[0]["lr"].fill_(7.0)
            attached.optimizer.load_state_dict(whole)
            assert shown(attached.optimizer) == saved
    gap = (flatten(plain) - flatten(module)).abs().max().item()
    return gap, shown(optimizer), shown(attached.optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_class_may_write_options_that_are_tensors(mode):
    for gap, plain, ours in run(2, counted_beside_ddp, mode):
        assert gap < 1e-12 and plain == ours and ours[0]["count"] == 6


def written_late(mode):
    """Write a learning rate that is a tensor in a gradient hook, in one iteration."""
    module = Blocks()
    attached = MODES[mode].attach(
        module, lambda model: ZeroRedundancyOptimizer(model.parameters(), Counts), **BUCKETS
    )
    for step in range(3):
        plainly(attached.call, step)
        attached.optimizer.step()
    rate = attached.optimizer.param_groups[0]["lr"]
    module.layers[0].weight.register_hook(lambda grad: rate.mul_(0.5) and None)
    return caught_error(lambda: (plainly(attached.call, 3), attached.optimizer.step()))


@pytest.mark.parametrize(
    "mode", ["zero1-overlap", "zero1-overlap, interleaved", "zero2-interleaved"]
)
def test_a_tensor_that_a_hook_writes_during_the_step_is_refused(mode):
    for kind, message in run(2, written_late, mode):
        assert kind == "RuntimeError" and "lr changed while the step was taken" in message


class CountsInPairs(Plain):
    """Counts steps in a tensor of two elements."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.param_groups[0].setdefault("pair", torch.zeros(2, dtype=torch.float64))

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["pair"] += torch.tensor([0.1, 1.0])
        super().step()


def with_less_data(mode):
    """Train in a `Join` block, one batch more on the second rank; give the sum of parameters and the count."""
    module = Blocks()
    attached = MODES[mode].attach(
        module, lambda model: ZeroRedundancyOptimizer(model.parameters(), CountsInPairs), **BUCKETS
    )
    with Join([attached.joinable, attached.optimizer]):
        for step in range(3 + dist.get_rank()):
            plainly(attached.call, step)
            attached.optimizer.step()
            attached.optimizer.zero_grad()
    return flatten(module).sum().item(), attached.optimizer.param_groups[0]["pair"].tolist()


@pytest.mark.parametrize("mode", ["zero1", "zero1-overlap, interleaved", "zero2"])
def test_a_rank_without_data_takes_over_options_that_are_tensors(mode):
    first, second = run(2, with_less_data, mode)
    assert first == second and first[1] == pytest.approx([0.4, 4.0])


def found_under(device, kind):
    """Shard a class under a default device; how its parameters are cut, and what their rules say."""
    params = list(torch.nn.Linear(8, 5).parameters())
    torch.set_default_device(device)
    try:
        zero = ZeroRedundancyOptimizer(params, kind, lr=0.1)
    finally:
        torch.set_default_device(None)
    return zero.local.rules, [shard.plan for shard in zero.shards]


@pytest.mark.parametrize("kind", [SignSGD, Sets, Exchanges])
def test_a_class_is_tried_alike_under_any_default_device(kind):
    found = [run(2, found_under, device, kind) for device in (None, "meta")]
    assert found[0] == found[1]


class Named(torch.optim.Optimizer):
    """Reads the names of parameters strictly, draws random numbers, and keeps more of wide ones."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                self.state[p][f"noise of {name}"] = torch.rand_like(p)
                if p.numel() > 1:
                    self.state[p]["wide"] = torch.zeros_like(p)
                p.sub_(p.grad, alpha=group["lr"])


def keys_before_a_step(shard):
    """Read the state of each parameter on one rank only; its keys, and the next random number."""
    model = torch.nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(
        model.named_parameters(), Named, shard=shard, trust_optimizer_class=True
    )
    torch.manual_seed(7)
    keys = [sorted(zero.state[p]) for p in model.parameters()] if dist.get_rank() else None
    return keys, torch.rand(()).item()


@pytest.mark.parametrize("shard", ["even", "whole"])
def test_the_keys_of_a_state_to_come_are_told_without_a_trace(shard):
    (_, alone), (keys, here) = run(2, keys_before_a_step, shard)
    assert keys == [["noise of weight", "wide"], ["noise of bias", "wide"]]
    assert here == alone
