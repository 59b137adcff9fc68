"""Every mode in everything that a training loop may do, beside plain DDP with the same optimizers,
unsharded: parameters, buffers, norms and optimizer state after the same steps."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import flatten, network, take_way
from common.models import Opposite, Recomputed, normed
from common.modes import MODES, VARIANTS, Mode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- models ----


class Choosing(nn.Module):
    """Runs the layers it is told to, in the order in which it is told."""

    def __init__(self, width=24):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(12, width).double(), nn.Linear(width, 3).double()
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(4)).double()

    def forward(self, x, layers=(0, 1, 2, 3)):
        x = self.first(x).tanh()
        for i in layers:
            x = x + self.middle[i](x).tanh()
        return self.last(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(12, 20).double(), nn.Linear(12, 20).double()
        self.between = nn.Linear(20, 12).double()
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.between(self.a(x).tanh()).tanh())


class Waves(nn.Module):
    """Has complex parameters beside real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.real = nn.Linear(12, 9).double()
        self.first = nn.Parameter(torch.randn(9, 5, dtype=torch.complex128))
        self.last = nn.Parameter(torch.randn(5, 7, dtype=torch.complex128))

    def forward(self, x):
        return (torch.complex(self.real(x), self.real(x).sin()) @ self.first @ self.last).abs()


class Concealing(Recomputed):
    """Returns what no hook can be put on."""

    def forward(self, x):
        return SimpleNamespace(output=super().forward(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.gru, self.out = nn.GRU(12, 9, 2).double(), nn.Linear(9, 3).double()

    def forward(self, x):
        return self.out(self.gru(x[None])[0])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True).double()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(12).double()) for _ in range(2)])

    def forward(self, x):
        return self.layer(x[None] * self.scales[0]) * self.scales[1]


def opposite():
    torch.manual_seed(6)
    return Opposite(*(nn.Linear(12, 12) for _ in range(5))).double()


def wide():
    """Parameters that `data_parallel` cuts into many pieces."""
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(12, 333), nn.Tanh(), nn.Linear(333, 7)).double()


# ---- optimizers ----


def adamw(model):
    return [{"params": list(model.parameters()), "lr": 1e-2, "weight_decay": 0.1}]


def of(kind, **options):
    """One param group of a class."""
    return lambda model: [
        {"params": list(model.parameters()), "optimizer_class": kind, "lr": 1e-2, **options}
    ]


def two_rates(model):
    params = list(model.parameters())
    return [
        {"params": params[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[2:], "lr": 3e-3},
    ]


def muon_adamw(model):
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() == 2], "optimizer_class": Muon, "lr": 0.02},
        {"params": [p for p in params if p.dim() != 2], "lr": 1e-2},
    ]


class Counting(torch.optim.Optimizer):
    """Counts its steps where `where` says, and steps less from one to the next."""

    def __init__(self, params, lr=0.1, where="group"):
        super().__init__(params, {"lr": lr, "count": 0, "where": where})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["where"] == "group":
                group["count"] = count = group["count"] + 1
            elif group["where"] == "state":
                self.state["all"]["count"] = count = self.state["all"].get("count", 0) + 1
            else:
                self.count = count = self.count + 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / count * p.grad.sign()


def numbers(value: Tensor) -> Tensor:
    """Give complex numbers as pairs of real ones."""
    return torch.view_as_real(value) if value.is_complex() else value


class Unsharded:
    """The optimizer of each param group, unsharded, as if they were one."""

    def __init__(self, groups, masters):
        self.params = [p for group in groups for p in group["params"]]
        self.stepped = [p.detach().float() for p in self.params] if masters else self.params
        self.optims, left = [], iter(self.stepped)
        for group in groups:
            kind = group.get("optimizer_class", AdamW)
            options = {k: v for k, v in group.items() if k not in ("params", "optimizer_class")}
            mine = list(itertools.islice(left, len(group["params"])))
            self.optims.append(kind(mine, **options))

    def step(self, closure=None):
        if closure is not None:
            closure()
        if self.stepped is not self.params:
            for p, master in zip(self.params, self.stepped, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
        for optim in self.optims:
            optim.step()
        if self.stepped is not self.params:
            with torch.no_grad():
                for p, master in zip(self.params, self.stepped, strict=True):
                    p.copy_(master)

    def zero_grad(self, set_to_none=True):
        SGD(self.params).zero_grad(set_to_none)

    def states(self):
        """Give each parameter's state, in the order of the groups."""
        return [
            optim.state.get(p, {})
            for optim in self.optims
            for group in optim.param_groups
            for p in group["params"]
        ]

    def reload(self):
        for optim in self.optims:
            optim.load_state_dict(copy.deepcopy(optim.state_dict()))


# ---- loops ----


def batch(step, part=0):
    """Give the data of this rank."""
    data = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    return torch.randn(6, 12, generator=data, dtype=torch.float64)


def one_batch(training, step):
    training.backward(training.call(batch(step)))


def accumulated(training, step):
    for part in range(3):
        with training.no_sync() if part < 2 else nullcontext():
            training.backward(training.call(batch(step, part)))


def three_forwards(training, step):
    training.backward(sum(training.call(batch(step, part)) for part in range(3)))


def half_of_the_layers(training, step):
    training.backward(training.call(batch(step), (0, 3)))


USES = [(0, 1, 3), (0, 3), (3, 2), (0, 1, 2, 3), (0,), (1, 3), (2,)]


def other_layers(training, step):
    """Run other layers in each step, and others on one rank."""
    layers = USES[step % len(USES)]
    training.backward(training.call(batch(step), layers[:1] if dist.get_rank() == 1 else layers))


def other_layers_in_each_part(training, step):
    """Accumulate over parts that use other layers, other ones on each rank."""
    with training.no_sync():
        training.backward(training.call(batch(step, 1), (0, 1) if dist.get_rank() == 0 else (2,)))
    training.backward(training.call(batch(step, 2), (0, 3) if step % 2 else (1,)))


def other_order(training, step):
    """Run all layers in an order of this rank's and this step's."""
    turn = (1 + step) * (1 + dist.get_rank())
    training.backward(training.call(batch(step), [(turn + k) % 4 for k in range(4)]))


def recomputed(training, step):
    """Run the whole forward again inside backward."""
    inputs = batch(step).requires_grad_()
    training.backward(checkpoint(training.call, inputs, use_reentrant=False))


def concealed(training, step):
    training.backward(training.call(batch(step)).output)


def equal_data(training, step):
    """Give all ranks the same data, so that no order of additions matters."""
    data = torch.randn(6, 12, generator=torch.Generator().manual_seed(step)).bfloat16()
    training.backward(training.call(data))


def now_and_then_infinite(training, step):
    scale = torch.inf if step in (0, 4) and dist.get_rank() == dist.get_world_size() - 1 else 1.0
    training.backward(training.call(batch(step)) * scale)


def written_before(training, step):
    """Write gradients before backward; they count, as they do for an optimizer."""
    if step == 3:
        for p in training.module.parameters():
            p.grad = torch.ones_like(p)
    one_batch(training, step)


def thaw(model, step):
    """Freeze two layers at different times, and thaw one of them."""
    model[3].requires_grad_(step not in (3, 4))
    model[4].requires_grad_(step < 5)


def frozen():
    model = network()
    model[0].requires_grad_(False)
    return model


def thaw_late(model, step):
    model[0].requires_grad_(step > 1)


@dataclass(frozen=True)
class Feature:
    """Something that a training loop may do."""

    build: Callable[[], nn.Module] = network
    groups: Callable[[nn.Module], list[dict[str, Any]]] = adamw
    iterate: Callable[["Training", int], None] = one_batch
    prepare: Callable[[nn.Module, int], Any] = lambda model, step: None  # before each step
    steps: int = 5
    ddp: dict[str, Any] = field(default_factory=dict)  # options of DDP
    zero: dict[str, Any] = field(default_factory=dict)  # of the sharded optimizer
    parallel: dict[str, Any] = field(default_factory=dict)  # of `data_parallel`
    clip: tuple[float, float] | None = None  # largest norm, and its kind
    scaled: bool = False  # by a GradScaler
    scheduled: bool = False
    closes: bool = False  # forward and backward in a closure
    masters: bool = False  # bfloat16 parameters, float32 copies
    compiled: str | None = None  # backend of torch.compile
    reads_elsewhere: bool = False  # parameters, without a look at their module
    reloads: bool = False  # state is saved and loaded between steps
    where: str = "all"  # "nodes": state sharded in nodes of two; "some": not on rank 0
    tolerance: float = 1e-9  # of a parameter, a buffer or a norm

    def fits(self, mode: Mode) -> bool:
        """Tell whether a mode can have this; where it cannot is an error, which others test."""
        if mode.interleaved and (self.clip or self.scaled):
            return False  # a step is taken before all gradients are there
        return not (self.reads_elsewhere and mode.options.get("hidden"))


@dataclass(frozen=True)
class Launch:
    """Ranks that train a feature in some modes."""

    feature: str
    size: int
    way: str  # in which a reduce-scatter and a gather are sent, for `take_way`
    modes: Mapping[str, Mode]

    def __str__(self) -> str:
        return f"{self.feature}-{self.size}-{self.way}"


def all_modes(turn: int) -> dict[str, Mode]:
    """Give all modes, and two of their variants by turns: they share the drivers of the modes."""
    names = list(VARIANTS)
    return MODES | {
        names[k % len(names)]: VARIANTS[names[k % len(names)]] for k in (turn, turn + 2)
    }


# one of each way in which a bucket lives
FEW = {
    name: MODES[name]
    for name in (
        "zero1",
        "zero1-overlap",
        "zero1-overlap, interleaved",
        "zero2-interleaved, hidden",
    )
}


BETWEEN_HOSTS = ("Muon and AdamW", "scaled", "many pieces", "unused")


def launches() -> Iterator[Launch]:
    """Give every feature a launch in all modes, and every other one another on more or fewer ranks
    in a few modes, by turns in both ways to send; the first feature goes everywhere."""
    most = itertools.cycle([(2, "memory"), (2, "messages"), (3, "memory"), (2, "messages")])
    rest = itertools.cycle([(4, "memory"), (1, "memory"), (3, "messages"), (4, "messages")])
    everywhere = [
        (1, "memory"),
        *itertools.product((2, 3, 4), ("memory", "messages")),
        (3, "hosts"),
    ]
    for i, (name, feature) in enumerate(FEATURES.items()):
        if i == 0:
            for turn, (size, way) in enumerate(everywhere):
                yield Launch(name, size, way, all_modes(turn))
        elif feature.where == "nodes":
            yield Launch(name, 4, ("memory", "messages")[i % 2], all_modes(i))
        elif feature.where == "some":
            yield Launch(name, 3, "memory", all_modes(i))
        else:
            yield Launch(name, *next(most), all_modes(i))
            if i % 2:
                yield Launch(name, *next(rest), FEW)
            if name in BETWEEN_HOSTS:
                yield Launch(name, 3, "hosts", all_modes(i))


LOOKS_FOR_UNUSED = {
    "ddp": {"find_unused_parameters": True},
    "parallel": {"find_unused_parameters": True},
}
FEATURES = {
    "AdamW": Feature(),
    "SGD": Feature(groups=of(SGD, momentum=0.9, nesterov=True)),
    "Muon and AdamW": Feature(groups=muon_adamw),
    "Adam, amsgrad": Feature(groups=of(torch.optim.Adam, amsgrad=True)),
    "RMSprop": Feature(groups=of(torch.optim.RMSprop, centered=True, momentum=0.9)),
    "Adagrad": Feature(groups=of(torch.optim.Adagrad, lr_decay=0.01)),
    "NAdam": Feature(groups=of(torch.optim.NAdam)),
    "Rprop": Feature(groups=of(torch.optim.Rprop)),
    "ASGD": Feature(groups=of(torch.optim.ASGD)),
    "Adafactor": Feature(groups=of(torch.optim.Adafactor)),
    "two rates": Feature(groups=two_rates),
    "schedule": Feature(groups=two_rates, scheduled=True),
    "counts in its options": Feature(groups=of(Counting, where="group")),
    "counts in its state": Feature(groups=of(Counting, where="state")),
    "counts in itself": Feature(groups=of(Counting, where="attribute")),
    "master copies": Feature(
        build=lambda: network().bfloat16(), iterate=equal_data, masters=True, tolerance=0.0
    ),
    "accumulation": Feature(iterate=accumulated),
    "accumulation in views": Feature(
        iterate=accumulated,
        ddp={"gradient_as_bucket_view": True},
        zero={"parameters_as_bucket_view": True},
    ),
    "closure": Feature(closes=True),
    "three forwards": Feature(iterate=three_forwards),
    "clipped": Feature(clip=(0.05, 2.0)),
    "clipped by the largest value": Feature(clip=(0.01, torch.inf)),
    "clipped sums of two groups": Feature(
        groups=two_rates, iterate=accumulated, clip=(0.05, 2.0), zero={"shard": "whole"}
    ),
    "scaled": Feature(
        iterate=now_and_then_infinite, clip=(0.1, 2.0), scaled=True, scheduled=True, steps=8
    ),
    "state is reloaded": Feature(reloads=True),
    "whole parameters": Feature(groups=muon_adamw, zero={"shard": "whole"}),
    "many pieces": Feature(build=wide),
    "a bucket for each parameter": Feature(
        ddp={"bucket_cap_mb": 1e-6}, parallel={"bucket_cap_mb": 1e-6, "cut_mb": 1e-4}
    ),
    "one bucket": Feature(ddp={"bucket_cap_mb": 25}, parallel={"bucket_cap_mb": 8, "cut_mb": 25}),
    "tied weights": Feature(build=Tied),
    "checkpoints": Feature(build=lambda: Recomputed(False)),
    "reentrant checkpoints": Feature(build=lambda: Recomputed(True), iterate=accumulated),
    "reentrant checkpoints, many buckets": Feature(
        build=lambda: Concealing(True),
        iterate=concealed,
        ddp={"bucket_cap_mb": 1e-6},
        parallel={"bucket_cap_mb": 1e-6},
    ),
    "checkpoint of the whole": Feature(iterate=recomputed),
    "complex": Feature(build=Waves),
    "complex, clipped": Feature(build=Waves, clip=(0.05, 2.0)),
    "GRU": Feature(build=Recurrent, reads_elsewhere=True),
    "attention": Feature(build=Attending),
    "BatchNorm": Feature(build=normed, iterate=accumulated),
    "opposite order": Feature(build=opposite),
    "opposite order with Muon, in views": Feature(
        build=opposite, groups=muon_adamw, zero={"parameters_as_bucket_view": True}
    ),
    "gradients are written": Feature(iterate=written_before),
    "an order for each rank": Feature(build=Choosing, iterate=other_order),
    "static graph": Feature(build=Choosing, iterate=half_of_the_layers, ddp={"static_graph": True}),
    "never used": Feature(
        build=Choosing, iterate=half_of_the_layers, ddp={"find_unused_parameters": True}
    ),
    "unused": Feature(build=Choosing, iterate=other_layers, steps=9, **LOOKS_FOR_UNUSED),
    "unused with Muon, in views": Feature(
        build=Choosing,
        groups=muon_adamw,
        iterate=other_layers,
        steps=9,
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True},
        parallel={"find_unused_parameters": True},
        zero={"parameters_as_bucket_view": True},
    ),
    "unused in parts": Feature(
        build=Choosing, iterate=other_layers_in_each_part, **LOOKS_FOR_UNUSED
    ),
    "frozen and thawed": Feature(
        prepare=thaw, steps=8, groups=muon_adamw, ddp={"find_unused_parameters": True}
    ),
    "frozen": Feature(build=frozen),
    "thawed late": Feature(prepare=thaw_late, ddp={"find_unused_parameters": True}),
    "compiled": Feature(compiled="aot_eager", ddp={"find_unused_parameters": False}),
    "two levels": Feature(build=normed, where="nodes"),
    "two levels, unused, clipped": Feature(
        build=Choosing, iterate=other_layers, where="nodes", clip=(0.05, 2.0), **LOOKS_FOR_UNUSED
    ),
    "two levels, an order for each rank": Feature(
        build=Choosing, iterate=other_order, where="nodes"
    ),
    "some ranks": Feature(where="some"),
}


# ---- training ----


class Training:
    """A feature in one mode, or with plain DDP and unsharded optimizers."""

    def __init__(self, feature: Feature, mode: Mode | None, group: Any, shared: Any):
        self.feature, self.mode = feature, mode
        self.module = feature.build()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        self.handle: Any = None
        if mode is None:
            self.call: Any = DDP(self.module, process_group=group, **feature.ddp)
            self.optimizer: Any = Unsharded(feature.groups(self.module), feature.masters)
            self.no_sync = self.call.no_sync
        else:
            self.attach(mode, group, shared)
        if feature.compiled:
            self.call = torch.compile(self.call, backend=feature.compiled)
        stepped = self.optimizer.optims if mode is None else [self.optimizer]
        self.schedulers = [StepLR(o, 2, gamma=0.3) for o in stepped if feature.scheduled]
        self.norm: Tensor | None = None

    def attach(self, mode: Mode, group: Any, shared: Any) -> None:
        feature = self.feature
        masters = {"master_dtype": torch.float32} if feature.masters else {}

        def make(model: nn.Module) -> ZeroRedundancyOptimizer:
            return ZeroRedundancyOptimizer(
                feature.groups(self.module), AdamW, shared, **masters, **feature.zero
            )

        options: dict[str, Any] = {}
        if feature.clip and mode.attaches:
            options |= dict(zip(("max_grad_norm", "norm_type"), feature.clip, strict=True))
        if feature.scaled and mode.attaches:
            options["scaler"] = self.scaler
        attached = mode.attach(self.module, make, group, feature.ddp, feature.parallel, **options)
        self.call, self.optimizer, self.handle = attached.call, attached.optimizer, attached.handle
        self.no_sync = attached.no_sync

    def backward(self, output: Tensor) -> None:
        loss = output.square().mean()
        (self.scaler.scale(loss) if self.feature.scaled else loss).backward()

    def iterate(self, step: int) -> None:
        feature = self.feature
        feature.prepare(self.module, step)
        if feature.closes:
            self.optimizer.step(lambda: feature.iterate(self, step))
        else:
            feature.iterate(self, step)
            self.clip()
            self.step()
        for scheduler in self.schedulers:
            scheduler.step()
        to_none = step % 2 == 0  # a gradient that is zero is stepped, and one that is None is not
        self.optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            assert all(p.grad is None for p in self.module.parameters()), "a gradient is left"
        if feature.reloads and step == 3:
            self.reload()

    def clip(self) -> None:
        """Clip as a user would: by hand, unless a driver has."""
        if not self.feature.clip:
            return
        if self.handle is not None:
            self.norm = self.handle.grad_norm
            return
        if self.feature.scaled:
            for optim in self.optimizer.optims if self.mode is None else [self.optimizer]:
                self.scaler.unscale_(optim)
        most, kind = self.feature.clip
        self.norm = nn.utils.clip_grad_norm_(self.module.parameters(), most, kind)
        assert not self.norm.isfinite() or self.norm > most, "something is clipped"

    def step(self) -> None:
        if not self.feature.scaled:
            self.optimizer.step()
            return
        for optim in self.optimizer.optims if self.mode is None else [self.optimizer]:
            self.scaler.step(optim)
        self.scaler.update()

    def reload(self) -> None:
        if self.mode is None:
            self.optimizer.reload()
            return
        self.optimizer.consolidate_state_dict(to=None)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def seen(self) -> Tensor:
        """Give all parameters and buffers, the scale, and the norm where it was clipped."""
        values = [*self.module.parameters(), *self.module.buffers()]
        values.append(torch.tensor(self.scaler.get_scale()))
        if self.norm is not None and self.norm.isfinite():
            values.append(self.norm)
        return torch.cat([numbers(value.detach()).double().flatten() for value in values])

    def states(self) -> list[dict[str, Any]]:
        if self.mode is None:
            return self.optimizer.states()
        self.optimizer.consolidate_state_dict(to=None)
        state = self.optimizer.state_dict()["state"]
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return [state.get(i, {}) for i in range(count)]

    def train(self) -> tuple[dict[int, Tensor], list[dict[str, Any]]]:
        """Give what was seen after some steps (others leave parameters on their way), and the
        state at the end."""
        found = {-1: self.seen()}
        for step in range(self.feature.steps):
            self.iterate(step)
            if step not in (2, self.feature.steps - 2):
                found[step] = self.seen()
        if self.handle is not None:
            assert self.optimizer.driver.steps_in_backward
            assert getattr(self.handle.planner, "fits", True), "DDP's buckets have no plan"
            assert len(self.handle.schedule.collectives) > 1
        return found, self.states()


def state_gap(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Give the largest difference of two lists of states; infinity where they do not hold the same."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a.keys() != b.keys() - {"master_param"}:
            return float("inf")
        for key, value in a.items():
            pair = [numbers(torch.as_tensor(v)).double() for v in (value, b[key])]
            if pair[0].numel():
                worst = max(worst, float((pair[0] - pair[1]).abs().max()))
    return worst


def beside_ddp(name: str, modes: Mapping[str, Mode]) -> dict[str, tuple[float, float, Tensor]]:
    """Train in every mode; gives how far values and state are from DDP's, and the parameters."""
    feature, size = FEATURES[name], dist.get_world_size()
    group, shared = dist.group.WORLD, None
    if feature.where == "nodes":
        shared = two_level(2)
    if feature.where == "some":
        group = shared = dist.new_group(range(1, size))
        if dist.get_rank() == 0:
            return {}
    theirs, their_state = Training(feature, None, group, shared).train()
    assert not torch.equal(theirs[-1], theirs[feature.steps - 1]), "something was learnt"
    found = {}
    for mode, how in modes.items():
        if not feature.fits(how):
            continue
        training = Training(feature, how, group, shared)
        ours, state = training.train()
        last = flatten(map(numbers, training.module.parameters()))
        gaps = [float((theirs[step] - ours[step]).abs().max()) for step in theirs]
        found[mode] = max(gaps), state_gap(their_state, state), last
    return found


@pytest.mark.turns(4)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("launch", list(launches()), ids=str)
def test_every_mode_trains_as_ddp(launch, monkeypatch):
    take_way(monkeypatch, launch.way)
    limit = FEATURES[launch.feature].tolerance
    ranks = [rank for rank in run(launch.size, beside_ddp, launch.feature, launch.modes) if rank]
    for mode, (_, _, last) in ranks[0].items():
        for values, state, mine in (rank[mode] for rank in ranks):
            assert values <= limit and state <= 1e-9, (mode, values, state)
            assert torch.equal(mine, last), f"{mode}: replicas differ"
