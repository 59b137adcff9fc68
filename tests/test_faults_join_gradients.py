"""Join: what the review found about gradients after a block, each under its own name."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from common.models import Output
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.event_log import EventLog
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def two_blocks(zero_first, to_none):
    """Two blocks with the loop that everybody writes; the first gradient of the second block, and
    what each block leaves in .grad."""
    rank = dist.get_rank()
    model = DDP(nn.Linear(5, 5, bias=False))
    optimizer = SGD(model.parameters(), lr=0.0)
    first, left = [], []
    for _ in range(2):
        gradients = []
        with Join([model, optimizer]):
            for _ in range((3, 5)[rank]):
                if zero_first:
                    optimizer.zero_grad(set_to_none=to_none)
                model(torch.full((1, 5), 50.0)).sum().backward()
                gradients.append(model.module.weight.grad[0, 0].item())
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad(set_to_none=to_none)
        first.append(gradients[0])
        grad = model.module.weight.grad
        left.append(None if grad is None else grad[0, 0].item())
    return first, left


@pytest.mark.parametrize(
    ("zero_first", "to_none", "left"),
    [(False, True, None), (False, False, 0.0), (True, True, 25.0)],
)
def test_join_leaves_the_gradient_that_the_loop_of_the_last_joiner_leaves(
    zero_first, to_none, left
):
    for first, after in run(2, two_blocks, zero_first, to_none):
        assert first == [50.0, 50.0] and after == [left] * 2


def adds_up(counts, no_sync):
    """Add up gradients over three iterations, in synchronised backwards or without, over the end of a block."""
    rank, seen = dist.get_rank(), []
    model = DDP(nn.Linear(2, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        with Join([model, optimizer]):
            for k in range(counts[rank]):
                x = torch.full((1, 2), 10.0**k)
                if no_sync and (k + 1) % 3:
                    with model.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
    model(torch.zeros(1, 2)).sum().backward()
    seen.append(model.module.weight.grad[0, 0].item())
    return seen


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (2, 5), (0, 2)], ids=str)
def test_gradients_that_add_up_are_those_of_one_process(counts, no_sync):
    """Each batch counts for half of its value, on which rank and in which block it may be."""
    wanted = 2 * sum(10.0**k / 2 for n in counts for k in range(n))
    assert run(2, adds_up, counts, no_sync) == [[wanted]] * 2


def leaves_before_it_is_asked(seconds):
    """Let rank 1 leave a block first, and its thread be slow to say what rank 1 did in it."""
    rank = dist.get_rank()
    answer = EventLog.answer

    def late(self):
        if rank == 1 and not self.has_data and threading.current_thread().name != "MainThread":
            time.sleep(seconds)
        answer(self)

    EventLog.answer = late
    model = DDP(nn.Linear(2, 1, bias=False))
    with Join([model]):
        if rank == 1:
            with model.no_sync():  # it does not wait for rank 0
                model(torch.ones(1, 2)).sum().backward()
        else:
            time.sleep(1.0)  # rank 1 has left by then
    return model.module.weight.grad[0, 0].item()


def test_a_rank_that_has_left_may_be_slow_to_say_what_it_did():
    assert run(2, leaves_before_it_is_asked, 3.0) == [0.0, 1.0]  # in no_sync each keeps its own


def discarded(how):
    """One rank runs out of data in the middle of an accumulation that the others then throw away."""
    rank, net = dist.get_rank(), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.0)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=1.0)
    if how == "parallel":
        model, joinable = net, data_parallel(net, optimizer)
    else:
        model = joinable = DDP(net)
    if how == "overlap":
        overlap(model, optimizer)
    with Join([joinable, optimizer]):
        for k in range((1, 3)[rank]):
            if k == 1:
                optimizer.zero_grad()  # as after gradients that are not finite
            if k < 2:
                with joinable.no_sync():
                    model(torch.full((1, 2), 10.0**k)).sum().backward()
            else:
                model(torch.full((1, 2), 10.0**k)).sum().backward()
                optimizer.step()
    return net.weight[0, 0].item()


@pytest.mark.parametrize("how", ["ddp", "overlap", "parallel"])
def test_gradients_that_others_discard_are_discarded(how):
    assert run(2, discarded, how) == [-55.0] * 2


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return Output(self.layer(x))


def untraced():
    rank, model = dist.get_rank(), DDP(Hidden())
    optimizer = SGD(model.parameters(), lr=0.0)
    gradients = []
    for _ in range(2):
        with Join([model, optimizer]):
            for _ in range((1, 3)[rank]):
                out = model(torch.full((1, 2), 50.0))
                optimizer.zero_grad()
                out.value.sum().backward()
                gradients.append(model.module.layer.weight.grad[0, 0].item())
                optimizer.step()
    return gradients


def test_zero_grad_between_forward_and_a_backward_that_the_output_does_not_tell_of():
    assert run(2, untraced) == [[50.0] * 2, [50.0, 25.0, 25.0] * 2]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))

    def forward(self, x, which):
        return self.layers[which](x)


def forgets():
    """Use a layer under no_sync on a rank that then runs out of data: its next backward must not
    say that it was used."""
    rank, model = dist.get_rank(), DDP(Branches(), find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]):
        for k in range((1, 2)[rank]):
            if k == 0:
                with model.no_sync():
                    model(torch.ones(1, 2), 0).sum().backward()
            else:
                model(torch.ones(1, 2), 0).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    model(torch.ones(1, 2), 1).sum().backward()
    return [layer.weight.grad is not None for layer in model.module.layers]


def test_a_block_leaves_no_word_of_parameters_that_were_used():
    assert run(2, forgets) == [[False, True]] * 2


def entered_again():
    """Enter a block again whose backward has failed on all ranks."""
    rank, model = dist.get_rank(), DDP(nn.Linear(2, 1, bias=False), find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.0)
    block = Join([model, optimizer])

    def bad(gradient):
        raise KeyError("mine")

    def fails():
        with block:
            out = model(torch.ones(1, 2))
            out.register_hook(bad)
            out.sum().backward()

    error = caught_error(fails)
    model.reducer._reset_state()  # torch's own way out of a backward that failed
    optimizer.zero_grad()
    with block:
        for _ in range((1, 3)[rank]):
            model(torch.full((1, 2), 50.0)).sum().backward()
            left = model.module.weight.grad[0, 0].item()
            optimizer.step()
            optimizer.zero_grad()
    return (
        error[0],
        left,
        block.attendance.batches,
        model._join_config.enable,
        len(model._forward_hooks),
    )


def test_a_block_may_be_entered_again_after_an_error():
    ranks = run(2, entered_again, timeout=40)
    assert [rank[0] for rank in ranks] == ["KeyError"] * 2 and [rank[1] for rank in ranks] == [
        50.0,
        25.0,
    ]
    assert all(rank[2:] == ((1, 3), False, 0) for rank in ranks)


def sends_statistics(counts):
    """End a block in the middle of an accumulation on some ranks; what all ranks send before the
    next forward is the same."""
    rank, net = dist.get_rank(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    zero = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    handle = data_parallel(net, zero)
    with Join([handle]):
        for k in range(counts[rank]):
            with nullcontext() if k % 2 else handle.no_sync():
                net(torch.randn(3, 2)).sum().backward()
    for _ in range(2):
        net(torch.randn(3, 2)).sum().backward()
    return handle.buffers.due


@pytest.mark.parametrize("counts", [(1, 4), (3, 2)], ids=str)
def test_statistics_are_sent_after_a_block_that_ended_in_the_middle_of_an_accumulation(counts):
    assert run(2, sends_statistics, counts, timeout=40) == [True] * 2


def writes(kind, how, counts):
    """Change gradients in a way that leaves no version behind."""
    rank, net = dist.get_rank(), nn.Linear(3, 2)
    model = DDP(net)
    made = {
        "zero": lambda: ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1),
        "fused": lambda: AdamW(net.parameters(), fused=True),
    }
    optimizer = made.get(kind, lambda: SGD(net.parameters(), lr=0.1))()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scaler")
    clip = (
        {"before_step": lambda optimizer: nn.utils.clip_grad_norm_(net.parameters(), 1.0)}
        if how == "clipping"
        else {}
    )

    def train():
        with Join([model, optimizer], policy="stop" if how == "stopped" else None, **clip):
            for _ in range(counts[rank]):
                scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
                if how in ("clamp", "clipping", "stopped"):
                    for p in net.parameters():
                        p.grad.data.clamp_(-0.01, 0.01)
                scaler.step(optimizer)
                scaler.update()
                if how == "zero":
                    for p in net.parameters():
                        p.grad.data.zero_()
                else:
                    optimizer.zero_grad()

    return caught_error(train)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("plain", "scaler"),
        ("fused", "scaler"),
        ("zero", "scaler"),
        ("plain", "clamp"),
        ("zero", "zero"),
        ("zero", "clipping"),
    ],
)
@pytest.mark.filterwarnings("ignore:gradients change")
def test_gradients_that_are_written_without_a_version_are_an_error(kind, how):
    for error in run(2, writes, kind, how, (2, 5)):
        assert error and "gradients were changed between" in error[1], error


class Boxed(nn.Linear):
    """A model in whose output DDP finds no tensor."""

    def forward(self, x):
        return Output(super().forward(x))


def clipped_sums(kind, clips):
    """Add gradients up over backwards, and clip them after each; the last gradient."""
    model = DDP(kind(1, 1, bias=False))

    def train():
        with Join([model]):
            for _ in range((1, 3)[dist.get_rank()]):
                out = model(torch.full((1, 1), 4.0))
                getattr(out, "value", out).sum().backward()
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return caught_error(train), model.module.weight.grad.item()


@pytest.mark.parametrize("kind", [nn.Linear, Boxed])
def test_gradients_that_are_clipped_between_backwards_are_an_error(kind):
    assert run(2, clipped_sums, kind, False) == [(None, 8.0)] * 2
    for error, _ in run(2, clipped_sums, kind, True):
        assert error and "gradients were changed between two backwards" in error[1], error


def gradients_alone(kind, models):
    """Ask autograd for gradients, which adds none to a parameter, and reduces none."""
    joined = [DDP(kind(1, 1, bias=False)) for _ in range(models)]
    with Join(joined):
        for _ in range((1, 3)[dist.get_rank()]):
            for model in joined:
                out = model(torch.full((1, 1), 4.0))
                loss = getattr(out, "value", out).sum()
                torch.autograd.grad(loss, list(model.parameters()))
    return [p.grad for model in joined for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "models"), [(nn.Linear, 1), (nn.Linear, 2), (Boxed, 1), (Boxed, 2)]
)
def test_gradients_that_are_not_kept_are_not_announced(kind, models):
    assert run(2, gradients_alone, kind, models, timeout=30) == [[None] * models] * 2


def test_gradients_may_be_written_where_no_rank_goes_on_without_data():
    assert (
        run(2, writes, "plain", "clamp", (3, 3))
        == run(2, writes, "plain", "stopped", (2, 5))
        == [None] * 2
    )
