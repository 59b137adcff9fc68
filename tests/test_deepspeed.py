"""The real DeepSpeed reads the folders that `convert_checkpoint` writes, and trains on from them.

Skipped unless DeepSpeed is installed, which is no requirement of the tests: `DS_BUILD_OPS=0 pip install
deepspeed`. Tried with DeepSpeed 0.19.8 and torch 2.13."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint

THEIRS = Path(__file__).parent / "deepspeed"

# not by its import: the folder beside this file has the same name
INSTALLED = {found.name for found in importlib.metadata.distributions(name="deepspeed")}
pytestmark = pytest.mark.skipif(not INSTALLED, reason="DeepSpeed is not installed")


def deepspeed_goes_on(folder, dtype, after, ranks):
    """Let DeepSpeed load a folder and take two more steps; gives what it has written."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(THEIRS / "train.py"), "load", str(folder), dtype, str(after)]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", *script],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("between", ["sharded", "safetensors"])
def test_deepspeed_trains_on_from_what_we_write(tmp_path, between, dtype, ranks):
    """Its own checkpoint of two ranks is converted, and converted back, for other ranks."""
    middle = tmp_path / f"middle{'.safetensors' if between == 'safetensors' else ''}"
    assert convert_checkpoint(THEIRS / dtype, middle) == []
    [model_file] = (THEIRS / dtype).glob("*/mp_rank_00_model_states.pt")
    assert "extra" not in torch.load(model_file, weights_only=False)
    assert convert_checkpoint(middle, tmp_path / "ds", "deepspeed", ranks=ranks) == []
    verify_checkpoint(tmp_path / "ds")
    said = deepspeed_goes_on(tmp_path / "ds", dtype, tmp_path / "after.pt", ranks)
    assert said.count(" has extra null") == ranks
    found, wanted = torch.load(tmp_path / "after.pt"), torch.load(THEIRS / dtype / "after.pt")
    limits = {"rtol": 1e-6, "atol": 1e-7}
    if dtype == "bf16":  # gradients are averaged in it, over other ranks
        limits = {"rtol": 2**-7, "atol": 2**-12}
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], **limits)
    before = torch.load(model_file, weights_only=False)["module"]["a.weight"].float()
    assert (before - found["a.weight"]).abs().max() > 1e-3  # it did go on


def test_deepspeed_gives_other_keys_back_as_client_state(tmp_path):
    convert_checkpoint(THEIRS / "fp32", tmp_path / "a.pt", key_by="name")
    weights = torch.load(next((THEIRS / "fp32").glob("*/mp*")), weights_only=False)["module"]
    content = {"model": weights, "optimizer": torch.load(tmp_path / "a.pt")}
    torch.save({**content, "epoch": 3, "run": {"name": "a"}}, tmp_path / "script.pt")
    convert_checkpoint(tmp_path / "script.pt", tmp_path / "ds", "deepspeed", ranks=2)
    said = deepspeed_goes_on(tmp_path / "ds", "fp32", tmp_path / "after.pt", 2)
    extra = json.dumps({"epoch": 3, "run": {"name": "a"}})
    assert [said.count(f"rank {rank} has extra {extra}") for rank in (0, 1)] == [1, 1]
