"""Several ranks on one GPU over gloo, where NCCL refuses: every collective, every mode, checkpoints."""

import pytest
import torch
import torch.distributed as dist
from common import flatten
from common.devices import cuda
from common.gloo_calls import DTYPES, differing, results, trained
from common.modes import MODES
from torch.optim import AdamW

from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

BACKEND = "cpu:gloo,cuda:gloo"  # what torch makes of "gloo", with which `run` shows ranks no GPU
LIMIT = 1e-9  # in float64; sums in another order differ by 1e-15


def on_the_gpu(ranks, f, *args):
    def rank():
        torch.cuda.set_device(0)
        return f(*args)

    return run(ranks, rank, backend=BACKEND, timeout=240)


def every_call(dtypes):
    return [differing(results("cpu", dtype), results("cuda", dtype)) for dtype in dtypes]


@cuda
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_gives_what_it_gives_on_the_cpu(way, ranks):
    assert on_the_gpu(ranks, every_call, DTYPES) == [[[]] * len(DTYPES)] * ranks


def sums_on_streams():
    """Start behind a long kernel on one stream, wait on another, and read there."""
    group = Group()
    rank, size = group.group_rank, group.size
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    found = []
    for _ in range(3):
        with torch.cuda.stream(first):
            torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
            x = torch.full((60_000,), rank + 1.0, device="cuda")
            y = torch.full((60_000,), rank + 1.0, device="cuda")
            works = [group.reduce_scatter(x, async_op=True), group.all_gather(y, async_op=True)]
        with torch.cuda.stream(second):
            for work in works:
                work.wait()
            own, others = x.chunk(size)[rank].sum(), y.sum()
        second.synchronize()
        found.append((own.item(), others.item()))
    return found


@cuda
def test_a_call_follows_the_streams_of_its_start_and_of_its_wait():
    assert on_the_gpu(2, sums_on_streams) == [[(90_000.0, 90_000.0)] * 3] * 2


def every_mode(nodes):
    """Give the modes that end further from DDP and the plain optimizer than rounding can bring them."""
    wanted = flatten(trained("cuda", nodes=nodes))
    gaps = {
        mode: (flatten(trained("cuda", mode, nodes)) - wanted).abs().max().item() for mode in MODES
    }
    return {mode: gap for mode, gap in gaps.items() if not gap < LIMIT}


@cuda
@pytest.mark.parametrize(("ranks", "nodes"), [(2, False), (3, False), (4, True)])
def test_every_mode_learns_what_ddp_learns(ranks, nodes):
    assert on_the_gpu(ranks, every_mode, nodes) == [{}] * ranks


def low_precision():
    """Train in bfloat16 with copies in float32: all ranks must hold the same parameters."""
    module = trained("cuda", "zero2-interleaved", dtype=torch.bfloat16, master_dtype=torch.float32)
    mine = flatten(module)
    first = mine.clone()
    dist.broadcast(first, 0)
    return mine.equal(first) and bool(mine.isfinite().all())


@cuda
def test_low_precision_agrees_on_all_ranks():
    assert on_the_gpu(3, low_precision) == [True] * 3


def goes_on(mode, nodes, folder):
    """Save both ways, step on, and go on from each checkpoint; give the largest gaps."""
    module = trained("cuda", mode, nodes)
    [zero] = module.optimizer
    zero.consolidate_state_dict(None)
    state = zero.state_dict()
    save_sharded(folder, module.call[0], zero, 4)
    plain, again = (trained("cuda", mode if i else None, nodes, steps=0) for i in range(2))
    with torch.no_grad():
        for p, q in zip(plain.parameters(), module.parameters(), strict=True):
            p.copy_(q)
    reference = AdamW(plain.parameters(), lr=1e-2)
    reference.load_state_dict(state)
    load_sharded(folder, again.call[0], again.optimizer[0])
    x = torch.ones(6, 12, dtype=torch.float64, device="cuda")  # the same on all ranks
    for call, optimizer in (
        (plain.call[0], reference),
        (module.call[0], zero),
        (again.call[0], again.optimizer[0]),
    ):
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
    wanted = flatten(plain)
    return [(flatten(one) - wanted).abs().max().item() for one in (module, again)]


@cuda
@pytest.mark.parametrize(
    ("mode", "ranks", "nodes"),
    [("zero1", 2, False), ("zero1-overlap", 3, False), ("zero2-interleaved", 4, True)],
)
def test_checkpoints_go_on(folder, mode, ranks, nodes):
    for gaps in on_the_gpu(ranks, goes_on, mode, nodes, folder / "saved"):
        assert all(gap < LIMIT for gap in gaps), gaps
