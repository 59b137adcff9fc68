"""Optimizers of a user's, for options that take a class by its dotted name."""

import torch


class SignSGD(torch.optim.Optimizer):
    """Steps by the signs of averaged gradients; its state is made in its first step."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["beta"])
                    p.add_(mean.sign(), alpha=-group["lr"])


class NeedsRate(SignSGD):
    """Has no learning rate of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)


class NormedSGD(torch.optim.Optimizer):
    """Divides by the norm of all gradients, so that parameters cannot be stepped apart."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class LateState(torch.optim.Optimizer):
    """Keeps other things after its second step than after its first, in its state and its groups."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["scale"] = 1.0 if state["count"] == 1 else torch.tensor(0.5)
                p.add_(p.grad, alpha=-group["lr"] * float(state["scale"]))
                if state["count"] > 1:
                    state.setdefault("slow", p.clone()).lerp_(p, 0.5)
                    p.copy_(state["slow"])
            group["steps"] = group.get("steps", 0) + 1
            group["late"] = torch.ones(1) if group["steps"] > 1 else None
            if group["steps"] > 2:
                group["later"] = 1


def drop_last_parameter(optimizer):
    """Take the last parameter out of the first group."""
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:-1]
