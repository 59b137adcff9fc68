"""State that is not dense is saved and moved, or refused on every rank at once; an optimizer keeps it on one rank."""

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from torch import nn

from zero_nb import ZeroRedundancyOptimizer, reshard, run
from zero_nb.checkpoint.full import full_state_dict
from zero_nb.checkpoint.sharded import save_sharded

KINDS = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


class Keeps(torch.optim.Optimizer):
    """Keeps a tensor of some kind beside parameters of two rows."""

    def __init__(self, params, lr=0.1, kind="sparse", listed=True):
        super().__init__(params, {"lr": lr, "kind": kind, "listed": listed})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                odd = KINDS[group["kind"]]() if len(p) == 2 else torch.ones(3)
                self.state[p]["odd"] = [odd, 1] if group["listed"] else odd
                p.sub_(p.grad, alpha=group["lr"])


def stepped(kind, listed):
    model = nn.Sequential(
        *[nn.Linear(n, m, bias=False) for n, m in ((4, 8), (8, 6), (6, 4), (4, 2))]
    )
    params = model.named_parameters()
    zero = ZeroRedundancyOptimizer(params, Keeps, kind=kind, listed=listed)
    model(torch.ones(2, 4)).sum().backward()
    zero.step()
    return model, zero


def errors_of(folder, kind, listed):
    """Give what each way to save or move raises, by its name."""
    found = {}
    for name, use in (
        ("memory", lambda model, zero: full_state_dict(zero, to=0)),
        ("file", lambda model, zero: full_state_dict(zero, to=folder / "full.pt")),
        ("folder", lambda model, zero: save_sharded(folder / "sharded", model, zero)),
        ("move", lambda model, zero: reshard(zero, bucket_cap_mb=1e-5)),
    ):
        model, zero = stepped(kind, listed)
        found[name] = caught_error(lambda use=use, model=model, zero=zero: use(model, zero))
        dist.barrier()  # nothing has ended the group
    return found


@pytest.mark.parametrize("listed", [True, False], ids=["list", "alone"])
@pytest.mark.parametrize("kind", ["quantized", "nested", "jagged", "meta"])
def test_what_cannot_be_loaded_again_is_refused_on_every_rank(folder, kind, listed):
    said = {"quantized": "a quantized tensor", "meta": "a tensor on the meta device"}
    words = f"state 'odd' of parameter 3 has {said.get(kind, 'a nested tensor')}"
    for found in run(2, errors_of, folder, kind, listed):
        for name, error in found.items():
            assert error is not None, name
            assert error[0] == "ValueError" and words in error[1], (name, error)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("listed", [True, False], ids=["list", "alone"])
def test_sparse_state_is_kept_where_it_can_be(folder, listed):
    for found in run(2, errors_of, folder, "sparse", listed):
        assert found["memory"] is found["move"] is None
        assert found["file"][0] == "ValueError" and "sparse_coo" in found["file"][1]
        assert "use full_state_dict(to=0) and torch.save" in found["file"][1]
        assert found["folder"][0] == "TypeError"
        assert "state 'odd' of parameter 3 is or has a sparse_coo tensor" in found["folder"][1]
    assert not [*folder.iterdir()]
