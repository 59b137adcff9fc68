"""Ranks that do not agree: each case is a clear error on every rank, at once, and the job goes on."""

from datetime import timedelta

import pytest
import test_bad_calls
import test_bad_constructor
import torch
import torch.distributed as dist
from common.bad_input import GROUP, Case, all_cases, check, make, on_one, planned, saved, weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def differing(specs, world_size, loads=None):
    return planned(*([(0, 0, 16)], [(1, 0, 16)])[:: 1 if dist.get_rank() else -1])(
        specs, world_size
    )


def unfrozen():
    layer = nn.Linear(4, 2)
    layer.weight.requires_grad_(False)
    zero = make(layer.named_parameters(), SGD)
    if dist.get_rank() == 1:
        layer.weight.requires_grad_(True)
    zero.step()


def other_lr_at_the_first_step():
    zero = make([weight()])
    zero.param_groups[0]["lr"] = on_one(1.0, 2.0)
    zero.step()


class Counting(SGD):
    """Counts its calls on one rank, and steps the less the more there were."""

    calls = 0

    def step(self, closure=None):
        self.calls += on_one(1, 0)
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.calls)
        return super().step(closure)


class Normed(nn.Linear):
    """A layer with running statistics, as many as the rank wants."""

    def __init__(self, size):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(size))


def attached(
    attach, model=lambda: nn.Linear(4, 4), kind=AdamW, change=lambda zero: None, **options
):
    """Make a model and an optimizer, change that, and attach a step inside backward."""

    def do():
        made = model()
        zero = make(made.parameters(), kind, shard="whole" if kind is Counting else "auto")
        change(zero)
        ddp = made if attach is data_parallel else DDP(made, process_group=GROUP[0])
        try:
            attach(ddp, zero, **{key: on_one(*values) for key, values in options.items()})
        except Exception:
            assert not zero.driver.steps_in_backward, "nothing is attached that was refused"
            raise

    return do


def other_rate(zero):
    zero.param_groups[0]["lr"] = on_one(1.0, 2.0)


def other_call(mine, theirs):
    def do():
        zero = make([weight(), weight(4)])
        on_one(mine, theirs)(zero)

    return do


DISAGREEING = {
    "another rate": Case(
        lambda: make([weight()], lr=on_one(0.1, 0.2)), ValueError, "disagree", "'lr': 0.2"
    ),
    "other betas": Case(
        lambda: make([weight()], betas=on_one((0.9, 0.9), (0.8, 0.9))),
        ValueError,
        "disagree",
        "0.8",
    ),
    "another kernel": Case(
        lambda: make([weight()], fused=on_one(True, False)), ValueError, "disagree", "fused"
    ),
    "another class": Case(
        lambda: make([weight()], on_one(AdamW, torch.optim.Adam)), ValueError, "disagree", "AdamW"
    ),
    "another class of a group": Case(
        lambda: make([{"params": [weight()], "optimizer_class": on_one(Muon, SGD)}]),
        ValueError,
        "disagree",
        "Muon",
        "SGD",
    ),
    "another shape": Case(
        lambda: make([weight(on_one(3, 4))]), ValueError, "disagree", "(3,)", "(4,)"
    ),
    "another order": Case(
        lambda: make(on_one([weight(), weight(4)], [weight(4), weight()])),
        ValueError,
        "disagree",
        "(4,)",
        "(4, 4)",
    ),
    "another dtype": Case(
        lambda: make([weight(dtype=on_one(torch.float32, torch.float64))]),
        ValueError,
        "disagree",
        "float64",
    ),
    "another name": Case(
        lambda: make([(on_one("bias", "weight"), weight())]),
        ValueError,
        "disagree",
        "'bias",
        "'weight",
    ),
    "another number": Case(
        lambda: make([weight(), *on_one([weight()], [])]), ValueError, "disagree"
    ),
    "other groups": Case(
        lambda: make(
            on_one(
                [{"params": [weight()]}, {"params": [weight(4)]}],
                [{"params": [weight(), weight(4)]}],
            )
        ),
        ValueError,
        "disagree",
    ),
    "another layout": Case(
        lambda: make([nn.Parameter(on_one(torch.zeros(4, 3).t(), torch.zeros(3, 4)))]),
        ValueError,
        "disagree",
        "strides (1, 3)",
    ),
    "frozen on one rank": Case(
        lambda: make([weight(), nn.Parameter(torch.zeros(3), requires_grad=on_one(True, False))]),
        ValueError,
        "disagree",
        "frozen",
    ),
    "another shard": Case(
        lambda: make([weight()], shard=on_one("even", "whole")),
        ValueError,
        "disagree",
        "shard=even",
        "shard=whole",
    ),
    "another policy's plan": Case(
        lambda: make([weight(), weight()], shard=differing), ValueError, "disagree"
    ),
    "another master dtype": Case(
        lambda: make([weight(dtype=torch.bfloat16)], master_dtype=on_one(torch.float32, None)),
        ValueError,
        "disagree",
        "master_dtype",
    ),
    "another bucket": Case(
        lambda: make([weight()], bucket_cap_mb=on_one(1, 2)),
        ValueError,
        "disagree",
        "bucket_cap_mb=1",
        "bucket_cap_mb=2",
    ),
    "views on one rank": Case(
        lambda: make([weight()], AdamW, None, on_one(True, False)),
        ValueError,
        "disagree",
        "bucket_view=True",
    ),
    "another rate at the first step": Case(
        other_lr_at_the_first_step, ValueError, "disagree", "the first step", "lr 1.0", "lr 2.0"
    ),
    "another clipping in overlap": Case(
        attached(overlap, max_grad_norm=(1.0, 2.0)),
        ValueError,
        "disagree on overlap",
        "max_grad_norm=1.0",
        "max_grad_norm=2.0",
    ),
    "a class that one rank calls once, in overlap": Case(
        attached(overlap, kind=Counting),
        ValueError,
        "disagree on overlap",
        "for all buckets: none",
        "for all buckets: Counting",
    ),
    "another cut in data_parallel": Case(
        attached(data_parallel, cut_mb=(1.0, 2.0)),
        ValueError,
        "disagree on data_parallel",
        "cut_mb=1.0",
        "cut_mb=2.0",
    ),
    "a class that one rank calls once, in data_parallel": Case(
        attached(data_parallel, kind=Counting),
        ValueError,
        "disagree on data_parallel",
        "for all buckets: none",
        "for all buckets: Counting",
    ),
    "another buffer in data_parallel": Case(
        attached(data_parallel, lambda: Normed(on_one(3, 4))),
        ValueError,
        "disagree on data_parallel",
        "a buffer of 3 float32",
        "a buffer of 4 float32 mean",
    ),
    "another rate in data_parallel": Case(
        attached(data_parallel, change=other_rate),
        ValueError,
        "disagree on data_parallel",
        "'lr': 1.0",
        "'lr': 2.0",
    ),
    "one takes data_parallel, one steps": Case(
        other_call(
            lambda zero: data_parallel(nn.ParameterList(zero.params()), zero),
            lambda zero: zero.step(),
        ),
        ValueError,
        "what comes next",
        "data_parallel",
        "the first step",
    ),
    "one constructs, one consolidates": Case(
        other_call(lambda zero: make([weight()]), lambda zero: zero.consolidate_state_dict()),
        ValueError,
        "what comes next",
        "making",
        "consolidate_state_dict(to=0)",
    ),
    "one steps, one loads": Case(
        other_call(lambda zero: zero.step(), lambda zero: zero.load_state_dict(saved())),
        ValueError,
        "what comes next",
        "the first step",
        "load_state_dict",
    ),
    "one grows, one constructs": Case(
        other_call(
            lambda zero: zero.add_param_group({"params": [weight()]}), lambda zero: make([weight()])
        ),
        ValueError,
        "what comes next",
        "add_param_group",
        "making",
    ),
    "unfrozen on one rank": Case(
        unfrozen, ValueError, "what comes next", "planning anew", "unfrozen"
    ),
}


CASES = all_cases(disagreeing=DISAGREEING)


@pytest.mark.parametrize(("batch", "name"), CASES)
def test_it_is_one_clear_error_on_every_rank_and_the_job_goes_on(batch, name):
    check(batch, name)


def test_there_are_more_than_a_hundred():
    ids = [case.id for file in (test_bad_constructor, test_bad_calls) for case in file.CASES]
    ids += [case.id for case in CASES]
    assert len(ids) > 150 and len(set(ids)) == len(ids)


def test_what_only_one_rank_can_know_is_at_least_named_by_the_others():
    """A group that is none, and a closure that fails: there is nobody to tell, so the others wait
    as long as their group does, and say for whom."""

    def group_of_one_rank():
        wanted = dist.new_group(timeout=timedelta(seconds=2))
        try:
            ZeroRedundancyOptimizer([weight()], AdamW, on_one("gloo", wanted))
        except (RuntimeError, ValueError) as error:
            return str(error)

    def closure_of_one_rank():
        GROUP[0] = dist.new_group(timeout=timedelta(seconds=2))
        try:
            make([weight()]).step(lambda: 1 / (1 - dist.get_rank()))
        except (RuntimeError, ZeroDivisionError) as error:
            return str(error)

    waiting, own = run(2, group_of_one_rank)
    assert "is not part of group" in own and waiting.startswith(
        "rank 1 did not arrive within 2 s, while rank 0 waited at 'making ZeroRedundancyOptimizer'"
    )
    waiting, own = run(2, closure_of_one_rank)
    assert "division" in own and waiting.startswith(
        "rank 1 did not arrive within 2 s, while rank 0 waited at 'the first step'"
    )
