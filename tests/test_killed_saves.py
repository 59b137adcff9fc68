"""Ranks of a job of two are killed while they save: the last complete checkpoint stays, and the other rank ends."""

import signal
from pathlib import Path
from random import Random

import pytest
import torch
from common import free_port, run_each
from torch import nn
from torch.optim import SGD

from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.files import check_file
from zero_nb.checkpoint.folder import check_folder
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

KILLED = """
import itertools, os, signal, sys, threading
from datetime import timedelta
sys.path.insert(0, sys.argv[1])
import test_killed_saves as t
_, tests, store, form, parent, victims, when = sys.argv
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
made = t.stepped()
save = t.saver(form, t.Path(parent), *made)
t.fill(*made, 0)
found = save(0)
if found is not None: found.wait()
dist.barrier()
if str(rank) in victims:
    threading.Timer(float(when), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
try:
    for version in itertools.count(1):
        t.fill(*made, version)
        save(version)
        print(version - (form == "async"), flush=True) # complete
except (RuntimeError, OSError) as error:
    print("raised", type(error).__name__, error, flush=True)
"""


def stepped():
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    model(torch.ones(2, 40)).sum().backward()
    zero.step()
    return model, zero


def fill(model, zero, version):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(version)
    for state in zero.optim.state.values():
        state["momentum_buffer"].fill_(version)


def saver(form, parent, model, zero):
    if form == "full":
        return lambda version: full_state_dict(zero, parent / "last.pt")
    if form == "sharded":
        return lambda version: save_sharded(parent / str(version), model, zero, version)
    checkpoints = AsyncCheckpointer(model, zero)
    return lambda version: checkpoints.save(parent / str(version), version)


def version_of(form, parent):
    """Load the newest checkpoint as a rank; all of its values are of one version."""
    model, zero = stepped()
    if form == "full":
        load_full_state_dict(zero, parent / "last.pt")
    else:
        load_sharded(newest_checkpoint(parent), model, zero)
    state = full_state_dict(zero, None)["state"]
    [version] = torch.cat([s["momentum_buffer"].flatten() for s in state.values()]).unique()
    return int(version)


def save_again(form, parent, version):
    made = stepped()
    fill(*made, version)
    found = saver(form, parent, *made)(version)
    if found is not None:
        found.wait()


VICTIMS = ((0,), (1,), (0, 1))
TIMES = {"sharded": 5, "full": 5, "async": 34}  # that each of these is killed
KILLS = [
    pytest.param(form, victims, number, id=f"{form}-{victims}-{number}")
    for form, times in TIMES.items()
    for victims in VICTIMS
    for number in range(times)
]


@pytest.mark.turns(15)
@pytest.mark.parametrize(("form", "victims", "number"), KILLS)
def test_a_job_of_two_that_is_killed_while_it_saves(
    form, victims, number, starter, folder, tmp_path
):
    when = Random(f"{form} {victims} {number}").uniform(0.02, 0.3)
    store = f"tcp://127.0.0.1:{free_port()}"
    arguments = (str(Path(__file__).parent), store, form, str(folder), str(victims), str(when))
    ranks = starter.run(KILLED, tmp_path, arguments=arguments)
    done = 0
    for rank, ended in enumerate(ranks):
        if rank in victims:
            assert ended.code in (-signal.SIGKILL, *([0] * (len(victims) == 2))), ended
        else:  # it was told, and its interpreter ended
            assert ended.code == 0 and "\nraised " in f"\n{ended.stdout}", ended
        lines = [line for line in ended.stdout.splitlines() if line.isdigit()]
        done = max(done, *map(int, lines or ["0"]))
    if form == "full":
        check_file(folder / "last.pt")
    else:
        check_folder(newest_checkpoint(folder))
    if victims == (1,):  # the rank that gives names has cleaned up
        assert not [*folder.glob(".*")]
    cases = {form: (form, folder)}
    found = [run_each(size, version_of, cases)[form] for size in (1, 2)]
    [version] = {v for each in found for v in each}
    assert done <= version, (done, version)
    run(2, save_again, form, folder, version + 1)
    assert run(1, version_of, form, folder) == [version + 1]
    assert not [*folder.glob(".*")]
