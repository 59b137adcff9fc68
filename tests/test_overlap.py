"""The step inside DDP's backward: what is planned, sent and refused.

`test_modes.py` compares the numbers with those of DDP."""

import copy
import time
import warnings
from datetime import timedelta
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten
from common.afresh import measures_memory
from common.devices import GPU, cuda
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed
from torch.optim import SGD, AdamW

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.apps.turns import trace_rank
from zero_nb.apps.workloads import models
from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_buckets import split_like_ddp
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.backward.torch_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.driver import clip_parts, norm_of
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

CAP = 0.01  # MB, so that there are several buckets


class Net(nn.Module):
    """Layers of which some may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x, uses=(0, 1, 2, 3)):
        x = self.first(x).tanh()
        for i in uses:
            x = x + self.middle[i](x).tanh()
        return self.last(x)


def network(dtype=torch.float64):
    return Net().to(dtype)


def batch(step, part=0, dtype=torch.float64):
    return torch.randn(
        4,
        6,
        generator=torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank()),
        dtype=dtype,
    )


def apart(model, group=None):
    """Give how far this rank's parameters are from those of the first rank, bit for bit: 0 or 1."""
    mine = flatten(model)
    first = mine.clone()
    dist.broadcast(first, dist.get_global_rank(group or dist.group.WORLD, 0), group)
    return float(not torch.equal(mine, first))


ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True}


def grouped(model, groups):
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.05}] if groups else params


def unsharded(name, model, groups):
    params = grouped(model, groups)
    return AdamW(params, **ADAMW) if name == "adamw" else SGD(params, **MOMENTUM)


def sharded(name, model, groups, process_group=None, **options):
    kind, defaults = (AdamW, ADAMW) if name == "adamw" else (SGD, MOMENTUM)
    params = grouped(model, groups)
    return ZeroRedundancyOptimizer(params, kind, process_group, **options, **defaults)


def backward(model, step, layers=(0, 1, 2, 3)):
    """Run one iteration's forward and backward."""
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype=dtype), layers).square().mean().backward()


def side_by_side(plain, ours, steps, prepare=lambda model, step: None, group=None):
    """Train two models, each with its optimizer; give the largest difference between them, or
    between replicas of the second."""
    worst = 0.0
    for step in range(steps):
        for model, optimizer in (plain, ours):
            prepare(model, step)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        worst = max(
            worst, (flatten(plain[0]) - flatten(ours[0])).abs().max().item(), apart(ours[0], group)
        )
    return worst


# ---- optimizers of others ----


class Counting(torch.optim.Optimizer):
    """Counts its steps where `where` says, and steps less from one to the next."""

    def __init__(self, params, lr=0.1, where="group"):
        super().__init__(params, {"lr": lr, "count": 0})
        self.where = where
        if where == "attribute":
            self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self.where == "group":
                group["count"] = count = group["count"] + 1
            elif self.where == "state":
                self.state["all"]["count"] = count = self.state["all"].get("count", 0) + 1
            else:
                self.count = count = self.count + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                p -= group["lr"] / count * p.grad.sign()


def counted(where, interleaved):
    plain, ours = (DDP(network(), bucket_cap_mb=CAP) for _ in range(2))
    kind = type(
        "Counting",
        (Counting,),
        {
            "__init__": lambda self, params, **options: Counting.__init__(
                self, params, where=where, **options
            )
        },
    )
    optimizer, zero = kind(plain.parameters()), ZeroRedundancyOptimizer(ours.parameters(), kind)
    handle, worst = overlap(ours, zero, interleaved=interleaved), 0.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(6):
            backward(plain, step)
            optimizer.step()
            optimizer.zero_grad()
            backward(ours, step)
            zero.step()
            worst = max(worst, (flatten(plain) - flatten(ours)).abs().max().item())
    assert (
        handle.planner.fits
        and not handle.engine.steps_per_bucket
        and zero.param_groups[0]["count"] == optimizer.param_groups[0]["count"]
    )
    return worst + apart(ours), [
        str(w.message) for w in warned if "stepped together" in str(w.message)
    ]


def test_a_class_that_counts_outside_the_state_of_parameters_is_stepped_as_a_whole():
    cases = [
        (where, interleaved)
        for where in ("group", "state", "attribute")
        for interleaved in (False, True)
    ]
    for rank in run(2, lambda: [counted(*case) for case in cases]):
        for (_, interleaved), (worst, warned) in zip(cases, rank, strict=True):
            assert worst < 1e-9 and len(warned) == interleaved


# ---- as torch's users write it ----


def by_hook(make, inner, state=None, name="adamw", tolerance=1e-9, steps=5, schedule=True):
    """Train with a hook that the user registers, beside DDP with the inner hook alone."""
    plain, ours = (DDP(network(), bucket_cap_mb=CAP) for _ in range(2))
    plain.register_comm_hook(state and state(), inner)
    optimizer, zero = (
        unsharded(name, plain, False),
        sharded(name, ours, False, overlap_with_ddp=True),
    )
    hook = make(inner, ours, zero)
    ours.register_comm_hook(state and state(), hook)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, zero)]
    for step in range(steps + 2):
        if step == steps:
            hook.overlap.detach()
        for model, o, scheduler in zip((plain, ours), (optimizer, zero), schedulers, strict=True):
            backward(model, step)
            if o is optimizer or step >= steps:
                o.step()
            o.zero_grad()
            scheduler.step()
        if (worst := (flatten(plain) - flatten(ours)).abs().max().item()) > tolerance or apart(
            ours
        ):
            return step, worst
    assert (
        zero.param_groups[0]["lr"]
        == optimizer.param_groups[0]["lr"]
        == zero.param_groups[0]["initial_lr"] / 8
    )
    return not zero.driver.steps_in_backward


def power():
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1
    )


@pytest.mark.parametrize("way", ["overlap", "hook"])
def test_the_user_is_told_what_gradients_as_views_would_save(way):
    def told(width, view):
        ddp = DDP(nn.Linear(width, 1024, bias=False), gradient_as_bucket_view=view)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=0.1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if way == "overlap":
                overlap(ddp, zero)
            else:
                hook_with_zero_step(default_hooks.allreduce_hook, ddp, zero)
        return [(str(w.message).split(" would ")[1], w.filename) for w in found]

    every = run(2, lambda: [told(6144, False), told(6144, True), told(1024, False)])
    # on one rank, at the user's line
    assert every == [[[("save 24 MiB on each rank", __file__)], [], []], [[], [], []]]


def test_hooks_of_torchs_names_keep_or_replace_the_users_hook_and_leave_it_when_detached():
    """Without a call of step() while it is overlapped, and with a scheduler, which says nothing."""

    def every():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.*")
            found = {}
            for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
                found[make.__name__, "mean"] = by_hook(make, default_hooks.allreduce_hook)
                found[make.__name__, "sgd"] = by_hook(
                    partial(make, shard_buckets=True), default_hooks.allreduce_hook, name="sgd"
                )
                found[make.__name__, "fp16"] = by_hook(
                    make, default_hooks.fp16_compress_hook, name="sgd", tolerance=1e-3
                )
                found[make.__name__, "kept"] = by_hook(make, twice, state=lambda: {"factor": 2.0})
            return found

    for found in run(3, every):
        assert set(found.values()) == {True}, found


def twice(state, bucket):
    """Do what a hook of the user's with a state may do."""
    bucket.buffer().mul_(state["factor"])
    return default_hooks.allreduce_hook(None, bucket)


def compressed(interleaved):
    """PowerSGD keeps errors and queries for each bucket, in a state of the user's; one bucket,
    since with several it waits for ever on gloo under plain DDP."""
    plain, ours = (DDP(network(torch.float32)) for _ in range(2))
    plain.register_comm_hook(power(), powerSGD_hook.powerSGD_hook)
    optimizer, zero = unsharded("sgd", plain, False), sharded("sgd", ours, False)
    overlap(ours, zero, hook=powerSGD_hook.powerSGD_hook, state=power(), interleaved=interleaved)
    return side_by_side((plain, optimizer), (ours, zero), 6) < 1e-4


def test_powersgd_is_kept():
    assert run(2, lambda: [compressed(False), compressed(True)]) == [[True, True]] * 2


def test_half_precision_travels_where_the_users_hook_asks_for_it():
    """bf16_compress_hook, which torch refuses on gloo by its name."""

    def sent():
        group = record()
        model = DDP(network(torch.float32), process_group=group, bucket_cap_mb=CAP)
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, group, lr=0.1)
        overlap(model, zero, hook=default_hooks.bf16_compress_hook)
        for step in range(3):
            backward(model, step)
        return sorted(
            {
                (e.kind, e.dtype)
                for e in group.log.events
                if e.kind in ("reduce_scatter", "all_gather") and e.parent is None
            }
        ), apart(model)

    for kinds, differs in run(2, sent):
        assert (
            ("reduce_scatter", "bfloat16") in kinds
            and ("reduce_scatter", "float32") not in kinds
            and not differs
        )


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
    mine, whole = (
        8 * sum(sizes)
        for sizes in zip(
            *(
                (b.sizes[b.group.group_rank], b.bucket.numel)
                for b in handle.step_plan.shard.buckets
            ),
            strict=True,
        )
    )
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
    return (
        [norm.item() for norm in norms],
        [part.tolist() for part in mine],
        [norm.dtype for norm in norms],
    )


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
        assert parts == (
            [pytest.approx(p.grad.tolist(), rel=1e-2) for p in params]
            if rank == 0
            else [[] for _ in params]
        )


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


def resumed(interleaved, at, mixed):
    """Train, save after `at` steps, load into a fresh pair (of the other kind if `mixed`), and go
    on; beside training straight through."""

    def fresh(is_sharded, state=None):
        model = DDP(network(), bucket_cap_mb=CAP)
        if state:
            model.module.load_state_dict(state[0])
        optimizer = sharded("adamw", model, True) if is_sharded else unsharded("adamw", model, True)
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

    straight, first = fresh(False), fresh(True)
    go_on(*straight, range(at))
    go_on(*first, range(at))
    saved = [
        (copy.deepcopy(model.module.state_dict()), copy.deepcopy(state_of(o)))
        for model, o in (straight, first)
    ]
    same = close(saved[0][1], saved[1][1])
    second = (
        fresh(not mixed, saved[1]),
        fresh(True, saved[0]),
    )  # ours goes on as ours or as torch's, and torch's as ours
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


def wrapped_too_early():
    """Thaw a layer that was frozen when DDP was made."""
    model = network()
    model.last.requires_grad_(False)
    ours = DDP(model, bucket_cap_mb=CAP)
    zero = sharded("adamw", ours, False)
    overlap(ours, zero)
    for step in range(3):
        backward(ours, step)
    model.last.requires_grad_(True)
    error = caught_error(lambda: backward(ours, 3))
    return error, sum(len(optim.state) for optim in zero.local.by_class.values())


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_that_ddp_does_not_reduce_is_named_and_the_state_stays(size):
    for (kind, message), states in run(size, wrapped_too_early):
        assert (
            kind in ("ValueError", "RuntimeError")
            and "frozen when DDP was made" in message
            and states
        )


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


# ---- what goes wrong ----


class Refusing(torch.autograd.Function):
    """Raises in backward on the last rank, at a step."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("no gradient here")
        return gradient, None


class Faulty(Net):
    """A model that fails where it is told to."""

    def forward(self, x, where=""):
        if where == "forward":
            raise ArithmeticError("no forward here")
        x = self.first(x).tanh()
        for i, layer in enumerate(self.middle):
            x = Refusing.apply(x + layer(x).tanh(), where == f"backward {i}")
        return self.last(x)


def failing_at(where, step, interleaved, nodes=False):
    """Let one rank fail; every rank's error, and how long it took to come."""
    torch.manual_seed(0)
    model = DDP(Faulty().double(), bucket_cap_mb=CAP)
    zero = sharded("sgd", model, False, process_group=two_level(2) if nodes else None)
    mine, now = dist.get_rank() == dist.get_world_size() - 1, 0

    def hook(state, bucket):
        if where == "hook" and mine and now == step:
            raise ArithmeticError("no hook here")
        return default_hooks.allreduce_hook(None, bucket)

    if where == "step":
        for optim in zero.local.by_class.values():
            optim.register_step_pre_hook(lambda *_: 1 / 0 if mine and now == step else None)
    overlap(model, zero, hook=hook if where == "hook" else None, interleaved=interleaved)
    begin = time.monotonic()
    try:
        for now in range(step + 3):
            model(batch(now), where if mine and now == step else "").square().mean().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin


FAULTS = [
    ("forward", "no forward here"),
    ("backward 3", "no gradient here"),
    ("backward 0", "no gradient here"),
    ("hook", "no hook here"),
    ("step", "division by zero"),
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("where,word", FAULTS, ids=[where for where, _ in FAULTS])
def test_a_rank_that_fails_ends_all_of_them_with_an_error_that_names_it(where, word):
    """In the first iteration, in which state moves, and in a later one, while buckets arrive."""
    for size, *how in (
        (2, 0, False),
        (3, 1, True),
        (3, 4, True),
        (2, 4, False),
        (4, 0, True, True),
        (4, 4, False, True),
    ):
        found = run(size, failing_at, where, *how, timeout=60, group_timeout=30)
        assert word in found[-1][1], found
        for kind, message, seconds in found[:-1]:
            assert (
                kind in ("RuntimeError", "ZeroDivisionError")
                and f"rank {size - 1}" in message
                and seconds < 20
            ), found


def refusals():
    """Every argument that cannot work, with the answer to it."""
    model = DDP(network(), bucket_cap_mb=CAP)
    params, extra = list(model.parameters()), nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def zero(given=params, **more):
        return ZeroRedundancyOptimizer(given, SGD, lr=0.1, **more)

    taken, halves = zero(), (dist.new_group([0]), dist.new_group([1]))
    idle = dict.fromkeys(("step", "wait", "detach"), lambda *_: None)
    taken.attach(SimpleNamespace(steps_in_backward=True, **idle))
    hooked = DDP(network())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    ours, inner, mine = zero(), default_hooks.allreduce_hook, halves[dist.get_rank()]
    calls = [
        lambda: overlap(model.module, ours),
        lambda: overlap(model, SGD(params, lr=0.1)),
        lambda: overlap(model, ours, hook="mean"),
        lambda: overlap(model, ours, interleaved=True, max_grad_norm=1.0),
        lambda: overlap(model, ours, interleaved=True, scaler=torch.amp.GradScaler("cpu")),
        lambda: overlap(model, ours, lag=-1),
        lambda: overlap(model, ours, max_grad_norm=0),
        lambda: overlap(model, taken),
        lambda: overlap(model, zero(params[1:])),
        lambda: overlap(model, zero([*params, extra])),
        lambda: overlap(model, zero(process_group=mine)),
        lambda: overlap(hooked, zero(hooked.parameters())),
        lambda: overlap(model, ours, interleaved=dist.get_rank() == 0),
        lambda: overlap(model, ours, max_grad_norm=1.0 + dist.get_rank()),
        lambda: overlap(model, ours, hook=[twice, powerSGD_hook.powerSGD_hook][dist.get_rank()]),
        lambda: hook_with_zero_step(inner, model.module, ours),
        lambda: hook_with_zero_step_interleaved("mean", model, ours),
    ]
    found = [caught_error(call) for call in calls]
    assert (
        not ours.driver.steps_in_backward and caught_error(lambda: overlap(model, ours)) is None
    )  # nothing was left behind
    return found


REFUSED = [
    ("TypeError", "DistributedDataParallel, got Net"),
    ("TypeError", "zero_nb's"),
    ("TypeError", "'mean'"),
    ("ValueError", "interleaved=False"),
    ("ValueError", "interleaved=False"),
    ("ValueError", "-1"),
    ("ValueError", "above 0, got 0"),
    ("RuntimeError", "overlapped already"),
    ("ValueError", "first.weight of the model is not in the optimizer"),
    ("ValueError", "(3,) of the optimizer is not in the model"),
    ("ValueError", "make both with the same ranks"),
    ("RuntimeError", "a comm hook already, allreduce_hook"),
    ("ValueError", "disagree"),
    ("ValueError", "max_grad_norm=2.0"),
    ("ValueError", "by powerSGD_hook"),
    ("TypeError", "DistributedDataParallel, got Net"),
    ("TypeError", "'mean'"),
]


def test_what_cannot_work_is_refused_on_every_rank_and_leaves_nothing_behind():
    for rank in run(2, refusals):
        for (kind, word), found in zip(REFUSED, rank, strict=True):
            assert found and found[0] == kind and word in found[1], (word, found)


def misuse():
    """Call step() where it cannot mean what it says."""
    model = DDP(network(), bucket_cap_mb=CAP)
    zero = sharded("adamw", model, False)
    hook = hook_with_zero_step(default_hooks.allreduce_hook, model, zero)
    backward(model, 0)
    found = [caught_error(zero.step)]  # the hook was not registered
    zero.zero_grad()
    model.register_comm_hook(None, hook)
    for step in range(2):
        backward(model, step)
    found.append(caught_error(zero.step))  # two steps
    with model.no_sync():
        backward(model, 2)
    found += [
        caught_error(zero.step),
        caught_error(lambda: zero.step(grad_scaler=None)),
        caught_error(lambda: zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})),
    ]
    backward(model, 3)
    return [*found, caught_error(zero.step), apart(model)]


def test_a_step_that_does_not_mean_what_it_says_is_an_error():
    words = [
        ("RuntimeError", "register the hook"),
        ("RuntimeError", "2 calls of backward"),
        ("RuntimeError", "no_sync"),
        ("TypeError", "grad_scaler"),
        ("RuntimeError", "while the step is overlapped"),
    ]
    for rank in run(2, misuse):
        assert rank[5:] == [None, 0.0]
        for (kind, word), found in zip(words, rank[:5], strict=True):
            assert found and found[0] == kind and word in found[1], (word, found)


def planned(features):
    """Give the parameters in each bucket of the plan, iteration after iteration, and of what DDP
    filled in the last one."""
    model = DDP(network(), bucket_cap_mb=CAP, **features)
    handle, found = overlap(model, sharded("adamw", model, False)), []
    for step in range(4):
        backward(model, step)
        found.append(
            [
                sorted({slot.param for slot in bucket.bucket.slots})
                for bucket in handle.step_plan.shard.buckets
            ]
        )
    return found, [sorted(run) for run in handle.planner.layout.filled], model.bucket_bytes_cap


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_the_first_plan_is_cut_as_ddp_will_cut_and_the_last_has_its_buckets(features):
    for found, filled, cap in run(2, planned, features):
        params = list(Net().double().parameters())
        sizes = [[sum(params[i].nbytes for i in bucket) for bucket in plan] for plan in found]
        assert found[-1] == filled and len(filled) > 2
        assert len(found[0]) > 2 and max(sizes[0]) < cap + max(p.nbytes for p in params)


@pytest.mark.parametrize(
    "given,most,wanted",
    [
        ([0, 1, 2], 41, [[0, 1, 2]]),
        ([1, 4], 16, [[1, 4]]),
        ([3], 1, [[3]]),  # as DDP fills them
        ([0, 1, 2], 40, [[1, 2], [0]]),
        ([4, 1], 16, [[4, 1]]),
        ([0, 1, 2, 3, 4, 5, 6], 60, [[4, 5, 6], [0, 1, 2, 3]]),
        ([4, 4, 4], 80, [[4], [4], [4]]),
    ],
    ids=str,
)
def test_a_run_that_goes_on_where_ddp_would_have_closed_its_bucket_is_cut_from_its_end(
    given, most, wanted
):
    params = [torch.zeros(n) for n in (7, 3, 9, 1, 20, 4, 4)]
    assert list(split_like_ddp([given], params, most)) == wanted and list(
        split_like_ddp([given, given], params, most)
    ) == [*wanted, *wanted]


@measures_memory
@pytest.mark.usefixtures("small_pool")
def test_memory_does_not_rise_while_buckets_settle():
    def peak():
        def train():
            torch.manual_seed(0)
            model = DDP(
                nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(20))),
                bucket_cap_mb=10,
                gradient_as_bucket_view=True,
            )
            overlap(
                model,
                ZeroRedundancyOptimizer(
                    model.parameters(), AdamW, lr=0.1, parameters_as_bucket_view=True
                ),
            )
            for _ in range(4):
                model(torch.ones(1, 1200)).sum().backward()

        return peak_bytes(torch.device("cpu"), train) / (20 * 1201 * 1200 * 4)

    assert max(run(2, peak)) < 3.5  # parameters, gradients, and half of two moments


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_iterations_end_and_replicas_agree(size):
    def many():
        group = dist.new_group(timeout=timedelta(seconds=30))
        models = [
            DDP(
                network(torch.float32),
                process_group=group,
                bucket_cap_mb=CAP,
                find_unused_parameters=unused,
            )
            for unused in (False, True)
        ]
        for interleaved, model in enumerate(models):
            overlap(
                model,
                sharded("adamw", model, False, process_group=group),
                interleaved=bool(interleaved),
            )
        for step in range(MANY):
            backward(models[0], step)
            backward(models[1], step, ((0, 1, 3), (2,), (3, 2))[(step + dist.get_rank()) % 3])
        return [apart(model) for model in models]

    assert run(size, many, timeout=600) == [[0.0, 0.0]] * size


MANY = 100  # of each of two models


class Settled:
    """A reducer whose buckets stay as they are: to exchange them, DDP reads on the host."""

    def __init__(self, reducer):
        self.reducer = reducer

    def __getattr__(self, name):
        return getattr(self.reducer, name)

    def _rebuild_buckets(self):
        return False


@pytest.fixture
def unreadable(monkeypatch):
    """Let DDP and ours work on "meta", where it is an error to read on the host, which waits on a
    GPU, and to mix tensors of two devices."""

    def address(tensor):
        return (
            tensor.untyped_storage()._cdata << 20
        ) + tensor.storage_offset() * tensor.element_size()

    def done(value):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    real = torch.Tensor.data_ptr
    monkeypatch.setattr(
        torch.Tensor, "data_ptr", lambda tensor: address(tensor) if tensor.is_meta else real(tensor)
    )  # they all are at 0
    monkeypatch.setattr(distributed, "_verify_param_shape_across_processes", lambda *args: None)
    monkeypatch.setattr(
        import_module("zero_nb.backward.ddp_overlap"), "completed_future", done
    )  # torch's futures take numbered devices
    return monkeypatch


@pytest.mark.parametrize(
    "way,clip",
    [
        ("step", None),
        ("overlap", None),
        ("overlap", 1.0),
        ("interleaved", None),
        ("parallel", None),
        ("parallel", 1.0),
        ("parallel interleaved", None),
    ],
)
@pytest.mark.parametrize("shard", ["even", "whole"])
@pytest.mark.parametrize("size,rank", [(1, 0), (2, 1), (3, 0)])
def test_an_iteration_reads_nothing_from_its_device(size, rank, shard, way, clip, unreadable):
    clipping, interleaved, read = (
        {} if clip is None else {"max_grad_norm": clip},
        "interleaved" in way,
        torch.Tensor.tolist,
    )

    def read_once(tensor):
        return [1.0] * tensor.numel() if tensor.is_meta else read(tensor)

    with simulate(size, rank) as group:
        model = network(torch.float32).to("meta")
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=0.1, shard=shard)
        trained = (
            data_parallel(model, zero, interleaved=interleaved, **clipping).module
            if way.startswith("parallel")
            else DDP(model, process_group=group)
        )
        if trained is not model:
            trained.reducer = Settled(trained.reducer)
        if way in ("overlap", "interleaved"):
            overlap(trained, zero, interleaved=interleaved, **clipping)
        for step in range(4):
            with unreadable.context() as once:
                if step == 0:
                    once.setattr(
                        torch.Tensor, "tolist", read_once
                    )  # which parameters are used on any rank
                with group.recording() as log:
                    trained(torch.empty(4, 6, device="meta")).square().mean().backward()
                zero.step()
                zero.zero_grad()
        assert size == 1 or way == "step" or log.only("reduce_scatter")
        for refused in (
            lambda: torch.empty(1, device="meta").item(),
            lambda: torch.empty(2, device="meta") + torch.ones(2),
        ):
            with pytest.raises(RuntimeError, match="meta"):
                refused()


@cuda
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("through", ["DDP", "no DDP"])
def test_an_iteration_does_not_wait_for_the_gpu(through, interleaved):
    def watched():
        model = network(torch.float32).cuda()
        zero, x = (
            ZeroRedundancyOptimizer(
                model.parameters(), AdamW, lr=0.1, fused=True, parameters_as_bucket_view=True
            ),
            torch.ones(4, 6, device="cuda"),
        )
        if through == "DDP":
            overlap(model := DDP(model, bucket_cap_mb=CAP), zero, interleaved=interleaved)
        else:
            data_parallel(model, zero, interleaved=interleaved)
        for step in range(6):
            loss = model(x).square().mean()
            if step > 3:
                torch.cuda.set_sync_debug_mode("error")  # the first iterations plan, and agree
            try:
                loss.backward()
                zero.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return all(bool(p.isfinite().all()) for p in model.parameters())

    assert run(1, watched, backend=GPU) == [True]


@cuda
@pytest.mark.parametrize("variant", ["zero1-overlap", "zero2-interleaved"])
def test_buckets_step_on_a_stream_of_their_own(variant):
    (found,) = run(
        1, lambda: trace_rank(variant, models()["linear"], torch.device("cuda", 0)), backend=GPU
    )
    streams = {kind: {s.line for s in found if s.kind == kind} for kind in ("step", "compute")}
    assert streams["step"] and streams["compute"] - streams["step"], streams
