"""The stand-alone scripts of the guides, each run as a program by two ranks of torchrun's agent."""

import os
import re
import runpy
import sys
from pathlib import Path

import torch
import torch._dynamo  # ranks are forked, and would each import it
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

GUIDES = Path(__file__).parents[1] / "nbs" / "guides"


def as_program(script: str, arguments: list[str], log: str) -> None:
    """Run a script as `python script arguments` does; what it prints on rank 0 goes to a file."""
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    if os.environ["RANK"] == "0":
        sys.stdout = open(log, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def launched(tmp_path: Path, name: str, *arguments: str, ranks: int = 2) -> str:
    """Give what a script prints under `torchrun`, whose ranks are forked from this process here."""
    script = str(GUIDES / f"{name}.py")
    log = tmp_path / "log"
    given = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.05"]
    config, _, _ = config_from_args(parse_args([*given, f"--nproc-per-node={ranks}", script]))
    config.start_method = "fork"
    elastic_launch(config, as_program)(script, [*arguments], str(log))
    return log.read_text(encoding="utf-8")


def test_drop_in(tmp_path):
    found = launched(tmp_path, "drop_in", f"{tmp_path}/o.pt", "--steps=2", "--width=32")
    steps, loss, mine = re.fullmatch(
        r"(\d+) steps, loss ([\d.]+), ([\d,]+) bytes .*\n", found
    ).groups()
    state = torch.load(tmp_path / "o.pt", weights_only=True)["state"]
    full = sum(value.nbytes for values in state.values() for value in values.values())
    assert steps == "2" and 4 < float(loss) < 6
    assert 0.49 < int(mine.replace(",", "")) / full < 0.51


def test_which_mode(tmp_path):
    losses = set()
    for mode, kinds in {
        "ddp": ["all_reduce"],
        "zero1": ["all_reduce", "all_gather"],
        "zero2-interleaved": ["reduce_scatter", "all_gather"],
    }.items():
        found = launched(tmp_path, "which_mode", f"--mode={mode}", "--steps=3", "--width=40")
        losses.add(found.splitlines()[0])
        assert re.findall(r"'(\w+)':", found) == kinds and f"memory by rank, {mode}\n" in found
    assert len(losses) == 1, losses


def test_will_it_fit(tmp_path):
    given = ("--layers=2", "--width=64", "--batch=2", "--context=32")
    found = re.findall(
        r"(\w+) +predicted +([\d,]+) B  counted +([\d,]+) B",
        launched(tmp_path, "will_it_fit", *given),
    )
    pairs = {kind: [int(n.replace(",", "")) for n in numbers] for kind, *numbers in found}
    assert [*pairs] == ["parameters", "gradients", "state", "activations"]
    predicted, counted = pairs.pop("activations")
    assert 0.98 < predicted / counted <= 1 and all(a == b > 0 for a, b in pairs.values())


def test_two_levels(tmp_path):
    found = launched(tmp_path, "two_levels", "--per-node=2", "--width=64", ranks=4)
    full = 4 * 4 * 65 * 64  # four layers in float32
    lines = [re.findall(r"[\d,.]+(?= B|  state)", line) for line in found.splitlines()]
    (loss, *one), (again, *two) = [[float(n.replace(",", "")) for n in line] for line in lines]
    assert loss == again
    assert [round(n / full, 1) for n in one] == [0.5, 0.5, 1.0]
    assert [round(n / full, 1) for n in two] == [1.0, 1.0, 0.5]


def test_coming_from(tmp_path):
    found = launched(tmp_path, "coming_from", f"{tmp_path}/moved")
    gaps = dict(re.findall(r"(.+): losses .*, largest gap (\S+)\n", found))
    assert [*gaps] == ["torch's ZeroRedundancyOptimizer", "FSDP2"]
    assert all(float(gap) < 1e-6 for gap in gaps.values())
