"""A GradScaler with float16 parameters: gradients are unscaled in the dtype in which they are stepped."""

import pytest
import torch
from common.overlapping import attach
from torch import nn
from torch.optim import SGD

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

TRUE = 1e-8  # below all that float16 holds


class Small(nn.Module):
    """Its gradients are `TRUE`; a part of it is wider, so that a scaler finds gradients it takes."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.ParameterList(torch.ones(n, dtype=dtype) for n in (8, 300, 70))
        self.b = nn.Parameter(torch.ones(8))

    def forward(self, factor):
        small = sum((w.float() * TRUE).sum() for w in self.w)
        return (small + self.b.sum() * 0) * factor


def masters(mode, dtype=torch.float16, init_scale=65536.0, **options):
    """Train three steps, of which the second one is not finite; the masters, and the scale."""
    module = Small(dtype)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1e5, master_dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    model, handle = attach(mode, module, zero, scaler=scaler, **options)
    for factor in (1.0, torch.inf, 1.0):
        scaler.scale(model(factor)).backward()
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    handle.wait()
    zero.consolidate_state_dict(to=None)
    state = zero.state_dict()["state"]
    # a master that is no other number than its parameter is not in the state
    found = [state.get(i, {}).get("master_param", w) for i, w in enumerate(module.w, 1)]
    return [v.unique().tolist() for v in found], scaler.get_scale()


def average(state, bucket):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.allreduce_hook(state, bucket)


CASES = {
    "overlap": ("overlap", {}),
    "overlap, float16 sent": ("overlap", {"reduce_dtype": torch.float16}),
    "overlap, hook": ("overlap", {"hook": average}),
    "overlap, clipped": ("overlap", {"max_grad_norm": 1e3}),
    "parallel": ("parallel", {}),
    "parallel, float16 sent": ("parallel", {"reduce_dtype": torch.float16}),
    "parallel, hidden": ("parallel hidden", {}),
    "parallel, float32 sent": ("parallel", {"reduce_dtype": torch.float32}),
}


def in_cases():
    return {name: masters(mode, **options) for name, (mode, options) in CASES.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scale_is_taken_off_in_the_dtype_of_the_masters(world_size):
    for found in run(world_size, in_cases):
        for name, (values, scale) in found.items():
            near = [pytest.approx([1 - 2 * 1e5 * TRUE], rel=1e-6)] * 3
            assert values == near and scale == 32768.0, (name, values)


def without_masters(mode):
    """Step float16 itself, with a scale below 1: what is not finite in float16 is not stepped."""
    weight = nn.ParameterList([torch.ones(8, dtype=torch.float16)])
    module = nn.Module()
    module.weight = weight
    module.forward = lambda x: (weight[0] * x).sum()
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=0.25)
    model, handle = attach(mode, module, zero, scaler=scaler)
    scaler.scale(model(torch.tensor(60000.0, dtype=torch.float16)).float() * 2).backward()
    handle.wait()
    return weight[0].tolist()


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_what_float16_cannot_hold_is_not_stepped(mode):
    assert run(2, without_masters, mode) == [[1.0] * 8] * 2
