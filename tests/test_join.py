"""Join: who had data when, what is sent, and what becomes of the model."""

import copy
import pickle
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchHook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adafactor, AdamW, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_overlap import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    overlap,
)
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.ranks import Ranks
from zero_nb.comm.recording import record, simulate
from zero_nb.join.event_log import (
    Attendance,
    EventLog,
    EventStore,
    draw_attendance,
    explain_wait,
)
from zero_nb.join.join import Join
from zero_nb.join.participants import Joinable, JoinHook, shadowed_by
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def network(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), *between, nn.Tanh(), nn.Linear(9, 5))


def batches(n, rank=None, size=4):
    data = torch.Generator().manual_seed(100 * (dist.get_rank() if rank is None else rank))
    return [torch.randn(size, 6, generator=data) for _ in range(n)]


def optimizer_of(kind, params, group=None):
    if kind == "plain":
        return AdamW(params, lr=1e-2)
    return {"ours": ZeroRedundancyOptimizer, "torch": TorchZero}[kind](
        params, AdamW, group, lr=1e-2
    )


def reference(counts, by, kind=AdamW, clip=None, every=1, rounds=1, sizes=None):
    """Train in one process on the union of all data; parameters and state."""
    model = network()
    optimizer = kind(model.parameters(), lr=1e-2)
    data = [
        batches(count, rank, 4 + rank if sizes is None else sizes[rank])
        for rank, count in enumerate(counts)
    ]
    for k in [*range(max(counts))] * rounds:
        there = [mine[k] for mine in data if len(mine) > k]
        if by == "samples":
            loss = model(torch.cat(there)).square().mean()
        else:
            loss = sum(model(x).square().mean() for x in there) / (
                len(there) if by == "active" else len(counts)
            )
        (loss / every).backward()
        if (k + 1) % every:
            continue
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return flatten(model), optimizer.state_dict()["state"]


def alone(counts, by, sizes=None, **how):
    return reference(counts, by, sizes=sizes, **how)[0]


# ---- the value ----


def test_a_roll_tells_who_had_data_when():
    roll = Attendance((5, 1, 17, 0), (0, 2, 0, 0), ((4, 3), (4, 4), None, (4, 0)))
    assert [roll.active(i) for i in (0, 1, 5, 17)] == [(0, 1, 2), (0, 2), (2,), ()]
    assert [roll.samples(i)[:2] for i in (0, 1, 4, 5)] == [(4, 4), (4, 0), (3, 0), (0, 0)]
    assert str(roll).splitlines()[1] == "rank 1 #xx.............. 1, 2 dropped"
    assert (
        draw_attendance(roll).count("<rect") == 5 + 1 + 17 + 1 + 3
        and draw_attendance(Attendance((100_000, 1))).count("<rect") < 5
        and "<svg" in draw_attendance(Attendance((0, 0)))
    )
    assert hash(roll) == hash(
        Attendance((5, 1, 17, 0), (0, 2, 0, 0), ((4, 3), (4, 4), None, (4, 0)))
    )


# ---- parity with one process that sees all data ----


def uneven(counts, by, kind="ours", turned=False, **options):
    rank = dist.get_rank()
    model = DDP(network(), gradient_as_bucket_view=kind == "torch")
    optimizer = optimizer_of(kind, model.parameters())
    with Join(
        [optimizer, model] if turned else [model, optimizer], divide_by=by, **options
    ) as join:
        for x in batches(counts[rank], size=4 + rank):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return flatten(model), join.attendance.batches, model._join_config.enable


@pytest.mark.parametrize(
    "counts", [(0, 1, 5, 17), (17, 5, 1, 0), (3, 3, 3), (2, 0), (4, 2, 4), (3,), (0, 0)], ids=str
)
@pytest.mark.parametrize("by", ["world_size", "active", "samples"])
def test_uneven_training_is_that_of_one_process(counts, by):
    ranks = run(len(counts), uneven, counts, by)
    assert all(roll == counts and not left for _, roll, left in ranks)
    assert all(largest_gap(params, alone(counts, by)) < 1e-6 for params, _, _ in ranks)


@pytest.mark.parametrize("kind", ["ours", "torch", "plain"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_any_optimizer_in_any_order(kind, turned, by):
    counts = (1, 5, 0)
    assert all(
        largest_gap(params, alone(counts, by)) < 1e-6
        for params, _, _ in run(3, uneven, counts, by, kind, turned)
    )


def test_torchs_name_for_dividing_by_the_active_ranks():
    counts = (1, 4)
    for by, options in {
        "world_size": {},
        "active": {"divide_by_initial_world_size": False},
    }.items():
        assert all(
            largest_gap(params, alone(counts, by)) < 1e-6
            for params, _, _ in run(2, uneven, counts, None, **options)
        )


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
            counts.append(len(log.collectives()))
        return counts

    iterate(batches(3))  # buckets are rebuilt once
    before = iterate(batches(1))
    join = join_kind([model, optimizer], **({"divide_by": by} if by else {}), **options)
    with join:
        inside = iterate(
            batches(lengths[rank])
            if not options.get("loader")
            else join.loader(batches(lengths[rank]))
        )
    after = iterate(batches(2))
    return before[0], inside, after


@pytest.mark.parametrize("kind", ["ours", "plain"])
@pytest.mark.parametrize(
    ("by", "norm", "policy"),
    [
        ("world_size", False, "shadow"),
        ("active", False, "shadow"),
        ("samples", False, "shadow"),
        ("world_size", True, "shadow"),
        ("samples", True, "shadow"),
        ("world_size", False, "raise"),
        ("samples", True, "stop"),
    ],
)
def test_one_small_collective_is_sent_where_ranks_are_counted_and_none_elsewhere(
    by, norm, policy, kind
):
    counts = by != "world_size" or norm or policy != "shadow"
    for before, inside, after in run(2, kinds_sent, Join, by, kind, norm=norm, policy=policy):
        assert {before + counts} == set(inside) and {before} == set(after)


def test_torchs_join_asks_twice_and_goes_on_asking():
    for before, inside, after in run(2, kinds_sent, TorchJoin, None):
        assert set(inside) == set(after) == {before + 2}


# ---- what a training loop may do ----


def loop(counts, every=1, clip=None, by="samples", norm=False, hook=None, kind="ours", **ddp):
    """Train with what is asked for; parameters and buffers of this rank."""
    rank = dist.get_rank()
    model = DDP(network(nn.BatchNorm1d(9)) if norm else network(), **ddp)
    if hook == "power":
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
        )
    elif hook == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook:
        model.register_comm_hook(None, hook)
    optimizer = optimizer_of(kind, model.parameters())
    clipping = (
        {"before_step": lambda optimizer: nn.utils.clip_grad_norm_(model.parameters(), clip)}
        if clip
        else {}
    )
    with Join([model, optimizer], divide_by=by, **clipping):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            with torch.no_grad():
                model(x)  # an evaluation in between
            if (k + 1) % every:
                with model.no_sync():
                    (model(x).square().mean() / every).backward()
            else:
                (model(x).square().mean() / every).backward()
                optimizer.step()
                optimizer.zero_grad()
    return flatten(model), [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("by", ["world_size", "active", "samples"])
@pytest.mark.parametrize(
    "options",
    [
        {"hook": default_hooks.allreduce_hook},
        {"hook": "builtin"},
        {"gradient_as_bucket_view": True},
        {},
    ],
    ids=["hook", "builtin", "views", "plain"],
)
def test_gradient_accumulation_keeps_what_a_rank_had_accumulated(by, options):
    counts, every = (6, 2, 3, 9), 3  # rank 1 ends in the middle of an accumulation
    ranks = run(4, loop, counts, every, by=by, **options)
    assert all(largest_gap(params, alone(counts, by, every=every)) < 1e-6 for params, _ in ranks)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_clipping_is_repeated_where_join_is_told(kind):
    counts = (4, 1, 0)
    assert all(
        largest_gap(params, alone(counts, "samples", clip=0.05)) < 1e-6
        for params, _ in run(3, loop, counts, clip=0.05, kind=kind)
    )


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

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        failure = caught_error(train)
    return failure, [str(w.message) for w in warned if "before_step" in str(w.message)]


def test_clipping_by_hand_is_refused_where_it_cannot_be_repeated():
    even = run(2, clipped_by_hand, (3, 3))
    assert all(
        failure is None and len(said) == 1 for failure, said in even
    )  # said once, and harmless as long as nobody runs out
    for failure, _ in run(2, clipped_by_hand, (3, 1)):
        assert failure[0] == "RuntimeError" and "before_step" in failure[1]


@pytest.mark.parametrize(
    "hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, "power", "builtin"]
)
def test_comm_hooks_see_zeros(hook):
    counts = (1, 5, 0)
    ranks = run(3, loop, counts, hook=hook)
    assert all(largest_gap(params, ranks[0][0]) == 0 for params, _ in ranks)
    assert largest_gap(ranks[0][0], alone(counts, "samples")) < {
        "power": 0.2,
        default_hooks.fp16_compress_hook: 1e-2,
    }.get(hook, 1e-6)


@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_batch_norm_is_the_last_joiners_on_all_ranks(by):
    """Buffers come from a rank that has data, here from rank 2 and then from rank 1."""
    ranks = run(3, loop, (0, 5, 2), norm=True, by=by)
    for params, buffers in ranks:
        assert largest_gap(params, ranks[1][0]) == 0 and all(map(torch.equal, buffers, ranks[1][1]))
    # 2 forwards in each of 5 iterations; the first gets what the root has
    assert ranks[0][1][2].item() == 10 and not torch.equal(ranks[0][1][0], torch.zeros(9))


class Branches(nn.Module):
    """Uses one of two layers, or a third that nobody does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x, which):
        return {"out": self.layers[which](x), "aside": "text"}


def branches(counts):
    rank = dist.get_rank()
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, weight_decay=0.1)
    with Join([model, optimizer], divide_by="samples"):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            optimizer.zero_grad()
            model(x, which=(k + rank) % 2)["out"].square().mean().backward()
            optimizer.step()
    return flatten(model)


def alone_with_branches(counts):
    model = Branches()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data = [batches(n, rank, 4 + rank) for rank, n in enumerate(counts)]
    for k in range(max(counts)):
        optimizer.zero_grad()
        there = [(mine[k], (k + rank) % 2) for rank, mine in enumerate(data) if len(mine) > k]
        torch.cat([model(x, which)["out"] for x, which in there]).square().mean().backward()
        optimizer.step()
    return flatten(model)


def test_parameters_that_no_rank_uses_are_left_alone():
    counts = (1, 5, 0)
    assert all(
        largest_gap(params, alone_with_branches(counts)) < 1e-6
        for params in run(3, branches, counts)
    )


def in_format(counts):
    """Channels last, where memory order is not the order of dimensions."""
    rank, data = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)).to(
        memory_format=torch.channels_last
    )
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
    return flatten(model), flatten(reference), flatten(plain)


def test_gradients_keep_their_memory_format():
    ranks = run(2, in_format, (1, 4))
    assert all(
        largest_gap(ours, theirs) < 1e-6 and largest_gap(ours, ranks[0][0]) == 0
        for ours, theirs, _ in ranks
    )


def wanted_twice():
    """Step with a closure, so that forward and backward come inside the step."""
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
    return flatten(model)


def test_a_step_with_a_closure():
    ranks = run(2, wanted_twice)
    assert largest_gap(*ranks) == 0


def several():
    """Two forwards and one backward, in a block with two models."""
    rank = dist.get_rank()
    a, b = DDP(network()), DDP(nn.Linear(5, 3))
    dist.broadcast(b.module.weight.data, 0)
    optimizers = [ZeroRedundancyOptimizer(m.parameters(), SGD, lr=0.1) for m in (a, b)]
    with Join([*optimizers, b, a], divide_by="active") as join:
        for x in batches(2 + rank):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (b(a(x)).square().mean() + a(-x).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
    return torch.cat([flatten(a), flatten(b)]), join.attendance.batches


def test_several_models_and_several_forwards_for_one_backward():
    ranks = run(2, several)
    assert largest_gap(ranks[0][0], ranks[1][0]) == 0 and ranks[0][1] == (2, 3)


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
    return flatten(model), out


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_learning_rates_are_those_of_ranks_with_data(kind):
    ranks = run(2, scheduled, (1, 4), True, kind)
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        for k in range(4):
            optimizer.zero_grad()
            (
                sum(
                    model(x[0]).square().mean()
                    for x in (batches(1, 0)[k : k + 1], batches(4, 1)[k : k + 1])
                    if x
                )
                / 2
            ).backward()
            optimizer.step()
            scheduler.step()
    assert all(
        largest_gap(params, flatten(model)) < 1e-6 and [n for n, _ in steps] == [4, 8]
        for params, steps in ranks
    )
    assert ranks[0][1] == ranks[1][1]


# ---- drop-in ----


class Counter(TorchJoinable):
    """The joinable of torch's tutorial: counts inputs over all ranks."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group or dist.group.WORLD
        self.count, self.total = torch.zeros(1), torch.zeros(1)
        self.seen = []

    def __call__(self):
        work = TorchJoin.notify_join_context(self)
        if work is not None:
            work.wait()
        self.count += 1
        total = torch.ones(1)
        dist.all_reduce(total, group=self.group)
        self.total += total

    def join_hook(self, **kwargs):
        counter = self
        counter.seen.append(kwargs)

        class Hook(TorchHook):
            def main_hook(self):
                dist.all_reduce(torch.zeros(1), group=counter.group)

            def post_hook(self, is_last_joiner):
                counter.seen.append(is_last_joiner)
                common = torch.tensor([dist.get_rank() if is_last_joiner else -1])
                dist.all_reduce(common, dist.ReduceOp.MAX, group=counter.group)
                dist.broadcast(counter.total, common.item(), group=counter.group)

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


def count(kind, lengths, **options):
    counter = Counter()
    joining = kind([counter], sync_max_count=True, **options)
    with joining:
        for _ in range(lengths[dist.get_rank()]):
            counter()
    return counter.total.item(), counter.seen


@pytest.mark.parametrize("lengths", [(1, 5, 0), (3, 3), (0, 0)], ids=str)
def test_a_joinable_as_torchs_tutorial_writes_it(lengths):
    torchs, ours = (run(len(lengths), count, kind, lengths) for kind in (TorchJoin, Join))
    assert ours == torchs
    assert all(
        total == sum(lengths) and seen == [{"sync_max_count": True}, n == max(lengths)]
        for (total, seen), n in zip(ours, lengths, strict=True)
    )


class Ours(Joinable):
    """Says what it does by our names, and is joined by torch's class as well."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    def __call__(self, x=1.0):
        Join.notify_join_context(self)
        x = torch.tensor([x])
        dist.all_reduce(x)
        self.total += x

    def join_hook(self, **kwargs):
        joinable = self

        class Hook(JoinHook):
            def main_hook(self):
                joinable(0.0)

        return Hook()

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)


def together():
    """Join one of the user's, a silent one, a model, and an optimizer."""
    rank, order = dist.get_rank(), []
    model, mine = DDP(network()), Ours()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)

    class Silent(TorchJoinable):
        announces_iterations = False

        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            class Hook(JoinHook):
                def main_hook(self):
                    order.append(model.module[0].weight.grad.norm().item() > 0)

            return Hook()

        join_device, join_process_group = Ours.join_device, Ours.join_process_group

    silent = Silent()
    with Join([model, silent, optimizer, mine]):
        for x in batches((1, 4)[rank]):
            optimizer.zero_grad()
            mine(1.0)
            model(x).square().mean().backward()
            optimizer.step()
    return flatten(model), mine.total.item(), order


def test_joinables_that_say_nothing_follow_those_that_do():
    ranks = run(2, together)
    assert all(
        largest_gap(params, alone((1, 4), "world_size", (4, 4))) < 1e-6 and total == 5
        for params, total, _ in ranks
    )
    assert (
        ranks[0][2] == [True] * 3 and ranks[1][2] == []
    )  # the gradients are there when the one after the model is called


def undeclared():
    """Join one that announces nothing and does not say so."""
    model = DDP(network())

    class Undeclared(TorchJoinable):
        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            return JoinHook()

        join_device, join_process_group = Ours.join_device, Ours.join_process_group

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Join([model, Undeclared()]):
            for x in batches(dist.get_rank()):
                model(x).sum().backward()
    return [str(w.message) for w in warned if "announces_iterations" in str(w.message)]


def test_a_joinable_that_says_nothing_is_named_where_it_had_data():
    without_data, (message,) = run(2, undeclared)
    assert without_data == []
    assert "joinable 1, a Undeclared, announced nothing in 1 iterations" in message


def refusals():
    model, counter = DDP(network()), Counter()
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)

    class Forgot(Ours):
        def __init__(self):
            pass

    class Mute(TorchJoinable):
        announces_iterations = False

        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            return JoinHook()

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: dist.group.WORLD)

    other = dist.new_group()
    return [
        caught_error(lambda: Join([])),
        caught_error(lambda: Join([model, Counter(other)])),
        caught_error(lambda: Join([Forgot()])),
        caught_error(lambda: Join([object()])),
        caught_error(lambda: Join([model, model])),
        caught_error(lambda: Join([Mute()])),
        caught_error(lambda: Join([zero], divide_by="samples")),
        caught_error(lambda: Join([model], divide_by="batches")),
        caught_error(lambda: Join([model], policy="go on")),
        caught_error(lambda: Join([counter, network()])),
        caught_error(lambda: TorchJoin([model, Counter(other)])),
    ]


def test_what_join_refuses():
    for errors in run(2, refusals):
        kinds = [error[0] for error in errors]
        assert kinds == ["ValueError", "ValueError", "AssertionError", "TypeError"] + [
            "ValueError"
        ] * 5 + ["TypeError", "ValueError"]
        words = [
            "at least one joinable",
            "multiple process groups",
            "constructor",
            "object",
            "once",
            "notify_join_context",
            "DistributedDataParallel",
            "samples",
            "shadow",
            "Sequential",
            "multiple process groups",
        ]
        assert all(word in error[1] for word, error in zip(words, errors, strict=True))


def quiet(kind):
    """Compare filters, configurations and hooks before and after."""
    model = DDP(network(nn.BatchNorm1d(9)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    plain = SGD(model.parameters(), lr=0.1)

    synced = (
        "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else "broadcast_buffers"
    )  # older torch

    def state():
        return (
            model._join_config,
            optimizer._join_config,
            getattr(model, synced),
            len(model._forward_hooks),
            len(model._forward_pre_hooks),
            len(plain._optimizer_step_pre_hooks),
            len(plain._optimizer_step_post_hooks),
            model.require_forward_param_sync,
        )

    before, filters = state(), list(warnings.filters)
    joinables = [model, optimizer, plain] if kind is Join else [model, optimizer]
    for _ in range(2):
        with kind(joinables):
            for x in batches(1 + dist.get_rank()):
                model(x).sum().backward()
                optimizer.step()

    def fails():
        with kind(joinables):
            for x in batches(1):
                model(x).sum().backward()
            raise KeyError("mine")

    error = caught_error(fails)
    return state() == before, warnings.filters == filters, error


def test_nothing_is_left_behind():
    assert run(2, quiet, Join) == [(True, True, ("KeyError", "'mine'"))] * 2
    assert all(not same or not filters for same, filters, _ in run(2, quiet, TorchJoin))


def skewed():
    counter, heard = Counter(), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Join([counter]):
            for _ in range(1 + 1003 * dist.get_rank()):
                counter()
        heard = [str(w.message) for w in warned if "skew" in str(w.message)]
    return heard, counter.total.item()


def test_skew_is_told_once():
    (heard, total), other = run(2, skewed)
    assert (
        len(heard) == 1
        and "greater than 1000" in heard[0]
        and "rank 0" in heard[0]
        and total == 1005
        and other == ([], 1005)
    )


def disabled():
    model, counter = DDP(network()), Counter()
    with Join([model, counter], enable=False) as join:
        for x in join.loader(batches(2)):
            model(x).sum().backward()
            counter()
    return counter.total.item(), join.attendance, model._join_config.enable


def test_it_can_be_switched_off():
    assert run(2, disabled) == [(4, None, False)] * 2


def on_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    model = DDP(network(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=1e-2)
    with Join([model, optimizer], divide_by="samples") as join:
        for x in batches({1: 1, 3: 4}[dist.get_rank()], dist.get_rank() // 2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return flatten(model), join.attendance.batches


def test_subgroups():
    ranks = [rank for rank in run(4, on_a_subgroup) if rank is not None]
    assert len(ranks) == 2 and all(
        largest_gap(params, alone((1, 4), "samples", (4, 4))) < 1e-6 and roll == (1, 4)
        for params, roll in ranks
    )


def in_one_process():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer, seen = ZeroRedundancyOptimizer([parameter], SGD, lr=1.0), []
    with Join([optimizer], before_step=seen.append) as join:
        for _ in join.loader([1, 2]):
            parameter.grad = torch.ones(3)
            optimizer.step()
    return parameter.tolist(), join.attendance, len(seen)


def test_a_process_alone():
    assert in_one_process() == ([-2.0] * 3, Attendance((2,), (0,)), 2)
    with simulate(4, 0):
        assert in_one_process()[0][0] == -2.0  # which this rank owns


def copied():
    model = DDP(network())
    counter = Counter()
    with Join([model, counter]):
        inside = (
            pickle.loads(pickle.dumps(counter._join_config)),
            copy.deepcopy(counter._join_config),
        )
    return [config.enable or config.is_first_joinable for config in inside], type(
        inside[0]
    ).__name__


def test_a_copy_is_not_in_the_block():
    assert run(2, copied) == [([False, False], "_JoinConfig")] * 2


# ---- what a rank without data does ----


def policies(policy, counts, how="plain", throw=False):
    """Train by a policy; what is raised, how many iterations were done, and where."""
    rank = dist.get_rank()
    model = DDP(network(nn.BatchNorm1d(9)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    join, done, mine = (
        Join([model, optimizer], throw_on_early_termination=throw, policy=policy),
        [],
        batches(counts[rank]),
    )

    def train():
        with join:
            for x in {
                "plain": lambda: mine,
                "loader": lambda: join.loader(mine),
                "stream": lambda: join.loader(iter(mine)),
            }[how]():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                done.append(1)

    error = caught_error(train)
    model(torch.ones(2, 6))  # nothing is sent but buffers, and all ranks are here
    return error, len(done), join.attendance, flatten(model)


@pytest.mark.parametrize("counts", [(1, 5, 0), (3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("how", ["plain", "loader", "stream"])
def test_all_stop_with_the_shortest(counts, how):
    few = min(counts)
    dropped = tuple(
        n - few if how == "loader" else int(n > few) for n in counts
    )  # a rank that is asked knows of one
    for error, done, roll, params in (ranks := run(len(counts), policies, "stop", counts, how)):
        assert (
            error is None
            and done == few
            and roll == Attendance((few,) * len(counts), dropped)
            and largest_gap(params, ranks[0][3]) == 0
        )


def left_at_once():
    """Let one rank take long to begin; meanwhile the others say how many batches they have, and the
    one without any leaves."""
    rank, model = dist.get_rank(), DDP(network())
    join, done = (
        Join([model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)], policy="stop"),
        [],
    )

    def train():
        with join:
            time.sleep(0.5 * (rank == 0))
            for x in join.loader(iter(batches((1, 5, 0)[rank]))):
                model(x).square().mean().backward()
                done.append(1)

    return caught_error(train), len(done)


def mistyped():
    model = DDP(network())

    class Own(Joinable):
        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            return JoinHook()

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: dist.group.WORLD)

    return [
        caught_error(lambda: Join([model, AdamW(model.parameters())], weights="samples")),
        caught_error(lambda: Join([model], divide_by_initial_world_size=False)),
        caught_error(lambda: Join([model, Own()], weights="samples")),
    ]  # a user's own hook may take anything


def test_an_argument_that_nobody_takes_is_refused():
    for wrong, fine, own in run(2, mistyped):
        assert (
            wrong[0] == "TypeError"
            and "'weights'" in wrong[1]
            and "divide_by" in wrong[1]
            and fine is own is None
        )


def test_who_leaves_at_once_has_called_the_loader():
    assert run(3, left_at_once) == [(None, 0)] * 3


@pytest.mark.parametrize("how", ["plain", "loader", "stream"])
@pytest.mark.parametrize("throw", [True, False])
def test_all_raise_with_the_shortest(how, throw):
    ranks = run(3, policies, None if throw else "raise", (2, 4, 2), how, throw)
    for rank, (error, done, _, _) in enumerate(ranks):
        assert error[0] == "RuntimeError" and done == (0 if how == "loader" else 2)
        torchs = (
            "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            if rank == 1
            else f"Rank {rank} exhausted all inputs."
        )
        assert ("2, 4, 2" if how == "loader" else torchs) in error[1]
    assert all(
        error is None and done == 3 for error, done, _, _ in run(2, policies, "raise", (3, 3), how)
    )


# ---- knowing before ----


class Stream(IterableDataset):
    """Data of unknown length."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.ones(6) for _ in range(self.n))


def loaded(sizes, by, norm=False, drop_last=False, stream=False, counted=False):
    """Train from a DataLoader; parameters, the roll, and collectives in each iteration."""
    rank, pg = dist.get_rank(), record()
    model = DDP(network(nn.BatchNorm1d(9)) if norm else network(), process_group=pg)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, pg, lr=1e-2)
    rows = torch.cat(batches(10, rank))[: sizes[rank]]
    data = DataLoader(
        Stream(sizes[rank]) if stream else TensorDataset(rows), batch_size=4, drop_last=drop_last
    )
    sent = []
    with Join(
        [model, optimizer], divide_by=by, samples=(lambda x: len(x)) if counted else None
    ) as join:
        for batch in join.loader(data):
            with pg.recording() as log:
                (x,) = batch if isinstance(batch, list) else (batch,)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            sent.append(len(log.collectives()))
    return flatten(model), join.attendance.batches, sent[2:]


@pytest.mark.parametrize("by", ["world_size", "active", "samples"])
def test_where_lengths_are_known_nothing_is_asked(by):
    sizes = (5, 17, 0, 8)
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    data = [
        [*torch.cat(batches(10, rank))[:n].split(4)] if n else [] for rank, n in enumerate(sizes)
    ]
    for k in range(5):
        there = [mine[k] for mine in data if len(mine) > k]
        optimizer.zero_grad()
        if by == "samples":
            model(torch.cat(there)).square().mean().backward()
        else:
            (
                sum(model(x).square().mean() for x in there) / (len(there) if by == "active" else 4)
            ).backward()
        optimizer.step()
    known, counted, stream = (
        run(4, loaded, sizes, by, **how) for how in ({}, {"counted": True}, {"stream": True})
    )
    assert all(
        largest_gap(params, flatten(model)) < 1e-6 and roll == (2, 5, 0, 2)
        for params, roll, _ in [*known, *counted]
    )
    assert all(roll == (2, 5, 0, 2) for _, roll, _ in stream)
    assert [n + (by == "samples") for n in known[1][2]] == counted[1][2] and [
        n + (by != "world_size") for n in known[1][2]
    ] == stream[1][2]


def test_buffers_and_incomplete_batches_of_a_loader():
    ranks = run(3, loaded, (6, 18, 0), "samples", norm=True)
    assert all(
        largest_gap(params, ranks[1][0]) == 0 and roll == (2, 5, 0) for params, roll, _ in ranks
    )
    assert all(
        roll == (1, 4, 0) for _, roll, _ in run(3, loaded, (5, 17, 0), "samples", drop_last=True)
    )


def misused(how):
    rank, model = dist.get_rank(), DDP(network())

    def train():
        with Join([model], divide_by="samples") as join:
            if how == "skipped" and rank == 1:
                return
            for k, x in enumerate(join.loader(DataLoader(torch.cat(batches(4)), batch_size=4))):
                if how == "halves":
                    x = x[:2]
                if how == "left" and rank == 1 and k == 1:
                    break
                model(x).square().mean().backward()
            if how == "twice":
                next(join.loader([1]))

    return caught_error(train)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("skipped", "RuntimeError", "without calling join.loader()"),
        ("halves", "ValueError", "whole batches"),
        ("twice", "RuntimeError", "one loop"),
        ("left", "RuntimeError", "left its loop after 2 of 4 batches"),
    ],
)
def test_a_loader_that_is_misused(how, kind, words):
    errors = run(2, misused, how)
    assert all(error is not None for error in errors) and any(
        error[0] == kind and words in error[1] for error in errors
    ), errors


# ---- when something fails ----


class Own(Exception):
    """A user's."""


def fails(how, kind="ours", seconds=100):
    """Raise in one rank's loop; what each rank is told, and how long it took."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    model = DDP(network(), process_group=group)
    optimizer = optimizer_of(kind, model.parameters(), group)

    def train():
        with Join([model, optimizer], divide_by="samples"):
            for k, x in enumerate(batches((2, 6, 6)[rank])):
                optimizer.zero_grad()
                if k == 3 and (how == "all" or rank == 2):
                    if how == "consolidate":
                        optimizer.consolidate_state_dict()
                    if how == "nested":
                        with Join([model, optimizer]):
                            pass
                    raise Own(f"in the data of rank {rank}")
                if how in ("consolidate", "nested") and k == 3:
                    if how == "consolidate":
                        optimizer.consolidate_state_dict()
                    with Join([model, optimizer]):
                        pass
                model(x).square().mean().backward()
                optimizer.step()

    begin = time.monotonic()
    error = caught_error(train)
    took = time.monotonic() - begin
    dist.barrier()  # the job's own group is whole
    return error, took, model._join_config.enable, len(model._forward_hooks)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_an_error_in_one_loop_reaches_all_ranks(kind):
    ranks = run(3, fails, "one", kind)
    assert ranks[2][0] == ("Own", "in the data of rank 2") and ranks[2][1] < 50
    for error, took, left, hooks in ranks[:2]:
        assert (
            error[0] == "RuntimeError"
            and "rank 2 left the Join block after 3 iterations: Own: in the data of rank 2"
            in error[1]
        )
        assert took < 50 and not left and not hooks  # long before the group's time limit


def test_an_error_on_all_ranks_with_data_is_theirs():
    ranks = run(3, fails, "all")
    assert [error[0] for error, *_ in ranks] == ["RuntimeError", "Own", "Own"]


@pytest.mark.parametrize(
    ("how", "words"),
    [("consolidate", "consolidate_state_dict"), ("nested", "entered a Join block inside")],
)
def test_what_ranks_without_data_cannot_follow_is_an_error(how, words):
    ranks = run(3, fails, how)
    assert all(error[0] == "RuntimeError" and took < 50 for error, took, *_ in ranks) and any(
        words in error[1] for error, *_ in ranks
    ), ranks


def nested():
    rank = dist.get_rank()
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    rolls = []

    def train(n, first=0):
        for x in batches(n + first)[first:]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with Join([model, optimizer]) as outer:
        train(2)
        assert caught_error(outer.__enter__) == (
            "RuntimeError",
            "this Join block is running; make another one to nest",
        )
        for _ in range(2):
            with Join([optimizer, model], divide_by="active") as inner:
                train(1 + rank)
            rolls.append(inner.attendance.batches)
        train(1 + 2 * rank)
    again = outer
    with again:
        train(2 - rank)
    return flatten(model), rolls, again.attendance.batches


def test_blocks_may_be_nested_and_entered_again():
    ranks = run(2, nested)
    assert largest_gap(ranks[0][0], ranks[1][0]) == 0 and all(
        rolls == [(1, 2)] * 2 and again == (2, 1) for _, rolls, again in ranks
    )


def disagree(how):
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    if how == "lr":
        optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    first = dist.get_rank() == 0

    def train():
        with Join(
            [optimizer, model] if how == "joinables" and first else [model, optimizer],
            policy="stop" if how == "policy" and first else "shadow",
        ):
            pass

    return caught_error(train)


@pytest.mark.parametrize("how", ["lr", "joinables", "policy"])
def test_ranks_that_disagree_are_told(how):
    for error in run(2, disagree, how):
        assert error[0] == "ValueError" and "entering Join" in error[1]


def unfollowed(how):
    between = {"norm": [nn.SyncBatchNorm(9)]}.get(how, [])
    model = DDP(network())
    if between:
        model.module.add_module("1", between[0])
    if how == "hook":
        model._register_buffer_comm_hook(None, lambda *_: None)

    def train():
        with Join([model]):
            pass

    return caught_error(train)


@pytest.mark.parametrize(("how", "words"), [("norm", "SyncBatchNorm '1'"), ("hook", "buffer hook")])
def test_what_cannot_be_shadowed_is_refused_on_entry(how, words):
    for error in run(2, unfollowed, how):
        assert error[0] == "ValueError" and words in error[1] and "policy='stop'" in error[1]


def reads():
    """Follow a rank that announces 300 events and waits for nobody."""
    log = EventLog(EventStore(Ranks(), "test"))
    log.announce_from(0)
    if dist.get_rank() == 0:
        for i in range(300):
            log.append(0, "hook", i, {})
        log.prune()
        log.depart()
        return None
    log.feed.waiting_since = time.monotonic() - 2
    log.depart()
    while not (said := explain_wait(log)):
        pass
    log.feed.interrupt(log.number, said)
    return caught_error(log.next)


def test_a_rank_that_lags_too_far_is_told():
    assert "more than 128 events ahead" in run(2, reads)[1][1]


def notes_left(known):
    from zero_nb.comm.agreement import _store

    model = DDP(network())
    keys = []
    for _ in range(4):
        with Join([model], divide_by="samples") as join:
            for x in (join.loader if known else iter)(batches(1 + 3 * dist.get_rank())):
                model(x).sum().backward()
        dist.barrier()
        keys.append(_store(Group()).num_keys())
        dist.barrier()
    return keys[-1] - keys[0]


@pytest.mark.parametrize("known", [True, False])
def test_the_store_does_not_fill_up(known):
    assert run(2, notes_left, known) == [0, 0]


class Centred(nn.Module):
    """Subtracts the mean over all ranks, and says what a rank without data sends."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def send(self, x):
        sums = torch.cat([x.sum(0), torch.tensor([float(len(x))])])
        dist.all_reduce(sums)
        self.counts.append(int(sums[-1]))
        return sums[:-1] / sums[-1]

    @shadowed_by(lambda self: self.send(torch.zeros(0, 6)))
    def forward(self, x):
        return x - self.send(x.detach())


def declared(counts):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(Centred(), nn.Linear(6, 5)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    with Join([model, optimizer], divide_by="samples"):
        for x in batches(counts[dist.get_rank()]):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    model.module[0].send(torch.ones(1, 6))  # outside, nobody listens
    return flatten(model), model.module[0].counts


def test_a_module_that_declares_its_collectives():
    ranks = run(3, declared, (1, 3, 0))
    assert all(
        counts == [8, 4, 4, 3] and largest_gap(params, ranks[0][0]) == 0 for params, counts in ranks
    )


def statically(**options):
    rank, model = dist.get_rank(), DDP(network(), **options)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    with Join([model, optimizer], divide_by="samples"):
        for x in batches((3, 5)[rank]):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return flatten(model)


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_settings_of_the_model(options):
    assert all(
        largest_gap(params, alone((3, 5), "samples", (4, 4))) < 1e-6
        for params in run(2, statically, **options)
    )


# ---- steps inside backward ----


def exact(state, bucket):
    """Average gradients in a comm hook that only its user knows."""
    return default_hooks.allreduce_hook(state, bucket)


def prepared(how, net, zero, options, group=None, bucket_cap_mb=1e-4, **ddp):
    """Prepare a network in one of the ways in which steps are taken inside backward: what is
    called, and what can be detached."""
    if how == "parallel":
        handle = data_parallel(net, zero, **options)
        return net, handle, handle
    model = DDP(net, process_group=group, bucket_cap_mb=bucket_cap_mb, **ddp)
    if not how.startswith("hook"):
        return model, model, overlap(model, zero, **options)
    made = {"hook": hook_with_zero_step, "hook interleaved": hook_with_zero_step_interleaved}[how](
        default_hooks.allreduce_hook, model, zero
    )
    model.register_comm_hook(None, made)
    return model, model, made.overlap


ORDERS = {
    "model first": lambda model, zero: [model, zero],
    "optimizer first": lambda model, zero: [zero, model],
    "model alone": lambda model, _: [model],
}


def driven(
    counts,
    by,
    how="overlap",
    options=None,
    order="model first",
    calls=True,
    kind=AdamW,
    every=1,
    ddp=None,
    layers=(),
    group=None,
    rounds=1,
):
    """Train with steps inside backward; parameters, buffers and the optimizer's state."""
    rank, options = dist.get_rank(group), options or {}
    net = network(*layers)
    zero = ZeroRedundancyOptimizer(net.parameters(), kind, group, lr=1e-2)
    model, joinable, handle = prepared(how, net, zero, options, group, **(ddp or {}))
    for _ in range(rounds):
        with Join(ORDERS[order](joinable, zero), divide_by=by) as join:
            for k, x in enumerate(batches(counts[rank], rank, 4 + rank)):
                with nullcontext() if (k + 1) % every == 0 else joinable.no_sync():
                    (model(x).square().mean() / every).backward()
                if calls and (k + 1) % every == 0:
                    zero.step()
                if "hook" in options:
                    zero.zero_grad()  # gradients that a hook of the user's has averaged stay
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


WAYS = [
    ("overlap", {}),
    ("overlap", {"interleaved": True}),
    ("overlap", {"interleaved": True, "lag": 0}),
    ("overlap", {"hook": exact}),
    ("hook", {}),
    ("hook interleaved", {}),
    ("parallel", {}),
    ("parallel", {"interleaved": True, "hidden": True}),
    ("parallel", {"hidden": True}),
    ("parallel", {"find_unused_parameters": True}),
    ("parallel", {"bucket_cap_mb": 1e-4, "interleaved": True}),
]
each_way = pytest.mark.parametrize(
    ("how", "options"), WAYS, ids=lambda v: v if isinstance(v, str) else " ".join(v) or "plain"
)
one_way = pytest.mark.parametrize(
    ("how", "options"),
    [WAYS[0], WAYS[1], WAYS[6], WAYS[7]],
    ids=lambda v: v if isinstance(v, str) else " ".join(v) or "plain",
)


@each_way
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
def test_steps_inside_backward_are_those_of_one_process(how, options, counts, by):
    wanted, state = reference(counts, by)
    same(run(len(counts), driven, counts, by, how, options), wanted, state=state)


@one_way
@pytest.mark.parametrize("order", ["optimizer first", "model alone"])
@pytest.mark.parametrize("calls", [True, False])
def test_the_optimizer_may_be_anywhere_and_step_need_not_be_called(how, options, order, calls):
    counts = (1, 5, 0)
    wanted, state = reference(counts, "samples")
    same(run(3, driven, counts, "samples", how, options, order, calls), wanted, state=state)


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


@one_way
@pytest.mark.parametrize("kind", [Momentum, Adafactor, Counting])
@pytest.mark.filterwarnings("ignore:.*counts its steps")
def test_any_class_of_optimizers_steps_without_data(how, options, kind):
    counts = (0, 4, 2)
    wanted, state = reference(counts, "active", kind)
    same(run(3, driven, counts, "active", how, options, kind=kind), wanted, state=state)


@one_way
def test_blocks_with_steps_inside_backward_may_follow_each_other(how, options):
    wanted, state = reference((2, 5), "samples", rounds=3)
    same(run(2, driven, (2, 5), "samples", how, options, rounds=3), wanted, state=state)


@one_way
@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_what_a_rank_has_accumulated_is_sent_where_steps_are_inside_backward(how, options, by):
    counts = (6, 2, 3, 9)
    same(run(4, driven, counts, by, how, options, every=3), reference(counts, by, every=3)[0])


@pytest.mark.parametrize(
    ("how", "options"),
    [("overlap", {}), ("parallel", {}), ("hook", {}), ("overlap", {"hook": exact})],
)
def test_clipping_inside_backward(how, options):
    counts = (4, 1, 0)
    if how == "hook":
        how, options = "overlap", {"norm_type": 2.0, "hook": default_hooks.allreduce_hook}
    same(
        run(3, driven, counts, "samples", how, {**options, "max_grad_norm": 0.05}),
        reference(counts, "samples", clip=0.05)[0],
    )


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
        run(3, driven, counts, "samples", "overlap", options, ddp=buckets),
        reference(counts, "samples")[0],
        0.2 if hook == "power" else 2e-2,
    )


@pytest.mark.parametrize(
    "options",
    [{"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("counts", [(2, 6, 1), (7, 1, 4)], ids=str)
def test_settings_of_a_model_whose_steps_are_inside_backward(options, interleaved, counts):
    same(
        run(3, driven, counts, "samples", "overlap", {"interleaved": interleaved}, ddp=options),
        reference(counts, "samples")[0],
    )


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


def on_two(how, options):
    group = dist.new_group([1, 3])
    return driven((1, 4), "samples", how, options, group=group) if dist.get_rank() % 2 else None


@one_way
def test_subgroups_whose_steps_are_inside_backward(how, options):
    wanted, state = reference((1, 4), "samples")
    same([rank for rank in run(4, on_two, how, options) if rank is not None], wanted, state=state)


def unused(how, interleaved, counts):
    rank = dist.get_rank()
    net = Branches()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2, weight_decay=0.1)
    options = {
        "interleaved": interleaved,
        **({"find_unused_parameters": True} if how == "parallel" else {}),
    }
    model, joinable, _ = prepared(
        how, net, zero, options, **({} if how == "parallel" else {"find_unused_parameters": True})
    )
    with Join([joinable, zero], divide_by="samples"):
        for k, x in enumerate(batches(counts[rank], size=4 + rank)):
            model(x, which=(k + rank) % 2)["out"].square().mean().backward()
            zero.step()
    return flatten(net)


@pytest.mark.parametrize("how", ["overlap", "parallel"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("counts", [(1, 5, 0), (0, 6, 2)], ids=str)
def test_unused_parameters_where_steps_are_inside_backward(how, interleaved, counts):
    wanted = alone_with_branches(counts)
    ranks = run(3, unused, how, interleaved, counts)
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


def scheduled_driven(how, options, counts):
    rank, net = dist.get_rank(), network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    model, joinable, _ = prepared(how, net, zero, options)
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


@one_way
def test_learning_rates_where_steps_are_inside_backward(how, options):
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
    ranks = run(3, scheduled_driven, how, options, counts)
    same(ranks, flatten(model))
    assert (
        ranks[0][2][1] == 5 and abs(ranks[0][2][0].item() - optimizer.param_groups[0]["lr"]) < 1e-9
    )


def scaled(how, counts, bad):
    rank, net = dist.get_rank(), network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    model, joinable, _ = prepared(how, net, zero, {"scaler": scaler})
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


@pytest.mark.parametrize("how", ["overlap", "parallel"])
def test_a_scale_reaches_ranks_without_data(how):
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
    same(run(3, scaled, how, counts, bad), flatten(model), 1e-5)


def with_norms(how, options, counts, by):
    """Train a network with batch norm, and tell what its statistics are."""
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9))
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    model, joinable, handle = prepared(how, net, zero, options)
    with Join([joinable], divide_by=by):
        for x in batches(counts[rank]):
            model(x).square().mean().backward()
    if how == "parallel":
        handle.wait()
    return flatten(net), True, [b.clone() for b in net.buffers()], None


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("overlap", {}),
        *(("parallel", {"buffers": kind}) for kind in ("broadcast", "average", "local")),
    ],
    ids=str,
)
@pytest.mark.parametrize("counts", [(0, 5, 2), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("by", ["world_size", "samples"])
def test_statistics_are_the_last_joiners_where_steps_are_inside_backward(how, options, counts, by):
    ranks = run(3, with_norms, how, options, counts, by)
    last = max(range(3), key=counts.__getitem__)
    same(ranks, ranks[last][0])
    assert ranks[0][2][2].item() == max(counts) and not torch.equal(ranks[0][2][0], torch.zeros(9))


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


def policies_driven(policy, how, options, counts):
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9))
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    model, joinable, handle = prepared(how, net, zero, options)
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


@one_way
@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_policies_where_steps_are_inside_backward(how, options, policy):
    for error, done, roll, params in (
        ranks := run(3, policies_driven, policy, how, options, (2, 4, 3))
    ):
        assert done == 2 and largest_gap(params, ranks[0][3]) == 0
        if policy == "stop":
            assert error is None and roll == Attendance((2, 2, 2), (0, 1, 1))
        else:
            assert error[0] == "RuntimeError" and "exhausted" in error[1]


def counted_driven(how, options, by, norm, policy):
    """Count collectives in each iteration before, inside and after a block."""
    pg, net = record(), network(nn.BatchNorm1d(9)) if norm else network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, pg, lr=1e-2)
    model, joinable, _ = prepared(how, net, zero, options, pg)

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


@one_way
@pytest.mark.parametrize(
    ("by", "norm", "policy"),
    [
        ("world_size", False, "shadow"),
        ("samples", False, "shadow"),
        ("active", True, "shadow"),
        ("samples", True, "stop"),
    ],
)
def test_a_block_sends_at_most_a_count_of_its_own_where_steps_are_inside_backward(
    how, options, by, norm, policy
):
    counts = by != "world_size" or norm or policy != "shadow"
    for before, inside, after in run(2, counted_driven, how, options, by, norm, policy):
        assert {before + counts} == set(inside) and {before} == set(after)


def nested_driven(how, options):
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9))
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    model, joinable, handle = prepared(how, net, zero, options)

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


@one_way
def test_nested_blocks_where_steps_are_inside_backward(how, options):
    ranks = run(2, nested_driven, how, options)
    assert largest_gap(ranks[0][0], ranks[1][0]) == 0
    assert all(
        inner == (1, 2) and left == [False, False, 2 * (how == "parallel")] and after == (0, 0)
        for _, inner, left, after in ranks
    )


def fails_driven(how, options, where):
    rank = dist.get_rank()
    group, net = dist.new_group(timeout=timedelta(seconds=100)), network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, group, lr=1e-2)
    model, joinable, handle = prepared(how, net, zero, options, group)

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


@one_way
@pytest.mark.parametrize("where", ["loop", "backward"])
def test_an_error_where_steps_are_inside_backward(how, options, where):
    ranks = run(3, fails_driven, how, options, where)
    assert ranks[2][0][0] == "Own" and f"of rank {2}" in ranks[2][0][1]
    for error, took in ranks[:2]:
        assert (
            error[0] == "RuntimeError"
            and "rank 2" in error[1]
            and "Own: in" in error[1]
            and took < 50
        ), error


def refused_driven(how, case):
    net = network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    _, joinable, _ = prepared(how, net, zero, {})
    if case == "norm":
        net.add_module("1", nn.SyncBatchNorm(9))
    other = DDP(network())
    made = {
        "alone": lambda: Join([zero]),
        "other": lambda: Join([zero, other]),
        "before": lambda: Join([joinable, zero], before_step=print),
        "two": lambda: Join([joinable, other]),
        "norm": lambda: Join([joinable]),
    }

    def enter():
        with made[case]():
            pass

    return caught_error(enter)


@pytest.mark.parametrize("how", ["overlap", "parallel"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("alone", "add the model"),
        ("other", "add the model"),
        ("before", "max_grad_norm"),
        ("two", "one model"),
        ("norm", "SyncBatchNorm '1'"),
    ],
)
def test_what_cannot_be_followed_where_steps_are_inside_backward(how, case, words):
    for error in run(2, refused_driven, how, case):
        assert error[0] == "ValueError" and words in error[1]


# ---- torch's Join, with steps inside backward ----


def in_torchs(how, options, counts, order="model first", norm=False, ddp=None):
    rank, net = dist.get_rank(), network(nn.BatchNorm1d(9)) if norm else network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    model, joinable, handle = prepared(how, net, zero, options, **(ddp or {}))
    with warnings.catch_warnings(), TorchJoin(ORDERS[order](joinable, zero)):
        for x in batches(counts[rank], size=4 + rank):
            model(x).square().mean().backward()
            zero.step()
            if "hook" in options:
                zero.zero_grad()
    if how == "parallel":
        handle.wait()
    return flatten(net), True, [b.clone() for b in net.buffers()], None


@each_way
@pytest.mark.parametrize("order", ["model first", "model alone"])
def test_torchs_join_with_steps_inside_backward(how, options, order):
    counts = (0, 6, 2)
    same(run(3, in_torchs, how, options, counts, order), reference(counts, "world_size")[0])


@pytest.mark.parametrize("ddp", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_torchs_join_with_settings_of_the_model(ddp, interleaved):
    counts = (6, 1, 3)
    same(
        run(3, in_torchs, "overlap", {"interleaved": interleaved}, counts, ddp=ddp),
        reference(counts, "world_size")[0],
    )


@pytest.mark.parametrize(
    ("how", "options"),
    [("overlap", {}), ("parallel", {}), ("parallel", {"buffers": "average"})],
    ids=str,
)
def test_torchs_join_sends_statistics(how, options):
    ranks = run(3, in_torchs, how, options, (0, 4, 2), norm=True)
    same(ranks, ranks[1][0])
    assert ranks[0][2][2].item() == 4


def torchs_refused(how, case):
    group, net = dist.new_group(), network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, group, lr=1e-2)
    options = {"scaler": torch.amp.GradScaler("cpu")} if case == "scaler" else {}
    model, joinable, handle = prepared(
        how,
        net,
        zero,
        options,
        group,
        **({"find_unused_parameters": True} if case == "unused" else {}),
    )
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
    ("how", "case"),
    [
        *(
            (how, case)
            for how in ("overlap", "parallel")
            for case in ("order", "zero", "scaler", "weights")
        ),
        ("overlap", "unused"),
        ("parallel", "forwards"),
    ],
)
def test_what_torchs_join_cannot_follow_is_refused(how, case):
    errors = run(2, torchs_refused, how, case)
    assert all(error is not None for error in errors) and any(
        "use zero_nb's Join" in error[1] for error in errors
    ), errors


def late(how, by):
    """Let the rank that others follow take its time, while one with data has come to the first collective and waits."""
    rank, net = dist.get_rank(), network()
    zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    model, joinable, _ = prepared(how, net, zero, {}, None)
    with Join([joinable, zero], divide_by=by) as join:
        for k, x in enumerate(batches((0, 2, 3)[rank], rank, 4)):
            if rank == 1 and k == 0:
                time.sleep(2.5)
            model(x).square().mean().backward()
            zero.step()
    return join.attendance.batches, flatten(net)


@pytest.mark.parametrize("by", ["world_size", "active"])
@pytest.mark.parametrize("how", ["overlap", "parallel"])
def test_ranks_with_data_may_be_apart_in_time(how, by):
    ranks = run(3, late, how, by)
    assert all(counts == (0, 2, 3) and params.equal(ranks[0][1]) for counts, params in ranks)
