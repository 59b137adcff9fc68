"""Whatever happens between steps, in any order: what the unsharded optimizer would have made of it."""
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_nb import optimizer
from zero_nb.launch import run
from zero_nb.optimizer import ZeroRedundancyOptimizer

SHAPES = [(7,), (3, 5), (64,), (33, 9), (1,), (0,), (200,)]
CLASSES = [(torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.NAdam, {"lr": 0.01}),
           (torch.optim.Adafactor, {"lr": 0.01})]  # the last one keeps whole parameters
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2**-5}  # of values around 1; bfloat16 has 8 bits


class History:
    """A model trained by both optimizers, with what may happen between steps drawn by chance, the same on every rank."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.kind, self.options = self.chance.choice(CLASSES)
        self.dtype = self.chance.choice([torch.float64, torch.float32, torch.bfloat16])
        self.master = torch.float32 if self.dtype == torch.bfloat16 else None
        shapes = SHAPES if self.kind is not torch.optim.Adafactor else [s for s in SHAPES if s != (0,)]  # whose step divides by the size
        self.ours = [nn.Parameter(torch.randn(self.chance.choice(shapes)).to(self.dtype)) for _ in range(self.chance.randint(2, 9))]
        self.plain = [nn.Parameter(p.detach().to(self.master or self.dtype, copy=True)) for p in self.ours]
        self.views, self.cap, self.first = self.chance.random() < 0.5, self.chance.choice([1.0, 0.0005]), self.chance.randint(1, len(self.ours))
        self.added, self.apart = self.first == len(self.ours), 0.0

    def start(self, ours=None, plain=None):
        """Make the optimizers, or make them anew of what was saved at another world size."""
        optimizer.ROUND = self.chance.choice([1, 50, 1 << 20])
        if not plain: self.freeze(0.3)
        else:
            with torch.no_grad():
                for p, value in zip((*self.ours, *self.plain), (*ours["model"], *plain["model"]), strict=True): p.copy_(value)
            for p, q, trains in zip(self.ours, self.plain, ours["trains"], strict=True): p.requires_grad_(trains), q.requires_grad_(trains)
            self.added = len(ours["state"]["param_groups"]) > 1 or self.added
        self.zero = ZeroRedundancyOptimizer(self.ours[:self.first], self.kind, parameters_as_bucket_view=self.views, master_dtype=self.master,
                                            bucket_cap_mb=self.cap, **self.options)
        self.torchs = self.kind(self.plain[:self.first], **self.options)
        if plain:
            if self.added and self.first < len(self.ours): self.add()
            self.zero.load_state_dict(ours["state"])
            self.torchs.load_state_dict(plain["state"])

    def add(self):
        self.added = True
        self.zero.add_param_group({"params": self.ours[self.first:]})
        self.torchs.add_param_group({"params": self.plain[self.first:]})

    def freeze(self, share):
        for p, q in zip(self.ours, self.plain, strict=True):
            if self.chance.random() < share:
                trains = self.chance.random() < 0.5
                p.requires_grad_(trains), q.requires_grad_(trains)

    def step(self):
        chance = self.chance.random
        if not self.added and chance() < 0.3: self.add()
        if chance() < 0.5: self.freeze(0.4)
        if chance() < 0.2: self.ours[0].data = self.ours[0].data.clone()  # moved
        if chance() < 0.2:  # written, as the checkpoint of a model
            with torch.no_grad():
                for p, q in zip(self.ours[-1:], self.plain[-1:], strict=True): q.copy_(p.mul_(-2.0))
        for p, q in zip(self.ours, self.plain, strict=True):
            gradient = torch.randn(p.shape).to(self.dtype) if p.requires_grad and chance() < 0.85 else None
            p.grad, q.grad = gradient, None if gradient is None else gradient.to(q.dtype)
        for group in (*self.zero.param_groups, *self.torchs.param_groups): group["lr"] *= 0.95
        self.zero.step()
        self.torchs.step()
        self.apart = max([self.apart, *((p - q.to(p.dtype)).abs().max().item() for p, q in zip(self.ours, self.plain, strict=True) if p.numel())])
        if chance() < 0.15:
            self.zero.consolidate_state_dict(to=None)
            self.zero.load_state_dict(self.zero.state_dict())
            self.torchs.load_state_dict(self.torchs.state_dict())  # which rounds some numbers of a state to the dtype of the parameters

    def saved(self):
        """Give what a checkpoint would hold of each, and look how far their states are apart."""
        self.zero.consolidate_state_dict(to=None)
        state, want = self.zero.state_dict(), self.torchs.state_dict()
        held = {i for i, p in enumerate(self.ours) if p.numel()}
        assert held & state["state"].keys() - want["state"].keys() == set() and held & want["state"].keys() <= state["state"].keys(), "whose state it is"
        for i in held & want["state"].keys():
            for key, value in want["state"][i].items():
                if isinstance(value, torch.Tensor): self.apart = max(self.apart, (value - state["state"][i][key]).abs().max().item())
        trains = [p.requires_grad for p in self.ours]
        return ({"model": [p.detach().clone() for p in self.ours], "state": state, "trains": trains},
                {"model": [q.detach().clone() for q in self.plain], "state": want})


def histories(seeds, befores=None):
    """Go through some histories; for each how far the optimizers were apart, what may be, and what is saved."""
    found = []
    for i, seed in enumerate(seeds):
        history = History(seed)
        history.start(*(befores[i] if befores else ()))
        for _ in range(8): history.step()
        saved = history.saved()
        found.append((history.apart, TOLERANCE[history.dtype], saved if dist.get_rank() == 0 else None))
    return found


@pytest.mark.parametrize("first, second", [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_any_history_ends_where_the_unsharded_optimizer_ends_also_at_another_world_size(first, second):
    seeds = range(100 * first, 100 * first + 40)
    before = run(first, histories, seeds, timeout=300)
    after = run(second, histories, seeds, [saved for *_, saved in before[0]], timeout=300)
    for ranks in (before, after):
        for seed, each in zip(seeds, zip(*ranks, strict=True), strict=True):
            assert all(apart <= limit for apart, limit, _ in each), (seed, [apart for apart, *_ in each])
