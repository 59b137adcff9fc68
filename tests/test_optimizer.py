"""The sharded optimizer against the unsharded one, and its errors on every rank."""

import gc
import os
import signal
import tempfile
from datetime import timedelta
from functools import partial

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from common import caught_error, run_each
from common.afresh import measures_memory, run_afresh
from common.counting import calls
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.backward.ddp_buckets import plan_buckets
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.param_specs import specs
from zero_nb.optim.pieces import Piece
from zero_nb.plan.policies import even
from zero_nb.plan.shards import ShardPlan, Span

CASES = {
    "AdamW-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW-plain": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "AdamW-amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW-maximize": (torch.optim.AdamW, {"lr": 1e-2, "maximize": True, "foreach": False}),
    "Adam-fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "Adam-plain": (torch.optim.Adam, {"lr": 1e-2, "foreach": False, "weight_decay": 0.1}),
    "SGD-fused": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True}),
    "SGD-maximize": (
        torch.optim.SGD,
        {"lr": 1e-2, "maximize": True, "dampening": 0.1, "momentum": 0.5, "weight_decay": 0.1},
    ),
    "SGD-nesterov": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": False},
    ),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "foreach": False}),
    "RMSprop-foreach": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "foreach": False}),
    "Adagrad-foreach": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.01, "foreach": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}
STEPS, GLOBAL_BATCH = 20, 12  # 12 divides by 1, 2, 3 and 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 33),
        nn.Tanh(),
        nn.Linear(33, 17, bias=False),
        nn.LayerNorm(17),
        nn.Linear(17, 7),
    )


def train(model, optimizer, rank, size, steps=STEPS):
    """Train on this rank's rows of a global batch that does not depend on the number of ranks."""
    data = torch.Generator().manual_seed(5)
    for _ in range(steps):
        batch = torch.randn(GLOBAL_BATCH, 20, generator=data)
        optimizer.zero_grad()
        model(batch.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def owned(zero):
    """Give what this rank owns: the index of each parameter, and whether it owns all of it."""
    pieces = [piece for shard in zero.shards for piece in shard.pieces]
    return [
        (span.param, span.numel == p.numel())
        for piece in pieces
        for span, p in zip(piece.spans, piece.params, strict=True)
    ]


def difference(these, those) -> float:
    """Largest difference, relative to the largest value of each parameter."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(these, those, strict=True)
    )


def beside_ddp():
    """Every case: sharded against unsharded under DDP, the same gradients on both sides."""
    rank, size, out = dist.get_rank(), dist.get_world_size(), {}
    for name, (kind, options) in CASES.items():
        plain, sharded = DDP(network()), DDP(network())
        reference = train(plain, kind(plain.parameters(), **options), rank, size)
        zero = ZeroRedundancyOptimizer(sharded.named_parameters(), kind, **options)
        ours = train(sharded, zero, rank, size)
        elements = sum(
            v.numel()
            for s in zero.optim.state.values()
            for v in s.values()
            if torch.is_tensor(v) and v.dim()
        )
        keys = (
            sum(
                torch.is_tensor(v) and v.dim() > 0
                for v in next(iter(zero.optim.state.values())).values()
            )
            if elements
            else 0
        )
        out[name] = (
            difference(ours, reference),
            elements,
            keys,
            torch.cat([p.flatten() for p in ours]),
        )
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_the_unsharded_optimizer_on_the_same_gradients(size):
    total = sum(p.numel() for p in network().parameters())
    ranks = run(size, beside_ddp)
    for name in CASES:
        assert max(rank[name][0] for rank in ranks) <= 1e-6, name
        assert all(rank[name][3].equal(ranks[0][name][3]) for rank in ranks), (
            f"{name}: replicas differ"
        )
        keys = ranks[0][name][2]
        assert sum(rank[name][1] for rank in ranks) == keys * total, (
            f"{name}: state is not held exactly once"
        )
        assert max(rank[name][1] for rank in ranks) <= keys * (total / size + 16), (
            f"{name}: state is not full / N"
        )


# One process on the whole batch adds gradients in another order than ranks do: about 1e-7 relative
# a step in float32. SGD passes that on as it is.
# Adam-like steps divide by the gradient's own size, so elements whose gradient is nearly zero
# magnify it; in float64 the same noise is 1e-16
# and nothing else remains, which is what this test looks at.
ONE_PROCESS = ["AdamW-fused", "Adam-plain", "SGD-fused", "RMSprop", "Adagrad"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_one_process_on_the_whole_batch(size):
    def ranks(name):
        kind, options = CASES[name]
        model = DDP(network().double())
        zero = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
        return whole_batch(model, zero, dist.get_rank(), dist.get_world_size())

    for name, found in run_each(size, ranks, {name: (name,) for name in ONE_PROCESS}).items():
        kind, options = CASES[name]
        model = network().double()
        whole = whole_batch(model, kind(model.parameters(), **options))
        assert max(difference(mine, whole) for mine in found) <= 1e-6, name


def whole_batch(model, optimizer, rank=0, size=1):
    data = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        batch = torch.randn(GLOBAL_BATCH, 20, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        model(batch.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["SGD-nesterov", "Adagrad", "AdamW-fused"])
def test_equals_one_process_on_the_whole_batch_in_float32(name):
    kind, options = CASES[name]
    model = network()
    whole = train(model, kind(model.parameters(), **options), 0, 1)

    def ranks():
        model = DDP(network())
        return train(
            model,
            ZeroRedundancyOptimizer(model.parameters(), kind, **options),
            dist.get_rank(),
            dist.get_world_size(),
        )

    def plain():
        model = DDP(network())
        return train(
            model, kind(model.parameters(), **options), dist.get_rank(), dist.get_world_size()
        )

    ours, unsharded = run(2, ranks)[0], run(2, plain)[0]
    assert difference(ours, whole) <= max(
        1e-6, 1.5 * difference(unsharded, whole)
    )  # no further from one process than DDP itself is


WEIGHT = nn.Parameter(torch.zeros(4, 4))


def stepped_once(optimizer):
    optimizer.step()
    return optimizer


BAD = {
    "no parameters": (
        lambda: ZeroRedundancyOptimizer([], torch.optim.AdamW),
        "ValueError",
        "empty parameter list",
    ),
    "one tensor": (
        lambda: ZeroRedundancyOptimizer(WEIGHT, torch.optim.AdamW),
        "TypeError",
        "iterable of Tensors",
    ),
    "a non-tensor": (
        lambda: ZeroRedundancyOptimizer([WEIGHT, 3], torch.optim.AdamW),
        "TypeError",
        "can only optimize Tensors",
    ),
    "not a leaf": (
        lambda: ZeroRedundancyOptimizer([WEIGHT * 2], torch.optim.AdamW),
        "ValueError",
        "non-leaf",
    ),
    "sparse": (
        lambda: ZeroRedundancyOptimizer(
            [nn.Parameter(torch.zeros(3, 3).to_sparse())], torch.optim.AdamW
        ),
        "ValueError",
        "only dense",
    ),
    "overlapping": (
        lambda: ZeroRedundancyOptimizer(
            [torch.zeros(1).expand(4).requires_grad_()], torch.optim.AdamW
        ),
        "ValueError",
        "must be dense",
    ),
    "unknown option": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, momentun=1),
        "TypeError",
        "momentun",
    ),
    "bad value": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, lr=-1.0),
        "ValueError",
        "Invalid learning rate",
    ),
    "not a class": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], "AdamW"),
        "TypeError",
        "must be a class",
    ),
    "an instance": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.SGD([WEIGHT])),
        "TypeError",
        "must be a class",
    ),
    "couples everything": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.LBFGS),
        "ValueError",
        "cannot be stepped apart",
    ),
    "unknown shard": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, shard="halves"),
        "ValueError",
        "'halves'",
    ),
    "bucket size": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, bucket_cap_mb=0),
        "ValueError",
        "must be above 0",
    ),
    "twice": (
        lambda: ZeroRedundancyOptimizer(
            [{"params": [WEIGHT]}, {"params": [WEIGHT]}], torch.optim.AdamW
        ),
        "ValueError",
        "more than one parameter group",
    ),
    "frozen to": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW).consolidate_state_dict(to=5),
        "ValueError",
        "must be a rank of the group",
    ),
    "no state": (
        lambda: stepped_once(ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW)).state_dict(),
        "RuntimeError",
        "consolidate_state_dict",
    ),
    "stranger's group": (
        lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, "group"),
        "Exception",
        "",
    ),
}


def all_bad():
    return {name: caught_error(f) for name, (f, _, _) in BAD.items()}


def test_bad_input_is_one_clear_error_on_every_rank():
    for rank in run(3, all_bad):
        for name, (_, kind, words) in BAD.items():
            assert rank[name] is not None, f"{name}: accepted"
            got, message = rank[name]
            assert kind in (got, "Exception") and words in message, f"{name}: {got}: {message}"


@pytest.mark.parametrize(
    "name",
    [
        "no parameters",
        "a non-tensor",
        "sparse",
        "unknown option",
        "bad value",
        "couples everything",
    ],
)
def test_bad_input_on_one_rank_is_an_error_on_all(name):
    f, kind, words = BAD[name]
    good = lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW)
    for got, message in run(3, lambda: caught_error(f if dist.get_rank() == 1 else good)):
        assert got == kind and words in message


def nodes_differ(what):
    """Let the second of two nodes, or its last rank, do something else than the first; what every
    rank is told, and whether they can go on."""
    other, last, levels, params = (
        dist.get_rank() > 1,
        dist.get_rank() == 3,
        two_level(2),
        list(network().parameters()),
    )

    def made(given=params, **options):
        return ZeroRedundancyOptimizer(given, torch.optim.AdamW, levels, **options)

    def stepped(zero):
        for p in params:
            p.grad = torch.ones_like(p)
        zero.step()

    def changed(zero):
        zero.param_groups[0]["lr"] = 0.2 if other else 0.1
        return zero

    acts = {
        "options": lambda: made(lr=0.2 if other else 0.1),
        "order": lambda: made(params[::-1] if other else params),
        "one rank": lambda: made(lr=-last),
        "settings": lambda: made(shard="whole" if other else "even"),
        "step": lambda: stepped(changed(made())),
        "add": lambda: made().add_param_group({"params": [nn.Parameter(torch.zeros(3 + other))]}),
        "load": (
            lambda: made().load_state_dict(
                torch.optim.AdamW(params, lr=0.2 if other else 0.1).state_dict()
            )
        ),
    }
    said = caught_error(acts[what])
    stepped(made())
    return said


@pytest.mark.parametrize(
    "what", ["options", "order", "one rank", "settings", "step", "add", "load"]
)
def test_nodes_that_differ_are_told_on_every_rank(what):
    for rank, (kind, message) in enumerate(run(4, nodes_differ, what)):
        wanted = (
            f"rank {rank % 2} has"
            if what != "one rank"
            else "rank 3 failed at making"
            if rank != 3
            else "Invalid learning rate"
        )
        assert kind == "ValueError" and wanted in message, (rank, message)


def test_ranks_go_on_after_an_error_they_all_saw():
    def recover():
        assert caught_error(
            lambda: ZeroRedundancyOptimizer(
                [WEIGHT], torch.optim.AdamW, lr=-1.0 if dist.get_rank() else 0.1
            )
        )
        return (
            difference(
                train(
                    DDP(model := network()),
                    ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW),
                    dist.get_rank(),
                    2,
                    2,
                ),
                network().parameters(),
            )
            > 0
        )

    assert run(2, recover) == [True, True]


def test_a_failed_add_param_group_leaves_the_optimizer_as_it_was():
    def recover():
        model = network()
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        bad = (
            nn.Parameter(torch.zeros(3, 3).to_sparse())
            if dist.get_rank() == 1
            else nn.Parameter(torch.zeros(3, 3))
        )
        message = caught_error(lambda: zero.add_param_group({"params": [bad]}))[1]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        return (
            message,
            len(zero.param_groups),
            len(zero.optim.param_groups),
            len(zero.shards),
            difference(model.parameters(), network().parameters()) > 0,
        )

    for message, *rest in run(3, recover):
        assert "only dense" in message and rest == [1, 1, 1, True]


def test_a_rank_that_dies_before_the_first_collective_is_named_by_the_others():
    def one_dies():
        group = dist.new_group(timeout=timedelta(seconds=3))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        message = caught_error(
            lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, process_group=group)
        )
        with open(f"{folder}/{dist.get_rank()}", "w") as f:
            f.write(": ".join(message))

    def keep_going():  # a rank that ends by itself, so that the others have the time to notice
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=3))
        dist.barrier()  # all are here, so that only the one that leaves can be late
        if dist.get_rank() == 1:
            return "left"
        return caught_error(
            lambda: ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW, process_group=group)
        )

    with tempfile.TemporaryDirectory() as folder, pytest.raises(RuntimeError, match="rank 1"):
        run(3, one_dies)
    left = run(3, keep_going)
    for kind, message in (left[0], left[2]):
        assert kind == "RuntimeError" and message.startswith("rank 1 did not arrive within 3 s")


def test_subgroup_without_rank_0():
    def pair():
        group = dist.new_group([2, 3])
        if dist.get_rank() < 2:
            return None
        p = nn.Parameter(torch.zeros(90))
        p.grad = torch.ones(90)
        zero = ZeroRedundancyOptimizer([p], torch.optim.SGD, process_group=group, lr=1.0)
        zero.step()
        zero.consolidate_state_dict(to=1)
        return (
            p.tolist(),
            [piece.numel for piece in zero.shards[0].pieces],
            caught_error(zero.state_dict) is None,
        )

    assert run(4, pair) == [None, None, ([-1.0] * 90, [48], False), ([-1.0] * 90, [42], True)]


def test_frozen_empty_scalar_and_unused_parameters():
    def mixed():
        params = [
            nn.Parameter(torch.zeros(5)),
            nn.Parameter(torch.ones(7), requires_grad=False),
            nn.Parameter(torch.zeros(0)),
            nn.Parameter(torch.tensor(2.0)),
            nn.Parameter(torch.zeros(4)),
            nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        ]
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.5, weight_decay=0.0)
        for i in (0, 3, 5):
            params[i].grad = torch.ones_like(params[i])
        zero.step()
        zero.consolidate_state_dict()
        state = (
            {
                i: {k: tuple(v.shape) for k, v in s.items()}
                for i, s in zero.state_dict()["state"].items()
            }
            if dist.get_rank() == 0
            else None
        )
        return [p.detach().float().tolist() for p in params], state

    values, state = run(3, mixed)[0]
    assert values[1] == [1.0] * 7 and values[2] == [] and values[4] == [0.0] * 4
    assert (
        values[0] == pytest.approx([-0.5] * 5)
        and values[3] == pytest.approx(1.5)
        and values[5] == pytest.approx([-0.5] * 3, rel=1e-2)
    )
    assert {i: s["exp_avg"] for i, s in state.items()} == {0: (5,), 3: (), 5: (3,)}


def test_state_dict_moves_between_world_sizes_and_unsharded_training(tmp_path):
    def save(name):
        kind, options = CASES[name]
        model = DDP(network())
        zero = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
        train(model, zero, dist.get_rank(), dist.get_world_size(), 4)
        zero.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            torch.save((model.module.state_dict(), zero.state_dict()), tmp_path / name)

    def go_on(name, make):
        kind, options = CASES[name]
        model_state, state = torch.load(tmp_path / name, weights_only=True)
        model = network()
        model.load_state_dict(model_state)
        optimizer = make(model.parameters(), kind, options)
        optimizer.load_state_dict(state)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def unsharded(params, kind, options):
        return kind(params, **options)

    def sharded(params, kind, options):
        return ZeroRedundancyOptimizer(params, kind, **options)

    run_each(2, save, {name: (name,) for name in CASES})
    found = run_each(3, go_on, {name: (name, sharded) for name in CASES})
    for name, ranks in found.items():
        plain = go_on(name, unsharded)
        assert max(difference(mine, plain) for mine in ranks) <= 1e-6, name


def test_loading_leaves_the_callers_state_dict_alone():
    def load():
        model = network()
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        reference = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        reference.step()
        given = reference.state_dict()
        before = {i: {k: v.clone() for k, v in s.items()} for i, s in given["state"].items()}
        zero.load_state_dict(given)
        zero.step()
        return (
            all(v.equal(before[i][k]) for i, s in given["state"].items() for k, v in s.items())
            and "params" in given["param_groups"][0]
        )

    assert run(2, load) == [True, True]


def test_a_state_dict_goes_stale_with_the_next_step():
    zero = ZeroRedundancyOptimizer([WEIGHT], torch.optim.AdamW)
    zero.consolidate_state_dict()
    assert zero.state_dict()["param_groups"][0]["params"] == [0]
    zero.step()
    with pytest.raises(RuntimeError, match="after the last step"):
        zero.state_dict()


def test_sparse_gradients_are_an_error_on_every_rank():
    def sparse():
        embedding = nn.Embedding(4, 2, sparse=True)
        zero = ZeroRedundancyOptimizer(embedding.named_parameters(), torch.optim.SGD, lr=0.1)
        embedding(torch.tensor([1])).sum().backward()
        return caught_error(zero.step)

    for kind, message in run(2, sparse):
        assert kind == "RuntimeError" and "weight has a sparse gradient" in message


def test_optimizer_hooks_and_kwargs_pass_through():
    seen = []
    zero = ZeroRedundancyOptimizer([WEIGHT], torch.optim.SGD, lr=0.1)
    zero.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append("before"))
    zero.register_step_post_hook(lambda optimizer, args, kwargs: seen.append("after"))
    zero.step()
    assert seen == ["before", "after"]


# ---- whole parameters, several classes, low precision ----


class Unknown(torch.optim.AdamW):
    """An element-wise class, but nobody knows that."""


def halves(specs, world_size, *, loads=None):
    """Give the first half of the parameters to the first rank, and the others to the last."""
    held = [[] for _ in range(world_size)]
    for i, spec in enumerate(specs):
        if spec.trainable and spec.numel:
            held[0 if i < len(specs) / 2 else -1].append(Span(i, 0, spec.numel))
    return ShardPlan(tuple(specs), tuple(map(tuple, held)))


WHOLE = {
    "Muon": (torch.optim.Muon, {"lr": 0.02}, {}),
    "Muon-greedy": (torch.optim.Muon, {"lr": 0.02}, {"shard": "greedy"}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}, {}),
    "AdamW-whole": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}, {"shard": "whole"}),
    "AdamW-policy": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}, {"shard": halves}),
    "SGD-greedy": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"shard": "greedy"}),
    "Unknown": (Unknown, {"lr": 1e-2, "foreach": False}, {}),
    "Unknown-even": (Unknown, {"lr": 1e-2, "foreach": False}, {"shard": "even"}),
    "Lion": (pytorch_optimizer.Lion, {"lr": 1e-3}, {}),
    "Lion-even": (pytorch_optimizer.Lion, {"lr": 1e-3}, {"shard": "even"}),
    "SOAP": (pytorch_optimizer.SOAP, {"lr": 1e-3, "precondition_frequency": 4}, {}),
    "Shampoo": (pytorch_optimizer.Shampoo, {"lr": 1e-3}, {}),
    "AdEMAMix": (pytorch_optimizer.AdEMAMix, {"lr": 1e-3}, {}),
}


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 33, bias=False),
        nn.Tanh(),
        nn.Linear(33, 17, bias=False),
        nn.Tanh(),
        nn.Linear(17, 7, bias=False),
    )


def whole_beside_ddp(as_views):
    rank, size, out = dist.get_rank(), dist.get_world_size(), {}
    for name, (kind, options, how) in WHOLE.items():
        make = matrices if "Muon" in name else network
        plain, sharded = DDP(make()), DDP(make())
        reference = train(plain, kind(plain.parameters(), **options), rank, size, steps=10)
        zero = ZeroRedundancyOptimizer(
            sharded.parameters(), kind, parameters_as_bucket_view=as_views, **how, **options
        )
        ours = train(sharded, zero, rank, size, steps=10)
        held = [index for index, whole in owned(zero) if whole]
        zero.consolidate_state_dict(to=size - 1)
        keys = (
            {i: sorted(s) for i, s in zero.state_dict()["state"].items()}
            if rank == size - 1
            else None
        )
        out[name] = (
            difference(ours, reference),
            held,
            torch.cat([p.flatten() for p in ours]),
            keys,
            len(reference),
        )
    return out


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whole_parameters_equal_the_unsharded_optimizer(size, as_views):
    ranks = run(size, whole_beside_ddp, as_views)
    for name in WHOLE:
        assert max(rank[name][0] for rank in ranks) <= 1e-6, name
        assert all(rank[name][2].equal(ranks[0][name][2]) for rank in ranks), (
            f"{name}: replicas differ"
        )
        count = ranks[0][name][4]
        owned = sorted(index for rank in ranks for index in rank[name][1])
        if not name.endswith("even"):
            assert owned == list(range(count)), f"{name}: not each on one rank"
        assert list(ranks[-1][name][3]) == list(range(count)), name


def hybrid(model, kind=ZeroRedundancyOptimizer, **options):
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim == 2],
            "optimizer_class": torch.optim.Muon,
            "lr": 0.02,
            "weight_decay": 0.0,
        },
        {"params": [p for p in model.parameters() if p.ndim != 2], "lr": 5e-3},
    ]
    return kind(groups, torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9), **options)


class Pair:
    """Unsharded Muon and AdamW, side by side."""

    def __init__(self, groups, _, **options):
        muon, adamw = (dict(group) for group in groups)
        muon.pop("optimizer_class")
        self.both = [torch.optim.Muon([muon]), torch.optim.AdamW([adamw], fused=True, **options)]

    def zero_grad(self):
        [optimizer.zero_grad() for optimizer in self.both]

    def step(self):
        [optimizer.step() for optimizer in self.both]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_muon_and_adamw_in_one_optimizer(size):
    def both():
        rank, plain, sharded = dist.get_rank(), DDP(network()), DDP(network())
        reference = train(plain, hybrid(plain, Pair), rank, size)
        zero = hybrid(sharded)
        scheduler = torch.optim.lr_scheduler.LambdaLR(zero, lambda step: 1.0)
        ours = train(sharded, zero, rank, size)
        scheduler.step()
        zero.consolidate_state_dict()
        saved = zero.state_dict() if rank == 0 else None
        return (
            difference(ours, reference),
            saved,
            [g["lr"] for g in zero.param_groups],
            ["betas" in g for g in zero.param_groups],
        )

    ranks = run(size, both)
    assert all(
        gap <= 1e-6 and lrs == [0.02, 5e-3] and betas == [False, True]
        for gap, _, lrs, betas in ranks
    )
    saved = ranks[0][1]
    assert [len(group["params"]) for group in saved["param_groups"]] == [
        3,
        4,
    ] and "optimizer_class" not in saved["param_groups"][0]
    assert [sorted(saved["state"][i]) for i in (0, 3)] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1), (1, 4)])
def test_muon_and_adamw_resume_at_another_world_size(sizes):
    def steps(begin, stop, saved=None, weights=None):
        model = DDP(network()) if dist.get_world_size() > 1 else network()
        if weights:
            [p.data.copy_(w) for p, w in zip(model.parameters(), weights, strict=True)]
        zero = hybrid(model)
        if saved:
            zero.load_state_dict(saved)
        data = torch.Generator().manual_seed(7)
        for step in range(stop):
            batch = torch.randn(12, 20, generator=data)
            if step < begin:
                continue
            zero.zero_grad()
            model(batch).square().mean().backward()
            zero.step()
        zero.consolidate_state_dict()
        return [p.detach() for p in model.parameters()], (
            zero.state_dict() if dist.get_rank() == 0 else None
        )

    straight = run(sizes[0], steps, 0, 8)[0][0]
    weights, saved = run(sizes[0], steps, 0, 4)[0]
    resumed = run(sizes[1], steps, 4, 8, saved, weights)[0][0]
    assert difference(resumed, straight) <= 1e-5


def test_a_group_may_choose_how_it_is_shared_out():
    def chosen():
        model = network()
        zero = ZeroRedundancyOptimizer(
            [
                {"params": model[0].parameters(), "shard": "whole"},
                {"params": model[2].parameters()},
            ],
            torch.optim.AdamW,
        )
        zero.add_param_group(
            {
                "params": model[3].parameters(),
                "optimizer_class": torch.optim.SGD,
                "lr": 0.5,
                "momentum": 0.9,
            }
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        return (
            owned(zero),
            [kind.__name__ for kind in zero.local.by_class],
            model[3].weight.detach()[0].item(),
            [g.get("momentum") for g in zero.param_groups],
        )

    for spans, kinds, weight, momentum in run(2, chosen):
        assert all(
            whole for index, whole in spans if index < 2
        )  # and the later groups fill up what these left uneven
        assert kinds == ["AdamW", "SGD"] and weight == 0.5 and momentum == [None, None, 0.9]


def test_classes_that_cannot_be_sharded_are_refused_and_a_failed_group_leaves_nothing():
    def refused():
        weight, bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
        make = ZeroRedundancyOptimizer
        errors = [
            caught_error(lambda: make([weight], torch.optim.LBFGS)),
            caught_error(lambda: make([weight], pytorch_optimizer.Prodigy)),
        ]
        errors.append(caught_error(lambda: make([weight, bias], torch.optim.Muon)))
        errors.append(
            caught_error(
                lambda: make([{"params": [weight], "optimizer_class": "Muon"}], torch.optim.AdamW)
            )
        )
        errors.append(
            caught_error(
                lambda: make([{"params": [weight], "shard": "nowhere"}], torch.optim.AdamW)
            )
        )
        zero = make([weight], torch.optim.AdamW)
        errors.append(
            caught_error(
                lambda: zero.add_param_group(
                    {"params": [bias], "optimizer_class": torch.optim.Muon}
                )
            )
        )
        for p in (weight, bias):
            p.grad = torch.ones_like(p)
        zero.step()
        return errors, len(zero.param_groups), list(zero.local.by_class), bias.tolist()

    for errors, groups, kinds, bias in run(2, refused):
        kinds_of_error = [kind for kind, _ in errors]
        assert kinds_of_error == ["ValueError"] * 3 + ["TypeError"] + ["ValueError"] * 2
        assert (
            "together" in errors[0][1]
            and "together" in errors[1][1]
            and "2D" in errors[2][1]
            and "2D" in errors[5][1]
        )
        assert groups == 1 and kinds == [torch.optim.AdamW] and bias == [0.0] * 4


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"parameters_as_bucket_view": True}, {"shard": "whole"}])
def test_a_master_copy_steps_as_float32_would(size, how):
    """Low-precision parameters are the rounded parameters of a float32 optimizer that saw the same gradients."""

    def steps():
        torch.manual_seed(0)
        low = [nn.Parameter(torch.randn(s, dtype=torch.bfloat16)) for s in ((9, 7), (5,), (3, 4))]
        high = [nn.Parameter(p.detach().float()) for p in low]
        zero = ZeroRedundancyOptimizer(
            low,
            torch.optim.AdamW,
            lr=1e-3,
            fused=False,
            foreach=False,
            master_dtype=torch.float32,
            **how,
        )
        plain, same = torch.optim.AdamW(high, lr=1e-3, foreach=False), []
        for step in range(12):
            for p, q in zip(low, high, strict=True):
                p.grad = torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(step)
                ).bfloat16()
                q.grad = p.grad.float()
            zero.step()
            plain.step()
            if step == 5:  # somebody else writes into a parameter, say a checkpoint of the model
                with torch.no_grad():
                    low[1][2], high[1][2] = 2.0, 2.0
            if step == 8:
                zero.consolidate_state_dict()
                saved = [zero.state_dict() if dist.get_rank() == 0 else None]
                dist.broadcast_object_list(saved)
                assert saved[0]["state"][0]["master_param"].equal(high[0].detach())
                zero = ZeroRedundancyOptimizer(
                    low,
                    torch.optim.AdamW,
                    lr=1e-3,
                    fused=False,
                    foreach=False,
                    master_dtype=torch.float32,
                    **how,
                )
                zero.load_state_dict(saved[0])
            same.append(all(p.equal(q.bfloat16()) for p, q in zip(low, high, strict=True)))
        state = sum(
            v.nbytes
            for s in zero.optim.state.values()
            for v in s.values()
            if torch.is_tensor(v) and v.dim()
        )
        return (
            same,
            state,
            sum(
                piece.numel * piece.view.itemsize for shard in zero.shards for piece in shard.pieces
            ),
        )

    ranks = run(size, steps)
    assert all(all(same) for same, *_ in ranks), ranks[0][0]
    assert (
        sum(state for _, state, _ in ranks) == 2 * 4 * 80
        and sum(copies for *_, copies in ranks) == 4 * 80
    )


def test_it_passes_for_an_optimizer():
    def passes():
        model = DDP(network())
        zero = hybrid(model)
        adamw = ZeroRedundancyOptimizer(network().parameters(), torch.optim.AdamW)
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(
                adamw, max_lr=0.1, total_steps=5
            ),  # looks for betas among the defaults
            torch.optim.lr_scheduler.ReduceLROnPlateau(zero),
            torch.optim.lr_scheduler.CosineAnnealingLR(zero, 10),
        ]
        model(torch.ones(4, 20)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(4, 20)).square().mean()).backward()
        scaler.step(zero)
        scaler.update()
        for p in model.parameters():
            p.grad = torch.full_like(p, float("inf"))
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(torch.ones(1))
        scaler.unscale_(zero)
        skipped = scaler.step(zero)
        average = torch.optim.swa_utils.AveragedModel(model.module)
        average.update_parameters(model.module)
        attributes = (
            zero.process_group is dist.group.WORLD,
            zero.rank,
            zero.world_size,
            zero.parameters_as_bucket_view,
            type(zero.optim).__name__,
        )
        return (
            len(schedules),
            norm.item() > 0,
            skipped,
            all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True)),
            attributes,
        )

    for rank, result in enumerate(run(2, passes)):
        assert result == (3, True, None, True, (True, rank, 2, False, "Muon"))


@pytest.mark.parametrize("mesh", [False, True])
def test_sharded_inside_a_node_and_replicated_across(mesh):
    def grid():
        nodes = init_device_mesh("cpu", (2, 2)) if mesh else two_level(2)
        rank, plain, sharded = dist.get_rank(), DDP(network()), DDP(network())
        reference = train(
            plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), rank, 4
        )
        zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.AdamW, nodes, lr=1e-2)
        ours = train(sharded, zero, rank, 4)
        state = sum(v.numel() for s in zero.optim.state.values() for v in s.values() if v.dim())
        return (
            difference(ours, reference),
            zero.group.ranks,
            state,
            torch.cat([p.flatten() for p in ours]),
        )

    ranks = run(4, grid)
    total = sum(p.numel() for p in network().parameters())
    assert all(gap <= 1e-6 and parameters.equal(ranks[0][3]) for gap, _, _, parameters in ranks)
    assert [inside for _, inside, *_ in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [ranks[a][2] + ranks[b][2] for a, b in ((0, 1), (2, 3))] == [2 * total] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shard", ["even", "whole"])
def test_state_of_many_buckets_is_put_together_right(size, shard):
    """State that tells where it belongs: after one step of SGD with momentum it is the gradient."""

    def many():
        params = [
            nn.Parameter(torch.zeros(n)) for n in (700, 3, 50, 900, 1, 400, 120, 800, 64, 640)
        ]
        zero = ZeroRedundancyOptimizer(
            params, torch.optim.SGD, lr=0.1, momentum=0.9, shard=shard, bucket_cap_mb=0.001
        )
        for i, p in enumerate(params):
            p.grad = torch.arange(p.numel()) + 1000.0 * i
        zero.step()
        zero.consolidate_state_dict(to=size - 1)
        if dist.get_rank() < size - 1:
            return None
        assert len(zero.shards[0].buckets) > size
        return [
            zero.state_dict()["state"][i]["momentum_buffer"].equal(p.grad)
            for i, p in enumerate(params)
        ], [p.equal(-0.1 * p.grad) for p in params]

    state, parameters = run(size, many)[-1]
    assert all(state) and all(parameters)


def test_the_users_choice_of_kernel_is_in_the_state_dict():
    p = nn.Parameter(torch.zeros(4))
    for how in ({}, {"fused": True}, {"fused": False}):
        zero = ZeroRedundancyOptimizer([p], torch.optim.AdamW, **how)
        zero.consolidate_state_dict()
        assert zero.state_dict()["param_groups"][0]["fused"] is how.get(
            "fused"
        ) and zero.optim.param_groups[0]["fused"] is how.get("fused", True)


def small(count=7):
    """Parameters of many sizes, some of which share a bucket; two are cut at most world sizes."""
    torch.manual_seed(3)
    return [
        nn.Parameter(torch.randn(shape))
        for shape in ((50, 7), (3,), (20, 20), (5, 9), (), (300,), (64, 8))[:count]
    ]


KINDS = {
    "AdamW": (torch.optim.AdamW, {}, {}),
    "AdamW, views": (torch.optim.AdamW, {}, {"parameters_as_bucket_view": True}),
    "AdamW, small buckets": (torch.optim.AdamW, {}, {"bucket_cap_mb": 0.001}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {}),
    "ASGD": (torch.optim.ASGD, {}, {}),
    "NAdam": (torch.optim.NAdam, {}, {}),
    "Adagrad": (torch.optim.Adagrad, {}, {"parameters_as_bucket_view": True}),
    "whole": (torch.optim.AdamW, {}, {"shard": "whole"}),
    "Adafactor": (torch.optim.Adafactor, {}, {}),
}


def beside_plain(scenario, steps=9):
    """Step every kind beside the plain optimizer while `scenario` changes both sets of parameters;
    give the differences and what is saved at the end."""
    out = {}
    for name, (kind, options, how) in KINDS.items():
        ours, theirs = small(), small()
        zero, plain = (
            ZeroRedundancyOptimizer(ours, kind, lr=0.01, **options, **how),
            kind(theirs, lr=0.01, **options),
        )
        for step in range(steps):
            torch.manual_seed(step)
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                grad = torch.randn(p.shape)
                for x in (p, q):
                    scenario(step, i, x)
                    x.grad = (
                        grad.clone()
                        if x.requires_grad and not (scenario is absent and absent(step, i, x))
                        else None
                    )
            zero.step()
            plain.step()
        zero.consolidate_state_dict()
        saved, want = zero.state_dict() if dist.get_rank() == 0 else None, plain.state_dict()
        same = saved is None or {
            i: {k: torch.as_tensor(v).shape for k, v in s.items()}
            for i, s in saved["state"].items()
        } == {
            i: {k: torch.as_tensor(v).shape for k, v in s.items()} for i, s in want["state"].items()
        }
        steps_of = saved is None or {i: s.get("step") for i, s in saved["state"].items()} == {
            i: s.get("step") for i, s in want["state"].items()
        }
        out[name] = (
            difference(ours, theirs),
            same,
            steps_of,
            torch.cat([p.detach().flatten() for p in ours]),
        )
    return out


def absent(step, i, p):
    """Leave some parameters without gradient in some steps."""
    return (step * 5 + i * 3) % 7 < 2


def frozen(step, i, p):
    """Freeze some at first, some later, and let some come back."""
    if step == 0:
        p.requires_grad_(i not in (1, 5))
    if step == 3:
        p.requires_grad_(i != 2)
    if step == 5:
        p.requires_grad_(i in (0, 5))
    if step == 7:
        p.requires_grad_(True)


def moved(step, i, p):
    """Replace the memory of some."""
    if step in (2, 6) and i % 2:
        p.data = p.data.clone()


def written(step, i, p):
    """Write into some, as loading a checkpoint of the model does."""
    with torch.no_grad():
        if step in (0, 4) and i % 3:
            p.mul_(-2.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("scenario", [absent, frozen, moved, written])
def test_what_may_change_between_steps(scenario, size):
    ranks = run(size, beside_plain, scenario)
    for name in KINDS:
        assert max(rank[name][0] for rank in ranks) <= 2e-6, name
        assert all(rank[name][1] for rank in ranks), f"{name}: the state has other keys or shapes"
        assert all(rank[name][2] for rank in ranks), f"{name}: step counts differ"
        assert all(rank[name][3].equal(ranks[0][name][3]) for rank in ranks), (
            f"{name}: replicas differ"
        )


def test_a_step_that_fails_changes_nothing_and_can_be_repeated():
    def fails():
        params = small()
        zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
        for p in params:
            p.grad = torch.ones_like(p)
        zero.param_groups[0]["lr"] = "high"
        message = caught_error(zero.step)
        same = all(p.equal(q) for p, q in zip(params, small(), strict=True))
        with torch.no_grad():
            params[0].zero_()
        zero.param_groups[0]["lr"] = 1.0
        zero.step()
        return (
            message is not None,
            same,
            params[0].equal(-torch.ones(50, 7)),
            params[1].equal(small()[1] - 1),
        )

    assert run(2, fails) == [(True,) * 4] * 2


def test_each_device_of_a_process_has_a_name_that_is_the_same_on_all_ranks():
    class Elsewhere:  # what a plan asks of a parameter
        layout, shape, dtype, requires_grad = torch.strided, (2,), torch.float32, True

        def __init__(self, device):
            self.device = torch.device(device)

        def is_contiguous(self):
            return True

    def names(*devices):
        return [spec.device for spec in specs([{"params": [*map(Elsewhere, devices)]}])]

    assert (
        names("cuda:0", "cuda:1", "cpu", "cuda:0")
        == names("cuda:2", "cuda:3", "cpu", "cuda:2")
        == ["cuda", "cuda+1", "cpu", "cuda"]
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_frozen_parameter_costs_nothing_and_keeps_its_state(size):
    def freeze():
        params = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, record(), lr=0.1)
        sent, held = [], []
        for trainable in (True, False, True):
            params[1].requires_grad_(trainable)
            for p in params:
                p.grad = torch.ones(1000) if p.requires_grad else None
            zero.step()  # plans anew where something changed
            zero.zero_grad()
            for p in params:
                p.grad = torch.ones(1000) if p.requires_grad else None
            with zero.process_group.recording() as log:
                zero.step()
            sent.append(float(log.wire))
            held.append(
                sum(v.numel() for s in zero.optim.state.values() for v in s.values() if v.dim())
            )
        zero.consolidate_state_dict()
        return (
            sent,
            held,
            (
                [int(s["step"]) for s in zero.state_dict()["state"].values()]
                if dist.get_rank() == 0
                else [6, 4]
            ),
        )

    for sent, held, steps in run(size, freeze):
        assert sent[0] == pytest.approx(2 * sent[1], rel=0.1) and sent[2] == sent[0]
        assert held[1] == pytest.approx(2 * 1000 / size, abs=32) and held[0] == held[
            2
        ] == pytest.approx(4 * 1000 / size, abs=32)
        assert steps == [6, 4]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_froze_in_groups_that_came_apart_finds_its_state_when_all_thaws_at_once(size):
    def freeze():
        params = [nn.Parameter(torch.zeros(300)) for _ in range(4)]
        zero = ZeroRedundancyOptimizer(params[:2], torch.optim.AdamW, lr=0.1)
        zero.add_param_group({"params": params[2:]})
        for trainable in (True, False, True):
            for p in params[1::2]:
                p.requires_grad_(trainable)
            for _ in range(2):
                for p in params:
                    p.grad = torch.ones(300) if p.requires_grad else None
                zero.step()
        zero.consolidate_state_dict(to=None)
        return [int(s["step"]) for s in zero.state_dict()["state"].values()]

    assert run(size, freeze) == [[6, 4, 6, 4]] * size


class Keeper(torch.optim.SGD):
    """Keeps something of its own in the state of some parameters."""

    kept: object = None

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"][:1]:
            self.state[p]["kept"] = self.kept


@pytest.mark.parametrize(
    "kept, fine",
    [
        (type("History", (), {}), False),
        (lambda: 1, False),
        ({"a": [1, (2.0, "b")], "c": torch.ones(2)}, True),
        (torch.float16, True),
        (None, True),
    ],
    ids=["class", "function", "containers", "dtype", "None"],
)
def test_state_that_no_other_rank_would_read_is_an_error_on_every_rank_at_once(kept, fine):
    def keep():
        Keeper.kept = kept
        params = [nn.Parameter(torch.ones(5, 3)) for _ in range(4)]
        zero = ZeroRedundancyOptimizer(params, Keeper, lr=0.1, shard="whole")
        for p in params:
            p.grad = torch.ones_like(p)
        zero.step()
        found = [caught_error(zero.consolidate_state_dict)]
        params[3].requires_grad_(False)
        params[3].grad = None
        return [
            *found,
            caught_error(zero.step),
            caught_error(lambda: zero.group.all_reduce(torch.ones(1))),
        ]

    for saving, moving, after in run(2, keep, group_timeout=20):
        assert after is None and (saving is moving is None) == fine
        for kind, message in (saving, moving) if not fine else ():
            assert (
                kind == "TypeError"
                and "state 'kept' of parameter" in message
                and "plain values" in message
            )


def moved(view):
    def made():
        params = [nn.Parameter(torch.zeros(1000, 500)) for _ in range(24)]
        zero = ZeroRedundancyOptimizer(
            params, torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=view
        )
        for p in params:
            p.grad = torch.ones_like(p)
        zero.step()
        zero.zero_grad()
        return params, zero

    peak_bytes(
        torch.device("cpu"), lambda: None
    )  # what is made from here on goes back to the system when it is let go
    params, zero = made()
    peaks = []
    for width in (2, 3, 1):  # the state of a rank is as large as the parameters
        runs = [list(range(24))[i : i + width] for i in range(0, 24, width)][::-1]
        plan = partial(plan_buckets, zero, runs)
        peaks.append(
            peak_bytes(
                torch.device("cpu"),
                lambda plan=plan: zero.replan(zero.shards, "to measure it", plan),
            )
        )
        gc.collect()
    zero.consolidate_state_dict(to=None)
    same = all(
        s["exp_avg"].eq(s["exp_avg"][0, 0]).all() and int(s["step"]) == 1
        for s in zero.state_dict()["state"].values()
    )
    return [peak / sum(p.nbytes for p in params) for peak in peaks], same


@measures_memory
@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize("view", [False, True])
def test_state_moves_without_being_there_twice(view):
    for peaks, same in run_afresh(2, "test_optimizer.moved", view):
        assert max(peaks) < 1.0 and same, (
            peaks
        )  # all of it once more would be 1 for the state, and 1 for parameters that are views


def test_a_master_copy_survives_freezing_and_missing_gradients():
    def steps():
        torch.manual_seed(0)
        low = [nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in (90, 5, 40)]
        high = [nn.Parameter(p.detach().float()) for p in low]
        zero = ZeroRedundancyOptimizer(
            low, torch.optim.AdamW, lr=1e-3, fused=False, foreach=False, master_dtype=torch.float32
        )
        plain, same = torch.optim.AdamW(high, lr=1e-3, foreach=False), []
        for step in range(10):
            low[2].requires_grad_(step not in (3, 4))
            for i, (p, q) in enumerate(zip(low, high, strict=True)):
                p.grad = (
                    None
                    if not p.requires_grad or (i == 1 and step % 4 == 2)
                    else torch.randn(p.shape).bfloat16()
                )
                q.grad = None if p.grad is None else p.grad.float()
            zero.step()
            plain.step()
            same.append(all(p.equal(q.bfloat16()) for p, q in zip(low, high, strict=True)))
        return same

    for size in (1, 2, 3):
        assert run(size, steps) == [[True] * 10] * size


def test_a_constructor_makes_a_few_calls_for_each_parameter_and_no_views_of_others_parameters():
    params = [nn.Parameter(torch.zeros(8)) for _ in range(3000)]
    plain = calls(lambda: torch.optim.AdamW(params, lr=0.1))
    with simulate(1024, 7) as many:
        for group, most in (
            (None, 4),
            (many, 6),
        ):  # of the plain one's: a planner of one object for each parameter made 18
            made = []
            found = calls(
                lambda group=group, made=made: made.append(
                    ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, lr=0.1)
                )
            )
            assert found < most * plain, (found, plain)
    shard = made[0].shards[0]
    assert (
        not any("stretches" in vars(bucket) for bucket in shard.buckets)
        and sum(len(bucket.mine) for bucket in shard.buckets) <= 4
    )


def test_the_gradient_of_a_piece_that_is_cut_at_both_ends_is_the_same_the_quick_way():
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (), (3, 3))]
    for p in params:
        p.grad = torch.rand(p.shape)
    params[3].grad = torch.rand(3, 3).t()  # its layout is not the parameter's
    for spans, quick in (
        ([Span(0, 2, 6), Span(1, 0, 4), Span(2, 0, 1), Span(3, 0, 5)], True),
        ([Span(0, 0, 6), Span(1, 0, 3), Span(2, 0, 1), Span(3, 0, 9)], False),
    ):
        flat = torch.zeros(sum(stop - start for _, start, stop in spans))
        piece = Piece(spans, params, flat, flat)
        assert piece._row_major is quick
        want = torch.cat(
            [p.grad.reshape(-1)[a:b] for p, (_, a, b) in zip(params, spans, strict=True)]
        )
        assert piece.gradient([p.grad for p in params]).tolist() == want.tolist()


def _freeze_and_thaw(shard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    frozen = model[0].weight
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, shard=shard)
    for step in range(6):
        frozen.requires_grad_(not 2 <= step < 4)
        zero.zero_grad()
        model(torch.full((4, 7), 0.1 * step + 0.1)).square().mean().backward()
        zero.step()
    return [p.detach() for p in model.parameters()]


def _uneven_cuts(specs, world_size, *, loads=None):
    """A policy of the user's: cut every parameter after its first third."""
    spans = [Span(i, 0, spec.numel // 3) for i, spec in enumerate(specs)]
    rest = [Span(i, spec.numel // 3, spec.numel) for i, spec in enumerate(specs)]
    trained = [spec.trainable for spec in specs]
    parts = [
        tuple(s for s in part if trained[s.param] and s.numel)
        for part in (spans, rest, *[()] * (world_size - 2))
    ]
    return ShardPlan(tuple(specs), tuple(parts))


@pytest.mark.parametrize("policy", [even, _uneven_cuts], ids=["even", "uneven"])
def test_state_moves_where_a_policy_of_the_users_cuts(policy):
    """It was handed on uncut, and a piece had the state of more elements than its own."""
    [alone] = run(1, _freeze_and_thaw, "auto")
    for got in run(2, _freeze_and_thaw, policy):
        for a, b in zip(got, alone, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-7)
