"""DDP fills its buckets anew after the first iteration: which state that moves, and what it costs."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb.apps.workloads import benchmark_models
from zero_nb.backward import ddp_buckets
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

MODELS = ("linear", "gpt", "small")
SENDS = {"reduce_scatter", "all_gather", "all_reduce", "broadcast"}


class Backwards(nn.Module):
    """Layers that are registered in the opposite order of their calls: gradients come in the order
    of registration."""

    def __init__(self, layers=6, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def made(name):
    """Give a model and its loss on a batch."""
    if name == "backwards":
        torch.manual_seed(0)
        x = torch.ones(2, 16).double()
        return Backwards().double(), lambda net, step: net(x * (step + 1)).square().mean()
    model = benchmark_models(quick=True)[name]
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())

    def loss(net, step):
        batch = model.batch(generator)
        x, target = [t.double() if t.is_floating_point() else t for t in batch]
        return model.loss(net(x), target)

    return model.made(torch.device("cpu")).double(), loss


def pointers(zero):
    """Tell where the state of this rank lies."""
    states = next(iter(zero.local.by_class.values())).state.values()
    return {key: [s[key].data_ptr() for s in states] for key in ("exp_avg", "exp_avg_sq")}


def train(name, steps=4, before=0, bucket_cap_mb=0.02, **options):
    """Train through DDP; give the handle, and of each iteration what was sent, and where state lies."""
    model, loss = made(name)
    group = record()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=0.01)
    net = DDP(model, process_group=group, bucket_cap_mb=bucket_cap_mb, **options)
    found = []
    for step in range(before + steps):
        if step == before:
            handle = overlap(net, zero)
        with group.recording() as log:
            loss(net, step).backward()
            zero.step()
            zero.zero_grad()
        moved = sum(e.bytes for e in log.collectives().only("send"))
        found.append((set(log.collectives().count()), moved, pointers(zero)))
    return handle, found


def second_iteration(name, **options):
    _, found = train(name, 2, **options)
    return found[1][:2], found[0][2] == found[1][2]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("name", ["linear", "small"])
def test_state_stays_where_it_lies_if_gradients_come_in_reverse_order(name, options, size):
    for (kinds, moved), stays in run(size, second_iteration, name, **options):
        assert kinds <= SENDS and not moved and stays, (kinds, moved)


def test_little_state_moves_if_gradients_come_in_nearly_reverse_order():
    numel = sum(benchmark_models(quick=True)["gpt"].sizes)
    for (_, moved), _ in run(2, second_iteration, "gpt"):
        assert moved < numel * 16 / 2 / 10, moved  # a tenth of a rank's momenta


def layouts(name, before, bucket_cap_mb=0.02):
    """Tell of the last iteration whether it streamed, and which buckets of the plan are copied."""
    handle, _ = train(name, 4, before, bucket_cap_mb)
    layout = handle.planner.layout
    return handle.planner.fits, [i for i, view in enumerate(layout.views) if view is None]


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("name", [*MODELS, "backwards"])
def test_buckets_are_views_once_ddp_has_filled_them_anew(name, before):
    assert run(2, layouts, name, before) == [(True, [])] * 2


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_bucket_that_ddp_fills_as_before_is_a_view(before):
    assert run(2, layouts, "backwards", before, 25) == [(True, [])] * 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("sizes", [(3, 20, 2), (20, 1, 1), (1, 1, 20), (5, 5, 5)])
def test_runs_are_brought_into_another_order_where_they_lie(sizes, order, monkeypatch):
    monkeypatch.setattr(ddp_buckets, "_MOVED_AT_ONCE", 4)
    flat = torch.arange(float(sum(sizes)))
    runs = [run.clone() for run in flat.split(sizes)]
    offsets = [sum(sizes[:i]) for i in range(3)]
    places = {j: sum(sizes[k] for k in order[:at]) for at, j in enumerate(order)}
    found = ddp_buckets._reorder(flat, [(offsets[j], places[j], sizes[j]) for j in range(3)])
    assert found.data_ptr() == flat.data_ptr()
    assert found.tolist() == torch.cat([runs[j] for j in order]).tolist()


def beside_ddp(name, steps=4):
    """Train through plain DDP, too; give the largest difference of parameters."""
    handle, _ = train(name, steps)
    model, loss = made(name)
    net, plain = DDP(model), AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss(net, step).backward()
        plain.step()
        plain.zero_grad()
    pairs = zip(handle.optimizer.params(), model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", [*MODELS, "backwards"])
def test_training_is_that_of_ddp(name):
    assert max(run(2, beside_ddp, name)) < 1e-9
