"""State in lists and tuples, converted: in bounded memory, and to what it was."""

import pytest
import torch
from common.saving import same
from torch import nn
from torch.optim import SGD

from zero_nb import run
from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.checkpoint.convert import convert_checkpoint

MIB = 2**20


def save_lists(path, count, numel):
    """Save an optimizer's state with a long list of tensors, lists in a list, and numbers beside them."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = SGD(layer.named_parameters(), lr=0.1, momentum=0.9)
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    state = optimizer.state[layer.weight]
    state["history"] = [torch.full((numel,), float(i)) for i in range(count)]
    state["nested"] = [[], [torch.arange(3), 2, True, None], {"a": [torch.ones(2)], "b": []}]
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, path)


def peak_of(*args, **kwargs):
    work = lambda: convert_checkpoint(*args, check=False, **kwargs)
    return peak_bytes(torch.device("cpu"), work)


def state_in(path, folder):
    convert_checkpoint(path, folder / "again.pt")
    return torch.load(folder / "again.pt")["state"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_lists_of_tensors_are_converted_in_the_memory_of_a_few_slabs(folder, ranks):
    save_lists(folder / "source.pt", 20, 3 * MIB)  # 240 MiB
    save_lists(folder / "small.pt", 2, 10)
    run(1, lambda: convert_checkpoint(folder / "small.pt", folder / "first"))  # imports
    [grown] = run(1, peak_of, folder / "source.pt", folder / "target", ranks=ranks)
    assert grown is None or grown < 120 * MIB, f"{grown / MIB:.0f} MiB"
    written = [path.stat().st_size for path in folder.glob("target/*.distcp")]
    assert len(written) == ranks and max(written) < 1.3 * min(written)  # each rank has its share


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("between", ["one.pt", "one.safetensors", "folder"])
def test_lists_are_lists_after_any_conversion(folder, between, ranks):
    save_lists(folder / "source.pt", 3, 10)
    wanted = torch.load(folder / "source.pt")["optimizer"]["state"]
    convert_checkpoint(folder / "source.pt", folder / between)
    model = folder / "source.pt" if between == "one.pt" else None
    convert_checkpoint(folder / between, folder / "target", ranks=ranks, model=model)
    same(state_in(folder / "target", folder), wanted)
