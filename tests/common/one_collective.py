"""One collective of each kind."""

import torch

from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group


def start(g: Group, kind: str, x: torch.Tensor) -> None:
    """Run one collective of a kind."""
    n = g.size
    if kind in ("broadcast", "gather", "scatter"):
        getattr(g, kind)(x, 0)
    elif kind == "all_to_all":
        g.all_to_all(x.clone(), x)
    elif kind == "exchange":
        g.exchange([(x, (g.group_rank + 1) % n)], [(x.clone(), (g.group_rank - 1) % n)])
    elif kind == "coalescing":
        with coalescing_manager(g):
            [g.all_reduce(t) for t in x.chunk(4)]
    else:
        getattr(g, kind)(x)
