"""A file that the real fairscale wrote: tests/fairscale_oss/train.py trained on two ranks with its OSS."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, load_full_state_dict, load_sharded, run
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint

THEIRS = Path(__file__).parent / "fairscale_oss"
NAMES = ["a.weight", "b.weight", "a.bias"]  # in the order of its param groups


class Net(nn.Module):
    """The model of tests/fairscale_oss/train.py."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def begin(sharded, lr=1.0):
    """Make a model and its optimizer, in groups as there; what is loaded brings the options."""
    torch.manual_seed(0)
    model = Net()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(name, named[name]) for name in NAMES[:2]], "weight_decay": 0.1},
        {"params": [(name, named[name]) for name in NAMES[2:]], "weight_decay": 0.0},
    ]
    if sharded:
        return model, ZeroRedundancyOptimizer(groups, AdamW, lr=lr, amsgrad=True)
    return model, AdamW(groups, lr=lr, amsgrad=True)


def train(model, optimizer, steps, rank=0, ranks=1):
    call = DDP(model) if ranks > 1 else model
    for step in steps:
        batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        call(batch[rank::ranks]).backward()
        optimizer.step()
    return {name: w.detach() for name, w in model.state_dict().items()}


def close(one, other):
    assert one.keys() == other.keys()
    for name in one:  # Adam divides by the root of the square of a mean: few roundings
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


def test_its_state_is_that_of_a_plain_optimizer(folder):
    left_out = convert_checkpoint(THEIRS / "last.pt", folder / "one.pt")
    assert sorted(left_out) == ["epoch"]
    model, plain = begin(sharded=False, lr=1e-2)
    train(model, plain, range(3))
    wanted, found = plain.state_dict(), torch.load(folder / "one.pt")
    assert found["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        close(found["state"][index], values)
    for theirs, ours in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert theirs["params"] == ours["params"]
        assert {key: ours[key] for key in theirs} == theirs
    close(torch.load(THEIRS / "last.pt")["model"], model.state_dict())


def go_on(path, sharded=True):
    model, optimizer = begin(sharded)
    if path.suffix == ".pt":
        model.load_state_dict(torch.load(THEIRS / "last.pt")["model"])
        if sharded:
            load_full_state_dict(optimizer, path)
        else:
            optimizer.load_state_dict(torch.load(path))
    else:
        assert load_sharded(path, model, optimizer) == {"epoch": 3}
    return train(model, optimizer, (3, 4), dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_goes_on_from_it_as_there(folder, ranks):
    wanted = torch.load(THEIRS / "after.pt")
    before = torch.load(THEIRS / "last.pt")["model"]
    assert (before["a.weight"] - wanted["a.weight"]).abs().max() > 1e-3  # it did go on
    convert_checkpoint(THEIRS / "last.pt", folder / "one.pt")
    left_out = convert_checkpoint(THEIRS / "last.pt", folder / "first", names=NAMES, ranks=2)
    convert_checkpoint(folder / "first", folder / "middle.safetensors")
    convert_checkpoint(folder / "middle.safetensors", folder / "last")
    assert left_out == []
    verify_checkpoint(folder / "last")
    for path in (folder / "one.pt", folder / "first", folder / "last"):
        for found in run(ranks, go_on, path):
            close(found, wanted)
    [plain] = run(1, go_on, folder / "one.pt", False)
    close(plain, wanted)
