"""Parameters as one tensor, and how far two of them are apart."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


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
