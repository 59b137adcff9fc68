"""A watch of replicas that is asked for what cannot be, and goes on after errors."""

import torch
import torch.distributed as dist
from common import caught, run_each
from common.modes import MODES
from test_watchdog import Net, attached, flip, iterate, steps_of, traces
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb import ZeroRedundancyOptimizer, run
from zero_nb.verify.checksums import digests
from zero_nb.verify.watchdog import watch_divergence


def refused(what):
    module, training = attached("zero2" if what == "module" else "zero1-overlap")
    rank, zero, call = dist.get_rank(), training.optimizer, training.call
    calls = {
        "every": lambda: watch_divergence(call, zero, every=0),
        "every differs": lambda: watch_divergence(call, zero, every=2 + rank),
        "kinds": lambda: watch_divergence(call, zero, kinds=("weight",)),
        "no kinds": lambda: watch_divergence(call, zero, kinds=()),
        "used up": lambda: watch_divergence(call, zero, kinds=(kind for kind in ("state",))),
        "a number": lambda: watch_divergence(call, zero, kinds=3),
        "another": lambda: watch_divergence(DDP(nn.Linear(2, 2)), zero),
        "model": lambda: watch_divergence(module.parameters(), zero),
        "optimizer": lambda: watch_divergence(call, SGD(module.parameters(), 0.1)),
        "plain": lambda: watch_divergence(module, zero),
        "module": lambda: watch_divergence(nn.Linear(1, 1), zero),
        "another wrapper": lambda: watch_divergence(DDP(module), zero),
        "twice": lambda: (watch_divergence(call, zero), watch_divergence(call, zero)),
        "on one rank": lambda: watch_divergence(call, zero, every=1 if rank == 0 else "1"),
    }
    return caught(calls[what])


REFUSALS = {
    "every": "every must be a number of steps",
    "every differs": "every=2",
    "kinds": "got ['weight']",
    "no kinds": "kinds must be one or more of",
    "used up": "got a generator",
    "a number": "got a int",
    "another": "model must be the DistributedDataParallel whose step is overlapped",
    "model": "model must be a torch.nn.Module",
    "optimizer": "optimizer must be zero_nb's",
    "plain": "model must be the DistributedDataParallel",
    "module": "model must be the module that data_parallel was given",
    "another wrapper": "model must be the DistributedDataParallel whose step is overlapped",
    "twice": "watched already",
    "on one rank": "every must be a number of steps",
}


def test_bad_input_is_an_error_on_all_ranks():
    for what, found in run_each(2, refused, {what: (what,) for what in REFUSALS}).items():
        assert all(REFUSALS[what] in (error or "") for error in found), (what, found)


def unlike_at_start():
    module, training = attached("zero1")
    if dist.get_rank() == 2:
        flip(module.last.bias, 1)
    first = caught(lambda: watch_divergence(training.call, training.optimizer))
    return first, traces(module, training)[2]


def test_ranks_that_begin_with_other_parameters_are_told():
    for found, monitor in run(3, unlike_at_start):
        assert "parameter last.bias on rank 2" in found and "do not begin with the same" in found
        assert monitor is None


def called_back(mode):
    module, training = attached(mode)
    seen = []
    watch_divergence(training.call, training.optimizer, every=2, on_divergence=seen.append)

    def between(step):
        if step in (3, 7) and dist.get_rank() == 1:
            training.optimizer.wait_for_driver()
            flip(module.middle.weight, 0)

    steps_of(module, training, 10, between)
    training.optimizer.wait_for_driver()
    return [[(one.kind, one.name, one.ranks, one.steps) for one in found] for found in seen]


def test_a_callback_is_called_in_the_place_of_an_error_and_training_goes_on():
    modes = ("zero1", "zero1-overlap, interleaved", "zero2, hidden")
    for case, found in run_each(3, called_back, {mode: (mode,) for mode in modes}).items():
        expected = [[("parameter", "middle.weight", (1,), w)] for w in ((3, 4), (7, 8))]
        assert found == [expected] * 3, (case, found)


class Fails(AdamW):
    fails = False

    def step(self, closure=None):
        if Fails.fails:
            raise FloatingPointError("this step fails")
        return super().step(closure)


def failed_step():
    """A step that fails on all ranks may be taken again; the watch goes on."""
    module = Net()
    zero = ZeroRedundancyOptimizer(module.parameters(), Fails, lr=1e-3)
    training = MODES["zero1"].attach(module, lambda model: zero)
    watch_divergence(training.call, zero, every=2)
    steps_of(module, training, 3)
    Fails.fails = True
    iterate(module, training, 4)
    error = caught(zero.step)
    Fails.fails = False

    def between(step):
        if step == 1 and dist.get_rank() == 1:
            flip(module.middle.weight, 0)

    return error, steps_of(module, training, 4, between)


def test_a_watch_goes_on_after_a_step_that_failed():
    for error, found in run(3, failed_step):
        assert error == "FloatingPointError: this step fails"
        assert found == (1, "parameter", "middle.weight", (1,), (3, 4))


def test_digests_do_not_depend_on_where_the_memory_begins():
    values = torch.randn(40_000)
    for shift in range(1, 4):
        moved = torch.cat([values[:shift], values])[shift:]
        assert torch.equal(digests([values, values[:9]]), digests([moved, moved[:9]]))
    nan = torch.tensor([float("nan")] * 3)
    assert torch.equal(digests([nan]), digests([nan.clone()]))
    assert digests([]).numel() == 0 and digests([torch.zeros(0)]).tolist() == [0]
