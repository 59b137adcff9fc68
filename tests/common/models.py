"""A network, parameters as one tensor, and how far two of them are apart."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


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
