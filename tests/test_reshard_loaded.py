"""Ranks that have loaded an empty state, of a class without state or of no step, have been trained: reshard gives
ranks that join their parameters and options."""

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.optim import SGD, AdamW

from zero_nb import (
    ZeroRedundancyOptimizer,
    full_state_dict,
    load_sharded,
    reshard,
    run,
    save_sharded,
)
from zero_nb.comm.groups import Group
from zero_nb.comm.subgroups import split


def alone(kind):
    """Make an optimizer that this rank has for itself, of weights of its own."""
    rank = dist.get_rank()
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0 - 6 * rank)
    mine = split(Group(), [[other] for other in range(dist.get_world_size())])
    return model, ZeroRedundancyOptimizer(model.parameters(), kind, mine, lr=0.1)


def step(model, zero):
    model.weight.grad = torch.ones_like(model.weight)
    zero.step()


def load_state(way, folder, model, zero):
    """Load the state of no step, or of a class without state after a step."""
    fresh = zero.state_dict()
    if way == "fresh":
        return zero.load_state_dict(fresh)
    step(model, zero)
    if way == "full":
        return zero.load_state_dict(full_state_dict(zero))
    mine = zero.process_group
    save_sharded(folder / "one", model, zero, process_group=mine)
    return load_sharded(folder / "one", model, zero, mine)


def join_after_a_load(way, kind, folder):
    """Let rank 0 load, and rank 1 join it; give the weights and rates before and after a step."""
    model, zero = alone(kind)
    if dist.get_rank() == 0:
        load_state(way, folder, model, zero)
        zero.param_groups[0]["lr"] = 0.25
    reshard(zero, None)
    joined = model.weight.unique().tolist(), zero.param_groups[0]["lr"]
    step(model, zero)
    return joined, model.weight.unique().tolist()


@pytest.mark.parametrize(
    "way, kind", [("full", SGD), ("sharded", SGD), ("fresh", SGD), ("fresh", AdamW)]
)
def test_a_rank_that_joins_ranks_that_have_loaded_an_empty_state_gets_their_parameters(
    folder, way, kind
):
    """No rank held state, so nothing was sent, and the next step mixed the weights of both."""
    first, second = run(2, join_after_a_load, way, kind, folder)
    assert first == second
    (weights, rate), stepped = first
    assert weights == pytest.approx([1.0 if way == "fresh" else 0.9]) and rate == 0.25
    assert len(stepped) == 1


def lose_what_was_loaded():
    """Leave the only rank that was trained out of the new group, when it has loaded a state of no step."""
    model, zero = alone(SGD)
    if dist.get_rank() == 0:
        zero.load_state_dict(zero.state_dict())
    there = split(Group(), [[1]])
    reshard(zero, dist.GroupMember.NON_GROUP_MEMBER if there is None else there)
    left = caught(zero.step) or ""
    return model.weight.unique().tolist(), "has left this optimizer" in left


def test_the_only_rank_that_was_trained_may_hand_over_and_leave():
    assert run(2, lose_what_was_loaded) == [([1.0], True), ([1.0], False)]
