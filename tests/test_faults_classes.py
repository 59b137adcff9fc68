"""Every class of optimizers that can be had, sharded against unsharded: right, or refused on every
rank with words that say why; never different in silence."""

import contextlib
import inspect
import io
import os
import random
import warnings
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.optim import arguments
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.policies import even

SHAPES = [(8, 6), (8,), (4, 3, 3, 3), (4,), (6, 10), (6,)]
MATRICES = [(8, 6), (6, 10), (12, 8)]


@cache
def classes():
    """Give every optimizer of torch and of pytorch_optimizer, by a name; before ranks are forked.

    The second is imported here only: it brings transformers along, whose memory every rank would get."""
    return {
        f"{kind.__module__.split('.')[0]}.{name}": kind
        for module in (torch.optim, pytest.importorskip("pytorch_optimizer"))
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }


def parameters(shapes):
    chance = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=chance)) for shape in shapes]


def groups(name, params):
    """Param groups as a class wants them: some step matrices otherwise than the rest."""
    if name.endswith(
        ("AdaMuon", "AdaGO", "NorMuon", "DistributedMuon", "MuonClip", "optimizer.Muon")
    ):
        return [
            {"params": [p for p in params if p.dim() == 2], "use_muon": True},
            {"params": [p for p in params if p.dim() != 2], "use_muon": False},
        ]
    return params


def options(kind):
    arguments = inspect.signature(kind.__init__).parameters
    needed = {"lr": 1e-2, "num_data": 100, "num_iterations": 100}
    return {
        k: v
        for k, v in needed.items()
        if k in arguments and arguments[k].default is inspect.Parameter.empty
    }


def train(make, params, steps=12):
    """Train in two runs on gradients of very different sizes, one parameter frozen for a while;
    every rank has the same, but other random states."""
    optimizer = make()
    for step in range(steps):
        if step == steps // 2:
            before, optimizer = optimizer, make()
            if isinstance(before, ZeroRedundancyOptimizer):
                before.consolidate_state_dict(to=None)
            optimizer.load_state_dict(before.state_dict())
        chance = torch.Generator().manual_seed(100 + step)
        for i, p in enumerate(params):
            p.requires_grad_(not (i == 1 and step in (8, 9)))
            p.grad = torch.randn(p.shape, generator=chance) * (1.0, 5.0, 0.2)[step % 3]
            if not p.requires_grad:
                p.grad = None
        torch.manual_seed(
            1000 * step
            + (dist.get_rank() if isinstance(optimizer, ZeroRedundancyOptimizer) else 77)
        )
        optimizer.step()
    return [p.detach().clone() for p in params]


def trained_unsharded(name, shapes):
    """Give what a class makes of the parameters without ranks, or what it says where it is of no use."""
    kind, plain, wanted = classes()[name], parameters(shapes), []
    failed = caught(
        lambda: wanted.extend(train(lambda: kind(groups(name, plain), **options(kind)), plain))
    )
    return wanted, failed


def outcome(name, shapes, how, wanted, useless):
    """Tell whether a class trains the same, is refused, or trains differently, or is of no use without ranks either."""
    kind, ours = classes()[name], parameters(shapes)

    def make():
        return ZeroRedundancyOptimizer(groups(name, ours), kind, **options(kind), **how)

    if refused := caught(lambda: make() and None):
        return "refused", refused, useless
    if failed := caught(lambda: train(make, ours)):
        return "useless" if useless else "fails", failed, useless
    if useless:
        return "trains", "", useless
    pairs = zip(ours, wanted, strict=True)
    gaps = torch.stack([(p.detach() - q).abs().max() / q.abs().max() for p, q in pairs])
    apart = gaps.max().item()
    # float32: 12 steps of about 1e-7 of the values each
    return "same" if apart < 1e-5 else "differs", apart, None


def outcomes(names, shapes, hows):
    """Give the outcome of each class, for each way to shard it."""
    torch.set_num_threads(1)
    found = [{} for _ in hows]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            unsharded = trained_unsharded(name, shapes)
            for mine, (how, _) in zip(found, hows, strict=True):
                mine[name] = outcome(name, shapes, how, *unsharded)
    return found


PARTS = 8
WAYS = [  # and how many classes of a part train
    ({}, 9),
    ({"shard": "even"}, 3),
    ({"shard": "greedy", "parameters_as_bucket_view": True}, 9),
]


@pytest.mark.turns(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_trains_as_unsharded_or_is_refused(part):
    assert len(classes()) >= 126
    names = [*classes()][part::PARTS]
    for shapes, hows in ((SHAPES, WAYS), (MATRICES, WAYS[:1])):
        ranks = run(2, outcomes, names, shapes, hows, timeout=300)
        for i, (_, least) in enumerate(hows):
            check_outcomes([rank[i] for rank in ranks], least)


def check_outcomes(ranks, least):
    found = ranks[0]
    # of state that only its own rank can read, or that is not element-wise
    words = ("must be tensors and plain values", "use shard='whole'")
    unsaved = {
        name
        for name, o in found.items()
        if o[0] == "fails" and any(reason in o[1] for reason in words)
    }
    assert {
        name: o
        for name, o in found.items()
        if o[0] in ("differs", "trains", "fails") and name not in unsaved
    } == {}, "silently different"
    assert len(unsaved) <= 2, "an error only while training"
    assert {
        name: (o[0], other[name][0])
        for other in ranks
        for name, o in found.items()
        if other[name][0] != o[0]
    } == {}, "ranks do not agree"
    assert sum(o[0] == "same" for o in found.values()) >= least, "most classes are of use"
    reasons = (
        "draws random numbers",
        "steps a parameter differently",
        "cannot be tried",
        "looks at all parameters together",
        "values that are not finite",
        "differently a second time",
    )
    silent = {
        name: o
        for name, o in found.items()
        if o[0] == "refused" and not o[2] and not any(reason in o[1] for reason in reasons)
    }
    assert {name: o for name, o in silent.items() if "must be" not in o[1]} == {}, (
        "what is of use without ranks is refused with a reason"
    )


class Clips(SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Draws(SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.add_(random.random() + np.random.rand() + torch.rand(()).item())
        return super().step(closure)


class Once(SGD):
    """Draws one random number, which is the same for all parameters: a few steps from the same
    random state do not show it."""

    def step(self, closure=None):
        scale = torch.rand(())
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(scale)
        return super().step(closure)


class Rows(SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(0))
        return super().step(closure)


class Loud(SGD):
    made = stepped = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Loud.made += 1
        print("made")
        warnings.warn("made", stacklevel=2)

    def step(self, closure=None):
        Loud.stepped += 1
        print("stepped")
        return super().step(closure)


class Breaks(SGD):
    def step(self, closure=None):
        raise OverflowError("this class never steps")


class Divided(SGD):
    """Steps some parameters on each rank and sends them to the others, as the first Muon did."""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        size = int(os.environ["WORLD_SIZE"])
        for p in params[dist.get_rank() :: size]:
            p.detach().sub_(p.grad.sign(), alpha=0.1)
        for i, p in enumerate(params):
            self.send(p, i % size)

    def send(self, p, owner):
        dist.broadcast(p.detach(), owner)


class DividedByGroup(Divided):
    """Catches what its call of the group raises."""

    def send(self, p, owner):
        try:
            dist.group.WORLD.allreduce(p.detach()).wait()
        except RuntimeError:
            p.detach().zero_()


class OnOneRank(SGD):
    """Communicates on one rank only."""

    def step(self, closure=None):
        if dist.get_rank() == 1:
            dist.barrier()
        return super().step(closure)


class Logged(SGD):
    """Reads its rank and sends nothing."""

    def step(self, closure=None):
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            print("a step")
        return super().step(closure)


class Fine(AdamW):
    pass


class Scaled(torch.optim.Optimizer):
    """Gradient descent with a factor for each parameter, which subclasses choose."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(p.grad * self.factor(p, group), alpha=-group["lr"])

    def factor(self, p, group):
        """Clip by a norm of parameters that lie with this one."""
        norm = sum(
            q.grad.double().square().sum() for q in group["params"] if self.near(p, q, group)
        )
        return 1 / (float(norm) ** 0.5 + 1)

    def near(self, p, q, group):
        """Tell which parameters a parameter is clipped with, beside itself."""
        return q is p


class WhereItDecays(Scaled):
    def near(self, p, q, group):
        return q is p or group["weight_decay"] > 0


class OfItsShape(Scaled):
    def near(self, p, q, group):
        return q.shape == p.shape


class Large(Scaled):
    def near(self, p, q, group):
        return q is p or min(p.numel(), q.numel()) > 100


class InItsDtype(Scaled):
    def near(self, p, q, group):
        return q is p or p.dtype == torch.float32


class Stochastic(Scaled):
    def factor(self, p, group):
        return torch.rand(()) if p.dtype == torch.bfloat16 else 1.0


class ByAttribute(Scaled):
    def factor(self, p, group):
        return p.lr_scale


class ByStride(Scaled):
    def factor(self, p, group):
        return 1.0 if p.is_contiguous() else 0.5


class BySeed(Scaled):
    def factor(self, p, group):
        return torch.initial_seed() % 7


class ByGroup(Scaled):
    def factor(self, p, group):
        return 1 + [g is group for g in self.param_groups].index(True)


def halves(params):
    return [nn.Parameter(p.detach().bfloat16()) for p in params]


def turned(params):
    return [nn.Parameter(p.detach().t().contiguous().t()) for p in params if p.dim() == 2]


MAKES = {
    "clips": lambda p: ZeroRedundancyOptimizer(p, Clips, lr=0.1),
    "clips, in two groups": lambda p: ZeroRedundancyOptimizer(
        [{"params": p[:1]}, {"params": p[1:], "lr": 0.2}], Clips, lr=0.1
    ),
    "draws": lambda p: ZeroRedundancyOptimizer(p, Draws, lr=0.1),
    "draws once": lambda p: ZeroRedundancyOptimizer(p, Once, lr=0.1),
    "rows, cut": lambda p: ZeroRedundancyOptimizer(p, Rows, lr=0.1, shard="even"),
    "rows, cut by a policy": lambda p: ZeroRedundancyOptimizer(p, Rows, lr=0.1, shard=even),
    "Adafactor, cut": lambda p: ZeroRedundancyOptimizer(p, Adafactor, shard="even"),
    "Muon, cut": lambda p: ZeroRedundancyOptimizer(p[:1], Muon, shard="even"),
    "breaks": lambda p: ZeroRedundancyOptimizer(p, Breaks, lr=0.1),
    "a group's own class": lambda p: ZeroRedundancyOptimizer(
        [{"params": p[:1]}, {"params": p[1:], "optimizer_class": Clips, "lr": 0.1}], AdamW
    ),
    "a later group": (
        lambda p: ZeroRedundancyOptimizer(p[:1], AdamW).add_param_group(
            {"params": p[1:], "optimizer_class": Clips, "lr": 0.1}
        )
    ),
    "trust on one rank": lambda p: ZeroRedundancyOptimizer(
        p, Clips, lr=0.1, trust_optimizer_class=dist.get_rank() == 0
    ),
    "decays, the second group": lambda p: ZeroRedundancyOptimizer(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:], "weight_decay": 0.1}],
        WhereItDecays,
    ),
    "of its shape": lambda p: ZeroRedundancyOptimizer(p, OfItsShape),
    "large ones": lambda p: ZeroRedundancyOptimizer(p, Large),
    "in its dtype": lambda p: ZeroRedundancyOptimizer(p, InItsDtype),
    "copies of its dtype": lambda p: ZeroRedundancyOptimizer(
        halves(p), InItsDtype, master_dtype=torch.float32
    ),
    "stochastic rounding": lambda p: ZeroRedundancyOptimizer(halves(p), Stochastic),
    "attributes, cut": lambda p: ZeroRedundancyOptimizer(p, ByAttribute, shard="even"),
    "strides, cut": lambda p: ZeroRedundancyOptimizer(turned(p), ByStride, shard="even"),
    "seed": lambda p: ZeroRedundancyOptimizer(p, BySeed),
    "divided": lambda p: ZeroRedundancyOptimizer(p, Divided, lr=0.1),
    "divided by a group": lambda p: ZeroRedundancyOptimizer(p, DividedByGroup, lr=0.1),
    "on one rank": lambda p: ZeroRedundancyOptimizer(p, OnOneRank, lr=0.1),
    "no word": lambda p: ZeroRedundancyOptimizer(p, Fine, lr=0.1, trust_optimizer_class="yes"),
}
FINE = {
    "rows": lambda p: ZeroRedundancyOptimizer(p, Rows, lr=0.1),
    "logged": lambda p: ZeroRedundancyOptimizer(p, Logged, lr=0.1),
    "fine": lambda p: ZeroRedundancyOptimizer(p, Fine),
    "fine, cut": lambda p: ZeroRedundancyOptimizer(p, Fine, shard="even"),
    "bfloat16": lambda p: ZeroRedundancyOptimizer(halves(p), classes()["pytorch_optimizer.Lion"]),
    "float16": lambda p: ZeroRedundancyOptimizer([q.detach().half() for q in p], Fine),
    "another dtype": lambda p: ZeroRedundancyOptimizer(halves(p), InItsDtype),
    "attributes": lambda p: ZeroRedundancyOptimizer(p, ByAttribute),
    "strides": lambda p: ZeroRedundancyOptimizer(turned(p), ByStride),
    "no strides, cut": lambda p: ZeroRedundancyOptimizer(p, ByStride, shard="even"),
    "by group": lambda p: ZeroRedundancyOptimizer(
        [{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.1}], ByGroup
    ),
    "a rate that is a tensor": lambda p: ZeroRedundancyOptimizer(p, Fine, lr=torch.tensor(0.1)),
    "clips, trusted": lambda p: ZeroRedundancyOptimizer(
        p, Clips, lr=0.1, trust_optimizer_class=True
    ),
    "draws, trusted": lambda p: ZeroRedundancyOptimizer(
        p, Draws, lr=0.1, trust_optimizer_class=True
    ),
}


def made():
    found = {}
    for name, make in {**MAKES, **FINE}.items():
        params = parameters(SHAPES)
        for i, p in enumerate(params):
            p.lr_scale = 1.0 + i
        found[name] = caught(lambda make=make, params=params: make(params))
    return found


REFUSED = {  # by name: what the error says
    "clips": "together with others and alone",
    "clips, in two groups": "together with others",
    "draws": "random numbers",
    "draws once": "random numbers",
    "rows, cut": "shard='whole'",
    "rows, cut by a policy": "whole and cut",
    "Adafactor, cut": "whole and cut",
    "Muon, cut": "Muon",
    "breaks": "OverflowError: this class never steps",
    "a group's own class": "Clips steps a parameter differently",
    "a later group": "Clips steps",
    "trust on one rank": "Clips steps a parameter differently",
    "decays, the second group": "together with others",
    "of its shape": "together with others",
    "large ones": "together with others",
    "in its dtype": "together with others",
    "copies of its dtype": "together with others",
    "stochastic rounding": "random numbers",
    "attributes, cut": "whole and cut",
    "strides, cut": "whole and cut",
    "seed": "a second time",
    "divided": "communicates (c10d::broadcast_)",
    "divided by a group": "communicates (c10d::allreduce_)",
    "on one rank": "communicates (c10d::barrier)",
    "no word": "trust_optimizer_class must be True or False",
}


def test_a_class_that_is_not_known_is_tried_and_refused_on_every_rank():
    classes()
    for rank in run(2, made):
        assert {
            name: rank[name] for name, words in REFUSED.items() if words not in (rank[name] or "")
        } == {}
        assert all(
            rank[name].startswith("TypeError" if name == "no word" else "ValueError")
            for name in REFUSED
        )
        assert {name: rank[name] for name in FINE} == dict.fromkeys(FINE)
        assert all(
            "trust_optimizer_class=True" in rank[name]
            for name in REFUSED
            if name not in ("Muon, cut", "no word")
        )


def trained_by_attributes():
    """Train whole parameters that lie transposed or have attributes, in backward, beside a plain
    optimizer; give what differs."""
    worst = []
    for kind in (ByAttribute, ByStride):
        ours, plain = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2))
        for module in (ours, plain):
            for i, (p, value) in enumerate(
                zip(module.parameters(), parameters([(8, 8), (8,)] * 3), strict=True)
            ):
                p.data = value.detach().t().contiguous().t() if i % 4 == 0 else value.detach()
                p.lr_scale = 1.0 + i
        zero = ZeroRedundancyOptimizer(ours.parameters(), kind, lr=0.01)
        data_parallel(ours, zero)
        optimizer = kind(plain.parameters(), lr=0.01)
        for _ in range(3):
            for module, steps in ((ours, zero), (plain, optimizer)):
                module(torch.ones(2, 8)).square().mean().backward()
                steps.step()
                steps.zero_grad()
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        worst.append(max(float((p - q).detach().abs().max()) for p, q in pairs))
    return worst


def test_whole_parameters_have_their_attributes_and_strides_when_they_are_stepped_in_backward():
    assert all(worst < 1e-6 for rank in run(2, trained_by_attributes) for worst in rank)


def quiet():
    """Make optimizers of a loud class; give what was printed, warned of, drawn and done, beyond
    what the class does for the user's own parameters."""
    arguments._FOUND.clear()  # what other tests of this process have tried
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    SGD([torch.zeros(1)])  # from here on torch's class calls hooks when a class made of it steps
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    heard = []
    hook = register_optimizer_step_pre_hook(lambda *_: heard.append(1))
    shown, counts = io.StringIO(), []
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(shown):
        warnings.simplefilter("always")
        for lr in (0.1, 0.1, 0.2):
            zero = ZeroRedundancyOptimizer(parameters(SHAPES), Loud, lr=lr)
            counts.append((Loud.made, Loud.stepped))
    hook.remove()
    caught(lambda: ZeroRedundancyOptimizer(parameters(SHAPES), Draws, lr=0.1))
    same = (
        random.getstate() == before[0],
        str(np.random.get_state()) == before[1],
        torch.equal(torch.get_rng_state(), before[2]),
    )
    for k in range(100):
        caught(lambda: ZeroRedundancyOptimizer(parameters([(3,)]), Loud, lr=0.1 + k))
    return (
        shown.getvalue(),
        len(warned),
        same,
        heard,
        counts,
        len(zero.param_groups),
        max(map(len, arguments._FOUND.values())),
        len(arguments._FOUND),
    )


def test_a_trial_leaves_random_states_output_and_hooks_alone_and_is_made_once():
    for shown, warned, same, heard, counts, of_groups, most, classes in run(2, quiet):
        assert (shown, warned, same, heard, of_groups) == ("made\n" * 3, 3, (True,) * 3, [], 1)
        assert counts[1] == (counts[0][0] + 1, counts[0][1]) and counts[2][1] == 2 * counts[0][1], (
            "tried once for each set of options"
        )
        assert most <= 16 and classes == 2


def after_refusal():
    """Go on with parameters of a refused class, and with an optimizer that has refused a group."""
    params = parameters(SHAPES)
    before = [p.detach().clone() for p in params]
    caught(lambda: ZeroRedundancyOptimizer(params, Clips, lr=0.1, parameters_as_bucket_view=True))
    same = all(map(torch.equal, before, params))
    zero = ZeroRedundancyOptimizer(params[:3], AdamW, lr=0.1)
    refused = caught(
        lambda: zero.add_param_group({"params": params[3:], "optimizer_class": Clips, "lr": 0.1})
    )
    zero.add_param_group({"params": params[3:], "lr": 0.1})
    plain = parameters(SHAPES)
    trained, wanted = train(lambda: zero, params), train(lambda: AdamW(plain, lr=0.1), plain)
    zero.consolidate_state_dict(to=None)
    return (
        same,
        refused,
        max(float((a - b).abs().max()) for a, b in zip(trained, wanted, strict=True)),
        len(zero.state_dict()["state"]),
    )


def test_a_refused_class_leaves_everything_as_it_was():
    for same, refused, apart, states in run(2, after_refusal):
        assert same and "Clips" in refused and apart < 1e-5 and states == len(SHAPES)
