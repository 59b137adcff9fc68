"""What is edited between the calls of an iteration, and would change the step of `torch.optim`: param groups, and
gradients of parameters that were not used."""

import pytest
import torch.distributed as dist
from common import caught_error
from common.overlapping import HIDDEN, MODES, Blocks, attach, data
from torch.optim import SGD

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

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
