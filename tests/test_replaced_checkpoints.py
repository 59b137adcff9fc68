"""A checkpoint that another job replaces while ranks load it: all load one of them, or none does."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from common import caught
from common.waiting import wait_for
from torch import nn
from torch.optim import AdamW

from zero_nb.checkpoint import full, sharded
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict, read_full
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

RANKS = 2


def stepped(value):
    """Make a model and an optimizer whose averages are all of one value."""
    model = nn.Linear(6, 4)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    with torch.no_grad():
        for number in (*model.parameters(), *(s["exp_avg"] for s in zero.optim.state.values())):
            number.fill_(value)
    return model, zero


def averages(zero):
    state = full_state_dict(zero, None)["state"]
    return torch.cat([values["exp_avg"].flatten() for values in state.values()]).unique().tolist()


def save_two(folder):
    for number, name in enumerate(("older", "newer")):
        model, zero = stepped(float(number))
        full_state_dict(zero, folder / f"{name}.pt")
        save_sharded(folder / name, model, zero)


def is_open_in(pid, path):
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return str(path) in {os.readlink(link) for link in links if os.path.islink(link)}


def load_while_replaced(folder):
    _, zero = stepped(7.0)
    pids = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    path = folder / "last.pt"
    if dist.get_rank() == 1:
        wait_for(lambda: is_open_in(pids[0], path))
        os.replace(folder / "newer.pt", path)
    return caught(lambda: load_full_state_dict(zero, path)), averages(zero)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks which files are open")
def test_ranks_do_not_load_a_file_and_the_one_that_has_replaced_it(folder):
    run(RANKS, save_two, folder)
    os.replace(folder / "older.pt", folder / "last.pt")
    for said, left in run(RANKS, load_while_replaced, folder):
        assert re.match(
            "ValueError.*disagree on load_full_state_dict.*a file with checksum", said
        ), said
        assert left == [7.0]


def load_two(folder, names):
    _, zero = stepped(7.0)
    source = folder / names[dist.get_rank()]
    if source.suffix != ".pt":
        source = torch.load(source.with_suffix(".pt"))
    return caught(lambda: load_full_state_dict(zero, source)), averages(zero)


@pytest.mark.parametrize("names", [("older.pt", "newer.pt"), ("older.pt", "older")])
def test_two_files_are_not_one_state(folder, names):
    run(RANKS, save_two, folder)
    for said, left in run(RANKS, load_two, folder, names):
        assert said.startswith("ValueError: ranks disagree on load_full_state_dict"), said
        assert left == [7.0]


def test_a_copy_of_a_file_is_the_same_state(folder):
    run(RANKS, save_two, folder)
    (folder / "copy.pt").write_bytes((folder / "newer.pt").read_bytes())
    for said, left in run(RANKS, load_two, folder, ("newer.pt", "copy.pt")):
        assert said is None and left == [1.0]


def turn(link, target):
    """Let a link lead elsewhere, as jobs do that keep `latest`."""
    beside = link.with_name("turned")
    beside.symlink_to(target)
    os.replace(beside, link)


def load_while_turned(folder, late):
    """Load by a link that is turned after the first rank has checked, or after all have."""
    model, zero = stepped(7.0)
    rank = dist.get_rank()
    link = folder / "latest"
    checked = [folder / f"checked{each}" for each in range(RANKS)]
    check = sharded.check_folder

    def check_and_tell(*args):
        found = check(*args)
        checked[rank].touch()
        if late and not rank:
            wait_for(checked[1].exists)
            turn(link, "newer")
        return found

    sharded.check_folder = check_and_tell
    if not late and rank:
        wait_for(checked[0].exists)
        turn(link, "newer")
    try:
        said = caught(lambda: load_sharded(link, model, zero))
    finally:
        sharded.check_folder = check
    return said, averages(zero), model.weight.unique().tolist()


@pytest.mark.parametrize("late", [False, True])
def test_ranks_load_what_a_link_leads_to_once(folder, late):
    run(RANKS, save_two, folder)
    (folder / "latest").symlink_to("older")
    for said, *left in run(RANKS, load_while_turned, folder, late):
        if late:
            assert said is None and left == [[0.0], [0.0]]
        else:
            assert "ValueError: ranks disagree on load_sharded" in said, said
            assert "a manifest with checksum" in said and left == [[7.0], [7.0]]


@pytest.mark.parametrize("use", [torch.clone, lambda t: torch.empty(4, 6).copy_(t)])
def test_a_tensor_of_a_file_that_was_written_to_is_an_error(folder, use):
    run(RANKS, save_two, folder)
    late = read_full(folder / "older.pt")["state"][0]["exp_avg"]
    assert use(late).unique().tolist() == [0.0]
    (folder / "older.pt").write_bytes((folder / "newer.pt").read_bytes())
    with pytest.raises(OSError, match=r"was written to while it was loaded.*older\.pt"):
        use(late)


def load_while_written(folder, hooked):
    """Load a file that another job writes to, under the same name, after all ranks have checked it."""
    _, zero = stepped(7.0)
    if hooked:
        zero.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    rank = dist.get_rank()
    path = folder / "older.pt"
    checked = [folder / f"checked{each}" for each in range(RANKS)]
    check = full.checked_records

    def check_and_write(*args):
        found = check(*args)
        checked[rank].touch()
        wait_for(checked[1 - rank].exists)
        if not rank:
            path.write_bytes((folder / "newer.pt").read_bytes())
            (folder / "written").touch()
        wait_for((folder / "written").exists)
        return found

    full.checked_records = check_and_write
    try:
        said = caught(lambda: load_full_state_dict(zero, path))
    finally:
        full.checked_records = check
    return said, averages(zero)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_file_that_is_written_to_after_it_was_checked_is_not_loaded(folder, hooked):
    run(RANKS, save_two, folder)
    for said, left in run(RANKS, load_while_written, folder, hooked):
        assert re.match("OSError.*was written to while it was loaded", said), said
        assert left == [7.0]
