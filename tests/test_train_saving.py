"""What the main job's checkpoints leave on a disk that is full, and where a life was killed."""

import io
import json
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common.errors import caught
from common.jobs import TINY

from zero_nb.apps import train
from zero_nb.apps.checkpoints import _saved_step, saved_checkpoints
from zero_nb.apps.loop import train_rank
from zero_nb.apps.resume import configured
from zero_nb.checkpoint import sharded
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

TWO_STEPS = {**TINY, "steps": 2, "save_every": 1, "compare": False, "horizon": 6}


@pytest.mark.parametrize(("kind", "name"), [("full", "checkpoint.pt"), ("sharded", "checkpoint-2")])
def test_a_disk_that_is_full_is_named_with_the_file(kind, name, tmp_path):
    config = configured({**TWO_STEPS, "checkpoint": kind, "steps": 1, "out": str(tmp_path)})
    run(2, train_rank, config)
    before = [path.name for path in saved_checkpoints(str(tmp_path))]
    again = configured({"resume": True, "out": str(tmp_path), "steps": 2, "checkpoint": kind})

    def in_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return caught(lambda: train_rank(again))

    first, second = run(2, in_little_room)
    assert "File too large" in first and f"{tmp_path / name}'" in first
    assert "File too large" in second and f"{tmp_path / name}'" in second
    assert [path.name for path in saved_checkpoints(str(tmp_path))] == before
    assert [path.name for path in tmp_path.iterdir()] == before  # and nothing half written


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two ranks report, of which one loss is no number, and their options."""
    config = configured({**TWO_STEPS, "steps": 3, "out": str(tmp_path_factory.mktemp("trained"))})
    found = run(2, train_rank, config)
    found[0].losses["zero_nb"][2] = float("nan")
    return found, config


def test_results_are_json_where_a_loss_is_no_number(trained, tmp_path):
    reports, config = trained
    train.leave(reports, replace(config, out=str(tmp_path)))

    def strange(word):
        raise AssertionError(f"{word} is no JSON")

    numbers = json.loads((tmp_path / "report.json").read_text(), parse_constant=strange)
    losses = numbers["losses"]["zero_nb"]
    assert losses["2"] is None and losses["1"] == reports[0].losses["zero_nb"][1]


class Undrawn:
    """A figure of which nothing is written."""

    def savefig(self, file, format):
        Path(file).touch()


@pytest.mark.parametrize("name", ["curve.png", "report.json"])
def test_results_on_a_disk_that_is_full(name, trained, tmp_path, monkeypatch):
    reports = trained[0]
    config = replace(trained[1], out=str(tmp_path))
    train.leave(reports, config)
    before = {path.name for path in tmp_path.iterdir()}
    old = (tmp_path / name).read_bytes()
    if name == "report.json":  # the others fit
        monkeypatch.setattr(train, "draw_losses", lambda numbers: Undrawn())
        monkeypatch.setattr(train, "memory_table", lambda reports: "")
        monkeypatch.setattr(reports[0], "samples", ["short"])

    def in_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        return caught(lambda: train.leave(reports, config))

    [said] = run(1, in_little_room)
    assert "File too large" in said and f"{tmp_path / name}'" in said
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (tmp_path / name).read_bytes() == old


def killed(module, name, config):
    """Be ranks of which the first is killed while it writes its second checkpoint."""
    real = getattr(module, name)

    def kill(*args, **kwargs):
        found = real(*args, **kwargs)
        writing = any(Path(config.out).glob(".checkpoint*.tmp"))
        if writing and saved_checkpoints(config.out) and Group().group_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(module, name, kill)
    train_rank(config)


@pytest.mark.parametrize(
    ("kind", "place", "left", "next_kind", "name"),
    [
        ("full", (torch, "save"), [".checkpoint.pt."], "sharded", "checkpoint-2"),
        ("sharded", (sharded, "write_part"), [".checkpoint-2."] * 2, "full", "checkpoint.pt"),
    ],
)
def test_what_a_killed_life_left_is_removed_by_one_that_saves_otherwise(
    kind, place, left, next_kind, name, tmp_path
):
    chosen = {**TWO_STEPS, "auto_resume": True, "out": str(tmp_path)}
    with pytest.raises(RuntimeError, match="SIGKILL"):
        run(2, killed, *place, configured({**chosen, "checkpoint": kind}))
    hidden = [path.name for path in tmp_path.iterdir() if path.name[0] == "."]
    assert [path[: len(begin)] for path, begin in zip(hidden, left, strict=True)] == left
    run(2, train_rank, configured({**chosen, "checkpoint": next_kind}))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_of_another_program_stays(tmp_path):
    theirs = tmp_path / "checkpoint-500" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_bytes(b"of another program")
    config = configured({**TWO_STEPS, "checkpoint": "sharded", "out": str(tmp_path)})
    run(2, train_rank, config)
    assert theirs.read_bytes() == b"of another program"
    theirs.parent.rename(tmp_path / "checkpoint-4")
    again = configured({"resume": True, "out": str(tmp_path), "steps": 4})
    for said in run(2, lambda: caught(lambda: train_rank(again))):
        assert "checkpoint-4" in said and "one is there" in said
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    assert [path.name for path in saved_checkpoints(str(tmp_path))] == ["checkpoint-3"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_new_training_keeps_no_checkpoint_of_one_before_it(kind, tmp_path):
    chosen = {**TWO_STEPS, "save_every": 2, "keep": 3, "checkpoint": kind, "out": str(tmp_path)}
    run(1, train_rank, configured({**chosen, "steps": 1}))
    run(1, train_rank, configured({**chosen, "steps": 4, "seed": 1}))

    def steps():
        return [_saved_step(path) for path in saved_checkpoints(str(tmp_path))]

    assert steps() == [4, 2]
    run(1, train_rank, configured({"resume": True, "out": str(tmp_path), "steps": 6}))
    assert steps() == [6, 4, 2]


def test_results_are_written_where_the_output_has_no_lines_for_a_table(
    trained, tmp_path, monkeypatch
):
    reports, config = trained
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    train.leave(reports, replace(config, out=str(tmp_path)))
    assert {"curve.png", "report.json", "samples.txt"} <= {p.name for p in tmp_path.iterdir()}
    written.flush()
    assert "optimizer state" in written.buffer.getvalue().decode()
