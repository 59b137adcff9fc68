"""The step inside DDP's backward beside the comm hooks and the optimizers of users."""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
from common import flatten
from common.ddp_training import (
    CAP,
    apart,
    backward,
    network,
    sharded,
    twice,
    unsharded,
)
from common.modes import average_gradients
from common.saving import saved_and_loaded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.backward.torch_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

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
    worst = 0.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle = overlap(ours, zero, interleaved=interleaved)
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


# ---- copies of a model ----


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": saved_and_loaded,
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


def copied(detaches, how):
    """Train a copy of a model whose step is overlapped, or was, beside a copy of a plain DDP; then
    overlap the copy's step."""
    plain, ours = (DDP(network(), bucket_cap_mb=CAP) for _ in range(2))
    handle = overlap(ours, sharded("sgd", ours, False), hook=twice, state={"factor": 3})
    backward(ours, 0)
    if detaches:
        handle.detach()
    plain.load_state_dict(ours.state_dict())
    one, other = COPIES[how](plain), COPIES[how](ours)
    before = flatten(ours)
    optimizers = [unsharded("sgd", model, False) for model in (one, other)]
    for step in range(3):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    gap = (flatten(one) - flatten(other)).abs().max().item()
    assert torch.equal(before, flatten(ours)), "the model is apart from its copy"
    overlap(other, sharded("sgd", other, False))
    backward(other, 3)
    assert other._comm_hooks[0][0].overlap.engine.has_stepped
    return gap + apart(other)


def test_a_copy_of_an_overlapped_model_trains_as_a_copy_of_plain_ddp():
    cases = list(itertools.product((False, True), COPIES))
    for rank in run(2, lambda: [copied(*case) for case in cases]):
        assert rank == [0.0] * len(cases)


def left_by_a_hook(views):
    """Clip in steps inside backward; how far what the hook has left is from DDP's averages, after
    each of them."""
    plain, ours = (
        DDP(network(), bucket_cap_mb=CAP, gradient_as_bucket_view=views) for _ in range(2)
    )
    zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, lr=0.1)
    handle = overlap(ours, zero, hook=average_gradients, max_grad_norm=1e-3)
    gaps = []
    for step in range(5):
        plain.load_state_dict(ours.state_dict())
        for model in (plain, ours):
            model.zero_grad()
            backward(model, step)
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        gaps += [(a.grad - b.grad).abs().max().item() for a, b in pairs]
        assert float(handle.grad_norm) > 1e-3
        zero.step()
    assert apart(ours) == 0.0
    return max(gaps)


@pytest.mark.parametrize("views", [False, True])
def test_averages_that_a_hook_leaves_are_not_clipped(views):
    for gap in run(2, left_by_a_hook, views):
        assert gap < 1e-12
