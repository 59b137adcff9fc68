"""What a watch does with parameters that no step writes."""

import torch
import torch.distributed as dist
from common import run_each
from common.modes import MODES
from test_watchdog import flip
from torch import nn
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer
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
