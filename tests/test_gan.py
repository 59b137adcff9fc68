"""Two models of which one trains through the other, in each mode, against DDP with an unsharded optimizer."""

import pytest
import torch
from common import caught_error
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

STEPPING = ("zero1-overlap", "zero2", "zero2-interleaved")  # inside backward


def attach(mode, model):
    """Give what is called in place of a model, and its optimizer."""
    if mode == "ddp":
        return DDP(model), Adam(model.parameters(), lr=0.01)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)
    if mode.startswith("zero2"):
        data_parallel(model, optimizer, interleaved=mode == "zero2-interleaved")
        return model, optimizer
    ddp = DDP(model)
    if mode == "zero1-overlap":
        overlap(ddp, optimizer)
    return ddp, optimizer


def trains(mode, freezes):
    """Train a generator against a discriminator; the parameters of both, and the error."""
    torch.manual_seed(0)
    models = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    (generator, for_generator), (discriminator, for_discriminator) = (
        attach(mode, model) for model in models
    )

    def train():
        for _ in range(4):
            fake = generator(torch.randn(4, 2))
            models[1].requires_grad_(True)
            judged = softplus(discriminator(fake.detach())) + softplus(
                -discriminator(torch.randn(4, 3))
            )
            judged.mean().backward()
            for_discriminator.step()
            models[1].requires_grad_(not freezes)
            passes = models[1] if mode == "ddp" and freezes else discriminator
            softplus(-passes(fake)).mean().backward()
            for_generator.step()
            for_generator.zero_grad()
            for_discriminator.zero_grad()

    error = caught_error(train)
    return [p.detach() for model in models for p in model.parameters()], error


@pytest.mark.parametrize(
    ("mode", "freezes"),
    [("zero1", True), ("zero1", False), *((mode, True) for mode in STEPPING)],
)
def test_a_generator_trains_through_a_discriminator(mode, freezes):
    (expected, failed), _ = run(2, trains, "ddp", freezes, timeout=30)
    assert failed is None
    for params, error in run(2, trains, mode, freezes, timeout=30):
        assert error is None
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", STEPPING)
def test_a_generator_whose_backward_would_step_the_discriminator_is_told_to_freeze_it(mode):
    for _, error in run(2, trains, mode, False, timeout=30):
        assert error is not None and error[0] == "RuntimeError"
        assert "to train only the model before this one, as in a GAN, freeze this one" in error[1]
