"""Full state dicts that do not fit, or change while they are read: an error on every rank, and what it says."""

import re

import pytest
import torch
from common import caught
from torch import nn
from torch.optim import AdamW

from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.full import (
    load_full_state_dict,
    shard_full_optim_state_dict,
)
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

RANKS = 2


class Grown(nn.Module):
    """Two layers of one shape, of which the first is given up."""

    def __init__(self):
        super().__init__()
        self.old = nn.Linear(3, 3)
        self.new = nn.Linear(3, 3)

    def of(self, layer):
        return [(name, p) for name, p in self.named_parameters() if name.startswith(layer)]


def one_group_less(names):
    """Give a state dict of both layers without the group of the first, whose state is left."""
    model = Grown()
    groups = [{"params": model.of("old")}, {"params": model.of("new")}]
    optimizer = AdamW(groups)
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, 9.0 if name.startswith("old") else 1.0)
    optimizer.step()
    full = optimizer.state_dict()
    left = full["param_groups"][1]
    if not names:
        left = {key: value for key, value in left.items() if key != "param_names"}
    return {**full, "param_groups": [left]}


def load_what_is_left(path):
    zero = ZeroRedundancyOptimizer([{"params": Grown().of("new")}], AdamW)
    full = torch.load(path)
    return [
        caught(lambda: load_full_state_dict(zero, path)),
        caught(lambda: load_full_state_dict(zero, full)),
        caught(lambda: zero.load_state_dict(full)),
    ]


@pytest.mark.parametrize("names", [True, False])
def test_state_that_a_dropped_group_left_is_an_error_with_and_without_names(folder, names):
    full = one_group_less(names)
    torch.save(full, folder / "left.pt")
    for said in run(RANKS, load_what_is_left, folder / "left.pt"):
        for words in said:
            assert re.search("ValueError.*has state of 0, which is in none of its groups", words)
    with pytest.raises(ValueError, match="in none of its param groups"):
        verify_checkpoint(folder / "left.pt")
    model = Grown()
    group = {"params": [p for _, p in model.of("new")]}
    if names:
        with pytest.raises(ValueError, match="state of 0, which is in none of its groups"):
            shard_full_optim_state_dict(full, model, [group])


def named(layers, **changes):
    optimizer = AdamW(layers.named_parameters())
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    full = optimizer.state_dict()
    return {**full, "param_groups": [{**full["param_groups"][0], **changes}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"params": [0]}, "'param_names' of param group 0 must be a list of 1 texts"),
        ({"params": [0, 1, 2]}, "'param_names' of param group 0 must be a list of 3 texts"),
        (
            {"param_names": ["weight", 1]},
            "'param_names' of param group 0 must be a list of 2 texts",
        ),
        ({"param_names": ["weight", "weight"]}, "has name 'weight' 2 times in its param groups"),
        ({"params": [0, 0]}, "has parameter 0 2 times in its param groups"),
    ],
)
def test_names_that_are_not_those_of_the_parameters_are_told_as_verify_does(folder, changes, words):
    path = folder / "names.pt"
    torch.save(named(nn.Linear(3, 3), **changes), path)

    def load():
        zero = ZeroRedundancyOptimizer(nn.Linear(3, 3).named_parameters(), AdamW)
        return caught(lambda: load_full_state_dict(zero, path))

    for said in run(RANKS, load):
        assert said.startswith("ValueError") and words in said and str(path) in said
    for read in (verify_checkpoint, lambda path: convert_checkpoint(path, folder / "other.pt")):
        with pytest.raises(ValueError, match=re.escape(words)):
            read(path)
