"""What it costs to make an optimizer of many small parameters, and to attach it: Python calls
beside AdamW's constructor, and collectives."""

import pytest
import torch
from common.counting import calls
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_nb.backward import module_buffers
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.backward.module_buffers import _in_flats
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

COUNT = 5_000
# times the calls of AdamW's constructor, which are 16 for a parameter. Making the optimizer walks
# over the module and takes the group as AdamW does; a view, a form and a stride of each parameter
# are its own. Without DDP, attaching walks over the module twice more, and hangs a hook of torch's
# to each parameter.
CEILINGS = {"making": 2.0, "overlap": 0.8, "data_parallel": 4.0}


def many(count=COUNT, dtype=torch.float32):
    return nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(count)])


class Chain(nn.Module):
    """Two layers that lie in one bucket, one that has a bucket of its own, and a half."""

    def __init__(self, small=20):
        super().__init__()
        self.rest = many(small)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.low = many(3, torch.bfloat16)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        halves = sum(p.sum() for p in self.low)
        return self.last(self.first(x)).sum() + halves + sum(p.sum() for p in self.rest)


def make(model, group=None):
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=0.1)


def count_calls():
    """Count Python calls; a first model has made what lasts as long as the process."""
    for attach in (lambda m, z: overlap(DDP(m), z), data_parallel):
        warm = nn.Linear(2, 2)
        attach(warm, make(warm))
    found = {}
    models = [many(), many(), many()]
    found["AdamW"] = calls(lambda: AdamW(models[0].parameters(), lr=0.1))
    found["making"] = calls(lambda: make(models[0]))
    ddp, zeros = DDP(models[1]), [make(model) for model in models[1:]]
    found["overlap"] = calls(lambda: overlap(ddp, zeros[0]))
    found["data_parallel"] = calls(lambda: data_parallel(models[2], zeros[1]))
    return found


@pytest.mark.xdist_group("counts")
def test_attaching_takes_few_calls_for_each_parameter():
    for found in run(2, count_calls):
        base = found.pop("AdamW")
        ratios = {what: round(count / base, 2) for what, count in found.items()}
        assert all(ratios[what] <= most for what, most in CEILINGS.items()), ratios


def attached(kind, steps=0):
    """Attach after some steps; give how many collectives of each kind that takes."""
    torch.manual_seed(torch.distributed.get_rank())
    model, group = Chain(), record()
    zero = make(model, group)
    net = DDP(model, process_group=group) if kind == "overlap" else model
    torch.manual_seed(0)
    for _ in range(steps):
        model(torch.randn(2, 8)).backward()
        zero.step()
        zero.zero_grad()
    with group.recording() as log:
        overlap(net, zero) if kind == "overlap" else data_parallel(net, zero)
    alike = sum(p.double().sum() for p in model.parameters())
    sent = [torch.zeros_like(alike) for _ in range(2)]
    torch.distributed.all_gather(sent, alike.detach())
    assert sent[0] == sent[1]
    return log.collectives().count()


# the counts of elements with state; parameters of two dtypes, and buffers
FRESH = {"all_reduce": 1, "broadcast": 3}


@pytest.mark.parametrize(("kind", "expected"), [("overlap", {}), ("data_parallel", FRESH)])
def test_attaching_without_state_moves_none(kind, expected):
    for found in run(2, attached, kind):
        assert found == expected


def test_attaching_with_state_moves_it():
    for found in run(2, attached, "data_parallel", 1):
        moved = {kind: n for kind, n in found.items() if kind not in FRESH}
        assert moved and {kind: found[kind] for kind in FRESH} == FRESH, found


def state_of_no_elements():
    """Step a parameter without elements alone, and attach; give whose state there is, and its steps."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(7))])
    zero = make(model)
    for _ in range(2):
        model[0].sum().backward()
        zero.step()
    with data_parallel(model, zero):
        pass
    zero.state_dict_type = "full"
    return {i: int(state["step"]) for i, state in zero.state_dict()["state"].items()}


def test_state_of_a_parameter_without_elements_stays_where_it_is():
    assert run(2, state_of_no_elements) == [{0: 2}] * 2


def thawed(steps=3):
    """Attach with a frozen parameter, which no step has seen; thaw it; give all parameters."""
    models = [Chain(3), Chain(3)]
    models[1].load_state_dict(models[0].state_dict())
    zero, plain = make(models[0]), AdamW(models[1].parameters(), lr=0.1)
    for model in models:
        model.first.weight.requires_grad_(False)
    data_parallel(models[0], zero)
    for step in range(steps):
        for model, optimizer in zip(models, (zero, plain), strict=True):
            model.first.weight.requires_grad_(step > 0)
            model(torch.full((2, 8), step + 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(*(list(model.parameters()) for model in models))


def test_a_parameter_that_was_frozen_when_nothing_had_state_thaws():
    run(2, lambda: (torch.manual_seed(0), thawed()))


def test_copies_are_sent_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(module_buffers, "_COPIED", 40)  # bytes
    monkeypatch.setattr(module_buffers, "_UNCOPIED", 44)
    small = [torch.zeros(n) for n in (4, 4, 2, 5)]
    wide, large = torch.zeros(1, dtype=torch.float64), torch.zeros(11)
    blocks = [*_in_flats([*small[:2], large, wide, *small[2:]])]
    sizes = [[torch.cat(alike).nbytes for alike in block] for block in blocks]
    assert sizes == [[32, 44, 8], [28]]
