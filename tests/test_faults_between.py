"""Every mode against DDP in what is written between two backwards: buffers, schedulers, loads, freezing."""

import contextlib
import copy
import random

import pytest
import torch
import torch.distributed as dist
from common import flatten
from common.parallel import MODES, SMALL, base, batch, normed
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

FORWARDS = (
    "train",
    "train",
    "train no_sync",
    "train no_sync",
    "train no_grad",
    "eval",
    "eval no_sync",
    "eval no_grad",
    "eval inference_mode",
)


WRAPPED = {
    "zero1": None,
    "zero1-overlap": {},
    "zero1-overlap, interleaved": {"interleaved": True},
}


def attached(kind, model):
    """Give what is called, its optimizer, and what has `no_sync`, of DDP or a mode."""
    if kind == "DDP":
        net = DDP(model)
        return net, AdamW(model.parameters(), lr=0.05, foreach=False), net
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05, foreach=False)
    if kind in MODES:
        return model, zero, data_parallel(model, zero, **SMALL, **MODES[kind])
    net = DDP(model)
    if WRAPPED[kind] is not None:
        overlap(net, zero, **WRAPPED[kind])
    return net, zero, net


def in_kind(kind, no_sync):
    """Give the context of a forward."""
    kinds = {
        "no_sync": no_sync,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    return kinds.get(kind, contextlib.nullcontext)()


def buffered(mode, seed):
    """Run forwards of every kind in random order, both ways; are outputs and buffers equal on this
    rank after each, and parameters after each step?"""
    draw = random.Random(seed)
    torch.manual_seed(0)
    one, other = normed(), normed()
    other.load_state_dict(one.state_dict())
    pair = attached("DDP", one), attached(mode, other)
    equal, history = [], []
    for i in range(20):
        history.append(what := draw.choice(FORWARDS))
        way, _, kind = what.partition(" ")
        outputs = []
        for net, _, handle in pair:
            net.train(way == "train")
            with in_kind(kind, handle.no_sync):
                outputs.append(net(batch(i)))
                if outputs[-1].requires_grad:
                    outputs[-1].square().mean().backward()
        equal.append(
            torch.equal(*outputs) and all(map(torch.equal, one.buffers(), other.buffers()))
        )
        if not kind:
            for _, optimizer, _ in pair:
                optimizer.step()
                optimizer.zero_grad()
            equal.append(all(map(torch.equal, one.parameters(), other.parameters())))
    return history, equal


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", [*WRAPPED, *MODES])
def test_buffers_are_those_of_DDP_after_every_kind_of_forward(mode, seed):
    for history, equal in run(2, buffered, mode, 10 * len(mode) + seed):
        assert all(equal), (history, equal)


def in_a_block(seed):
    """Run forwards of every kind in a block in which one rank runs out of data, and after it; are
    outputs and buffers those of DDP?"""
    draw = random.Random(seed)
    inside, after = draw.choices(FORWARDS, k=8), draw.choices(FORWARDS, k=6)
    outcomes = []
    for kind in ("DDP", "ours"):
        torch.manual_seed(0)
        net = model = normed()
        if kind == "DDP":
            handle, optimizer = (net := DDP(model)), SGD(model.parameters(), lr=0.05)
        else:
            handle = data_parallel(
                model,
                optimizer := ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.05),
                **SMALL,
            )
        seen = []

        def forward(what, i, net=net, model=model, optimizer=optimizer, handle=handle, seen=seen):
            mode, _, kind = what.partition(" ")
            net.train(mode == "train")
            with in_kind(kind, handle.no_sync):
                output = net(batch(i))
                if output.requires_grad:
                    output.square().mean().backward()
            seen.extend((output.detach(), flatten(model.buffers())))
            if kind:
                return
            optimizer.step()
            optimizer.zero_grad()

        with Join([handle]):
            for i, what in enumerate(inside[: 5 if dist.get_rank() else None]):
                forward(what, i)
        optimizer.zero_grad()
        for i, what in enumerate(after):
            forward(what, 20 + i)
        outcomes.append(seen)
    return inside, after, [torch.equal(*pair) for pair in zip(*outcomes, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_buffers_are_those_of_DDP_in_a_block_of_Join_and_after_it(seed):
    for inside, after, equal in run(2, in_a_block, seed):
        assert all(equal), (inside, after, equal)


def two_forwards():
    """Two forwards before one backward, which has saved the buffers that the second one sends."""
    outcomes = []
    for kind in ("DDP", "ours"):
        torch.manual_seed(0)
        net = (model := normed()).eval()
        if kind == "DDP":
            # in torch 2.11, DDP cannot send buffers that a backward still needs
            net = DDP(model, broadcast_buffers=False)
            optimizer = AdamW(model.parameters(), lr=0.05, foreach=False)
        else:
            data_parallel(
                model,
                optimizer := ZeroRedundancyOptimizer(
                    model.parameters(), AdamW, lr=0.05, foreach=False
                ),
                **SMALL,
            )
        (net(batch(0)).square().mean() + net(batch(1)).square().mean()).backward()
        optimizer.step()
        outcomes.append(flatten(model.parameters()))
    return torch.equal(*outcomes)


def test_buffers_may_be_sent_again_before_backward():
    assert all(run(2, two_forwards))


def evaluated_alone(mode):
    """One rank evaluates while the others wait, in the middle of training; all that it sees, and
    the parameters and buffers at the end."""
    outcomes = []
    for kind in ("DDP", "ours", "copy", "forward"):
        torch.manual_seed(0)
        model = normed()
        net, optimizer, _ = attached("DDP" if kind == "DDP" else mode, model)
        seen = []
        for i in range(4):
            net(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 1 and dist.get_rank() == 0:
                looked = (copy.deepcopy(model) if kind == "copy" else net).eval()
                look = looked.forward if kind == "forward" else looked
                with torch.no_grad():
                    seen += [look(batch(10 + j)) for j in range(3)]
                net.train()
            if kind in ("copy", "forward"):
                dist.barrier()  # which send nothing
        outcomes.append([*seen, flatten(model.parameters()), flatten(model.buffers())])
    return [all(map(torch.equal, outcomes[0], other)) for other in outcomes[1:]]


@pytest.mark.parametrize("mode", MODES)
def test_the_first_rank_may_evaluate_alone_as_with_DDP(mode):
    assert run(2, evaluated_alone, mode, timeout=60) == [[True] * 3] * 2


def scheduled(i, model, optimizer, scheduler):
    """Write the learning rate for the next step, after this one."""
    optimizer.step()
    scheduler.step()


def scheduled_alone(i, model, optimizer, scheduler):
    """Write it where no step is called, since backward has taken it."""
    if isinstance(optimizer, AdamW):
        optimizer.step()
    scheduler.step()


def clamped(i, model, optimizer, scheduler):
    """Write parameters after the step."""
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


def loaded_again(i, model, optimizer, scheduler):
    """Go back to the parameters and the state of the optimizer that were there some steps before."""
    optimizer.step()
    held = vars(optimizer).setdefault("held", [])
    if isinstance(optimizer, ZeroRedundancyOptimizer) and i in (1, 3):
        optimizer.consolidate_state_dict(to=None)
    if i == 1:
        held.extend(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    if i == 3:
        model.load_state_dict(held[0])
        optimizer.load_state_dict(copy.deepcopy(held[1]))


def frozen(i, model, optimizer, scheduler):
    """Freeze a layer, and train it again."""
    optimizer.step()
    if i in (1, 3):
        model[0].requires_grad_(i == 3)


LOOPS = {f.__name__: f for f in (scheduled, scheduled_alone, clamped, loaded_again, frozen)}


def looped(kind, loop, micro=1, **setup):
    """Train with a loop that writes something between a backward and the next; give the parameters."""
    torch.manual_seed(0)
    net = model = base()
    if kind == "DDP":
        optimizer = AdamW(model.parameters(), lr=0.05, foreach=False)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05, foreach=False)
    if kind != "data_parallel":
        net = DDP(model, bucket_cap_mb=0.0005)
    handle = net
    if kind == "data_parallel":
        handle = data_parallel(model, optimizer, **SMALL, **setup)
    elif kind == "overlap":
        overlap(net, optimizer, **setup)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for i in range(6):
        for m in range(micro - 1):
            with handle.no_sync():
                net(batch(10 * i + m)).square().mean().backward()
            for p in model.parameters():
                p.grad.mul_(0.5)  # what was added up on this rank may be read and changed
        if kind == "DDP" and loop is frozen and i in (2, 4):
            net = DDP(model, bucket_cap_mb=0.0005)  # which does not see it otherwise
        net(batch(10 * i + 9)).square().mean().backward()
        loop(i, model, optimizer, scheduler)
        optimizer.zero_grad()
    return flatten(model.parameters())


def looped_in_every_mode(loop, micro):
    wanted, found = looped("DDP", LOOPS[loop], micro), {}
    for name, setup in MODES.items():
        found[name] = looped("data_parallel", LOOPS[loop], micro, **setup)
        if "hidden" not in name and loop != "frozen":
            found[f"overlap {name}"] = looped("overlap", LOOPS[loop], micro, **setup)
    return {name: float((wanted - params).abs().max()) for name, params in found.items()}


@pytest.mark.turns(2)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("loop,micro", [*((loop, 1) for loop in LOOPS), ("scheduled", 3)])
def test_what_is_written_between_two_backwards_counts_as_with_DDP(loop, micro):
    for rank in run(2, looped_in_every_mode, loop, micro):
        assert all(far < 1e-12 for far in rank.values()), rank
