"""Averages of half precision: added as DDP adds them, or in another dtype (`reduce_dtype`)."""

from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten
from common.overlapping import HALVES, MODES, Sums, attach, backward_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm import collectives
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.comm.subgroups import two_level
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.pieces import lend_bucket

# ---- H3: averages of half precision ----


def beside_ddp(mode, dtype, gradient, nodes=False, hook=None):
    """Step on a gradient that is this rank's share of `gradient`; give the parameters, and those of
    plain DDP, after some steps."""
    plain, module = DDP(Sums(dtype)), Sums(dtype)
    optimizer = SGD(plain.parameters(), lr=2**-10)
    zero = ZeroRedundancyOptimizer(
        module.parameters(), SGD, two_level(2) if nodes else None, lr=2**-10
    )
    ours, _ = attach(mode, module, zero, **({"hook": hook} if hook else {}))
    x = torch.tensor(gradient[dist.get_rank() % len(gradient)], dtype=dtype)
    for _ in range(4):
        for model in (plain, ours):
            model(x).backward()
        optimizer.step()
        for model in (plain, ours):
            model.zero_grad()
    return flatten(plain).tolist(), flatten(module).tolist()


class Weighted(nn.Module):
    """Its gradients are its inputs, one for each parameter; several buckets."""

    sizes = (400, 70, 3000, 640)

    def __init__(self, dtype):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in self.sizes)

    def forward(self, xs):
        return sum((w * x).sum() for w, x in zip(self.weights, xs, strict=True))

    @classmethod
    def gradients(cls, rank, iteration, dtype):
        seeds = torch.Generator().manual_seed(1000 * iteration + rank)
        return [torch.randn(size, generator=seeds).to(dtype) for size in cls.sizes]


def rounding(dtype, mode=None, nodes=False):
    """Give the squared distance of averages, of DDP's or in a mode, from those in float64, over some steps."""
    module, size, total = Weighted(dtype), dist.get_world_size(), 0.0
    if mode is None:
        model = DDP(module, bucket_cap_mb=0.003)
    else:
        groups = two_level(2) if nodes else None
        zero = ZeroRedundancyOptimizer(module.parameters(), SGD, groups, lr=1.0)
        model, handle = attach(mode, module, zero, bucket_cap_mb=0.003)
    for i in range(4):
        with torch.no_grad():
            for w in module.weights:
                w.zero_()
        model(Weighted.gradients(dist.get_rank(), i, dtype)).backward()
        if mode is not None:
            handle.wait()
            zero.step()
        found = [w.grad if mode is None else -w.detach() for w in module.weights]
        ranks = zip(*(Weighted.gradients(rank, i, dtype) for rank in range(size)), strict=True)
        for mine, each in zip(found, ranks, strict=True):
            exact = sum(x.double() for x in each) / size
            total += (mine.double() - exact).square().sum().item()
        model.zero_grad()
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "nodes"), [(3, False), (4, False), (4, True)])
def test_H3_a_mean_is_rounded_no_more_than_ddps(dtype, size, nodes):
    """The distance from the mean is at most 1.01 of DDP's, where dividing by the ranks rounds too."""

    def every():
        return rounding(dtype), {mode: rounding(dtype, mode, nodes) for mode in MODES}

    for ddp, ours in run(size, every):
        assert ddp > 0 and set(ours) == set(MODES)
        assert all(distance <= 1.01**2 * ddp for distance in ours.values()), (ddp, ours)


@pytest.mark.parametrize(
    "dtype,large", [(torch.float16, 40000.0), (torch.bfloat16, 3e38)], ids=["float16", "bfloat16"]
)
def test_H3_a_mean_overflows_only_where_ddps_does(dtype, large):
    """The mean is one that the dtype holds, the sum is not; in every mode, in the first iteration and in later ones."""

    def every(nodes):
        return {mode: beside_ddp(mode, dtype, [large, large], nodes) for mode in MODES}

    for size, nodes in ((2, False), (4, True)):
        for found in run(size, every, nodes):
            for mode, (theirs, ours) in found.items():
                assert theirs == ours and abs(theirs[0]) < torch.finfo(dtype).max, (mode, ours[0])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_H3_a_mean_is_ddps_bit_for_bit_on_two_ranks(dtype):
    def every():
        return {mode: beside_ddp(mode, dtype, [1.37, -0.291]) for mode in MODES}

    for found in run(2, every):
        for mode, (theirs, ours) in found.items():
            assert theirs == ours, mode


def test_H3_a_hook_of_the_users_divides_for_itself():
    """allreduce_hook is known and replaced by a reduce-scatter; what is called by another name is kept as it is."""

    def kept(state, bucket):
        return default_hooks.allreduce_hook(None, bucket)

    def every():
        return [
            beside_ddp("overlap", torch.float16, [40000.0, 40000.0], hook=hook)
            for hook in (default_hooks.allreduce_hook, kept)
        ]

    for found in run(2, every):
        for theirs, ours in found:
            assert theirs == ours


def followed(mode):
    """Rank 1 has no data in the second iteration, and nothing but a part in the sum."""
    module = Sums(torch.float16)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=2**-10)
    model, handle = attach(mode, module, zero)
    with Join([handle if mode.startswith("parallel") else model, zero]):
        for _ in range(2 - dist.get_rank()):
            model(torch.tensor(60000.0, dtype=torch.float16)).backward()
    return flatten(module)[0].item()


def test_H3_a_rank_without_data_follows_with_the_same_division():
    wanted = 1 - (60000 + 30000) * 2**-10  # as in DDP, the sum is divided by all ranks
    for found in run(2, lambda: [followed(mode) for mode in ("overlap", "parallel")]):
        assert found == [pytest.approx(wanted, rel=2e-3)] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, 1000, 1024])
def test_H3_on_many_ranks_what_is_added_is_what_ddp_adds(size, mode, monkeypatch):
    """Simulated ranks add zeros, so that plain DDP leaves in `.grad` what it sends; then all others
    add what this one does."""
    sent, real = [], collectives.reduce_scatter

    def reduce_scatter(group, tensor, *args, **options):
        sent.append(tensor.clone())
        work = real(group, tensor, *args, **options)
        tensor.mul_(size)  # the sum of equal parts
        return work

    gradient = torch.tensor(40000.0, dtype=torch.float16)
    with simulate(size) as group:
        plain, module = DDP(Sums(torch.float16), process_group=group), Sums(torch.float16)
        plain(gradient).backward()
        wanted = next(plain.parameters()).grad[0]
        model, handle = attach(
            mode, module, ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=2**-10), group
        )
        monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter)
        for _ in range(3):
            model(gradient).backward()
        handle.wait()
    assert sent and all(
        torch.equal(part[part != 0], wanted.expand(int((part != 0).sum()))) for part in sent
    )
    assert torch.isclose(
        flatten(module), torch.tensor(1 - 3 * 40000 * 2**-10).half(), rtol=5e-3
    ).any()  # where rank 0 owns it


# ---- reduce_dtype ----

SHARES = [
    256.0,
    1.0,
    1.0,
    1.0,
]  # of four ranks; in bfloat16 the sum is 256 or 258, and the mean is 64.75


def added(mode, nodes=False, master=True, **options):
    """Step once in the first iteration and twice in later ones; give what was stepped, and the
    dtypes that were reduced and gathered."""
    group, module = record(), Sums(torch.bfloat16)
    levels = two_level(2) if nodes else group
    zero = ZeroRedundancyOptimizer(
        module.parameters(),
        SGD,
        levels,
        lr=2**-10,
        momentum=0.0,
        **({"master_dtype": torch.float32} if master else {}),
    )
    model, handle = attach(
        mode, module, zero, None if nodes else group, reduce_dtype=torch.float32, **options
    )
    for _ in range(3):
        model(torch.tensor(SHARES[dist.get_rank()], dtype=torch.bfloat16)).backward()
    handle.wait()
    kinds = {
        (e.kind, e.dtype)
        for e in group.log.events
        if e.parent is None and e.kind in ("reduce_scatter", "all_gather") and e.dtype != "int64"
    }
    zero.consolidate_state_dict(to=None)
    state = zero.state_dict()["state"]
    kept = (
        torch.cat([state[i]["master_param"].reshape(-1) for i in sorted(state)])
        if master
        else flatten(module)
    )
    norm = None if handle.grad_norm is None else handle.grad_norm.item()
    return kept.dtype, sorted(set(kept.tolist())), kinds, norm


def test_reduce_dtype_adds_bfloat16_in_float32_and_masters_get_the_sum_unrounded():
    def every():
        return {(mode, nodes): added(mode, nodes) for mode in MODES for nodes in (False, True)}

    for found in run(4, every):
        for (mode, nodes), (dtype, values, kinds, _) in found.items():
            assert dtype == torch.float32 and values == [1 - 3 * 64.75 * 2**-10], (mode, nodes)
            if not nodes:
                assert kinds == {("reduce_scatter", "float32"), ("all_gather", "bfloat16")}, mode


def test_reduce_dtype_without_masters_rounds_the_sum_once():
    wanted = torch.ones((), dtype=torch.bfloat16)
    for _ in range(3):
        wanted.add_(torch.tensor(64.75).bfloat16(), alpha=-(2**-10))
    for found in run(4, lambda: [added(mode, master=False) for mode in MODES]):
        for dtype, values, _, _ in found:
            assert dtype == torch.bfloat16 and values == [wanted.item()]


def test_reduce_dtype_clips_the_norm_of_what_was_added():
    """411 elements of 64.75 each."""
    for found in run(
        4, lambda: [added(mode, max_grad_norm=1.0) for mode in ("overlap", "parallel")]
    ):
        for _, values, _, norm in found:
            assert norm == pytest.approx(64.75 * 411**0.5, rel=1e-6) and values == [
                pytest.approx(1 - 3 * 411**-0.5 * 2**-10, rel=1e-7)
            ]


def scaled_in(mode, reduce_dtype):
    """Two steps of a loss that is scaled, and between them one that is infinite on a rank."""
    module, scaler = Sums(torch.bfloat16), torch.amp.GradScaler("cpu", init_scale=1024.0)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=2**-10, master_dtype=torch.float32)
    model, _ = attach(mode, module, zero, scaler=scaler, reduce_dtype=reduce_dtype)
    for step in range(3):
        share = (
            float("inf")
            if step == 1 and dist.get_rank() == 1
            else [3.0, 0.01171875][dist.get_rank()]
        )
        scaler.scale(model(torch.tensor(share, dtype=torch.bfloat16))).backward()
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    zero.consolidate_state_dict(to=None)
    return {
        v for s in zero.state_dict()["state"].values() for v in s["master_param"].flatten().tolist()
    }, scaler.get_scale()


def test_reduce_dtype_goes_with_a_scaler():
    wanted = 1 - 2 * (3.01171875 / 2) * 2**-10
    for found in run(
        2, lambda: [scaled_in(mode, torch.float32) for mode in ("overlap", "parallel")]
    ):
        for values, scale in found:
            assert list(values) == [pytest.approx(wanted, abs=1e-9)] and scale == 512.0


def test_reduce_dtype_goes_with_ranks_without_data():
    """The last rank leaves after an iteration; what it was to add is zero, and the sum is divided by all ranks."""

    def left(mode):
        module = Sums(torch.bfloat16)
        zero = ZeroRedundancyOptimizer(
            module.parameters(), SGD, lr=2**-10, master_dtype=torch.float32
        )
        model, handle = attach(mode, module, zero, reduce_dtype=torch.float32)
        with Join([handle if mode.startswith("parallel") else model, zero]):
            for _ in range(2 - (dist.get_rank() == 3)):
                model(torch.tensor(SHARES[dist.get_rank()], dtype=torch.bfloat16)).backward()
        zero.consolidate_state_dict(to=None)
        return {
            v
            for s in zero.state_dict()["state"].values()
            for v in s["master_param"].flatten().tolist()
        }

    for found in run(4, lambda: [left(mode) for mode in MODES]):
        assert found == [{1 - (259 + 258) / 4 * 2**-10}] * len(MODES)


def counted(mode, dtype, reduce_dtype):
    """Give the bytes that an iteration sends, by kind and dtype, and what the plan says: elements
    that this rank sends, and owns."""
    group, module = record(), Sums(dtype)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=0.1)
    model, handle = attach(mode, module, zero, group, reduce_dtype=reduce_dtype)
    for _ in range(3):
        model(torch.ones((), dtype=dtype)).backward()
    handle.wait()
    with group.recording() as log:
        model(torch.ones((), dtype=dtype)).backward()
        handle.wait()
    sent = {}
    for e in (e for e in log.events if e.parent is None):
        sent[e.kind, e.dtype] = sent.get((e.kind, e.dtype), 0) + e.wire
    buckets = [b.bucket for b in zero.shards[0].buckets]
    whole, mine = (
        sum(b.numel for b in buckets),
        sum(b.part(dist.get_rank())[1] - b.part(dist.get_rank())[0] for b in buckets),
    )
    return sent, whole, mine


@pytest.mark.parametrize(
    "dtype,reduce_dtype",
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3])
def test_reduce_dtype_sends_exactly_its_bytes(size, dtype, reduce_dtype):
    name = {kind: str(kind).removeprefix("torch.") for kind in (dtype, reduce_dtype)}
    for found in run(size, lambda: [counted(mode, dtype, reduce_dtype) for mode in MODES]):
        for sent, whole, mine in found:
            assert sent == {
                ("reduce_scatter", name[reduce_dtype]): (whole - mine) * reduce_dtype.itemsize,
                ("all_gather", name[dtype]): (size - 1) * mine * dtype.itemsize,
            }


@pytest.mark.parametrize("mode", MODES)
def test_reduce_dtype_lets_go_of_what_was_sent(mode, monkeypatch):
    """What waits for its step is this rank's part alone, in memory of its own size."""
    held, real = [], lend_bucket

    def opened(optims, shard, bucket, part, *rest):
        held.append((part.dtype, part.numel() * 4, part.untyped_storage().nbytes()))
        return real(optims, shard, bucket, part, *rest)

    monkeypatch.setattr(import_module("zero_nb.optim.iteration"), "lend_bucket", opened)
    with simulate(4) as group:
        module = Sums(torch.bfloat16, (64, 640, 64))
        model, handle = attach(
            mode,
            module,
            ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=0.1),
            group,
            reduce_dtype=torch.float32,
        )
        for _ in range(4):
            model(torch.ones((), dtype=torch.bfloat16)).backward()
        handle.wait()
    assert len(held) >= 8 and all(
        dtype == torch.float32 and numel == nbytes for dtype, numel, nbytes in held
    ), held


def refused():
    """Say what each reduce_dtype that cannot work gives; then one that can, and a backward."""
    module, complex_one = Sums(torch.float32), nn.Linear(2, 2, dtype=torch.complex64)
    ddp, hooks = DDP(module), default_hooks
    zero, theirs = (
        ZeroRedundancyOptimizer(m.parameters(), SGD, lr=0.1) for m in (module, complex_one)
    )
    half = torch.bfloat16
    calls = [
        lambda: overlap(ddp, zero, reduce_dtype=torch.int32),
        lambda: data_parallel(module, zero, reduce_dtype="float32"),
        lambda: overlap(ddp, zero, reduce_dtype=torch.float8_e5m2),
        lambda: data_parallel(module, zero, reduce_dtype=torch.complex64),
        lambda: overlap(ddp, zero, hook=hooks.fp16_compress_hook, reduce_dtype=half),
        lambda: overlap(
            ddp,
            zero,
            hook=lambda state, bucket: hooks.allreduce_hook(None, bucket),
            reduce_dtype=half,
        ),
        lambda: overlap(DDP(complex_one), theirs, reduce_dtype=half),
        lambda: data_parallel(complex_one, theirs, reduce_dtype=half),
        lambda: overlap(DDP(complex_one), theirs, hook=hooks.bf16_compress_hook),
        lambda: overlap(ddp, zero, reduce_dtype=half if dist.get_rank() else None),
    ]
    return [
        *map(caught_error, calls),
        caught_error(
            lambda: overlap(ddp, zero, hook=hooks.allreduce_hook, reduce_dtype=half).detach()
        ),
        caught_error(lambda: backward_of(ddp)),
    ]


def test_reduce_dtype_that_cannot_work_is_refused_on_every_rank():
    words = [
        ("TypeError", "torch.int32"),
        ("TypeError", "'float32'"),
        ("TypeError", "float8"),
        ("TypeError", "complex64"),
        ("ValueError", "fp16_compress_hook both say"),
        ("ValueError", "both say"),
        ("ValueError", "imaginary"),
        ("ValueError", "imaginary"),
        ("ValueError", "imaginary"),
        ("ValueError", "disagree"),
    ]
    for found in run(2, refused):
        assert found[-2:] == [None, None]
        for (kind, word), error in zip(words, found[:-2], strict=True):
            assert error and error[0] == kind and word in error[1], (word, error)
