"""Join: who had data when, what is sent, and what becomes of the model."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap
from common.joining import (
    Branches,
    alone,
    alone_with_branches,
    batches,
    network,
    optimizer_of,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.join.attendance import (
    Attendance,
    draw_attendance,
)
from zero_nb.join.join import Join
from zero_nb.join.own_joinables import shadowed_by
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- the value ----


def test_a_roll_tells_who_had_data_when():
    roll = Attendance((5, 1, 17, 0), (0, 2, 0, 0), ((4, 3), (4, 4), None, (4, 0)))
    assert [roll.active(i) for i in (0, 1, 5, 17)] == [(0, 1, 2), (0, 2), (2,), ()]
    assert [roll.samples(i)[:2] for i in (0, 1, 4, 5)] == [(4, 4), (4, 0), (3, 0), (0, 0)]
    assert str(roll).splitlines()[1] == "rank 1 #xx.............. 1, 2 dropped"
    assert (
        str(draw_attendance(roll)).count("<rect") == 5 + 1 + 17 + 1 + 3
        and str(draw_attendance(Attendance((100_000, 1)))).count("<rect") < 5
        and "<svg" in str(draw_attendance(Attendance((0, 0))))
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


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "counts", [(0, 1, 5, 17), (17, 5, 1, 0), (3, 3, 3), (2, 0), (4, 2, 4), (3,), (0, 0)], ids=str
)
@pytest.mark.parametrize("by", ["world_size", "active", "samples"])
def test_uneven_training_is_that_of_one_process(counts, by):
    ranks = run(len(counts), uneven, counts, by)
    assert all(roll == counts and not left for _, roll, left in ranks)
    assert all(largest_gap(params, alone(counts, by)) < 1e-6 for params, _, _ in ranks)


@pytest.mark.turns(3)
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


@pytest.mark.turns(3)
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


@pytest.mark.turns(3)
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


class Halving(SGD):
    """Changes the gradient, and leaves the step to the class it is derived from."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= 2
        return super().step(closure)


def derived(counts):
    """A step inside a step: torch calls the hooks of the optimizer in both."""
    made = SGD([torch.zeros(1, requires_grad=True)])  # from the first SGD on its step calls hooks
    model = DDP(network())
    optimizer = Halving(model.parameters(), lr=0.2)
    heard = []
    with Join([model, optimizer], before_step=heard.append) as join:
        for x in batches(counts[dist.get_rank()]):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert all(one is optimizer for one in heard) and not made.state
    return flatten(model), join.attendance.batches, len(heard)


def test_a_class_that_leaves_its_step_to_another_steps_once():
    counts = (1, 4)
    ranks = run(2, derived, counts)
    whole = alone(counts, "world_size", (4, 4), kind=lambda params, lr: SGD(params, lr=0.1))
    assert all(largest_gap(params, whole) < 1e-6 for params, _, _ in ranks)
    assert [rest for _, *rest in ranks] == [[counts, 4]] * 2


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
