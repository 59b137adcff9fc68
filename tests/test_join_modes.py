"""Join with steps inside backward, in every mode: what is trained is what one process would train."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap, run_each
from common.joining import Branches, alone_with_branches, batches, network, reference
from common.joining_modes import (
    EVERY,
    FEW,
    KEEPS_MEANS,
    ORDERS,
    SETTINGS,
    in_modes,
    prepared,
    same,
)
from common.modes import MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adafactor, AdamW, lr_scheduler

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# buckets wait for the last one, so that gradients can be clipped and steps skipped
AFTER_BACKWARD = [mode for mode in MODES if mode in EVERY and not EVERY[mode].interleaved]


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


@pytest.mark.turns(2)
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


@pytest.mark.parametrize("counts", [(2, 6, 1), (7, 1, 4)], ids=str)
def test_settings_of_a_model_whose_steps_are_inside_backward(counts):
    wanted, modes = reference(counts, "samples")[0], ("zero1-overlap", "zero1-overlap, interleaved")
    cases = {(mode, *ddp): (mode, ddp) for mode in modes for ddp in SETTINGS}
    found = run_each(3, lambda mode, ddp: driven(mode, counts, "samples", ddp=ddp), cases)
    for ranks in found.values():
        same(ranks, wanted)


def on_two(mode):
    group = dist.new_group([1, 3])
    return driven(mode, (1, 4), "samples", group=group) if dist.get_rank() % 2 else None


def test_subgroups_whose_steps_are_inside_backward():
    wanted, state = reference((1, 4), "samples")
    for ranks in in_modes(4, on_two).values():
        same([rank for rank in ranks if rank is not None], wanted, state=state)


def on_two_levels(mode, counts, order):
    """Train in two blocks with an optimizer whose state each node shares."""
    rank, net, levels = dist.get_rank(), network(), two_level(2)
    made = MODES[mode].attach(
        net, lambda _: ZeroRedundancyOptimizer(net.parameters(), AdamW, levels, lr=1e-2)
    )
    for _ in range(2):
        with Join(ORDERS[order](made.joinable, made.optimizer), divide_by="samples") as join:
            for x in batches(counts[rank], rank, 4 + rank):
                made.call(x).square().mean().backward()
                made.optimizer.step()
                made.optimizer.zero_grad()
    made.optimizer.consolidate_state_dict(to=None)
    state = made.optimizer.state_dict()["state"]
    buffers = [b.clone() for b in net.buffers()]
    return flatten(net), join.attendance.batches == counts, buffers, state


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("counts", [(2, 5, 1, 3), (0, 0, 4, 1)], ids=str)
def test_ranks_join_where_each_node_shares_the_state(counts, order):
    wanted, state = reference(counts, "samples", rounds=2)
    modes = [mode for mode in MODES if MODES[mode].wraps]
    for ranks in in_modes(4, on_two_levels, counts, order, modes=modes).values():
        same(ranks, wanted, state=state)


def apart():
    """Join a model of two ranks with an optimizer whose nodes are of four."""
    pair, levels, net = dist.new_group([0, 1]), two_level(4), network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, levels, lr=1e-2)
    if dist.get_rank() > 1:
        return None
    return caught_error(lambda: Join([DDP(net, process_group=pair), zero]))


def test_a_node_is_part_of_the_group_of_the_model():
    for kind, said in run(4, apart)[:2]:
        assert kind == "ValueError" and said.endswith("with the process_group of its model")


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
            zero.zero_grad()  # else it would step again with the gradients of the last batch
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
