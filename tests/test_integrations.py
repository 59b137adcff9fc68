"""Other libraries train, save and resume a sharded optimizer: the real ones, on two ranks."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from common import caught
from torch import nn
from torch.optim import AdamW

from zero_nb.comm.launch import run
from zero_nb.integrations.transformers import consolidate_before_save, unwrap
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

pytest.importorskip("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 7))

    def forward(self, x, labels):
        y = self.layers(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


def samples():
    data = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(12, generator=data), "labels": torch.randn(7, generator=data)}
        for _ in range(32)
    ]


def trained(folder, resume, kind, **options):
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class ShardedTrainer(Trainer):
        def create_optimizer(self, *args, **kwargs):
            if self.optimizer is None:
                self.optimizer = kind(self.model)
            return self.optimizer

    given = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 4} | options
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, seed=7, **given
    )
    trainer = ShardedTrainer(Net(), arguments, train_dataset=samples(), eval_dataset=samples()[:8])
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(consolidate_before_save())
    trainer.train(resume_from_checkpoint=resume and str(Path(folder, resume)))
    return [p.detach() for p in trainer.model.parameters()]


def sharded(model):
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)


def plain(model):
    return AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 4}
        | {"metric_for_best_model": "loss"},
        {"save_on_each_node": True},
    ],
    ids=["steps", "epoch", "best", "each node"],
)
def test_the_trainer_saves_and_resumes_bit_for_bit(options):
    with tempfile.TemporaryDirectory() as folder:
        [unbroken, _] = run(2, trained, folder, None, sharded, timeout=120, **options)
        assert Path(folder, "checkpoint-4", "optimizer.pt").stat().st_size > 2 * 4 * 12 * 33
        for resumed in run(2, trained, folder, "checkpoint-4", sharded, timeout=120, **options):
            assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))


def refused(folder):
    return caught(lambda: trained(folder, None, plain))


def test_the_callback_says_that_it_is_beside_another_optimizer():
    with tempfile.TemporaryDirectory() as folder:
        for message in run(2, refused, folder, timeout=120):
            assert "is for a ZeroRedundancyOptimizer, and the trainer has AdamW" in message
    assert "AdamW" in caught(lambda: unwrap(plain(Net())))


def accelerated(folder, resume):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, state_dict_type="full")
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(folder)
    for i in range(4 * resume, 8):
        if i == 4 and not resume:
            accelerator.save_state(folder)
        batch = {k: v[None] for k, v in samples()[i].items()}
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerate_saves_and_resumes_bit_for_bit(ranks):
    with tempfile.TemporaryDirectory() as folder:
        [unbroken, _] = run(2, accelerated, folder, False, timeout=120)
        for resumed in run(ranks, accelerated, folder, True, timeout=120):
            assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
