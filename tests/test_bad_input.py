"""More than a hundred ways to get it wrong: each is a clear error on every rank, at once, and the job goes on."""

import copy
import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Muon

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.balancing import balanced
from zero_nb.plan.shards import ShardPlan, Span

SIZE, LIMIT = (
    2,
    8.0,
)  # ranks, and seconds that a collective may wait: far more than any case takes, so that a hang shows as what it is


class Case:
    """One bad input: what is done, the type of the error, and words that it must contain on every rank."""

    def __init__(self, do, kind, *words):
        self.do, self.kind, self.words = do, kind, words


GROUP = [None]  # the process group of the case that is running


def make(params, kind=AdamW, process_group=None, *args, **options):
    return ZeroRedundancyOptimizer(params, kind, process_group or GROUP[0], *args, **options)


def weight(*shape, **options):
    return nn.Parameter(torch.zeros(shape or (4, 4), **options))


def on_one(bad, good):
    return bad if dist.get_rank() == 1 else good


def stepped(zero):
    for group in zero.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    zero.step()
    return zero


def trained():
    return stepped(make([weight(), weight(4)]))


def saved(kind=AdamW, **options):
    """Give the state dict of an unsharded optimizer after a step."""
    params = [weight(), weight(4)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = kind(params, **options)
    optimizer.step()
    return optimizer.state_dict()


def loading(change, kind=AdamW, **options):
    """Load a state dict that `change` has spoilt."""

    def do():
        state_dict = saved(kind, **options)
        change(state_dict)
        trained().load_state_dict(state_dict)

    return do


def put(value, *path):
    """Write a value into a state dict; a function gives what this rank writes."""

    def change(state_dict):
        *way, last = path
        for key in way:
            state_dict = state_dict[key]
        state_dict[last] = value() if callable(value) else value

    return change


def drop(*path):
    def change(state_dict):
        *way, last = path
        for key in way:
            state_dict = state_dict[key]
        del state_dict[last]

    return change


def planned(*held):
    """Give a policy with a fixed answer: spans of (parameter, start, stop) for each rank."""
    return lambda specs, world_size, loads=None: ShardPlan(
        tuple(specs), tuple(tuple(Span(*span) for span in spans) for spans in held)
    )


def differing(specs, world_size, loads=None):
    return planned(*([(0, 0, 16)], [(1, 0, 16)])[:: 1 if dist.get_rank() else -1])(
        specs, world_size
    )


def sparse_gradient(one):
    layer = nn.Embedding(4, 2, sparse=not one or dist.get_rank() == 1)
    zero = make(layer.named_parameters(), SGD)
    layer(torch.tensor([1])).sum().backward()
    zero.step()


def moved():
    layer = nn.Linear(4, 2)
    zero = make(layer.named_parameters(), SGD)
    if dist.get_rank() == 1:
        layer.weight.data = layer.weight.data.clone()
    zero.step()


def unfrozen():
    layer = nn.Linear(4, 2)
    layer.weight.requires_grad_(False)
    zero = make(layer.named_parameters(), SGD)
    if dist.get_rank() == 1:
        layer.weight.requires_grad_(True)
    zero.step()


def other_lr_at_the_first_step():
    zero = make([weight()])
    zero.param_groups[0]["lr"] = on_one(1.0, 2.0)
    zero.step()


def other_call(mine, theirs):
    def do():
        zero = make([weight(), weight(4)])
        on_one(mine, theirs)(zero)

    return do


def grow(group):
    return lambda: trained().add_param_group(group())


NAMED = "is in none of its groups"
CONSTRUCTOR = {
    "no parameters": Case(lambda: make([]), ValueError, "empty parameter list"),
    "an empty generator": Case(lambda: make(p for p in []), ValueError, "empty parameter list"),
    "None": Case(lambda: make(None), TypeError, "iterable of Tensors", "NoneType"),
    "a number": Case(lambda: make(3), TypeError, "iterable of Tensors", "int"),
    "text": Case(lambda: make("weights"), TypeError, "iterable of Tensors", "str"),
    "one tensor": Case(lambda: make(weight()), TypeError, "iterable of Tensors", "Parameter"),
    "a model": Case(lambda: make(nn.Linear(2, 2)), TypeError, "model.parameters()"),
    "a model's state dict": Case(
        lambda: make(nn.Linear(2, 2).state_dict()), TypeError, "group dicts", "OrderedDict"
    ),
    "one group dict": Case(
        lambda: make({"params": [weight()]}), TypeError, "group dicts", "one dict"
    ),
    "a set": Case(lambda: make({weight(), weight(4)}), TypeError, "order", "set"),
    "tensors and groups": Case(lambda: make([{"params": [weight()]}, weight()]), TypeError, "both"),
    "groups and tensors": Case(lambda: make([weight(), {"params": [weight()]}]), TypeError, "both"),
    "a non-tensor": Case(
        lambda: make([weight(), 3]), TypeError, "can only optimize Tensors", "int"
    ),
    "an array": Case(
        lambda: make([weight().detach().numpy()]), TypeError, "can only optimize Tensors", "ndarray"
    ),
    "not a leaf": Case(lambda: make([weight() * 2]), ValueError, "non-leaf"),
    "twice in a list": Case(
        lambda: make([w := weight(), w]), ValueError, "parameters 0 and 1", "listed once"
    ),
    "twice under two names": Case(
        lambda: make([("a", w := weight()), ("b", w)]), ValueError, "listed once"
    ),
    "two of one name": Case(
        lambda: make([("a", weight()), ("a", weight())]), ValueError, "both called 'a'"
    ),
    "some names missing": Case(
        lambda: make([("a", weight()), weight()]), ValueError, "with/without names"
    ),
    "a name that is no text": Case(lambda: make([(1, weight())]), ValueError, "must be text", "1"),
    "a triple": Case(lambda: make([("a", weight(), 1)]), TypeError, "pairs", "tuple of 3"),
    "names in one group only": Case(
        lambda: make([{"params": [("a", weight())]}, {"params": [weight()]}]),
        ValueError,
        "with/without names",
    ),
    "twice in two groups": Case(
        lambda: make([{"params": [w := weight()]}, {"params": [w]}]),
        ValueError,
        "more than one parameter group",
    ),
    "twice in one group": Case(
        lambda: make([{"params": [w := weight(), w]}]), ValueError, "listed once"
    ),
    "a group without parameters": Case(
        lambda: make([{"lr": 1.0}]), ValueError, "'params' key", "'lr'"
    ),
    "a group of None": Case(
        lambda: make([{"params": None}]), TypeError, "'params' of a group", "NoneType"
    ),
    "a group of a model": Case(
        lambda: make([{"params": nn.Linear(2, 2)}]), TypeError, "model.parameters()"
    ),
    "a group of a set": Case(lambda: make([{"params": {weight()}}]), TypeError, "order", "set"),
    "a sparse parameter": Case(
        lambda: make([nn.Parameter(torch.zeros(3, 3).to_sparse())]), ValueError, "only dense"
    ),
    "an overlapping parameter": Case(
        lambda: make([torch.zeros(1).expand(4).requires_grad_()]), ValueError, "must be dense"
    ),
    "a slice": Case(
        lambda: make([torch.zeros(8)[::2].requires_grad_()]), ValueError, "must be dense"
    ),
    "a lazy parameter": Case(
        lambda: make(nn.LazyLinear(3).parameters()), ValueError, "uninitialized parameter"
    ),
    "a parameter without memory": Case(
        lambda: stepped(make([weight(device="meta")])), ValueError, "meta"
    ),
    "no class": Case(lambda: make([weight()], None), TypeError, "must be a class", "None"),
    "a class by name": Case(
        lambda: make([weight()], "AdamW"), TypeError, "must be a class", "'AdamW'"
    ),
    "an instance": Case(
        lambda: make([w := weight()], SGD([w])), TypeError, "must be a class", "SGD"
    ),
    "a function": Case(
        lambda: make([weight()], lambda params: AdamW(params)),
        TypeError,
        "must be a class",
        "as keywords",
    ),
    "a partial class": Case(
        lambda: make([weight()], functools.partial(AdamW, lr=1.0)),
        TypeError,
        "must be a class",
        "as keywords",
    ),
    "a class of something else": Case(
        lambda: make([weight()], nn.Linear), TypeError, "must be a class", "Linear"
    ),
    "the base class": Case(lambda: make([weight()], torch.optim.Optimizer), TypeError, "defaults"),
    "itself": Case(
        lambda: make([weight()], ZeroRedundancyOptimizer),
        ValueError,
        "unsharded class",
        "sharded already",
    ),
    "for sparse gradients": Case(
        lambda: make([weight()], torch.optim.SparseAdam), ValueError, "sparse gradients"
    ),
    "a functional optimizer": Case(
        lambda: make([weight()], functional()), ValueError, "functional", "torch.optim"
    ),
    "couples everything": Case(
        lambda: make([weight()], torch.optim.LBFGS),
        ValueError,
        "cannot be stepped apart",
        "unsharded",
    ),
    "a vector for Muon": Case(lambda: make([weight(4)], Muon), ValueError, "2D", "[4]"),
    "Muon in pieces": Case(
        lambda: make([weight(16, 16)], Muon, shard="even"), ValueError, "whole matrices"
    ),
    "an unknown option": Case(lambda: make([weight()], AdamW, momentun=1), TypeError, "momentun"),
    "a negative rate": Case(
        lambda: make([weight()], AdamW, lr=-1.0), ValueError, "Invalid learning rate: -1.0"
    ),
    "a rate that is no number": Case(
        lambda: make([weight()], AdamW, lr=float("nan")), ValueError, "nan"
    ),
    "a rate as text": Case(lambda: make([weight()], AdamW, lr="0.1"), TypeError, "'str'"),
    "a rate of None": Case(lambda: make([weight()], AdamW, lr=None), TypeError, "'NoneType'"),
    "betas above 1": Case(
        lambda: make([weight()], AdamW, betas=(2, 2)), ValueError, "Invalid beta"
    ),
    "one beta": Case(lambda: make([weight()], AdamW, betas=0.9), TypeError, "'float'"),
    "nesterov without momentum": Case(
        lambda: make([weight()], SGD, nesterov=True), ValueError, "Nesterov"
    ),
    "two kernels": Case(
        lambda: make([weight()], AdamW, fused=True, foreach=True),
        RuntimeError,
        "cannot be `True` together",
    ),
    "differentiable": Case(
        lambda: make([weight()], AdamW, differentiable=True),
        ValueError,
        "must be False",
        "unsharded",
    ),
    "a differentiable group": Case(
        lambda: make([{"params": [weight()], "differentiable": True}]), ValueError, "must be False"
    ),
    "capturable on the CPU": Case(
        lambda: stepped(make([weight()], AdamW, capturable=True)), AssertionError, "capturable"
    ),
    "a group's class by name": Case(
        lambda: make([{"params": [weight()], "optimizer_class": "SGD"}]),
        TypeError,
        "must be a class",
        "'SGD'",
    ),
    "a group's class of None": Case(
        lambda: make([{"params": [weight()], "optimizer_class": None}]),
        TypeError,
        "must be a class",
    ),
    "a group's class that couples": Case(
        lambda: make([{"params": [weight()], "optimizer_class": torch.optim.LBFGS}]),
        ValueError,
        "stepped apart",
    ),
    "a group sharded nowhere": Case(
        lambda: make([{"params": [weight()], "shard": "nowhere"}]), ValueError, "'nowhere'"
    ),
}
SETTINGS = {
    "an unknown shard": Case(
        lambda: make([weight()], shard="halves"),
        ValueError,
        "'even', 'whole', 'greedy'",
        "'halves'",
    ),
    "shard=None": Case(lambda: make([weight()], shard=None), ValueError, "'auto'", "None"),
    "shard=3": Case(lambda: make([weight()], shard=3), ValueError, "'auto'", "3"),
    "a list of shards": Case(
        lambda: make([weight()], shard=["even"]), ValueError, "'auto'", "['even']"
    ),
    "a policy that fails": Case(
        lambda: make([weight()], shard=lambda specs, n, loads=None: 1 / 0),
        ZeroDivisionError,
        "division by zero",
    ),
    "a policy that says nothing": Case(
        lambda: make([weight()], shard=lambda specs, n, loads=None: None),
        TypeError,
        "must return a ShardPlan",
        "NoneType",
    ),
    "a policy that forgets": Case(
        lambda: make([weight()], shard=planned([], [])), ValueError, "owned by nobody"
    ),
    "a policy that gives twice": Case(
        lambda: make([weight()], shard=planned([(0, 0, 16)], [(0, 0, 16)])),
        ValueError,
        "owned by",
        "and another",
    ),
    "a policy that goes too far": Case(
        lambda: make([weight()], shard=planned([(0, 0, 17)], [])), ValueError, "16"
    ),
    "a policy of a stranger": Case(
        lambda: make([weight()], shard=planned([(0, 0, 16)], [(1, 0, 4)])), (ValueError, IndexError)
    ),
    "a policy for other ranks": Case(
        lambda: make([weight()], shard=lambda specs, n, loads=None: balanced(specs, n + 1)),
        ValueError,
        "over 2 ranks",
        "over 3 ranks",
    ),
    "a policy with too few arguments": Case(
        lambda: make([weight()], shard=lambda specs: None), TypeError, "argument"
    ),
    "master dtype as text": Case(
        lambda: make([weight()], master_dtype="float32"), TypeError, "torch.float32", "'float32'"
    ),
    "master dtype as a type": Case(
        lambda: make([weight()], master_dtype=float), TypeError, "floating-point dtype"
    ),
    "an integer master dtype": Case(
        lambda: make([weight(dtype=torch.bfloat16)], master_dtype=torch.int32),
        TypeError,
        "torch.int32",
    ),
    "a complex master dtype": Case(
        lambda: make([weight()], master_dtype=torch.complex64), TypeError, "torch.complex64"
    ),
    "a lower master dtype": Case(
        lambda: make([weight()], master_dtype=torch.bfloat16),
        ValueError,
        "does not hold torch.float32",
    ),
    "another master dtype of 16 bits": Case(
        lambda: make([weight(dtype=torch.bfloat16)], master_dtype=torch.float16),
        ValueError,
        "does not hold torch.bfloat16",
    ),
    "a bucket of nothing": Case(
        lambda: make([weight()], bucket_cap_mb=0), ValueError, "above 0", "got 0"
    ),
    "a negative bucket": Case(
        lambda: make([weight()], bucket_cap_mb=-1), ValueError, "above 0", "got -1"
    ),
    "a bucket that is no number": Case(
        lambda: make([weight()], bucket_cap_mb=float("nan")), ValueError, "above 0", "nan"
    ),
    "a bucket as text": Case(
        lambda: make([weight()], bucket_cap_mb="1"), ValueError, "above 0", "'1'"
    ),
    "a bucket of None": Case(
        lambda: make([weight()], bucket_cap_mb=None), ValueError, "above 0", "None"
    ),
    "views as text": Case(
        lambda: make([weight()], AdamW, None, "yes"),
        TypeError,
        "parameters_as_bucket_view",
        "'yes'",
    ),
    "the rate by position": Case(
        lambda: make([weight()], AdamW, None, 1e-3),
        TypeError,
        "parameters_as_bucket_view",
        "by keyword",
    ),
    "overlap as text": Case(
        lambda: make([weight()], overlap_with_ddp="yes"), TypeError, "overlap_with_ddp", "'yes'"
    ),
    "overlap by position": Case(
        lambda: make([weight()], AdamW, None, False, "after"),
        TypeError,
        "overlap_with_ddp",
        "'after'",
    ),
    "too many by position": Case(
        lambda: make([weight()], AdamW, None, False, False, 1e-3), TypeError, "positional"
    ),
    "a group by name": Case(
        lambda: make([weight()], AdamW, "gloo"), ValueError, "not a member", "'gloo'"
    ),
    "a group of a list": Case(
        lambda: make([weight()], AdamW, [0, 1]), ValueError, "not a member", "[0, 1]"
    ),
    "a group by number": Case(lambda: make([weight()], AdamW, 7), ValueError, "7"),
    "somebody else's group": Case(
        lambda: make([weight()], AdamW, dist.GroupMember.NON_GROUP_MEMBER),
        ValueError,
        "not a member",
        "made",
    ),
    "a destroyed group": Case(
        lambda: make([weight()], AdamW, destroyed()), ValueError, "before it is destroyed"
    ),
}
LATER = {
    "a group of nothing": Case(grow(lambda: None), TypeError, "must be a dict", "NoneType"),
    "a list as a group": Case(grow(lambda: [weight()]), TypeError, "must be a dict", "list"),
    "a tensor as a group": Case(grow(weight), TypeError, "must be a dict", "Parameter"),
    "a later group without parameters": Case(grow(lambda: {"lr": 1.0}), ValueError, "'params' key"),
    "a later group of None": Case(grow(lambda: {"params": None}), TypeError, "'params' of a group"),
    "a later group of a set": Case(grow(lambda: {"params": {weight()}}), TypeError, "order"),
    "a later group with names": Case(
        grow(lambda: {"params": [("a", weight())]}), ValueError, "with/without names"
    ),
    "a later non-tensor": Case(
        grow(lambda: {"params": [3]}), TypeError, "can only optimize Tensors"
    ),
    "a later sparse parameter": Case(
        grow(lambda: {"params": [nn.Parameter(torch.zeros(3, 3).to_sparse())]}),
        ValueError,
        "only dense",
    ),
    "a later differentiable group": Case(
        grow(lambda: {"params": [weight()], "differentiable": True}), ValueError, "must be False"
    ),
    "a later class by name": Case(
        grow(lambda: {"params": [weight()], "optimizer_class": "SGD"}), TypeError, "must be a class"
    ),
    "a later vector for Muon": Case(
        grow(lambda: {"params": [weight(4)], "optimizer_class": Muon}), ValueError, "2D"
    ),
    "again": Case(
        lambda: make([w := weight()]).add_param_group({"params": [w]}),
        ValueError,
        "more than one parameter group",
    ),
    "a group on one rank is bad": Case(
        grow(lambda: on_one({}, {"params": [weight()]})), ValueError, "'params' key"
    ),
    "later groups differ in rate": Case(
        grow(lambda: {"params": [weight()], "lr": on_one(1.0, 2.0)}),
        ValueError,
        "disagree",
        "add_param_group",
    ),
    "later groups differ in shape": Case(
        grow(lambda: {"params": [weight(on_one(3, 4))]}), ValueError, "disagree", "(3,)", "(4,)"
    ),
    "a closure that is none": Case(lambda: trained().step("loss"), TypeError, "not callable"),
    "an unknown argument of step": Case(lambda: trained().step(rate=1), TypeError, "'rate'"),
    "a closure that fails": Case(
        lambda: trained().step(lambda: 1 / 0), ZeroDivisionError, "division"
    ),
    "a sparse gradient": Case(
        lambda: sparse_gradient(one=False),
        RuntimeError,
        "weight has a sparse gradient",
        "sparse=False",
    ),
    "a sparse gradient on one rank": Case(
        lambda: sparse_gradient(one=True),
        RuntimeError,
        "weight has a sparse gradient",
        "sparse=False",
    ),
    "a parameter moved on one rank": Case(
        moved, ValueError, "what comes next", "planning anew", "moved"
    ),
    "to no rank": Case(lambda: trained().consolidate_state_dict(2), ValueError, "0 to 1", "got 2"),
    "to a negative rank": Case(
        lambda: trained().consolidate_state_dict(-1), ValueError, "0 to 1", "got -1"
    ),
    "to a rank by name": Case(
        lambda: trained().consolidate_state_dict("0"), TypeError, "rank of the group", "'0'"
    ),
    "to half a rank": Case(
        lambda: trained().consolidate_state_dict(0.5), TypeError, "rank of the group", "0.5"
    ),
    "to different ranks": Case(
        lambda: trained().consolidate_state_dict(dist.get_rank()),
        ValueError,
        "disagree",
        "to=0",
        "to=1",
    ),
    "nothing consolidated": Case(
        lambda: trained().state_dict(),
        RuntimeError,
        "consolidate_state_dict",
        "after the last step",
    ),
    "consolidated before the step": Case(
        lambda: [z := trained(), z.consolidate_state_dict(None), z.step(), z.state_dict()],
        RuntimeError,
        "after the last step",
    ),
}
LOADING = {
    "nothing": Case(
        lambda: trained().load_state_dict(None), TypeError, "must be a dict", "NoneType"
    ),
    "a list": Case(lambda: trained().load_state_dict([]), TypeError, "must be a dict", "list"),
    "a path": Case(
        lambda: trained().load_state_dict("state.pt"), TypeError, "must be a dict", "str"
    ),
    "an empty dict": Case(
        lambda: trained().load_state_dict({}), ValueError, "'state' and 'param_groups'"
    ),
    "the model's": Case(
        lambda: trained().load_state_dict(nn.Linear(4, 4).state_dict()),
        ValueError,
        "'state' and 'param_groups'",
        "weight",
    ),
    "a scheduler's": Case(
        lambda: trained().load_state_dict({"last_epoch": 3}),
        ValueError,
        "'state' and 'param_groups'",
        "last_epoch",
    ),
    "one level too high": Case(
        lambda: trained().load_state_dict({"optimizer": saved()}),
        ValueError,
        "'state' and 'param_groups'",
        "'optimizer'",
    ),
    "no state": Case(loading(drop("state")), ValueError, "'state' and 'param_groups'"),
    "no groups": Case(loading(drop("param_groups")), ValueError, "'state' and 'param_groups'"),
    "state of None": Case(loading(put(None, "state")), TypeError, "'state'", "NoneType"),
    "state as a list": Case(loading(put([], "state")), TypeError, "'state'", "list"),
    "groups as a dict": Case(loading(put({}, "param_groups")), TypeError, "list of dicts"),
    "a group that is none": Case(loading(put([None], "param_groups")), TypeError, "list of dicts"),
    "no groups in the list": Case(
        loading(put([], "param_groups")), ValueError, "different number of parameter groups: 0"
    ),
    "twice the groups": Case(
        loading(lambda s: s["param_groups"].append(s["param_groups"][0])),
        ValueError,
        "different number of parameter groups: 2",
    ),
    "a group without its parameters": Case(
        loading(drop("param_groups", 0, "params")), TypeError, "list 'params'"
    ),
    "fewer parameters": Case(
        loading(put([0], "param_groups", 0, "params")),
        ValueError,
        "doesn't match the size",
        "1 parameters",
    ),
    "more parameters": Case(
        loading(put([0, 1, 2], "param_groups", 0, "params")),
        ValueError,
        "doesn't match the size",
        "3 parameters",
    ),
    "a group without a rate": Case(
        loading(drop("param_groups", 0, "lr")), ValueError, "group 0", "'lr'"
    ),
    "a group without betas": Case(
        loading(drop("param_groups", 0, "betas")), ValueError, "group 0", "'betas'", "AdamW"
    ),
    "of SGD": Case(
        loading(lambda s: None, SGD, lr=0.1, momentum=0.9),
        ValueError,
        "same optimizer class",
        "AdamW",
    ),
    "of Adagrad": Case(
        loading(lambda s: None, torch.optim.Adagrad), ValueError, "same optimizer class", "AdamW"
    ),
    "None for a parameter": Case(
        loading(put(None, "state", 0)), TypeError, "state of parameter 0", "NoneType"
    ),
    "a tensor for a parameter": Case(
        loading(put(torch.zeros(4), "state", 0)), TypeError, "state of parameter 0", "Tensor"
    ),
    "state of a stranger": Case(loading(put({}, "state", 7)), ValueError, "7", NAMED),
    "state by name, groups by number": Case(
        loading(lambda s: s["state"].update(weight=s["state"].pop(0))),
        ValueError,
        "'weight'",
        NAMED,
    ),
    "no first moment": Case(
        loading(drop("state", 0, "exp_avg")), ValueError, "parameter 0", "'exp_avg'", "AdamW"
    ),
    "no second moment of the last": Case(
        loading(drop("state", 1, "exp_avg_sq")), ValueError, "parameter 1", "'exp_avg_sq'"
    ),
    "no step": Case(loading(drop("state", 0, "step")), ValueError, "parameter 0", "'step'"),
    "amsgrad without its maximum": Case(
        loading(put(True, "param_groups", 0, "amsgrad")), ValueError, "'max_exp_avg_sq'"
    ),
    "a matrix of another shape": Case(
        loading(put(torch.zeros(2, 8), "state", 0, "exp_avg")),
        ValueError,
        "'exp_avg' of parameter 0",
        "(2, 8)",
        "(4, 4)",
    ),
    "a vector of another length": Case(
        loading(put(torch.zeros(5), "state", 1, "exp_avg")),
        ValueError,
        "'exp_avg' of parameter 1",
        "(5,)",
        "(4,)",
    ),
    "a flat matrix": Case(
        loading(put(torch.zeros(16), "state", 0, "exp_avg")), ValueError, "(16,)", "same model"
    ),
    "parameters in another order": Case(
        loading(lambda s: s["state"].update({0: s["state"][1], 1: s["state"][0]})),
        ValueError,
        "same model",
    ),
    "text for a moment": Case(
        loading(put("much", "state", 0, "exp_avg")), ValueError, "'exp_avg' of parameter 0", "str"
    ),
    "a number for a moment": Case(
        loading(put(0.0, "state", 0, "exp_avg")), ValueError, "'exp_avg' of parameter 0", "float"
    ),
    "a complex moment": Case(
        loading(put(torch.zeros(4, 4, dtype=torch.complex64), "state", 0, "exp_avg")),
        ValueError,
        "must be real",
        "complex64",
    ),
    "a sparse moment": Case(
        loading(put(torch.zeros(4, 4).to_sparse(), "state", 0, "exp_avg")),
        ValueError,
        "must be dense",
    ),
    "a moment without memory": Case(
        loading(put(torch.zeros(4, 4, device="meta"), "state", 0, "exp_avg")),
        ValueError,
        "in memory",
    ),
    "text for a step": Case(
        loading(put("third", "state", 0, "step")), ValueError, "one number", "'third'"
    ),
    "many steps": Case(loading(put(torch.zeros(3), "state", 0, "step")), ValueError, "one number"),
    "nothing on one rank": Case(
        lambda: trained().load_state_dict(on_one(None, saved())), TypeError, "must be a dict"
    ),
    "another rate on one rank": Case(
        loading(put(lambda: on_one(0.5, 0.1), "param_groups", 0, "lr")),
        ValueError,
        "disagree",
        "lr 0.5",
        "lr 0.1",
    ),
    "another step on one rank": Case(
        loading(put(lambda: torch.tensor(on_one(5.0, 6.0)), "state", 0, "step")),
        ValueError,
        "disagree",
        "5.0",
        "6.0",
    ),
    "less state on one rank": Case(
        loading(lambda s: dist.get_rank() and s["state"].pop(1)),
        ValueError,
        "disagree",
        "parameter 1",
    ),
    "more precise state on one rank": Case(
        loading(
            put(
                lambda: torch.zeros(4, 4, dtype=on_one(torch.float64, torch.float32)),
                "state",
                0,
                "exp_avg",
            )
        ),
        ValueError,
        "disagree",
        "float64",
    ),
}


def spoilt(case, ordinary=lambda: make([weight()])):
    return lambda: on_one(case.do, ordinary)()


DISAGREEING = {
    **{
        f"{name}, on one rank": Case(
            spoilt(CONSTRUCTOR[name]), CONSTRUCTOR[name].kind, *CONSTRUCTOR[name].words
        )
        for name in (
            "no parameters",
            "None",
            "a model",
            "a set",
            "a non-tensor",
            "twice in a list",
            "a sparse parameter",
            "no class",
            "itself",
            "couples everything",
            "an unknown option",
            "a negative rate",
            "differentiable",
            "two kernels",
        )
    },
    **{
        f"{name}, on one rank": Case(
            spoilt(SETTINGS[name]), SETTINGS[name].kind, *SETTINGS[name].words
        )
        for name in (
            "an unknown shard",
            "an integer master dtype",
            "the rate by position",
            "overlap as text",
        )
    },
    **{
        f"{name}, on one rank": Case(
            spoilt(SETTINGS[name], lambda: make([weight()], shard=balanced)),
            SETTINGS[name].kind,
            *SETTINGS[name].words,
        )
        for name in ("a policy that fails", "a policy that says nothing", "a policy that forgets")
    },
    "a bucket of nothing, on one rank": Case(
        lambda: make([weight()], bucket_cap_mb=on_one(0, 1)),
        ValueError,
        "bucket_cap_mb must be above 0",
    ),
    "another rate": Case(
        lambda: make([weight()], lr=on_one(0.1, 0.2)), ValueError, "disagree", "'lr': 0.2"
    ),
    "other betas": Case(
        lambda: make([weight()], betas=on_one((0.9, 0.9), (0.8, 0.9))),
        ValueError,
        "disagree",
        "0.8",
    ),
    "another kernel": Case(
        lambda: make([weight()], fused=on_one(True, False)), ValueError, "disagree", "fused"
    ),
    "another class": Case(
        lambda: make([weight()], on_one(AdamW, torch.optim.Adam)), ValueError, "disagree", "AdamW"
    ),
    "another class of a group": Case(
        lambda: make([{"params": [weight()], "optimizer_class": on_one(Muon, SGD)}]),
        ValueError,
        "disagree",
        "Muon",
        "SGD",
    ),
    "another shape": Case(
        lambda: make([weight(on_one(3, 4))]), ValueError, "disagree", "(3,)", "(4,)"
    ),
    "another order": Case(
        lambda: make(on_one([weight(), weight(4)], [weight(4), weight()])),
        ValueError,
        "disagree",
        "(4,)",
        "(4, 4)",
    ),
    "another dtype": Case(
        lambda: make([weight(dtype=on_one(torch.float32, torch.float64))]),
        ValueError,
        "disagree",
        "float64",
    ),
    "another name": Case(
        lambda: make([(on_one("bias", "weight"), weight())]),
        ValueError,
        "disagree",
        "'bias",
        "'weight",
    ),
    "another number": Case(
        lambda: make([weight(), *on_one([weight()], [])]), ValueError, "disagree"
    ),
    "other groups": Case(
        lambda: make(
            on_one(
                [{"params": [weight()]}, {"params": [weight(4)]}],
                [{"params": [weight(), weight(4)]}],
            )
        ),
        ValueError,
        "disagree",
    ),
    "another layout": Case(
        lambda: make([nn.Parameter(on_one(torch.zeros(4, 3).t(), torch.zeros(3, 4)))]),
        ValueError,
        "disagree",
        "strides (1, 3)",
    ),
    "frozen on one rank": Case(
        lambda: make([weight(), nn.Parameter(torch.zeros(3), requires_grad=on_one(True, False))]),
        ValueError,
        "disagree",
        "frozen",
    ),
    "another shard": Case(
        lambda: make([weight()], shard=on_one("even", "whole")),
        ValueError,
        "disagree",
        "shard=even",
        "shard=whole",
    ),
    "another policy's plan": Case(
        lambda: make([weight(), weight()], shard=differing), ValueError, "disagree"
    ),
    "another master dtype": Case(
        lambda: make([weight(dtype=torch.bfloat16)], master_dtype=on_one(torch.float32, None)),
        ValueError,
        "disagree",
        "master_dtype",
    ),
    "another bucket": Case(
        lambda: make([weight()], bucket_cap_mb=on_one(1, 2)),
        ValueError,
        "disagree",
        "bucket_cap_mb=1",
        "bucket_cap_mb=2",
    ),
    "views on one rank": Case(
        lambda: make([weight()], AdamW, None, on_one(True, False)),
        ValueError,
        "disagree",
        "bucket_view=True",
    ),
    "another rate at the first step": Case(
        other_lr_at_the_first_step, ValueError, "disagree", "the first step", "lr 1.0", "lr 2.0"
    ),
    "one constructs, one consolidates": Case(
        other_call(lambda zero: make([weight()]), lambda zero: zero.consolidate_state_dict()),
        ValueError,
        "what comes next",
        "making",
        "consolidate_state_dict(to=0)",
    ),
    "one steps, one loads": Case(
        other_call(lambda zero: zero.step(), lambda zero: zero.load_state_dict(saved())),
        ValueError,
        "what comes next",
        "the first step",
        "load_state_dict",
    ),
    "one grows, one constructs": Case(
        other_call(
            lambda zero: zero.add_param_group({"params": [weight()]}), lambda zero: make([weight()])
        ),
        ValueError,
        "what comes next",
        "add_param_group",
        "making",
    ),
    "unfrozen on one rank": Case(
        unfrozen, ValueError, "what comes next", "planning anew", "unfrozen"
    ),
}


def functional():
    from torch.distributed.optim import _FunctionalAdam

    return _FunctionalAdam


def destroyed():
    group = dist.new_group()
    dist.barrier()  # gloo's ranks may still be connecting when one of them has the group
    dist.destroy_process_group(group)
    return group


BATCHES = {
    "constructor": CONSTRUCTOR,
    "settings": SETTINGS,
    "later": LATER,
    "loading": LOADING,
    "disagreeing": DISAGREEING,
}
CASES = [(batch, name) for batch, cases in BATCHES.items() for name in cases]


def attempt(cases):
    """Do every case on this rank: what it raised, how long that took, and whether the group still works afterwards."""
    out = {}
    for name, case in cases.items():
        GROUP[0] = dist.new_group(timeout=timedelta(seconds=LIMIT))
        start, error = time.monotonic(), None
        try:
            case.do()
        except Exception as e:
            error = [kind.__name__ for kind in type(e).__mro__], str(e)
        took, after = time.monotonic() - start, None
        try:
            after = step_together()
        except Exception as e:
            after = f"{type(e).__name__}: {e}"
        out[name] = error, took, after
        dist.barrier()
    return out


def step_together():
    """Train with the group of the case: the job goes on."""
    p = weight(5)
    p.grad = torch.ones(5)
    make([p], SGD, lr=1.0).step()
    return p.tolist()


@functools.cache
def results(batch):
    return run(SIZE, attempt, BATCHES[batch], timeout=300)


@pytest.mark.parametrize(
    ("batch", "name"), CASES, ids=[f"{batch}: {name}" for batch, name in CASES]
)
def test_it_is_one_clear_error_on_every_rank_and_the_job_goes_on(batch, name):
    case = BATCHES[batch][name]
    kinds = case.kind if isinstance(case.kind, tuple) else (case.kind,)
    for rank, result in enumerate(results(batch)):
        error, took, after = result[name]
        assert error is not None, f"rank {rank} heard of nothing"
        assert any(kind.__name__ in error[0] for kind in kinds), (
            f"rank {rank}: {error[0][0]}: {error[1]}"
        )
        missing = [word for word in case.words if word not in error[1]]
        assert not missing, f"rank {rank}: {missing} not in {error[1]!r}"
        assert took < LIMIT, f"rank {rank}: {took:.1f} s"
        assert after == [-1.0] * 5, f"rank {rank} cannot go on: {after}"


def test_there_are_more_than_a_hundred():
    assert len(CASES) > 150 and len(set(CASES)) == len(CASES)


def test_a_refused_state_dict_changes_nothing():
    def refuse():
        GROUP[0] = None
        zero = trained()
        zero.consolidate_state_dict(None)
        before = copy.deepcopy(zero.state_dict())
        for case in LOADING.values():
            with pytest.raises((TypeError, ValueError)):
                case.do()
        for change in (
            put(torch.zeros(2, 8), "state", 0, "exp_avg"),
            drop("state", 1, "step"),
            put(on_one(0.5, 0.1), "param_groups", 0, "lr"),
        ):
            spoilt = copy.deepcopy(before)
            change(spoilt)
            with pytest.raises(ValueError):
                zero.load_state_dict(spoilt)
        zero.consolidate_state_dict(None)
        after = zero.state_dict()
        return after["param_groups"] == before["param_groups"] and all(
            v.equal(after["state"][i][k]) for i, s in before["state"].items() for k, v in s.items()
        )

    assert run(2, refuse) == [True, True]


def test_what_only_one_rank_can_know_is_at_least_named_by_the_others():
    """A group that is none, and a closure that fails: there is nobody to tell, so the others wait
    as long as their group does, and say for whom."""

    def group_of_one_rank():
        wanted = dist.new_group(timeout=timedelta(seconds=2))
        try:
            ZeroRedundancyOptimizer([weight()], AdamW, on_one("gloo", wanted))
        except (RuntimeError, ValueError) as error:
            return str(error)

    def closure_of_one_rank():
        GROUP[0] = dist.new_group(timeout=timedelta(seconds=2))
        try:
            make([weight()]).step(lambda: 1 / (1 - dist.get_rank()))
        except (RuntimeError, ZeroDivisionError) as error:
            return str(error)

    waiting, own = run(2, group_of_one_rank)
    assert "not a member" in own and waiting.startswith(
        "rank 1 did not arrive within 2 s, while rank 0 waited at 'making ZeroRedundancyOptimizer'"
    )
    waiting, own = run(2, closure_of_one_rank)
    assert "division" in own and waiting.startswith(
        "rank 1 did not arrive within 2 s, while rank 0 waited at 'the first step'"
    )
