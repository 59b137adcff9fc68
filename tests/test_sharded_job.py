"""The main job with `--checkpoint sharded`: a folder for each checkpoint, to which every rank writes its part."""

import math
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
from common.errors import caught
from common.jobs import SHARDED, lives
from common.saving import damage

from zero_nb.apps import checkpoints
from zero_nb.apps.checkpoints import read_checkpoint, save_checkpoint, saved_checkpoints
from zero_nb.apps.config import MODES
from zero_nb.apps.loop import train_rank
from zero_nb.apps.results import measured
from zero_nb.apps.resume import configured
from zero_nb.apps.sides import RankReport, Side
from zero_nb.checkpoint import sharded
from zero_nb.checkpoint.folder import MANIFEST
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run


def names(out):
    return [path.name for path in saved_checkpoints(str(out))]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "mode, optimizer, dtype",
    [
        ("zero1", "muon+adamw", "float32"),
        ("zero1-overlap", "adamw", "bfloat16"),
        ("zero2", "torch.optim.Adafactor", "float32"),
        ("zero2-interleaved", "muon+adamw", "bfloat16"),
    ],
)
def test_every_mode_resumes_to_the_bit_and_on_other_ranks(mode, optimizer, dtype, tmp_path):
    chosen = {"mode": mode, "optimizer": optimizer, "dtype": dtype, "clip": 0.0}
    whole = lives(tmp_path / "whole", (2, 6), **chosen)
    again = lives(tmp_path / "broken", (2, 3), (2, 6), **chosen)
    assert again[0].losses == whole[0].losses and again[0].held_out == whole[0].held_out
    assert measured(again)["largest parameter difference"] == 0
    assert names(tmp_path / "broken") == ["checkpoint-6"]
    other = lives(tmp_path / "broken", (3, 8), **chosen)
    # three ranks add gradients up in another order, and Muon orthogonalizes in bfloat16
    assert measured(other)["largest loss difference"] < 1e-3
    assert list(other[0].losses["zero_nb"]) == [*range(1, 9)]


def test_files_and_folders_go_on_from_each_other(tmp_path):
    whole = lives(tmp_path / "whole", (2, 8), mode="zero2", keep=2)[0].losses
    lives(tmp_path / "other", (2, 3), mode="zero1", checkpoint="full", keep=2)
    assert names(tmp_path / "other") == ["checkpoint.pt", "checkpoint-2.pt"]
    lives(tmp_path / "other", (2, 5), mode="zero2", keep=2)
    assert names(tmp_path / "other") == ["checkpoint-5", "checkpoint-4"]
    given = {"resume": True, "out": str(tmp_path / "other"), "checkpoint": "full"}
    last = run(2, train_rank, configured({**given, "steps": 8}))[0].losses
    assert names(tmp_path / "other") == ["checkpoint.pt", "checkpoint-6.pt"]
    for side, losses in whole.items():
        assert losses == pytest.approx(last[side], abs=1e-5)


def told(config):
    """Train as a rank; gives the steps that it took, and the warnings it got."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        report = train_rank(config)
    return len(report.seconds["zero_nb"]), " ".join(str(w.message) for w in found)


@pytest.mark.parametrize("how", ["resume", "auto_resume"])
def test_of_a_damaged_folder_the_one_before_it_is_taken(how, tmp_path):
    whole = lives(tmp_path / "whole", (2, 8), compare=False)[0].losses
    lives(tmp_path / "it", (2, 6), compare=False, keep=2)
    path = max((tmp_path / "it" / "checkpoint-6").glob("*.distcp"))
    if how == "resume":
        damage(path)
    else:
        shutil.copy(tmp_path / "it" / "checkpoint-4" / path.name, path)  # of the same size
    given = {"steps": 8, how: True, "out": str(tmp_path / "it")}
    if how == "auto_resume":
        given = {**SHARDED, **given, "global_batch": 6, "compare": False, "keep": 2}
        del given["batch"]
    for taken, words in run(2, told, configured(given)):
        assert taken == 4 and "checkpoint-6 is damaged" in words and "checkpoint-4" in words
    assert read_checkpoint(str(tmp_path / "it"))["losses"] == whole
    config = configured({**given, "steps": 10})
    for path in saved_checkpoints(str(tmp_path / "it")):
        damage(path / MANIFEST)
    for said in run(2, lambda: caught(lambda: train_rank(config))):
        assert said.startswith("ValueError") and "is damaged" in said


def test_a_rank_that_does_not_see_the_folder_stops_all(tmp_path):
    lives(tmp_path / "of-0", (2, 2), compare=False)

    def apart():
        out = str(tmp_path / f"of-{Group().global_rank}")
        return caught(lambda: lives_of_this_rank(out))

    def lives_of_this_rank(out):
        given = {**SHARDED, "auto_resume": True, "global_batch": 6, "compare": False, "out": out}
        del given["batch"]
        train_rank(configured(given))

    for said in run(2, apart):
        assert said.startswith("ValueError") and "one file system for all ranks" in said
        assert "rank 0 has a folder of step 2" in said and "seen by ranks 1;" in said
    assert names(tmp_path / "of-0") == ["checkpoint-2"]


def killed(place, config):
    """Be ranks of which the first is killed when its fourth step is saved."""
    module, name, calls = place
    real = getattr(module, name)

    def kill(*args, **kwargs):
        saved = (Path(config.out) / "checkpoint-4").exists()
        at_last = saved or any(Path(config.out).glob("*checkpoint-4*.tmp"))
        if at_last and Group().group_rank == 0:
            if calls:
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, name, kill)
    train_rank(config)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "place, left",
    [
        ((sharded, "write_part", True), ["checkpoint-2"]),
        ((sharded, "finish_save", True), ["checkpoint-2"]),
        ((checkpoints, "_remove_others", False), ["checkpoint-4", "checkpoint-2"]),
        ((shutil, "rmtree", False), ["checkpoint-4"]),
    ],
)
def test_a_rank_that_is_killed_while_it_saves_loses_nothing(place, left, tmp_path):
    whole = lives(tmp_path / "whole", (2, 6), compare=False)[0].losses
    given = {**SHARDED, "auto_resume": True, "global_batch": 6, "compare": False}
    del given["batch"]
    config = configured({**given, "out": str(tmp_path / "it")})
    with pytest.raises(RuntimeError, match="SIGKILL"):
        run(2, killed, place, config)
    assert names(tmp_path / "it") == left
    assert run(2, train_rank, config)[0].losses == whole
    assert {p.name for p in (tmp_path / "it").iterdir() if p.is_dir()} == {"checkpoint-6"}


def test_a_training_that_begins_anew_takes_the_place_of_the_one_before(tmp_path):
    lives(tmp_path, (2, 6), compare=False, keep=3)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]
    other = {**SHARDED, "compare": False, "keep": 3, "seed": 1, "steps": 4, "out": str(tmp_path)}
    losses = run(2, train_rank, configured(other))[0].losses
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-2"]
    assert read_checkpoint(str(tmp_path))["losses"] == losses


def test_losses_that_are_no_numbers_are_kept(tmp_path):
    losses = {"zero_nb": {1: 0.1, 2: math.inf, 3: -math.inf}}

    def save():
        side = Side(configured({**SHARDED, "out": str(tmp_path)}), "cpu", MODES[0])
        save_checkpoint(side, RankReport(0, 1, "cpu", 1, 1, losses, losses, {}), 3, Group())

    run(1, save)
    state = read_checkpoint(str(tmp_path))
    assert state["losses"] == state["held_out"] == losses
    losses["zero_nb"][4] = math.nan
    run(1, save)
    assert math.isnan(read_checkpoint(str(tmp_path))["losses"]["zero_nb"][4])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda extra: None, "not a checkpoint of this program"),
        (lambda extra: {**extra, "format": 2}, "not a checkpoint of this program"),
        (lambda extra: {**extra, "losses": {"zero_nb": [[1, "x"]]}}, "losses must be"),
        (lambda extra: {**extra, "schedule": {}}, "schedule lacks"),
        (lambda extra: {**extra, "config": {**extra["config"], "layers": 0}}, "layers"),
        (lambda extra: {**extra, "model": {}}, "it has 'model', which does not belong there"),
    ],
)
def test_what_a_folder_says_is_not_trusted(change, words, tmp_path, monkeypatch):
    def save():
        side = Side(configured({**SHARDED, "out": str(tmp_path)}), "cpu", MODES[0])
        real = checkpoints.save_sharded
        monkeypatch.setattr(
            checkpoints,
            "save_sharded",
            lambda *args: real(*args[:4], change(args[4]), *args[5:]),
        )
        save_checkpoint(side, RankReport(0, 1, "cpu", 1, 1, {}, {}, {}), 3, Group())

    run(1, save)
    with pytest.raises(ValueError, match=words):
        configured({"resume": True, "out": str(tmp_path)})
