"""What lives for one iteration is gone when it is over, without the garbage collector's help.

A cycle that holds a bucket keeps gradients as large as the model until the collector comes.
"""

import gc

import pytest
import torch
from common.modes import MODES
from torch import nn

from zero_nb import ZeroRedundancyOptimizer, run


def found_by_collector():
    """Give the types of tensors and of our objects that only the collector frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = [type(found) for found in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return sorted(
        {k.__name__ for k in kinds if issubclass(k, torch.Tensor) or "zero_nb" in k.__module__}
    )


def train(mode):
    """Give what the collector found after each of the first iterations."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))

    def make(model):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, bucket_cap_mb=0.01)

    sizes = {"bucket_cap_mb": 0.01}
    made = MODES[mode].attach(model, make, ddp=sizes, parallel=sizes)
    model, zero, handle = made.call, made.optimizer, made.handle
    found = []
    for _ in range(4):  # a trial, buckets made anew, and two that know their buckets
        gc.collect()
        gc.disable()
        model(torch.ones(2, 40)).sum().backward()
        zero.step()
        zero.zero_grad()
        found.append(found_by_collector())
        gc.enable()
    if handle is not None:
        handle.detach()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_leaves_nothing_to_the_garbage_collector(mode):
    assert run(2, train, mode) == [[[]] * 4] * 2
