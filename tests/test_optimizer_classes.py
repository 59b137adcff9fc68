"""Whole parameters, several classes in one optimizer, low precision and two levels."""

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from common.training import difference, network, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.policies import even
from zero_nb.plan.shards import ShardPlan, Span


def owned(zero):
    """Give what this rank owns: the index of each parameter, and whether it owns all of it."""
    pieces = [piece for shard in zero.shards for piece in shard.pieces]
    return [
        (span.param, span.numel == p.numel())
        for piece in pieces
        for span, p in zip(piece.spans, piece.params, strict=True)
    ]


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
    "Lion": ("Lion", {"lr": 1e-3}, {}),
    "Lion-even": ("Lion", {"lr": 1e-3}, {"shard": "even"}),
    "SOAP": ("SOAP", {"lr": 1e-3, "precondition_frequency": 4}, {}),
    "Shampoo": ("Shampoo", {"lr": 1e-3}, {}),
    "AdEMAMix": ("AdEMAMix", {"lr": 1e-3}, {}),
}  # name: class, or a name in pytorch_optimizer; its options; ours


@pytest.fixture(scope="module")
def pytorch_optimizer():
    """Import it before ranks are forked, and only where it is used: it brings transformers along."""
    return pytest.importorskip("pytorch_optimizer")


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 33, bias=False),
        nn.Tanh(),
        nn.Linear(33, 17, bias=False),
        nn.Tanh(),
        nn.Linear(17, 7, bias=False),
    )


def whole_beside_ddp(as_views, third_party):
    rank, size, out = dist.get_rank(), dist.get_world_size(), {}
    for name, (kind, options, how) in WHOLE.items():
        kind = getattr(third_party, kind) if isinstance(kind, str) else kind
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


@pytest.mark.turns(2)
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whole_parameters_equal_the_unsharded_optimizer(size, as_views, pytorch_optimizer):
    ranks = run(size, whole_beside_ddp, as_views, pytorch_optimizer)
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


def refused(prodigy):
    """Say what each class that cannot be sharded gives, and what a group that failed has left."""
    weight, bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
    make, adamw, muon = ZeroRedundancyOptimizer, torch.optim.AdamW, torch.optim.Muon
    calls = [
        lambda: make([weight], torch.optim.LBFGS),
        lambda: make([weight], prodigy),
        lambda: make([weight, bias], muon),
        lambda: make([{"params": [weight], "optimizer_class": "Muon"}], adamw),
        lambda: make([{"params": [weight], "shard": "nowhere"}], adamw),
    ]
    errors = [caught_error(call) for call in calls]
    zero = make([weight], adamw)
    group = {"params": [bias], "optimizer_class": muon}
    errors.append(caught_error(lambda: zero.add_param_group(group)))
    for p in (weight, bias):
        p.grad = torch.ones_like(p)
    zero.step()
    return errors, len(zero.param_groups), list(zero.local.by_class), bias.tolist()


def test_classes_that_cannot_be_sharded_are_refused_and_a_failed_group_leaves_nothing(
    pytorch_optimizer,
):
    for errors, groups, kinds, bias in run(2, refused, pytorch_optimizer.Prodigy):
        kinds_of_error = [kind for kind, _ in errors]
        assert kinds_of_error == ["ValueError"] * 3 + ["TypeError"] + ["ValueError"] * 2
        assert (
            "together" in errors[0][1]
            and "together" in errors[1][1]
            and "2D" in errors[2][1]
            and "2D" in errors[5][1]
        )
        assert groups == 1 and kinds == [torch.optim.AdamW] and bias == [0.0] * 4


def with_master_copies(params, how):
    return ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        lr=1e-3,
        fused=False,
        foreach=False,
        master_dtype=torch.float32,
        **how,
    )


def saved_and_loaded(zero, low, high, how):
    """Give another optimizer of the same parameters with the state of this one."""
    zero.consolidate_state_dict()
    saved = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    assert saved[0]["state"][0]["master_param"].equal(high[0].detach())
    zero = with_master_copies(low, how)
    zero.load_state_dict(saved[0])
    return zero


def beside_float32(how):
    """Step low-precision parameters beside float32 ones; in which steps they are alike, and the bytes of
    this rank's state and copies."""
    torch.manual_seed(0)
    low = [nn.Parameter(torch.randn(s, dtype=torch.bfloat16)) for s in ((9, 7), (5,), (3, 4))]
    high = [nn.Parameter(p.detach().float()) for p in low]
    zero = with_master_copies(low, how)
    plain, same = torch.optim.AdamW(high, lr=1e-3, foreach=False), []
    for step in range(12):
        for p, q in zip(low, high, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            q.grad = p.grad.float()
        zero.step()
        plain.step()
        if step == 5:  # somebody else writes into a parameter, say a checkpoint of the model
            with torch.no_grad():
                low[1][2], high[1][2] = 2.0, 2.0
        if step == 8:
            zero = saved_and_loaded(zero, low, high, how)
        same.append(all(p.equal(q.bfloat16()) for p, q in zip(low, high, strict=True)))
    values = [v for s in zero.optim.state.values() for v in s.values() if torch.is_tensor(v)]
    pieces = [piece for shard in zero.shards for piece in shard.pieces]
    return (
        same,
        sum(v.nbytes for v in values if v.dim()),
        sum(piece.numel * piece.view.itemsize for piece in pieces),
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"parameters_as_bucket_view": True}, {"shard": "whole"}])
def test_a_master_copy_steps_as_float32_would(size, how):
    """Low-precision parameters are the rounded parameters of a float32 optimizer that saw the same gradients."""
    ranks = run(size, beside_float32, how)
    assert all(all(same) for same, *_ in ranks), ranks[0][0]
    assert (
        sum(state for _, state, _ in ranks) == 2 * 4 * 80
        and sum(copies for *_, copies in ranks) == 4 * 80
    )


def passes():
    """Give an optimizer to schedulers, clipping, a scaler and an average of the model."""
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


def test_it_passes_for_an_optimizer():
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


def test_even_is_one_rule_by_its_name_and_as_a_policy():
    """`shard="even"` and `shard=zero_nb.even` step the same tensors: small parameters of a bucket as one."""

    def stepped(shard):
        params = [nn.Parameter(torch.ones(n)) for n in (7, 3, 40, 5)]
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1, shard=shard)
        return owned(zero), [len(group["params"]) for group in zero.local.groups()]

    def steps_alike():
        wanted = stepped("auto")
        return wanted[1] == [1] and stepped("even") == stepped(even) == wanted

    def refused(shard):
        params = [nn.Parameter(torch.ones(80, 4))]
        return caught_error(lambda: ZeroRedundancyOptimizer(params, torch.optim.Muon, shard=shard))

    assert run(2, steps_alike) == [True] * 2
    words = "Muon steps whole matrices, and shard='even' would cut them; leave shard='auto'"
    assert run(2, lambda: [refused("even"), refused(even)]) == [[("ValueError", words)] * 2] * 2
