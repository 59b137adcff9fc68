"""Join: options of kinds that JSON does not know reach ranks without data, and the end of a block."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import caught_error
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, lr_scheduler

from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

LENGTHS = (1, 4)


def weight_of_one():
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    return layer


def schedules(kind, number, listed):
    """Train with rates that are numbers of NumPy, in two blocks; the weight, and the last rate."""
    model = DDP(weight_of_one())
    params = model.parameters()
    optimizer = (
        SGD(params, lr=0.1) if kind == "plain" else ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    )
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: number(0.5**step))
    for _ in range(2):
        with Join([model, optimizer, scheduler] if listed else [model, optimizer]):
            for _ in range(LENGTHS[dist.get_rank()]):
                model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        if not listed:
            break
    return model.module.weight.item(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", ["plain", "ours"])
@pytest.mark.parametrize("number", [np.float32, np.float64])
@pytest.mark.parametrize("listed", [False, True])
def test_rates_that_are_numbers_of_numpy(kind, number, listed):
    steps = range(8 if listed else 4)
    gradients = [1.0 if k % 4 == 0 else 0.5 for k in steps]  # the mean over both ranks
    wanted = 1 - sum(0.1 * 0.5**k * gradient for k, gradient in zip(steps, gradients, strict=True))
    for weight, rate in run(2, schedules, kind, number, listed, timeout=30):
        assert weight == pytest.approx(wanted, rel=1e-6)
        assert type(rate) is float and rate == pytest.approx(0.1 * 0.5 ** len(steps), rel=1e-6)


def with_tensors():
    """Train with betas and a rate that are tensors; betas in the end."""
    model = DDP(weight_of_one())
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.5), betas=betas, foreach=False)
    for group in optimizer.param_groups:
        group["betas"] = betas
    with Join([model, optimizer]):
        for k in range(LENGTHS[dist.get_rank()]):
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.param_groups[0]["lr"].fill_(0.5 / (k + 1))
            betas[0].fill_(0.25)
            optimizer.step()
            optimizer.zero_grad()
    (group,) = optimizer.param_groups
    return (
        model.module.weight.item(),
        group["lr"].item(),
        [(type(b), b.item()) for b in group["betas"]],
    )


def test_options_that_are_tensors_stay_tensors():
    ranks = run(2, with_tensors, timeout=30)
    assert ranks[0] == ranks[1]
    assert ranks[0][1:] == (0.125, [(torch.Tensor, 0.25), (torch.Tensor, 0.75)])


def contradicts(policy):
    ddp = DDP(weight_of_one())
    return caught_error(lambda: Join([ddp], throw_on_early_termination=True, policy=policy))


@pytest.mark.parametrize("policy", ["shadow", "stop", "raise"])
def test_a_policy_beside_torchs_name_for_another_is_refused(policy):
    for error in run(2, contradicts, policy, timeout=30):
        assert (error is None) == (policy == "raise")
        if error is not None:
            assert error[0] == "ValueError" and f"policy={policy!r}" in error[1]


def many_joinables(models):
    """End a block of many models, one of which waits for a backward on rank 0 alone."""
    layers = [DDP(weight_of_one()) for _ in range(models)]
    optimizer = SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    with Join([*layers, optimizer]) as join:
        if dist.get_rank() == 0:
            layers[0](torch.ones(1, 1, dtype=torch.float64))
    return join.session.waits_differ


def test_a_block_takes_more_joinables_than_a_number_has_bits():
    for differ in run(2, many_joinables, 40, timeout=60):
        assert differ == [True] + [False] * 40


def local_sgd():
    ddp = DDP(weight_of_one())
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(SGD(ddp.parameters(), lr=0.1), averager)

    def enter():
        with Join([ddp, optimizer]):
            pass

    return caught_error(enter), len(ddp._forward_hooks), ddp._join_config.enable


def test_an_optimizer_without_hooks_is_refused_and_leaves_no_hooks():
    for error, hooks, enabled in run(2, local_sgd, timeout=30):
        assert error[0] == "TypeError" and "PostLocalSGDOptimizer" in error[1]
        assert hooks == 0 and not enabled


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 3, sparse=True)

    def forward(self, words):
        return self.words(words)


def sparse(policy):
    ddp = DDP(Words())
    optimizer = SGD(ddp.parameters(), lr=0.1)

    def train():
        with Join([ddp, optimizer], policy=policy):
            for k in range(LENGTHS[dist.get_rank()]):
                ddp(torch.tensor([k, dist.get_rank()])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    return caught_error(train), ddp.module.words.weight.sum().item()


def test_sparse_gradients_are_refused_where_a_rank_without_data_would_send_some():
    for error, _ in run(2, sparse, "shadow", timeout=30):
        assert error[0] == "ValueError" and "sparse=True" in error[1]
    ranks = run(2, sparse, "stop", timeout=30)
    assert ranks[0] == ranks[1] and ranks[0][0] is None
