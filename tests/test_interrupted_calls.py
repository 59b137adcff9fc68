"""Public calls that are several agreements and collectives: Ctrl-C at any line on one rank frees the others at once."""

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import Interrupts
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb import (
    Join,
    full_state_dict,
    load_full_state_dict,
    load_sharded,
    reshard,
    save_sharded,
)
from zero_nb.checkpoint import full
from zero_nb.comm.ending import fail
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.join import session
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.verify.memory import memory_report
from zero_nb.verify.same import assert_same

ROOM = os.sep + "zero_nb" + os.sep


def add_group(model, zero, folder):
    zero.add_param_group({"params": [nn.Parameter(torch.ones(5))]})


def relaid(model, zero, folder):
    """Change the memory format of a parameter that both ranks have a part of."""
    weight = model[0].weight
    weight.data = weight.data.t().contiguous().t()
    zero.load_state_dict(full_state_dict(zero, None))


def thaw(model, zero, folder):
    model[0].weight.requires_grad_(False)
    model(torch.ones(1, 8)).sum().backward()
    zero.step()


def state_dict_of(kind):
    def call(model, zero, folder):
        with zero.giving_state_dicts(kind):
            zero.state_dict()

    return call


CALLS = {
    "consolidate": lambda model, zero, folder: zero.consolidate_state_dict(),
    "state_dict full": state_dict_of("full"),
    "state_dict sharded": state_dict_of("sharded"),
    "load_sharded": lambda model, zero, folder: load_sharded(
        folder / "saved", model, zero, zero.process_group
    ),
    "full": lambda model, zero, folder: full_state_dict(zero, None),
    "load_full": lambda model, zero, folder: load_full_state_dict(zero, folder / "full.pt"),
    "add_param_group": add_group,
    "relaid": relaid,
    "thaw": thaw,
    "reshard": lambda model, zero, folder: reshard(zero, shard="whole"),
    "assert_same": lambda model, zero, folder: assert_same(
        zero.process_group, {"rank": dist.get_rank()}, "the rank"
    ),
    "memory_report": lambda model, zero, folder: memory_report(model, zero),
}


def trained(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, group)
    model(torch.ones(1, 8)).sum().backward()
    zero.step()
    return model, zero


LIMIT = 15.0  # seconds, of the groups


def interrupt(folder, name, trace, key):
    """Interrupt a call of rank 0 where a trace does, in a group of its own. Rank 0 then waits until rank 1 has
    heard. Give whether rank 1 waited for the time limit, and whether the call came to its end."""
    store = dist.distributed_c10d._get_default_store()
    pair = dist.new_group(timeout=timedelta(seconds=LIMIT))
    model, zero = trained(pair)
    rank = dist.get_rank()
    turn = zero.group._agreements.turn
    ended = "returned"
    begin = time.monotonic()
    try:
        sys.settrace(trace if rank == 0 else None)
        CALLS[name](model, zero, folder)
    except (KeyboardInterrupt, Exception) as error:
        ended = type(error).__name__
    finally:
        sys.settrace(None)
    if ended == "KeyboardInterrupt" and zero.group._agreements.turn == turn:
        fail(zero.groups, KeyboardInterrupt())  # the call did not begin for rank 1
    waited = time.monotonic() - begin > 0.8 * LIMIT
    store.set(f"{key} of {rank}", f"{ended} {waited}")
    found = [store.get(f"{key} of {r}").decode().split() for r in range(2)]
    with suppress(RuntimeError):
        dist.destroy_process_group(pair)
    return found[1][1] == "True", found[0][0] != "KeyboardInterrupt"


def save(folder):
    model, zero = trained(None)
    save_sharded(folder / "saved", model, zero)
    full_state_dict(zero, folder / "full.pt")


def lines_that_leave_others(folder, name, stride):
    """Interrupt a call of rank 0 at many of its lines; give those after which rank 1 had to wait, and how many
    lines the call has."""
    save(folder)
    found = []
    for at in range(1, 100_000, stride):
        # twice, as gloo may lose a message that meets a closed connection
        for attempt in range(2):
            waited, is_over = interrupt(folder, name, Interrupts(at, ROOM), f"{at} {attempt}")
            if not waited:
                break
        else:
            found.append(at)
        if is_over:
            return found, at
    return found, None


@pytest.mark.parametrize("name", CALLS)
def test_no_line_at_which_a_call_is_interrupted_leaves_another_rank_waiting(name, tmp_path):
    found = run(2, lines_that_leave_others, tmp_path, name, 397, timeout=280)
    for waited, lines in found:
        assert waited == [] and lines > 300, found


class OwnLines:
    """A trace that raises `KeyboardInterrupt` at one of the lines of the functions of zero_nb that this file calls."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, arg):
        if ROOM not in frame.f_code.co_filename or frame.f_back.f_code.co_filename != __file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def own_lines_that_leave_others(folder, name):
    """As above, for each line of the called function itself."""
    save(folder)
    found = []
    for at in range(1, 1000):
        for attempt in range(2):
            waited, is_over = interrupt(folder, name, OwnLines(at), f"{at} {attempt}")
            if not waited:
                break
        else:
            found.append(at)
        if is_over:
            return found, at
    return found, None


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "name", ["full", "load_full", "load_sharded", "memory_report", "reshard", "state_dict full"]
)
def test_no_line_between_two_blocks_of_a_call_leaves_another_rank_waiting(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 5.0)
    for waited, lines in run(2, own_lines_that_leave_others, tmp_path, name, timeout=280):
        assert waited == [] and lines > 9, (waited, lines)


def saves_after_an_interrupt(nodes):
    """Interrupt rank 0 while it checks arguments; what each rank raised, and whether the next call gives the state."""
    _, zero = trained(two_level(2) if nodes else None)
    check = full._check_arguments

    def interrupted(*args):
        raise KeyboardInterrupt

    full._check_arguments = check if dist.get_rank() else interrupted
    try:
        full_state_dict(zero, None)
    except (KeyboardInterrupt, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    full._check_arguments = check
    return said, sorted(full_state_dict(zero, None)["state"])


@pytest.mark.parametrize(("size", "nodes"), [(2, False), (4, True)])
def test_an_interrupt_before_anything_is_sent_leaves_the_groups_usable(size, nodes):
    (said, state), *others = run(size, saves_after_an_interrupt, nodes, timeout=60)
    assert said == "KeyboardInterrupt: " and state == [0, 1, 2, 3]
    for words, found in others:
        assert words.startswith("RuntimeError") and "rank 0 failed with KeyboardInterrupt" in words
        assert found == state


def leave_join(place):
    """Interrupt rank 0, which has less data, where it waits for the other; give what each raised."""
    model = DDP(nn.Linear(8, 8))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()

    def leave(*args, **options):
        raise KeyboardInterrupt

    if rank == 0:
        setattr(*place, leave)
    try:
        with Join([model, zero]):
            for _ in range(2 + 2 * rank):
                zero.zero_grad()
                model(torch.ones(1, 8)).sum().backward()
                zero.step()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 0:
        store.wait(["heard"])
    else:
        store.set("heard", "")
    return said


@pytest.mark.parametrize(
    "place",
    [(session.ShadowLoop, "run"), (session.JoinSession, "gather")],
    ids=("waits", "ends"),
)
def test_ranks_hear_of_one_without_data_that_is_interrupted_in_join(place):
    ours, theirs = run(2, leave_join, place, timeout=60)
    assert ours == "KeyboardInterrupt: "
    assert "rank 0 left the Join block after" in theirs and "KeyboardInterrupt" in theirs, theirs
