"""Join: who had data when, what is sent, and what becomes of the model."""
import copy
import functools
import json
import pickle
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchHook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zero_nb.join import Join, Joinable, JoinHook, Log, Reader, Roll, draw_roll
from zero_nb.launch import run
from zero_nb.optimizer import ZeroRedundancyOptimizer
from zero_nb.process_group import Board, Group, Ranks
from zero_nb.record import record, simulate


def network(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), *between, nn.Tanh(), nn.Linear(9, 5))


def batches(n, rank=None, size=4):
    data = torch.Generator().manual_seed(100 * (dist.get_rank() if rank is None else rank))
    return [torch.randn(size, 6, generator=data) for _ in range(n)]


def flat(model): return torch.cat([p.detach().flatten() for p in model.parameters()])
def gap(a, b): return (a - b).abs().max().item()


def told(f):
    try: return f() and None
    except Exception as e: return type(e).__name__, str(e)


def optimizer_of(kind, params, group=None):
    if kind == "plain": return AdamW(params, lr=1e-2)
    return {"ours": ZeroRedundancyOptimizer, "torch": TorchZero}[kind](params, AdamW, group, lr=1e-2)


def alone(counts, by, sizes=None, n=None, clip=None, every=1):
    """Train in one process on the union of all ranks' data."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    data = [batches(count, rank, 4 + rank if sizes is None else sizes[rank]) for rank, count in enumerate(counts)]
    for k in range(max(counts)):
        there = [mine[k] for mine in data if len(mine) > k]
        if by == "samples": loss = model(torch.cat(there)).square().mean()
        else: loss = sum(model(x).square().mean() for x in there) / (len(there) if by == "active" else len(counts))
        (loss / every).backward()
        if (k + 1) % every: continue
        if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


# ---- the value ----

def test_a_roll_tells_who_had_data_when():
    roll = Roll((5, 1, 17, 0), (0, 2, 0, 0), ((4, 3), (4, 4), None, (4, 0)))
    assert [roll.active(i) for i in (0, 1, 5, 17)] == [(0, 1, 2), (0, 2), (2,), ()]
    assert [roll.samples(i)[:2] for i in (0, 1, 4, 5)] == [(4, 4), (4, 0), (3, 0), (0, 0)]
    assert str(roll).splitlines()[1] == "rank 1 #xx.............. 1, 2 dropped"
    assert draw_roll(roll).count("<rect") == 5 + 1 + 17 + 1 + 3 and draw_roll(Roll((100_000, 1))).count("<rect") < 5 and "<svg" in draw_roll(Roll((0, 0)))
    assert hash(roll) == hash(Roll((5, 1, 17, 0), (0, 2, 0, 0), ((4, 3), (4, 4), None, (4, 0))))


# ---- parity with one process that sees all data ----

def uneven(counts, by, kind="ours", turned=False, **options):
    rank = dist.get_rank()
    model = DDP(network(), gradient_as_bucket_view=kind == "torch")
    optimizer = optimizer_of(kind, model.parameters())
    with Join([optimizer, model] if turned else [model, optimizer], divide_by=by, **options) as join:
        for x in batches(counts[rank], size=4 + rank):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return flat(model), join.roll.batches, model._join_config.enable


@pytest.mark.parametrize("counts", [(0, 1, 5, 17), (17, 5, 1, 0), (3, 3, 3), (2, 0), (4, 2, 4), (3,), (0, 0)], ids=str)
@pytest.mark.parametrize("by", ["world_size", "active", "samples"])
def test_uneven_training_is_that_of_one_process(counts, by):
    ranks = run(len(counts), uneven, counts, by)
    assert all(roll == counts and not left for _, roll, left in ranks)
    assert all(gap(params, alone(counts, by)) < 1e-6 for params, _, _ in ranks)


@pytest.mark.parametrize("kind", ["ours", "torch", "plain"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_any_optimizer_in_any_order(kind, turned, by):
    counts = (1, 5, 0)
    assert all(gap(params, alone(counts, by)) < 1e-6 for params, _, _ in run(3, uneven, counts, by, kind, turned))


def test_torchs_name_for_dividing_by_the_active_ranks():
    counts = (1, 4)
    for by, options in {"world_size": {}, "active": {"divide_by_initial_world_size": False}}.items():
        assert all(gap(params, alone(counts, by)) < 1e-6 for params, _, _ in run(2, uneven, counts, None, **options))
