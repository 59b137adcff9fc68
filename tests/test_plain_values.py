"""Numbers of NumPy are saved as Python's, and what no reader takes is refused before it is written."""

import enum
import pathlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import caught_error
from common.sharded_saving import make as make_any
from common.sharded_saving import step
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from zero_nb import (
    AsyncCheckpointer,
    ZeroRedundancyOptimizer,
    full_optim_state_dict,
    full_state_dict,
    load_full_state_dict,
    load_sharded,
    reshard,
    run,
    save_sharded,
)
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.full import read_full

make = partial(make_any, named=True)


def cosine(epoch):
    return 0.5 * (1 + np.cos(np.pi * epoch / 10))


def save_by(way, folder, model, optimizer):
    if way == "sharded":
        save_sharded(folder / "s", model, optimizer)
    elif way == "async":
        with AsyncCheckpointer(model, optimizer) as checkpointer:
            checkpointer.save(folder / "s")
    elif way == "dcp":
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.state_dict_type = "sharded"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder / "s")
    else:
        full_state_dict(optimizer, to=folder / "s.pt")


def scheduled(folder, way, sharded):
    model, optimizer = make(lr=np.float64(0.01), sharded=sharded)
    scheduler = LambdaLR(optimizer, cosine)
    step(model, optimizer)
    scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    save_by(way, folder, model, optimizer)
    dist.barrier()
    other, found = make(seed=1, lr=0.3, sharded=sharded)
    if way in ("sharded", "async"):
        load_sharded(folder / "s", other, found)
    elif way == "full":
        load_full_state_dict(found, folder / "s.pt")
    else:
        convert_checkpoint(folder / "s", folder / f"r{dist.get_rank()}.pt")
        found.load_state_dict(torch.load(folder / f"r{dist.get_rank()}.pt"))
    got = found.param_groups[0]["lr"]
    return type(rate), type(got), rate == got


CASES = [("sharded", True), ("sharded", False), ("async", True), ("full", True), ("dcp", True)]


@pytest.mark.parametrize(("way", "sharded"), CASES)
def test_a_learning_rate_of_numpy_is_saved_as_a_number(folder, way, sharded):
    for outcome in run(2, scheduled, folder, way, sharded):
        assert outcome == (np.float64, float, True)


class KeepsNumbers(SGD):
    """Keeps numbers of NumPy, for each parameter and beside them."""

    def step(self, closure=None):
        self.state["calls"] = np.int64(self.state.get("calls", 0) + 1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["scale"] = np.float32(0.1)
                self.state[p]["count"] = np.float64(self.state[p].get("count", 0) + 1)
        return super().step(closure)


def keep_numbers(folder):
    model, zero = make(KeepsNumbers, lr=0.1, momentum=0.9)
    step(model, zero)
    save_sharded(folder / "s", model, zero)
    full_state_dict(zero, to=folder / "s.pt")
    other, found = make(KeepsNumbers, seed=1, lr=0.1, momentum=0.9)
    load_sharded(folder / "s", other, found)
    step(other, found)
    states = [torch.load(folder / "s.pt")["state"], full_state_dict(found, None)["state"]]
    return [[s["calls"], s[0]["scale"], s[3]["count"]] for s in states]


def test_numbers_of_numpy_in_the_state_are_saved_as_numbers(folder):
    scale = float(np.float32(0.1))
    for before, after in run(2, keep_numbers, folder):
        assert before == [1, scale, 1.0] and [*map(type, before)] == [int, float, float]
        assert after == [2, scale, 2.0]


class Kind(enum.IntEnum):
    """Is an int that a file names by its class."""

    ONE = 1


STRANGE = {
    "a path": pathlib.PurePosixPath("/x"),
    "a range": range(3),
    "a frozenset": frozenset({1}),
    "a function": print,
    "an array": np.ones(2),
    "a member": Kind.ONE,
    "a date": np.datetime64("2020-01-01"),
    "in a dict": {"a": [1, (range(2),)]},
}


class KeepsStrange(SGD):
    """Keeps a value of a class that a file would name."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["kind"] = Kind.ONE
        return super().step(closure)


def refuse(folder, ways, name):
    model, zero = make(KeepsStrange if name is None else AdamW, lr=0.1)
    step(model, zero)
    if name is not None:
        zero.param_groups[0]["tag"] = STRANGE[name]
    return [str(caught_error(lambda way=way: save_by(way, folder, model, zero))) for way in ways]


@pytest.mark.parametrize("name", [*STRANGE, None])
def test_what_could_never_be_loaded_is_refused_by_name_before_it_is_written(folder, name):
    what = "option 'tag' of param group 0" if name else "state 'kind' of"
    for said in run(2, refuse, folder, ["sharded", "async", "full"], name):
        for words in said:
            assert what in words and "must be tensors and plain values" in words, words
    assert not [*folder.iterdir()]


class Noting(nn.Linear):
    """Has an extra state."""

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def note(folder, value):
    model = nn.Sequential(Noting(4, 3))
    model[0].note = value
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    if error := caught_error(lambda: save_sharded(folder / "s", model, zero, extra=np.float32(2))):
        return str(error)
    model[0].note = {"amax": 0.0}
    return load_sharded(folder / "s", model, zero), model[0].note


def test_the_extra_state_of_a_module_is_looked_at_as_well(folder):
    for extra, kept in run(2, note, folder, {"amax": np.float32(2)}):
        assert (extra, kept, type(kept["amax"])) == (2.0, {"amax": 2.0}, float)
    (folder / "other").mkdir()
    for said in run(2, note, folder / "other", range(3)):
        assert "0._extra_state of the model must be tensors and plain values" in said
    assert not [*(folder / "other").iterdir()]


def join(value):
    two, one = (dist.new_group(ranks) for ranks in ([0, 1], [2]))
    model, zero = make(lr=0.1, process_group=two if dist.get_rank() < 2 else one)
    if dist.get_rank() < 2:
        zero.param_groups[0]["tag"] = value
        step(model, zero)
    error = caught_error(lambda: reshard(zero, None))
    extra = nn.Parameter(torch.zeros(2))
    if error is None:
        zero.add_param_group({"params": [("more", extra)], "tag": 2})  # compares all options
    return str(error), type(zero.param_groups[0].get("tag"))


def test_a_rank_that_joins_is_told_numbers_of_numpy_as_numbers():
    assert run(3, join, np.float32(0.1)) == [("None", float)] * 3
    for said, _ in run(3, join, range(3)):
        assert "option 'tag' of param group 0 must be tensors and plain values" in said


def written_by_torch(folder):
    model, adamw = make(lr=np.float64(0.1), sharded=False)
    step(model, adamw)
    state = {"model": model.state_dict(), "optimizer": adamw.state_dict()}
    dcp.save(state, checkpoint_id=folder / "s")
    torch.save(adamw.state_dict(), folder / "s.pt")
    full = full_optim_state_dict(model, adamw)
    ways = (
        lambda: verify_checkpoint(folder / "s"),
        lambda: convert_checkpoint(folder / "s", folder / "t.pt"),
        lambda: read_full(folder / "s.pt"),
        lambda: convert_checkpoint(folder / "s.pt", folder / "t"),
    )
    return [str(caught_error(way)) for way in ways], type(full["param_groups"][0]["lr"])


def test_a_file_with_an_object_is_not_called_damaged(folder):
    [(said, kind)] = run(1, written_by_torch, folder)
    assert kind is float
    for words in said:
        assert "cannot be read" in words and "numpy" in words and "add_safe_globals" in words
        assert "damaged" not in words and "\n" not in words and "\x1b" not in words, words


def step_with(value):
    model, zero = make(SGD, lr=0.1)
    zero.param_groups[0]["tag"] = value
    for _ in range(2):
        step(model, zero)
    zero.param_groups[0]["tag"] = np.ones(2)  # another array is no reason to refuse a step either
    step(model, zero)
    zero.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2)))], "tag": np.ones(3)})
    step(model, zero)
    return [group["tag"].tolist() for group in zero.param_groups]


def test_an_array_among_the_options_is_no_obstacle_to_a_step():
    assert run(2, step_with, np.zeros(2)) == [[[1.0, 1.0], [1.0, 1.0, 1.0]]] * 2


@pytest.mark.parametrize("value", [{"a"}, 1j, b"x", torch.device("cpu")])
def test_what_safetensors_cannot_hold_is_refused_in_words(folder, value):
    model, adamw = make(sharded=False, lr=0.1)
    step(model, adamw)
    adamw.param_groups[0]["tag"] = value
    torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, folder / "a.pt")
    words = f"optimizer.param_groups.0.tag is a {type(value).__name__}, and JSON keeps"
    with pytest.raises(ValueError, match=words):
        convert_checkpoint(folder / "a.pt", folder / "a.safetensors")
    assert [path.name for path in folder.iterdir()] == ["a.pt"]
