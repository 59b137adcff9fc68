"""Join: a loader whose batches do not come when the other ranks count on them is an error, and no wrong mean."""

import re

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.comm.launch import run
from zero_nb.join.join import Join


class Estimated(list):
    """Has one batch more than it says."""

    def __len__(self):
        return super().__len__() - 1


def ahead(batches):
    """Take each batch before the one before it is used, as what copies them to a GPU does."""
    taken = []
    for batch in batches:
        taken.append(batch)
        if len(taken) > 1:
            yield taken.pop(0)
    yield from taken


def loads(how, lengths):
    """Train on batches of 1 and 2; gradients, and the error."""
    rank = dist.get_rank()
    model = DDP(nn.Linear(1, 1, bias=False))
    found = []

    def train(_):
        model.zero_grad()
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        found.append(model.module.weight.grad.item())

    def block():
        with Join([model], divide_by="active") as join:
            batches = [0] * lengths[rank]
            if how == "estimated" and rank == 0:
                batches = Estimated(batches)
            loop = join.loader(iter(batches) if how == "hidden" else batches)
            for batch in ahead(loop) if how in ("ahead", "hidden") else loop:
                train(batch)
            if how == "after":
                train(0)

    return caught_error(block), found


@pytest.mark.parametrize("how", ["ahead", "after", "estimated"])
def test_a_forward_that_others_do_not_count_on_is_an_error(how):
    for error, found in run(2, loads, how, (2, 4), timeout=30):
        assert error is not None and error[0] == "RuntimeError"
        assert "join.loader of rank 0" in error[1]
        assert found in ([1.5], [1.5, 1.5]), "a mean of both ranks, as long as both have data"


@pytest.mark.parametrize(
    ("how", "lengths"), [("ahead", (3, 3)), ("after", (2, 2)), ("hidden", (2, 4))]
)
def test_a_forward_that_others_count_on_is_none(how, lengths):
    ranks = run(2, loads, how, lengths, timeout=30)
    both = [1.5] * (min(lengths) + (how == "after"))
    assert ranks == [(None, both), (None, both + [2.0] * (lengths[1] - lengths[0]))]


def leaves_early():
    """Break on rank 1 after one of three batches that both ranks have."""
    rank = dist.get_rank()
    model = DDP(nn.Linear(1, 1, bias=False))

    def block():
        with Join([model], policy="raise") as join:
            for _ in join.loader([0, 1, 2]):
                model(torch.ones(1, 1)).sum().backward()
                if rank == 1:
                    break

    return caught_error(block)


def test_a_rank_that_leaves_early_is_an_error_where_the_policy_is_to_raise():
    for error in run(2, leaves_early, timeout=30):
        assert error is not None and error[0] == "RuntimeError"
        assert "rank 1 left its loop after 1 of 3 batches" in error[1]


def trains_beside_ignored(lengths):
    """Train where DDP ignores a weight; the gradients of the one that it averages and of that one."""
    rank = dist.get_rank()
    net = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    net.forward = lambda x: net["a"](x) + net["b"](x)
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["b.weight"])
    model = DDP(net)
    found = []
    with Join([model], divide_by="active") as join:
        for _ in join.loader([0] * lengths[rank]):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
            found.append((net["a"].weight.grad.item(), net["b"].weight.grad.item()))
    return found


def test_a_gradient_that_ddp_ignores_gets_no_weight():
    first, second = run(2, trains_beside_ignored, (1, 2), timeout=30)
    assert first == [(1.5, 1.0)]
    assert second == [(1.5, 2.0), (2.0, 2.0)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_layer_may_be_in_a_model():
    def train(lengths):
        model = DDP(nn.Sequential(torch.jit.script(nn.Linear(1, 1, bias=False))))
        with Join([model], divide_by="active") as join:
            for _ in join.loader([0] * lengths[dist.get_rank()]):
                model(torch.ones(1, 1)).sum().backward()
        return [p.grad.item() for p in model.parameters()]

    assert run(2, train, (1, 2), timeout=30) == [[2.0]] * 2


def skips(lengths, skipping, policy, hidden):
    """Skip the first batch on some ranks; gradients, and the error."""
    rank = dist.get_rank()
    model = DDP(nn.Linear(1, 1, bias=False))
    found = []

    def block():
        with Join([model], divide_by="active", policy=policy) as join:
            batches = range(lengths[rank])
            for i in join.loader(iter(batches) if hidden else batches):
                if i == 0 and rank in skipping:
                    continue
                model.zero_grad()
                model(torch.full((1, 1), 1.0 + rank)).sum().backward()
                found.append(model.module.weight.grad.item())

    return caught_error(block), found


@pytest.mark.parametrize("skipping", [(0,), (1,)])
@pytest.mark.parametrize(
    ("lengths", "policy"),
    [((3, 2), "shadow"), ((3, 2), "stop"), ((3, 3), "shadow"), ((3, 3), "raise")],
)
def test_a_batch_that_one_rank_skips_is_an_error(lengths, policy, skipping):
    for error, _ in run(2, skips, lengths, skipping, policy, False, timeout=30):
        assert error is not None and error[0] == "RuntimeError"
        assert re.search(r"rank \d called forward \d times in its \d batches, and rank", error[1])
        assert "skip a batch on all ranks or on none" in error[1]


@pytest.mark.parametrize(
    ("lengths", "skipping", "hidden", "means"),
    [
        ((3, 2), (0, 1), False, [1.5, 1.0]),  # as a run does that goes on in the middle of an epoch
        ((3, 2), (0,), True, [1.5, 1.5]),
        ((3, 2), (1,), True, [1.5, 1.0, 1.0]),
    ],
)
def test_a_batch_that_all_ranks_skip_or_none_counts_on_is_no_error(
    lengths, skipping, hidden, means
):
    first, second = run(2, skips, lengths, skipping, "shadow", hidden, timeout=30)
    assert first == (None, means)
    assert second == (None, means[: len(second[1])])
