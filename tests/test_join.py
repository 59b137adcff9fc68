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


# ---- what is sent ----

def kinds_sent(join_kind, by, kind="ours", norm=False, lengths=(4, 4), **options):
    """Count collectives in each iteration with Join, without, and after the block."""
    pg, rank = record(), dist.get_rank()
    model = DDP(network(nn.BatchNorm1d(9)) if norm else network(), process_group=pg)
    optimizer = optimizer_of(kind, model.parameters(), pg)

    def iterate(data):
        counts = []
        for x in data:
            with pg.recording() as log:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            counts.append(len([event for event in log if event.parent is None]))
        return counts

    iterate(batches(3))  # buckets are rebuilt once
    before = iterate(batches(1))
    join = join_kind([model, optimizer], **({"divide_by": by} if by else {}), **options)
    with join: inside = iterate(batches(lengths[rank]) if not options.get("loader") else join.loader(batches(lengths[rank])))
    after = iterate(batches(2))
    return before[0], inside, after


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_nobody_asks_who_is_there_where_nobody_needs_to_know(kind):
    for before, inside, after in run(2, kinds_sent, Join, "world_size", kind): assert {before} == set(inside) == set(after)


@pytest.mark.parametrize(("by", "norm", "policy"), [("active", False, "shadow"), ("samples", False, "shadow"), ("world_size", True, "shadow"), ("samples", True, "shadow"),
                                                    ("world_size", False, "raise"), ("samples", True, "stop")])
def test_one_small_collective_is_enough_where_somebody_does(by, norm, policy):
    for before, inside, after in run(2, kinds_sent, Join, by, norm=norm, policy=policy):
        assert set(inside) == {before + 1} and set(after) == {before}


def test_torchs_join_asks_twice_and_goes_on_asking():
    for before, inside, after in run(2, kinds_sent, TorchJoin, None): assert set(inside) == set(after) == {before + 2}


# ---- what a training loop may do ----

def loop(counts, every=1, clip=None, by="samples", norm=False, hook=None, kind="ours", **ddp):
    """Train with what is asked for; parameters and buffers of this rank."""
    rank = dist.get_rank()
    model = DDP(network(nn.BatchNorm1d(9)) if norm else network(), **ddp)
    if hook == "power": model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    elif hook == "builtin": model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook: model.register_comm_hook(None, hook)
    optimizer = optimizer_of(kind, model.parameters())
    clipping = {"before_step": lambda optimizer: nn.utils.clip_grad_norm_(model.parameters(), clip)} if clip else {}
    with Join([model, optimizer], divide_by=by, **clipping):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            with torch.no_grad(): model(x)  # an evaluation in between
            if (k + 1) % every:
                with model.no_sync(): (model(x).square().mean() / every).backward()
            else:
                (model(x).square().mean() / every).backward()
                optimizer.step()
                optimizer.zero_grad()
    return flat(model), [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("by", ["world_size", "active", "samples"])
@pytest.mark.parametrize("options", [{"hook": default_hooks.allreduce_hook}, {"hook": "builtin"}, {"gradient_as_bucket_view": True}, {}], ids=str)
def test_gradient_accumulation_keeps_what_a_rank_had_accumulated(by, options):
    counts, every = (6, 2, 3, 9), 3  # rank 1 ends in the middle of an accumulation
    ranks = run(4, loop, counts, every, by=by, **options)
    assert all(gap(params, alone(counts, by, every=every)) < 1e-6 for params, _ in ranks)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_clipping_is_repeated_where_join_is_told(kind):
    counts = (4, 1, 0)
    assert all(gap(params, alone(counts, "samples", clip=0.05)) < 1e-6 for params, _ in run(3, loop, counts, clip=0.05, kind=kind))


def clipped_by_hand(counts):
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)

    def train():
        with Join([model, optimizer]):
            for x in batches(counts[dist.get_rank()]):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        failure = told(train)
    return failure, [str(w.message) for w in caught if "before_step" in str(w.message)]


def test_clipping_by_hand_is_refused_where_it_cannot_be_repeated():
    even = run(2, clipped_by_hand, (3, 3))
    assert all(failure is None and len(said) == 1 for failure, said in even)  # said once, and harmless as long as nobody runs out
    for failure, _ in run(2, clipped_by_hand, (3, 1)): assert failure[0] == "RuntimeError" and "before_step" in failure[1]


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, "power", "builtin"])
def test_comm_hooks_see_zeros(hook):
    counts = (1, 5, 0)
    ranks = run(3, loop, counts, hook=hook)
    assert all(gap(params, ranks[0][0]) == 0 for params, _ in ranks)
    assert gap(ranks[0][0], alone(counts, "samples")) < {"power": 0.2, default_hooks.fp16_compress_hook: 1e-2}.get(hook, 1e-6)


@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_batch_norm_is_the_last_joiners_on_all_ranks(by):
    """Buffers come from a rank that has data, here from rank 2 and then from rank 1."""
    ranks = run(3, loop, (0, 5, 2), norm=True, by=by)
    for params, buffers in ranks:
        assert gap(params, ranks[1][0]) == 0 and all(map(torch.equal, buffers, ranks[1][1]))
    # 2 forwards in each of 5 iterations; the first gets what the root has
    assert ranks[0][1][2].item() == 10 and not torch.equal(ranks[0][1][0], torch.zeros(9))


class Branches(nn.Module):
    """Uses one of two layers, or a third that nobody does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x, which): return {"out": self.layers[which](x), "aside": "text"}


def branches(counts):
    rank = dist.get_rank()
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, weight_decay=0.1)
    with Join([model, optimizer], divide_by="samples"):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            optimizer.zero_grad()
            model(x, which=(k + rank) % 2)["out"].square().mean().backward()
            optimizer.step()
    return flat(model)


def test_parameters_that_no_rank_uses_are_left_alone():
    counts = (1, 5, 0)
    model = Branches()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data = [batches(n, rank, 4 + rank) for rank, n in enumerate(counts)]
    for k in range(5):
        optimizer.zero_grad()
        there = [(mine[k], (k + rank) % 2) for rank, mine in enumerate(data) if len(mine) > k]
        torch.cat([model(x, which)["out"] for x, which in there]).square().mean().backward()
        optimizer.step()
    assert all(gap(params, flat(model)) < 1e-6 for params in run(3, branches, counts))


def in_format(counts):
    """Channels last, where memory order is not the order of dimensions."""
    rank, data = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    model = DDP(plain)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    reference = DDP(copy.deepcopy(plain))
    theirs = AdamW(reference.parameters(), lr=1e-2)
    images = [torch.randn(2, 3, 4, 4, generator=data) for _ in range(counts[rank])]
    for m, o in ((model, optimizer), (reference, theirs)):
        with Join([m, o]):
            for x in images:
                o.zero_grad()
                m(x).square().mean().backward()
                o.step()
    return flat(model), flat(reference), flat(plain)


def test_gradients_keep_their_memory_format():
    ranks = run(2, in_format, (1, 4))
    assert all(gap(ours, theirs) < 1e-6 and gap(ours, ranks[0][0]) == 0 for ours, theirs, _ in ranks)


def wanted_twice():
    """A step that is closed over: forward and backward come inside it."""
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with Join([model, optimizer]):
        for x in batches(1 + 2 * dist.get_rank()):
            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss
            optimizer.step(closure)
    return flat(model)


def test_a_step_with_a_closure():
    ranks = run(2, wanted_twice)
    assert gap(*ranks) == 0


def several():
    """Two forwards and one backward, in a block with two models."""
    rank = dist.get_rank()
    a, b = DDP(network()), DDP(nn.Linear(5, 3))
    dist.broadcast(b.module.weight.data, 0)
    optimizers = [ZeroRedundancyOptimizer(m.parameters(), SGD, lr=0.1) for m in (a, b)]
    with Join([*optimizers, b, a], divide_by="active") as join:
        for x in batches(2 + rank):
            for optimizer in optimizers: optimizer.zero_grad()
            (b(a(x)).square().mean() + a(-x).square().mean()).backward()
            for optimizer in optimizers: optimizer.step()
    return torch.cat([flat(a), flat(b)]), join.roll.batches


def test_several_models_and_several_forwards_for_one_backward():
    ranks = run(2, several)
    assert gap(ranks[0][0], ranks[1][0]) == 0 and ranks[0][1] == (2, 3)


def scheduled(counts, among, kind):
    model = DDP(network())
    optimizer = optimizer_of(kind, model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    out = []
    for _ in range(2):
        with Join([model, optimizer, *([scheduler] if among else [])]):
            for x in batches(counts[dist.get_rank()]):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                scheduler.step()
        out.append((scheduler.last_epoch, optimizer.param_groups[0]["lr"]))
    return flat(model), out


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_learning_rates_are_those_of_ranks_with_data(kind):
    ranks = run(2, scheduled, (1, 4), True, kind)
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        for k in range(4):
            optimizer.zero_grad()
            (sum(model(x[0]).square().mean() for x in (batches(1, 0)[k:k + 1], batches(4, 1)[k:k + 1]) if x) / 2).backward()
            optimizer.step()
            scheduler.step()
    assert all(gap(params, flat(model)) < 1e-6 and [n for n, _ in steps] == [4, 8] for params, steps in ranks)
    assert ranks[0][1] == ranks[1][1]
