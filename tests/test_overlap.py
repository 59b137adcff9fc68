"""The step inside DDP's backward: what is sent, clipped and saved, while users attach and detach it.

`test_modes.py` compares the numbers with those of DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from common import flatten
from common.ddp_training import CAP, apart, backward, batch, network, sharded, unsharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.optim.driver import clip_parts, norm_of
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- what travels, and when ----


def traffic(interleaved, **more):
    """Record an iteration of plain DDP and one of ours; give the bytes on the wire, ours by kind,
    and what was started beside what was planned."""
    theirs, group = record(), record()
    plain, ours = (
        DDP(network(), process_group=theirs, bucket_cap_mb=CAP),
        DDP(network(), process_group=group, bucket_cap_mb=CAP),
    )
    zero = sharded("adamw", ours, False, process_group=group)
    handle = overlap(ours, zero, interleaved=interleaved, **more)
    for step in range(4):
        with theirs.recording() as their_log:
            backward(plain, step)
        with group.recording() as log:
            backward(ours, step)
    outer = [e for e in log.events if e.parent is None]
    names = {"reduce_scatter": "RS", "all_gather": "AG"}
    sizes = [b.bucket.numel * 8 for b in handle.step_plan.shard.buckets]
    planned = [
        (op, sizes[int(i)]) for i, op in (word.split(":") for word in handle.schedule.collectives)
    ]
    wire = {kind: sum(e.wire for e in outer if e.kind == kind) for kind in names}
    mine = 8 * sum(b.sizes[b.group.group_rank] for b in handle.step_plan.shard.buckets)
    whole = sum(sizes)
    assert wire == {
        "reduce_scatter": whole - mine,
        "all_gather": (group.size() - 1) * mine,
    }  # of each rank by what it owns
    return (
        sum(e.wire for e in their_log.events),
        wire,
        [(names[e.kind], e.bytes) for e in outer] == planned,
        len(planned),
        flatten(ours).numel() * 8,
    )


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_traffic_is_ddps_and_collectives_start_as_planned(size):
    for ranks in zip(
        *run(size, lambda: [traffic(interleaved) for interleaved in (False, True)]), strict=True
    ):
        for theirs, _, in_order, count, nbytes in ranks:
            assert theirs * size == 2 * (size - 1) * nbytes and in_order and count == 10
        for kind in ("reduce_scatter", "all_gather"):
            assert (
                sum(ours[kind] for _, ours, *_ in ranks) == (size - 1) * nbytes
            )  # a rank that owns more sends more


def test_a_lag_is_kept():
    for rank in run(2, lambda: [traffic(True, lag=lag)[2] for lag in (0, 3, 9)]):
        assert rank == [True] * 3


# ---- norms and scaled gradients ----


def norm_where_one_rank_has_nothing(dtypes):
    whole = [torch.arange(1, 7, dtype=dtype) for dtype in dtypes]
    mine = [part if dist.get_rank() == 0 else part[:0] for part in whole]
    norms = [norm_of(Group(), mine, kind) for kind in (2.0, float("inf"))]
    clip_parts(Group(), mine, 1.0)
    kinds = [norm.dtype for norm in norms]
    return [norm.item() for norm in norms], [part.tolist() for part in mine], kinds


@pytest.mark.parametrize(
    "dtypes", [[torch.bfloat16], [torch.float64], [torch.bfloat16, torch.float64]]
)
def test_the_norm_is_that_of_all_ranks_also_of_those_that_own_nothing(dtypes):
    params = [nn.Parameter(torch.zeros(6, dtype=dtype)) for dtype in dtypes]
    for p in params:
        p.grad = torch.arange(1, 7, dtype=p.dtype)
    right = [
        nn.utils.get_total_norm([p.grad.double() for p in params], kind).item()
        for kind in (2.0, float("inf"))
    ]
    nn.utils.clip_grad_norm_(params, 1.0)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    for rank, (norms, parts, kinds) in enumerate(run(2, norm_where_one_rank_has_nothing, dtypes)):
        assert norms == pytest.approx(right, rel=1e-6) and kinds == [wide, wide]
        wanted = [p.grad.tolist() if rank == 0 else [] for p in params]
        assert parts == [pytest.approx(values, rel=1e-2) for values in wanted]


# ---- checkpoints ----


def state_of(optimizer):
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=None)
    return optimizer.state_dict()


def close(one, other):
    """Tell if two state dicts hold the same values."""
    if set(one["state"]) != set(other["state"]):
        return False
    pairs = [(v, other["state"][i][k]) for i, s in one["state"].items() for k, v in s.items()]
    return all(
        torch.allclose(torch.as_tensor(a).double(), torch.as_tensor(b).double(), atol=1e-9)
        for a, b in pairs
    )


def fresh(is_sharded, interleaved, state=None):
    """Make a model and its optimizer, and load what was saved of such a pair."""
    model = DDP(network(), bucket_cap_mb=CAP)
    if state:
        model.module.load_state_dict(state[0])
    optimizer = (sharded if is_sharded else unsharded)("adamw", model, True)
    if is_sharded:
        overlap(model, optimizer, interleaved=interleaved)
    if state:
        optimizer.load_state_dict(copy.deepcopy(state[1]))  # torch steps what it was given
    return model, optimizer


def go_on(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def resumed(interleaved, at, mixed):
    """Train, save after `at` steps, load into a fresh pair (of the other kind if `mixed`), and go
    on; beside training straight through."""
    straight, first = fresh(False, interleaved), fresh(True, interleaved)
    go_on(*straight, range(at))
    go_on(*first, range(at))
    saved = [
        (copy.deepcopy(model.module.state_dict()), copy.deepcopy(state_of(o)))
        for model, o in (straight, first)
    ]
    same = close(saved[0][1], saved[1][1])
    # ours goes on as ours or as torch's, and torch's as ours
    second = fresh(not mixed, interleaved, saved[1]), fresh(True, interleaved, saved[0])
    for pair in (straight, first, *second):
        go_on(*pair, range(at, at + 4))
    same &= all(close(state_of(straight[1]), state_of(o)) for _, o in (first, *second))
    first[1].load_state_dict(saved[1][1])  # and in the middle of training
    first[0].module.load_state_dict(saved[1][0])
    go_on(*first, range(at, at + 4))
    same &= close(state_of(straight[1]), state_of(first[1]))
    return (
        same
        and max(
            (flatten(straight[0]) - flatten(model)).abs().max().item()
            for model, _ in (first, *second)
        )
        < 1e-9
    )


def test_checkpoints_go_to_and_from_unsharded_training_at_any_step():
    """After no step, before and after DDP has filled its buckets anew, and after many."""
    cases = [(False, 1, True), (True, 2, False), (True, 4, True), (False, 5, False)]
    for rank in run(3, lambda: [resumed(*case) for case in cases]):
        assert rank == [True] * len(cases)


# ---- models that change ----


def attach_again(interleaved):
    """Detach, attach again, wrap the model anew, and attach to that."""
    plain, model = DDP(network(), bucket_cap_mb=CAP), network()
    ours = DDP(model, bucket_cap_mb=CAP)
    optimizer, zero = unsharded("adamw", plain, False), sharded("adamw", ours, False)
    worst, handle = 0.0, overlap(ours, zero, interleaved=interleaved)
    for step in range(16):
        if step in (4, 12):
            handle.detach()
        if step == 6:
            handle = overlap(ours, zero, interleaved=not interleaved)
        if step == 9:
            handle.detach()
            del ours
            ours = DDP(model, bucket_cap_mb=2 * CAP)
            with overlap(ours, zero, interleaved=interleaved) as handle:
                backward(ours, step)
            handle = overlap(ours, zero, interleaved=interleaved)
        elif step:
            backward(ours, step)
        backward(plain, step) if step else None
        for o in (optimizer, zero):
            if step != 9 or o is optimizer:
                o.step()
            o.zero_grad()
        with torch.no_grad():
            ours.eval()(batch(step)), ours.train()  # an evaluation in between
        worst = max(worst, (flatten(plain) - flatten(ours)).abs().max().item(), apart(ours))
    return worst < 1e-9


def test_overlap_may_be_detached_and_attached_again_to_the_same_or_a_new_ddp():
    for rank in run(3, lambda: [attach_again(interleaved) for interleaved in (False, True)]):
        assert rank == [True, True]
