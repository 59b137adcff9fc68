"""Faults found by review in steps that run inside backward, each kept mended by a test that names it."""

import copy
import io
import itertools
import pickle
import random
import threading
import warnings
from functools import partialmethod
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, run_each
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.comm.subgroups import two_level
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.pieces import lend_bucket

HALVES = [torch.float16, torch.bfloat16]
MODES = ["overlap", "interleaved", "parallel", "parallel interleaved"]


class Sums(nn.Module):
    """Parameters of which each has the input as its gradient."""

    def __init__(self, dtype, sizes=(40, 7, 300, 64)):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(n, dtype=dtype) for n in sizes)

    def forward(self, x):
        return sum((w * x).sum() for w in self.weights)


def attach(mode, module, zero, process_group=None, bucket_cap_mb=0.0003, **options):
    """Give the model to call, and what steps inside its backward; a bucket holds few parameters."""
    if mode.startswith("parallel"):
        return module, data_parallel(
            module, zero, interleaved="interleaved" in mode, bucket_cap_mb=bucket_cap_mb, **options
        )
    ddp = DDP(module, process_group=process_group, bucket_cap_mb=bucket_cap_mb)
    return ddp, overlap(ddp, zero, interleaved="interleaved" in mode, **options)


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
    sent, real = [], Group.reduce_scatter

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
        monkeypatch.setattr(Group, "reduce_scatter", reduce_scatter)
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

    def opened(optims, shard, bucket, part, lacks):
        held.append((part.dtype, part.numel() * 4, part.untyped_storage().nbytes()))
        return real(optims, shard, bucket, part, lacks)

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


def test_reduce_dtype_that_cannot_work_is_refused_on_every_rank():
    def refused():
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
            lambda: overlap(ddp, zero, reduce_dtype=half if dist.get_rank() else None),
        ]
        return [
            *map(caught_error, calls),
            caught_error(
                lambda: overlap(ddp, zero, hook=hooks.allreduce_hook, reduce_dtype=half).detach()
            ),
            caught_error(lambda: backward_of(ddp)),
        ]

    words = [
        ("TypeError", "torch.int32"),
        ("TypeError", "'float32'"),
        ("TypeError", "float8"),
        ("TypeError", "complex64"),
        ("ValueError", "fp16_compress_hook both say"),
        ("ValueError", "both say"),
        ("ValueError", "imaginary"),
        ("ValueError", "imaginary"),
        ("ValueError", "disagree"),
    ]
    for found in run(2, refused):
        assert found[-2:] == [None, None]
        for (kind, word), error in zip(words, found[:-2], strict=True):
            assert error and error[0] == kind and word in error[1], (word, error)


def backward_of(model):
    model(torch.ones(())).backward()


# ---- H4: what reads gradients after backward ----


def unscale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


LINES = {  # of the loop that everybody writes, between backward and step
    "clip_grad_norm_": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_norm_ inf": lambda model, optimizer: nn.utils.clip_grad_norm_(
        model.parameters(), 1e-3, norm_type=float("inf")
    ),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(
        model.parameters(), 1e-3
    ),
    "get_total_norm": lambda model, optimizer: nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
    "norms": lambda model, optimizer: sum(
        p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None
    ),
    "norms of data": lambda model, optimizer: [
        p.grad.data.norm(2).item() for p in model.parameters() if p.grad is not None
    ],
    "norms of detached": lambda model, optimizer: [
        p.grad.detach().norm() for p in model.parameters() if p.grad is not None
    ],
    "isnan": lambda model, optimizer: any(
        p.grad.isnan().any() for p in model.parameters() if p.grad is not None
    ),
    "isfinite": lambda model, optimizer: all(
        torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
    ),
    "divide": lambda model, optimizer: [
        p.grad.div_(1024) for p in model.parameters() if p.grad is not None
    ],
    "noise": lambda model, optimizer: [
        p.grad.add_(torch.randn_like(p)) for p in model.parameters() if p.grad is not None
    ],
    "foreach": lambda model, optimizer: torch._foreach_mul_(
        [p.grad for p in model.parameters() if p.grad is not None] or [torch.ones(1)], 0.5
    ),
    "flatten": lambda model, optimizer: torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None] or [torch.ones(1)]
    ),
    "clone": lambda model, optimizer: [
        p.grad.clone() for p in model.parameters() if p.grad is not None
    ],
    "numpy": lambda model, optimizer: [
        p.grad.cpu().numpy() for p in model.parameters() if p.grad is not None
    ],
    "numpy itself": lambda model, optimizer: [
        p.grad.numpy() for p in model.parameters() if p.grad is not None
    ],
    "tolist": lambda model, optimizer: [
        p.grad.tolist() for p in model.parameters() if p.grad is not None
    ],
    "data": lambda model, optimizer: [
        setattr(p.grad, "data", torch.zeros_like(p))
        for p in model.parameters()
        if p.grad is not None
    ],
    "all_reduce": lambda model, optimizer: [
        dist.all_reduce(p.grad) for p in model.parameters() if p.grad is not None
    ],
    "unscale_": unscale,
}


def trained(mode, dtype=torch.float32, process_group=None, **options):
    """Give a module, its optimizer, the model to call, and the handle."""
    module = Sums(dtype)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, process_group, lr=0.125)
    return module, zero, *attach(mode, module, zero, process_group, **options)


def after_backward(mode, **options):
    """Give what each line says in the first iteration, or in a later one, and how far the parameters went."""
    said = {}
    for name, line in LINES.items():
        _, zero, model, handle = trained(mode, **options)
        for late in (False, True):
            backward_of(model)
            said[name, late] = caught_error(
                lambda line=line, model=model, zero=zero: line(model, zero)
            )
            zero.zero_grad()
            for _ in range(2):
                backward_of(model)  # the loop goes on
            zero.zero_grad()
        handle.leave()
    return said


@pytest.mark.parametrize("mode", MODES)
def test_H4_what_reads_gradients_after_backward_is_told_what_to_write(mode):
    for found in run(2, after_backward, mode):
        for line, error in found.items():
            assert error and error[0] == "RuntimeError" and "max_grad_norm=" in error[1], (
                line,
                error,
            )


def test_H4_it_is_told_also_where_the_norm_is_clipped_already():
    for found in run(2, after_backward, "overlap", max_grad_norm=1.0):
        assert all(found.values())


def without_reading(module, zero):
    module.weights[0].grad = None


def with_zeros(module, zero):
    module.weights[0].grad.zero_()


def with_others(module, zero):
    module.weights[0].grad = torch.ones_like(module.weights[0])


def with_none(module, zero):
    zero.zero_grad()


def changed(mode):
    """Take gradients away before `step`, or put others there, early and late; in a plain loop each
    has another step, or none."""
    said = []
    for change in (without_reading, with_zeros, with_others, with_none):
        module, zero, model, handle = trained(mode)
        for _ in range(3):
            backward_of(model)
            change(module, zero)
            said.append(caught_error(zero.step))
            zero.zero_grad()
            zero.step()  # without a gradient
        handle.leave()
    return said


@pytest.mark.parametrize("mode", MODES)
def test_H4_gradients_that_are_taken_away_or_put_there_are_an_error_of_step(mode):
    for found in run(2, changed, mode):
        assert all(
            error and "gradients were changed or taken away after backward()" in error[1]
            for error in found
        ), found


def skipped(mode):
    """Leave out a step, as loops do that skip a batch; never call it, or once after several backwards."""
    said = []
    for called in ((True, False, True, True), (False, False, False), (False, False, True)):
        _, zero, model, handle = trained(mode)
        for calls in called:
            backward_of(model)
            said.append(calls and caught_error(zero.step))
            zero.zero_grad()
        handle.leave()
    return said


@pytest.mark.parametrize("mode", MODES)
def test_H4_a_step_that_is_left_out_was_taken_and_the_next_one_says_so(mode):
    for found in run(2, skipped, mode):
        assert [error and error[1].partition(" ")[0] for error in found] == [
            None,
            False,
            "2",
            None,
            False,
            False,
            False,
            False,
            False,
            "3",
        ]
        assert (
            "calls of backward() have each taken a step since step() was last called" in found[2][1]
        )


def clipped_in_halves(dtype):
    """Clip a large gradient to a small norm, as torch does."""
    model, clipped = Sums(dtype), Sums(dtype)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    attach("overlap", model, zero, max_grad_norm=2.0**-10)[0](
        torch.tensor(2.0**14, dtype=dtype)
    ).backward()
    clipped(torch.tensor(2.0**14, dtype=dtype)).backward()
    scale = 2.0**-10 / (2.0**14 * flatten(clipped).numel() ** 0.5)
    for p in clipped.parameters():
        p.data.sub_(p.grad.float() * scale)
    return flatten(model), flatten(clipped)


@pytest.mark.parametrize("dtype", HALVES)
def test_H3_a_norm_is_clipped_by_a_number_that_half_precision_does_not_have(dtype):
    for mine, wanted in run(2, clipped_in_halves, dtype):
        assert torch.equal(mine, wanted)


def scaler_without(mode):
    """Run the loop of torch's examples, with a scaler that `overlap` does not know, or knows."""
    found = []
    for known in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        _, zero, model, handle = trained(mode, **({"scaler": scaler} if known else {}))
        scaler.scale(model(torch.ones(()))).backward()
        found.append(caught_error(lambda: scaler.step(zero)))
        zero.zero_grad()
        handle.leave()
    _, zero, model, handle = trained(
        mode, scaler=(scaler := torch.amp.GradScaler("cpu", init_scale=4.0))
    )
    scaler.scale(model(torch.ones(()))).backward()
    scaler.unscale_(zero)
    return [*found, caught_error(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))]


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_H4_a_scaler_that_is_not_given_is_told_and_one_that_is_given_works(mode):
    for without, given, clip in run(2, scaler_without, mode):
        assert (
            without
            and "scaler=" in without[1]
            and given is None
            and clip
            and "max_grad_norm=" in clip[1]
        )


def kept_and_clipped(state, bucket):
    return default_hooks.allreduce_hook(None, bucket)


def test_H4_averages_that_a_hook_of_the_users_left_may_be_read_but_not_changed():
    def both():
        _, zero, model, _ = trained("overlap", hook=kept_and_clipped)
        found = []
        for clip in (None, 1e-3):
            backward_of(model)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            found += [norm.item(), caught_error(zero.step)]
            zero.zero_grad(set_to_none=False)
        backward_of(model)
        return [*found, caught_error(zero.step)]

    for norm, nothing, again, error, last in run(2, both):
        assert norm == again == pytest.approx(411**0.5) and nothing is None and last is None
        assert error and error[0] == "RuntimeError" and "max_grad_norm=" in error[1]


class Blocks(nn.Module):
    """Layers that may be called one by one; a choice of them may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))

    def forward(self, x, uses=range(5)):
        for i in uses:
            x = x + self.layers[i](x).tanh()
        return x


def data(step):
    return torch.randn(
        3,
        6,
        generator=torch.Generator().manual_seed(10 * step + dist.get_rank()),
        dtype=torch.float64,
    )


def plainly(model, step):
    model(data(step)).square().mean().backward()


def in_parts(model, step):
    with model.no_sync():
        plainly(model, step + 100)
    plainly(model, step)


def evaluated(model, step):
    with torch.no_grad():
        model(data(step + 200))
    plainly(model, step)


def unused(model, step):
    model(data(step), range(5) if step % 3 == 0 else (step % 5, 2)).square().mean().backward()


def twice(model, step):
    """Run backward again through one graph: DDP hears of the first."""
    loss = model(data(step)).square().mean()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def frozen(model, step):
    model.get_submodule("module.layers.1" if isinstance(model, DDP) else "layers.1").requires_grad_(
        step not in (2, 3)
    )
    plainly(model, step)


def copied(model, step):
    module = model.module if isinstance(model, DDP) else model.model
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(p.grad is None or step == 0 for p in other.parameters())
    torch.save(module.state_dict(), io.BytesIO())
    module.to("cpu").double().requires_grad_(True)
    plainly(model, step)


LOOPS = {
    "plain": plainly,
    "no_sync": in_parts,
    "no_grad": evaluated,
    "unused": unused,
    "grad": twice,
    "frozen": frozen,
    "copied": copied,
}


class Both:
    """The model to call, with the `no_sync` of what steps."""

    def __init__(self, model, handle):
        self.model, self.no_sync = model, getattr(model, "no_sync", None) or handle.no_sync

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args):
        return self.model(*args)


def goes_on(mode, loop, clears):
    """Train beside plain DDP without a word about gradients; give the largest difference."""
    find = {"find_unused_parameters": True} if loop in ("unused", "frozen") else {}
    plain, module = DDP(Blocks(), bucket_cap_mb=0.0005, **find), Blocks()
    optimizer, zero, worst = (
        SGD(plain.parameters(), lr=0.05),
        ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05),
        0.0,
    )
    if mode.startswith("parallel"):
        handle = data_parallel(
            module, zero, interleaved="interleaved" in mode, bucket_cap_mb=0.0005, **find
        )
        ours = Both(module, handle)
    else:
        ours = DDP(
            module,
            bucket_cap_mb=0.0005,
            gradient_as_bucket_view=loop in ("plain", "unused"),
            **find,
        )
        handle = overlap(ours, zero, interleaved="interleaved" in mode)
    for step in range(8):
        if step == 6:
            handle.detach()
        LOOPS[loop](plain, step)
        optimizer.step()
        optimizer.zero_grad()
        LOOPS[loop](ours, step)
        if step >= 6:
            zero.step()
        if step >= 6 and mode.startswith("parallel"):
            break  # a plain module does not average
        if clears != "never" or step >= 6:
            zero.zero_grad(set_to_none=clears == "to none")
        if clears == "to zero" and step < 6:
            assert all(p.grad is None for p in module.parameters())
        worst = max(worst, (flatten(plain) - flatten(module)).abs().max().item())
    return worst


@pytest.mark.parametrize("mode", MODES)
def test_H4_what_never_looks_at_gradients_goes_on(mode):
    """With zero_grad of both kinds, and without."""
    cases = itertools.product(LOOPS, ["never", "to none", "to zero"])
    found = run_each(2, goes_on, {case: (mode, *case) for case in cases})
    assert {case: ranks for case, ranks in found.items() if max(ranks) >= 1e-12} == {}


def through_a_part(mode):
    """Call layers of the module and not the module, two at a time before their two backwards, and
    never clear gradients."""
    module, plain = Blocks(), Blocks()
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
    data_parallel(
        module,
        zero,
        interleaved="interleaved" in mode,
        bucket_cap_mb=0.0005,
        find_unused_parameters=True,
        hidden=False,
    )
    for step in range(6):
        uses = [0, 1, 2, 3, 4] if step < 3 else [step - 3, 4]
        for model in (plain, module):
            x = data(step)
            for i in uses:
                x = x + model.layers[i](x).tanh()
            x.square().mean().backward()
        for p in plain.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.data.sub_(p.grad / dist.get_world_size(), alpha=0.05)
            p.grad = None
    return (flatten(plain) - flatten(module)).abs().max().item()


def twice_before_backward(mode):
    _, _, model, handle = trained(mode, find_unused_parameters=True)
    for _ in range(4):
        losses = [model(torch.tensor(1.0)) for _ in range(2)]
        for loss in losses:
            loss.backward()
    handle.wait()
    return set(flatten(model).tolist())


def test_H4_markers_give_way_where_no_forward_of_the_module_takes_them_away():
    for found in run(2, lambda: [through_a_part(mode) for mode in MODES[2:]]):
        assert max(found) < 1e-12, found
    for found in run(2, lambda: [twice_before_backward(mode) for mode in MODES[2:]]):
        assert found == [{1 - 8 * 0.125}] * 2


def compiled_again(mode, backend):
    """Compile, and compile anew for another shape while markers are in the place of gradients."""
    plain, module = DDP(Blocks()), Blocks()
    optimizer, zero = (
        SGD(plain.parameters(), lr=0.05),
        ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05),
    )
    ours, _ = attach(mode, module, zero, bucket_cap_mb=25)
    ours, worst = torch.compile(ours, backend=backend), 0.0
    for step in range(6):
        for model in (plain, ours):
            model(data(step)[: 3 if step in (0, 1, 4) else 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, (flatten(plain) - flatten(module)).abs().max().item())
    return worst


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_H4_a_compiled_model_goes_on(mode, backend):
    assert max(run(2, compiled_again, mode, backend)) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_H4_markers_have_no_memory_and_are_made_once(mode):
    """One for each parameter that was stepped, the same in every iteration; none where a parameter
    had no gradient on any rank."""
    with simulate(1) as group:
        module, marks = Blocks(), []
        zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
        if mode.startswith("parallel"):
            model, handle = attach(mode, module, zero, find_unused_parameters=True)
        else:
            handle = overlap(
                model := DDP(module, process_group=group, find_unused_parameters=True),
                zero,
                interleaved="interleaved" in mode,
            )
        for _ in range(4):
            model(torch.ones(1, 6, dtype=torch.float64), (0, 2)).sum().backward()
            marks.append([p.grad for p in module.parameters()])
        handle.detach()
    assert [[mark is not None for mark in step] for step in marks] == [
        [True, True, False, False, True, True, False, False, False, False]
    ] * 4
    assert all(one is other for one, other in zip(marks[0], marks[-1], strict=True))
    assert all(
        mark.shape == p.shape and mark.dtype == p.dtype and mark.data_ptr() == 0
        for p, mark in zip(module.parameters(), marks[-1], strict=True)
        if mark is not None
    )
    assert all(p.grad is None for p in module.parameters())


# ---- M9: reads of the host ----


def reads_of_the_host(mode):
    """Count what a step with a scaler reads from the device: the scale, and whether all is finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module, counts, real = (
        Blocks(),
        {},
        {
            name: getattr(torch.Tensor, name)
            for name in ("item", "tolist", "__bool__", "__float__", "__int__")
        },
    )
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
    model, _ = attach(mode, module, zero, scaler=scaler)

    def counting(name, tensor):
        counts[name] = counts.get(name, 0) + 1
        return real[name](tensor)

    for step in range(5):
        if step >= 3:
            for name in real:
                setattr(
                    torch.Tensor,
                    name,
                    partialmethod(lambda tensor, name: counting(name, tensor), name),
                )  # in this process alone
        loss = scaler.scale(plain_loss(model, step))
        loss.backward()
        for name in real:
            setattr(torch.Tensor, name, real[name])
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    return counts, len(zero.shards[0].buckets)


def plain_loss(model, step):
    return model(data(step)).square().mean()


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_M9_a_scale_is_read_once_a_step(mode):
    """In two steps, of many buckets."""
    for counts, buckets in run(2, reads_of_the_host, mode):
        assert buckets > 3 and counts == {"item": 2, "__bool__": 2}


# ---- find_unused_parameters: one vector for all ----


def asked(mode):
    """Note what an iteration sends, and how many reductions had started when the host read which
    parameters have a gradient."""
    group, module, reads = record(), Blocks(), []
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=0.05)
    if mode.startswith("parallel"):
        handle = data_parallel(
            module,
            zero,
            interleaved="interleaved" in mode,
            bucket_cap_mb=0.0005,
            find_unused_parameters=True,
        )
        model = module
    else:
        model = DDP(module, process_group=group, bucket_cap_mb=0.0005, find_unused_parameters=True)
        handle = overlap(model, zero, interleaved="interleaved" in mode)
    uses = [(0, 1, 2, 3, 4), (0, 2, 4), (1 + dist.get_rank(), 4), (4, 0), (3,), (0, 4)]
    read, found = torch.Tensor.tolist, []
    for layers in uses:
        with group.recording() as log:

            def tolist(tensor):
                if tensor.dtype == torch.float32:
                    reads.append(sum(e.kind == "reduce_scatter" for e in log.events))
                return read(tensor)

            torch.Tensor.tolist = tolist  # in this process alone
            before = [p.detach().clone() for p in module.parameters()]
            model(data(0), layers).square().mean().backward()
            torch.Tensor.tolist = read
            if mode == "parallel":
                handle.wait()
        sent = [
            (e.kind, e.bytes) for e in log.events if e.parent is None and e.dtype == "float32"
        ]  # DDP's own flags are int32
        scatters = sum(e.kind == "reduce_scatter" for e in log.events)
        stepped = [
            not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)
        ]
        found.append((sent, scatters, list(reads), stepped))
        reads.clear()
    return found


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_find_unused_asks_once_for_all_buckets_when_the_last_has_arrived(mode):
    ranks = run(2, asked, mode)
    assert [sent for sent, *_ in ranks[0]] == [sent for sent, *_ in ranks[1]]
    for found in ranks:
        wanted = [
            {0, 1, 2, 3, 4},
            {0, 2, 4},
            {1, 2, 4},
            {0, 4},
            {3},
            {0, 4},
        ]  # layers that are stepped: used on some rank
        for (sent, scatters, reads, stepped), layers in zip(found, wanted, strict=True):
            assert sent == [("all_reduce", 10 * 4)] and reads == [scatters] and scatters >= 3
            assert {i // 2 for i, moved in enumerate(stepped) if moved} == layers


@pytest.mark.parametrize("mode", ["overlap-interleaved", "parallel-interleaved"])
def test_find_unused_asks_with_each_bucket_where_it_is_stepped_before_the_last_has_arrived(mode):
    for found in run(2, asked, mode):
        for sent, scatters, _, stepped in found[3:]:  # when buckets are known
            assert (
                len(sent) == scatters >= 3
                and sum(size for _, size in sent) == 10 * 4
                and all(stepped[i] == stepped[i + 1] for i in range(0, 10, 2))
            )
        assert [{i // 2 for i, moved in enumerate(stepped) if moved} for *_, stepped in found] == [
            {*range(5)},
            {0, 2, 4},
            {1, 2, 4},
            {0, 4},
            {3},
            {0, 4},
        ]


# ---- a backward that fails ----


class OutOfMemory(torch.autograd.Function):
    """Raises in forward or in backward, where it is told to."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            raise torch.OutOfMemoryError("no memory for activations")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            raise torch.OutOfMemoryError("no memory for gradients")
        return grad, None


class Hungry(Blocks):
    """Runs out of memory where it is told to."""

    def forward(self, x, where=""):
        return OutOfMemory.apply(super().forward(x), where)


def skipping(mode, where):
    """Skip a batch on which a rank runs out of memory, as loops of plain training do."""
    module = Hungry()
    model, handle = attach(mode, module, ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05))
    seen = []
    for step in range(4):
        error = caught_error(
            lambda: (
                model(data(step), where if step == 2 and dist.get_rank() == 1 else "")
                .square()
                .mean()
                .backward()
            )
        )
        if error:
            seen.append((step, *error))
        if error and error[0] == "RuntimeError":
            break
    handle.leave()
    return seen


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_a_batch_that_fails_cannot_be_skipped_and_every_rank_says_why(mode, where):
    """The rank that failed sees its own error, and then that it cannot go on; the others see which
    rank failed, and with what."""
    others, mine = run(2, skipping, mode, where, timeout=60)
    assert [(step, kind) for step, kind, _ in others] == [
        (2, "RuntimeError")
    ] and "rank 1" in others[0][2]
    if where == "forward":
        assert "OutOfMemoryError" in others[0][2]
    assert mine[0][:2] == (2, "OutOfMemoryError") and mine[1][:2] == (3, "RuntimeError")


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_a_backward_that_fails_does_not_wait_in_a_destructor(mode, monkeypatch):
    """Ranks are told of it in a thread of its own, which the next forward waits for."""
    threads = []
    monkeypatch.setattr(
        import_module("zero_nb.backward.watch"),
        "fail",
        lambda groups, error: threads.append((threading.current_thread(), str(error))),
    )
    with simulate(2) as group:
        module = Hungry()
        model, _ = attach(
            mode, module, ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=0.05), group
        )
        x = torch.ones(1, 6, dtype=torch.float64)
        model(x).sum().backward()
        with pytest.raises(torch.OutOfMemoryError, match="gradients"):
            model(x, "backward").sum().backward()
        caught_error(lambda: model(x))
    tellers = [thread for thread, words in threads if "did not come to its end; look" in words]
    assert tellers and not any(
        thread is threading.main_thread() or thread.is_alive() for thread in tellers
    )


# ---- what the table of readers and writers shows ----


def between(mode, when):
    """Set the learning rate by hand where many loops do: before forward, before step, after step;
    give the error, and how far the parameters went."""
    module, zero, model, handle = trained(mode)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.5) if when == "scheduler" else None
    error = None
    for step in range(3):
        if when == "before forward":
            zero.param_groups[0]["lr"] = 2.0**-step
        backward_of(model)
        if when == "before step":
            zero.param_groups[0]["lr"] = 2.0**-step
        error = error or caught_error(zero.step)
        if when == "after step":
            zero.param_groups[0]["lr"] = 2.0**-step
        if scheduler:
            scheduler.step()
        zero.zero_grad()
    handle.wait()
    return error, flatten(module)[0].item()


@pytest.mark.parametrize("mode", MODES)
def test_options_that_are_changed_between_backward_and_step_are_an_error(mode):
    """The step that `backward` took did not see them: it would be that of the iteration before, silently."""
    cases = ["before forward", "before step", "after step", "scheduler"]
    for (_, first), (late, _), (_, after), (_, scheduled) in run(
        2, lambda: [between(mode, when) for when in cases]
    ):
        assert (
            first == 1 - (1 + 0.5 + 0.25)
            and after == 1 - (0.125 + 1 + 0.5)
            and scheduled == 1 - 0.125 * 1.75
        )
        assert late and late[0] == "RuntimeError" and "lr changed after backward()" in late[1]


def test_a_learning_rate_in_a_tensor_may_be_changed_after_step():
    def both():
        module, found = Sums(torch.float32), []
        zero = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, lr=torch.tensor(0.125), foreach=False
        )
        model, _ = attach("overlap", module, zero)
        for when in ("after", "between"):
            backward_of(model)
            if when == "between":
                zero.param_groups[0]["lr"].fill_(0.25)
            found.append(caught_error(zero.step))
            zero.param_groups[0]["lr"].fill_(0.5)
        return found

    for after, between_them in run(2, both):
        assert after is None and between_them and "lr changed" in between_them[1]


class Dropping(nn.Module):
    """Draws random numbers in forward, and again where a part is computed again in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (
            nn.Linear(6, 8, dtype=torch.float64),
            nn.Linear(8, 2, dtype=torch.float64),
        )
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def forward(self, x):
        x = checkpoint(
            lambda x: nn.functional.dropout(self.first(x).tanh(), 0.5), x, use_reentrant=False
        )
        return self.last(nn.functional.dropout(self.norm(x), 0.5))


def drawn(mode):
    """Train with random numbers; give the differences from plain DDP, of parameters and buffers,
    and whether as many numbers were drawn."""
    found = []
    for way in ("plain", mode):
        module = Dropping()
        torch.manual_seed(7 + dist.get_rank())
        random.seed(7)
        if way == "plain":
            model, optimizer = DDP(module), SGD(module.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1, momentum=0.9)
            model, handle = attach(way, module, optimizer)
        for step in range(4):
            plainly(model, step)
            optimizer.step()
            optimizer.zero_grad()
        if way != "plain":
            handle.wait()
        found.append(
            (
                flatten(module),
                torch.cat([b.double().flatten() for b in module.buffers()]),
                torch.get_rng_state(),
                random.getstate(),
            )
        )
    (one, ones, *theirs), (other, others, *here) = found
    return (
        (one - other).abs().max().item(),
        (ones - others).abs().max().item(),
        torch.equal(theirs[0], here[0]) and theirs[1] == here[1],
    )


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_and_buffers_are_those_of_ddp(mode):
    for params, buffers, same in run(2, drawn, mode):
        assert params < 1e-12 and buffers < 1e-12 and same


def saved_between(mode):
    """Save between backward and step, and after step, beside what plain training saves after its step."""
    plain, module = DDP(Blocks()), Blocks()
    optimizer, zero = (
        kind(m.parameters(), *more, lr=0.05, momentum=0.9)
        for kind, m, more in ((SGD, plain, ()), (ZeroRedundancyOptimizer, module, (SGD,)))
    )
    model, _ = attach(mode, module, zero)
    for step in range(4):
        for m in (plain, model):
            plainly(m, step)
        zero.consolidate_state_dict(to=None)
        between_them = copy.deepcopy((module.state_dict(), zero.state_dict()))
        for o in (optimizer, zero):
            o.step()
        optimizer.zero_grad()
    zero.consolidate_state_dict(to=None)
    after = module.state_dict(), zero.state_dict()
    theirs = plain.module.state_dict(), optimizer.state_dict()

    def far(one, other):
        states = [
            (s["momentum_buffer"], other[1]["state"][i]["momentum_buffer"])
            for i, s in one[1]["state"].items()
        ]
        return max(
            (a - b).abs().max().item()
            for a, b in [*states, *((one[0][k], other[0][k]) for k in one[0])]
        )

    return far(between_them, after), far(after, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_between_backward_and_step_is_the_step_whole(mode):
    for between_them, theirs in run(2, saved_between, mode):
        assert between_them == 0.0 and theirs < 1e-12


def hooked(mode):
    """Clip in a hook of the optimizer's, before the step, and count in one after it."""
    module, zero, model, handle = trained(mode)
    counts = []
    zero.register_step_post_hook(lambda *_: counts.append(flatten(module)[0].item()))
    backward_of(model)
    zero.step()
    pre = zero.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(module.parameters(), 1.0) and None
    )
    backward_of(model)
    error = caught_error(zero.step)
    pre.remove()
    handle.leave()
    return counts, error


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_the_optimizers_step_run_after_it(mode):
    for counts, error in run(2, hooked, mode):
        assert counts == [0.875] and error and "max_grad_norm=" in error[1]


# ---- what a first step shows ----


class CountsCalls(torch.optim.SGD):
    """Counts the calls of its step in its groups; `where_used`: only in groups that have gradients."""

    where_used = False

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["calls"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            used = any(p.grad is not None for p in group["params"])
            group["calls"] += used or not self.where_used
        return super().step(closure)


class CountsWhereUsed(CountsCalls):
    where_used = True


def skipped_first(mode, infinite):
    """Count the calls of a class whose first steps a scaler skips."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    zero = ZeroRedundancyOptimizer(
        module.parameters(), CountsCalls, lr=0.1, shard="whole", bucket_cap_mb=0.01
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if mode == "overlap":
        model = DDP(module, bucket_cap_mb=0.01)
        overlap(model, zero, scaler=scaler)
    else:
        model = module
        data_parallel(module, zero, scaler=scaler, bucket_cap_mb=0.01)
    for step in range(6):
        data = torch.ones(4, 64) * (float("inf") if step < infinite else 1.0)
        scaler.scale(model(data).square().mean()).backward()
        scaler.step(zero)
        scaler.update()
    return zero.local.by_class[CountsCalls].param_groups[0]["calls"]


@pytest.mark.parametrize("infinite", [0, 1, 3])
@pytest.mark.parametrize("mode", ["overlap", "data_parallel"])
def test_a_class_that_counts_is_seen_after_steps_that_a_scaler_skipped(mode, infinite):
    assert run(2, skipped_first, mode, infinite) == [6 - infinite] * 2


def seen_by_one():
    """Step a class of which only one of two ranks owns something."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    params = list(module.parameters())
    groups = [{"params": params[:1], "optimizer_class": CountsWhereUsed}, {"params": params[1:]}]
    zero = ZeroRedundancyOptimizer(groups, SGD, lr=0.1, bucket_cap_mb=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = data_parallel(module, zero, interleaved=True, bucket_cap_mb=0.01)
        for _ in range(4):
            module(torch.ones(4, 64)).square().mean().backward()
            zero.step()
    return handle.engine.steps_per_bucket


def test_all_ranks_step_at_once_if_a_class_counts_on_one():
    assert run(2, seen_by_one) == [False] * 2


# ---- whose hook it is ----


def whose_hook():
    model = DDP(nn.Linear(4, 4))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    states = []

    def hook(state, bucket):
        states.append(state)
        return default_hooks.allreduce_hook(None, bucket)

    found = []
    for state in ("first", None):
        handle = overlap(model, zero, hook=hook, state=state)
        (registered, _), *_ = model._comm_hooks
        found.append(registered.overlap is handle)
        model(torch.ones(1, 4)).sum().backward()
        handle.detach()
        found.append(registered.overlap is None)
    return found, states


def test_a_hook_knows_its_overlap_and_no_state_of_an_earlier_one():
    assert run(2, whose_hook) == [([True] * 4, ["first", None])] * 2
