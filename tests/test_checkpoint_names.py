"""Names of checkpoints that are not UTF-8, as a file system may have them."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn

from zero_nb import convert_checkpoint, newest_checkpoint, verify_checkpoint
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

NAME = os.fsdecode(b"caf\xe9")


@pytest.fixture
def folder(tmp_path):
    try:
        (tmp_path / NAME).mkdir()
    except OSError:
        pytest.skip("this file system has no names that are not UTF-8")
    return tmp_path / NAME


def save_and_load(folder):
    """Save in each way into a folder, and load; what a second save says of the first one's name."""
    model = nn.Linear(4, 2)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW)
    model(torch.ones(1, 4)).sum().backward()
    zero.step()
    full_state_dict(zero, to=folder / f"{NAME}.pt")
    load_full_state_dict(zero, folder / f"{NAME}.pt")
    save_sharded(folder / NAME, model, zero, 1)
    load_sharded(folder / NAME, model, zero)
    with AsyncCheckpointer(model, zero) as saver:
        saver.save(folder / f"{NAME}2", 2)
    assert newest_checkpoint(folder) == folder / f"{NAME}2"
    return caught(lambda: save_sharded(folder / NAME, model, zero, 1))


def test_names_that_are_not_utf8_are_saved_and_loaded(folder):
    for said in run(2, save_and_load, folder):
        assert "each checkpoint needs a folder of its own" in said


def load_late(folder):
    """Load on two ranks, in one of which a hook of the model takes its time: the other says in the
    store what it waits for."""
    model = nn.Linear(4, 2)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW)
    if dist.get_rank() == 1:
        model.register_load_state_dict_pre_hook(lambda *_: time.sleep(1.5))
    load_sharded(folder / NAME, model, zero)


def test_names_that_are_not_utf8_reach_the_store_while_a_rank_is_late(folder):
    run(2, save_and_load, folder)
    run(2, load_late, folder)


def test_names_that_are_not_utf8_are_verified_and_converted(folder):
    run(2, save_and_load, folder)
    for source in (folder / NAME, folder / f"{NAME}.pt"):
        assert verify_checkpoint(source).optimizer["state"]
        convert_checkpoint(source, folder / f"from {source.name}.pt")
        assert verify_checkpoint(folder / f"from {source.name}.pt").optimizer["state"]
