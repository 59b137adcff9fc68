"""What the main job takes from its command line and from its texts, without ranks."""

import importlib.util
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from common.jobs import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.apps.config import TrainConfig, extra, learning_rate
from zero_nb.apps.loop import check_devices
from zero_nb.apps.text import read_corpus, windows
from zero_nb.apps.train import run_rank


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": 0}, "--layers must be at least 1, got 0"),
        ({"steps": -1}, "--steps must be at least 1"),
        ({"warmup": 1.5}, "--warmup must be from 0 to 1, got 1.5"),
        ({"lr": math.nan}, "--lr must be at least 0, got nan"),
        ({"clip": math.inf}, "--clip"),
        ({"mode": "zero3"}, "--mode must be one of auto, zero1, zero1-overlap, zero2, zero2-inter"),
        ({"mode": "zero2-interleaved"}, "give --clip 0, or another mode"),
        ({"optimizer": "lion"}, "--optimizer must be one of adamw, adam"),
        ({"optimizer": "no.such.Class"}, "a class that can be imported, got no.such.Class"),
        ({"optimizer": "math.pi"}, "must be a class such as torch.optim.AdamW, got 3.14"),
        ({"optimizer": "lbfgs"}, "LBFGS looks at all parameters together"),
        ({"optimizer": "sparseadam"}, "SparseAdam, which steps sparse gradients"),
        ({"optimizer": "muon"}, "Muon only supports 2D parameters"),
        ({"optimizer": "muon+adamw+sgd"}, "must be one class, or two joined by"),
        ({"optimizer": "muon+"}, "two joined by '[+]', got 'muon[+]'"),
        ({"optimizer": "common.optimizers.NeedsRate"}, "missing 1 required .* 'lr'"),
        ({"optimizer_args": "1"}, "--optimizer-args must be keyword arguments with literal"),
        ({"optimizer_args": "lr=print(1)"}, "--optimizer-args must be keyword arguments"),
        ({"optimizer_args": "lr=1)(eps=1"}, "--optimizer-args must be keyword arguments"),
        ({"optimizer_args": "beta=1"}, "unexpected keyword argument 'beta'"),
        ({"dtype": "float16"}, "--dtype must be one of float32, bfloat16"),
        ({"log_steps": "xml"}, "--log-steps must be one of none, csv, tensorboard"),
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
    rates = [learning_rate(config, step) for step in range(2 * horizon)]
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


def test_corpus_of_names_that_are_no_text(tmp_path):
    for i in range(200):
        Path(tmp_path, os.fsdecode(b"caf\xe9%03d.py" % i)).write_text(f"x = {i:0100}\n")
    corpus = read_corpus(str(tmp_path))
    assert len(corpus.train) + len(corpus.held_out) == 200 * 106  # each ends with a zero


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rich and matplotlib: pip install 'zero_nb\[train\]'"):
        extra("rich", "matplotlib")


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [check_devices("auto", 2), check_devices("cpu", 8)] == [2, 0]
    with pytest.raises(
        ValueError,
        match=r"--nproc must be at most 2, the GPUs of this machine, got 3; --device cpu runs 3",
    ):
        check_devices("auto", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="--device cuda needs a GPU"):
        check_devices("cuda", 1)


def test_a_batch_that_the_ranks_cannot_share_is_one_line_of_rank_0(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            run_rank(["--global-batch=3"])
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.count("\n") == lines
        assert lines == 0 or "--global-batch must be a multiple of the number of ranks" in said


def test_a_size_without_a_rank_is_of_another_program(monkeypatch):
    """Schedulers set WORLD_SIZE for what they start; a rank of ours has RANK too."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    trained = []
    monkeypatch.setattr("zero_nb.apps.train._train_and_leave", trained.append)
    run_rank(["--global-batch=3"])  # as one rank, for which any batch will do
    assert [config.global_batch for config in trained] == [3]
