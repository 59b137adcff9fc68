"""Train a sharded optimizer with accelerate, the Trainer of transformers, or Lightning:

torchrun --nproc-per-node 2 libraries.py lightning runs/lightning --steps 8
"""

import argparse
import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.utils.data import DataLoader, SequentialSampler

from zero_nb import ZeroRedundancyOptimizer

BATCH = 8  # rows of a rank in a step
PACKAGES = {
    "accelerate": "accelerate",
    "transformers": "transformers accelerate",
    "lightning": "pytorch-lightning",
}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(nn.Module):
    """Two layers that give their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give the loss for x, (rows, 20), and labels, (rows, 1)."""
        return {"loss": mse_loss(self.layers(x), labels)}


class Rows:
    """Data in which row k is the same whichever rank asks for it."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        x = torch.randn(20, generator=torch.Generator().manual_seed(k))
        return {"x": x, "labels": x[:1] * x[1:2]}


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    """Make the optimizer: this call is all that the libraries differ from unsharded training in."""
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, **options)


def with_accelerate(folder: Path, steps: int) -> nn.Module:
    """Write the loop by hand; accelerate wraps the model, and saves on all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = sharded(model, state_dict_type="full")
    ranks = accelerator.num_processes
    loader = DataLoader(Rows(BATCH * ranks * steps), BATCH)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(ddp(**batch)["loss"])
        optimizer.step()
    accelerator.save_state(str(folder))
    return model


def with_transformers(folder: Path, steps: int) -> nn.Module:
    """Let the Trainer train; it saves on rank 0, so a callback brings the state there before."""
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers import logging as transformers_logging

    from zero_nb.integrations.transformers import consolidate_before_save

    class ShardedTrainer(Trainer):
        def create_optimizer(self, *_: Any, **__: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = sharded(self.model)
            return self.optimizer

        def _get_train_sampler(self, *_: Any) -> Any:  # not shuffled, to compare
            return SequentialSampler(self.train_dataset)

    transformers_logging.set_verbosity_error()
    chosen = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "save_steps": steps}
    shown = {"report_to": [], "disable_tqdm": True}
    options = TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        **chosen,
        **shown,
    )
    rows = Rows(BATCH * int(os.environ.get("WORLD_SIZE", "1")) * steps)
    trainer = ShardedTrainer(Net(), options, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(consolidate_before_save())
    trainer.train()
    return trainer.model


def with_lightning(folder: Path, steps: int) -> nn.Module:
    """Let Lightning train; it consolidates by itself before it saves."""
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return sharded(self)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    module = Module()
    saving = lightning.callbacks.ModelCheckpoint(folder, filename="last", every_n_train_steps=steps)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=[saving],
        **QUIET,
    )
    trainer.fit(module, DataLoader(_own_batches(ranks, steps), batch_size=None))
    return module.net


def _own_batches(ranks: int, steps: int) -> list[dict[str, Tensor]]:
    """Give this rank's batches: rows of a step lie together, those of rank 0 first."""
    rank = int(os.environ.get("RANK", "0"))
    rows = Rows(BATCH * ranks * steps)
    starts = [BATCH * (ranks * step + rank) for step in range(steps)]
    parts = [[rows[start + i] for i in range(BATCH)] for start in starts]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


TRAINERS = {
    "accelerate": with_accelerate,
    "transformers": with_transformers,
    "lightning": with_lightning,
}


def train_alone(ranks: int, steps: int) -> nn.Module:
    """Train unsharded and without a library, on the rows of all ranks."""
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for batch in DataLoader(Rows(BATCH * ranks * steps), BATCH * ranks):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    return model


def largest_gap(a: nn.Module, b: nn.Module) -> float:
    """Give the largest difference of a parameter."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return torch.stack([(x - y).abs().max() for x, y in pairs]).max().item()


def check_installed(library: str) -> None:
    """End with a word on what to install, if need be."""
    module = "pytorch_lightning" if library == "lightning" else library
    if importlib.util.find_spec(module) is None:
        sys.exit(f"{library} is not installed here: pip install {PACKAGES[library]}")


def main() -> None:
    """Train as the command line says, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="?", choices=TRAINERS, default="accelerate")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="of the checkpoint (default: runs/ and the library)"
    )
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    check_installed(given.library)
    warnings.simplefilter("ignore")  # what the libraries have to say about small models
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = TRAINERS[given.library](given.folder or Path("runs", given.library), given.steps)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("RANK", "0") == "0":
        gap = largest_gap(model, train_alone(ranks, given.steps))
        print(f"{given.library}: {given.steps} steps on {ranks} ranks, {gap:.0e} from one process")
    if dist.is_initialized():  # else gloo may abort a process that ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
