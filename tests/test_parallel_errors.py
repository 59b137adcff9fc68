"""What `data_parallel` refuses, and what it does after an error."""

import contextlib
import re
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten, largest_gap, network
from common.models import Recomputed
from common.modes import SMALL
from common.parallel_training import PARALLEL, adamw, batch, one_adamw, replicas, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Muon
from torch.utils.checkpoint import checkpoint

from zero_nb.backward.bucket_planner import DataParallelOptions
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def muon(params):
    return {"params": params, "optimizer_class": Muon, "lr": 0.02}


def muon_adamw(model):
    found = list(model.parameters())
    return [muon([p for p in found if p.dim() == 2]), adamw([p for p in found if p.dim() != 2])]


def made(model=None, **setup):
    model = model or network()
    return data_parallel(model, sharded(one_adamw(model)), **setup)


def without_the_last():
    model = network()
    return data_parallel(model, sharded([adamw(list(model.parameters())[:3])]))


def with_a_stranger():
    model = network()
    params = [*model.parameters(), nn.Parameter(torch.ones(3, 4))]
    return data_parallel(model, sharded([adamw(params)]))


def with_an_expanded_buffer():
    model = network()
    model.register_buffer("mask", torch.ones(3).expand(2, 3))
    made(model)


def with_a_sparse_layer():
    made(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))


def compiled_by_jit():
    made(torch.jit.script(network()))


def with_a_sparse_buffer():
    model = network()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return made(model)


BAD = {
    "ddp": lambda: made(DDP(network())),
    "plain optimizer": lambda: data_parallel(model := network(), AdamW(model.parameters())),
    "not a module": lambda: data_parallel([1], sharded(one_adamw(network()))),
    "missing": without_the_last,
    "strange": with_a_stranger,
    "unknown": lambda: made(bucket_cap=3),
    "apart": lambda: made(bucket_cap_mb=1.0 + dist.get_rank()),
    "negative cap": lambda: made(bucket_cap_mb=-1.0),
    "cap": lambda: made(bucket_cap_mb="8"),
    "no cap": lambda: made(bucket_cap_mb=0),
    "cap of no number": lambda: made(bucket_cap_mb=float("nan")),
    "no cut": lambda: made(cut_mb=None),
    "cut": lambda: made(cut_mb=0.0),
    "lag": lambda: made(lag=-1),
    "lag of a float": lambda: made(lag=1.5),
    "buffers": lambda: made(buffers="none"),
    "clip": lambda: made(max_grad_norm=-1.0),
    "judges": lambda: made(interleaved=True, max_grad_norm=1.0),
    "scaler": lambda: made(scaler=3),
    "norm": lambda: made(max_grad_norm=1.0, norm_type=0),
    "sparse buffer": with_a_sparse_buffer,
    "expanded buffer": with_an_expanded_buffer,
    "sparse layer": with_a_sparse_layer,
    "script": compiled_by_jit,
}


def bad():
    out = {name: caught(f) for name, f in BAD.items()}
    model = network()
    zero = sharded(one_adamw(model))
    data_parallel(model, zero)
    later = {
        "twice": lambda: data_parallel(model, zero),
        "other optimizer": lambda: made(model),
        "closure": lambda: zero.step(found_inf=1),
        "add": lambda: zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    }
    out |= {name: caught(f) for name, f in later.items()}
    model(batch(0)).square().mean().backward()
    assert replicas(model)
    return out


WORDS = {
    "ddp": "TypeError.*plain model.*module",
    "plain optimizer": "TypeError.*ZeroRedundancyOptimizer, got AdamW",
    "not a module": "TypeError.*Module, got list",
    "missing": "ValueError.*'3.weight'",
    "strange": r"ValueError.*\(3, 4\)",
    "unknown": "TypeError.*bucket_cap",
    "apart": "rank",
    "negative cap": "ValueError.*bucket_cap_mb",
    "cap": "ValueError.*bucket_cap_mb must be a number above 0, got '8'",
    "no cap": "ValueError.*bucket_cap_mb must be a number above 0, got 0",
    "cap of no number": "ValueError.*bucket_cap_mb must be a number above 0, got nan",
    "no cut": "ValueError.*cut_mb must be a number above 0, got None",
    "cut": "ValueError.*cut_mb",
    "lag": "ValueError.*lag",
    "lag of a float": "(Type|Value)Error.*lag",
    "buffers": "ValueError.*'none'",
    "clip": "ValueError.*max_grad_norm",
    "norm": "ValueError.*norm_type must be above 0",
    "sparse buffer": "ValueError.*mask has layout torch.sparse_coo; keep it dense",
    "expanded buffer": "ValueError.*several elements of mask lie in one place",
    "sparse layer": "ValueError.*0 has sparse gradients.*use sparse=False in this layer",
    "script": "TypeError.*module must take hooks.*nn.Sequential",
    "judges": "ValueError.*interleaved",
    "scaler": "TypeError.*scaler.*got",
    "twice": "RuntimeError.*detach",
    "other optimizer": "RuntimeError.*detach",
    "closure": "TypeError.*found_inf",
    "add": "RuntimeError.*overlapped",
}


def test_bad_input_is_an_error_on_every_rank():
    ranks = run(2, bad, timeout=60)
    for name, words in WORDS.items():
        for rank in ranks:
            assert rank[name] and re.search(words, rank[name], re.S), (name, rank[name])


class Trap(nn.Module):
    """Fails in forward or in backward when told to."""

    def __init__(self):
        super().__init__()
        self.inside, self.where = network(), ""

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("caught in forward")
        out = self.inside[0](x)
        if self.where == "backward":
            out.register_hook(self.spring)
        return self.inside[1:](out)

    def spring(self, grad):
        raise ValueError("caught in backward")


def trapped(where, setup, at, nodes=False):
    model = Trap()
    data_parallel(
        model, sharded(one_adamw(model), two_level(2) if nodes else None), **SMALL, **setup
    )

    def go():
        for i in range(4):
            model.where = where if i == at and dist.get_rank() == 1 else ""
            model(batch(i)).square().mean().backward()
        return list(model.parameters())

    return caught(go)


@pytest.mark.turns(4)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["zero2", "zero2-interleaved, hidden"])
def test_a_rank_that_raises_is_named_by_the_others(mode, where, at):
    for size, nodes in ((3, False), (4, True)):
        messages = run(size, trapped, where, PARALLEL[mode], at, nodes, timeout=30)
        assert messages.pop(1) == f"ValueError: caught in {where}"
        for message in messages:
            assert "rank 1 failed with" in message, message  # and it ends soon


def twice_differentiated():
    model = network()
    data_parallel(model, sharded(one_adamw(model)), **SMALL)
    return caught(lambda: model(batch(0)).square().mean().backward(create_graph=True))


def differentiated_by_one():
    model = network()
    data_parallel(model, sharded(one_adamw(model)), **SMALL)
    return caught(
        lambda: [
            model(batch(step))
            .square()
            .mean()
            .backward(create_graph=step == 1 and dist.get_rank() == 1)
            for step in range(3)
        ]
    )


def wholly_recomputed(reentrant):
    one, other = network(), network()
    wrapped, optim, zero, worst = (
        DDP(one),
        AdamW(one.parameters(), lr=1e-2, weight_decay=0.1),
        sharded(one_adamw(other)),
        0.0,
    )
    data_parallel(other, zero, **SMALL)
    for step in range(4):
        wrapped(batch(step)).square().mean().backward()
        checkpoint(
            other, batch(step).requires_grad_(), use_reentrant=reentrant
        ).square().mean().backward()
        optim.step()
        optim.zero_grad()
        worst = max(
            worst, (flatten(one.parameters()) - flatten(other.parameters())).abs().max().item()
        )
    return worst, replicas(other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_module_may_be_recomputed_as_a_whole(reentrant):
    for worst, same in run(2, wholly_recomputed, reentrant):
        assert worst < 1e-12 and same


def scheduled():
    model = network()
    zero = sharded(one_adamw(model))
    data_parallel(model, zero, **SMALL)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            model(batch(step)).square().mean().backward()
            scheduler.step()
    return [str(w.message) for w in warned], zero.param_groups[0]["lr"]


def test_a_scheduler_does_not_miss_the_step_that_is_left_out():
    for warned, lr in run(2, scheduled):
        assert not warned and lr == 1e-2 / 8


def left_after_an_error():
    """One rank leaves the block by an exception; the other is not in one, and waits for nobody."""
    model = network()
    handle = data_parallel(model, zero := sharded(one_adamw(model)), **SMALL)

    def go():
        with handle if dist.get_rank() == 1 else contextlib.nullcontext():
            for step in range(3):
                model(batch(step)).square().mean().backward()
            if dist.get_rank() == 1:
                raise KeyError("in the loop")

    return caught(go), not zero.driver.steps_in_backward, caught(lambda: [model(batch(9))])


def test_the_block_ends_at_once_on_a_rank_that_raises_in_it():
    assert run(2, left_after_an_error, timeout=30) == [
        (None, False, None),
        ("KeyError: 'in the loop'", True, None),
    ]


def called_twice():
    model = Recomputed(True)
    data_parallel(model, sharded(one_adamw(model)), **SMALL)

    def go():
        model(batch(0)).sum().backward()
        (model(batch(0)) + model(batch(1))).sum().backward()

    return caught(go)


def test_what_is_recomputed_twice_is_refused():
    for message in run(2, called_twice):
        assert "two gradients in one backward" in message, message


def test_double_backward_is_refused():
    for message in run(2, twice_differentiated):
        assert message.startswith("RuntimeError") and "create_graph=True" in message, message
    for message in run(2, differentiated_by_one, timeout=30):
        assert "create_graph=True" in message, message


def long():
    model = network()
    zero = sharded(muon_adamw(model))
    data_parallel(model, zero, interleaved=True, **SMALL)
    for i in range(300):
        model(batch(i)).square().mean().backward()
    return replicas(model)


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
def test_hundreds_of_iterations_without_a_hang():
    assert all(run(3, long, timeout=90))


def set_by_hand():
    """A first step with gradients that were set by hand, and one after backward."""
    torch.manual_seed(0)
    model, plain = network(), network()
    data_parallel(model, zero := sharded(model.parameters()))
    optimizer = AdamW(plain.parameters(), lr=1e-2)
    for p in (*model.parameters(), *plain.parameters()):
        p.grad = torch.ones_like(p)
    zero.step()
    optimizer.step()
    return largest_gap(flatten(model), flatten(plain))


def test_gradients_that_were_set_by_hand_are_stepped_before_any_backward():
    assert max(run(2, set_by_hand)) < 1e-12


def through_submodules():
    """Let gradients of a forward add up, and run the last micro-batch through the submodules."""
    model = network()
    handle = data_parallel(model, zero := sharded(one_adamw(model)), **SMALL)
    with handle.no_sync():
        model(batch(0)).square().mean().backward()
    x = batch(1)
    for layer in model:
        x = layer(x)
    x.square().mean().backward()
    return caught(zero.step)


def test_a_last_forward_in_no_sync_is_what_step_speaks_of():
    for message in run(2, through_submodules):
        assert "run the last forward of the module before step(), not of its submod" in message


class Looked(nn.Module):
    """Looks rows up without a layer that says so."""

    def __init__(self, size):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(20, size))
        self.inner = nn.Linear(size, 2)

    def forward(self, x):
        return self.inner(nn.functional.embedding(x, self.rows, sparse=True))


@pytest.mark.parametrize("size", [4, 4000])  # in a bucket with others, and in one of its own
def test_a_gradient_that_turns_out_to_be_sparse_is_named(size):
    def looked_up():
        model = Looked(size)
        zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW)
        data_parallel(model, zero, bucket_cap_mb=0.1)
        return caught(lambda: model(torch.tensor([1, dist.get_rank()])).sum().backward())

    for said in run(2, looked_up):
        assert "rows has a sparse gradient and only dense ones" in said and "sparse=False" in said


def test_a_frozen_sparse_layer_and_a_compiled_layer_are_taken():
    def taken():
        model = nn.Sequential(nn.Embedding(9, 12, sparse=True), torch.jit.script(network().float()))
        model[0].weight.requires_grad_(False)
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
        data_parallel(model, zero)
        for _ in range(2):
            model(torch.tensor([1, 2])).sum().backward()
        return replicas(model)

    assert run(2, taken) == [True] * 2


def penalized(sums):
    """A penalty has a backward of its own, before that of the loss."""
    plain, ours = network(), network()
    wrapped, optim = DDP(plain), AdamW(one_adamw(plain))
    zero = sharded(one_adamw(ours))
    handle = data_parallel(ours, zero, **SMALL)
    for i in range(4):
        for model, o in ((wrapped, optim), (ours, zero)):
            first = next(model.parameters())
            with handle.no_sync() if model is ours and sums else contextlib.nullcontext():
                first.square().sum().backward()
            model(batch(i)).square().mean().backward()
            o.step()
            o.zero_grad()
    return largest_gap(flatten(plain.parameters()), flatten(ours.parameters()))


def test_a_penalty_on_its_own_is_summed_in_no_sync_and_else_told_to_be():
    assert all(found < 1e-9 for found in run(2, penalized, True))
    words = "as that of a penalty, belongs into no_sync()"
    assert all(words in message for message in run(2, caught, partial(penalized, False)))


@pytest.mark.parametrize(("device", "cap"), [("cpu", 8.0), ("cuda", 25.0)])
def test_what_travels_together_follows_the_device(device, cap):
    optimizer = SimpleNamespace(join_device=torch.device(device))
    assert DataParallelOptions().cap_mb(optimizer) == cap
    assert DataParallelOptions(bucket_cap_mb=3).cap_mb(optimizer) == 3


def planned_buckets(**setup):
    """Train once; count the buckets of four layers of 4 MiB."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    handle = data_parallel(model, sharded(one_adamw(model)), **setup)
    model(torch.ones(1, 1024)).sum().backward()
    return len(handle.step_plan.shard.plan.buckets)


def test_buckets_on_a_cpu_are_those_of_8_mib():
    by_default, small, large = (
        run(1, planned_buckets, **setup)
        for setup in ({}, {"bucket_cap_mb": 8}, {"bucket_cap_mb": 25})
    )
    assert by_default == small > large
