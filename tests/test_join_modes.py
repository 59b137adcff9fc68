"""Join with steps inside backward, in every mode; and torch's Join around them."""

import itertools
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap, run_each
from common.joining import Branches, Own, alone_with_branches, batches, network, reference
from common.modes import MODES, VARIANTS, Mode
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adafactor, AdamW, lr_scheduler

from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_overlap import (
    overlap,
)
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.join.attendance import (
    Attendance,
)
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

ORDERS = {
    "model first": lambda model, zero: [model, zero],
    "optimizer first": lambda model, zero: [zero, model],
    "model alone": lambda model, _: [model],
}


def prepared(mode, net, kind=AdamW, group=None, zero=None, ddp=None, parallel=None, **options):
    """Give the network as it is called, its optimizer, what is joined, and the handle of the steps."""

    def make(model):
        return ZeroRedundancyOptimizer(net.parameters(), kind, group, lr=1e-2, **(zero or {}))

    ddp = {"bucket_cap_mb": 1e-4, **(ddp or {})}
    parallel = {"bucket_cap_mb": 1e-4, "cut_mb": 25.0, **(parallel or {})}
    made = EVERY[mode].attach(net, make, group, ddp, parallel, **options)
    return made.call, made.optimizer, made.joinable, made.handle


def driven(
    mode,
    counts,
    by,
    options=None,
    order="model first",
    calls=True,
    kind=AdamW,
    every=1,
    ddp=None,
    parallel=None,
    group=None,
    rounds=1,
):
    """Train with steps inside backward; parameters, buffers and the optimizer's state."""
    rank, net = dist.get_rank(group), network()
    model, zero, joinable, handle = prepared(
        mode, net, kind, group, ddp=ddp, parallel=parallel, **(options or {})
    )
    for _ in range(rounds):
        with Join(ORDERS[order](joinable, zero), divide_by=by) as join:
            for k, x in enumerate(batches(counts[rank], rank, 4 + rank)):
                with nullcontext() if (k + 1) % every == 0 else joinable.no_sync():
                    (model(x).square().mean() / every).backward()
                if calls and (k + 1) % every == 0:
                    zero.step()
                if mode in KEEPS_MEANS:
                    zero.zero_grad()
    drivers = zero.driver.steps_in_backward
    handle.detach()
    zero.consolidate_state_dict(to=None)
    state = zero.state_dict()["state"]
    return (
        flatten(net),
        join.attendance.batches == counts and drivers,
        [b.clone() for b in net.buffers()],
        state,
    )


def same(ranks, wanted, eps=1e-6, state=None):
    """All ranks hold the same, to the bit, and what is wanted."""
    for params, fine, buffers, mine in ranks:
        assert (
            fine
            and largest_gap(params, ranks[0][0]) == 0
            and all(map(torch.equal, buffers, ranks[0][2]))
        )
        assert largest_gap(params, wanted) < eps, largest_gap(params, wanted)
        for i, found in (state or {}).items():
            for key, value in found.items():
                assert (
                    largest_gap(
                        torch.as_tensor(value, dtype=torch.float64),
                        torch.as_tensor(mine[i][key]).double(),
                    )
                    < eps
                ), (i, key)


EVERY = {
    **{name: mode for name, mode in MODES.items() if mode.attaches},
    **VARIANTS,
    "zero2, one bucket": Mode(False, data_parallel, {"bucket_cap_mb": 8.0}),
    "zero2, looks for unused": Mode(False, data_parallel, {"find_unused_parameters": True}),
}
KEEPS_MEANS = {"zero1-overlap, a hook of the user's"}  # gradients that their hook has averaged stay
# one of each way in which a bucket lives
FEW = ["zero1-overlap", "zero1-interleaved", "zero2", "zero2-hidden-interleaved"]
# buckets wait for the last one, so that gradients can be clipped and steps skipped
AFTER_BACKWARD = [mode for mode in MODES if mode in EVERY and not EVERY[mode].interleaved]


def in_modes(size, f, *args, modes=FEW, **kwargs):
    """Run a function in several modes; what the ranks returned, by mode."""
    return run_each(size, lambda mode: f(mode, *args, **kwargs), {mode: (mode,) for mode in modes})


@pytest.mark.parametrize(
    ("counts", "by"),
    [
        ((0, 1, 5, 17), "samples"),
        ((5, 1, 0), "active"),
        ((2, 0), "world_size"),
        ((3, 3), "samples"),
        ((4,), "samples"),
    ],
    ids=str,
)
def test_steps_inside_backward_are_those_of_one_process(counts, by):
    wanted, state = reference(counts, by)
    for ranks in in_modes(len(counts), driven, counts, by, modes=EVERY).values():
        same(ranks, wanted, state=state)


@pytest.mark.parametrize("order", ["optimizer first", "model alone"])
@pytest.mark.parametrize("calls", [True, False])
def test_the_optimizer_may_be_anywhere_and_step_need_not_be_called(order, calls):
    counts = (1, 5, 0)
    wanted, state = reference(counts, "samples")
    for ranks in in_modes(3, driven, counts, "samples", order=order, calls=calls).values():
        same(ranks, wanted, state=state)


class Momentum(SGD):
    """An optimizer with state from the first step on."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr=lr, momentum=0.9)


class Counting(AdamW):
    """Counts its steps in its param groups, so it cannot be stepped bucket by bucket."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [Momentum, Adafactor, Counting])
@pytest.mark.filterwarnings("ignore:.*counts its steps")
def test_any_class_of_optimizers_steps_without_data(kind):
    counts = (0, 4, 2)
    wanted, state = reference(counts, "active", kind)
    for ranks in in_modes(3, driven, counts, "active", kind=kind).values():
        same(ranks, wanted, state=state)


def test_blocks_with_steps_inside_backward_may_follow_each_other():
    wanted, state = reference((2, 5), "samples", rounds=3)
    for ranks in in_modes(2, driven, (2, 5), "samples", rounds=3).values():
        same(ranks, wanted, state=state)


@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_what_a_rank_has_accumulated_is_sent_where_steps_are_inside_backward(by):
    counts = (6, 2, 3, 9)
    wanted = reference(counts, by, every=3)[0]
    for ranks in in_modes(4, driven, counts, by, every=3).values():
        same(ranks, wanted)


def test_clipping_inside_backward():
    counts, modes = (4, 1, 0), [mode for mode in EVERY if not EVERY[mode].interleaved]
    wanted = reference(counts, "samples", clip=0.05)[0]
    clip = {"max_grad_norm": 0.05}
    for ranks in in_modes(3, driven, counts, "samples", clip, modes=modes).values():
        same(ranks, wanted)


@pytest.mark.parametrize(
    "hook", [default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook, "power"]
)
def test_compressed_gradients(hook):
    counts = (1, 5, 0)
    options = (
        {"hook": hook}
        if hook != "power"
        else {
            "hook": powerSGD_hook.powerSGD_hook,
            "state": powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2),
        }
    )
    buckets = (
        {"bucket_cap_mb": 25} if hook == "power" else {}
    )  # with several buckets on gloo, ranks deadlock in torch's PowerSGD, block or not
    same(
        run(3, driven, "zero1-overlap", counts, "samples", options, ddp=buckets),
        reference(counts, "samples")[0],
        0.2 if hook == "power" else 2e-2,
    )


SETTINGS = [
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]


@pytest.mark.parametrize("counts", [(2, 6, 1), (7, 1, 4)], ids=str)
def test_settings_of_a_model_whose_steps_are_inside_backward(counts):
    wanted, modes = reference(counts, "samples")[0], ("zero1-overlap", "zero1-interleaved")
    cases = {(mode, *ddp): (mode, ddp) for mode in modes for ddp in SETTINGS}
    found = run_each(3, lambda mode, ddp: driven(mode, counts, "samples", ddp=ddp), cases)
    for ranks in found.values():
        same(ranks, wanted)


def static(kind):
    rank, group, net = dist.get_rank(), dist.new_group(), network()
    model = DDP(net, process_group=group, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW, group, lr=1e-2)
    if kind != "plain":
        overlap(model, optimizer)

    def train():
        with (TorchJoin if kind == "torch" else Join)([model, optimizer]):
            for x in batches((2, 0)[rank]):
                model(x).square().mean().backward()
                optimizer.step()

    return caught_error(train)


@pytest.mark.parametrize("kind", ["plain", "ours", "torch"])
def test_a_static_graph_has_to_be_learned_by_every_rank(kind):
    errors = run(2, static, kind)
    assert (
        all(error[0] == "RuntimeError" for error in errors)
        and "give every rank a first batch" in errors[1][1]
    )
    assert kind == "torch" or "rank 1 left the Join block" in errors[0][1]


def on_two(mode):
    group = dist.new_group([1, 3])
    return driven(mode, (1, 4), "samples", group=group) if dist.get_rank() % 2 else None


def test_subgroups_whose_steps_are_inside_backward():
    wanted, state = reference((1, 4), "samples")
    for ranks in in_modes(4, on_two).values():
        same([rank for rank in ranks if rank is not None], wanted, state=state)


def unused(mode, counts):
    rank, net = dist.get_rank(), Branches()
    looks = {"find_unused_parameters": True}
    model, zero, joinable, _ = prepared(
        mode, net, zero={"weight_decay": 0.1}, ddp=looks, parallel=looks
    )
    with Join([joinable, zero], divide_by="samples"):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            model(x, which=(k + rank) % 2)["out"].square().mean().backward()
            zero.step()
    return flatten(net)


@pytest.mark.parametrize("counts", [(1, 5, 0), (0, 6, 2)], ids=str)
def test_unused_parameters_where_steps_are_inside_backward(counts):
    wanted = alone_with_branches(counts)
    for ranks in in_modes(3, unused, counts).values():
        assert all(
            largest_gap(params, wanted) < 1e-6 and largest_gap(params, ranks[0]) == 0
            for params in ranks
        )


class Sometimes(nn.Module):
    """Has no gradient at all in some iterations of some ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        return self.layer(x)


def nothing_here(first):
    """Train with a rank that has data and no gradient, which takes part in `step`, while another has no data."""
    rank = dist.get_rank()
    net = Sometimes()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    handle = data_parallel(net, zero, find_unused_parameters=True)
    with Join([handle, zero]):
        for k, x in enumerate(batches((5, 5, 1)[rank])):
            if k != first or rank:
                net(x).square().mean().backward()
            zero.step()
    handle.wait()
    return flatten(net)


@pytest.mark.parametrize("first", [0, 3])
def test_a_rank_with_data_and_without_gradients(first):
    ranks = run(3, nothing_here, first)
    net = Sometimes()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    data = [batches(n, rank) for rank, n in enumerate((5, 5, 1))]
    for k in range(5):
        optimizer.zero_grad()
        (
            sum(
                net(mine[k]).square().mean()
                for r, mine in enumerate(data)
                if len(mine) > k and (k != first or r)
            )
            / 3
        ).backward()
        optimizer.step()
    assert all(
        largest_gap(params, flatten(net)) < 1e-6 and largest_gap(params, ranks[0]) == 0
        for params in ranks
    )


def scheduled_driven(mode, counts):
    rank, net = dist.get_rank(), network()
    model, zero, joinable, _ = prepared(mode, net)
    scheduler = lr_scheduler.ExponentialLR(zero, 0.8)
    with Join([joinable, scheduler], divide_by="samples"):
        for x in batches(counts[rank], size=4 + rank):
            model(x).square().mean().backward()
            scheduler.step()
    return (
        flatten(net),
        True,
        [torch.tensor(zero.param_groups[0]["lr"]), torch.tensor(scheduler.last_epoch)],
        None,
    )


def test_learning_rates_where_steps_are_inside_backward():
    counts = (0, 2, 5)
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
    data = [batches(n, rank, 4 + rank) for rank, n in enumerate(counts)]
    for k in range(5):
        optimizer.zero_grad()
        model(torch.cat([mine[k] for mine in data if len(mine) > k])).square().mean().backward()
        optimizer.step()
        scheduler.step()
    for ranks in in_modes(3, scheduled_driven, counts).values():
        same(ranks, flatten(model))
        lr, epoch = ranks[0][2]
        assert epoch == 5 and abs(lr.item() - optimizer.param_groups[0]["lr"]) < 1e-9


def scaled(mode, counts, bad):
    rank, net = dist.get_rank(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    model, zero, joinable, _ = prepared(mode, net, scaler=scaler)
    with Join([zero, joinable], divide_by="samples"):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            zero.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss * (torch.inf if k in bad else 1)).backward()
            scaler.step(zero)
            scaler.update()
    scale = scaler.get_scale()
    loss = model(batches(1)[0]).square().mean()  # ranks go on together
    zero.zero_grad()
    scaler.scale(loss).backward()
    return flatten(net), scale == 2.0 ** (12 + 3 - len(bad)), [torch.tensor(scale)], None


def test_a_scale_reaches_ranks_without_data():
    """The scale grows at every second good iteration and halves at a bad one; ranks without data
    divide by that of the others."""
    counts, bad = (1, 8, 0), (3,)
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    data = [batches(n, rank, 4 + rank) for rank, n in enumerate(counts)]
    for k in [k for k in range(8) if k not in bad]:
        optimizer.zero_grad()
        model(torch.cat([mine[k] for mine in data if len(mine) > k])).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    sum(model(batches(1, rank)[0]).square().mean() / 3 for rank in range(3)).backward()
    optimizer.step()
    for ranks in in_modes(3, scaled, counts, bad, modes=AFTER_BACKWARD).values():
        same(ranks, flatten(model), 1e-5)


def with_norms(mode, counts, by, buffers):
    """Train a network with batch norm, and tell what its statistics are."""
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9))
    model, _, joinable, handle = prepared(mode, net, parallel={"buffers": buffers})
    with Join([joinable], divide_by=by):
        for x in batches(counts[rank]):
            model(x).square().mean().backward()
    handle.wait()
    return flatten(net), True, [b.clone() for b in net.buffers()], None


@pytest.mark.parametrize("counts", [(0, 5, 2), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_statistics_are_the_last_joiners_where_steps_are_inside_backward(counts, by):
    cases = {mode: (mode, counts, by, "broadcast") for mode in FEW}
    cases |= {how: ("zero2", counts, by, how) for how in ("average", "local")}
    last = max(range(3), key=counts.__getitem__)
    for ranks in run_each(3, with_norms, cases).values():
        same(ranks, ranks[last][0])
        mean, _, count = ranks[0][2]
        assert count.item() == max(counts) and not torch.equal(mean, torch.zeros(9))


def averages():
    """Statistics that are averaged are those of ranks that have data."""
    rank, net = dist.get_rank(), nn.Sequential(nn.BatchNorm1d(6, momentum=0.5), nn.Linear(6, 5))
    zero = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.0)
    seen = []
    with Join([data_parallel(net, zero, buffers="average")]):
        for x in batches((1, 3, 3)[rank]):
            net(x).square().mean().backward()
            seen.append(net[0].running_mean.clone())
    return seen


def test_averaged_statistics_are_those_of_ranks_with_data():
    seen, data = run(3, averages), [batches(n, rank) for rank, n in enumerate((1, 3, 3))]
    mean = [torch.zeros(6)] * 3
    for k in range(3):
        there = [r for r in range(3) if len(data[r]) > k]
        common = sum(mean[r] for r in there) / len(there)
        mean = [0.5 * common + 0.5 * data[r][k].mean(0) if r in there else common for r in range(3)]
        assert all(largest_gap(seen[r][k], mean[r]) < 1e-6 for r in there)


def policies_driven(mode, policy, counts):
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9))
    model, zero, joinable, handle = prepared(mode, net)
    join, done = Join([joinable, zero], policy=policy), []

    def train():
        with join:
            for x in batches(counts[rank]):
                model(x).square().mean().backward()
                done.append(1)

    error = caught_error(train)
    model(torch.ones(2, 6)).sum().backward()  # all are here
    handle.detach()
    return error, len(done), join.attendance, flatten(net)


def test_where_ranks_stop_nobody_has_stepped_more_than_others():
    found = in_modes(3, policies_driven, "stop", (2, 4, 3))
    for error, done, attendance, params in itertools.chain(*found.values()):
        assert error is None and attendance == Attendance((2, 2, 2), (0, 1, 1))
        assert done == 2 and largest_gap(params, found[FEW[0]][0][3]) < 1e-6


@pytest.mark.parametrize("mode", FEW)
def test_where_ranks_raise_nobody_has_stepped_more_than_others(mode):
    ranks = run(3, policies_driven, mode, "raise", (2, 4, 3))
    for error, done, _, params in ranks:
        assert error[0] == "RuntimeError" and "exhausted" in error[1]
        assert done == 2 and largest_gap(params, ranks[0][3]) == 0


def counted_driven(mode, by, norm, policy):
    """Count collectives in each iteration before, inside and after a block."""
    pg, net = record(), network(nn.BatchNorm1d(9)) if norm else network()
    model, zero, joinable, _ = prepared(mode, net, group=pg)

    def iterate(n):
        counts = []
        for x in batches(n):
            with pg.recording() as log:
                model(x).square().mean().backward()
            counts.append(len(log.collectives()))
        return counts

    iterate(4)
    before = iterate(1)
    with Join([joinable, zero], divide_by=by, policy=policy):
        inside = iterate(3)
    return before[0], inside, iterate(2)


BLOCKS = [
    ("world_size", False, "shadow"),
    ("samples", False, "shadow"),
    ("active", True, "shadow"),
    ("samples", True, "stop"),
]


def test_a_block_sends_at_most_a_count_of_its_own_where_steps_are_inside_backward():
    cases = {(mode, *block): (mode, *block) for mode in FEW for block in BLOCKS}
    for (_, *block), ranks in run_each(2, counted_driven, cases).items():
        counts = block != ["world_size", False, "shadow"]
        for before, inside, after in ranks:
            assert {before + counts} == set(inside) and {before} == set(after)


def nested_driven(mode):
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9))
    model, zero, joinable, handle = prepared(mode, net)

    def train(n):
        for x in batches(n):
            model(x).square().mean().backward()

    with Join([joinable, zero]):
        train(2)
        with Join([zero, joinable], divide_by="active") as inner:
            train(1 + rank)
        train(1 + 2 * rank)
    train(1)
    left = [
        joinable._join_config.enable,
        zero._join_config.enable,
        len(net._forward_hooks) + len(net._forward_pre_hooks),
    ]
    handle.detach()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    with Join([DDP(net), optimizer]) as join:  # nothing is left of what was before
        pass
    return flatten(net), inner.attendance.batches, left, join.attendance.batches


def test_nested_blocks_where_steps_are_inside_backward():
    for mode, ranks in in_modes(2, nested_driven).items():
        assert largest_gap(ranks[0][0], ranks[1][0]) == 0
        hooks = 0 if EVERY[mode].wraps else 2
        for _, inner, left, after in ranks:
            assert inner == (1, 2) and left == [False, False, hooks] and after == (0, 0)


def fails_driven(mode, where):
    rank = dist.get_rank()
    group, net = dist.new_group(timeout=timedelta(seconds=100)), network()
    model, zero, joinable, handle = prepared(mode, net, group=group)

    def bad(gradient):
        raise Own(f"in backward of rank {rank}")

    def train():
        with Join([joinable, zero], divide_by="samples"):
            for k, x in enumerate(batches((2, 6, 6)[rank])):
                broken = k == 3 and rank == 2
                if broken and where == "loop":
                    raise Own(f"in the data of rank {rank}")
                out = model(x)
                if broken and where == "backward":
                    out.register_hook(bad)
                out.square().mean().backward()

    begin = time.monotonic()
    error = caught_error(train)
    took = time.monotonic() - begin
    handle.leave()
    dist.barrier()
    return error, took


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("where", ["loop", "backward"])
def test_an_error_where_steps_are_inside_backward(mode, where):
    ranks = run(3, fails_driven, mode, where)
    assert ranks[2][0][0] == "Own" and f"of rank {2}" in ranks[2][0][1]
    for error, took in ranks[:2]:
        assert (
            error[0] == "RuntimeError"
            and "rank 2" in error[1]
            and "Own: in" in error[1]
            and took < 50
        ), error


REFUSED = {
    "optimizer alone": (lambda ours, zero, other: Join([zero]), "add the model"),
    "another model": (lambda ours, zero, other: Join([zero, other]), "add the model"),
    "before_step": (lambda ours, zero, _: Join([ours, zero], before_step=print), "max_grad_norm"),
    "two models": (lambda ours, zero, other: Join([ours, other]), "one model"),
    "SyncBatchNorm": (lambda ours, zero, other: Join([ours]), "SyncBatchNorm '1'"),
}


def refused_driven(mode):
    """Give what is said of each block that cannot be followed."""
    net, other, found = network(), DDP(network()), {}
    _, zero, joinable, _ = prepared(mode, net)
    for name, (make, _) in REFUSED.items():
        if name == "SyncBatchNorm":
            net.add_module("1", nn.SyncBatchNorm(9))
        found[name] = caught_error(lambda make=make: make(joinable, zero, other).__enter__())
    return found


def test_what_cannot_be_followed_where_steps_are_inside_backward():
    for found in itertools.chain(*in_modes(2, refused_driven).values()):
        for name, (_, words) in REFUSED.items():
            kind, message = found[name]
            assert kind == "ValueError" and words in message, name


def in_torchs(mode, counts, order="model first", norm=False, ddp=None, parallel=None):
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9)) if norm else network()
    model, zero, joinable, handle = prepared(mode, net, ddp=ddp, parallel=parallel)
    with warnings.catch_warnings(), TorchJoin(ORDERS[order](joinable, zero)):
        for x in batches(counts[rank], size=4 + rank):
            model(x).square().mean().backward()
            zero.step()
            if mode in KEEPS_MEANS:
                zero.zero_grad()
    handle.wait()
    return flatten(net), True, [b.clone() for b in net.buffers()], None


@pytest.mark.parametrize("order", ["model first", "model alone"])
def test_torchs_join_with_steps_inside_backward(order):
    counts = (0, 6, 2)
    wanted = reference(counts, "world_size")[0]
    for ranks in in_modes(3, in_torchs, counts, order, modes=EVERY).values():
        same(ranks, wanted)


def test_torchs_join_with_settings_of_the_model():
    counts, modes = (6, 1, 3), ("zero1-overlap", "zero1-interleaved")
    wanted = reference(counts, "world_size")[0]
    cases = {(mode, *ddp): (mode, ddp) for mode in modes for ddp in SETTINGS}
    found = run_each(3, lambda mode, ddp: in_torchs(mode, counts, ddp=ddp), cases)
    for ranks in found.values():
        same(ranks, wanted)


def test_torchs_join_sends_statistics():
    cases = {mode: (mode, "broadcast") for mode in FEW} | {"average": ("zero2", "average")}

    def with_statistics(mode, buffers):
        return in_torchs(mode, (0, 4, 2), norm=True, parallel={"buffers": buffers})

    for ranks in run_each(3, with_statistics, cases).values():
        same(ranks, ranks[1][0])
        assert ranks[0][2][2].item() == 4


def torchs_refused(mode, case):
    group, net = dist.new_group(), network()
    options = {"scaler": torch.amp.GradScaler("cpu")} if case == "scaler" else {}
    looks = {"find_unused_parameters": case == "unused"}
    model, zero, joinable, handle = prepared(mode, net, group=group, ddp=looks, **options)
    given = {"order": [zero, joinable], "zero": [zero], "unused": [joinable]}.get(
        case, [joinable, zero]
    )

    def train():
        with TorchJoin(
            given, **({"divide_by_initial_world_size": False} if case == "weights" else {})
        ):
            for x in batches(2):
                if case == "forwards":
                    model(x)
                model(x).square().mean().backward()

    error = caught_error(train)
    handle.leave()
    return error


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        *(
            (mode, case)
            for mode in ("zero1-overlap", "zero2")
            for case in ("order", "zero", "scaler", "weights")
        ),
        ("zero1-overlap", "unused"),
        ("zero2", "forwards"),
    ],
)
def test_what_torchs_join_cannot_follow_is_refused(mode, case):
    errors = run(2, torchs_refused, mode, case)
    assert all(error is not None for error in errors) and any(
        "use zero_nb's Join" in error[1] for error in errors
    ), errors


def late(mode, by):
    """Let the rank that others follow take its time, while one with data has come to the first collective and waits."""
    rank, net = dist.get_rank(), network()
    model, zero, joinable, _ = prepared(mode, net)
    with Join([joinable, zero], divide_by=by) as join:
        for k, x in enumerate(batches((0, 2, 3)[rank], rank, 4)):
            if rank == 1 and k == 0:
                time.sleep(2.5)
            model(x).square().mean().backward()
            zero.step()
    return join.attendance.batches, flatten(net)


@pytest.mark.parametrize("by", ["world_size", "active"])
def test_ranks_with_data_may_be_apart_in_time(by):
    for ranks in in_modes(3, late, by).values():
        for counts, params in ranks:
            assert counts == (0, 2, 3) and params.equal(ranks[0][1])
