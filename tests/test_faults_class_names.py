"""Optimizer classes of a user's that know parameters: by identity, by their names."""

from functools import partial

import torch
from common import caught
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 4))


def attach(mode, module, zero):
    if mode == "data_parallel":
        data_parallel(module, zero)
        return module
    model = DDP(module)
    if mode != "after":
        overlap(model, zero, interleaved=mode == "interleaved")
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
    ("after", {}),
    ("after", {"parameters_as_bucket_view": True}),
    ("overlap", {}),
    ("interleaved", {}),
    ("data_parallel", {}),
    ("after", {"master_dtype": torch.float64}),
    ("after", {"shard": "even"}),
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
