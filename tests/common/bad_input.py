"""Ways to get it wrong: each is a clear error on every rank, at once, and the job goes on."""

import functools
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.shards import ShardPlan, Span

SIZE, LIMIT = (
    2,
    8.0,
)  # ranks, and seconds that a collective may wait: far more than any case takes, so that a hang shows as what it is


class Case:
    """One bad input: what is done, the type of the error, and words that it must contain on every rank."""

    def __init__(self, do, kind, *words):
        self.do, self.kind, self.words = do, kind, words


GROUP = [None]  # the process group of the case that is running


def make(params, kind=AdamW, process_group=None, *args, **options):
    return ZeroRedundancyOptimizer(params, kind, process_group or GROUP[0], *args, **options)


def weight(*shape, **options):
    return nn.Parameter(torch.zeros(shape or (4, 4), **options))


def on_one(bad, good):
    return bad if dist.get_rank() == 1 else good


def stepped(zero):
    for group in zero.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    zero.step()
    return zero


def saved(kind=AdamW, **options):
    """Give the state dict of an unsharded optimizer after a step."""
    params = [weight(), weight(4)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = kind(params, **options)
    optimizer.step()
    return optimizer.state_dict()


def planned(*held):
    """Give a policy with a fixed answer: spans of (parameter, start, stop) for each rank."""
    return lambda specs, world_size, loads=None: ShardPlan(
        tuple(specs), tuple(tuple(Span(*span) for span in spans) for spans in held)
    )


def attempt(cases):
    """Do every case on this rank: what it raised, how long that took, and whether the group still works afterwards."""
    out = {}
    for name, case in cases.items():
        GROUP[0] = dist.new_group(timeout=timedelta(seconds=LIMIT))
        start, error = time.monotonic(), None
        try:
            case.do()
        except Exception as e:
            error = [kind.__name__ for kind in type(e).__mro__], str(e)
        took, after = time.monotonic() - start, None
        try:
            after = step_together()
        except Exception as e:
            after = f"{type(e).__name__}: {e}"
        out[name] = error, took, after
        dist.barrier()
    return out


def step_together():
    """Train with the group of the case: the job goes on."""
    p = weight(5)
    p.grad = torch.ones(5)
    make([p], SGD, lr=1.0).step()
    return p.tolist()


@dataclass(frozen=True, eq=False)
class Batch:
    """Cases that ranks do one after the other."""

    cases: dict[str, Case]


@functools.cache
def results(batch):
    return run(SIZE, attempt, batch.cases, timeout=300)


def all_cases(**batches):
    """Give the parameters of a test: a batch and the name of one of its cases."""
    params = []
    for kind, cases in batches.items():
        batch = Batch(cases)
        params += [pytest.param(batch, name, id=f"{kind}: {name}") for name in cases]
    return params


def check(batch, name):
    """Look at what every rank has of a case: one clear error, at once, and a group that works."""
    case = batch.cases[name]
    kinds = case.kind if isinstance(case.kind, tuple) else (case.kind,)
    for rank, result in enumerate(results(batch)):
        error, took, after = result[name]
        assert error is not None, f"rank {rank} heard of nothing"
        assert any(kind.__name__ in error[0] for kind in kinds), (
            f"rank {rank}: {error[0][0]}: {error[1]}"
        )
        missing = [word for word in case.words if word not in error[1]]
        assert not missing, f"rank {rank}: {missing} not in {error[1]!r}"
        assert took < LIMIT, f"rank {rank}: {took:.1f} s"
        assert after == [-1.0] * 5, f"rank {rank} cannot go on: {after}"
