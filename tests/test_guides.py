"""The stand-alone scripts of the guides, each run as a program by two ranks of torchrun's agent, and
what guides say of FSDP2 and of torch's class."""

import argparse
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # ranks are forked, and would each import it
import torch.distributed as dist
from common import forking_agent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.run import config_from_args, parse_args
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from zero_nb import run, verify_checkpoint
from zero_nb.apps.cli import main

GUIDES = Path(__file__).parents[1] / "nbs" / "guides"


def as_program(script: str, arguments: list[str], log: str) -> None:
    """Run a script as `python script arguments` does; what it prints on rank 0 goes to a file, after
    what earlier starts of the ranks have printed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    if os.environ["RANK"] == "0":
        sys.stdout = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def launched(tmp_path: Path, name: str, *arguments: str, ranks: int = 2, restarts: int = 0) -> str:
    """Give what a script prints under `torchrun`, whose ranks are forked from this process here."""
    script = str(GUIDES / f"{name}.py")
    log = tmp_path / "log"
    given = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.05"]
    given += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    config, _, _ = config_from_args(parse_args([*given, script]))
    with patch.dict(os.environ):
        forking_agent(config, as_program)(script, [*arguments], str(log))
    found = log.read_text(encoding="utf-8")
    log.unlink()
    return found


class Parsed(Exception):
    """Ends a script when it knows what it was asked for."""


@pytest.mark.parametrize("script", sorted(GUIDES.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_needs_no_arguments(script, monkeypatch):
    """A reader who types its name alone sees it run, and not how it is called."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser, *arguments):
        raise Parsed(parse(parser, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


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


def test_checkpoints(tmp_path):
    saved = tmp_path / "letters"
    first = launched(tmp_path, "checkpoints", str(saved), "--steps=12", ranks=3)
    second = launched(tmp_path, "checkpoints", str(saved), "--steps=20")
    assert re.match(r"3 ranks, 12 steps up to step 12, loss \d", first)
    assert re.match(r"2 ranks, 8 steps up to step 20, loss \d", second)
    assert sorted(path.name for path in saved.iterdir()) == ["step-10", "step-12", "step-20"]
    text = (GUIDES / "checkpoints.py").read_text(encoding="utf-8")
    commands = re.findall(r"^    zero-nb (.+)$", text, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        here = command.replace("runs/letters/step-60", f"{saved}/step-20")
        assert main(here.replace("runs/", f"{tmp_path}/").split()) == 0
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    assert len(state) == 5 and all(values["step"] == 20 for values in state.values())
    for found in (tmp_path / "letters.safetensors", tmp_path / "deepspeed"):
        verify_checkpoint(found)


def test_uneven(tmp_path):
    gaps = {}
    for divide_by in ("samples", "world_size"):
        found = launched(tmp_path, "uneven", "--epochs=1", f"--divide-by={divide_by}", ranks=3)
        *roll, last = found.splitlines()
        assert roll == ["rank 0 ########## 10", "rank 1 #####..... 5", "rank 2 ##........ 2"]
        gaps[divide_by] = float(re.fullmatch(rf"{divide_by}: (\S+) from one process", last)[1])
    assert gaps["samples"] < 1e-5 < 1e-3 < gaps["world_size"]


def test_surviving(tmp_path):
    saved = tmp_path / "saved"
    given = (str(saved), "--steps=9", "--kill=7")
    *starts, last = launched(tmp_path, "surviving", *given, restarts=1).splitlines()
    assert starts == [f"2 ranks, steps taken before: {n}" for n in (0, 5)]
    assert re.fullmatch(r"9 steps, loss \d\.\d+, 0e\+00 from the run without a kill", last)
    assert [path.name for path in saved.iterdir()] == ["step-5"]


def test_coming_from(tmp_path):
    found = launched(tmp_path, "coming_from", f"{tmp_path}/moved")
    gaps = dict(re.findall(r"(.+): losses .*, largest gap (\S+)\n", found))
    assert [*gaps] == ["torch's ZeroRedundancyOptimizer", "FSDP2"]
    assert all(float(gap) < 1e-6 for gap in gaps.values())


def train_fsdp2(in_backward: bool) -> tuple[int, list[torch.Tensor]]:
    """Train by FSDP2; give how many steps were taken when backward returned, and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
    taken = []

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()
        taken.append(p)

    if in_backward:
        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        torch.manual_seed(10 * i + dist.get_rank())
        model(torch.randn(5, 6)).square().mean().backward()
        inside = len(taken)
        if not in_backward:
            for p in optimizers:
                step(p)
    return inside, [p.full_tensor().detach() for p in model.parameters()]


def test_fsdp2_steps_inside_backward_by_a_hook_for_each_parameter():
    for (inside, hooked), (_, after) in zip(
        run(2, train_fsdp2, True), run(2, train_fsdp2, False), strict=True
    ):
        assert inside == 3 * len(after)
        assert all(map(torch.equal, hooked, after))


def train_fsdp2_as_guides_say() -> tuple[dict, dict, dict]:
    """Give what FSDP2 keeps and sends while gradients add up, in low precision, and with Muon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    x = torch.randn(64, 8)
    loss = lambda: (model(x) - x).square().mean()
    sent = {}
    for name in ("synced", "added"):
        model.set_requires_gradient_sync(name == "synced")
        with CommDebugMode() as counted:
            loss().backward()
        sent[name] = counted.get_comm_counts()[torch.ops.c10d._reduce_scatter_base_]
    first = next(model.parameters())
    once = first.grad.full_tensor()
    model.set_requires_gradient_sync(True)
    loss().backward()
    kept = {"dtype": first.dtype, "grad": first.grad.dtype, "share": first.to_local().numel()}
    kept["times"] = (first.grad.full_tensor() / once).median().item()
    kept["norm"] = clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    with CommDebugMode() as counted:
        torch.optim.Muon(model.parameters()).step()
    return sent, kept, {"step": counted.get_total_counts(), "join": hasattr(model, "join_hook")}


def test_fsdp2_does_what_guides_4_to_7_say_of_it():
    for sent, kept, step in run(2, train_fsdp2_as_guides_say):
        assert sent == {"synced": 2, "added": 0}
        assert (kept["dtype"], kept["grad"], kept["share"]) == (torch.float32, torch.float32, 64)
        assert abs(kept["times"] - 3) < 0.1 and kept["norm"] > 0
        assert step["step"] > 10 and not step["join"]


def train_inside_nodes() -> tuple[float, int, int]:
    """Train by torch's class in the group of a node; give the gap to AdamW, and elements of state."""
    node = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][node]
    torch.manual_seed(0)
    ours, plain = (DistributedDataParallel(nn.Linear(6, 6)) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    sharded = TorchZero(ours.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
    whole = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model, optimizer in ((ours, sharded), (plain, whole)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    gap = max((a - b).abs().max().item() for a, b in pairs)
    sizes = (
        sum(v.numel() for s in o.state.values() for v in s.values()) for o in (sharded.optim, whole)
    )
    return gap, *sizes


def test_torchs_class_divides_the_state_inside_a_node():
    found = run(4, train_inside_nodes)
    assert [gap for gap, *_ in found] == [0] * 4
    assert all(found[node][1] + found[node + 1][1] == found[0][2] for node in (0, 2))
