"""What parameters and gradients can be: odd shapes, none, low precision, on other devices."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from common import largest_gap, run_each
from common.devices import GPU, cuda
from common.dropin import agree, batches, flat, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import AdamW

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.rules import ELEMENTWISE
from zero_nb.optim.state_dict_check import COUNTS, ELEMENTS, OPTIONAL


class Odd(nn.Module):
    """Tied, complex, channels-last, transposed, scalar, empty, double and unused parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wave = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.cube = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
        self.fine, self.unused = (
            nn.Parameter(torch.randn(9, dtype=torch.float64)),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x):
        x = (
            self.head(self.embed(x)).square().mean()
            + self.conv(torch.ones(1, 2, 5, 5)).square().mean()
            + (self.wave * self.wave.conj()).real.sum()
        )
        return (
            x + self.turned.cos().sum() + self.cube.sin().sum() + self.empty.sum()
        ) * self.scale + self.fine.square().sum().float()


def odd(kind, options, how):
    """Train odd parameters both ways; how far they are apart, whether they and their state keep
    what is odd about them, and our parameters."""
    plain, sharded = (
        DDP(Odd(), find_unused_parameters=True),
        DDP(Odd(), find_unused_parameters=True),
    )
    rows = []
    zero = ZeroRedundancyOptimizer(sharded.parameters(), kind, **options, **how)
    for model, optimizer in ((plain, kind(plain.parameters(), **options)), (sharded, zero)):
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(torch.tensor([dist.get_rank(), 3, step])).backward()
            optimizer.step()
        rows.append([p.detach().clone() for p in model.parameters()])
    tied = sharded.module.head.weight is sharded.module.embed.weight
    strides = all(
        p.stride() == q.stride()
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True)
    )
    zero.consolidate_state_dict(None)
    shapes = all(
        v.shape == rows[0][i].shape
        for i, s in zero.state_dict()["state"].items()
        for v in s.values()
        if torch.is_tensor(v) and v.dim()
    )
    off = max((a - b).abs().max().item() for a, b in zip(*rows, strict=True) if a.numel())
    return off, tied, strides, shapes, rows[1]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "how", [{}, {"shard": "whole"}, {"parameters_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}]
)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_odd_parameters(how, name):
    options = {
        "AdamW": {"lr": 1e-2, "foreach": False, "fused": False},
        "SGD": {"lr": 1e-2, "momentum": 0.9},
    }[name]
    ranks = run(3, odd, getattr(torch.optim, name), options, how)
    assert all(
        off < 1e-5 and tied and strides and shapes for off, tied, strides, shapes, _ in ranks
    )
    assert all(a.equal(b) for rank in ranks for a, b in zip(rank[4], ranks[0][4], strict=True))


@pytest.mark.parametrize("how", [{}, {"shard": "whole"}, {"parameters_as_bucket_view": True}])
def test_gradients_that_are_none(how):
    def sparing():
        a, b, c = (nn.Parameter(torch.ones(64)) for _ in range(3))
        zero = ZeroRedundancyOptimizer([a, b, c], AdamW, lr=0.5, weight_decay=0.0, **how)
        zero.step()  # none on all ranks
        first = [p.tolist() for p in (a, b, c)]
        a.grad, b.grad = torch.ones(64), torch.ones(64) if dist.get_rank() == 0 else None
        zero.step()
        try:
            zero.consolidate_state_dict(None)
        except RuntimeError as error:
            assert how.get("shard") != "whole" and "parameter 1: there is state" in str(error)
        else:
            assert how.get("shard") == "whole"  # its owner had a gradient
        return first, [p.tolist() for p in (a, b, c)]

    ranks = run(2, sparing)
    assert ranks[0] == ranks[1]  # whatever is missing on one rank, replicas agree
    first, (a, b, c) = ranks[0]
    assert first == [[1.0] * 64] * 3 and a == pytest.approx([0.5] * 64) and c == [1.0] * 64
    assert all(
        value == 1.0 or value == pytest.approx(0.5) for value in b
    )  # stepped by those who had a gradient


def low(device, mixed):
    """Train beside a float32 copy that sees the same gradients: DDP computes in bfloat16, or the
    model itself is bfloat16."""
    model = network().to(device) if mixed else network().bfloat16().to(device)
    reference = copy.deepcopy(model).float()
    ddp = (
        DDP(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        if mixed
        else DDP(model)
    )
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), AdamW, lr=1e-2, foreach=False, fused=False, master_dtype=torch.float32
    )
    plain = AdamW(reference.parameters(), lr=1e-2, foreach=False)
    for batch in batches(5):
        zero.zero_grad()
        batch = batch.to(device, torch.float32 if mixed else torch.bfloat16)
        with torch.autocast(device, torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        loss.backward()
        for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.float()
        zero.step()
        plain.step()
    pairs = list(zip(ddp.parameters(), reference.parameters(), strict=True))
    return (
        pairs[0][0].dtype,
        all(p.equal(q.to(p.dtype)) for p, q in pairs),
        flat(ddp.parameters()).cpu(),
    )


def test_low_precision_with_float32_copies_under_autocast():
    ranks = run(2, low, "cpu", False)
    assert all(dtype == torch.bfloat16 and same for dtype, same, _ in ranks) and agree(
        *(params for *_, params in ranks)
    )


@cuda
@pytest.mark.parametrize("mixed", [False, True])
def test_low_precision_on_the_gpu(mixed):
    ((dtype, same, _),) = run(1, low, "cuda", mixed, backend=GPU)
    assert dtype == (torch.float32 if mixed else torch.bfloat16) and same


def gpu_steps(make, steps=4, device="cuda", **options):
    """Train on one GPU, with gradients that do not depend on the parameters."""
    model = network().to(device)
    optimizer = make(model.parameters(), **options)
    for step in range(steps):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step)
        optimizer.step()
    return model, optimizer


def sharded(params, **options):
    return ZeroRedundancyOptimizer(params, AdamW, **options)


@cuda
@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"fused": True}, {"capturable": True, "fused": True}, {}]
)
def test_state_stays_on_the_gpu_through_saving_and_loading(options):
    def there_and_back():
        model, zero = gpu_steps(sharded, lr=1e-2, **options)
        zero.consolidate_state_dict()
        saved = zero.state_dict()
        devices = lambda state: sorted(
            {(k, v.device.type) for s in state.values() for k, v in s.items()}
        )
        other = sharded(model.parameters(), lr=1e-2, **options)
        other.load_state_dict(saved)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        other.step()
        return (
            devices(zero.optim.state),
            devices(other.optim.state),
            {d for _, d in devices(saved["state"])},
        )

    ((before, after, saved),) = run(1, there_and_back, backend=GPU)
    assert before == after and ("exp_avg", "cuda") in after and saved == {"cpu"}
    if options:
        assert ("step", "cuda") in after


@cuda
@pytest.mark.parametrize("views", [False, True])
def test_a_step_can_be_captured_in_a_graph(views):
    def captured():
        finals = []
        for make in (AdamW, functools.partial(sharded, parameters_as_bucket_view=views)):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                model, optimizer = gpu_steps(
                    make, lr=torch.tensor(1e-2, device="cuda"), capturable=True
                )
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            for i in range(3):
                for p in model.parameters():
                    p.grad.fill_(0.5 * i)
                graph.replay()
            finals.append(flat(model.parameters()))
        return largest_gap(*finals)

    assert run(1, captured, backend=GPU)[0] < 1e-6


@cuda
@pytest.mark.parametrize("how", [{}, {"parameters_as_bucket_view": True}, {"shard": "whole"}])
def test_a_step_does_not_wait_for_the_gpu(how):
    def watched():
        _, zero = gpu_steps(sharded, lr=1e-2, fused=True, **how)
        torch.cuda.set_sync_debug_mode("error")
        try:
            zero.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    assert run(1, watched, backend=GPU) == [True]


@cuda
def test_several_devices_in_one_process():
    def spread():
        devices = ["cpu", *(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))]
        rows = []
        for make in (AdamW, sharded):
            params = [
                nn.Parameter(torch.ones(n, device=device)) for n in (300, 7) for device in devices
            ]
            optimizer = make(params, lr=1e-2, foreach=False, fused=False)
            for step in range(3):
                for p in params:
                    p.grad = torch.full_like(p, 1.0 + step)
                optimizer.step()
            rows.append(flat([p.cpu() for p in params]))
        optimizer.consolidate_state_dict()
        return largest_gap(*rows), len(optimizer.state_dict()["state"]) == len(params)

    ((off, whole),) = run(1, spread, backend=GPU)
    assert off < 1e-6 and whole


@cuda
def test_a_gradient_scaler_on_the_gpu():
    def scaled():
        model = network().cuda()
        zero, scaler = (
            sharded(model.parameters(), lr=1e-2, fused=True),
            torch.amp.GradScaler("cuda", init_scale=8.0),
        )
        moved = []
        for poison in (1.0, 3e38, 1.0):
            zero.zero_grad()
            before = flat(model.parameters())
            scaler.scale(model(torch.ones(4, 6, device="cuda")).square().sum() * poison).backward()
            scaler.step(zero)
            scaler.update()
            moved.append(not before.equal(flat(model.parameters())))
        return moved, scaler.get_scale()

    assert run(1, scaled, backend=GPU) == [([True, False, True], 4.0)]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_the_keys_that_loading_asks_for_are_those_that_torch_keeps(name):
    kind = getattr(torch.optim, name)
    for option, key in ((None, None), *OPTIONAL.get(name, {}).items()):
        p = nn.Parameter(torch.zeros(2, 3))
        p.grad = torch.ones(2, 3)
        optimizer = kind([p], **({"lr": 0.1} | ({option: True} if option else {})))
        optimizer.step()
        state = {k: v for k, v in optimizer.state[p].items() if torch.is_tensor(v)}
        elements = {k for k, v in state.items() if v.shape == p.shape}
        assert elements == {*ELEMENTS[name], *([key] if key else [])}
        assert state.keys() - elements == {*COUNTS[name]}


def stepped_by(make, turned):
    """Step a matrix and an image's weights on gradients that lie otherwise than they do."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6, 4, 3, 3))]
    optimizer = make(params)
    for _ in range(3):
        for p in params:
            gradient = torch.randn(p.shape[::-1]).permute(*reversed(range(p.dim())))
            p.grad = gradient if turned else gradient.contiguous()
        optimizer.step()
    return flat(params)


def turned_gradients(kind, shard, bucket_cap_mb):
    make = functools.partial(
        ZeroRedundancyOptimizer, optimizer_class=kind, shard=shard, bucket_cap_mb=bucket_cap_mb
    )
    return [float((stepped_by(make, t) - stepped_by(kind, False)).abs().max()) for t in (0, 1)]


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_may_lie_otherwise_than_their_parameters(size):
    kinds = (AdamW, torch.optim.Adagrad, torch.optim.SGD)
    cases = [
        (kind, shard, cap) for kind in kinds for shard in ("auto", "greedy") for cap in (1, 1e-4)
    ]
    found = run_each(size, turned_gradients, {case: case for case in cases})
    for case, ranks in found.items():
        assert all(gap < 1e-6 for rank in ranks for gap in rank), (case, ranks)
