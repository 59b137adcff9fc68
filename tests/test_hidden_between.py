"""What ranks do between a backward with `hidden=True` and the next forward, while parameters are on their way."""

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.optim import SGD, Adam

from zero_nb import ZeroRedundancyOptimizer, data_parallel, full_state_dict, reshard, run


def trained(size, kind, steps):
    """Train with `hidden=True`; the parameters of the last step are on their way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(4)))
    zero = ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-2)
    handle = data_parallel(model, zero, hidden=True)
    for step in range(steps):
        model(torch.ones(2, size) + step).square().mean().backward()
        zero.step()
    return model, zero, handle


def read_on_the_first_rank():
    """Read the model on rank 0 alone, while the others wait for it in torch's barrier."""
    model, _, handle = trained(512, SGD, 3)
    if not dist.get_rank():
        model.state_dict()
    dist.barrier()
    handle.wait()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()


def test_one_rank_may_read_the_model_before_all_meet_in_a_barrier_of_torchs(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY_MB", "1")  # the parameters take 4 MiB
    first, second = run(2, read_on_the_first_rank, timeout=60)
    assert first == second


def refused(steps):
    """Ask for a change of plan while parameters are on their way; give the state after it."""
    _, zero, handle = trained(6, Adam, steps)
    said = caught(lambda: reshard(zero, shard="whole"))
    handle.detach()
    reshard(zero, shard="whole")
    return said, full_state_dict(zero, to=None)["state"]


def plain(steps):
    """Give the state of the same training on one process, without sharding."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    adam = Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(torch.ones(2, 6) + step).square().mean().backward()
        adam.step()
        adam.zero_grad()
    return adam.state_dict()["state"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reshard_that_is_refused_leaves_the_state_as_it_was(ranks):
    wanted = plain(3)
    for said, state in run(ranks, refused, 3):
        assert "detach it, reshard" in said
        for i, values in wanted.items():
            for key, value in values.items():
                torch.testing.assert_close(state[i][key], value)
