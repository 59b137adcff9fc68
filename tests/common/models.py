"""A network, parameters as one tensor, and how far two of them are apart."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def network() -> nn.Module:
    """Give a network of small and large parameters, of one and of two dimensions, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 40),
        nn.Tanh(),
        nn.Linear(40, 25, bias=False),
        nn.LayerNorm(25),
        nn.Linear(25, 5),
    ).double()


class Opposite(nn.Sequential):
    """Runs its modules from the last to the first."""

    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


class Recomputed(nn.Module):
    """Runs each layer's forward again inside backward."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        self.inside = nn.ModuleList(nn.Linear(12, 12) for _ in range(4)).double()

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.inside:
            x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.reentrant)
        return x


def normed() -> nn.Module:
    """Give a network with buffers, in float64."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 4)
    ).double()


class Output:
    """An output in which tensors are not found, so that its backward is not heard there."""

    def __init__(self, value):
        self.value = value


def flatten(
    tensors: Iterable[Tensor]
    | nn.Module,  # of one dtype and device; a module stands for its parameters
) -> Tensor:  # one dimension, a copy
    """Concatenate tensors, or a module's parameters, in their order."""
    if isinstance(tensors, nn.Module):
        tensors = tensors.parameters()
    return torch.cat([x.detach().flatten() for x in tensors])


def largest_gap(a: Tensor, b: Tensor) -> float:
    """Give the largest absolute difference of two tensors of one shape."""
    return (a - b).abs().max().item()
