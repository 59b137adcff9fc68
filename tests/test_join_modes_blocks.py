"""Join with steps inside backward: how a block ends, what it sends and refuses; and torch's Join around the modes."""

import itertools
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap, run_each
from common.joining import Own, batches, network, reference
from common.joining_modes import EVERY, FEW, KEEPS_MEANS, ORDERS, SETTINGS, in_modes, prepared, same
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.join.attendance import Attendance
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


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
    counts, modes = (6, 1, 3), ("zero1-overlap", "zero1-overlap, interleaved")
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


def rated(mode):
    """Rank 1 has no data in the last two of three blocks, each of which has a rate of its own."""
    net = network()
    model, zero, joinable, _ = prepared(mode, net, ddp={"find_unused_parameters": True})
    for i in range(3):
        with TorchJoin([joinable, zero]):
            for x in batches((2, i == 0)[dist.get_rank()], dist.get_rank(), 4):
                model(x).square().mean().backward()
                zero.step()
                zero.zero_grad()
        zero.param_groups[0]["lr"] /= 2
    return flatten(net)


def test_a_scheduler_may_change_rates_between_blocks_of_torchs_join():
    for one, other in in_modes(2, rated, modes=["zero1-overlap"]).values():
        assert one.equal(other)


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
