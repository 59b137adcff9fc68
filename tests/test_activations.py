"""`activation_memory`: what it counts without memory is what autograd keeps of a real forward."""

import copy

import pytest
import torch
from common import caught
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from zero_nb import ZeroRedundancyOptimizer, activation_memory, data_parallel, run


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(lambda y, f=layer: f(y).tanh(), x, use_reentrant=self.reentrant)
        return x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, batch, *, shift):
        places = torch.arange(batch["tokens"].shape[1]).float()
        x = self.embed(batch["tokens"]) * self.scale + places.sin()[None, :, None]
        return {"logits": self.head(x + shift[0])}


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(
            False
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.MaxPool2d(2)
    )


TOKENS = torch.arange(12).reshape(2, 6)
CASES = {
    "convolutional": (convolutional, (torch.randn(2, 3, 12, 12),), {}),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        (torch.randn(2, 10, 32),),
        {},
    ),
    "tied": (Tied, ({"tokens": TOKENS},), {"shift": [torch.ones(16)]}),
    "frozen": (Frozen, (torch.randn(5, 8),), {}),
    "recomputed": (lambda: Recomputed(False), (torch.randn(4, 24),), {}),
    "recomputed, reentrant": (lambda: Recomputed(True), (torch.randn(4, 24),), {}),
    "normalized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        (torch.randn(3, 8),),
        {},
    ),
    "bfloat16": (lambda: nn.Linear(8, 8).bfloat16(), (torch.randn(3, 8).bfloat16(),), {}),
    "evaluated": (lambda: convolutional().eval(), (torch.randn(2, 3, 12, 12),), {}),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_without_memory_keeps_what_a_real_one_keeps_and_changes_nothing(case, autocast):
    make, args, kwargs = CASES[case]
    model = make()
    before = copy.deepcopy(model.state_dict())
    versions = [p._version for p in model.parameters()]
    random = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = activation_memory(model, args, kwargs)
    assert torch.equal(random, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert versions == [p._version for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        real = activation_memory(model, args, kwargs, fake=False)
    # with batches of bfloat16, a kernel of the CPU keeps the means of 8 channels in float32
    means = 2 * 8 * 2 if autocast and case == "convolutional" else 0
    assert real.nbytes - found.nbytes == means and found.nbytes > 0
    assert set(found.by_module) <= {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_a_device_counts_as_on_the_cpu(case):
    make, args, kwargs = CASES[case]
    found = activation_memory(make(), args, kwargs)
    on_meta = {name: make().to("meta") for name in ("parameters", "and inputs")}
    assert activation_memory(on_meta["parameters"], args, kwargs) == found
    given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    assert activation_memory(on_meta["and inputs"], *given) == found


def attached():
    model = nn.Linear(3, 3)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    x = (torch.ones(2, 3),)
    said = [caught(lambda: activation_memory(DDP(model), x))]
    with data_parallel(model, zero):
        said.append(caught(lambda: activation_memory(nn.Sequential(model), x)))
        of_copy = activation_memory(copy.deepcopy(model), x).nbytes
    return [*said, {of_copy, activation_memory(model, x).nbytes}]


def test_models_that_talk_to_other_ranks_are_refused_until_they_do_not():
    for wrapped, driven, nbytes in run(2, attached):
        assert "pass its .module" in wrapped and "detach that first" in driven
        assert nbytes == {24}


class Reads(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x[x > 0]


class Raises(nn.Module):
    def forward(self, x):
        raise ArithmeticError("in forward")


def test_what_cannot_be_counted_is_refused_and_nothing_is_left_behind():
    x = torch.ones(2, 3)
    before = dict(global_hooks._global_forward_hooks), dict(global_hooks._global_forward_pre_hooks)
    assert "must be a torch.nn.Module, got function" in caught(lambda: activation_memory(caught))
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        model = nn.ModuleDict({"inner": kind(3, 3)})
        said = caught(lambda model=model: activation_memory(model, (x,)))
        assert f"inner is a {kind.__name__}" in said and "fake=False" in said
    assert "fake tensors have none" in caught(lambda: activation_memory(Reads(), (x,)))
    assert "ArithmeticError: in forward" in caught(lambda: activation_memory(Raises(), (x,)))
    with torch.inference_mode():
        assert "inference mode" in caught(lambda: activation_memory(nn.Linear(3, 3), (x,)))
    after = dict(global_hooks._global_forward_hooks), dict(global_hooks._global_forward_pre_hooks)
    assert after == before
    assert activation_memory(nn.Linear(3, 3), (x,)).nbytes == x.nbytes


def test_what_is_printed_are_the_largest_and_the_sum_of_the_others():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    text = str(activation_memory(model, (torch.ones(64, 4),)))
    assert text.startswith("forward keeps 12 KiB\n") and len(text.splitlines()) == 10
    assert text.splitlines()[-1].split() == ["others", "4", "KiB"]
    assert str(activation_memory(nn.Identity(), (torch.ones(2),))) == "forward keeps 0 B"
