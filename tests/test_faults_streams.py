"""What is read on which stream, by a stand-in for the streams of a GPU."""

import contextlib

import pytest
import torch
from common import flatten
from common.parallel import MODES, SMALL, base, batch, linear, normed
from stream_standin import NetworkWork, Stream, WatchedStream, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Muon

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Mixed(nn.Module):
    """Uses other parameters on other batches."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.norm = base(), linear(), nn.BatchNorm1d(8).double()

    def forward(self, x):
        return self.last(self.body(x)) if x[0, 0] > 0 else self.norm(self.body(x))


def by_norm(handle, model, zero, world):
    assert float(handle.grad_norm) > 0 and (2 * handle.grad_norm).isfinite()


def by_waiting(handle, model, zero, world):
    flatten([handle.wait(), *model.parameters()][1:])


def by_consolidating(handle, model, zero, world):
    zero.consolidate_state_dict(to=None)


def by_users(handle, model, zero, world):
    """Read on two streams that both follow the one that called backward; the second must not rely
    on what the first waited for."""
    now = world.main.record_event()
    for stream in (Stream(world, "first"), Stream(world, "second")):
        stream.wait_event(now)
        with world.stream(stream):
            flatten(model.parameters())
        world.main.wait_stream(stream)


def halved():
    return base().bfloat16()


def two_classes(model):
    found = list(model.parameters())
    return [
        {"params": [p for p in found if p.dim() == 2], "optimizer_class": Muon, "lr": 0.02},
        {"params": [p for p in found if p.dim() != 2]},
    ]


USES = {
    "plain": {},
    "norm": {"max_grad_norm": 0.1, "look": by_norm},
    "scaler": {"skips": ()},
    "scaler that skips": {"skips": (2, 3)},
    "accumulation": {"micro": 3},
    "unused": {"make": Mixed, "micro": 2, "find_unused_parameters": True},
    "users": {"look": by_users},
    "wait": {"look": by_waiting},
    "consolidate": {"look": by_consolidating},
    "reduce_dtype": {"reduce_dtype": torch.float32},
    "buffers": {"make": normed},
    "Muon + AdamW": {"groups": two_classes},
    "masters": {
        "make": halved,
        "options": {"master_dtype": torch.float32},
        "look": by_consolidating,
    },
    "levels": {"nodes": True, "look": by_consolidating},
    "levels, unused": {"nodes": True, "make": Mixed, "micro": 2, "find_unused_parameters": True},
    "all": {
        "make": halved,
        "groups": two_classes,
        "options": {"master_dtype": torch.float32},
        "nodes": True,
        "micro": 2,
    },
}

SCALED = [use for use, how in USES.items() if "skips" in how]


def attach(kind, model, zero, find_unused_parameters, **setup):
    """Give the model to call, and what steps inside its backward, if anything does."""
    looks = {"find_unused_parameters": find_unused_parameters}
    if kind == "data_parallel":
        return model, data_parallel(model, zero, **looks, **SMALL, **setup)
    net = DDP(model, bucket_cap_mb=0.0005, **looks)
    return net, overlap(net, zero, **setup) if kind == "overlap" else None


def accumulate(net, no_sync, scaler, dtype, first, micro, infinite):
    """Run forward and backward of one step, in parts of which only the last one is synchronised."""
    for m in range(micro):
        with no_sync() if m < micro - 1 else contextlib.nullcontext():
            loss = net(batch(first + m).to(dtype)).square().mean() * (
                torch.inf if infinite else 1.0
            )
            (scaler.scale(loss) if scaler else loss).backward()


def take_step(zero, scaler):
    if scaler:
        scaler.step(zero)
        scaler.update()
    else:
        zero.step()


def on_streams(
    kind="data_parallel",
    make=base,
    groups=nn.Module.parameters,
    options=None,
    nodes=False,
    micro=1,
    look=None,
    skips=None,  # steps whose loss is infinite, with a scaler; None: without one
    keeps=True,
    find_unused_parameters=False,
    **setup,
):
    """Train with a stand-in for streams; give its faults."""
    torch.manual_seed(0)
    model = make()
    scaler = None if skips is None else torch.amp.GradScaler("cpu", init_scale=8.0)
    dtype = next(model.parameters()).dtype
    given = {"lr": 0.05, "bucket_cap_mb": 0.0005, **(options or {})}
    zero = ZeroRedundancyOptimizer(groups(model), AdamW, two_level(2) if nodes else None, **given)
    net, handle = attach(kind, model, zero, find_unused_parameters, scaler=scaler, **setup)
    no_sync = (handle if kind == "data_parallel" else net).no_sync
    world = World()
    if handle:
        handle.engine.stream = WatchedStream(world)
    if not keeps:
        handle.engine.stream.keep = lambda tensor, stream=None: None
    with world, world.networked():
        for i in range(5):
            accumulate(net, no_sync, scaler, dtype, 10 * i, micro, i in (skips or ()))
            if look and handle:
                look(handle, model, zero, world)
            take_step(zero, scaler)
            if look and not handle:
                look(handle, model, zero, world)
            zero.zero_grad()
        if handle:
            handle.wait()
    assert world.kernels > 100
    return world.faults


def streams_of(use):
    """Give the faults of one use in every mode that knows it."""
    how, found = USES[use], {}
    for name, setup in MODES.items():
        if use in ("norm", *SCALED) and setup["interleaved"]:
            continue
        found[name] = on_streams(**how, **setup)
        if use != "users" and "hidden" not in name:
            found[f"overlap {name}"] = on_streams("overlap", **how, **setup)
    if use not in ("norm", "users", "wait", "reduce_dtype"):
        found["step"] = on_streams("step", **how)
    return found


@pytest.mark.turns(5)
@pytest.mark.parametrize("use", USES)
def test_C2_M11_all_that_is_read_is_there_and_nothing_is_let_go_too_early(use):
    for rank in run(4 if USES[use].get("nodes") else 2, streams_of, use):
        assert not any(rank.values()), rank


def test_C2_the_stand_in_sees_gradients_that_are_let_go_unrecorded():
    (words,) = {tuple(faults) for faults in run(2, lambda: on_streams(keeps=False))}
    assert words == (
        "memory of main is let go that _foreach_copy_ reads on side, and is not recorded for it",
    )


def careless(kind, nodes):
    """Train with waits that order nothing, of a collective and of the side stream; are there faults?"""
    seen, wait = [], NetworkWork.wait
    NetworkWork.wait = lambda work: setattr(work, "done", True)
    seen.append(on_streams(kind, nodes=nodes))
    NetworkWork.wait = wait
    if kind != "step":
        WatchedStream.wait = lambda stream, event=None: None
        seen.append(on_streams(kind, nodes=nodes))
        del WatchedStream.wait
    return [bool(faults) for faults in seen]


@pytest.mark.parametrize("kind", ["data_parallel", "overlap", "step"])
def test_C2_the_stand_in_sees_waits_that_order_nothing(kind):
    for nodes in (False, True):
        assert all(all(rank) for rank in run(4 if nodes else 2, careless, kind, nodes))


def unordered():
    world = World()
    side = Stream(world, "side")

    def faults():
        found, world.faults = world.faults, []
        return found

    with world:
        a = torch.ones(4)
        with world.stream(side):
            b = a + 1
        yield "read without an event", faults(), 1
        side.wait_stream(world.main)
        with world.stream(side):
            b = a + 1
        yield "read after one", faults(), 0
        a.add_(1)
        yield "write over what is read", faults(), 1
        world.main.wait_stream(side)
        a.add_(1)
        b.sum()
        yield "write after an event", faults(), 0
        side.wait_stream(world.main)
        with world.stream(side):
            a + 1
        del a
        world.collect()
        yield "let go unrecorded", faults(), 1
        c = torch.ones(4)
        side.wait_stream(world.main)
        with world.stream(side):
            c + 1
        world.record(c, side)
        del c
        world.collect()
        yield "let go recorded", faults(), 0


def test_the_stand_in_finds_what_streams_do_not_order():
    for what, found, count in unordered():
        assert len(found) == count, (what, found)
