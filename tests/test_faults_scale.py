"""Work for each step, messages and memory, from 2 ranks to 16,384."""
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zero_nb
from zero_nb.launch import run
from zero_nb.overlap import overlap
from zero_nb.parallel import data_parallel
from zero_nb.process_group import Group, Parts, coalescing_manager
from zero_nb.record import simulate

MANY = 16_384  # ranks


def calls_of(f) -> int:
    """Count the calls of functions, Python's and C's, that `f` makes: a measure of its time that does not depend on the machine."""
    count = 0
    def see(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")
    sys.setprofile(see)
    try: f()
    finally: sys.setprofile(None)
    return count


def layers(count: int, width: int) -> nn.Module: return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def a_steady_step(size: int, way: str, count: int = 24, width: int = 130):
    """Train on one of `size` simulated ranks; calls and collectives of a later step, and the bytes they send."""
    torch.manual_seed(0)
    with simulate(size, 0) as pg:
        model = layers(count, width)
        ddp = model if way == "parallel" else DDP(model, process_group=pg, bucket_cap_mb=0.06)
        zero = zero_nb.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, pg, lr=1e-3, bucket_cap_mb=0.1)
        if way == "parallel": data_parallel(model, zero, bucket_cap_mb=0.1)
        elif way != "step": overlap(ddp, zero, interleaved=way == "interleaved")
        x = torch.ones(2, width)

        def iterate():
            ddp(x).square().mean().backward()
            zero.step()
            zero.zero_grad()

        for _ in range(4): iterate()
        with pg.recording() as log: iterate()
        return calls_of(iterate), log.count(), log.wire


@pytest.mark.parametrize("way", ["step", "overlap", "interleaved", "parallel"])
def test_H6_a_steady_step_does_not_depend_on_the_number_of_ranks(way):
    few, collectives, wire = a_steady_step(8, way)
    many, same, more = a_steady_step(MANY, way)
    assert same == collectives and min(collectives.values()) >= 10 and set(collectives) <= {"all_reduce", "reduce_scatter", "all_gather"}
    assert many <= 1.2 * few, (few, many)
    assert more <= 1.3 * wire * 8 / 7 + 64 * MANY * sum(collectives.values()), "at most 16 elements of padding for each rank and collective"


# ---- unequal parts on NCCL ----

DIVISIONS = [[7, 7, 2], [7, 7, 7], [1, 2, 3], [0, 9, 0], [0, 100, 3], [4, 0, 0], [40, 1, 1], [0, 0, 0]]


def in_turn_and_in_blocks():
    """Reduce and gather unequal parts over NCCL's rules, one by one and in a block; compare with gloo."""
    from nccl_like import nccl_like

    twin, plain, wrong = nccl_like(host_waits=True), Group(), []
    def full(sizes, i): return (torch.arange(float(sum(sizes))) + i) * (plain.group_rank + 1)

    def start(group, tensors, async_op=True):
        works = [group.reduce_scatter(t, sizes, async_op=async_op) for t, sizes in zip(tensors[0], DIVISIONS, strict=True)]
        return works + [group.all_gather(t, sizes, async_op=async_op) for t, sizes in zip(tensors[1], DIVISIONS, strict=True)]

    for block in (False, True):
        ours, want = ([[full(sizes, i) for i, sizes in enumerate(DIVISIONS)] for _ in range(2)] for _ in range(2))
        works = start(plain, want)
        if not block: works += start(twin, ours)
        else:
            with coalescing_manager(twin, async_ops=True) as cm: start(twin, ours, async_op=False)
            works.append(cm)
        for work in works: work.wait()
        for i, sizes in enumerate(DIVISIONS):
            mine = slice(sum(sizes[:plain.group_rank]), sum(sizes[:plain.group_rank + 1]))
            if not ours[0][i][mine].equal(want[0][i][mine]): wrong.append((block, "reduce_scatter", sizes, ours[0][i], want[0][i]))
            if not ours[1][i].equal(want[1][i]): wrong.append((block, "all_gather", sizes, ours[1][i], want[1][i]))
    return wrong, {name for launch in twin.process_group.launches for name in launch}


def test_H7_unequal_parts_in_a_block_are_waited_for():
    for wrong, names in run(3, in_turn_and_in_blocks, timeout=90):
        assert not wrong and not names & {"allgather", "reduce_scatter"}, (wrong, names)


def test_H6_parts_are_three_numbers_where_they_follow_a_rule():
    rule = Parts.of([16] * 12_500 + [0] * (MANY - 12_500))
    assert rule == Parts(MANY, 200_000, 16) and rule.part(12_499) == (199_984, 200_000) and rule.part(MANY - 1) == (200_000, 200_000)
    assert len(str(rule)) < 100 and rule.padded == 16 * MANY and sum(rule) == 200_000 and len(rule) == MANY
    odd = [3, 0, 5] * 1000
    listed = Parts.of(odd)
    assert [*listed] == odd and listed.part(2) == (3, 8) and listed.part(1) == (3, 3) and len(str(listed)) < 200
    assert str(listed) != str(Parts.of([3, 0, 5] * 999 + [3, 5, 0])), "what differs reads otherwise"


def compiled():
    group = Group()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        y = x * 2
        group.reduce_scatter(y)
        group.all_gather(y)
        return y + 1

    return f(torch.ones(4)).tolist()


def test_a_compiler_follows_equal_parts(): assert run(2, compiled) == [[5.0] * 4] * 2
