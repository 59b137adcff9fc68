"""Saves that are written while training goes on: after a failure, beside each other, and beside loads."""

import atexit
import errno
import os

import pytest
import torch.distributed as dist
from common import caught
from common.saving import same
from common.sharded_saving import content
from test_async_save import FULL, Held, fail_on, stepped

from zero_nb.checkpoint import async_save
from zero_nb.checkpoint.async_save import AsyncCheckpointer, StagingMemory
from zero_nb.checkpoint.folder import check_folder
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run


def names_in(parent):
    dist.barrier()
    found = sorted(path.name for path in parent.iterdir())
    dist.barrier()
    return found


def fails_once(parent, place, name, error):
    """Let a step of a save fail once, on the ranks that `error` gives one for; then save again."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    checkpoints.save(parent / "first", 1)
    real, mine = getattr(place, name), error.get(dist.get_rank())

    def failing(*args):
        if mine is not None:
            raise mine
        return real(*args)

    checkpoints.wait()
    setattr(place, name, failing)
    said = caught(lambda: checkpoints.save(parent / "second", 2).wait())
    setattr(place, name, real)
    left = names_in(parent)
    zero.step()
    wanted = content(model, zero)
    checkpoints.save(parent / "second", 2)
    zero.step()
    checkpoints.close()
    load_sharded(parent / "second", model, zero)
    same(content(model, zero), wanted)
    return said, left, names_in(parent)


def check_fails_once(parent, place, name, error, words):
    for said, left, after in run(2, fails_once, parent, place, name, error):
        assert words in said and left == ["first"] and after == ["first", "second"], said


def test_of_two_ranks_that_fail_each_names_its_own_error(folder):
    errors = {0: FULL, 1: OSError(errno.EIO, "Input/output error")}
    ranks = run(2, fails_once, folder, os, "fsync", errors)
    for (said, left, after), error in zip(ranks, errors.values(), strict=True):
        assert str(error) in said and left == ["first"] and after == ["first", "second"], said


REMEDIES = {
    errno.EIO: "see whether that disk works",
    errno.ENOSPC: "make room there",
    errno.EACCES: "write where this user may write",
}


@pytest.mark.parametrize("code", REMEDIES, ids=errno.errorcode.get)
@pytest.mark.parametrize("place, rank", [("fsync", 0), ("fsync", 1), ("rename", 0)])
def test_an_error_of_the_disk_names_the_folder_and_a_remedy_on_every_rank(
    folder, place, rank, code
):
    what = os.strerror(code)
    for parent, names in ((folder / "1", ()), (folder / "2", (".second.0.tmp",))):
        parent.mkdir()
        for said, *_ in run(2, fails_once, parent, os, place, {rank: OSError(code, what, *names)}):
            words = (what, f"'{parent / 'second'}'", REMEDIES[code])
            assert all(each in said for each in words) and ".tmp" not in said, said


def saved_twice(parent, spelled):
    """Save twice in a folder that is named from within another; what the second save and that of a
    folder in a file say."""
    os.chdir(parent)
    model, zero = stepped()
    save_sharded(spelled, model, zero)
    again = caught(lambda: save_sharded(spelled, model, zero))
    dist.barrier()
    (parent / "file").touch()
    return again, caught(lambda: save_sharded("file/inside", model, zero))


@pytest.mark.parametrize("spelled", ["here", "./here", "here/"])
def test_an_error_that_is_none_of_the_disk_blames_no_disk(folder, spelled):
    for again, inside in run(2, saved_twice, folder, spelled):
        assert "each checkpoint needs a folder of its own" in again and "disk" not in again, again
        assert f"{folder / 'file'}'" in inside and "disk" not in inside, inside


def test_a_rank_without_memory_for_copies_is_an_error_on_every_rank(folder):
    error = {1: MemoryError("no memory for copies")}
    check_fails_once(folder, StagingMemory, "copy", error, "no memory for copies")


def test_a_table_that_cannot_be_written_is_an_error_on_every_rank(folder):
    error = {0: OSError(errno.ENOSPC, "no room for the table")}
    check_fails_once(folder, async_save, "finish_save", error, "no room for the table")


def load_meanwhile(parent):
    """Go back to an older checkpoint while a newer one is written."""
    model, zero = stepped()
    save_sharded(parent / "old", model, zero)
    old = content(model, zero)
    zero.step()
    new = content(model, zero)
    with AsyncCheckpointer(model, zero) as checkpoints, Held() as go_on:
        saving = checkpoints.save(parent / "new", 1)
        load_sharded(parent / "old", model, zero)
        same(content(model, zero), old)
        go_on()
        saving.wait()
    load_sharded(parent / "new", model, zero)
    same(content(model, zero), new)
    return True


def test_a_load_does_not_change_what_is_being_saved(folder):
    assert run(2, load_meanwhile, folder) == [True, True]


def side_by_side(parent, names):
    """Save by two checkpointers at once, and by `save_sharded` meanwhile."""
    jobs = [stepped() for _ in names]
    checkpoints = [AsyncCheckpointer(*job) for job in jobs]
    with Held() as go_on:
        savings = [each.save(parent / n, 1) for each, n in zip(checkpoints, names, strict=True)]
        save_sharded(parent / "meanwhile", *jobs[0], 2)
        go_on()
        said = [caught(saving.wait) for saving in reversed(savings)]
    for each in checkpoints:
        each.close()
    found = names_in(parent)
    for name in found:
        check_folder(parent / name)
    return said, found


def test_two_checkpointers_write_at_once(folder):
    for said, found in run(2, side_by_side, folder, ["a", "b"]):
        assert said == [None, None] and found == ["a", "b", "meanwhile"]


def test_of_two_saves_under_one_name_one_is_told(folder):
    for said, found in run(2, side_by_side, folder, ["a", "a"]):
        [words] = filter(None, said)
        assert "each checkpoint needs a folder of its own" in words and found == ["a", "meanwhile"]


def later_steps(parent):
    """Fail in the background, step, hear of it at the next save, step, and save."""
    model, zero = stepped()
    checkpoints = AsyncCheckpointer(model, zero)
    heal = fail_on(1, "fsync", FULL)
    checkpoints.save(parent / "a", 1)
    zero.step()
    said = caught(lambda: checkpoints.save(parent / "b", 2))
    heal()
    zero.step()
    wanted = content(model, zero)
    checkpoints.save(parent / "b", 3)
    zero.step()
    checkpoints.close()
    load_sharded(parent / "b", model, zero)
    same(content(model, zero), wanted)
    return said, names_in(parent)


def test_a_save_after_a_failed_one_has_the_steps_between(folder):
    for said, found in run(2, later_steps, folder):
        assert str(FULL) in said and found == ["b"]


def fork_while_it_is_written(parent):
    """Let a child of this rank end, as a forked program does, before the folder is complete."""
    model, zero = stepped()
    reader, writer = os.pipe()
    with Held():
        checkpoints = AsyncCheckpointer(model, zero)
        checkpoints.save(parent / "first", 1)
        if not (pid := os.fork()):
            os.dup2(writer, 2)
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(writer)
    checkpoints.close()
    with os.fdopen(reader) as file:
        return file.read(), names_in(parent)


def test_a_fork_while_a_checkpoint_is_written_says_nothing_of_it(tmp_path):
    assert run(2, fork_while_it_is_written, tmp_path) == [("", ["first"])] * 2
