"""Comparisons at many ranks, and of parameters that are no plain matrices."""

import functools

import pytest
import torch
from common import caught_error
from torch import nn

from zero_nb.comm.launch import run
from zero_nb.verify.divergence import odd_ones
from zero_nb.verify.parity import check_parity
from zero_nb.verify.rounding import GRADIENTS, summation_bound
from zero_nb.verify.same import most_frequent


class Counted(int):
    """Counts how often it is compared."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Counted.times += 1
        return int.__eq__(self, other)

    def __ne__(self, other):
        return not self == other


RANKS = 16_384


def test_values_of_many_ranks_are_compared_a_few_times_each():
    values = [Counted(2**40 + (r == 77)) for r in range(RANKS)]
    Counted.times = 0
    odd, usual = odd_ones(values, known=False)
    assert (odd, len(usual)) == ([77], RANKS - 1)
    assert most_frequent(values) == 2**40
    assert Counted.times < 10 * RANKS
    assert most_frequent([Counted(3), Counted(2), Counted(2), Counted(3)]) == 3
    assert odd_ones([5, 6], known=False) == ([0, 1], [0, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [255, 256, 2047, RANKS])
def test_the_bound_holds_on_many_ranks(dtype, size):
    made = torch.Generator().manual_seed(size)
    parts = torch.randn(size, 20, generator=made).to(dtype)
    exact = parts.double().mean(0)
    limit = summation_bound(parts.double().abs().mean(0), size, dtype)
    assert limit.isfinite().all()
    for order in (torch.arange(size), torch.randperm(size, generator=made)):
        sums = torch.zeros(20, dtype=dtype)
        for part in parts[order] / size:
            sums += part
        assert ((sums.double() - exact).abs() <= limit).all()


class Rotates(nn.Module):
    """Has a complex parameter, whose gradient is large in the imaginary part."""

    def __init__(self, wrong):
        super().__init__()
        self.w = nn.Parameter(torch.randn(40, dtype=torch.complex64))
        if wrong:
            self.w.register_hook(lambda grad: torch.complex(grad.real, 2 * grad.imag))

    def forward(self, x):
        y = self.w * x
        return 3 * y.imag.sum() + y.real.square().sum()


def inputs(step, rank, numel=40):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def other_second(make):
    """Give models of which the second has a wrong gradient."""
    wrong = iter((False, True))
    return lambda: make(next(wrong))


def test_imaginary_parts_of_gradients_are_compared():
    def rotated(make):
        return check_parity(make, (torch.optim.SGD, {"lr": 0.01}), inputs, 2)

    assert all(report.same for report in run(3, rotated, lambda: Rotates(False)))
    for report in run(3, rotated, other_second(Rotates)):
        found = report.difference
        assert found is not None and (found.what, found.cause) == ("gradient of w", GRADIENTS)


class Scaled(nn.Module):
    """Has a parameter of no dimension, as CLIP has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(30, 30)
        self.scale = nn.Parameter(torch.tensor(2.6592))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x):
        return (self.linear(x) * self.scale.exp() + self.bias.sum()).square().mean()


def rows(step, rank):
    return inputs(step, rank, 480).view(16, 30)


def test_a_parameter_of_no_dimension_may_be_rounded_otherwise():
    for report in run(2, check_parity, Scaled, (torch.optim.AdamW, {"lr": 1e-3}), rows, 3):
        assert report.same, report


def half_of_it(model):
    return [model[0].weight], torch.optim.AdamW, {"lr": 0.1}


def none_of_it(model):
    return nn.Linear(4, 4).parameters(), torch.optim.AdamW, {"lr": 0.1}


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def compare_what_is_held(optimizer):
    return check_parity(two_layers, optimizer, lambda step, rank: torch.ones(2, 4) + rank, 3)


def test_parameters_that_the_optimizer_does_not_hold_are_not_compared():
    report = run(2, compare_what_is_held, half_of_it)[0]
    assert report.same and report.parameters == 1 and report.steps == 3, report
    said = run(2, caught_error, functools.partial(compare_what_is_held, none_of_it))
    assert [kind for kind, _ in said] == ["ValueError"] * 2
    assert "of the Sequential that require gradients, got 2 others" in said[0][1]
