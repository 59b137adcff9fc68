"""Sharded checkpoints: failing disks, bad calls, and kills at random moments; every rank has an error, and
what was complete stays."""

import errno
import itertools
import os
import resource
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import caught
from common.modes import MODES
from common.saving import check, kill_again_and_again, two_layers
from common.sharded_saving import content, stepped
from torch import nn
from torch.optim import AdamW

from zero_nb.checkpoint import folder as folders
from zero_nb.checkpoint import sharded
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.files import new_folder
from zero_nb.checkpoint.folder import FolderReader, check_folder
from zero_nb.checkpoint.full import full_optim_state_dict, full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm import relays
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def without_room(folder):
    """Let rank 1 have no memory for what the others send."""
    rank = dist.get_rank()
    relays._host = lambda: f"{rank:08}"
    model, zero = stepped()
    save_sharded(folder, model, zero)
    if rank == 1:
        sharded.gather_parameters = lambda shards: [][1]
    return caught(lambda: load_sharded(folder, model, zero))


def test_a_gather_that_fails_on_one_rank_ends_the_group(folder):
    first, second, third = run(3, without_room, folder / "one", timeout=60)
    assert second == "IndexError: list index out of range"
    assert all("rank 1 failed with IndexError" in said for said in (first, third))


def cut_while_loaded(folder, place, gone):
    """Let another job cut off a file when all was checked and rank 1 reads; then load what is whole again.
    `place`: before the first box, or between its directory and its numbers; `gone`: all (0), or all but a part."""
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    model, zero = stepped()
    saved = content(model, zero)
    load_boxes = sharded._load_boxes
    read_data = FolderReader.read_data
    owner = FolderReader if place == "_read_item" else folders
    real = getattr(owner, place)

    def read_and_wait(reader, plan, planner):
        done = read_data(reader, plan, planner)
        dist.barrier()
        return done

    def cut(*args):
        setattr(owner, place, real)
        found = real(*args) if place == "read_box" else None
        dist.barrier()
        os.truncate(data, len(whole) // gone if gone else 0)
        return real(*args) if found is None else found

    def load_cut(*args):
        if dist.get_rank() == 0:
            FolderReader.read_data = read_and_wait
        else:
            setattr(owner, place, cut)
        load_boxes(*args)

    sharded._load_boxes = load_cut
    said = caught(lambda: load_sharded(folder, model, zero))
    sharded._load_boxes = load_boxes
    FolderReader.read_data = read_data
    refused = caught(zero.step)
    dist.barrier()
    data.write_bytes(whole)
    dist.barrier()
    load_sharded(folder, model, zero)
    return said, refused, all(map(torch.equal, content(model, zero), saved))


@pytest.mark.parametrize(
    "place, gone", [("read_box", 0), ("_read_item", 0), ("_read_item", 4)], ids=str
)
def test_a_file_that_is_cut_off_while_it_is_loaded_is_an_error_on_every_rank(folder, place, gone):
    """Numbers and directories were read from a map of the file, and the system killed the rank (SIGBUS)."""
    run(2, lambda: save_sharded(folder / "one", *stepped()))
    nbytes = (folder / "one" / "__0_0.distcp").stat().st_size
    left = nbytes // gone if gone else 0
    for said, refused, same in run(2, cut_while_loaded, folder / "one", place, gone, timeout=60):
        assert said.startswith("OSError") and "on rank 1" in said, said
        assert f"was cut off at {left} bytes" in said and "load again before going on" in said, said
        assert "the last load did not come to its end" in refused, refused
        assert same


def refuse_to_load(*given):
    raise LookupError("no such table")


def fail_to_load(folder, model, zero):
    """Load what was saved, and fail when the parameters are loaded and the state is not."""
    hook = model.register_load_state_dict_pre_hook(refuse_to_load)
    said = caught(lambda: load_sharded(folder / "one", model, zero))
    hook.remove()
    return said


def step_again_and_again(folder):
    """Step and save after a load that failed on all ranks, and after one that did not."""
    model, zero = stepped()
    save_sharded(folder / "one", model, zero)
    zero.step()
    said = fail_to_load(folder, model, zero)
    zero.state_dict_type = "full"
    calls = [zero.step, zero.step, zero.state_dict]
    calls.append(lambda: save_sharded(folder / "two", model, zero))
    refused = [caught(call) for call in calls]
    load_sharded(folder / "one", model, zero)
    return said, refused, [caught(call) for call in calls]


@pytest.mark.parametrize("size", [1, 2])
def test_no_step_and_no_save_follows_a_load_that_failed(folder, size):
    """The first step was refused, and the next one trained parameters and state of two steps."""
    for said, refused, later in run(size, step_again_and_again, folder, timeout=60):
        assert said.startswith("LookupError"), said
        assert all("the last load did not come to its end" in (r or "") for r in refused), refused
        assert later == [None] * 4


def skip_a_step(folder, mode):
    """Fail to load, and train on inside backward, first with an infinite loss, which a scaler skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    make = lambda model: ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-2)
    module = two_layers()
    attached = MODES[mode].attach(module, make, scaler=scaler)

    def iterate(factor=1.0):
        data = torch.ones(2, 12, dtype=torch.float64)
        scaler.scale(attached.call(data).sum() * factor).backward()
        scaler.step(attached.optimizer)
        scaler.update()

    iterate()
    save_sharded(folder / "one", module, attached.optimizer)
    iterate()
    said = fail_to_load(folder, module, attached.optimizer)
    skipped = caught(lambda: iterate(float("inf")))
    refused = caught(lambda: save_sharded(folder / "two", module, attached.optimizer))
    return said, skipped, refused, caught(iterate)


@pytest.mark.parametrize("mode", ["zero1-overlap", "zero2"])
def test_a_step_that_is_skipped_does_not_make_a_load_whole_that_failed(folder, mode):
    """The skipped step took the note of the load away, and the next one was taken and saved."""
    for said, skipped, *refused in run(2, skip_a_step, folder, mode, timeout=60):
        assert said.startswith("LookupError") and skipped is None, (said, skipped)
        assert all("the last load did not come to its end" in (r or "") for r in refused), refused
    assert [path.name for path in folder.iterdir()] == ["one"]


def write_failing(parent, name, error, after):
    """Save, and save again while the disk of the first rank fails; then again when it does not."""
    model, zero = stepped()
    save_sharded(parent / "first", model, zero, 1)
    real = getattr(os, name)
    calls = []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) > after and dist.get_rank() == 0:
            raise error
        return real(*args, **options)

    setattr(os, name, fails)
    try:
        said = caught(lambda: save_sharded(parent / "second", model, zero, 2))
    finally:
        setattr(os, name, real)
    dist.barrier()
    left = sorted(path.name for path in parent.iterdir())
    dist.barrier()
    save_sharded(parent / "second", model, zero, 2)
    check_folder(parent / "first")
    return said, left, newest_checkpoint(parent).name


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize(
    "name, error",
    [
        ("fsync", OSError(errno.ENOSPC, "No space left on device")),
        ("rename", OSError(errno.EPERM, "Operation not permitted")),
    ],
    ids=str,
)
def test_a_failing_disk_is_an_error_on_every_rank_and_leaves_what_was(folder, name, error, after):
    # torch renames its file of metadata by pathlib, which before Python 3.11 keeps the real function
    if name == "rename" and after > (sys.version_info >= (3, 11)):
        pytest.skip("nothing is renamed so often")
    for said, left, newest in run(2, write_failing, folder, name, error, after):
        assert str(error) in (said or ""), said
        assert left == ["first"] and newest == "second"


def limited(parent):
    """Save in every way while no rank may write a file as large as its part."""
    model = nn.Linear(300, 300)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW)
    model(torch.ones(1, 300)).sum().backward()
    zero.step()
    later = AsyncCheckpointer(model, zero)
    # the file of the ranks' store is smaller
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    calls = (
        lambda: save_sharded(parent / "first", model, zero),
        lambda: later.save(parent / "second").wait(),
        lambda: full_state_dict(zero, parent / "full.pt"),
    )
    return [caught(call) for call in calls]


def test_the_error_of_the_disk_is_what_the_disk_said(folder):
    for said in run(2, limited, folder):
        for words, name in zip(said, ("first", "second", "full.pt"), strict=True):
            assert words.startswith("OSError") and "File too large" in words, words
            assert str(folder / name) in words and ".tmp" not in words, words
    assert not [*folder.iterdir()]


def bad_calls(parent):
    model, zero = stepped()
    save_sharded(parent / "one", model, zero)
    rank = dist.get_rank()
    return [
        caught(lambda: save_sharded(parent / "one", model, zero)),
        caught(lambda: save_sharded(parent / f"rank{rank}", model, zero)),
        caught(lambda: save_sharded(parent / "two", model, zero, extra={1: 2})),
        caught(lambda: save_sharded(parent / "two", model, zero, extra=float("nan"))),
        caught(lambda: save_sharded(parent / "two", model, zero, extra=[model] * rank)),
        caught(lambda: load_sharded(parent / "two", model, zero)),
        caught(lambda: save_sharded("/proc/one", model, zero)),
        caught(lambda: save_with_sparse_buffer(parent / "two")),
    ]


def save_with_sparse_buffer(path):
    model, zero = stepped()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    save_sharded(path, model, zero)


def test_bad_calls_are_errors_on_every_rank(folder):
    words = ["folder of its own", "rank0", "JSON", "", "", "no complete checkpoint", "Error"]
    words += ["mask of the model has layout torch.sparse_coo"]
    for said in run(2, bad_calls, folder):
        assert all(w in (s or "") and s for w, s in zip(words, said, strict=True)), said
    assert [path.name for path in folder.iterdir()] == ["one"]


def hooked(parent):
    """Let hooks on the state dict of rank 1 fail, at a save and at a load."""
    model, zero = stepped()
    save_sharded(parent / "one", model, zero)

    def fails(*given):
        raise LookupError("no such table")

    hooks = []
    if dist.get_rank() == 1:
        hooks.append(zero.register_state_dict_pre_hook(fails))
        hooks.append(zero.register_load_state_dict_pre_hook(fails))
    said = [
        caught(lambda: save_sharded(parent / "two", model, zero)),
        caught(lambda: load_sharded(parent / "one", model, zero)),
    ]
    for hook in hooks:
        hook.remove()
    load_sharded(parent / "one", model, zero)
    return said


def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(folder):
    theirs, own = run(2, hooked, folder, timeout=60)
    assert own == ["LookupError: no such table"] * 2
    assert theirs == [
        f"LookupError: rank 1 failed at {what}: no such table"
        for what in ("reading the optimizer's state", "load_state_dict")
    ]
    assert [path.name for path in folder.iterdir()] == ["one"]


def unseen(parent):
    """Let rank 1 write to a disk of its own."""
    model, zero = stepped()
    real = dcp.FileSystemWriter
    if dist.get_rank() == 1:
        dcp.FileSystemWriter = lambda path: real(parent / "elsewhere" / path.name)
    try:
        return caught(lambda: save_sharded(parent / "one", model, zero))
    finally:
        dcp.FileSystemWriter = real


def test_ranks_without_a_file_system_in_common_are_told(folder):
    for said in run(2, unseen, folder):
        assert "not" in said and not (folder / "one").exists()


def mismatched(parent, makers):
    found = []
    for make in makers:
        model = make()
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
        before = content(model, zero)
        found.append(caught(lambda m=model, z=zero: load_sharded(parent / "one", m, z)))
        check(before, content(model, zero), 0)
    return found


def wider():
    return nn.Sequential(nn.Linear(12, 34), nn.Tanh(), nn.Linear(34, 7)).double()


def deeper():
    return nn.Sequential(*two_layers(), nn.Linear(7, 7).double())


def test_a_model_that_does_not_fit_is_an_error_on_every_rank_and_stays_as_it_was(folder):
    run(2, lambda: save_sharded(folder / "one", *stepped()))
    for wide, deep in run(3, mismatched, folder, [wider, deeper]):
        assert "(33, 12), the parameter has (34, 12)" in wide and "0.weight" in wide, wide
        assert "lacks ['3.bias', '3.weight']" in deep, deep


def save_on_and_on(parent):
    model, zero = stepped()
    for step in itertools.count(int(newest_checkpoint(parent).name) + 1):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
        save_sharded(parent / str(step), model, zero, step)


def test_kills_at_random_moments_leave_complete_checkpoints(folder):
    save_sharded(folder / "0", *stepped(), 0)
    newest = 0
    for found in kill_again_and_again(
        lambda: save_on_and_on(folder), folder, lambda: int(newest_checkpoint(folder).name)
    ):
        check_folder(folder / str(found))
        assert found >= newest
        newest = found
        assert len([*folder.glob(".*")]) <= 2  # a folder and its lock
    assert newest >= 10
    model, zero = stepped()
    load_sharded(folder / str(newest), model, zero)
    assert all((p == newest).all() for p in model.parameters())
    with new_folder(folder / "next") as beside:
        assert {path.stem for path in folder.glob(".*")} == {beside.stem}


def test_a_folder_of_a_job_that_lives_is_left_alone(folder):
    with new_folder(folder / "one") as one:
        (one / "part").write_text("x")
        with new_folder(folder / "two") as two:
            assert one.is_dir() and two.is_dir()
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == [
        "one",
        "one/part",
        "two",
    ]


def wrong_kinds(folder):
    model = nn.Linear(4, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    save_sharded(folder / "good", model, zero)
    here = dist.get_rank() == 1
    one = 3 if here else model
    path = None if here else folder / "a"
    calls = {
        "model must be a torch.nn.Module, got 3": (
            lambda: save_sharded(folder / "a", 3, zero),
            lambda: save_sharded(folder / "a", one, zero),
            lambda: AsyncCheckpointer(3, zero).save(folder / "a"),
            lambda: AsyncCheckpointer(one, zero).save(folder / "a"),
            lambda: load_sharded(folder / "good", 3, zero),
            lambda: full_optim_state_dict(one, zero),
        ),
        "optimizer must be a torch.optim.Optimizer, got None": (
            lambda: save_sharded(folder / "a", model, None),
            lambda: AsyncCheckpointer(model, None).save(folder / "a"),
            lambda: load_sharded(folder / "good", model, None if here else zero),
            lambda: full_optim_state_dict(model, None),
        ),
        "folder must be a path, got None": (
            lambda: save_sharded(path, model, zero),
            lambda: AsyncCheckpointer(model, zero).save(path),
        ),
    }
    for words, wrong in calls.items():
        for call in wrong:
            with pytest.raises(TypeError, match=words):
                call()


def test_what_is_no_model_optimizer_or_path_is_an_error_on_every_rank(folder):
    run(2, wrong_kinds, folder)
    assert [path.name for path in folder.iterdir()] == ["good"]  # once rank 0 has cleaned up, too
