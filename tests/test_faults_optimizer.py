"""What the optimizer's readers and writers find between one backward and the next: the faults of the review, entry by entry."""
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb.launch import run
from zero_nb.optimizer import ZeroRedundancyOptimizer
from zero_nb.overlap import overlap
from zero_nb.parallel import data_parallel

SMALL = {"bucket_cap_mb": 0.002, "cut_mb": 0.004}  # buckets of 2 kB, larger parameters in pieces of 4 kB: several of each in small models
MODES = {  # how the optimizer's steps are taken
    "step": None,
    "overlap": (overlap, {}),
    "interleaved": (overlap, {"interleaved": True}),
    "data_parallel": (data_parallel, {"hidden": False, **SMALL}),
    "hidden": (data_parallel, {"hidden": True, **SMALL}),
    "hidden interleaved": (data_parallel, {"hidden": True, "interleaved": True, **SMALL}),
}


def network(dtype=torch.float32) -> nn.Module:
    """Small and large parameters, of one and of two dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 50, bias=False), nn.LayerNorm(50), nn.Linear(50, 5)).to(dtype)


def attach(mode, model, make):
    """Give the model to call, the optimizer, and what takes its steps, if anything does."""
    if MODES[mode] is None or MODES[mode][0] is overlap:
        wrapped = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=0.004)
        zero = make(model)
        return wrapped, zero, overlap(wrapped, zero, **MODES[mode][1]) if MODES[mode] else None
    zero = make(model)
    return model, zero, data_parallel(model, zero, **MODES[mode][1])


def batch(step, dtype=torch.float32):
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())).to(dtype)


def iterate(model, zero, step, dtype=torch.float32):
    model(batch(step, dtype)).float().square().mean().backward()
    zero.step()
    zero.zero_grad()


def told(f):
    try: return f() and None
    except Exception as e: return f"{type(e).__name__}: {e}"


def refused(loss, x) -> bool: return "inplace operation" in (told(lambda: torch.autograd.grad(loss, x)) or "")


PLACEMENTS = {f"{shard}{'-views' if views else ''}-{cap}": {"shard": shard, "parameters_as_bucket_view": views, "bucket_cap_mb": cap}
              for shard in ("even", "whole") for views in (False, True) for cap in (1.0, 0.0005)}


def kept_graphs(mode, unsharded):
    """Per placement, which parameters a step has not marked as written, and layers whose backward goes on with what a step has overwritten."""
    out = {}
    for name, options in PLACEMENTS.items():
        def make(model, options=options): return (AdamW if unsharded else ZeroRedundancyOptimizer)(
            model.parameters(), *(() if unsharded else (AdamW,)), lr=1e-2, **({} if unsharded else options))
        module = network()
        model, zero, _ = attach(mode, module, make)
        for step in range(4): iterate(model, zero, step)
        layers = [module[0], module[2], module[4]]
        inputs = [torch.ones(3, layer.in_features, requires_grad=True) for layer in layers]
        kept = [layer(x).square().sum() for layer, x in zip(layers, inputs, strict=True)]
        before = [p._version for p in module.parameters()]
        iterate(model, zero, 5)
        went_on = [i for i, (loss, x) in enumerate(zip(kept, inputs, strict=True)) if not refused(loss, x)]
        out[name] = went_on, [i for i, (p, v) in enumerate(zip(module.parameters(), before, strict=True)) if p._version == v]
    return out


@pytest.mark.parametrize("mode", MODES)
def test_L4_a_graph_kept_over_a_step_is_an_error_on_every_rank(mode):
    expected = {name: ([], []) for name in PLACEMENTS}
    assert run(2, kept_graphs, mode, False) == [expected, expected]


def test_L4_as_with_the_unsharded_optimizer():
    assert run(2, kept_graphs, "step", True) == [{name: ([], []) for name in PLACEMENTS}] * 2
