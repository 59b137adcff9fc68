"""The sharded optimizer against the unsharded one, and its errors on every rank."""

import os
import signal
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught_error, run_each
from common.training import GLOBAL_BATCH, STEPS, difference, network, stepped_once, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

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


@pytest.mark.turns(2)
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


@pytest.mark.turns(3)
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
    lr = 0.2 if other else 0.1

    def made(given=params, **options):
        return ZeroRedundancyOptimizer(given, torch.optim.AdamW, levels, **options)

    def stepped(zero):
        for p in params:
            p.grad = torch.ones_like(p)
        zero.step()

    def changed(zero):
        zero.param_groups[0]["lr"] = lr
        return zero

    acts = {
        "options": lambda: made(lr=lr),
        "order": lambda: made(params[::-1] if other else params),
        "one rank": lambda: made(lr=-last),
        "settings": lambda: made(shard="whole" if other else "even"),
        "step": lambda: stepped(changed(made())),
        "add": lambda: made().add_param_group({"params": [nn.Parameter(torch.zeros(3 + other))]}),
        "load": lambda: made().load_state_dict(torch.optim.AdamW(params, lr=lr).state_dict()),
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
            "rank 0 has"
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
        saved = zero.state_dict()["state"] if dist.get_rank() == 0 else {}
        state = {i: {k: tuple(v.shape) for k, v in s.items()} for i, s in saved.items()}
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


def kernels():
    """Choose kernels by option after the optimizer was made."""
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    [group] = optimizer.param_groups
    found = []
    for options in ({}, {"fused": False}, {"fused": True}, {"fused": None, "foreach": True}):
        group.update(options)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        [local] = optimizer.local.groups()
        found.append((local["fused"], local["foreach"], group["fused"]))
    return found


def test_a_kernel_that_the_user_chooses_later_is_taken():
    wanted = [(True, None, None), (False, None, False), (True, None, True), (False, True, None)]
    assert run(2, kernels) == [wanted] * 2
