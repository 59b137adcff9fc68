"""Other libraries train, save and resume a sharded optimizer: the real ones, on two ranks."""

import logging
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from common import caught
from torch import nn
from torch.optim import AdamW

from zero_nb.backward.ddp_overlap import overlap
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


def trained(folder, resume, kind, callback=None, **options):
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
    if callback is not None:
        trainer.add_callback(callback)
    trainer.add_callback(consolidate_before_save())
    trainer.train(resume_from_checkpoint=resume and str(Path(folder, resume)))
    return [p.detach() for p in trainer.model.parameters()]


def sharded(model):
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)


def sharded_as(state_dict_type):
    make = ZeroRedundancyOptimizer
    return lambda model: make(model.parameters(), AdamW, lr=1e-2, state_dict_type=state_dict_type)


def plain(model):
    return AdamW(model.parameters(), lr=1e-2)


@pytest.mark.turns(2)
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


def decided_late(folder):
    """Save when another callback says so, after step 3 in `on_log` and step 4 in `on_evaluate`."""
    from transformers import TrainerCallback

    class Decides(TrainerCallback):
        def on_log(self, args, state, control, **_):
            control.should_save |= state.global_step == 3

        def on_evaluate(self, args, state, control, **_):
            control.should_save = True

    trained(
        folder,
        None,
        sharded_as("full"),
        Decides(),
        max_steps=4,
        save_steps=100,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
    )
    return caught(lambda: trained(folder, None, sharded_as("sharded"), max_steps=4))


def test_the_trainer_saves_when_another_callback_says_so():
    with tempfile.TemporaryDirectory() as folder:
        for message in run(2, decided_late, folder, timeout=120):
            assert "state_dict() of type 'sharded' gives parts" in message
        for step in (3, 4):
            state = torch.load(Path(folder, f"checkpoint-{step}", "optimizer.pt"))["state"]
            assert state[0]["step"] == step and state[0]["exp_avg"].shape == (33, 12)


def refused(folder):
    return caught(lambda: trained(folder, None, plain))


def test_the_callback_says_that_it_is_beside_another_optimizer():
    with tempfile.TemporaryDirectory() as folder:
        for message in run(2, refused, folder, timeout=120):
            assert "is for a ZeroRedundancyOptimizer, and the trainer has AdamW" in message
    assert "AdamW" in caught(lambda: unwrap(plain(Net())))


def accelerated(folder, resume, kind="full"):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = sharded_as(kind)(model)
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


def saved_in_parts(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net(), sharded_as("sharded")(Net()))
    return caught(lambda: accelerator.save_state(folder))


def test_accelerate_does_not_save_one_ranks_part_as_the_whole(tmp_path):
    [message, _] = run(2, saved_in_parts, tmp_path, timeout=120)
    assert "state_dict_type='full' for accelerate.save_state" in message


def lightning_module(overlapped, kind):
    import pytorch_lightning

    class Lit(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, number, index):
            # Lightning begins an epoch anew that it resumes within, so the data are the step's
            step = 10 * self.trainer.fit_loop.epoch_loop.total_batch_idx + self.global_rank
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(4, 12, generator=draw)
            return self.net(x, torch.randn(4, 7, generator=draw))["loss"]

        def configure_optimizers(self):
            optimizer = kind(self)
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

        def on_train_start(self):
            if overlapped:
                overlap(self.trainer.model, self.optimizers().optimizer)

    return Lit()


def fitted(folder, resume, overlapped, kind, options):
    import pytorch_lightning

    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    saving = pytorch_lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=4, save_top_k=-1
    )
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=8,
        logger=False,
        callbacks=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"strategy": "ddp"} | options,
    )
    module = lightning_module(overlapped, kind)
    path = folder / "step=4.ckpt" if resume else None
    trainer.fit(module, torch.utils.data.DataLoader(range(100)), ckpt_path=path)
    driver = getattr(trainer.optimizers[0], "driver", None)
    assert getattr(driver, "steps_in_backward", False) == overlapped
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("overlapped", [False, True])
def test_lightning_saves_and_resumes_bit_for_bit(overlapped, tmp_path):
    pytest.importorskip("pytorch_lightning")
    cases = {"plain": {}, "accumulated": {"accumulate_grad_batches": 2}}
    if not overlapped:
        cases["clipped"] = {"gradient_clip_val": 0.1}

    def all_ways():
        for name, options in cases.items():
            wanted = fitted(tmp_path / f"{name} alone", False, False, plain, options)
            unbroken = fitted(tmp_path / name, False, overlapped, sharded, options)
            resumed = fitted(tmp_path / name, True, overlapped, sharded, options)
            yield name, wanted, unbroken, resumed

    for found in run(2, lambda: [*all_ways()], timeout=120):
        for name, wanted, unbroken, resumed in found:
            assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True)), name
            worst = max((a - b).abs().max() for a, b in zip(wanted, unbroken, strict=True))
            assert worst < 1e-6, (name, worst)  # of the norm that clips, the order is another


def test_lightning_takes_full_state_dicts_and_is_told_what_to_do_with_parts(tmp_path):
    pytest.importorskip("pytorch_lightning")

    def all_types():
        unbroken, resumed = [
            fitted(tmp_path / "full", resume, False, sharded_as("full"), {})
            for resume in (False, True)
        ]
        assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
        parts = lambda: fitted(tmp_path / "parts", False, False, sharded_as("sharded"), {})
        return caught(parts)

    for message in run(2, all_types, timeout=120):
        assert "make the optimizer with state_dict_type='consolidated'" in message


def test_lightning_is_told_to_leave_clipping_to_overlap(tmp_path):
    pytest.importorskip("pytorch_lightning")

    def clipped():
        return caught(lambda: fitted(tmp_path, False, True, sharded, {"gradient_clip_val": 0.1}))

    for message in run(2, clipped):
        assert "Pass max_grad_norm= to overlap()" in message


def test_lightning_refuses_to_average_parameters_of_a_divided_step(tmp_path):
    """It asks for the type of torch's class, and of ranks that step with gradients of their own each
    would step its part with its own."""
    pytest.importorskip("pytorch_lightning")

    def averaged():
        from pytorch_lightning.strategies import DDPStrategy
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

        state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2)
        strategy = DDPStrategy(
            ddp_comm_state=state,
            ddp_comm_hook=post_localSGD_hook.post_localSGD_hook,
            model_averaging_period=2,
        )
        return caught(lambda: fitted(tmp_path, False, False, sharded, {"strategy": strategy}))

    for message in run(2, averaged):
        assert "distributed optimizer of type ZeroRedundancyOptimizer" in message
