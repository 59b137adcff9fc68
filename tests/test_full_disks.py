"""A file system that is full, and one that is read-only: real ones, in memory."""

import os
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.optim import AdamW

from zero_nb import newest_checkpoint, verify_checkpoint
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

SIZE = 6 << 20


@pytest.fixture
def disk(folder):
    """Give a file system of 6 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone, and not in every container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def made():
    torch.manual_seed(0)
    model = nn.Linear(500, 500)  # 1 MB, and 2 MB of state
    zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW)
    model(torch.ones(1, 500)).sum().backward()
    zero.step()
    return model, zero


def save_in_each_way(disk, model, zero):
    return [
        caught(lambda: full_state_dict(zero, disk / "last.pt")),
        caught(lambda: save_sharded(disk / "2", model, zero, 2)),
        caught(lambda: AsyncCheckpointer(model, zero).save(disk / "3", 3).wait()),
    ]


def save(disk):
    model, zero = made()
    save_sharded(disk / "1", model, zero, 1)
    found = []
    for left in (0, 4096, 500_000, 1_900_000):
        dist.barrier()
        if dist.get_rank() == 0:
            (disk / "ballast").unlink(missing_ok=True)
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            (disk / "ballast").write_bytes(bytes(free - left))
        dist.barrier()
        found += save_in_each_way(disk, model, zero)
        dist.barrier()  # rank 0 removes what was begun
        names = sorted(path.name for path in disk.iterdir())
        load_sharded(newest_checkpoint(disk), model, zero)
        assert names == ["1", "ballast"], names
    dist.barrier()
    if dist.get_rank() == 0:
        (disk / "ballast").unlink()
    dist.barrier()
    full_state_dict(zero, disk / "last.pt")
    return found


def save_where_nothing_can_be_written(disk):
    model, zero = made()
    load_sharded(newest_checkpoint(disk), model, zero)
    load_full_state_dict(zero, disk / "last.pt")
    return save_in_each_way(disk, model, zero)


def test_a_full_disk_and_one_that_is_read_only_are_errors_on_every_rank(disk):
    for said in run(2, save, disk):
        assert len(said) == 12
        for words, name in zip(said, ["last.pt", "2", "3"] * 4, strict=True):
            assert words.startswith("OSError") and str(disk / name) in words, words
            assert "No space left on device" in words or "bytes are free; make room" in words
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for said in run(2, save_where_nothing_can_be_written, disk):
        for words, name in zip(said, ["last.pt", "2", "3"], strict=True):
            assert "Read-only file system" in words and str(disk / name) in words, words
    verify_checkpoint(disk / "1")
    assert sorted(path.name for path in disk.iterdir()) == ["1", "last.pt"]


def saved_behind_a_link(folder):
    _, zero = made()
    full_state_dict(zero, to=folder / "small" / "last.pt")
    return (folder / "small" / "last.pt").is_symlink(), (folder / "large" / "last.pt").is_file()


def test_room_is_looked_for_where_a_link_leads(folder, monkeypatch):
    """The disk that has the link is full, and that of the file is not."""
    for name in ("small", "large"):
        (folder / name).mkdir()
    (folder / "small" / "last.pt").symlink_to(folder / "large" / "last.pt")
    usage = shutil.disk_usage

    def small_is_full(path):
        return usage(path)._replace(free=0) if os.path.basename(path) == "small" else usage(path)

    monkeypatch.setattr(shutil, "disk_usage", small_is_full)
    assert run(1, saved_behind_a_link, folder) == [(True, True)]
