"""Settings of torch that hold for a whole process, and what is trained, saved, sent and loaded under them."""

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from common.parallel_training import sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.serialization import config

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.checkpoint.convert import convert_checkpoint
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.resharding import reshard
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list, gather_object
from zero_nb.join.join import Join
from zero_nb.verify.watchdog import watch_divergence


@contextmanager
def attribute(owner, name, value):
    """Set an attribute of torch's configuration, and set it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def given_back(change, back):
    """Change a setting by a call, and change it back by another."""
    change()
    try:
        yield
    finally:
        back()


def environment(name):
    return given_back(
        lambda: os.environ.__setitem__(name, "1"), lambda: os.environ.__delitem__(name)
    )


ENDIAN = torch.serialization.LoadEndianness
SETTINGS = {
    "none": lambda: given_back(int, int),
    "load.mmap": lambda: attribute(config.load, "mmap", True),
    "load.calculate_storage_offsets": lambda: attribute(
        config.load, "calculate_storage_offsets", True
    ),
    "save.storage_alignment": lambda: attribute(config.save, "storage_alignment", 4096),
    "no crc32": lambda: given_back(
        lambda: torch.serialization.set_crc32_options(False),
        lambda: torch.serialization.set_crc32_options(True),
    ),
    "big endian where a file does not say": lambda: given_back(
        lambda: torch.serialization.set_default_load_endianness(ENDIAN.BIG),
        lambda: torch.serialization.set_default_load_endianness(None),
    ),
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": lambda: environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD"),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": lambda: environment("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
    "default device": lambda: given_back(
        lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)
    ),
    "default dtype": lambda: given_back(
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "anomaly detection": lambda: given_back(
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "deterministic algorithms": lambda: given_back(
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
}


class Own:
    """What only a pickle can hold."""

    def __init__(self, weight):
        self.weight = weight
        self.half = weight[:1]  # of the same memory


ON_CPU = {"dtype": torch.float32, "device": "cpu"}


def made():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5, **ON_CPU), nn.Linear(5, 3, **ON_CPU))


def train(model, optimizer, steps=2):
    inside = torch.full((2, 4), 1.0 + dist.get_rank(), **ON_CPU)
    for _ in range(steps):
        model(inside).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_and_loaded(folder, model, optimizer):
    full_state_dict(optimizer, to=f"{folder}/full.pt")
    load_full_state_dict(optimizer, f"{folder}/full.pt")
    optimizer.load_state_dict(full_state_dict(optimizer, to=None))
    save_sharded(f"{folder}/sharded", model, optimizer)
    load_sharded(f"{folder}/sharded", model, optimizer)
    reshard(optimizer, shard="whole")
    if dist.get_rank() == 0:
        convert_checkpoint(f"{folder}/sharded", f"{folder}/again.pt")
        torch.load(f"{folder}/again.pt", weights_only=True)


def objects():
    rank, every = dist.get_rank(), [None, None]
    sent = [Own(torch.ones(2, **ON_CPU)) if rank == 0 else None]
    broadcast_object_list(sent)
    gather_object(sent[0], every if rank == 1 else None, dst=1)
    for own in sent if rank == 0 else every:
        own.half.add_(1)
    return every if rank == 1 else sent


def used(setting, folder):
    """Train, save, load and send under a setting, in three modes and with uneven inputs."""
    with SETTINGS[setting]():
        model = made()
        ddp = DDP(model)
        optimizer = sharded([{"params": model.parameters(), "optimizer_class": AdamW, "lr": 0.1}])
        with Join([ddp, optimizer]):
            train(ddp, optimizer, 1 + dist.get_rank())
        saved_and_loaded(folder, model, optimizer)
        handle = overlap(ddp, optimizer)
        watch_divergence(ddp, optimizer, every=1)
        train(ddp, optimizer)
        handle.detach()
        other = made()
        second = sharded([{"params": other.parameters(), "optimizer_class": AdamW, "lr": 0.1}])
        data_parallel(other, second, interleaved=True)
        train(other, second)
        weights = [p.detach() for p in (*model.parameters(), *other.parameters())]
        return weights, objects()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_torch_changes_nothing(setting, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "set").mkdir()
    expected = run(2, used, "none", tmp_path / "plain", timeout=60)
    with SETTINGS[setting]():  # of the caller, too
        ranks = run(2, used, setting, tmp_path / "set", timeout=60)
    for (weights, sent), (others, _) in zip(ranks, expected, strict=True):
        assert all(map(torch.equal, weights, others))
        assert all(own.weight.tolist() == [2, 1] for own in sent)
