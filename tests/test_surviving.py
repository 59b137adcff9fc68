"""A training that goes on after whatever may happen to its ranks, its files and its folder."""

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught
from common.saving import damage
from forked_job import SHORT
from surviving import largest_gap, replayed, unbroken

from zero_nb.apps import train
from zero_nb.apps.checkpoints import checkpoint_files, read_checkpoint
from zero_nb.apps.config import TrainConfig
from zero_nb.apps.loop import train_rank
from zero_nb.apps.results import measured
from zero_nb.apps.resume import configured, writing_alone
from zero_nb.apps.text import rank_windows, windows
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.files import replacing
from zero_nb.checkpoint.folder import MANIFEST, check_folder
from zero_nb.checkpoint.sharded import save_sharded
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

TINY = {**SHORT, "steps": 6, "horizon": 6, "block": 32, "eval_every": 3, "save_every": 2}


def losses(reports):
    return reports[0].losses["zero_nb"]


def test_killed_again_and_again_at_three_and_two_ranks(tmp_path):
    """Agents are forked, and so are ranks: what `make surviving` does 21 times with torchrun itself."""
    program = Path(__file__).with_name("forked_job.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, program, tmp_path]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-6000:]
    report = json.loads((tmp_path / "job.json").read_text())
    lives, struck, out = report["lives"], report["struck"], tmp_path / "out"
    assert [blow["ranks"] for blow in struck] == [3, 3, 2, 3] and struck[0]["in_save"]
    assert all(life["first"] % 10 == 0 for life in lives)
    for blow in struck:  # a machine that is busy may need more than one life after it
        later = lives[blow["begun"] :]
        assert later and all(life["first"] >= blow["saved"] for life in later), (blow, lives)
    found = read_checkpoint(str(out))
    assert found["step"] == 160 and len(checkpoint_files(str(out))) == 2
    assert (out / "report.json").is_file() and not [*out.glob(".*.tmp")]
    got = found["losses"]["zero_nb"]
    assert got == replayed(report["history"], SHORT, tmp_path / "again")
    assert largest_gap(got, unbroken(3, SHORT, tmp_path / "unbroken")) < 1e-4


STARTED_AGAIN = """
from datetime import timedelta
from zero_nb.apps.config import TrainConfig
from zero_nb.apps.loop import joined
with joined(TrainConfig(timeout=10)):
    found = torch.ones(1)
    dist.all_reduce(found)
    print("ranks", int(found))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1) # as one that is killed, and leaves its address in the store
"""


def test_ranks_that_are_started_again_find_each_other_in_the_store_of_the_agent(starter, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    for count in (0, 1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": str(count)}
        ended = starter.run(STARTED_AGAIN, folder, seconds=30, **variables)
        assert [(end.code, end.stdout) for end in ended] == [(not count, "ranks 2\n")] * 2, ended


# --- the same data at any number of ranks ---------------------------------------------------------


def share():
    text = torch.arange(250, dtype=torch.uint8)
    return rank_windows(text, 0, 12, 8, Group(), "train", 0, 7)


def test_the_windows_of_a_step_are_the_same_at_any_number_of_ranks():
    wanted = windows(torch.arange(250, dtype=torch.uint8), 12, 8, "train", 0, 7)
    for ranks in (1, 3, 4):
        assert torch.cat(run(ranks, share)).equal(wanted)


def test_a_batch_that_cannot_be_shared_is_an_error_on_every_rank(tmp_path):
    config = configured({**TINY, "global_batch": 5, "out": str(tmp_path)})
    words = (
        "--global-batch must be a multiple of the number of ranks, got 5 for 2 ranks; 6 would do"
    )
    assert all(words in said for said in run(2, lambda: caught(lambda: train_rank(config))))
    with pytest.raises(ValueError, match="--batch counts the windows of a rank"):
        configured({"batch": 2, "global_batch": 4})
    with pytest.raises(ValueError, match="--resume needs a checkpoint and --auto-resume does not"):
        configured({"resume": True, "auto_resume": True})


def in_lives(folder, *lives, **more):
    """Train in several lives, each on a number of ranks up to a step; gives the last one's reports."""
    for ranks, steps in lives:
        chosen = {**TINY, "auto_resume": True, "steps": steps, "out": str(folder), **more}
        reports = run(ranks, train_rank, configured(chosen))
    return reports


def test_lives_at_other_numbers_of_ranks_continue_one_curve(tmp_path):
    whole = losses(in_lives(tmp_path / "whole", (4, 12), horizon=12))
    same = losses(in_lives(tmp_path / "same", (4, 5), (4, 12), horizon=12))
    other = losses(in_lives(tmp_path / "other", (4, 3), (3, 7), (4, 12), horizon=12))
    assert same == whole
    assert {step: whole[step] for step in (1, 2, 3)} == {step: other[step] for step in (1, 2, 3)}
    assert 0 < largest_gap(other, whole) < 1e-5
    held_out = [
        read_checkpoint(str(tmp_path / n))["held_out"]["zero_nb"][12] for n in ("whole", "other")
    ]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-5)


def test_the_same_command_line_begins_goes_on_and_is_done(tmp_path):
    assert list(losses(in_lives(tmp_path, (2, 6)))) == [1, 2, 3, 4, 5, 6]
    before = (tmp_path / "checkpoint.pt").read_bytes()
    reports = in_lives(tmp_path, (1, 6), compare=True)  # nothing left to do but the results
    assert list(losses(reports)) == [1, 2, 3, 4, 5, 6] and not reports[0].seconds["zero_nb"]
    assert "tokens per second" not in measured(reports)
    train.leave(reports, configured({**TINY, "auto_resume": True, "out": str(tmp_path)}))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    for wrong, words in (
        ({"width": 64}, "--width is 32 in .*got 64; give the options it was trained with"),
        ({"steps": 5}, "--steps must be at least the 6 of the checkpoint"),
        ({"horizon": 0, "steps": 9}, "--horizon is 6 in .*got 9"),
    ):
        config = configured({**TINY, "auto_resume": True, "out": str(tmp_path), **wrong})
        for said in run(2, lambda config=config: caught(lambda: train_rank(config))):
            assert re.search(words, said), said


# --- ranks that see different files ---------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders with a checkpoint of step 2, 4 and 6, of one training on two ranks."""
    parent = tmp_path_factory.mktemp("made")
    for step in (2, 4, 6):
        in_lives(parent / "at", (2, step))
        shutil.copytree(parent / "at", parent / str(step))
    return parent


def apart(parent, steps):
    """Be a rank with a folder of its own; gives the losses it ended with, and what it was told."""
    rank = Group().global_rank
    out = str(parent / f"of-{rank}")
    config = configured({**TINY, "steps": steps, "auto_resume": True, "out": out})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = train_rank(config)
    return report.losses["zero_nb"], len(report.seconds["zero_nb"]), [str(w.message) for w in told]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "zero, one, first", [("4", "2", 4), ("2", "4", 4), ("", "4", 4), ("2", "", 2), ("", "", 0)]
)
def test_the_newest_checkpoint_wins_wherever_it_is(made, tmp_path, zero, one, first):
    for rank, source in enumerate((zero, one)):
        if source:
            shutil.copytree(made / source, tmp_path / f"of-{rank}")
    wanted = read_checkpoint(str(made / "6"))["losses"]["zero_nb"]
    for got, taken, _ in run(2, apart, tmp_path, 6):
        assert got == wanted and taken == 6 - first
    assert read_checkpoint(str(tmp_path / "of-0"))["step"] == 6


def test_of_a_damaged_checkpoint_the_one_before_it_is_taken(made, tmp_path):
    shutil.copytree(made / "6", tmp_path / "of-0")
    shutil.copytree(made / "4", tmp_path / "of-1")
    assert [path.name for path in checkpoint_files(str(tmp_path / "of-0"))] == [
        "checkpoint.pt",
        "checkpoint-4.pt",
    ]
    damage(tmp_path / "of-0" / "checkpoint.pt")
    with pytest.warns(UserWarning, match=r"is damaged.* Going on from .*checkpoint-4.pt"):
        assert read_checkpoint(str(tmp_path / "of-0"))["step"] == 4
    damage(tmp_path / "of-0" / "checkpoint-4.pt")
    wanted = read_checkpoint(str(made / "6"))["losses"]["zero_nb"]
    told = []
    for got, taken, words in run(2, apart, tmp_path, 6):
        assert got == wanted and taken == 2
        told += words
    assert any("is damaged" in w and "step 4, which rank 1 has" in w for w in told)


def test_damaged_checkpoints_alone_are_an_error_on_every_rank(made, tmp_path):
    shutil.copytree(made / "2", tmp_path / "of-0")
    damage(tmp_path / "of-0" / "checkpoint.pt")
    before = (tmp_path / "of-0" / "checkpoint.pt").read_bytes()
    for said in run(2, lambda: caught(lambda: apart(tmp_path, 6))):
        assert "is damaged" in said
    assert (tmp_path / "of-0" / "checkpoint.pt").read_bytes() == before
    shutil.copytree(made / "2", tmp_path / "of-1")
    other = {**TINY, "seed": 5, "auto_resume": True}
    call = lambda: train_rank(
        configured({**other, "out": str(tmp_path / f"of-{Group().group_rank}")})
    )
    for said in run(2, lambda: caught(call)):
        assert "--seed is 0 in" in said and "got 5" in said


# --- files ----------------------------------------------------------------------------------------


def test_a_training_that_begins_anew_keeps_its_own_checkpoints(tmp_path):
    in_lives(tmp_path, (1, 12), horizon=12, keep=3)
    [job] = tmp_path.glob("**/checkpoint.pt")
    given = read_checkpoint(str(job.parent))["config"] | {"out": str(job.parent), "steps": 8}
    run(1, train_rank, TrainConfig(**given | {"auto_resume": False}))
    assert [path.name for path in job.parent.glob("checkpoint-8*")] == []
    assert sorted(torch.load(path)["step"] for path in job.parent.glob("*.pt")) == [4, 6, 8]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_few_are_kept(tmp_path, keep):
    in_lives(tmp_path, (1, 12), horizon=12, keep=keep)
    names = ["checkpoint.pt", "checkpoint-10.pt", "checkpoint-8.pt"][:keep]
    assert [path.name for path in checkpoint_files(str(tmp_path))] == names
    steps = [
        torch.load(path, weights_only=True)["step"] for path in checkpoint_files(str(tmp_path))
    ]
    assert steps == [12, 10, 8][:keep]


def failing(out, name, error, calls_before):
    """Train while a call of the system fails on rank 0."""
    real = getattr(os, name)
    calls = []

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) > calls_before:
            raise error
        return real(*args, **kwargs)

    setattr(os, name, fails)
    try:
        return caught(
            lambda: train_rank(configured({**TINY, "auto_resume": True, "out": str(out)}))
        )
    finally:
        setattr(os, name, real)


@pytest.mark.parametrize(
    "name, error, calls_before",
    [
        ("fsync", OSError(errno.ENOSPC, "No space left on device"), 2),  # a file, its folder
        ("replace", OSError(errno.EROFS, "Read-only file system"), 1),
        ("replace", FileExistsError(errno.EEXIST, "File exists"), 1),  # no rename over a file
    ],
    ids=str,
)
def test_a_save_that_fails_is_an_error_on_every_rank(made, tmp_path, name, error, calls_before):
    for said in run(2, failing, tmp_path, name, error, calls_before):
        assert str(error) in (said or ""), said
    assert [path.name for path in tmp_path.glob("*")][:1] == ["checkpoint.pt"]
    assert read_checkpoint(str(tmp_path))["step"] == 2 and not [*tmp_path.glob(".*")]
    wanted = read_checkpoint(str(made / "6"))["losses"]["zero_nb"]
    assert losses(in_lives(tmp_path, (2, 6))) == wanted


def test_without_links_a_kept_checkpoint_is_a_copy(tmp_path):
    assert run(1, failing, tmp_path, "link", OSError(errno.EPERM, "no links"), 0) == [None]
    assert [path.stat().st_nlink for path in checkpoint_files(str(tmp_path))] == [1, 1]
    assert torch.load(tmp_path / "checkpoint-4.pt", weights_only=True)["step"] == 4


def dies_between_names(out):
    """Train where a rename over a file removes it first, and be gone before the second half."""
    real = os.replace

    def replace_in_two_parts(source, target):
        there = Path(target).exists()
        if there:
            os.unlink(target)
        if there and target.name == "checkpoint.pt" and (out / "checkpoint-2.pt").exists():
            os._exit(9)
        real(source, target)

    os.replace = replace_in_two_parts
    train_rank(configured({**TINY, "auto_resume": True, "out": str(out)}))


def test_where_a_rename_is_not_atomic_the_kept_one_is_there(made, tmp_path):
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)
        dies_between_names(tmp_path)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (tmp_path / "checkpoint.pt").exists()
    assert read_checkpoint(str(tmp_path))["step"] == 2
    reports = in_lives(tmp_path, (1, 6))
    assert len(losses(reports)) == 6 and len(reports[0].seconds["zero_nb"]) == 4
    assert not [*tmp_path.glob(".*")]


def removes_and_fails(source, target):
    os.unlink(target)
    raise OSError(errno.EIO, "Input/output error")


def test_a_rename_that_fails_half_way_takes_no_checkpoint_away(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", removes_and_fails)
    with replacing(path) as beside:
        beside.write_text("new")
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


def test_a_folder_whose_rename_was_half_a_copy_is_not_taken(tmp_path):
    """As on a file system that renames a folder by copying its files one by one."""

    def save(step):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        save_sharded(tmp_path / str(step), model, optimizer, step)

    rename = os.rename

    def dies_in_a_copy(source, target):
        if not source.is_dir():
            return rename(source, target)
        target.mkdir()
        for path in sorted(source.iterdir(), reverse=True)[:-1]:  # the manifest is first
            shutil.copy(path, target)
        os._exit(9)

    def dies():
        os.rename = dies_in_a_copy
        save(2)

    run(1, save, 1)
    with pytest.raises(RuntimeError, match="9"):
        run(1, dies)
    assert (tmp_path / "2" / MANIFEST).is_file()
    with pytest.warns(UserWarning, match=r"2 is damaged: .* Going on from .*1$"):
        assert newest_checkpoint(tmp_path) == tmp_path / "1"
    with pytest.raises(ValueError, match=r"is damaged: .* is not there"):
        check_folder(tmp_path / "2")
    check_folder(tmp_path / "1")


def jumping(out, jump):
    """Train while the clock jumps at each look."""
    real = time.time
    looks = itertools.count()
    time.time = lambda: real() + jump * next(looks)
    try:
        return losses([train_rank(configured({**TINY, "auto_resume": True, "out": str(out)}))])
    finally:
        time.time = real


def test_a_clock_that_jumps_changes_nothing(made, tmp_path):
    shutil.copytree(made / "4", tmp_path / "it")
    os.utime(tmp_path / "it" / "checkpoint.pt", (1e9, 1e9))
    os.utime(tmp_path / "it" / "checkpoint-2.pt", (4e9, 4e9))
    wanted = read_checkpoint(str(made / "6"))["losses"]["zero_nb"]
    for jump in (-3600.0, 86400.0):
        shutil.copytree(tmp_path / "it", tmp_path / str(jump))
        assert run(2, jumping, tmp_path / str(jump), jump) == [wanted, wanted]


# --- the folder -----------------------------------------------------------------------------------


def held(out, seconds):
    """Be a process that writes to a folder; gives its id when it holds it."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        handle = os.open(out, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(write, b"x")
        time.sleep(seconds)
        os._exit(0)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return pid


def test_a_second_job_in_one_folder_is_an_error_on_every_rank(made, tmp_path):
    shutil.copytree(made / "2", tmp_path / "it")
    pid = held(tmp_path / "it", 60)
    config = configured({**TINY, "auto_resume": True, "timeout": 1.0, "out": str(tmp_path / "it")})
    try:
        for said in run(2, lambda: caught(lambda: train_rank(config))):
            assert "--out must be a folder of this job alone" in said
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert read_checkpoint(str(tmp_path / "it"))["step"] == 2
    with writing_alone(config, Group()):  # the killed process holds nothing
        pass


def test_the_next_rank_0_waits_for_the_one_before_it(made, tmp_path):
    shutil.copytree(made / "2", tmp_path / "it")
    pid = held(tmp_path / "it", 0.5)
    try:
        assert len(losses(in_lives(tmp_path / "it", (2, 6)))) == 6
    finally:
        os.waitpid(pid, 0)


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    config = configured({**TINY, "out": "/proc/zero_nb"})
    assert all(said for said in run(2, lambda: caught(lambda: train_rank(config))))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for said in run(2, lambda: caught(lambda: train_rank(replace(config, out=str(tmp_path))))):
        assert "--out must be a folder to write to" in said
