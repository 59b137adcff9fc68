"""What goes over the link between two machines, counted by the link itself."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from common.modes import MODES
from common.ports import free_port
from common.two_machines import (
    SCRIPT,
    benchmark_on_two_machines,
    missing,
    run_on_two_machines,
    sent_bytes,
    set_link,
    start_agent,
    two_machines,
)
from surviving import TRAINING, flags_of, saved, unbroken
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb.apps.checkpoints import read_checkpoint
from zero_nb.apps.reports import BenchmarkReport
from zero_nb.apps.workloads import benchmark_models
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

WIDTH = 600
NUMEL = 4 * WIDTH * (WIDTH + 1)
# float32; headers, acknowledgements and gloo's own small messages are less than this part of it
PARAMETER_BYTES, OVERHEAD = 4 * NUMEL, 0.02


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def plain():
    ddp = DDP(model())
    return ddp, AdamW(ddp.parameters(), lr=1e-3)


def in_mode(name):
    buckets = {"bucket_cap_mb": 1.0}
    made = MODES[name].attach(
        model(),
        lambda m: ZeroRedundancyOptimizer(m.parameters(), AdamW, lr=1e-3),
        ddp=buckets,
        parallel={**buckets, "cut_mb": 25.0},
    )
    return made.call, made.optimizer


def trained(call, optimizer):
    """Train, and give the bytes that left this side in an iteration, and the sum of the parameters."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    counts = []
    for _ in range(5):
        dist.barrier()
        time.sleep(0.05)  # the last acknowledgements
        before = sent_bytes()
        dist.barrier()
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        time.sleep(0.05)
        counts.append(sent_bytes() - before)
    total = sum(p.detach().double().sum().item() for p in call.parameters())
    return sorted(counts)[2], total


def main():
    """Be a rank: print what each mode sends, in units of the parameters."""
    dist.init_process_group("gloo")
    found = {}
    for name in sys.argv[1:]:
        sent, total = trained(*(plain() if name == "ddp" else in_mode(name)))
        found[name] = sent / PARAMETER_BYTES, total
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


why = missing()
IN_BACKWARD = [name for name, mode in MODES.items() if mode.attaches]


@pytest.mark.turns(2)
@pytest.mark.skipif(bool(why), reason=why)
@pytest.mark.parametrize("per_side", [1, 2])
def test_bytes_between_two_machines(per_side):
    """A ring of DDP's sends 2(N-1)/N times the parameters; relayed, each part crosses once on either way."""
    names = ["ddp", "zero1", *IN_BACKWARD]
    said = run_on_two_machines([__file__, *names], per_side, 120.0, ZERO_NB_MEMORY="0")
    found = [json.loads(line) for line in said]
    wanted = dict.fromkeys(names, 1.0)
    wanted["ddp"] = 2 * (2 * per_side - 1) / (2 * per_side)
    wanted["zero1"] = wanted["ddp"] + 0.5
    for name in names:
        if "hidden" in name:  # parameters go straight to every rank
            wanted[name] = 0.5 + per_side / 2
        for rank in found:
            sent, total = rank[name]
            assert wanted[name] <= sent <= wanted[name] + OVERHEAD, (name, sent)
            assert total == pytest.approx(found[0]["ddp"][1], abs=1e-3)


@pytest.mark.skipif(bool(why), reason=why)
def test_the_benchmark_between_two_machines(tmp_path):
    """As its script runs it: the first machine has the report, with what the link counted."""
    flags = ["--quick", "--model", "linear", "--variants", "zero2", "--rounds", "1", "--network"]
    said = benchmark_on_two_machines(1, [*flags, "a wire", "--out", str(tmp_path)], 120.0)
    assert said.count("the optimizers") == 1
    report = BenchmarkReport.from_json((tmp_path / "report.json").read_text())
    assert (report.machine["machines"], report.machine["network"]) == ("2", "a wire")
    assert report.machine["zero_nb moves tensors by"] == "messages"
    (launch,) = report.launches
    assert launch.world_size == 2
    for name in ("ddp", "zero2"):  # small messages have headers and acknowledgements
        assert 1 <= launch.link[name] / (4 * sum(benchmark_models(True)["linear"].sizes)) <= 1.1


LIMIT = 10.0  # seconds that a rank waits for the other
SMALL = {**TRAINING, "steps": 200, "horizon": 200, "layers": 2, "width": 32, "save_every": 10}


class TwoAgents:
    """An agent of torchrun on each machine, which a scheduler starts again when it ends with an error."""

    def __init__(self, names, folder):
        self.port = free_port()
        self.flags = [*flags_of(SMALL), "--auto-resume", f"--timeout={LIMIT}", "--out=run"]
        self.names = names
        self.folders = [folder / side for side in "ab"]
        self.agents = {}
        self.starts = [0, 0]

    def texts(self):
        return [(folder / "log").read_text() for folder in self.folders]

    def start(self, side):
        self.starts[side] += 1
        self.agents[side] = start_agent(self.names, side, self.port, self.folders[side], self.flags)

    def wait(self, done, seconds=240.0):
        """Wait for something, and start again what ended with an error."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "\n---\n".join(text[-3000:] for text in self.texts())
            for side, agent in self.agents.items():
                if agent.poll():
                    assert self.starts[side] < 5, self.texts()[side][-3000:]
                    self.start(side)
            time.sleep(0.02)

    def stop(self):
        for agent in self.agents.values():
            agent.terminate()  # torchrun ends its rank
            agent.wait()


def errors(text):
    return [line for line in text.splitlines() if " of 2 ends: RuntimeError: " in line]


@pytest.mark.skipif(bool(why), reason=why)
def test_a_link_that_is_cut_and_joined_again(tmp_path):
    """The two machines have only the network in common; the checkpoint is on the first one."""
    with two_machines() as names:
        job = TwoAgents(names, tmp_path)
        try:
            for side in (0, 1):
                job.start(side)
            checkpoint = tmp_path / "a" / "run"
            job.wait(lambda: saved(checkpoint) >= 20)
            before = job.texts()
            set_link(names, "down")
            since = lambda: [t[len(b) :] for t, b in zip(job.texts(), before, strict=True)]
            job.wait(lambda: all(map(errors, since())))
            cut = since()
            newest = saved(checkpoint)
            set_link(names, "up")
            job.wait(lambda: [agent.poll() for agent in job.agents.values()] == [0, 0])
        finally:
            job.stop()
    for rank, text in enumerate(cut):
        (said,) = errors(text)
        assert (
            f"rank {rank} of 2 ends" in said
            and f"of rank {rank}, which it takes with {1 - rank}" in said
        )
        waited = ("gradients are averaged", "all_", "or the network to it is cut")
        assert "step " in said and any(words in said for words in waited), said
    begun = re.findall(r"ranks: 2, steps taken before: (\d+)", job.texts()[0])
    assert int(begun[0]) == 0 and int(begun[-1]) == newest
    assert not (tmp_path / "b" / "run" / "checkpoint.pt").exists()  # it came over the network
    got = read_checkpoint(str(checkpoint))["losses"]["zero_nb"]
    assert got == unbroken(2, SMALL, tmp_path / "unbroken")


def test_the_script_for_two_machines_tells_how_to_use_it():
    done = subprocess.run([str(SCRIPT), "10.0.0.1"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and not done.stdout
    assert "two_machines.sh ADDRESS NODE INTERFACE" in done.stderr


if __name__ == "__main__":
    main()
