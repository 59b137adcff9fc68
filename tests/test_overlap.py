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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_step_in_backward_is_that_of_ddp_and_the_same_optimizer(size):
    """Every step, from the first, in both modes; replicas are equal bit for bit."""
    def every():
        return {(name, feature, interleaved): beside(name, feature, interleaved) for name in ("adamw", "sgd", "muon") for feature in FEATURES
                for interleaved in (False, True) if not (feature == "clip" and interleaved) and not (feature == "groups" and name == "muon")}

    for found in run(size, every):
        wrong = {case: value for case, value in found.items() if value[0] > 1e-9 or value[1]}
        assert not wrong and len(found) == 37
