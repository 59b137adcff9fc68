"""What checkpoints are tested on: classes and options, and the steps before and after a save."""

import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon

from common.models import network
from common.modes import MODES
from zero_nb.checkpoint.full import full_state_dict
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Evil:
    """Makes a folder when it is read from a pickle."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def saved_and_loaded(value):
    """Give what `torch.save` and `torch.load` make of an object."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def two_layers():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 7)).double()


def convolutions():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten())
    return model.double().to(memory_format=torch.channels_last)


class Scale(nn.Module):
    """Has a parameter of one element that is contiguous, as it must be, and has the stride 2."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4, dtype=torch.float64)[::2][:1])

    def forward(self, x):
        return x * self.factor


def scaled():
    return nn.Sequential(network(), Scale())


def half():
    return two_layers().bfloat16()


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how its optimizer is made."""

    kind: Any = AdamW  # or the name of a class of pytorch_optimizer
    model: Any = network
    shape: tuple[int, ...] = (12,)  # of an input
    muon: bool = False  # for matrices, beside `kind`
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-2),)
    levels: bool = False  # two, of two ranks, where their number is even

    def optimizer(self, module, **more):
        params = list(module.parameters())
        if self.muon:
            matrices = [p for p in params if p.dim() == 2]
            rest = [p for p in params if p.dim() != 2]
            params = [
                {"params": matrices, "optimizer_class": Muon, "lr": 1e-2},
                {"params": rest, "lr": 1e-2},
            ]
        levels = self.levels and dist.get_world_size() % 2 == 0
        group = two_level(2) if levels else None
        options = dict(self.options) | more
        kind = self.kind
        if isinstance(kind, str):  # imported where it is used, for it brings transformers along
            kind = getattr(import_module("pytorch_optimizer"), kind)
        return ZeroRedundancyOptimizer(params, kind, group, bucket_cap_mb=0.002, **options)


RECIPES = {
    "AdamW": Recipe(),
    "SGD": Recipe(SGD, options=(("lr", 0.1), ("momentum", 0.9))),
    "Adagrad": Recipe(Adagrad),
    "Adafactor": Recipe(Adafactor),
    "Muon and AdamW": Recipe(muon=True),
    "amsgrad, channels last": Recipe(
        model=convolutions, shape=(3, 8, 8), options=(("lr", 1e-2), ("amsgrad", True))
    ),
    "master copies": Recipe(model=half, options=(("lr", 1e-2), ("master_dtype", torch.float32))),
    "one element, stride 2": Recipe(model=scaled),
    "views": Recipe(options=(("lr", 1e-2), ("parameters_as_bucket_view", True))),
}


def inputs(recipe, seed, count=3):
    data = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if recipe.model is half else torch.float64
    return [
        torch.randn(8, *recipe.shape, generator=data, dtype=torch.float64).to(dtype)
        for _ in range(count)
    ]


def train(attached, batches):
    for x in batches:
        attached.optimizer.zero_grad()
        attached.call(x).square().mean().backward()
        attached.optimizer.step()


def parameters(attached):
    """Give the parameters; where there are master copies these, of which the parameters are the rounded
    values. All ranks call this."""
    zero = attached.optimizer
    zero.wait_for_driver()
    found = [p.detach() for p in attached.call.parameters()]
    if zero.settings.master_dtype is not None:
        state = full_state_dict(zero, None)["state"]
        copies = [state[i]["master_param"] for i in range(len(found))]
        same([copy.to(p.dtype) for copy, p in zip(copies, found, strict=True)], found)
        assert {copy.dtype for copy in copies} == {zero.settings.master_dtype}
        found = copies
    return [p.double().clone() for p in found]


def limit_of(recipe):
    """Bound how far `parameters` may be apart where a training goes on in another mode or on other ranks.

    Where 3 ranks average bfloat16, gradients are rounded: master copies were up to 5e-5 apart. Copies
    that are made anew, of rounded parameters, are 1e-3 apart."""
    return 2e-4 if recipe.model is half else 1e-12


def begin(recipe, mode, kind="consolidated"):
    return MODES[mode].attach(
        recipe.model(), lambda model: recipe.optimizer(model, state_dict_type=kind)
    )


def check(wanted, got, limit=1e-12):
    worst = max((a - b).abs().max().item() for a, b in zip(wanted, got, strict=True))
    assert worst <= limit, worst


def kill_again_and_again(
    save: Callable[[], None],  # in a process of its own: saves on and on
    folder: Path,  # where
    version: Callable[[], int],  # of the last complete checkpoint
    kills: int = 100,
):
    """Kill a process that saves, at random moments of a save; every tenth time after it has completed
    one. Gives the version after each kill."""
    moments = Random(5)
    for number in range(kills):
        before = version()
        left = {*folder.glob(".*")}
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # those of OpenMP are not here after a fork
            save()
            os._exit(1)
        try:
            end = time.monotonic() + 30
            while not (version() > before if number % 10 == 0 else {*folder.glob(".*")} - left):
                assert time.monotonic() < end
                time.sleep(0.0005)
            time.sleep(moments.uniform(0, 0.015))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        yield version()


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def same(one, other):
    """Compare two structures of tensors and plain values, to the bit."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other) and len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other
