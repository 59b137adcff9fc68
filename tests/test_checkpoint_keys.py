"""Keys that are equal, or read alike: of parameters, of buffers, and of state of no parameter."""

import pytest
import torch
from common import caught_error
from torch import nn
from torch.optim import SGD

from zero_nb import (
    ZeroRedundancyOptimizer,
    convert_checkpoint,
    full_state_dict,
    load_sharded,
    run,
    save_sharded,
)


class Counted(SGD):
    """Counts its steps in state of no parameter."""

    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


def made(named, sharded):
    """Make a model that has something of the name of the count, and an optimizer that has taken three steps."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    if named == "buffer":
        model.register_buffer("count", torch.zeros(1))
    if named == "parameter":
        model.register_parameter("count", nn.Parameter(torch.zeros(3)))
    options = {"lr": 0.1, "momentum": 0.9}
    if sharded:
        options |= {"optimizer_class": Counted, "trust_optimizer_class": True}
    kind = ZeroRedundancyOptimizer if sharded else Counted
    optimizer = kind(model.named_parameters(), **options)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return model, optimizer


def count_of(optimizer):
    return getattr(optimizer, "optim", optimizer).state["count"]


def loaded_count(folder, sharded):
    model, optimizer = made("buffer", sharded)
    save_sharded(folder, model, optimizer)
    getattr(optimizer, "optim", optimizer).state["count"] = 7
    load_sharded(folder, model, optimizer)
    return count_of(optimizer)


@pytest.mark.parametrize("sharded", [False, True])
def test_state_of_no_parameter_may_have_the_name_of_a_buffer(folder, sharded):
    assert run(2, loaded_count, folder / "c", sharded) == [3, 3]


def errors_of_one_name(folder, sharded):
    model, optimizer = made("parameter", sharded)
    found = [caught_error(lambda: save_sharded(folder, model, optimizer))]
    if sharded:
        found.append(caught_error(lambda: full_state_dict(optimizer, key_by="name")))
    return found, folder.exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_state_of_no_parameter_cannot_have_the_name_of_a_parameter(folder, sharded):
    for errors, exists in run(1, errors_of_one_name, folder / "c", sharded):
        assert not exists
        for kind, words in errors:
            assert kind == "ValueError" and "state of no parameter" in words and "'count'" in words


def test_a_file_of_safetensors_keeps_tensors_apart_whose_keys_read_alike(tmp_path):
    values = {
        "of numbers": {1: torch.ones(2), "1": torch.zeros(2)},
        "x.y": torch.full((2,), 5.0),
        "x": {"y": torch.full((2,), 6.0)},
    }
    full = {"state": {0: values}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(full, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.safetensors")
    convert_checkpoint(tmp_path / "b.safetensors", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt")["state"][0]
    assert str(found) == str(values)
