"""Optimizer classes that nobody knows, by what they keep and where: counts outside groups, state
outside `self.state`, and steps without gradients."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from common import caught
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Counting(Optimizer):
    """Gradient descent that warms up by a count of its calls, which subclasses keep."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.start()

    @torch.no_grad()
    def step(self, closure=None):
        scale = min(1.0, self.count() / 20)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] * scale)


class InTensor(Counting):
    def start(self):
        self.calls = torch.zeros(())

    def count(self):
        self.calls += 1
        return float(self.calls)


class InDict(Counting):
    def start(self):
        self.calls = {"all": 0}

    def count(self):
        self.calls["all"] += 1
        return self.calls["all"]


class InNumpy(Counting):
    def start(self):
        self.calls = np.int64(0)

    def count(self):
        self.calls = self.calls + 1
        return float(self.calls)


class InIterator(Counting):
    def start(self):
        self.calls = iter(range(1, 1000))

    def count(self):
        return next(self.calls)


class Late(InTensor):
    """Does not show in a trial that it counts, but for the number that it keeps."""

    def count(self):
        return 20 if super().count() < 60 else 1


class Momentum(Optimizer):
    """Gradient descent with momentum, which subclasses keep."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.kept = {}
        self.start()

    def start(self):
        """Make what is kept."""

    @torch.no_grad()
    def step(self, closure=None):
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    kept = self.momentum(p, (g, i)).lerp_(p.grad, 0.1)
                    p.sub_(kept, alpha=group["lr"])


class ByParameter(Momentum):
    def momentum(self, p, place):
        return self.kept.setdefault(p, torch.zeros_like(p))


class ById(Momentum):
    def momentum(self, p, place):
        return self.kept.setdefault(id(p), torch.zeros_like(p))


class ByPlace(Momentum):
    def start(self):
        groups = enumerate(group["params"] for group in self.param_groups)
        self.kept = {(g, i): torch.zeros_like(p) for g, ps in groups for i, p in enumerate(ps)}

    def momentum(self, p, place):
        return self.kept[place]


class InState(Momentum):
    def momentum(self, p, place):
        return self.state[p].setdefault("momentum", torch.zeros_like(p))


class OfAllAtOnce(Optimizer):
    """Steps all tensors of a group in calls that take no empty list."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            kept = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in used]
            torch._foreach_lerp_(kept, [p.grad for p in used], 0.1)
            torch._foreach_add_(used, kept, alpha=-group["lr"])


class IfUsed(Optimizer):
    """Counts the steps in which a group has a gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            group["steps"] = group.get("steps", 0) + bool(used)
            for p in used:
                p.sub_(p.grad, alpha=group["lr"] / group["steps"] ** 0.5)


MODES = ["zero1", "zero1-overlap", "zero2"]


def network(sizes=(16, 16, 16, 4)):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))


def attach(mode, module, zero, interleaved):
    if mode == "zero2":
        data_parallel(module, zero, interleaved=interleaved, bucket_cap_mb=0.0005)
        return module
    model = DDP(module, bucket_cap_mb=0.0005)
    if mode == "zero1-overlap":
        overlap(model, zero, interleaved=interleaved)
    return model


def train(model, optimizer, steps=8):
    for step in range(steps):
        chance = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=chance)).square().mean().backward()
        optimizer.step()


def difference(ours, plain):
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def apart(kind, mode, interleaved=False, sizes=(16, 16, 16, 4), **options):
    """Train sharded and unsharded; give the largest difference."""
    ours, plain = network(sizes), network(sizes)
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*counts its steps")
        train(attach(mode, ours, zero, interleaved), zero)
    train(plain, kind(plain.parameters()))
    return difference(ours, plain)


COUNTING = [InTensor, InDict, InNumpy, InIterator, Late]


def count_everywhere():
    cases = [
        (kind, mode, inside) for kind in COUNTING for mode in MODES for inside in (False, True)
    ]
    return {str(case): apart(*case) for case in cases if case[1:] != ("zero1", True)}


def test_a_class_that_counts_its_calls_anywhere_is_called_once_a_step():
    for rank in run(2, count_everywhere):
        assert {case: worst for case, worst in rank.items() if worst > 1e-6} == {}


def step_by_bucket(kind, **options):
    module = network()
    zero = ZeroRedundancyOptimizer(module.parameters(), kind, lr=0.1, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle = data_parallel(module, zero, interleaved=True, bucket_cap_mb=0.0005)
    said = [str(w.message) for w in warned if "stepped together" in str(w.message)]
    return handle.engine.steps_per_bucket, len(said)


def test_a_class_that_counts_nothing_is_stepped_by_bucket_and_one_that_was_not_tried_is_not():
    def both():
        trusted = step_by_bucket(InState, trust_optimizer_class=True)
        return (
            step_by_bucket(InState),
            step_by_bucket(OfAllAtOnce),
            trusted,
            apart(InState, "zero1-overlap"),
        )

    for well, at_once, trusted, worst in run(2, both):
        assert (well, at_once, trusted) == ((True, 0), (False, 1), (False, 1)) and worst < 1e-6


def keep_elsewhere(kind):
    """Give what differs after backward, and what refuses to move or split its parameters."""
    exact = apart(kind, "zero1")
    refused = [caught(lambda mode=mode: apart(kind, mode)) for mode in MODES[1:]]
    refused.append(caught(lambda: apart(kind, "zero1", shard="even")))
    module = network()
    zero = ZeroRedundancyOptimizer(module.parameters(), kind)
    train(module, zero, steps=2)
    module[0].weight.requires_grad_(False)
    refused.append(caught(lambda: train(module, zero, steps=1)))
    return exact, refused


@pytest.mark.parametrize("kind", [ByParameter, ById, ByPlace])
def test_a_class_that_keeps_state_elsewhere_is_refused_where_parameters_move(kind):
    for exact, refused in run(2, keep_elsewhere, kind):
        assert exact < 1e-6
        for words in refused:
            assert f"optimizer_class {kind.__name__} keeps more" in words
            assert "self.state[parameter]" in words


def step_nothing():
    sizes = [(16, 16, 16, 4), (16, 1)]
    cases = [
        (kind, mode, size) for kind in (OfAllAtOnce, IfUsed) for mode in MODES for size in sizes
    ]
    return {str(case): apart(*case[:2], sizes=case[2]) for case in cases}


def test_classes_that_cannot_step_nothing_train_where_a_rank_owns_nothing():
    for rank in run(2, step_nothing):
        assert {case: worst for case, worst in rank.items() if worst > 1e-6} == {}


def use_in_turns(kind):
    """Leave out the gradient of all that one rank owns, in some steps; give what differs, what the
    param groups show, and for how many parameters this rank keeps state."""
    ours, plain = network((16, 16, 16)), network((16, 16, 16))
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind)
    optimizer = kind(plain.parameters())
    for step in range(9):
        for module, one in ((ours, zero), (plain, optimizer)):
            one.zero_grad()
            layers = module[:1] if 3 <= step < 6 else module
            layers(torch.ones(2, 16) * (step + 1)).square().mean().backward()
            one.step()
    shown = [one.param_groups[0].get("steps") for one in (zero, optimizer)]
    return difference(ours, plain), shown[0] == shown[1], len(zero.optim.state)


@pytest.mark.parametrize("kind", [OfAllAtOnce, IfUsed])
def test_classes_that_cannot_step_nothing_train_where_a_rank_has_no_gradient(kind):
    for worst, same, states in run(2, use_in_turns, kind):
        assert worst < 1e-6 and same and states <= 1


def step_two_groups(mode):
    """Train two groups, of each of which a rank owns nothing."""
    ours, plain = network((16, 16, 16)), network((16, 16, 16))
    groups = [[{"params": layer.parameters()} for layer in module] for module in (ours, plain)]
    zero = ZeroRedundancyOptimizer(groups[0], OfAllAtOnce)
    train(attach(mode, ours, zero, False), zero)
    train(plain, OfAllAtOnce(groups[1]))
    return difference(ours, plain)


@pytest.mark.parametrize("mode", MODES)
def test_a_class_that_cannot_step_nothing_trains_where_each_rank_owns_another_group(mode):
    assert max(run(2, step_two_groups, mode)) < 1e-6


class Limited(Optimizer):
    """Keeps momentum in a dictionary of its own, and refuses steps after the 15th."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})
        self.momenta = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            if group["steps"] > 15:
                raise ValueError("this licence is for 15 steps")
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.momenta.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=group["lr"])


def attached_late():
    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), Limited, shard="whole")
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        for p in model.parameters():
            zero.group.all_reduce(p.grad)
        zero.step()
    return caught(lambda: data_parallel(model, zero))


def test_a_class_that_cannot_be_tried_is_not_taken_for_one_whose_state_moves():
    for said in run(2, attached_late, timeout=60):
        assert said and "Limited cannot be tried" in said and "licence is for 15 steps" in said


class Beside(Optimizer):
    """Gradient descent whose rate is made of what all gradients are; subclasses say how."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] * self.rate(grads))


class CountsNone(Beside):
    def rate(self, grads):
        return 1 / (1 + sum(grad is None for grad in grads))


class FirstGates(Beside):
    def rate(self, grads):
        return float(bool(grads) and grads[0] is not None)


class SkipsZeros(Beside):
    def rate(self, grads):
        return float(all(grad.any() for grad in grads if grad is not None))


class ClipsHigh(Beside):
    def rate(self, grads):
        norms = [grad.norm() for grad in grads if grad is not None]
        return min(1.0, 1e4 / float(torch.stack(norms).norm()))


class SkipsNan(Beside):
    def rate(self, grads):
        return float(all(grad.isfinite().all() for grad in grads if grad is not None))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (CountsNone, "have no gradient"),
        (FirstGates, "have no gradient"),
        (SkipsZeros, "have gradients of zeros"),
        (ClipsHigh, "have large gradients"),
        (SkipsNan, "have gradients that are not finite"),
    ],
)
def test_a_class_that_looks_at_odd_gradients_of_other_parameters_is_refused(kind, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=f"{kind.__name__} steps a parameter differently .*{said}"):
        ZeroRedundancyOptimizer(model.parameters(), kind)


class Row(Optimizer):
    """Momentum in a row of any name, which may be that of a number in a class of torch."""

    def __init__(self, params, lr=0.1, name="mu"):
        super().__init__(params, {"lr": lr, "name": name})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                row = self.state[p].setdefault(group["name"], torch.zeros_like(p))
                row.mul_(0.9).add_(p.grad)
                p.sub_(row, alpha=group["lr"])


def with_row(name, kind, make, missing):
    """Step, save and load in a new optimizer, step with a parameter that has no gradient, and save."""
    params = [nn.Parameter(torch.ones(*shape)) for shape in ((5,), (7,), (1, 1))]
    optimizer = make(params, name)
    sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = None if step and i == missing else torch.full_like(p, i + 1.0 + step)
        optimizer.step()
        if sharded and kind == "consolidated":
            optimizer.consolidate_state_dict(to=None)
        if step % 2 == 0:
            saved = optimizer.state_dict()
            optimizer = make(params, name)
            optimizer.load_state_dict(saved)
    if sharded:
        with optimizer.giving_state_dicts("full"):
            optimizer.step()  # all ranks ask for the state of the same step
            state = optimizer.state_dict()["state"]
    else:
        optimizer.step()
        state = optimizer.state_dict()["state"]
    return [p.detach() for p in params], {i: values[name] for i, values in state.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_any_name_are_saved_loaded_and_split(size):
    kinds = ("consolidated", "full", "sharded")
    cases = [(n, k, i) for n in ("mu", "step") for k in kinds for i in (None, 1, 2)]

    def sharded(params, name, kind):
        options = {"shard": "even", "parameters_as_bucket_view": True, "state_dict_type": kind}
        return ZeroRedundancyOptimizer(params, Row, name=name, **options)

    def every():
        return [with_row(n, k, lambda p, x, k=k: sharded(p, x, k), i) for n, k, i in cases]

    plain = [with_row(n, "", lambda p, x: Row(p, name=x), i) for n, _, i in cases]
    for found in run(size, every, timeout=200):
        for case, ours, theirs in zip(cases, found, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=str(case))
