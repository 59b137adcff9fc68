"""Optimizer classes of a user's that know parameters: by identity, by their names."""

from functools import partial

import pytest
import torch
from common import caught
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 4))


def attach(mode, module, zero):
    if mode == "zero2":
        data_parallel(module, zero)
        return module
    model = DDP(module)
    if mode != "zero1":
        overlap(model, zero, interleaved=mode == "zero1-overlap, interleaved")
    return model


def train(model, optimizer, steps=5):
    for step in range(steps):
        chance = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=chance)).square().mean().backward()
        optimizer.step()


def apart(kind, mode, read, named=None, **options):
    """Train sharded and unsharded, with options that are read off the module; give the largest
    difference, or the error."""
    ours, plain = network(), network()
    given = named or nn.Module.parameters

    def sharded():
        zero = ZeroRedundancyOptimizer(given(ours), kind, **read(ours), **options)
        train(attach(mode, ours, zero), zero)

    if error := caught(sharded):
        return error
    train(plain, kind(given(plain), **read(plain)))
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


class Decays(Optimizer):
    """Gradient descent that shrinks the parameters that `factor` chooses."""

    def __init__(self, params, lr=0.05, chosen=()):
        super().__init__(params, {"lr": lr})
        self.keep(chosen)

    def keep(self, chosen):
        self.chosen = chosen

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(self.factor(p)).sub_(p.grad, alpha=group["lr"])


class ById(Decays):
    def keep(self, chosen):
        self.chosen = {*map(id, chosen)}

    def factor(self, p):
        return 1.0 if id(p) in self.chosen else 0.9


class ByItself(Decays):
    def factor(self, p):
        return self.chosen.get(p, 1.0)


class ByCall(Decays):
    def factor(self, p):
        return self.chosen(p)


def shrinks(biases, p):
    return 0.9 if any(p is bias for bias in biases) else 1.0


def biases(module):
    return [p for p in module.parameters() if p.dim() == 1]


REFERENCES = {  # by class: an option that refers to parameters
    ById: lambda module: {"chosen": biases(module)},
    ByItself: lambda module: {"chosen": {module[0].weight: 0.5}},
    ByCall: lambda module: {"chosen": partial(shrinks, biases(module))},
}
WAYS = [
    ("zero1", {}),
    ("zero1", {"parameters_as_bucket_view": True}),
    ("zero1-overlap", {}),
    ("zero1-overlap, interleaved", {}),
    ("zero2", {}),
    ("zero1", {"master_dtype": torch.float64}),
    ("zero1", {"shard": "even"}),
]


def refer():
    return {
        (kind.__name__, i): apart(kind, mode, read, **options)
        for kind, read in REFERENCES.items()
        for i, (mode, options) in enumerate(WAYS)
    }


def test_options_that_refer_to_parameters_are_refused_where_other_tensors_are_stepped():
    for found in run(2, refer):
        for (name, i), worst in found.items():
            if i < 2:
                assert worst < 1e-6, (name, i)
            else:
                assert f"optimizer_class {name} has an option 'chosen'" in worst, (name, i)
                assert "refers to parameter" in worst
    assert {type(v) for v in found.values()} == {float, str}


def refer_later():
    """Freeze a parameter, add a group, and have a class that names no parameters of its own."""
    module = network()
    others = nn.Linear(3, 3)
    free = ZeroRedundancyOptimizer(module.parameters(), ById, chosen=[*others.parameters()])
    overlap(model := DDP(module), free)
    train(model, free, steps=1)
    module = network()
    even = ZeroRedundancyOptimizer(
        [{"params": module[:2].parameters(), "shard": "even"}], ById, chosen=biases(module[2:])
    )
    words = [caught(lambda: even.add_param_group({"params": module[2:].parameters()}))]
    words.append(
        caught(
            lambda: even.add_param_group(
                {"params": others.parameters(), "shard": "even", "mine": {id(others.bias)}}
            )
        )
    )
    trusted = ZeroRedundancyOptimizer(
        network().parameters(), ById, chosen=[], trust_optimizer_class=True
    )
    return words, len(trusted.param_groups)


def test_options_that_refer_to_other_parameters_or_to_later_ones():
    for (fine, refused), _ in run(2, refer_later):
        assert fine is None and "an option 'mine' that refers to parameter" in refused


def many_trials():
    """Make optimizers again and again, whose options differ, so that each class is tried anew."""
    module = network()
    return [
        caught(
            lambda i=i: (
                ZeroRedundancyOptimizer(
                    module.parameters(), ById, lr=0.1 + i, chosen=biases(module)
                )
                and None
            )
        )
        for i in range(20)
    ]


def test_a_trial_takes_no_tensor_for_a_parameter_of_the_options():
    assert run(2, many_trials) == [[None] * 20] * 2


class ByName(Decays):
    """Shrinks all but biases, by their names."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                int(name.split(".")[0])  # names are those of the model, also in a trial
                if p.grad is not None:
                    p.mul_(1.0 if name.endswith("bias") else 0.9).sub_(p.grad, alpha=group["lr"])


def by_name():
    none = dict
    named = nn.Module.named_parameters
    ways = [*WAYS, ("zero2", {"bucket_cap_mb": 0.0005}), ("zero1", {"shard": "greedy"})]
    return [apart(ByName, mode, lambda _: none(), named, **options) for mode, options in ways]


def test_a_class_may_read_the_names_of_parameters():
    for n in (2, 3):
        for worst in run(n, by_name):
            assert all(isinstance(one, float) and one < 1e-6 for one in worst), worst


def by_name_later():
    """Freeze a parameter, thaw it, add a group, save and load, beside the unsharded optimizer."""
    ours, plain = network(), network()
    optimizers = []
    for module, make in (
        (ours, lambda named: ZeroRedundancyOptimizer(named, ByName)),
        (plain, ByName),
    ):
        one = make(list(module[:3].named_parameters()))
        train(module, one)
        module[0].weight.requires_grad_(False)
        train(module, one)
        module[0].weight.requires_grad_(True)
        one.add_param_group({"params": [(f"4.{n}", p) for n, p in module[4].named_parameters()]})
        train(module, one)
        if module is ours:
            one.consolidate_state_dict(to=None)
        saved = one.state_dict()
        one.load_state_dict(saved)
        train(module, one)
        groups = saved["param_groups"]
        optimizers.append([(g["params"], g["param_names"]) for g in groups])
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    worst = max(float((p - q).detach().abs().max()) for p, q in pairs)
    return worst, optimizers[0] == optimizers[1]


def test_names_stay_with_their_pieces_and_in_state_dicts():
    assert all(worst < 1e-6 and same for worst, same in run(2, by_name_later))


class Sorts(Decays):
    """Sorts parameters into groups, unless it gets groups."""

    def __init__(self, params, lr=0.05):
        params = list(params)
        if isinstance(params[0], torch.Tensor):
            many = [p for p in params if p.dim() > 1]
            params = [{"params": many, "lr": 0.5}, {"params": [p for p in params if p.dim() < 2]}]
        elif isinstance(params[0], tuple):
            params = [{"params": [pair], "lr": 0.01 * len(pair[0])} for pair in params]
        super().__init__(params, lr)

    def factor(self, p):
        return 1.0


def sort():
    def make(params):
        return caught(lambda: ZeroRedundancyOptimizer(params, Sorts) and None)

    module = network()
    return [
        make(g)
        for g in (module.parameters(), module.named_parameters(), [{"params": module.parameters()}])
    ]


def test_a_constructor_that_sorts_what_it_is_given_is_refused_unless_it_gets_groups():
    for tensors, pairs, groups in run(2, sort):
        assert groups is None
        assert "Sorts makes other param groups if it is made of tensors" in tensors
        assert "Sorts makes other param groups if it is made of (name, tensor) pairs" in pairs


# ---- a class that may read names, beside one of torch's in one bucket ----


class Own(AdamW):
    """A class that is not torch's, and may read names."""


def in_one_bucket(steps):
    """Train two groups, of which one names the class; give the largest gap to optimizers of their own."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(size)) for size in (3, 4, 5, 2)] for _ in range(2))
    named = [(f"p{i}", p) for i, p in enumerate(ours)]
    own = {"params": named[2:], "optimizer_class": Own, "shard": "even", "lr": 0.1}
    zero = ZeroRedundancyOptimizer([{"params": named[:2]}, own], SGD, lr=0.1)
    others = [SGD(theirs[:2], lr=0.1), Own(theirs[2:], lr=0.1)]
    for step in range(steps):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad, q.grad = torch.full_like(p, i + step), torch.full_like(q, i + step)
        for optimizer in (zero, *others):
            optimizer.step()
    pairs = zip(ours, theirs, strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_class_that_may_read_names_is_stepped_in_a_bucket_with_torchs(ranks):
    assert max(run(ranks, in_one_bucket, 3)) < 1e-6
