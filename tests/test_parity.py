"""Agreement of values against every way to differ, and parity against every way to be wrong."""

import functools
import itertools
import math
import random
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from common import caught_error, run_each
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zero_nb import Group, assert_parity, assert_same, run
from zero_nb.comm.recording import record
from zero_nb.verify.parity import check_parity
from zero_nb.verify.rounding import (
    BUFFERS,
    GRADIENTS,
    POSITION,
    STEP,
    SUMMATION,
    UNREDUCED,
    UNREPEATABLE,
    summation_bound,
)
from zero_nb.verify.trainings import PARITY_MODES

RANK = dist.get_rank


@dataclass
class Config:
    depth: int
    note: str = ""


def weights(*changes):
    """Give a tensor with some elements changed on rank 1."""
    w = torch.arange(70_000.0).reshape(7, 100, 100)
    for index in changes if RANK() == 1 else ():
        w[index] = -1.0
    return w


def nan(bits):
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


# what a rank has, and what the error says on all of them
DIFFERENCES = {
    "a number": (lambda: {"lr": 0.1 + RANK()}, "['lr'] (float): rank 0 has 0.1, rank 1 has 1.1"),
    "a type": (lambda: [1, (2.0, 2)[RANK()]], "[1]: rank 0 has float, rank 1 has int"),
    "a flag and a number": (lambda: (True, 1)[RANK()], "the value: rank 0 has bool"),
    "the sign of zero": (lambda: (0.0, -0.0)[RANK()], "rank 0 has 0.0, rank 1 has -0.0"),
    "a key": (lambda: {"ab"[RANK()]: 1}, "rank 0 has ['a'] (int), rank 1 has ['b'] (int)"),
    "the order of an ordered dict": (
        lambda: [OrderedDict([("a", 1), ("b", 2)][:: 1 - 2 * RANK()])],
        "rank 0 has [0]['a'] (int), rank 1 has [0]['b'] (int)",
    ),
    "a missing entry": (lambda: [[1], [2]][: 2 - RANK()], "rank 0 has list of 2, rank 1 has list"),
    "a field": (lambda: Config(3, "ab"[RANK()]), ".note (str): rank 0 has 'a', rank 1 has 'b'"),
    "a long text": (
        lambda: "é" * 500 + "xy"[RANK()] + "z" * 500,
        "the value, character 500 (str of 1001)",
    ),
    "a dtype": (
        lambda: torch.zeros(2, dtype=(torch.float32, torch.float64)[RANK()]),
        "rank 0 has float32 [2] on cpu, rank 1 has float64 [2] on cpu",
    ),
    "a shape": (lambda: torch.zeros(2, 3 + RANK()), "rank 0 has float32 [2, 3] on cpu"),
    "an element": (
        lambda: [weights((3, 50, 7), (6, 0, 0))],
        "[0][3, 50, 7] (float32 [7, 100, 100] on cpu): rank 0 has 35007.0",
    ),
    "the first element": (lambda: weights((0, 0, 0)), "the value[0, 0, 0]"),
    "the last element": (lambda: weights((6, 99, 99)), "the value[6, 99, 99]"),
    "a transposed one": (lambda: weights((3, 50, 7)).mT, "the value[3, 7, 50]"),
    "of no dimension": (lambda: torch.tensor(float(RANK())), "the value (float32 [] on cpu)"),
    "bits of a nan": (lambda: nan(0x7FC00000 + RANK()), "rank 1 has nan (bits 7fc00001)"),
    "half precision": (
        lambda: torch.ones(9, dtype=torch.bfloat16) * (1 + RANK() / 128),
        "rank 0 has 1.0 (bits 3f80), rank 1 has 1.0078125 (bits 3f81)",
    ),
    "complex": (lambda: torch.full((2,), RANK() * 1j).conj(), "rank 1 has -1j"),
    "a truth value": (lambda: torch.tensor([True, RANK() == 0]), "[1] (bool [2] on cpu)"),
}
SAME = {
    "keys in another order": lambda: dict([("a", 1), ("b", 2)][:: 1 - 2 * (RANK() % 2)]),
    "nan": lambda: [math.nan, nan(0x7FC00000)],
    "strides": lambda: torch.ones(3, 2) if RANK() else torch.ones(2, 3).mT,
    "a set": lambda: set("abc") if RANK() else set("cba"),
    "nothing": lambda: None,
    "no elements": lambda: torch.empty(0, 3),
    "all kinds": lambda: (1, "x", b"y", 1j, torch.float32, Config(1), range(3), {(1, 2): []}),
}
REFUSED = {
    "an object": (object, "TypeError", "[1] is of type object, which cannot be compared"),
    "a module": (lambda: torch.nn.Linear(1, 1), "TypeError", "of a module its state_dict()"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "TypeError", "only dense tensors"),
    "meta": (lambda: torch.empty(2, device="meta"), "TypeError", "meta tensor"),
    "a subclass": (lambda: Tagged([1.0]), "TypeError", "Tagged, whose elements"),
    "a strange key": (lambda: {object(): 1}, "TypeError", "a key of type object"),
    "itself": (lambda: looped(), "ValueError", "it lies in itself"),
}


class Tagged(torch.Tensor):
    """A tensor of a user's class."""


def looped():
    value = []
    value.append(value)
    return value


def compare(make):
    return caught_error(lambda: assert_same(None, make(), "the setup"))


def test_what_differs_is_named_on_all_ranks():
    cases = {name: (make,) for name, (make, _) in DIFFERENCES.items()}
    for name, found in run_each(2, compare, cases).items():
        kind, text = found[0]
        assert found == [(kind, text)] * 2 and kind == "AssertionError", (name, found)
        assert "the setup: rank 1 differs from rank 0, first at " in text, (name, text)
        assert DIFFERENCES[name][1] in text, (name, text)


def test_what_is_the_same_is_no_error():
    cases = {name: (make,) for name, make in SAME.items()}
    assert run_each(3, compare, cases) == {name: [None] * 3 for name in SAME}


@pytest.mark.parametrize("where", [0, 1])
def test_what_cannot_be_compared_is_refused_on_all_ranks(where):
    def one(make):
        return compare(lambda: [0, make() if RANK() == where else 1])

    cases = {name: (make,) for name, (make, *_) in REFUSED.items()}
    for name, found in run_each(2, one, cases).items():
        _, kind, text = REFUSED[name]
        assert [error[0] for error in found] == [kind] * 2, (name, found)
        assert all(text in error[1] for error in found), (name, found)


def test_the_ranks_that_differ_from_most_are_named():
    def several():
        return caught_error(lambda: assert_same(None, {"seed": [7, 1, 1, 7, 1][RANK()]}, "seeds"))

    for _, text in run(5, several):
        assert "seeds: ranks 0, 3 differ from ranks 1, 2, 4, first at ['seed']" in text
        assert "rank 1 has 1, rank 0 has 7" in text


def test_groups_and_meshes_name_global_ranks():
    def inside():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        value = RANK() == 3
        calls = {
            "group": lambda: assert_same(Group(pairs[RANK() // 2]), value, "it"),
            "torch's": lambda: assert_same(pairs[RANK() // 2], value, "it"),
            "mesh": lambda: assert_same(mesh, value, "it"),
            "line": lambda: assert_same(mesh["b"], value, "it"),
            "same": lambda: assert_same(mesh, 1, "it"),
        }
        return {name: caught_error(call) for name, call in calls.items()}

    ranks = run(4, inside)
    for name in ("group", "torch's", "line"):
        assert [found[name] for found in ranks[:2]] == [None, None]
        assert all("rank 3 differs from rank 2" in found[name][1] for found in ranks[2:])
    assert all(found["mesh"][0] == "AssertionError" for found in ranks)
    assert all("rank 3" in found["mesh"][1] for found in ranks)
    assert [found["same"] for found in ranks] == [None] * 4


def test_another_call_elsewhere_is_an_error_on_both():
    def apart():
        return caught_error(lambda: assert_same(None, 1, f"the value of rank {RANK()}"))

    for kind, text in run(2, apart):
        assert kind == "ValueError" and "ranks disagree on what comes next" in text


def test_tensors_are_not_sent():
    def traffic():
        group = record()
        large = torch.zeros(4_000_000)
        assert_same(group, large, "zeros")
        same = sum(event.bytes for event in group.log)
        large[-1] = RANK()
        found = caught_error(lambda: assert_same(group, large, "zeros"))
        assert "the value[3999999]" in found[1]
        return same, sum(event.bytes for event in group.log)

    for same, different in run(2, traffic):
        assert 0 < same < 1000 and different < 100_000  # of 16 MB


def test_a_process_alone_agrees_with_itself():
    assert_same(None, {"a": torch.ones(3)}, "it")
    with pytest.raises(TypeError, match="cannot be compared"):
        assert_same(None, object(), "it")


class ByNorm(torch.optim.Optimizer):
    """A step of the length lr in each tensor."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class OfMatrices(torch.optim.Optimizer):
    """Needs matrices, and divides by the norm of all gradients that it has."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            total = sum(p.grad.square().sum() for p in params)
            for p in params:
                p.sub_(p.grad @ p.grad.T @ p.grad / (1 + total), alpha=group["lr"])


class Skips(torch.optim.SGD):
    """Leaves the last element of each tensor as it is, but only in a tensor that is not a whole one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 1:
                    p.grad[-1:] = 0
        return super().step(closure)


DRAWS = torch.Generator().manual_seed(0)


class OwnDraws(nn.Module):
    """Draws from a generator that no seed reaches."""

    def forward(self, x):
        return x * torch.rand(x.shape, generator=DRAWS)


class Branches(nn.Module):
    """Uses a layer on even ranks, freezes another, and has a third that no rank uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 7) for _ in range(4))
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        y = self.layers[1](x) + self.layers[2](x)
        return y + self.layers[0](x) if RANK() % 2 == 0 else y


def matrices():
    layers = (nn.Linear(30, 50, bias=False), nn.Tanh(), nn.Linear(50, 7, bias=False))
    return nn.Sequential(*layers)


def network(*between):
    parts = (nn.Linear(30, 50), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(50), nn.Linear(50, 7))
    return nn.Sequential(*parts, *between)


def batch(step, rank):
    return torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model, x):
    return model(x).square().mean()


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [("rest", p) for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 1e-2},
        {"params": [p for _, p in others], "lr": 1e-3, "shard": "whole"},
    ]
    return groups, torch.optim.AdamW, {"weight_decay": 0.1}


ADAMW = (torch.optim.AdamW, {"lr": 1e-2})
OPTIMIZERS = {
    "AdamW": ADAMW,
    "amsgrad, no fused kernel": (torch.optim.AdamW, {"amsgrad": True, "fused": False}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "a class alone": torch.optim.Adagrad,
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Muon and AdamW": muon_and_adamw,
}
SMALL = {"bucket_cap_mb": 0.002}
OPTIONS = dict.fromkeys(("zero2", "zero2-interleaved"), SMALL | {"cut_mb": 0.004})


def check(mode, optimizer, model_fn=network, data=batch, **how):
    how.setdefault("options", OPTIONS.get(mode))
    report = check_parity(model_fn, optimizer, data, 4, loss=loss, mode=mode, ddp=SMALL, **how)
    return report


@pytest.mark.turns(3)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_training_is_the_unsharded_one(size):
    cases = {
        (mode, name): (mode, optimizer)
        for mode in PARITY_MODES
        for name, optimizer in OPTIMIZERS.items()
    }
    for case, reports in run_each(size, check, cases, timeout=200).items():
        assert all(report == reports[0] for report in reports), case
        assert reports[0].same and reports[0].steps == 4, (case, reports[0])
        causes = [found.cause for found in reports[0].explained]
        summed = [cause for cause in causes if cause.startswith(SUMMATION)]
        assert all(cause in (*summed, POSITION) for cause in causes), (case, causes)
        if size < 3 or case[0] == "zero1":  # two numbers have one sum
            assert not summed, (case, summed)


def half():
    return nn.Sequential(nn.Linear(30, 51), nn.Tanh(), nn.Linear(51, 7)).bfloat16()


def images(step, rank):
    return batch(step, rank)[:, :27].reshape(8, 3, 3, 3)


def convolution():
    model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Flatten(), nn.Linear(20, 3)).double()
    return model.to(memory_format=torch.channels_last)


def test_other_models():
    cases = {
        "half precision": ("zero1-overlap", ADAMW, half, lambda s, r: batch(s, r).bfloat16()),
        "half SGD": ("zero1-overlap", OPTIMIZERS["SGD"], half, lambda s, r: batch(s, r).bfloat16()),
        "channels last": (
            "zero1-overlap, interleaved",
            ADAMW,
            convolution,
            lambda s, r: images(s, r).double(),
        ),
    }
    unused = {"find_unused_parameters": True}

    def branches(mode):
        options = unused if mode.startswith("zero2") else None
        ddp = SMALL | unused
        return check_parity(
            Branches, ADAMW, batch, 4, loss=loss, mode=mode, ddp=ddp, options=options
        )

    for case, reports in run_each(3, check, cases).items():
        assert reports[0].same, (case, reports[0])
    modes = {mode: (mode,) for mode in PARITY_MODES}
    for mode, reports in run_each(3, branches, modes).items():
        assert reports[0].same and reports[0].parameters == 6, (mode, reports[0])


def test_seeds_are_used_up_in_both_and_given_back():
    def draws():
        torch.manual_seed(5)
        random.seed(5)
        report = check("zero1", ADAMW)
        return report.same, torch.rand(1).item(), random.random()

    def plain():
        torch.manual_seed(5)
        random.seed(5)
        return True, torch.rand(1).item(), random.random()

    assert run(2, draws) == [plain()] * 2


def other_second_gradient():
    """Give models of which the second multiplies a gradient by 1 + 1e-5."""
    made = []

    def make():
        model = network()
        made.append(model)
        if len(made) == 2:
            model[0].weight.register_hook(lambda gradient: gradient * (1 + 1e-5))
        return model

    return make


def other_second_buffer():
    made = []

    def make():
        model = network()
        made.append(model)
        if len(made) == 2:
            model[3].momentum = 0.2
        return model

    return make


TRUSTED = {"trust_optimizer_class": True}
EVEN = {"shard": "even", **TRUSTED}


@pytest.fixture(scope="module")
def sgd_with_hooks():
    """From the first SGD of a process on, its step calls hooks, also as `super().step()`."""
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)])


WRONG = {  # what is trained, and what must be said: step, place and cause
    "norms of parts": ((ByNorm, {}), network, EVEN, 0, "parameter 0.weight", STEP),
    "parts of parts": ((Skips, {"lr": 0.1}), network, EVEN, 0, "parameter ", STEP),
    "matrices by a norm of all": ((OfMatrices, {}), matrices, TRUSTED, 0, "parameter ", STEP),
    "own draws": (ADAMW, lambda: network(OwnDraws()), {}, 0, "gradient of ", UNREPEATABLE),
    "a gradient": (ADAMW, other_second_gradient(), {}, 0, "gradient of 0.weight", GRADIENTS),
    "a buffer": (ADAMW, other_second_buffer(), {}, 0, "buffer 3.running_mean", BUFFERS),
}


@pytest.mark.turns(2)
@pytest.mark.usefixtures("sgd_with_hooks")
@pytest.mark.parametrize("mode", PARITY_MODES)
def test_what_is_wrong_is_found_and_named(mode):
    cases = {
        name: (mode, optimizer, model_fn)
        for name, (optimizer, model_fn, sharded, *_) in WRONG.items()
        if not sharded
    }
    found = run_each(3, check, cases)

    def trusted(name):
        optimizer, model_fn, sharded, *_ = WRONG[name]
        return check(mode, optimizer, model_fn, sharded=sharded)

    rest = {name: (name,) for name in WRONG if name not in cases}
    found |= run_each(3, trusted, rest)
    for name, reports in found.items():
        *_, step, what, cause = WRONG[name]
        first = reports[0].difference
        assert all(report == reports[0] for report in reports)
        assert first is not None, name
        assert (first.step, first.cause) == (step, cause), (name, first)
        assert first.what.startswith(what) and first.count > 0, (name, first)
        assert not reports[0].same and "DIFFERENT at step 0" in str(reports[0])


@pytest.mark.usefixtures("sgd_with_hooks")
def test_a_difference_in_a_later_step_is_found_there():
    class Tired(torch.optim.SGD):
        """Forgets half of the gradient from its third step on, in a part of a tensor."""

        steps = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.steps += 1
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and self.steps > 2 and p.dim() == 1:
                    p.grad = p.grad / 2
            return super().step(closure)

    def late():
        return check("zero1", (Tired, {"lr": 0.1}), sharded=EVEN)

    first = run(2, late)[0].difference
    assert (first.step, first.cause) == (2, STEP)


@pytest.mark.usefixtures("sgd_with_hooks")
@pytest.mark.parametrize("error", [1e-4, 0.5])
def test_the_largest_difference_is_that_of_the_error(error):
    class Shifted(torch.optim.SGD):
        """Is off by so much in one element of a part of a tensor."""

        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                if p.dim() == 1:
                    p[len(p) // 2] += error

    def shifted():
        return check("zero1", (Shifted, {"lr": 1e-3}), matrices, sharded=EVEN)

    for report in run(2, shifted):
        assert abs(report.difference.largest / error - 1) < 0.01, report.difference


def by_rank():
    model = network()
    with torch.no_grad():
        model[4].bias[3] += RANK()
    return model


def test_one_call_starts_the_ranks_and_raises():
    report = assert_parity(network, ADAMW, batch, 2, 2, loss=loss)
    assert (report.world_size, report.steps, report.mode) == (2, 2, "zero1")
    assert report.elements == sum(p.numel() for p in network().parameters())
    text = report._repr_markdown_()
    assert "| same | 2 steps, zero1 |" in text and "| ranks | 2 |" in text
    with pytest.raises(AssertionError, match=r"DIFFERENT at step 0, parameter 0.weight\[0, 0\]"):
        assert_parity(network, ByNorm, batch, 2, 2, loss=loss, sharded=EVEN)
    with pytest.raises(AssertionError, match=r"model_fn returns: rank 1 differs from rank 0") as e:
        assert_parity(by_rank, ADAMW, batch, 2, 2, loss=loss)
    assert "['4.bias'][3]" in str(e.value)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"mode": "soon"}, ValueError, "mode must be one of 'zero1'"),
        ({"options": {"lag": 0}}, ValueError, "options are for a mode that steps in backward"),
        (
            {"mode": "zero1-overlap", "options": {"max_grad_norm": 1.0}},
            ValueError,
            "options must leave the gradient as it is, got max_grad_norm",
        ),
        ({"sharded": {"master_dtype": torch.float64}}, ValueError, "master_dtype steps a copy"),
        ({"model_fn": lambda: 1}, TypeError, "model_fn must return a module, got a int"),
        ({"model_fn": lambda: nn.Linear(30, random_sizes())}, ValueError, "same model each time"),
        ({"optimizer": (torch.optim.AdamW, {"lr": -1.0})}, ValueError, "Invalid learning rate"),
        ({"loss": None, "model_fn": lambda: Texts()}, TypeError, "the model returns a str"),
    ],
)
def test_bad_input_is_refused(how, error, text):
    given = {"model_fn": network, "optimizer": ADAMW, "data": batch, "steps": 2, "loss": loss}
    with pytest.raises(error, match=text):
        assert_parity(**{**given, **how})


NO_RECIPE = "function of the model that returns (parameters or groups, class, options), got "
REFUSED_EVERYWHERE = {  # on the ranks of a job; what is given, the error and its words
    "no steps": ({"steps": 0}, "ValueError", "whole number, 1 or more, got 0"),
    "half a step": ({"steps": 2.5}, "ValueError", "whole number, 1 or more, got 2.5"),
    "a text": ({"steps": "3"}, "ValueError", "whole number, 1 or more, got '3'"),
    "a list": ({"sharded": [1]}, "TypeError", "sharded must be a dict of options, got a list"),
    "nothing": ({"optimizer": None}, "TypeError", NO_RECIPE + "a NoneType"),
    "a name": ({"optimizer": "adamw"}, "TypeError", NO_RECIPE + "a str"),
    "an optimizer": (
        {"optimizer": lambda m: torch.optim.AdamW(m.parameters())},
        "TypeError",
        NO_RECIPE + "one that returns a AdamW",
    ),
    "of parameters": (
        {"optimizer": lambda params: torch.optim.AdamW(params)},
        "TypeError",
        NO_RECIPE + "one that raises: optimizer can only optimize Tensors",
    ),
    "other steps on each rank": (None, "ValueError", "steps=1"),
    "no parameters": ({"model_fn": nn.ReLU}, "ValueError", "got a ReLU without any"),
}


def test_what_is_no_recipe_is_an_error_on_all_ranks():
    def refused(how):
        given = {"model_fn": network, "optimizer": ADAMW, "data": batch, "loss": loss}
        if how is None:
            given["steps"] = 1 + RANK()
        return caught_error(lambda: check_parity(**{**given, **(how or {})}))

    cases = {name: (how,) for name, (how, *_) in REFUSED_EVERYWHERE.items()}
    for name, found in run_each(2, refused, cases).items():
        _, kind, text = REFUSED_EVERYWHERE[name]
        assert [error[0] for error in found] == [kind] * 2, (name, found)
        assert all(text in error[1] for error in found), (name, found)


class Doubles(nn.Linear):
    """Writes into its input."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Spare(nn.Linear):
    """Has a parameter that no rank uses."""

    def __init__(self):
        super().__init__(30, 7)
        self.spare = nn.Parameter(torch.ones(()))


def test_inputs_that_are_written_and_gradients_that_ddp_does_not_average():
    """Each forward has a batch of its own, also if the same tensor is given in each step."""
    partial_class = functools.partial(torch.optim.AdamW, lr=1e-2)
    same = torch.ones(8, 30)
    cases = {
        mode: (mode, partial_class, lambda: Doubles(30, 7), lambda s, r: same)
        for mode in PARITY_MODES
    }
    cases["unreduced"] = ("zero1", ADAMW, Spare)
    found = run_each(2, check, cases)
    first = found.pop("unreduced")[0].difference
    assert first.step == 0 and first.cause == f"{UNREDUCED}; without one: spare", first
    for mode, reports in found.items():
        assert reports[0].same, (mode, reports[0])


SIZES = iter((5, 6) * 9)


def random_sizes():
    return next(SIZES)


class Texts(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        return "no loss"


class Loss(nn.Linear):
    """Takes its batch apart, and gives its loss by name."""

    def __init__(self):
        super().__init__(30, 3)

    def forward(self, x, scale=1.0):
        return {"loss": super().forward(x).square().mean() * scale}


@pytest.mark.parametrize(
    "data",
    [batch, lambda s, r: (batch(s, r), 2.0), lambda s, r: {"x": batch(s, r), "scale": 3.0}],
    ids=["tensor", "tuple", "dict"],
)
def test_batches_are_taken_apart(data):
    assert assert_parity(Loss, ADAMW, data, 2, 2).same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_order_of_summation_is_inside_the_bound_and_an_error_is_not(dtype, size):
    made = torch.Generator().manual_seed(size)
    scale = torch.logspace(-6, 3, 300, dtype=torch.float64)
    parts = (torch.randn(size, 300, generator=made, dtype=torch.float64) * scale).to(dtype)
    limit = summation_bound(parts.double().abs().mean(0), size, dtype)
    averages = []
    for order in itertools.permutations(range(size)):
        for before in (True, False):
            terms = [parts[i] / size if before else parts[i] for i in order]
            total = sum(terms[1:], terms[0])
            averages.append((total if before else total * (1 / size)).double())
    spread = torch.stack(averages)
    assert ((spread.max(0).values - spread.min(0).values) <= limit).all()
    if size > 2:
        assert (spread.max(0).values != spread.min(0).values).any()
    wrong = averages[0] + 4 * size * torch.finfo(dtype).eps * parts.double().abs().mean(0)
    assert ((wrong - averages[0]).abs() > limit)[100:].all()


class Hidden(int):
    def __repr__(self):
        return "hidden"


def test_numbers_are_compared_by_value_whatever_their_class_shows():
    def differ():
        rank = dist.get_rank()
        values = [
            Hidden(5 + rank),
            {"k": Hidden(rank)},
            10**5000 + rank,
            -(10**5000),
            True,
            Hidden(5),
        ]
        return [caught_error(lambda value=value: assert_same(None, value, "v")) for value in values]

    for told in run(2, differ):
        assert [error and error[0] for error in told] == ["AssertionError"] * 3 + [None] * 3
