"""Faults found by review in steps that run inside backward, each kept mended by a test that names it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.join import Join
from zero_nb.launch import run
from zero_nb.optimizer import ZeroRedundancyOptimizer
from zero_nb.overlap import overlap
from zero_nb.parallel import data_parallel
from zero_nb.process_group import Group, two_level
from zero_nb.record import simulate

HALVES = [torch.float16, torch.bfloat16]
MODES = ["overlap", "interleaved", "parallel", "parallel interleaved"]


class Sums(nn.Module):
    """Parameters of which each has the input as its gradient."""

    def __init__(self, dtype, sizes=(40, 7, 300, 64)):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(n, dtype=dtype) for n in sizes)

    def forward(self, x): return sum((w * x).sum() for w in self.weights)


def flat(model): return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def attach(mode, module, zero, process_group=None, bucket_cap_mb=0.0003, **options):
    """Give the model to call, and what steps inside its backward; a bucket holds few parameters."""
    if mode.startswith("parallel"):
        return module, data_parallel(module, zero, interleaved="interleaved" in mode, bucket_cap_mb=bucket_cap_mb, **options)
    ddp = DDP(module, process_group=process_group, bucket_cap_mb=bucket_cap_mb)
    return ddp, overlap(ddp, zero, interleaved="interleaved" in mode, **options)


# ---- H3: averages of half precision ----

def beside_ddp(mode, dtype, gradient, nodes=False, hook=None):
    """Step on a gradient that is this rank's share of `gradient`; give the parameters, and those of plain DDP, after some steps."""
    plain, module = DDP(Sums(dtype)), Sums(dtype)
    optimizer = SGD(plain.parameters(), lr=2 ** -10)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, two_level(2) if nodes else None, lr=2 ** -10)
    ours, _ = attach(mode, module, zero, **({"hook": hook} if hook else {}))
    x = torch.tensor(gradient[dist.get_rank() % len(gradient)], dtype=dtype)
    for _ in range(4):
        for model in (plain, ours): model(x).backward()
        optimizer.step()
        for model in (plain, ours): model.zero_grad()
    return flat(plain).tolist(), flat(module).tolist()


@pytest.mark.parametrize("dtype,large", [(torch.float16, 40000.0), (torch.bfloat16, 3e38)], ids=["float16", "bfloat16"])
def test_H3_a_mean_overflows_only_where_ddps_does(dtype, large):
    """The mean is one that the dtype holds, the sum is not; in every mode, in the first iteration and in later ones."""
    def every(nodes): return {mode: beside_ddp(mode, dtype, [large, large], nodes) for mode in MODES}
    for size, nodes in ((2, False), (4, True)):
        for found in run(size, every, nodes):
            for mode, (theirs, ours) in found.items(): assert theirs == ours and abs(theirs[0]) < torch.finfo(dtype).max, (mode, ours[0])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_H3_a_mean_is_ddps_bit_for_bit_on_two_ranks(dtype):
    def every(): return {mode: beside_ddp(mode, dtype, [1.37, -0.291]) for mode in MODES}
    for found in run(2, every):
        for mode, (theirs, ours) in found.items(): assert theirs == ours, mode


def test_H3_a_hook_of_the_users_divides_for_itself():
    """allreduce_hook is known and replaced by a reduce-scatter; what is called by another name is kept as it is."""
    def kept(state, bucket): return default_hooks.allreduce_hook(None, bucket)
    def every(): return [beside_ddp("overlap", torch.float16, [40000.0, 40000.0], hook=hook) for hook in (default_hooks.allreduce_hook, kept)]
    for found in run(2, every):
        for theirs, ours in found: assert theirs == ours


def followed(mode):
    """Rank 1 has no data in the second iteration, and nothing but a part in the sum."""
    module = Sums(torch.float16)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=2 ** -10)
    model, handle = attach(mode, module, zero)
    with Join([handle if mode.startswith("parallel") else model, zero]):
        for _ in range(2 - dist.get_rank()): model(torch.tensor(60000.0, dtype=torch.float16)).backward()
    return flat(module)[0].item()


def test_H3_a_rank_without_data_follows_with_the_same_division():
    wanted = 1 - (60000 + 30000) * 2 ** -10 # as in DDP, the sum is divided by all ranks
    for found in run(2, lambda: [followed(mode) for mode in ("overlap", "parallel")]): assert found == [pytest.approx(wanted, rel=2e-3)] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, 1000, 1024])
def test_H3_on_many_ranks_what_is_added_is_what_ddp_adds(size, mode, monkeypatch):
    """Simulated ranks add zeros, so that plain DDP leaves in `.grad` what it sends; then all others add what this one does."""
    sent, real = [], Group.reduce_scatter
    def reduce_scatter(group, tensor, *args, **options):
        sent.append(tensor.clone())
        work = real(group, tensor, *args, **options)
        tensor.mul_(size) # the sum of equal parts
        return work
    gradient = torch.tensor(40000.0, dtype=torch.float16)
    with simulate(size) as group:
        plain, module = DDP(Sums(torch.float16), process_group=group), Sums(torch.float16)
        plain(gradient).backward()
        wanted = next(plain.parameters()).grad[0]
        model, handle = attach(mode, module, ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=2 ** -10), group)
        monkeypatch.setattr(Group, "reduce_scatter", reduce_scatter)
        for _ in range(3): model(gradient).backward()
        handle.wait()
    assert sent and all(torch.equal(part[part != 0], wanted.expand(int((part != 0).sum()))) for part in sent)
    assert torch.isclose(flat(module), torch.tensor(1 - 3 * 40000 * 2 ** -10).half(), rtol=5e-3).any() # where rank 0 owns it
