"""What is edited between the calls of an iteration, and would change the step of `torch.optim`: param groups, and
gradients of parameters that were not used; and what would not change it."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap
from common.modes import average_gradients
from common.overlapping import HIDDEN, MODES, Blocks, attach, data, plainly
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.rules import ELEMENTWISE, PARAMETERWISE

DRIVEN = MODES + HIDDEN


def in_two_groups(mode):
    """Give what is called and its optimizer, whose groups have several parameters, and whose ranks are a
    group of their own, which may end."""
    module = Blocks()
    params = [*module.parameters()]
    groups = [{"params": params[:4], "lr": 0.2}, {"params": params[4:], "lr": 0.01}]
    ranks = dist.new_group()
    zero = ZeroRedundancyOptimizer(groups, SGD, ranks, lr=0.05)
    call, _ = attach(mode, module, zero, ranks)
    return call, zero


def move_over_a_border(groups):
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def split(groups):
    groups.insert(1, {**groups[0], "params": groups[0]["params"][2:], "lr": 0.0})
    groups[0]["params"] = groups[0]["params"][:2]


EDITS = (move_over_a_border, split)
PLACES = ("before forward", "before backward", "before step")


def edited(mode):
    """Edit groups at each place of an iteration; what the iteration says."""
    said = {}
    for edit in EDITS:
        for place in PLACES:
            call, zero = in_two_groups(mode)

            def iterate(step, change="", call=call, zero=zero, edit=edit):
                if change == "before forward":
                    edit(zero.param_groups)
                loss = call(data(step)).square().mean()
                if change == "before backward":
                    edit(zero.param_groups)
                loss.backward()
                if change == "before step":
                    edit(zero.param_groups)
                zero.step()
                zero.zero_grad()

            iterate(0)
            iterate(1)
            said[edit.__name__, place] = caught_error(lambda: iterate(2, place))
    return said


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_a_border_of_groups_that_is_moved_is_an_error(mode):
    for said in run(2, edited, mode):
        assert len(said) == len(EDITS) * len(PLACES)
        for how, error in said.items():
            assert error and error[0] == "RuntimeError" and "in its group" in error[1], (how, error)


def edited_on_one_rank(mode):
    """Edit a group on rank 1 alone before a forward in `eval()`; what the iteration says."""
    call, zero = in_two_groups(mode)
    call.eval()
    for step in range(2):
        if step and dist.get_rank() == 1:
            zero.param_groups[0]["params"].pop()
        error = caught_error(partial(plainly, call, step)) or caught_error(zero.step)
        zero.zero_grad()
    return error


@pytest.mark.parametrize("mode", DRIVEN)
def test_other_ranks_are_told_of_a_refused_forward_also_in_eval(mode):
    first, second = run(2, edited_on_one_rank, mode, timeout=30)
    assert second[0] == "RuntimeError" and "in its group" in second[1]
    assert first[0] == "RuntimeError" and first[1]  # of DDP, gloo's words


def caught_and_repaired(mode):
    """In `eval()`, edit a group on all ranks, catch the error and undo the edit; then let rank 1 alone
    evaluate a batch that the model does not take; train on after each."""
    call, zero = in_two_groups(mode)
    call.eval()
    plainly(call, 0)
    zero.step()
    last = zero.param_groups[0]["params"].pop()
    refused = caught_error(partial(plainly, call, 1))
    zero.param_groups[0]["params"].append(last)
    plainly(call, 2)
    zero.step()
    wrong = dist.get_rank() == 1 and caught_error(lambda: call(data(3)[:, :2]))
    plainly(call, 4)
    zero.step()
    return refused, wrong


@pytest.mark.parametrize("mode", MODES)
def test_what_all_ranks_refuse_in_eval_or_one_evaluates_ends_no_group(mode):
    for refused, wrong in run(2, caught_and_repaired, mode, timeout=30):
        assert refused[0] == "RuntimeError" and "in its group" in refused[1]
        assert not wrong or "shapes cannot be multiplied" in wrong[1]


class Unused(nn.Module):
    """Has a layer that its forward does not call."""

    def __init__(self):
        super().__init__()
        self.used = Blocks()
        self.idle = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        return self.used(x)


def finding_unused(mode):
    """Give a module, what is called, and its optimizer."""
    module = Unused()
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, dist.new_group(), lr=0.05)
    if mode.startswith("parallel"):
        how = {"hidden": "hidden" in mode, "interleaved": "interleaved" in mode}
        data_parallel(module, zero, find_unused_parameters=True, **how)
        return module, module, zero
    ddp = DDP(module, process_group=zero.process_group, find_unused_parameters=True)
    hook = average_gradients if "hook" in mode else None
    overlap(ddp, zero, hook=hook, interleaved="interleaved" in mode)
    return module, ddp, zero


def by_hand(module):
    module.idle.weight.grad = torch.ones_like(module.idle.weight)


def by_another_backward(module):
    module.idle(data(7)).sum().backward()


def came_late(mode):
    """Give an unused layer gradients between backward and step, in each way; what step says, and in the
    iterations before and after it."""
    said = {}
    for way in (by_hand, by_another_backward):
        module, call, zero = finding_unused(mode)
        said[way.__name__] = []
        for step in range(4 if way is by_hand else 3):  # DDP goes on with no such layer itself
            plainly(call, step)
            if step == 2:
                way(module)
            said[way.__name__].append(caught_error(zero.step))
            zero.zero_grad()
    return said


UNUSED_MODES = [*DRIVEN, "overlap, hook", "interleaved, hook"]


@pytest.mark.parametrize("mode", UNUSED_MODES)
def test_a_gradient_of_an_unused_parameter_that_comes_after_the_step_is_an_error(mode):
    for said in run(2, came_late, mode):
        for way, (first, second, late, *after) in said.items():
            assert [first, second, *after] == [None] * (2 + len(after)), (way, said[way])
            assert late and late[0] == "RuntimeError", way
            assert "or others came, which is too late" in late[1], way


def legal(mode):
    """Train with a layer that is never used, and gradients that are set to zero at times; how far
    parameters are from DDP's."""
    found = []
    for here in ("DDP", mode):
        if here == "DDP":
            module = Unused()
            call = DDP(module, find_unused_parameters=True)
            optimizer = SGD(module.parameters(), lr=0.05)
        else:
            module, call, optimizer = finding_unused(mode)
        for step in range(4):
            plainly(call, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(flatten(module))
    return largest_gap(*found)


@pytest.mark.parametrize("mode", UNUSED_MODES)
def test_unused_parameters_train_as_with_ddp(mode):
    assert max(run(2, legal, mode)) < 1e-12


def with_own_records(mode):
    """Keep a list, a count and an array in a group of torch's AdamW, and write them between backward and step;
    how far parameters are from DDP's, and what is said where betas are written in a list, too."""
    found = []
    for here in ("DDP", mode):
        module = Blocks()
        call = DDP(module)
        if here == "DDP":
            optimizer = AdamW(module.parameters(), lr=0.05)
        else:
            optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=0.05)
            call, _ = attach(mode, module, optimizer)
        group = optimizer.param_groups[0]
        group.update(log=[], count=0, arrays=[np.ones(2)], betas=[0.9, 0.99])
        for step in range(3):
            plainly(call, step)
            group["log"].append(step)
            group["count"] += 1
            group["arrays"][0] = np.full(2, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append((flatten(module), group["log"], group["count"]))
    plainly(call, 3)
    group["betas"][0] = 0.5
    (wanted, *kept), (params, *ours) = found
    return largest_gap(wanted, params), kept == ours, caught_error(optimizer.step)


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_what_a_user_records_in_a_group_of_a_class_of_torch_may_change(mode):
    for gap, same, said in run(2, with_own_records, mode):
        assert gap < 1e-12 and same
        assert said is None if mode == "step" else "betas changed after backward()" in said[1]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | PARAMETERWISE))
def test_classes_of_torch_read_no_options_but_those_of_their_defaults(name):
    """What `step` reads of a group is seen by a dict that writes down keys."""
    keys_read = set()

    class Noting(dict):
        def __getitem__(self, key):
            keys_read.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            keys_read.add(key)
            return super().get(key, default)

    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    optimizer.param_groups[:] = map(Noting, optimizer.param_groups)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert "lr" in keys_read
    assert keys_read - {"params"} <= optimizer.defaults.keys()
