"""Wrong calls of the optimizer's methods, and state dicts that do not fit: each is a clear error
on every rank, at once, and the job goes on."""

import copy

import pytest
import torch
import torch.distributed as dist
from common.bad_input import GROUP, Case, all_cases, check, make, on_one, saved, stepped, weight
from torch import nn
from torch.optim import SGD, AdamW, Muon

from zero_nb.comm.launch import run


def trained():
    return stepped(make([weight(), weight(4)]))


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


def grow(group):
    return lambda: trained().add_param_group(group())


NAMED = "is in none of its groups"


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


CASES = all_cases(later=LATER, loading=LOADING)


@pytest.mark.parametrize(("batch", "name"), CASES)
def test_it_is_one_clear_error_on_every_rank_and_the_job_goes_on(batch, name):
    check(batch, name)


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
