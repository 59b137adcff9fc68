"""The console script: what it starts, what it refuses, and what it says when a rank fails."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from common.commands import refused
from common.starter import ALONE
from common.waiting import wait_for

from zero_nb.apps import cli

TINY = [
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--block=32",
    "--batch=2",
    "--steps=4",
    "--eval-every=2",
    "--sample=8",
    "--vocabulary=256",
    "--rounds=1",
]
FAILS_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    import torch.nn.utils
    def clip(*args, **kwargs): raise {error}
    torch.nn.utils.clip_grad_norm_ = clip
"""


def command(*words):
    script = Path(sys.executable).with_name("zero-nb")
    return (
        [str(script), *words]
        if script.exists()
        else [sys.executable, "-m", "zero_nb.apps.cli", *words]
    )


MAIN = ALONE + "from zero_nb.apps.cli import main; raise SystemExit(main())"


def forked(starter, folder, *words, **environ):
    """Run the command in a process that has imported torch; its ranks are new interpreters."""
    (folder / "said").mkdir()
    [ended] = starter.run(MAIN, folder / "said", 1, words, seconds=120, **environ)
    return ended


def test_trains_and_resumes(starter, tmp_path):
    out = tmp_path / "new" / "folder"
    line = command("train", "--nproc=2", *TINY, f"--out={out}")
    process = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0 and process.stderr == "", process.stderr
    assert "MiB on each rank" in process.stdout and str(out) in process.stdout
    flags = ("train", "--nproc=1", "--resume", "--no-compare", f"--out={out}")
    ended = forked(starter, tmp_path, *flags)  # complete, so as far again
    assert ended.code == 0, ended.stderr
    numbers = json.loads((out / "report.json").read_text())
    assert (numbers["world size"], list(numbers["losses"]["zero_nb"])) == (
        1,
        [str(step) for step in range(1, 9)],
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--bogus"], "zero-nb train: error: unrecognized arguments: --bogus"),
        (["train", "--layers", "0"], "zero-nb train: error: --layers must be at least 1, got 0"),
        (
            ["train", "--layers", "two"],
            "zero-nb train: error: argument --layers: invalid int value: 'two'",
        ),
        (
            ["train", "--heads", "3", "--width", "64"],
            (
                "zero-nb train: error: --width must be an even multiple of --heads, got 64 for 3"
                " heads; --width 66 would do"
            ),
        ),
        (
            ["train", "--optimizer", "lion"],
            (
                "zero-nb train: error: --optimizer must be one of adamw, adam, sgd, rmsprop,"
                " adagrad, muon, another class of torch.optim"
            ),
        ),
        (["train", "--nproc", "0"], "zero-nb train: error: --nproc must be at least 1, got 0"),
        (
            ["train", "--nproc", "2", "--global-batch", "3"],
            (
                "zero-nb train: error: --global-batch must be a multiple of the number of ranks,"
                " got 3 for 2 ranks; 4 would do"
            ),
        ),
        (
            ["train", "--data", "/nowhere"],
            "zero-nb train: error: --data must hold some dozens of Python files, got 0 bytes",
        ),
        (
            ["train", "--port", "70000"],
            "zero-nb train: error: --port must be from 0 to 65535, got 70000",
        ),
        (
            ["train", "--resume", "--out", "/nowhere"],
            (
                "zero-nb train: error: --resume needs a checkpoint, and there is no"
                " /nowhere/checkpoint.pt"
            ),
        ),
        (["trane"], "zero-nb: error: argument COMMAND: invalid choice: 'trane'"),
        ([], "zero-nb: error: the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, words, says):
    monkeypatch.setattr(cli, "launch_ranks", lambda *args: pytest.fail("processes were started"))
    status, err, out = refused(capsys, *words)
    assert status == 2 and err.startswith(says) and err.count("\n") == 1 and out == ""


def test_a_port_in_use(capsys, monkeypatch):
    monkeypatch.setattr(cli, "launch_ranks", lambda *args: pytest.fail("processes were started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, err, _ = refused(capsys, "train", f"--port={port}")
    assert (
        status == 2
        and f"--port must be free, and {port} is in use; choose another" in err
        and err.count("\n") == 1
    )


def test_ranks_and_gpus(capsys, monkeypatch):
    started = []
    monkeypatch.setattr(
        cli,
        "launch_ranks",
        lambda arguments, nproc, port: started.append((nproc, port, arguments)) or ("", 0),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    status, err, _ = refused(capsys, "train", "--nproc=8")
    assert (
        status == 2
        and "--nproc must be at most 4, the GPUs of this machine, got 8; --device cpu runs 8 ranks anyway"
        in err
    )
    assert (
        cli.main(["train"])
        == cli.main(["train", "--device=cpu"])
        == cli.main(["train", "--nproc=8", "--device=cpu", "--no-compare"])
        == 0
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["train", "--port=0", "--eval-every=7"]) == 0
    assert [call[:2] for call in started] == [(4, 0), (2, 0), (8, 0), (2, 0)]
    assert started[2][2] == [
        "-m",
        "zero_nb.apps.train",
        "--device=cpu",
        "--no-compare",
    ] and started[3][2][2:] == ["--eval-every=7"]


def test_a_missing_package_names_the_extra(capsys, monkeypatch):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "rich" else find(name)
    )
    status, err, _ = refused(capsys, "train")
    assert status == 2 and "needs rich: pip install 'zero_nb[train]'" in err


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, _, out = refused(capsys, "--help")
    assert status == 0 and "train a small GPT" in " ".join(out.split())
    status, _, out = refused(capsys, "train", "--help")
    assert status == 0 and all(
        flag in out
        for flag in (
            "--nproc",
            "--port",
            "--steps",
            "--optimizer",
            "--layers",
            "--resume",
            "--no-compare",
        )
    )
    assert "SUPPRESS" not in out
    assert "zero2-interleaved cannot clip, and needs --clip 0" in " ".join(out.split())
    monkeypatch.setitem(cli.COMMANDS, "plan", ("zero_nb.not_there", "say what is needed"))
    assert "plan" not in refused(capsys, "--help")[2]


def test_plan_prints_a_table_and_draws_it_if_asked(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(
            ["plan", "gpt2-xl", "--world-size", "8", "--optimizer", "adamw", "--memory", "24GB"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "fits in 24GB" in text and "drawn in" not in text and list(tmp_path.iterdir()) == []
    assert cli.main(["plan", "gpt2", "--svg", "plan.svg"]) == 0
    assert "drawn in plan.svg" in capsys.readouterr().out
    assert Path("plan.svg").read_text(encoding="utf-8").startswith("<svg")


def test_plan_finds_a_function_of_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\ndef model(): return torch.nn.Linear(30, 10)\n")
    process = subprocess.run(
        command("plan", "mine:model"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0 and "mine:model: 310 parameters" in process.stdout, (
        process.stderr
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "gpt2-xxl"], "gpt2-xl"),
        (["plan", "gpt2", "--master-dtype", "fp32"], "unknown master_dtype 'fp32'"),
        (["plan", "gpt2", "--master-dtype", "bfloat16"], "bfloat16 does not take float32"),
        (["plan", "gpt2", "--world-size", "0"], "got 0"),
        (["plan", "gpt2", "--memory", "much"], "--memory must be above 0 and written as 24GB"),
        (["plan", "gpt2", "--memory", "24"], "--memory must be above 0 and written as 24GB"),
        (["plan", "gpt2", "--memory", "9GB", "--activations", "1"], "--activations must be above"),
        (["plan"], "name one model"),
        (
            ["plan", "gpt2", "--svg", "/nowhere/x.svg"],
            "--svg must be a file in a folder that exists",
        ),
    ],
)
def test_a_mistake_in_a_plan_is_one_line_before_any_table(capsys, words, says):
    status, err, out = refused(capsys, *words)
    assert (
        status == 2
        and out == ""
        and says in err
        and err.count("\n") == 1
        and err.startswith("zero-nb plan: error: ")
    )


def test_the_module_runs_as_the_command_does():
    line = [sys.executable, "-m", "zero_nb.apps.cli", "plan", "gpt2-xxl"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith("zero-nb plan: error: ")


def test_the_command_itself_needs_no_torch():
    code = (
        "import sys; from zero_nb.apps.cli import main\ntry: main(['--help'])\nexcept SystemExit:"
        " pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_rank_that_raises(starter, tmp_path):
    Path(tmp_path, "sitecustomize.py").write_text(
        FAILS_ON_RANK_1.format(error="ZeroDivisionError('no gradient left')")
    )
    flags = ("train", "--nproc=2", *TINY, f"--out={tmp_path}")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = forked(starter, tmp_path, *flags, PYTHONPATH=paths)
    lines = ended.stderr.splitlines()
    assert (
        ended.code == 1
        and lines[-1] == "zero-nb train: rank 1 failed: ZeroDivisionError: no gradient left"
    )
    assert (
        ended.stderr.count("Traceback") == 1
        and "clip_grad_norm_" in ended.stderr
        and len(lines) < 40
    )


@contextmanager
def training(starter, out):
    """Start a training that would take hours; give its launcher, its ranks, and how the launcher will
    have ended, once it has taken a step."""
    flags = ("train", "--nproc=2", *TINY, "--steps=100000", "--eval-every=1", f"--out={out}")
    said = out / "said" / "stdout of 0"
    left = []
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(forked, starter, out, *flags)
        try:
            wait_for(lambda: ended.done() or (said.exists() and "\nstep " in said.read_text()), 110)
            assert not ended.done(), ended.result()
            [launcher] = left = psutil.Process(starter.process.pid).children()
            ranks = [
                child
                for child in launcher.children(recursive=True)
                if "zero_nb.apps.train" in child.cmdline()
            ]
            left = [launcher, *ranks]
            assert len(ranks) == 2
            yield launcher, ranks, ended
            assert psutil.wait_procs(ranks, timeout=30)[1] == []
        finally:
            for each in left:
                each.kill() if each.is_running() else None


def test_a_rank_that_is_ended_by_a_signal_without_a_name():
    ended = cli.launch_ranks(["-c", "import os; os.kill(os.getpid(), 40)"], 1)
    assert ended == ("rank 0 was ended by SIGRTMIN+6", 1)


def test_a_rank_that_is_killed(starter, tmp_path):
    with training(starter, tmp_path) as (_, ranks, ended):
        next(rank for rank in ranks if rank.environ()["RANK"] == "1").kill()
        assert ended.result().code == 1
        assert (
            ended.result().stderr
            == "zero-nb train: rank 1 was ended by SIGKILL; the machine may have run out of"
            " memory\n"
        )


def test_an_interrupt_ends_all_ranks(starter, tmp_path):
    with training(starter, tmp_path) as (launcher, _, ended):
        launcher.send_signal(signal.SIGINT)
        assert ended.result().code == 130
        assert (
            ended.result().stderr
            == "zero-nb train: stopped by SIGINT; --resume continues from the last checkpoint\n"
        )


def test_a_killed_launcher_leaves_no_rank(starter, tmp_path):
    with training(starter, tmp_path) as (launcher, _, ended):
        launcher.kill()
        assert ended.result().code == -signal.SIGKILL


def test_out_that_is_a_file_and_a_shortened_option(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "launch_ranks", lambda *args: pytest.fail("processes were started"))
    file = tmp_path / "file"
    file.touch()
    status, err, _ = refused(capsys, "train", f"--out={file}")
    assert status == 2 and f"--out must be a folder, and {file} is a file" in err
    status, err, _ = refused(capsys, "train", "--step=3")
    assert status == 2 and "unrecognized arguments: --step=3" in err
