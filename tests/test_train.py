"""The main job on tiny models, with real ranks."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dropin import cuda

from zero_nb.apps import train
from zero_nb.apps.train import (
    TrainConfig,
    configured,
    measured,
    read_checkpoint,
    read_corpus,
    train_rank,
    windows,
)
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

TINY = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "block": 32,
    "batch": 2,
    "steps": 6,
    "eval_every": 3,
    "save_every": 4,
    "sample": 8,
    "warmup": 0.2,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
STATE = "state, zero_nb / plain DDP"


def launched(n, *flags):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={n}",
        "-m",
        "zero_nb.apps.train",
        *flags,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run the main job as `make train` does."""
    out = tmp_path_factory.mktemp("job")
    return out, launched(2, *FLAGS, f"--out={out}")


def test_leaves_its_files(job):
    out, process = job
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint.pt",
        "curve.png",
        "report.json",
        "samples.txt",
    ]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    samples = (out / "samples.txt").read_text().split("\n\n----\n\n")
    assert len(samples) == 4 and any(
        sample.startswith("class ") and len(sample) >= 14 for sample in samples
    )


def test_report(job):
    numbers = json.loads((job[0] / "report.json").read_text())
    assert numbers["world size"] == 2 and len(numbers["bytes by rank"]) == 2
    assert (
        list(numbers["losses"]["zero_nb"])
        == list(numbers["losses"]["plain DDP"])
        == ["1", "2", "3", "4", "5", "6"]
    )
    assert list(numbers["held-out losses"]["zero_nb"]) == ["3", "6"]
    assert (
        numbers["largest parameter difference"] < 1e-5 and numbers["largest loss difference"] < 1e-5
    )
    assert all(
        math.isfinite(numbers[f"{what}, zero_nb / plain DDP"]["median"])
        for what in ("step time", "optimizer step alone")
    )
    for sides in numbers["bytes by rank"]:
        assert (
            sides["zero_nb"]["parameters"]
            >= 4 * numbers["parameters"]
            == sides["plain DDP"]["parameters"]
        )
        assert (
            8 * numbers["parameters"]
            <= sides["plain DDP"]["optimizer state"]
            < 8.1 * numbers["parameters"] + 1000
        )
    together = sum(sides["zero_nb"]["optimizer state"] for sides in numbers["bytes by rank"])
    assert (
        8 * numbers["parameters"] < together <= sides["plain DDP"]["optimizer state"]
    )  # neighbours share their step counts


def test_output_is_lines(job):
    text = job[1].stdout
    assert "\r" not in text and "\x1b" not in text
    assert [line.split()[:4] for line in text.splitlines() if " of 6 " in line] == [
        ["step", step, "of", "6"] for step in ("3", "6")
    ]
    assert text.count("MiB on each rank") == 1 and "largest parameter difference: " in text
    assert "zero_nb" not in job[1].stderr  # no warning that comes from this package


def test_one_process_without_a_launcher(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [
        sys.executable,
        "-m",
        "zero_nb.apps.train",
        *FLAGS,
        "--steps=2",
        "--no-compare",
        f"--out={tmp_path}",
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert process.returncode == 0, process.stderr
    assert "Exception ignored" not in process.stderr and "Traceback" not in process.stderr
    assert STATE not in json.loads((tmp_path / "report.json").read_text())


def test_unknown_option_under_torchrun():
    process = launched(2, "--stepz=3")
    assert process.returncode != 0
    assert process.stderr.count("zero_nb.apps.train: error: unrecognized arguments: --stepz=3") == 1


# --- resuming -------------------------------------------------------------------------------------
# ------------------------------------------


def tensors(value, path=""):
    """Flatten a checkpoint to comparable leaves."""
    if isinstance(value, torch.Tensor):
        return {path: value.tolist()}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else None
    )
    if items is None:
        return {path: value}
    return {leaf: v for key, inner in items for leaf, v in tensors(inner, f"{path}/{key}").items()}


@pytest.mark.parametrize("optimizer", train.RECIPES)
def test_resumed_equals_uninterrupted(optimizer, tmp_path):
    tiny = TINY | {"optimizer": optimizer, "horizon": 6}
    run(2, train_rank, configured({**tiny, "out": str(tmp_path / "whole")}))
    run(2, train_rank, configured({**tiny, "steps": 3, "out": str(tmp_path / "broken")}))
    broken = run(
        2, train_rank, configured({"resume": True, "steps": 6, "out": str(tmp_path / "broken")})
    )
    whole, again = (read_checkpoint(str(tmp_path / name)) for name in ("whole", "broken"))
    for what in ("step", "model", "optimizer", "schedule", "losses", "held_out"):
        assert tensors(whole[what]) == tensors(again[what]), what
    assert (
        measured(broken)["largest parameter difference"] < 1e-5
    )  # plain DDP with the plain optimizer started from the same file


@pytest.mark.parametrize("ranks", [1, 3])
def test_resumes_on_another_number_of_ranks(ranks, tmp_path):
    run(2, train_rank, configured({**TINY, "out": str(tmp_path)}))
    reports = run(ranks, train_rank, configured({"resume": True, "steps": 9, "out": str(tmp_path)}))
    numbers = measured(reports)
    assert numbers["largest parameter difference"] < 1e-5 and list(
        numbers["losses"]["zero_nb"]
    ) == list(range(1, 10))
    assert (
        max(report.memory["zero_nb"]["optimizer state"] for report in reports)
        < (1.3 / ranks) * reports[0].memory["plain DDP"]["optimizer state"] + 500
    )


def test_a_periodic_checkpoint_continues_to_the_same_end(tmp_path, monkeypatch):
    config = configured({**TINY, "compare": False, "out": str(tmp_path)})

    def dies(step, *rest, take=train._take):
        if step == 5:
            raise OSError("the power is gone")
        take(step, *rest)

    monkeypatch.setattr(train, "_take", dies)
    with pytest.raises(OSError, match="power"):
        run(2, train_rank, config)
    monkeypatch.undo()
    assert read_checkpoint(str(tmp_path))["step"] == 4
    again = configured({"resume": True, "out": str(tmp_path)})
    assert (again.steps, again.horizon) == (6, 6)
    assert list(run(2, train_rank, again)[0].losses["zero_nb"]) == [1, 2, 3, 4, 5, 6]
    assert (
        configured({"resume": True, "out": str(tmp_path)}).steps == 12
    )  # complete now: as far again


def test_the_plain_optimizer_reads_the_checkpoint(job):
    state = read_checkpoint(str(job[0]))
    config = TrainConfig(**state["config"])
    model = train.GPT(config.layers, config.width, config.heads)
    model.load_state_dict(state["model"])
    optimizer = train._optimizer(config, model, sharded=False)
    optimizer.load_state_dict(state["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in state["optimizer"]["param_groups"]
    ]
    assert all(optimizer.state[p]["exp_avg"].abs().max() > 0 for p in model.parameters())


def test_what_cannot_be_resumed(job, tmp_path):
    out = str(job[0])
    with pytest.raises(
        ValueError, match=r"--resume needs a checkpoint, and there is no .*; train without"
    ):
        configured({"resume": True, "out": str(tmp_path)})
    with pytest.raises(ValueError, match=r"--width is 32 in .*got 64"):
        configured({"resume": True, "out": out, "width": 64})
    with pytest.raises(ValueError, match=r"--lr is 0.0 in .*got 0.1"):
        configured({"resume": True, "out": out, "lr": 0.1})
    with pytest.raises(ValueError, match=r"--steps must be more than the 6 .*got 6"):
        configured({"resume": True, "out": out, "steps": 6})
    whole = (job[0] / "checkpoint.pt").read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2]):
        Path(tmp_path, "checkpoint.pt").write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, or no checkpoint"):
            configured({"resume": True, "out": str(tmp_path)})
    torch.save({"weights": 1}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="not a checkpoint of this program"):
        configured({"resume": True, "out": str(tmp_path)})


def test_a_save_that_fails_leaves_the_checkpoint_before_it(job, tmp_path, monkeypatch):
    side = train.Side.__new__(train.Side)
    side.config = TrainConfig(out=str(tmp_path))
    side.model = side.optimizer = side.schedule = torch.nn.Linear(1, 1)
    report = train.RankReport(0, 1, "cpu", 1, 1, {}, {}, {})
    train.save_checkpoint(side, report, 1, Group())

    def half(state, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        train.save_checkpoint(side, report, 2, Group())
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 1


def test_ranks_that_disagree_all_stop(tmp_path):
    config = TrainConfig(**TINY, out=str(tmp_path))

    def other_clip():
        try:
            train_rank(replace(config, clip=1.0 + Group().group_rank))
        except ValueError as error:
            return str(error)

    messages = run(2, other_clip)
    assert all("--clip 1.0" in message and "--clip 2.0" in message for message in messages)


def test_a_checkpoint_that_one_rank_cannot_read_stops_all(tmp_path):
    config = TrainConfig(**TINY, resume=True)

    def only_rank_0():
        Path(tmp_path, "0").mkdir(exist_ok=True)
        try:
            train_rank(replace(config, out=str(tmp_path / str(Group().group_rank))))
        except ValueError as error:
            return str(error)

    assert all("--resume needs a checkpoint" in message for message in run(2, only_rank_0))


# --- values ---------------------------------------------------------------------------------------
# ------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": 0}, "--layers must be at least 1, got 0"),
        ({"steps": -1}, "--steps must be at least 1"),
        ({"warmup": 1.5}, "--warmup must be from 0 to 1, got 1.5"),
        ({"lr": math.nan}, "--lr must be at least 0, got nan"),
        ({"clip": math.inf}, "--clip"),
        ({"optimizer": "lion"}, "--optimizer must be one of adamw, adam"),
        ({"device": "tpu"}, "--device must be one of auto, cpu, cuda"),
        ({"heads": 3, "width": 64}, "--width 66 would do"),
        ({"heads": 4, "width": 4}, "--width 8 would do"),
        ({"steps": True}, "--steps must be of type int"),
        ({"batch": 1.5}, "--batch must be of type int"),
        ({"eval_every": 0}, "--eval-every must be at least 1"),
    ],
)
def test_wrong_options(wrong, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**wrong)


@settings(max_examples=50, deadline=None)
@given(heads=st.integers(1, 16), width=st.integers(2, 300))
def test_the_suggested_width_is_accepted(heads, width):
    try:
        TrainConfig(heads=heads, width=width)
    except ValueError as error:
        TrainConfig(heads=heads, width=int(str(error).split("--width ")[-1].split()[0]))


def test_config_survives_its_dictionary():
    config = TrainConfig(**TINY)
    assert TrainConfig(**asdict(config)) == config


@settings(max_examples=50, deadline=None)
@given(horizon=st.integers(1, 200), warmup=st.floats(0, 1))
def test_learning_rate_stays_between_its_floor_and_its_peak(horizon, warmup):
    config = TrainConfig(steps=horizon, warmup=warmup)
    rates = [train.learning_rate(config, step) for step in range(2 * horizon)]
    assert min(rates) > 0 and max(rates) <= 1 and rates[horizon:] == [pytest.approx(0.05)] * horizon


def test_windows_are_a_function_of_their_key():
    text = torch.arange(256, dtype=torch.uint8)
    draws = [
        windows(text, 3, 8, "train", *key) for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    ]
    assert all(
        (draw.shape, draw.dtype) == ((3, 9), torch.int64) and (draw.diff() == 1).all()
        for draw in draws
    )
    assert len({str(draw.tolist()) for draw in draws}) == 4 and windows(
        text, 3, 8, "train", 0, 0, 0
    ).equal(draws[0])
    assert windows(text, 3, 255).equal(torch.arange(256).expand(3, -1))
    with pytest.raises(ValueError, match="--block must be less than the 256 bytes"):
        windows(text, 1, 256)


def test_corpus_from_a_folder(tmp_path):
    for i in range(200):
        (tmp_path / f"m{i:03}.py").write_text(f"x = {i:0100}\n")
    for skipped in ("tests", "site-packages", "__pycache__"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "secret.py").write_text("secret" * 100)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    corpus, again = read_corpus(str(tmp_path)), read_corpus(str(tmp_path))
    texts = [bytes(part.tolist()) for part in (corpus.train, corpus.held_out)]
    assert (
        b"secret" not in texts[0] + texts[1]
        and corpus.digest == again.digest
        and corpus.train.equal(again.train)
    )
    assert sorted((texts[0] + texts[1]).split(b"\0")[:-1]) == [
        f"x = {i:0100}\n".encode() for i in range(200)
    ]
    assert texts[0].split(b"\0") == sorted(
        texts[0].split(b"\0"), key=lambda file: file or b"~"
    )  # in order of the paths
    held_out = set(texts[1].split(b"\0"))
    (tmp_path / "another.py").write_text("y = 1\n")
    assert held_out <= {
        *bytes(read_corpus(str(tmp_path)).held_out.tolist()).split(b"\0")
    }  # a new file moves no other
    with pytest.raises(ValueError, match="--data must hold some dozens of Python files"):
        read_corpus(str(tmp_path / "tests"))


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rich and matplotlib: pip install 'zero_nb\[train\]'"):
        train.extra("rich", "matplotlib")


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [train.check_devices("auto", 2), train.check_devices("cpu", 8)] == [2, 0]
    with pytest.raises(
        ValueError,
        match=r"--nproc must be at most 2, the GPUs of this machine, got 3; --device cpu runs 3",
    ):
        train.check_devices("auto", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="--device cuda needs a GPU"):
        train.check_devices("cuda", 1)


def test_writing_stays_inside_the_block():
    model = train.GPT(1, 16, 2)
    assert train.generate(model, ["ab", "c"], 20, 4, seed=3) == train.generate(
        model, ["ab", "c"], 20, 4, seed=3
    )
    assert (
        train.generate(model, [], 20, 4, seed=3) == train.generate(model, ["a"], 0, 4, seed=3) == []
    )


@cuda
def test_on_gpus(tmp_path):
    process = launched(torch.cuda.device_count(), *FLAGS, f"--out={tmp_path}")
    assert process.returncode == 0, process.stderr
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["device"] != "cpu" and numbers["largest loss difference"] < 0.05
