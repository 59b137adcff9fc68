"""What a watch does with parameters that no step writes: frozen and empty ones, and all of an optimizer."""

import pytest
import torch
import torch.distributed as dist
from common import run_each
from common.modes import MODES
from test_watchdog import flip
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, record, two_level
from zero_nb.verify.divergence import DivergenceError
from zero_nb.verify.watchdog import watch_divergence


def named(error):
    return [(one.name, one.ranks, one.steps) for one in error.found]


def change(tensor, how):
    """Write a tensor as a program does, or flip a bit of it."""
    if how == "flip":
        flip(tensor, 1)
    elif how == "write":
        with torch.no_grad():
            tensor.add_(1)


# ---- frozen parameters of classes whose memory is not read ----


class Packed(nn.Parameter):
    """A parameter of a class that reads its memory in its own way, as those of quantized weights do."""


class Adapted(nn.Module):
    """Has a frozen packed scale, and a layer before the last one that may be frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = Packed(torch.ones(3), requires_grad=False)
        self.base = nn.Linear(12, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.base(x) * self.scale)


def packed_frozen(mode, freezes, how):
    """Train beside a packed parameter; rank 1 changes another frozen one before step 4."""
    module = Adapted()
    if freezes:
        module.get_parameter(freezes).requires_grad_(False)

    def make(model):
        return ZeroRedundancyOptimizer(module.named_parameters(), AdamW, lr=0.1)

    training = MODES[mode].attach(module, make)
    watch_divergence(training.call, training.optimizer, every=2)
    try:
        for step in range(1, 7):
            if step == 4 and dist.get_rank() == 1 and freezes:
                change(module.get_parameter(freezes), how)
            training.optimizer.zero_grad()
            training.call(torch.ones(2, 12)).sum().backward()
            training.optimizer.step()
        training.call(torch.ones(2, 12))  # looks at the report of the last step
    except DivergenceError as error:
        return named(error)
    return None


def test_frozen_parameters_of_another_class_are_left_out_and_others_compared():
    cases = {(mode, "", ""): (mode, "", "") for mode in MODES}
    for how in ("", "flip", "write"):
        cases |= {(mode, "base.bias", how): (mode, "base.bias", how) for mode in MODES}
    wrong = {
        "": None,
        "flip": [("base.bias, up to step 4", (1,), (3, 4)), ("base.bias", (1,), (3, 4))],
        "write": [("base.bias", (1,), (3, 4))],
    }
    for (mode, freezes, how), found in run_each(3, packed_frozen, cases).items():
        assert found == [wrong[how]] * 3, (mode, freezes, how, found)


# ---- an optimizer of which no parameter is stepped ----


def two_optimizers(nodes, how):
    """Train a head beside its backbone, which has an optimizer of its own and is frozen after step 2; rank 1
    changes the backbone before step 6."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 3))
    model = DDP(module, find_unused_parameters=True)
    backbone, head = [
        ZeroRedundancyOptimizer(
            part.named_parameters(), AdamW, two_level(nodes) if nodes else None, lr=0.1
        )
        for part in module
    ]
    watch_divergence(model, backbone, every=2)
    try:
        for step in range(1, 10):
            module[0].requires_grad_(step <= 2 or step > 7)
            if step == 6 and dist.get_rank() == 1:
                change(module[0].bias, how)
            for optimizer in (backbone, head):
                optimizer.zero_grad()
            model(torch.ones(2, 12)).sum().backward()
            for optimizer in (backbone, head):
                optimizer.step()
    except DivergenceError as error:
        return step, *named(error)
    return None


def test_an_optimizer_all_of_whose_parameters_are_frozen_is_watched():
    wrong = {
        "": None,
        "flip": (6, ("0.bias, up to step 6", (1,), (5, 6)), ("0.bias", (1,), (5, 6))),
        "write": (6, ("0.bias", (1,), (5, 6))),
    }
    for size, nodes in ((3, None), (4, 2)):
        cases = {how: (nodes, how) for how in wrong}
        for how, found in run_each(size, two_optimizers, cases).items():
            assert found == [wrong[how]] * size, (size, how, found)


def nothing_to_step(kind, every):
    """Count collectives of steps that step nothing."""
    model = nn.Linear(3, 3)
    tensors = [p.requires_grad_(False) for p in model.parameters()]
    if kind == "empty":
        model.empty = nn.Parameter(torch.ones(0, 4))
        tensors = [model.empty]
    with record() as group:
        zero = ZeroRedundancyOptimizer(tensors, AdamW, group, lr=0.1)
        if every:
            watch_divergence(model, zero, every=every)
        with group.recording() as log:
            for _ in range(6):
                if kind == "empty":
                    model.empty.grad = torch.zeros_like(model.empty)
                zero.step()
    return sum(log.count().values())


@pytest.mark.parametrize("size", [1, 2])
def test_only_a_step_that_reports_sends_where_nothing_is_stepped(size):
    cases = {(kind, every): (kind, every) for kind in ("empty", "frozen") for every in (0, 1, 3)}
    for (kind, every), found in run_each(size, nothing_to_step, cases).items():
        reports = 6 // every if every else 0
        assert found == [reports if size > 1 else 0] * size, (kind, every, found)
