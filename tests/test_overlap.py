"""The step inside backward, beside plain DDP with the same optimizer."""
import copy
import gc
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon

from zero_nb.launch import run
from zero_nb.optimizer import ZeroRedundancyOptimizer
from zero_nb.overlap import hook_with_zero_step, hook_with_zero_step_interleaved, overlap
from zero_nb.process_group import two_level
from zero_nb.record import record

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
        for i in uses: x = x + self.middle[i](x).tanh()
        return self.last(x)


def network(dtype=torch.float64): return Net().to(dtype)


def batch(step, part=0, dtype=torch.float64):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank()), dtype=dtype)


def told(f):
    try: f()
    except Exception as error: return type(error).__name__, str(error)


def flat(model): return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def apart(model, group=None):
    """Give how far this rank's parameters are from those of the first rank, bit for bit: 0 or 1."""
    mine = flat(model)
    first = mine.clone()
    dist.broadcast(first, dist.get_global_rank(group or dist.group.WORLD, 0), group)
    return float(not torch.equal(mine, first))


class Several:
    """Torch's optimizers side by side."""

    def __init__(self, *optimizers): self.optimizers, self.param_groups = optimizers, [g for o in optimizers for g in o.param_groups]
    def step(self): [o.step() for o in self.optimizers]
    def zero_grad(self, set_to_none=True): [o.zero_grad(set_to_none) for o in self.optimizers]


MUON, ADAMW = {"lr": 0.02, "weight_decay": 0.1}, {"lr": 1e-2, "weight_decay": 0.1}


def unsharded(name, model, groups):
    params = list(model.parameters())
    if name == "muon":
        matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        return Several(Muon(matrices, **MUON), AdamW(others, **ADAMW))
    params = [{"params": params[:3]}, {"params": params[3:], "lr": 0.05}] if groups else params
    return AdamW(params, **ADAMW) if name == "adamw" else SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def sharded(name, model, groups, process_group=None, **options):
    params = list(model.parameters())
    make = partial(ZeroRedundancyOptimizer, process_group=process_group, **options)
    if name == "muon":
        matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        return make([{"params": matrices, "optimizer_class": Muon, **MUON}, {"params": others}], AdamW, **ADAMW)
    params = [{"params": params[:3]}, {"params": params[3:], "lr": 0.05}] if groups else params
    return make(params, AdamW, **ADAMW) if name == "adamw" else make(params, SGD, lr=0.1, momentum=0.9, nesterov=True)


USES = [(0, 1, 3), (0, 3), (3, 2), (0, 1, 2, 3), (0,), (1, 3), (2,)]  # layers used, by step; each of them differs by rank as well


def used(feature, step):
    if feature == "static": return 0, 3
    if feature != "unused": return 0, 1, 2, 3
    return USES[step % len(USES)] if dist.get_rank() != 1 else USES[step % len(USES)][:1]


def backward(model, feature, step):
    """Run one iteration's forward and backward, of several parts if they are accumulated."""
    parts = 2 if feature == "accumulate" else 1
    dtype = next(model.parameters()).dtype
    for part in range(parts):
        with model.no_sync() if part < parts - 1 else nullcontext():
            model(batch(step, part, dtype), used(feature, step)).square().mean().backward()


def beside(name, feature, interleaved, steps=6, **more):
    """Train both ways; give the largest difference of parameters, and of replicas."""
    ddp = {"static_graph": feature == "static", "find_unused_parameters": feature == "unused", "bucket_cap_mb": CAP}
    plain, ours = DDP(network(), **ddp), DDP(network(), gradient_as_bucket_view=feature in ("views", "unused", "accumulate"), **ddp)
    optimizer = unsharded(name, plain, feature == "groups")
    zero = sharded(name, ours, feature == "groups", parameters_as_bucket_view=feature in ("views", "clip"))
    worst = differs = 0.0
    handle = overlap(ours, zero, interleaved=interleaved, max_grad_norm=0.3 if feature == "clip" else None, **more)
    for step in range(steps):
        backward(plain, feature, step)
        if feature == "clip": norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        backward(ours, feature, step)
        if step % 3: zero.step()
        zero.zero_grad(set_to_none=bool(step % 2))
        worst = max(worst, (flat(plain) - flat(ours)).abs().max().item())
        if feature == "clip": worst = max(worst, abs(norm.item() - handle.grad_norm.item()))
        differs = max(differs, apart(ours))
        assert all(p.grad is None for p in ours.parameters())
        handle.taken = 0  # a test may call step() now and then
    assert handle.live and len(handle.schedule.collectives) > 4
    handle.detach()
    return worst, differs


FEATURES = ["plain", "static", "unused", "accumulate", "groups", "clip", "views"]
EVERY = [(name, feature, interleaved) for feature in FEATURES for interleaved in (False, True) for name in ("adamw", "sgd", "muon")
         if not (feature == "clip" and interleaved) and not (feature == "groups" and name == "muon")]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_step_in_backward_is_that_of_ddp_and_the_same_optimizer(size):
    """Every step, from the first, in both modes; replicas are equal bit for bit. All cases at 2 ranks, a third of them at others."""
    cases = EVERY if size == 2 else EVERY[size % 3::3]
    for found in run(size, lambda: {case: beside(*case) for case in cases}):
        wrong = {case: value for case, value in found.items() if value[0] > 1e-9 or value[1]}
        assert not wrong and len(found) == len(cases)


def wide(interleaved):
    """A bfloat16 model whose steps are taken in float32, beside the same by hand; equal data, so that no order of additions matters."""
    plain, ours = (DDP(network(torch.bfloat16), bucket_cap_mb=CAP) for _ in range(2))
    copies = [p.detach().float() for p in plain.parameters()]
    reference, zero = AdamW(copies, **ADAMW), sharded("adamw", ours, False, master_dtype=torch.float32)
    overlap(ours, zero, interleaved=interleaved)
    for step in range(6):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        for model in (plain, ours): model(data).square().mean().backward()
        for p, copied in zip(plain.parameters(), copies, strict=True): copied.grad, p.grad = p.grad.float(), None
        reference.step()
        with torch.no_grad():
            for p, copied in zip(plain.parameters(), copies, strict=True): p.copy_(copied)
        if not torch.equal(flat(plain), flat(ours)): return step
    return apart(ours)


def test_a_low_precision_model_is_stepped_in_high_precision():
    for size in (2, 4): assert run(size, lambda: [wide(interleaved) for interleaved in (False, True)]) == [[0.0, 0.0]] * size


# ---- optimizers of others ----

class Counting(torch.optim.Optimizer):
    """Counts its steps where `where` says, and steps less from one to the next."""

    def __init__(self, params, lr=0.1, where="group"):
        super().__init__(params, {"lr": lr, "count": 0})
        self.where = where
        if where == "attribute": self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self.where == "group": group["count"] = count = group["count"] + 1
            elif self.where == "state": self.state["all"]["count"] = count = self.state["all"].get("count", 0) + 1
            else: self.count = count = self.count + 1
            for p in group["params"]:
                if p.grad is None: continue
                p -= group["lr"] / count * p.grad.sign()


def counted(where, interleaved):
    plain, ours = (DDP(network(), bucket_cap_mb=CAP) for _ in range(2))
    kind = type("Counting", (Counting,), {"__init__": lambda self, params, **options: Counting.__init__(self, params, where=where, **options)})
    optimizer, zero = kind(plain.parameters()), ZeroRedundancyOptimizer(ours.parameters(), kind)
    handle, worst = overlap(ours, zero, interleaved=interleaved), 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            backward(plain, "plain", step)
            optimizer.step()
            optimizer.zero_grad()
            backward(ours, "plain", step)
            zero.step()
            worst = max(worst, (flat(plain) - flat(ours)).abs().max().item())
    assert handle.live and not handle.apart and zero.param_groups[0]["count"] == optimizer.param_groups[0]["count"]
    return worst + apart(ours), [str(w.message) for w in caught if "stepped together" in str(w.message)]


def test_a_class_that_counts_outside_the_state_of_parameters_is_stepped_as_a_whole():
    cases = [(where, interleaved) for where in ("group", "state", "attribute") for interleaved in (False, True)]
    for rank in run(2, lambda: [counted(*case) for case in cases]):
        for (_, interleaved), (worst, warned) in zip(cases, rank, strict=True):
            assert worst < 1e-9 and len(warned) == interleaved


# ---- as torch's users write it ----

def by_hook(make, inner, state=None, name="adamw", tolerance=1e-9, steps=5, schedule=True):
    """Train with a hook that the user registers, beside DDP with the inner hook alone."""
    plain, ours = (DDP(network(), bucket_cap_mb=CAP) for _ in range(2))
    plain.register_comm_hook(state and state(), inner)
    optimizer, zero = unsharded(name, plain, False), sharded(name, ours, False, overlap_with_ddp=True)
    hook = make(inner, ours, zero)
    ours.register_comm_hook(state and state(), hook)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, zero)]
    for step in range(steps + 2):
        if step == steps: hook.overlap.detach()
        for model, o, scheduler in zip((plain, ours), (optimizer, zero), schedulers, strict=True):
            backward(model, "plain", step)
            if o is optimizer or step >= steps: o.step()
            o.zero_grad()
            scheduler.step()
        if (worst := (flat(plain) - flat(ours)).abs().max().item()) > tolerance or apart(ours): return step, worst
    assert zero.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == zero.param_groups[0]["initial_lr"] / 8
    return zero.driver is None


def power(): return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)


def test_hooks_of_torchs_names_keep_or_replace_the_users_hook_and_leave_it_when_detached():
    """Without a call of step() while it is overlapped, and with a scheduler, which says nothing."""
    def every():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.*")
            found = {}
            for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
                found[make.__name__, "mean"] = by_hook(make, default_hooks.allreduce_hook)
                found[make.__name__, "sgd"] = by_hook(partial(make, shard_buckets=True), default_hooks.allreduce_hook, name="sgd")
                found[make.__name__, "fp16"] = by_hook(make, default_hooks.fp16_compress_hook, name="sgd", tolerance=1e-3)
                found[make.__name__, "kept"] = by_hook(make, twice, state=lambda: {"factor": 2.0})
            return found

    for found in run(3, every): assert set(found.values()) == {True}, found


def twice(state, bucket):
    """A hook of the user's, with a state."""
    bucket.buffer().mul_(state["factor"])
    return default_hooks.allreduce_hook(None, bucket)


def compressed(interleaved):
    """PowerSGD keeps errors and queries for each bucket, in a state of the user's; one bucket, since with several it waits for ever on gloo under plain DDP."""
    plain, ours = (DDP(network(torch.float32)) for _ in range(2))
    plain.register_comm_hook(power(), powerSGD_hook.powerSGD_hook)
    optimizer, zero = unsharded("sgd", plain, False), sharded("sgd", ours, False)
    overlap(ours, zero, hook=powerSGD_hook.powerSGD_hook, state=power(), interleaved=interleaved)
    for step in range(6):
        for model, o in ((plain, optimizer), (ours, zero)):
            backward(model, "plain", step)
            o.step()
            o.zero_grad()
        if (flat(plain) - flat(ours)).abs().max().item() > 1e-4 or apart(ours): return step
    return True


def test_powersgd_is_kept():
    assert run(2, lambda: [compressed(False), compressed(True)]) == [[True, True]] * 2


def test_half_precision_travels_where_the_users_hook_asks_for_it():
    """bf16_compress_hook, which torch refuses on gloo by its name."""
    def sent():
        group = record()
        model = DDP(network(torch.float32), process_group=group, bucket_cap_mb=CAP)
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, group, lr=0.1)
        overlap(model, zero, hook=default_hooks.bf16_compress_hook)
        for step in range(3): backward(model, "plain", step)
        return sorted({(e.kind, e.dtype) for e in group.log.events if e.kind in ("reduce_scatter", "all_gather") and e.parent is None}), apart(model)

    for kinds, differs in run(2, sent): assert ("reduce_scatter", "bfloat16") in kinds and ("reduce_scatter", "float32") not in kinds and not differs
