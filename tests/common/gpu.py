"""One GPU: a model that writes NaN into memory that was freed, ways to train it beside a plain
optimizer, a side stream that lags, and a count of the times that the host waits for the device."""

import contextlib
import warnings
from functools import partial

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from common.devices import GPU
from common.modes import MODES
from zero_nb.comm.launch import run
from zero_nb.comm.simulation import simulate
from zero_nb.optim.driver import SideStream
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

DEVICE = "cuda"
CAP = 0.05  # MiB: a matrix of the model and its bias travel together, and are laid side by side
WIDTH = 64
CYCLES = 10**7  # 5 ms, in which backward puts all its kernels on its own stream
LR = 1e-2
RECOMPUTES = {"use_reentrant": False, "preserve_rng_state": False}


def on_gpu(f, *args):
    """Call f on one rank that has a GPU, and give what it returns."""
    (returned,) = run(1, f, *args, backend=GPU)
    return returned


def each_on_gpu(f, cases):
    """Call f for each case on one rank; what each returned, or its error in words, so that a case
    that fails hides no other."""

    def one(name):
        try:
            return f(**cases[name])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return on_gpu(lambda: {name: one(name) for name in cases})


class Poison(torch.autograd.Function):
    """Hands its input on; its backward fills blocks that the allocator has to give with NaN, of the
    sizes of parameters, so that a gradient that was freed too early is not what it was."""

    @staticmethod
    def forward(ctx, x, shapes):
        ctx.shapes = shapes
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        held = [gradient.new_full(s, torch.nan) for s in ctx.shapes for _ in range(3)]
        del held
        return gradient, None


class Net(nn.Module):
    """As wide as a batch is long, so that gradients and activations take blocks of one size; some
    layers may be left out."""

    def __init__(self, checkpoints=False, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 3)
        self.checkpoints = checkpoints
        self.shapes = [tuple(p.shape) for p in self.layers[0].parameters()]

    def forward(self, x, skips=()):
        for i, layer in enumerate(self.layers):
            if i in skips:
                continue
            x = Poison.apply(x, self.shapes)
            call = partial(checkpoint, layer, **RECOMPUTES) if self.checkpoints else layer
            x = x + call(x).tanh()
        return self.head(self.norm(x))


def batches(steps, dtype=torch.float64, micro=1):
    """Give the batches of each step, on the device."""
    data = torch.Generator("cpu").manual_seed(1)
    made = torch.randn(steps, micro, WIDTH, WIDTH, generator=data, device="cpu")
    return list(made.to(DEVICE, dtype))


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def gap(one, other):
    """Give the largest difference; NaN where one of them has a NaN."""
    return float((one.cpu().double() - other.cpu().double()).abs().max())


def gap_of_states(one, other):
    """Give the largest difference between two `state` dicts of the same keys."""
    assert one.keys() == other.keys() and one
    gaps = [torch.zeros(())]
    for index, values in one.items():
        assert values.keys() == other[index].keys()
        for key, value in values.items():
            theirs = other[index][key]
            if torch.is_tensor(value):
                gaps.append(torch.tensor(gap(value, theirs)))
            else:
                assert value == theirs
    return float(torch.stack([g.cpu() for g in gaps]).max())


def adamw(net, group=None, masters=False, **options):
    """Shard AdamW with the kernel that the plain one has in `train_plain`."""
    given = {"lr": LR, "fused": True, **options}
    if masters:
        given["master_dtype"] = torch.float32
    return ZeroRedundancyOptimizer(
        net.parameters(), AdamW, None if group is None else group, bucket_cap_mb=CAP, **given
    )


def attach(mode, net, make, group=None, unused=False, **options):
    """Prepare a model for a mode, with buckets of two parameters."""
    given = {"bucket_cap_mb": CAP, "find_unused_parameters": unused}
    if mode.startswith("zero2"):
        given["cut_mb"] = 25.0
        return MODES[mode].attach(net, make, group, parallel=given, **options)
    return MODES[mode].attach(net, make, group, ddp=given, **options)


@contextlib.contextmanager
def group_of(size):
    """Give a group of this many ranks without peers; None for the one rank of the job."""
    if size == 1:
        yield None
        return
    with simulate(size) as group:
        yield group


def skipped(step, unused):
    """Tell which layers a step leaves out."""
    return (step % 4,) if unused else ()


def backward(attached, inputs, skips=(), scaler=None):
    """Run forward and backward of one step, all but the last under `no_sync`."""
    for m, x in enumerate(inputs):
        last = m == len(inputs) - 1
        with contextlib.nullcontext() if last else attached.no_sync():
            loss = attached.call(x, skips).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()


def take_step(attached, scaler=None):
    """Step, and clear gradients."""
    if scaler is None:
        attached.optimizer.step()
    else:
        scaler.step(attached.optimizer)
        scaler.update()
    attached.optimizer.zero_grad()


def train_plain(steps, dtype=torch.float64, micro=1, unused=False, masters=False, **setup):
    """Train with torch alone; the parameters."""
    net = Net(setup.get("checkpoints", False)).to(DEVICE, dtype)
    params = list(net.parameters())
    stepped = [nn.Parameter(p.detach().float()) for p in params] if masters else params
    optimizer = AdamW(stepped, lr=LR, fused=True)
    for step, inputs in enumerate(batches(steps, dtype, micro)):
        for x in inputs:
            net(x, skipped(step, unused)).square().mean().backward()
        if setup.get("max_grad_norm"):
            nn.utils.clip_grad_norm_(params, setup["max_grad_norm"])
        if masters:
            for p, q in zip(params, stepped, strict=True):
                q.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        net.zero_grad()
        if masters:
            with torch.no_grad():
                for p, q in zip(params, stepped, strict=True):
                    p.copy_(q)
    return flat(params)


class Lagging(SideStream):
    """A side stream that sleeps whenever kernels are about to run on it."""

    def __init__(self, device):
        super().__init__(device)
        self.sleeps = 0

    @contextlib.contextmanager
    def running(self):
        with super().running():
            torch.cuda._sleep(CYCLES)
            self.sleeps += 1
            yield


def lag(handle, kind=Lagging):
    """Let the side stream of a handle lag; it has put nothing on its own yet."""
    stream = handle.engine.stream = kind(handle.engine.stream.device)
    return stream


@contextlib.contextmanager
def refusing_to_wait(refuses=True):
    """Make it an error to wait for the device in the block."""
    torch.cuda.set_sync_debug_mode("error" if refuses else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def counting_waits(found):
    """Append to a list each time that the host waits for the device in the block."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(w.message) for w in seen if "called a synchronizing" in str(w.message)]
