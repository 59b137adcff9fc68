"""Random programs, each in every mode that steps inside backward, against plain DDP and the plain optimizer."""

import random

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, run_each
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb import ZeroRedundancyOptimizer, data_parallel, overlap

MODES = ("overlap", "overlap interleaved", "data_parallel", "data_parallel interleaved")


class Layers(nn.Module):
    """Runs its second layer where it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x, use=True):
        x = self.first(x).tanh()
        return self.last(self.second(x) if use else x)


def wrapped(mode, net, unused=False, **options):
    """Give what is called, its optimizer and its `no_sync`."""
    kind, _, interleaved = mode.partition(" ")
    options["interleaved"] = bool(interleaved)
    chosen = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    if kind == "data_parallel":
        zero = ZeroRedundancyOptimizer(net.parameters(), SGD, **chosen)
        handle = data_parallel(net, zero, find_unused_parameters=unused, **options)
        return net, zero, handle.no_sync
    model = DDP(net, find_unused_parameters=unused)
    if kind == "ddp":
        return model, SGD(net.parameters(), **chosen), model.no_sync
    zero = ZeroRedundancyOptimizer(net.parameters(), SGD, **chosen)
    overlap(model, zero, **options)
    return model, zero, model.no_sync


def drawn(seed):
    """Draw a program: whether a layer may be unused, and what each iteration does."""
    draw = random.Random(seed)
    unused = draw.random() < 0.4
    iterations = []
    for _ in range(6):
        kept = draw.choice((0, 0, 1, 2))
        # DDP fails where the gradient of a layer is dropped that it was told may be unused
        dropped = 0 if unused else draw.choice((0, 0, 1))
        iterations.append(
            {
                "to_none": draw.random() < 0.5,
                "leaves": draw.random() < 0.5,  # `no_sync` after forward, before backward
                "forwards": 0 if unused else draw.choice((0, 0, 1)),  # without a backward
                "dropped": dropped,  # backwards in `no_sync` whose gradients are cleared
                "uses": [not unused or draw.random() < 0.5 for _ in range(dropped + kept + 1)],
                "hook": draw.choice((None, None, 0, 3)),  # number of a parameter that gets a hook
            }
        )
    return unused, iterations


def clamp(param):
    if param.grad is not None:
        param.grad.clamp_(-0.02, 0.02)


def performed(mode, program):
    """Run a program; give the parameters after each step."""
    unused, iterations = program
    net = Layers()
    model, optimizer, no_sync = wrapped(mode, net, unused)
    inputs = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for what in iterations:
        batches = [torch.randn(2, 4, generator=inputs).double() for _ in what["uses"]]
        optimizer.zero_grad(set_to_none=what["to_none"])
        if what["hook"] is not None:
            [*net.parameters()][what["hook"]].register_post_accumulate_grad_hook(clamp)
        for _ in range(0 if mode == "ddp" else what["forwards"]):
            model(batches[0])  # after it DDP would average in `no_sync`, before hooks see the sum
        *adding, (batch, use) = zip(batches, what["uses"], strict=True)
        for i, (x, used) in enumerate(adding):
            with no_sync():
                loss = model(x, used).square().mean()
                if not what["leaves"]:
                    loss.backward()
            if what["leaves"]:
                loss.backward()
            if i + 1 == what["dropped"]:
                optimizer.zero_grad()
        model(batch, use).square().mean().backward()
        optimizer.step()
        found.append(flatten(net.parameters()))
    return found


def compared(seed):
    program = drawn(seed)
    wanted = performed("ddp", program)
    gaps = {}
    for mode in MODES:
        found = performed(mode, program)
        gaps[mode] = [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
    return gaps


@pytest.mark.parametrize("size", [1, 2, 3])
def test_random_programs_train_as_ddp_does(size):
    cases = {seed: (seed,) for seed in range(10 * size, 10 * size + 10)}
    for seed, ranks in run_each(size, compared, cases).items():
        for gaps in ranks:
            assert all(max(gap) < 1e-12 for gap in gaps.values()), (seed, gaps)


def leftover(mode):
    """Call `step` after a backward that was in `no_sync` only."""
    net = Layers()
    model, optimizer, no_sync = wrapped(mode, net)
    model(torch.ones(1, 4).double()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with no_sync():
        model(torch.ones(1, 4).double()).sum().backward()
    before = flatten(net.parameters())
    said = caught_error(optimizer.step)
    return said, torch.equal(before, flatten(net.parameters()))


def test_step_refuses_gradients_that_were_averaged_by_no_backward():
    for ranks in run_each(2, leftover, {mode: (mode,) for mode in MODES}).values():
        for (kind, text), unchanged in ranks:
            assert kind == "RuntimeError" and "outside no_sync()" in text and unchanged


def norms(mode):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    net = Layers()
    options = {} if mode == "ddp" else {"max_grad_norm": 1.0, "scaler": scaler}
    model, optimizer, _ = wrapped(mode, net, **options)
    found = []
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4).double()).sum() * factor).backward()
        if mode == "ddp":
            scaler.unscale_(optimizer)
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        else:
            found.append(optimizer.driver.grad_norm.item())
        scaler.step(optimizer)
        scaler.update()
    return found


def test_the_norm_of_a_step_that_a_scaler_skips_is_not_finite():
    modes = ("ddp", "overlap", "data_parallel")
    found = run_each(2, norms, {mode: (mode,) for mode in modes})
    for mode in modes:
        assert [norm == norm and norm < 1e9 for norm in found[mode][0]] == [False, True]
        assert found[mode][0][1] == pytest.approx(found["ddp"][0][1])
