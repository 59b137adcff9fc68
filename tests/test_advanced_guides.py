"""The scripts of guides 04 to 06 and 11 to 13: on two ranks of torchrun's agent, on command lines of their own."""

import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import forking_agent
from common.elastic import die_with_parent
from common.two_machines import missing, torchrun_on_two_machines
from torch.distributed.run import config_from_args, parse_args

from zero_nb.comm.launch import run

why = missing()
GUIDES = Path(__file__).parents[1] / "nbs" / "guides"


def be_rank(path, flags):
    """Be what torchrun starts for a rank: the script with its command line."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(path.parent))
    torch.set_num_threads(1)
    runpy.run_path(str(path), run_name="__main__")


def be_agent(path, flags, log):
    """Be torchrun's agent of two ranks, which are forked: this process has imported torch already."""
    code = 1
    try:
        die_with_parent()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        given = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"]
        config, _, _ = config_from_args(parse_args([*given, "--monitor-interval=0.05", str(path)]))
        forking_agent(config, be_rank)(path, flags)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def torchrun(name, folder, *flags):
    """Run a script on two ranks; gives the exit code and what was printed."""
    log = folder / "log"
    if not (pid := os.fork()):
        be_agent(GUIDES / f"{name}.py", [str(flag) for flag in flags], log)
    _, status = os.waitpid(pid, 0)
    text = log.read_text()
    log.unlink()
    return os.waitstatus_to_exitcode(status), text


def printed(name, folder, *flags):
    """Give what a script prints that must end well."""
    code, text = torchrun(name, folder, *flags)
    assert code == 0, text
    return text


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Let this process import what a first step imports, so that forked ranks need not."""
    run(1, lambda: None)


def test_muon_goes_on_from_its_checkpoint(tmp_path):
    saved = tmp_path / "saved"
    assert "2 ranks, 2 steps up to step 2, loss" in printed("muon", tmp_path, saved, "--steps", 2)
    said = printed("muon", tmp_path, saved, "--steps", 3)
    assert "2 ranks, 1 steps up to step 3, loss" in said


def test_low_precision_in_each_recipe(tmp_path):
    bytes_held = {}
    for recipe in ("masters", "scaler"):
        said = printed("low_precision", tmp_path, recipe, "--steps", 3)
        found = re.search(rf"{recipe}: loss \d\.\d+, ([\d,]+) bytes held, [\d,]+ sent", said)
        bytes_held[recipe] = int(found[1].replace(",", ""))
    assert abs(bytes_held["masters"] - bytes_held["scaler"]) < 16  # on two ranks


def test_accumulation_is_the_training_of_one_process(tmp_path):
    flags = ["--steps", 3, "--accumulate", 3, "--clip", 1, "--recompute"]
    for mode in ("zero1-overlap", "zero2"):
        said = printed("accumulation", tmp_path, "--mode", mode, *flags)
        gap = float(re.search(rf"{mode}: loss \S+, (\S+) from one process", said)[1])
        assert gap < 3e-3 / 10  # of the learning rate: AdamW divides by small gradients


def test_debugging_provokes_what_it_says(tmp_path):
    said = printed("debugging", tmp_path, "raises, and tells")
    assert "rank 1: ValueError: record 54" in said
    assert "rank 1 failed with ValueError: record 54 has no target" in said
    said = printed("debugging", tmp_path, "skips", "--compare", 2)
    assert said.count("the step of update 4: rank 1 differs from ") == 2
    assert "DivergenceError: the ranks diverged" in printed("debugging", tmp_path, "flips")
    code, said = torchrun("debugging", tmp_path, "killed")
    assert code == 1 and "Signal 9 (SIGKILL) received" in said


def test_libraries_train_or_say_what_to_install(tmp_path):
    """The notebook trains with all three; this is the one that is imported fastest."""
    if importlib.util.find_spec("accelerate"):
        said = printed("libraries", tmp_path, "accelerate", tmp_path / "saved", "--steps", 2)
        assert float(re.search(r"2 steps on 2 ranks, (\S+) from one process", said)[1]) < 1e-5
        assert (tmp_path / "saved" / "optimizer.bin").is_file()
    script = runpy.run_path(str(GUIDES / "libraries.py"))
    script["PACKAGES"]["no_such_library"] = "no-such-library"
    with pytest.raises(SystemExit, match="not installed here: pip install no-such-library"):
        script["check_installed"]("no_such_library")


def test_the_script_for_slurm_is_one():
    script = GUIDES / "two_machines.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/bin/bash\n#SBATCH ")


@pytest.mark.skipif(bool(why), reason=why)
def test_two_machines_meet_and_send_what_the_guide_says(tmp_path):
    flags = ["--width", "300", "--steps", "2", "--mbit", "1000", "--out", str(tmp_path / "said")]
    first, second = torchrun_on_two_machines(GUIDES / "two_machines.py", flags, 1, 120.0, "1gbit")
    assert first.startswith("2 ranks") and not second
    said = json.loads((tmp_path / "said").read_text())
    size = said["bytes of the parameters"]
    wanted = {"ddp": 1.0, "zero1": 1.5, "zero1-overlap": 1.0, "zero2": 1.0}
    for mode, share in wanted.items():  # headers and acknowledgements come on top
        assert share <= said["found"][mode][1] / size <= 1.1 * share
