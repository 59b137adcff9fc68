"""Files under their names: of several writers, where a name cannot be taken, and their checksums."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common.errors import caught
from torch import nn
from torch.optim import AdamW

from zero_nb.checkpoint import files
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.files import check_file, new_folder, replacing
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.checkpoint.skeleton import SkeletonFile
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def test_a_writer_that_lost_its_name_before_it_had_a_lock_makes_another(folder, monkeypatch):
    path = folder / "last.pt"
    real = files._lock
    taken = []

    def lock(handle, wait):
        if wait and not taken:  # another job takes the file for abandoned just then
            taken.extend(folder.glob(".last.pt.*.tmp"))
            taken[0].unlink()
        return real(handle, wait)

    monkeypatch.setattr(files, "_lock", lock)
    with replacing(path) as beside:
        beside.write_text("whole")
    assert taken and beside != taken[0]
    assert path.read_text() == "whole" and [file.name for file in folder.iterdir()] == ["last.pt"]


def test_a_new_file_that_cannot_take_the_name_of_the_removed_one_is_kept(folder, monkeypatch):
    path = folder / "last.pt"
    path.write_text("old")

    def fails(source, target):
        Path(target).unlink(missing_ok=True)  # the file system removes the old one first
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fails)
    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="the new one") as raised, replacing(path) as beside:
        beside.write_text("new")
    assert str(beside) in str(raised.value) and beside.read_text() == "new"
    with pytest.raises(KeyboardInterrupt), replacing(path):
        raise KeyboardInterrupt
    assert beside.read_text() == "new"  # it may be the last copy
    monkeypatch.undo()
    with replacing(path) as other:
        other.write_text("newer")
    assert [file.name for file in folder.iterdir()] == ["last.pt"]


def test_files_of_others_with_names_like_ours_are_left_alone(folder):
    (folder / ".theirs.tmp").mkdir()
    theirs = [folder / ".theirs.tmp" / "data", folder / ".theirs.lock", folder / ".a[1].pt.old.tmp"]
    left = folder / f".a[1].pt.{'0f' * 16}.tmp"  # of a writer that was killed
    for path in (*theirs, left):
        path.write_text("x")
    with replacing(folder / "a[1].pt") as beside:
        beside.write_text("whole")
    with new_folder(folder / "step-1") as made:
        (made / "part").write_text("whole")
    assert all(path.read_text() == "x" for path in theirs) and not left.exists()
    assert (folder / "step-1" / "part").read_text() == (folder / "a[1].pt").read_text() == "whole"


def saved_without_checksums(folder):
    """Save in every way while torch is told to write no checksums, and read what was written."""
    torch.serialization.set_crc32_options(False)
    model = nn.Linear(30, 20)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    full_state_dict(optimizer, to=folder / "full.pt")
    save_sharded(folder / "sharded", model, optimizer)
    with AsyncCheckpointer(model, optimizer) as checkpoints:
        checkpoints.save(folder / "later", 1)
        optimizer.zero_grad()
    kept = torch.serialization.get_crc32_options()
    if dist.get_rank() == 0:
        check_file(folder / "full.pt")
        for form in ("again.pt", "again"):
            convert_checkpoint(folder / "sharded", folder / form)
            verify_checkpoint(folder / form)
    load_sharded(folder / "sharded", model, optimizer)
    load_sharded(folder / "later", model, optimizer)
    return kept


def test_checkpoints_have_checksums_also_where_torch_writes_none(folder):
    assert run(2, saved_without_checksums, folder) == [False, False]
    torch.save({"a": torch.ones(3)}, folder / "plain.pt")
    check_file(folder / "plain.pt")


def call_where_no_file_can_be_made(path):
    zero = ZeroRedundancyOptimizer(nn.Linear(4, 2).parameters(), AdamW)
    with pytest.raises(FileNotFoundError) as raised:
        full_state_dict(zero, to=path)
    return str(raised.value)


def test_an_error_of_opening_names_the_path_that_was_given(folder):
    path = folder / "missing" / "x.pt"
    for said in run(2, call_where_no_file_can_be_made, path):
        assert str(path) in said and ".tmp" not in said


@pytest.mark.parametrize("error", [errno.EACCES, errno.EDQUOT, errno.EROFS])
def test_an_error_of_making_a_folder_names_the_one_that_was_given(folder, monkeypatch, error):
    def fails(*args, **kwargs):
        raise OSError(error, os.strerror(error), str(args[0]))

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(OSError) as raised, new_folder(folder / "step-5"):
        pass
    assert raised.value.filename == str(folder / "step-5")


def fail_in(monkeypatch, parent, number):
    """Let the flush of one folder fail, as the disk does, or its opening, as where it may not be read."""
    call = "open" if number == errno.EACCES else "fsync"
    real = getattr(os, call)

    def fails(what, *args):
        at = what if call == "open" else f"/proc/self/fd/{what}"
        if os.path.realpath(at) == os.path.realpath(parent):
            raise OSError(number, os.strerror(number))
        return real(what, *args)

    monkeypatch.setattr(os, call, fails)


def writers(folder):
    model = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    full_state_dict(zero, to=folder / "source.pt")
    (folder / "to").mkdir()
    return {
        "full.pt": lambda path: full_state_dict(zero, to=path),
        "sharded": lambda path: save_sharded(path, model, zero),
        "async": lambda path: AsyncCheckpointer(model, zero).save(path).wait(),
        "c.pt": lambda path: convert_checkpoint(folder / "source.pt", path),
    }


def test_a_folder_that_may_not_be_read_takes_checkpoints(folder, monkeypatch):
    """It could be written to and not flushed: each was complete, and said to have failed."""
    ways = writers(folder)
    fail_in(monkeypatch, folder / "to", errno.EACCES)
    for name, write in ways.items():
        write(folder / "to" / name)
    assert {path.name for path in (folder / "to").iterdir()} == {*ways}


def test_an_error_after_the_new_name_was_given_says_that_it_is_complete(folder, monkeypatch):
    ways = writers(folder)
    fail_in(monkeypatch, folder / "to", errno.EIO)
    for name, write in ways.items():
        path = folder / "to" / name
        with pytest.raises(OSError, match="complete under its name, and may not be on") as raised:
            write(path)
        assert str(path) in str(raised.value) and path.exists()
    monkeypatch.undo()
    assert {path.name for path in (folder / "to").iterdir()} == {*ways}


def test_a_folder_takes_no_name_of_a_link_that_leads_nowhere(folder):
    """All was written, and then the rename failed."""
    ways = writers(folder)
    (folder / "to" / "sharded").symlink_to(folder / "nowhere")
    with pytest.raises(FileExistsError, match="a folder of its own"):
        ways["sharded"](folder / "to" / "sharded")
    assert [path.name for path in (folder / "to").iterdir()] == ["sharded"]


def save_like_another_job(parent):
    """Two jobs in one: rank 0 and rank 1 save into folders of the same names at once."""
    group, _ = dist.new_subgroups(1)
    model = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, group)
    rename = os.rename

    def together(source, target):
        dist.barrier()  # both have looked whether the folder is there, and have written
        rename(source, target)

    os.rename = together
    said = []
    with AsyncCheckpointer(model, zero, process_group=group) as checkpoints:
        said.append(caught(lambda: save_sharded(parent / "one", model, zero, process_group=group)))
        said.append(caught(lambda: checkpoints.save(parent / "two", 1).wait()))
    return said


def test_of_two_jobs_that_save_into_one_folder_one_is_told_that_it_is_there(folder):
    first, second = run(2, save_like_another_job, folder)
    for name, *said in zip(("one", "two"), first, second, strict=True):
        [words] = filter(None, said)
        assert words.startswith("FileExistsError: ") and str(folder / name) in words, words
        assert "each checkpoint needs a folder of its own, and one is there" in words
        verify_checkpoint(folder / name)
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]


def write_to_special(folder, make):
    """Save to what is no regular file, and load from it; give what each says, and the rounds that were sent."""
    zero = ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), AdamW)
    if dist.get_rank() == 0:
        make(folder / "special")
        os.symlink(folder / "special", folder / "link")
    dist.barrier()
    before = zero.group._agreements.turn
    saved = [caught(lambda: full_state_dict(zero, folder / name)) for name in ("special", "link")]
    turns = zero.group._agreements.turn - before
    return saved, turns, caught(lambda: load_full_state_dict(zero, folder / "special"))


def bind(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", (os.mkfifo, bind), ids=("pipe", "socket"))
def test_what_is_no_regular_file_is_neither_replaced_nor_read(folder, make):
    for saved, turns, loaded in run(2, write_to_special, folder, make):
        assert turns == 2, "it is refused before anything else is agreed on, or gathered"
        for said in saved:
            assert "a pipe, a socket or a device is there; save to a file" in said, said
            assert said.startswith("FileExistsError"), said
        assert "must be a file, and it is a device or a pipe" in loaded, loaded
    mode = os.lstat(folder / "special").st_mode
    assert stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    assert {path.name for path in folder.iterdir()} == {"special", "link"}


def test_a_link_to_a_regular_file_stays_one(folder):
    (folder / "real").write_text("old")
    os.symlink(folder / "real", folder / "link")
    with replacing(folder / "link") as beside:
        beside.write_text("new")
    assert (folder / "real").read_text() == "new" and (folder / "link").is_symlink()


def test_of_a_view_on_a_gpu_all_of_the_memory_is_written(tmp_path, monkeypatch):
    """On a GPU `Tensor.cpu` copies what a view has and no more, and so it does here."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    path = tmp_path / "a.pt"
    skeleton = SkeletonFile(path, {"view": torch.arange(8.0)[2:4]}, {})
    skeleton.finish()
    skeleton.close()
    check_file(path)
    assert torch.load(path)["view"].tolist() == [2.0, 3.0]
