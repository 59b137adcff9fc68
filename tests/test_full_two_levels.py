"""A full state dict of two levels of ranks: one node writes it, and all of them learn what went wrong."""

from collections import deque

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from torch import nn
from torch.optim import SGD, AdamW

from zero_nb import ZeroRedundancyOptimizer, full_state_dict, run, two_level
from zero_nb.optim import state_runs


class Remembers(SGD):
    """Keeps its last gradients in a deque, on the ranks that it is told."""

    on = (0, 1, 2, 3)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            kept = deque([0.5]) if dist.get_rank() in self.on else 0.5
            self.state[p].setdefault("last", kept)
        return super().step(closure)


def make(optimizer_class=AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2))
    options = {**options, "process_group": two_level(2), "trust_optimizer_class": True}
    return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1, **options)


def step(model, optimizer, missing=False):
    for i, p in enumerate(model.parameters()):
        p.grad = None if missing else torch.full_like(p, i + 1.0)
    optimizer.step()


def uneven():
    model, zero = make()
    step(model, zero)
    step(model, zero, missing=dist.get_rank() % 2 == 1)
    return model, zero


def remembering(*ranks):
    Remembers.on = ranks
    model, zero = make(Remembers, momentum=0.9)
    step(model, zero)
    return model, zero


WRONG = {
    "a part is missing": (uneven, "step count"),
    "a deque": (lambda: remembering(0, 1, 2, 3), "must be tensors and plain values"),
    "a deque on the first node": (lambda: remembering(0), "must be tensors and plain values"),
    "a deque on the second node": (lambda: remembering(3), "must be tensors and plain values"),
}


def wrong(folder, name, to):
    made, _ = WRONG[name]
    _, zero = made()
    return str(
        caught_error(lambda: full_state_dict(zero, folder / "all.pt" if to == "file" else to))
    )


@pytest.mark.parametrize("to", ["file", 0, None])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_one_node_is_an_error_on_all_of_them(folder, name, to):
    for said in run(4, wrong, folder, name, to, timeout=60):
        assert WRONG[name][1] in said, said
    assert not [*folder.iterdir()]


def save_relaid(folder):
    model, zero = make()
    step(model, zero)
    model.to(memory_format=torch.channels_last)
    full_state_dict(zero, folder / "all.pt")
    model.to(memory_format=torch.contiguous_format)
    step(model, zero)
    return full_state_dict(zero, None)["state"]


def test_a_file_is_written_after_the_memory_format_has_changed(folder):
    by_rank = run(4, save_relaid, folder, timeout=60)
    saved = torch.load(folder / "all.pt")["state"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2))
    adamw = AdamW(model.parameters(), lr=0.1)
    for wanted in ([saved], by_rank):
        step(model, adamw)
        for index, values in adamw.state_dict()["state"].items():
            for key, value in values.items():
                for got in wanted:
                    torch.testing.assert_close(got[index][key], value)


def cannot_send(folder):
    model, zero = make()
    step(model, zero)
    real = state_runs.pack_runs

    def fails(*args):
        if dist.get_rank() == 1:
            raise MemoryError("no room for a message")
        return real(*args)

    state_runs.pack_runs = fails
    try:
        return str(caught_error(lambda: full_state_dict(zero, folder / "all.pt")))
    finally:
        state_runs.pack_runs = real


def test_a_rank_that_cannot_send_lets_no_rank_of_another_node_wait(folder):
    for said in run(4, cannot_send, folder, timeout=60):
        assert "no room for a message" in said, said
    assert not [*folder.iterdir()]
