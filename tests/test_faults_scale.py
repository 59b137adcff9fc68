"""Work for each step, messages and memory, from 2 ranks to 16,384."""
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zero_nb
from zero_nb.overlap import overlap
from zero_nb.parallel import data_parallel
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
