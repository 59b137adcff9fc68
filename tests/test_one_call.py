"""Where steps have a stream, all buckets are stepped in one call after backward: a stand-in for
streams on a CPU, and the bits of a training without."""

import pytest
import torch
from common import flatten, run_each
from common.parallel import SMALL, base, batch, linear
from stream_standin import WatchedStream, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

CLASSES = {"AdamW": (AdamW, {}), "SGD": (SGD, {"momentum": 0.9})}
MASTERS = {"master_dtype": torch.float32}
STEPS = 6


class Branching(nn.Module):
    """Leaves one of two layers without gradients, and another always."""

    def __init__(self):
        super().__init__()
        self.body, self.one, self.other, self.idle = base(), linear(), linear(), linear()

    def forward(self, x):
        return (self.one if x[0, 0] > 0 else self.other)(self.body(x))


def idle_group(model):
    """Make a param group of parameters that never have gradients, with a learning rate of its own."""
    idle = {id(p) for p in model.idle.parameters()}
    rest = [p for p in model.parameters() if id(p) not in idle]
    return [{"params": rest}, {"params": list(model.idle.parameters()), "lr": 1.0}]


def half():
    return nn.Sequential(base(), base(), base()).bfloat16()


USES = {
    "plain": {},
    "hidden": {"hidden": True},
    "interleaved": {"interleaved": True},
    "unused": {"make": Branching, "find_unused_parameters": True},
    "a group without gradients": {
        "make": Branching,
        "groups": idle_group,
        "find_unused_parameters": True,
    },
    "norm": {"max_grad_norm": 0.05},
    "masters": {"make": half, "options": MASTERS},
    "a skipped step": {"skips": 3},
}


def attach(kind, model, zero, scaler, find_unused_parameters=False, **setup):
    """Give the model to call, and the handle."""
    looks = {"find_unused_parameters": find_unused_parameters}
    if kind == "data_parallel":
        return model, data_parallel(model, zero, scaler=scaler, **looks, **SMALL, **setup)
    net = DDP(model, bucket_cap_mb=0.0005, **looks)
    return net, overlap(net, zero, scaler=scaler, **setup)


def count_calls(zero, counts):
    """Count the steps of the local optimizers in each iteration; the iteration begins with a 0."""
    for local in zero.local.by_class.values():
        step = local.step

        def counted(*args, step=step, **kwargs):
            counts[-1] += 1
            return step(*args, **kwargs)

        local.step = counted


def iterate(net, zero, scaler, step, skips):
    """Train once; with a scaler, one step has gradients that are infinite."""
    x = batch(step).to(next(net.parameters()).dtype)
    loss = net(x).square().mean()
    if scaler is None:
        loss.backward()
        zero.step()
    else:
        (scaler.scale(loss) * (torch.inf if step == skips else 1.0)).backward()
        scaler.step(zero)
        scaler.update()
    zero.zero_grad()


def train(
    kind, name, streams, make=base, groups=nn.Module.parameters, options=None, skips=None, **setup
):
    """Train; give parameters, calls in each iteration, buckets that this rank steps, and faults."""
    torch.manual_seed(0)
    cls, given = CLASSES[name]
    model, world, counts = make(), World(), []
    zero = ZeroRedundancyOptimizer(
        groups(model), cls, lr=0.05, bucket_cap_mb=0.0005, **given, **(options or {})
    )
    scaler = None if skips is None else torch.amp.GradScaler("cpu", init_scale=8.0)
    net, handle = attach(kind, model, zero, scaler, **setup)
    assert handle.engine.steps_per_bucket
    if streams:
        handle.engine.stream = WatchedStream(world)
    apart = not streams or bool(setup.get("interleaved")) or options is MASTERS
    assert handle.engine.steps_per_bucket == apart
    count_calls(zero, counts)
    with world, world.networked():
        for step in range(STEPS):
            counts.append(0)
            iterate(net, zero, scaler, step, skips)
        handle.wait()
    owned = [bool(b.slots_of(zero.rank)) for s in zero.shards for b in s.plan.buckets]
    return flatten(model).clone(), counts, sum(owned), world.faults if streams else []


def beside_none(how):
    """Train with a stream and without; give whether the bits are the same, and what was counted."""
    (there, *once), (here, *apart) = train(streams=True, **how), train(streams=False, **how)
    return torch.equal(there, here) and bool(there.isfinite().all()), once, apart


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["data_parallel", "overlap"])
def test_steps_on_a_stream_are_one_call_and_the_same_bits(kind, name):
    uses = {use: how for use, how in USES.items() if kind != "overlap" or "hidden" not in how}
    cases = {use: ({"kind": kind, "name": name, **how},) for use, how in uses.items()}
    for use, ranks in run_each(2, beside_none, cases).items():
        for same, (once, _, faults), (apart, owned, _) in ranks:
            assert same and not faults, (use, faults)
            skipped = uses[use].get("skips")
            calls = [int(step != skipped) for step in range(2, STEPS)]
            each = use in ("interleaved", "masters")
            if not each:  # the first two agree, and DDP plans anew
                assert once[2:] == calls, (use, once)
            if "unused" not in use and "gradients" not in use:
                assert owned > 1 and apart[2:] == [owned * n for n in calls], (use, apart, owned)
            if each:
                assert once == apart, (use, once, apart)
