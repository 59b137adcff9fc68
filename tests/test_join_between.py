"""Join: options of DDP, steps inside backward and checkpoints of activations beside what ranks without data follow."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.comm.launch import run
from zero_nb.join.join import Join


def with_static_graph(lengths):
    """Train with a static graph in which DDP is to find unused parameters, which it does by itself."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    options = {"static_graph": True, "find_unused_parameters": True}
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=1e-6, **options)
    with Join([model]):
        for _ in range(lengths[dist.get_rank()]):
            model.zero_grad()
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    return [p.grad.item() for p in model.parameters()]


@pytest.mark.parametrize("lengths", [(1, 4), (2, 4)])
def test_a_static_graph_brings_buckets_into_another_order_on_all_ranks(lengths):
    assert run(2, with_static_graph, lengths, timeout=30) == [[0.5, 0.5]] * 2
