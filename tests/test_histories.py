"""Whatever happens between steps, in any order: what the unsharded optimizer would have made of it."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim import state_exchange
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

SHAPES = [(7,), (3, 5), (64,), (33, 9), (1,), (0,), (200,)]


class Both:
    """Muon for the matrices and AdamW for the rest, unsharded, as if they were one optimizer."""

    def __init__(self, params, lr):
        self.matrices = [p for p in params if p.dim() == 2]
        self.optims = [torch.optim.Muon(self.matrices, lr=lr)] if self.matrices else []
        rest = params[len(self.matrices) :]
        self.optims.append(
            torch.optim.AdamW(rest or [params[0].new_zeros(0)], lr=lr)
        )  # torch takes no optimizer without parameters
        self.starts = [0, len(self.matrices) - (not rest)][
            -len(self.optims) :
        ]  # the index of each one's first parameter

    param_groups = property(
        lambda self: [group for optim in self.optims for group in optim.param_groups]
    )

    def add_param_group(self, group):
        self.optims[-1].add_param_group(group)

    def step(self):
        for optim in self.optims:
            optim.step()

    def state_dict(self):
        states = {}
        for first, optim in zip(self.starts, self.optims, strict=True):
            states |= {first + i: state for i, state in optim.state_dict()["state"].items()}
        return {"state": states, "parts": [optim.state_dict() for optim in self.optims]}

    def load_state_dict(self, state):
        for optim, part in zip(self.optims, state["parts"], strict=True):
            optim.load_state_dict(part)


class Breaks:
    """A value that the last rank cannot copy, and the others can."""

    def __deepcopy__(self, memo):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OverflowError("this rank has broken")
        return self


def refuse(*_, **__):
    raise OverflowError("this rank has broken")


CLASSES = [
    (Both, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]  # the last one keeps whole parameters
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2**-5,
}  # of values around 1; bfloat16 has 8 bits


class History:
    """A model trained by both optimizers, with what may happen between steps drawn by chance, the
    same on every rank."""

    def __init__(self, seed, nodes):
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.kind, self.options = self.chance.choice(CLASSES)
        self.dtype = self.chance.choice([torch.float64, torch.float32, torch.bfloat16])
        self.master = torch.float32 if self.dtype == torch.bfloat16 else None
        self.nodes = self.chance.choice([None, nodes])
        shapes = (
            SHAPES if self.kind is not torch.optim.Adafactor else [s for s in SHAPES if s != (0,)]
        )  # whose step divides by the size
        self.ours = [
            nn.Parameter(torch.randn(self.chance.choice(shapes)).to(self.dtype))
            for _ in range(self.chance.randint(2, 9))
        ]
        self.first = self.chance.randint(1, len(self.ours))
        if self.kind is Both:
            self.ours[: self.first] = sorted(self.ours[: self.first], key=lambda p: p.dim() != 2)
        self.plain = [
            nn.Parameter(p.detach().to(self.master or self.dtype, copy=True)) for p in self.ours
        ]
        self.views, self.cap = self.chance.random() < 0.5, self.chance.choice([1.0, 0.0005])
        self.added, self.apart = self.first == len(self.ours), 0.0

    def start(self, ours=None, plain=None):
        """Make the optimizers, or make them anew of what was saved at another world size."""
        state_exchange.ROUND = self.chance.choice([1, 50, 1 << 20])
        if not plain:
            self.freeze(0.3)
        else:
            with torch.no_grad():
                for p, value in zip(
                    (*self.ours, *self.plain), (*ours["model"], *plain["model"]), strict=True
                ):
                    p.copy_(value)
            for p, q, trains in zip(self.ours, self.plain, ours["trains"], strict=True):
                p.requires_grad_(trains), q.requires_grad_(trains)
            self.added = ours["added"]
        given, kind = self.ours[: self.first], torch.optim.AdamW if self.kind is Both else self.kind
        if self.kind is Both:
            matrices = [p for p in given if p.dim() == 2]
            groups = [
                {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.01},
                {"params": given[len(matrices) :]},
            ]
            given = [group for group in groups if group["params"]]
        self.zero = ZeroRedundancyOptimizer(
            given,
            kind,
            self.nodes,
            parameters_as_bucket_view=self.views,
            master_dtype=self.master,
            bucket_cap_mb=self.cap,
            **self.options,
        )
        self.torchs = self.kind(self.plain[: self.first], **self.options)
        if plain:
            if self.added and self.first < len(self.ours):
                self.add()
            self.zero.load_state_dict(ours["state"])
            self.torchs.load_state_dict(plain["state"])

    def add(self):
        self.added = True
        self.zero.add_param_group({"params": self.ours[self.first :]})
        self.torchs.add_param_group({"params": self.plain[self.first :]})

    def freeze(self, share):
        for p, q in zip(self.ours, self.plain, strict=True):
            if self.chance.random() < share:
                trains = self.chance.random() < 0.5
                p.requires_grad_(trains), q.requires_grad_(trains)

    def load_where_it_breaks(self, state, here):
        """Load where a local optimizer fails on one rank, after others perhaps."""
        optim = [*self.zero.local.by_class.values()][-1]
        if here:
            optim.load_state_dict = refuse
        try:
            self.zero.load_state_dict(state)
        finally:
            vars(optim).pop("load_state_dict", None)

    def load_where_a_hook_fails(self, state, here):
        hook = self.zero.register_load_state_dict_pre_hook(refuse if here else lambda *_: None)
        try:
            self.zero.load_state_dict(state)
        finally:
            hook.remove()

    def fault(self):
        """Give something that raises on one rank alone, or on all."""
        last = dist.get_rank() == dist.get_world_size() - 1
        self.zero.consolidate_state_dict(to=None)
        state = copy.deepcopy(self.zero.state_dict())
        noted = {
            **state,
            "param_groups": [
                *state["param_groups"][:-1],
                {**state["param_groups"][-1], "note": Breaks()},
            ],
        }
        strange = {**state, "state": {**state["state"], 99: {}}}
        extra, few = (
            nn.Parameter(torch.ones(3, 3, dtype=self.dtype)),
            nn.Parameter(torch.ones(2, dtype=self.dtype)),
        )
        sparse = nn.Parameter(torch.ones(3, 3, dtype=self.dtype).to_sparse()) if last else extra
        groups = [
            {"params": [extra, self.ours[0]]},
            {"params": [sparse]},
            {"params": [few if last else extra]},
        ]
        adds = [
            lambda group=group: self.zero.add_param_group(group)
            for group in groups[: 1 if dist.get_world_size() == 1 else 3]
        ]
        return self.chance.choice(
            [
                lambda: self.zero.load_state_dict(noted),
                lambda: self.zero.load_state_dict(strange),
                lambda: self.load_where_it_breaks(state, last),
                lambda: self.load_where_a_hook_fails(state, last),
                *adds,
            ]
        )

    def fail(self):
        """Have something fail, perhaps twice, or once more after parameters were frozen."""
        for _ in range(self.chance.choice([1, 1, 2, 3])):
            fault = self.fault()
            try:
                fault()
            except Exception:
                pass
            else:
                self.apart = float("inf")  # some rank did not hear of it
            if self.chance.random() < 0.3:
                self.freeze(0.4)

    def step(self):
        chance = self.chance.random
        if chance() < 0.15:
            self.fail()
        if not self.added and chance() < 0.3:
            self.add()
        if chance() < 0.5:
            self.freeze(0.4)
        if chance() < 0.2:
            self.ours[0].data = self.ours[0].data.clone()  # moved
        if chance() < 0.2:  # written, as the checkpoint of a model
            with torch.no_grad():
                for p, q in zip(self.ours[-1:], self.plain[-1:], strict=True):
                    q.copy_(p.mul_(-2.0))
        for p, q in zip(self.ours, self.plain, strict=True):
            gradient = (
                torch.randn(p.shape).to(self.dtype) if p.requires_grad and chance() < 0.85 else None
            )
            p.grad, q.grad = gradient, None if gradient is None else gradient.to(q.dtype)
        for group in (*self.zero.param_groups, *self.torchs.param_groups):
            group["lr"] *= 0.95
        self.zero.step()
        self.torchs.step()
        self.apart = max(
            [
                self.apart,
                *(
                    (p - q.to(p.dtype)).abs().max().item()
                    for p, q in zip(self.ours, self.plain, strict=True)
                    if p.numel()
                ),
            ]
        )
        if chance() < 0.15:
            self.zero.consolidate_state_dict(to=None)
            self.zero.load_state_dict(self.zero.state_dict())
            self.torchs.load_state_dict(
                self.torchs.state_dict()
            )  # which rounds some numbers of a state to the dtype of the parameters

    def saved(self):
        """Give what a checkpoint would hold of each, and look how far their states are apart."""
        self.zero.consolidate_state_dict(to=None)
        state, want = self.zero.state_dict(), self.torchs.state_dict()
        assert state["state"].keys() == want["state"].keys(), "whose state it is"
        for i, values in want["state"].items():
            assert values.keys() == state["state"][i].keys() - {"master_param"}
            for key, value in values.items():
                if not isinstance(value, torch.Tensor):
                    continue
                assert value.shape == state["state"][i][key].shape
                if value.numel():
                    self.apart = max(
                        self.apart, (value - state["state"][i][key]).abs().max().item()
                    )
        trains = [p.requires_grad for p in self.ours]
        return (
            {
                "model": [p.detach().clone() for p in self.ours],
                "state": state,
                "trains": trains,
                "added": self.added,
            },
            {"model": [q.detach().clone() for q in self.plain], "state": want},
        )


def histories(seeds, befores=None):
    """Go through some histories; for each how far the optimizers were apart, what may be, and what is saved."""
    found, nodes = [], two_level(2) if dist.get_world_size() == 4 else None
    for i, seed in enumerate(seeds):
        history = History(seed, nodes)
        history.start(*(befores[i] if befores else ()))
        for _ in range(8):
            history.step()
        saved = history.saved()
        found.append(
            (history.apart, TOLERANCE[history.dtype], saved if dist.get_rank() == 0 else None)
        )
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize("start", range(0, 40, 10))
@pytest.mark.parametrize("first, second", [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_any_history_ends_where_the_unsharded_optimizer_ends_also_at_another_world_size(
    first, second, start
):
    seeds = range(100 * first + start, 100 * first + start + 10)
    before = run(first, histories, seeds, timeout=300)
    after = run(second, histories, seeds, [saved for *_, saved in before[0]], timeout=300)
    for ranks in (before, after):
        for seed, each in zip(seeds, zip(*ranks, strict=True), strict=True):
            assert all(apart <= limit for apart, limit, _ in each), (
                seed,
                [apart for apart, *_ in each],
            )
