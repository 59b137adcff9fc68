"""Processes that end without a word, and stores that do: what is printed, and what is raised."""

import os
import re
import subprocess
import sys

import pytest
from common import free_port

BEGIN = """
import os, sys
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_nb import Group, ZeroRedundancyOptimizer, agree, data_parallel, overlap
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
def step(net, zero):
    net(torch.ones(2, 4)).sum().backward()
    zero.step()
    zero.zero_grad()
"""

ENDS = {
    "step": (
        """
net = DDP(model)
zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
for _ in range(3): step(net, zero)
"""
    ),
    "overlap": (
        """
net = DDP(model)
zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
handle = overlap(net, zero)
for _ in range(3): step(net, zero)
"""
    ),
    "data_parallel": (
        """
zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
handle = data_parallel(model, zero)
for _ in range(3): step(model, zero)
"""
    ),
    "a work that is dropped": (
        """
x = torch.ones(8)
work = Group().all_gather(x, async_op=True)
"""
    ),
    "a work that is kept": (
        """
import builtins
x = torch.ones(8)
builtins.kept = Group().reduce_scatter(x, async_op=True)
"""
    ),
    "a work that outlives its module": (
        """
import builtins, zero_nb.comm.work
class Last:
    def __init__(self): self.work = Group().reduce_scatter(torch.ones(8), async_op=True)
    def __del__(self, names=vars(zero_nb.comm.work)):
        names.update(dict.fromkeys(names)) # as the interpreter leaves a module that it ends
        del self.work
builtins.last = Last()
"""
    ),
    "in the middle of backward": (
        """
zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
handle = data_parallel(model, zero)
for _ in range(2): step(model, zero)
model[0].weight.register_hook(lambda gradient: sys.exit(0))
step(model, zero)
"""
    ),
    "in the middle of backward, with DDP": (
        """
net = DDP(model)
zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
handle = overlap(net, zero)
for _ in range(2): step(net, zero)
model[0].weight.register_hook(lambda gradient: sys.exit(0))
step(net, zero)
"""
    ),
}
# what torch itself prints
OWN = (
    r"\[rank\d\]:\[W.*(destroy_process_group|ProcessGroup|TCPStore|socket\.cpp).*"
    r"|\[W.*(destroy_process_group|ProcessGroup).*"
)


def end(starter, code, where, folder, **environ):
    """Run code on two ranks; give their exit codes, and what each has printed beside what torch prints."""
    ranks = starter.run(BEGIN + code, folder, arguments=(where,), **environ)
    lines = [rank.stderr.splitlines() for rank in ranks]
    said = [[line for line in own if line and not re.match(OWN, line)] for own in lines]
    return [rank.code for rank in ranks], said


@pytest.mark.turns(4)
@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_without_destroying_its_group_prints_nothing(
    starter, how, memory, tmp_path
):
    codes, said = end(
        starter, ENDS[how], f"file://{tmp_path}/store", tmp_path, ZERO_NB_MEMORY=memory
    )
    assert (codes, said) == ([0, 0], [[], []])


def test_the_death_of_the_stores_host_is_named(starter, tmp_path):
    """Rank 0, which hosts the store, ends; rank 1 is told so where it wants to agree on something."""
    port = free_port()
    code = """
agree(Group(), "the first")
store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
if rank == 0:
    store.wait(["rank 1 has agreed"])
    os._exit(0)
store.set("rank 1 has agreed", "")
import time
while True:
    try: store.check(["x"])
    except Exception: break
    time.sleep(0.01)
try: agree(Group(), "the second")
except RuntimeError as error: print("raised:", str(error).replace(chr(10), " "), file=sys.stderr)
os._exit(0)
"""
    codes, said = end(starter, code, f"tcp://127.0.0.1:{port}", tmp_path)
    raised = [line for line in said[1] if line.startswith("raised: ")]
    assert codes == [0, 0] and len(raised) == 1 and len(raised[0]) < 1000
    assert (
        f"rank 1 cannot reach the store of its group at 127.0.0.1:{port}, through which ranks agree"
        in raised[0]
    )
    assert "the process that hosts it has ended, rank 0's or torchrun's agent" in raised[0]


ENDED = """
import gc, os, sys, weakref
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_nb import ZeroRedundancyOptimizer, data_parallel, overlap

def train(way):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    net = model if "zero2" in way else DDP(model)
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    handle = None
    if way == "zero1-overlap": handle = overlap(net, zero)
    if "zero2" in way: handle = data_parallel(net, zero, interleaved="inter" in way)
    for _ in range(3):
        net(torch.ones(2, 4)).sum().backward()
        zero.step()
        zero.zero_grad()
    return {type(kept).__name__: weakref.ref(kept) for kept in (model, zero, handle) if kept}

def of_gloo():
    threads = os.listdir("/proc/self/task")
    return [n for n in (open(f"/proc/self/task/{t}/comm").read() for t in threads) if "gloo" in n]

assert "torch._dynamo" not in sys.modules  # DDP imports it
place = {"rank": int(os.environ["RANK"]), "world_size": 2}
for way in sys.argv[2:]:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{way}", **place)
    kept = train(way)
    assert of_gloo()
    gc.collect()
    held = [name for name, reference in kept.items() if reference() is not None]
    dist.destroy_process_group()
    left = of_gloo()
    # one write: torchrun's ranks are unbuffered, and `print` would write the end of the line apart
    os.write(1, f"{way}: held {held}, threads of gloo {left}\\n".encode())
"""

METHODS = ("zero1", "zero1-overlap", "zero2", "zero2-interleaved")


def test_nothing_outlives_a_training_and_its_group(tmp_path):
    """A thread of gloo that drops the last tensor of a collective while the interpreter ends aborts
    the process; a model that a hook holds is never freed."""
    (tmp_path / "ended.py").write_text(ENDED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "ended.py"), str(tmp_path), *METHODS],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    expected = [f"{way}: held [], threads of gloo []" for way in METHODS for _ in range(2)]
    assert done.stdout.splitlines() == expected, done.stdout
