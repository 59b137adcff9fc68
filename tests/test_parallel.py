"""Training without DDP: what is sent, held and read; what may go wrong goes wrong on every rank.

`test_modes.py` compares the numbers with those of DDP."""

import contextlib
import copy
import io
import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten, largest_gap, network
from common.afresh import measures_memory, run_afresh
from common.modes import MODES, SMALL
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon
from torch.utils.checkpoint import checkpoint

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.stepped_gradients import SteppedGradient
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

PARALLEL = {name: mode.options for name, mode in MODES.items() if not mode.wraps}


def batch(step, rank=None, rows=6, width=12, dtype=torch.float64):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(
        rows, width, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=dtype
    )


def replicas(model, group=None):
    mine = flatten(model.parameters())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return all(torch.equal(mine, other) for other in every)


def adamw(params):
    return {"params": params, "lr": 1e-2, "weight_decay": 0.1}


def muon(params):
    return {"params": params, "optimizer_class": Muon, "lr": 0.02}


def one_adamw(model):
    return [adamw(list(model.parameters()))]


def muon_adamw(model):
    found = list(model.parameters())
    return [muon([p for p in found if p.dim() == 2]), adamw([p for p in found if p.dim() != 2])]


def sharded(groups, process_group=None, **options):
    return ZeroRedundancyOptimizer(groups, AdamW, process_group, lr=1e-2, **options)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(3)
        self.inside, self.reentrant = (
            nn.ModuleList(nn.Linear(12, 12) for _ in range(4)).double(),
            reentrant,
        )

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.inside:
            x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.reentrant)
        return x


def normed():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 4)
    ).double()


def compiling(before, backend):
    one, other = network(), network()
    wrapped, optim = DDP(one), AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
    zero = sharded(one_adamw(other))
    if before:
        other = torch.compile(other, backend=backend)
    handle = data_parallel(other, zero, **SMALL)
    called = other if before else torch.compile(other, backend=backend)
    for i in range(4):
        wrapped(batch(i)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        called(batch(i)).square().mean().backward()
        zero.step()
        assert all(type(p.grad) is SteppedGradient for p in other.parameters()) and replicas(other)
    assert handle.schedule
    return max(
        float((a - b).detach().abs().max())
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def compiling_all():
    return {
        (before, backend): compiling(before, backend)
        for before in (True, False)
        for backend in ("eager", "aot_eager")
    }


@pytest.mark.usefixtures("compiler")
def test_compiled_modules_train_alike():
    for rank in run(2, compiling_all):
        for name, worst in rank.items():
            assert worst < 1e-9, name


def moved(early):
    """Bring the state from an unsharded AdamW and back to one, in the middle."""
    one, other = network(), network()
    wrapped, optim = DDP(one), AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
    for i in range(3):
        wrapped(batch(i)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    other.load_state_dict(one.state_dict())
    zero = sharded(one_adamw(other))
    data_parallel(other, zero, interleaved=early, hidden=early, **SMALL)
    first = copy.deepcopy(optim.state_dict())
    zero.load_state_dict(copy.deepcopy(first))
    for i in range(3, 6):
        for model in (wrapped, other):
            model(batch(i)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    zero.load_state_dict(
        copy.deepcopy(optim.state_dict())
    )  # while parameters are on their way, and the buckets are planned
    for i in range(6, 9):
        for model in (wrapped, other):
            model(batch(i)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    zero.consolidate_state_dict(to=None)
    third = network()
    third.load_state_dict(other.state_dict())
    plain = AdamW(third.parameters(), lr=1e-2, weight_decay=0.1)
    plain.load_state_dict(zero.state_dict())
    again = DDP(third)
    for i in range(9, 11):
        for model in (wrapped, other, again):
            model(batch(i)).square().mean().backward()
        for o in (optim, plain):
            o.step()
            o.zero_grad()
    mine = flatten(one.parameters())
    return float((mine - flatten(other.parameters())).abs().max()), float(
        (mine - flatten(third.parameters())).abs().max()
    )


def moved_both():
    return moved(False), moved(True)


def test_state_comes_and_goes_in_the_middle():
    for rank in run(3, moved_both):
        for worst in rank:
            assert max(worst) < 1e-9


def buffers():
    out = {}
    for how in ("broadcast", "average", "local"):
        model = normed()
        with torch.no_grad():
            model[0].weight.add_(dist.get_rank())  # ranks begin apart
        data_parallel(model, sharded(one_adamw(model)), buffers=how, **SMALL)
        out[how, "first"] = model[0].weight.detach().clone()
        for i in range(3):
            model(batch(i)).square().mean().backward()
        before = model[1].running_mean.clone()
        model(batch(3))
        after = model[1].running_mean.clone()
        model.eval()
        model(batch(4))
        out[how] = (
            before,
            after,
            int(model[1].num_batches_tracked),
            model[0](batch(3)).mean(0).detach(),
        )
        out[how, "evaluated"] = model[1].running_mean.clone()
    return out


def test_buffers_are_broadcast_averaged_or_left_alone():
    first, second = run(2, buffers)
    assert torch.equal(first["average", "first"], second["average", "first"]) and torch.equal(
        first["average", "first"], normed()[0].weight
    )
    for how, begin in (
        ("broadcast", lambda a, b, own: a),
        ("average", lambda a, b, own: (a + b) / 2),
        ("local", lambda a, b, own: own),
    ):
        for rank in (first, second):
            _, after, count, mean = rank[how]
            expected = begin(first[how][0], second[how][0], rank[how][0]) * 0.9 + 0.1 * mean
            assert torch.allclose(after, expected) and count == 4, how
            assert torch.allclose(
                rank[how, "evaluated"], begin(first[how][1], second[how][1], rank[how][1])
            ), how
    assert not torch.equal(first["local"][1], second["local"][1])


def averaged(dtype):
    model = nn.BatchNorm1d(3).to(dtype)
    data_parallel(model, sharded(one_adamw(model)), buffers="average", **SMALL)
    model.running_mean.fill_(40000.0 + 64 * dist.get_rank())
    with torch.no_grad():
        model.eval()(torch.ones(2, 3, dtype=dtype))
    return model.running_mean


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_H3_the_average_of_buffers_overflows_only_where_they_do(dtype):
    for mean in run(2, averaged, dtype):
        assert torch.equal(mean, torch.full((3,), 40032.0, dtype=dtype))


class Choosing(nn.Module):
    """Reads other parameters on other ranks and steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.ways, self.out = (
            nn.ModuleList(nn.Linear(12, 12) for _ in range(3)).double(),
            nn.Linear(12, 3).double(),
        )

    def forward(self, x, ways):
        for i in ways:
            x = self.ways[i](x).tanh()
        return self.out(x)


def surprised(lack, early):
    model = Choosing()
    data_parallel(model, sharded(one_adamw(model)), interleaved=early, hidden=early, **SMALL)
    odd = dist.get_rank() == 1
    common, other = ([0, 1], [0]) if lack else ([0], [0, 1])

    def go():
        for i in range(5):
            model(batch(i), other if odd and i == 3 else common).square().mean().backward()
        return list(model.parameters())

    return caught(go)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("lack", [True, False])
def test_a_change_that_was_not_announced_is_an_error_on_every_rank(lack, early):
    messages = run(3, surprised, lack, early, timeout=60)
    assert "find_unused_parameters=True" in messages[1], messages[1]
    assert (
        "no gradient in this backward, but did before"
        if lack
        else "got a gradient in this backward, but did not before"
    ) in messages[1]
    assert all("rank 1 failed with RuntimeError" in m for m in (messages[0], messages[2])), messages


def idle(early):
    """Rank 0 has no gradient in some iterations: it takes part in `step`."""
    one, other = network(), network()
    wrapped, optim = DDP(one), AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
    zero = sharded(one_adamw(other))
    data_parallel(
        other, zero, interleaved=early, hidden=early, find_unused_parameters=True, **SMALL
    )
    for i in range(6):
        works = dist.get_rank() or i % 2
        (wrapped(batch(i)).square().mean() * bool(works)).backward()
        loss = other(batch(i)).square().mean()
        if works:
            loss.backward()
        optim.step()
        optim.zero_grad()
        zero.step()
    assert replicas(other)
    return float((flatten(one.parameters()) - flatten(other.parameters())).abs().max())


def idle_both():
    return idle(False), idle(True)


def test_a_rank_without_any_gradient_takes_part_in_step():
    for worst in run(3, idle_both):
        assert max(worst) < 1e-9


def by_hand(model, steps, micro=1):
    """Train with gradients averaged one by one."""
    optim, size = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), dist.get_world_size()
    for i in range(steps):
        yield i
        for p in model.parameters():
            if p.grad is None:
                continue
            dist.all_reduce(p.grad)
            p.grad /= size
        optim.step()
        optim.zero_grad()


class Output:
    """Something that nobody finds a tensor in."""

    def __init__(self, value):
        self.value = value


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = network()

    def forward(self, x):
        return Output(self.inside(x))


def adding_up(early, how):
    """Gradients add up before the backward that averages, in ways that a hook before forward does not see."""
    one, other = network(), Wrapped() if how == "output" else network()
    handle = data_parallel(
        other, sharded(one_adamw(other)), interleaved=early, hidden=early, **SMALL
    )
    for i in by_hand(one, 6):
        for m in range(3):
            one(batch(3 * i + m)).square().mean().backward()
        if how == "by hand":
            for k, p in enumerate(one.parameters()):
                p.grad += torch.full_like(p, k + 1.0)

        def loss(m, i=i):
            return (
                (other(batch(3 * i + m)).value if how == "output" else other(batch(3 * i + m)))
                .square()
                .mean()
            )

        losses = [loss(m) for m in range(3)] if how == "forward" else []
        for m in range(3):
            with handle.no_sync() if m < 2 else contextlib.nullcontext():
                value = losses[m] if losses else loss(m)
                if how == "by hand" and m == 2:  # as a user might, on every parameter
                    for k, p in enumerate(other.parameters()):
                        p.grad += torch.full_like(p, k + 1.0)
                value.backward()
    return float((flatten(one.parameters()) - flatten(other.parameters())).abs().max())


HOWS = ["forward", "output", "by hand"]


def untouched():
    """Differentiate by an input, which leaves all gradients alone: those that have added up, and
    one of a frozen parameter."""
    model = network()
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = torch.ones_like(model[0].bias)
    handle, x = (
        data_parallel(model, zero := sharded(one_adamw(model)), **SMALL),
        batch(0).requires_grad_(),
    )
    for i in range(2):
        model(batch(i)).square().mean().backward()
    before, found = flatten(model.parameters()), []
    torch.autograd.grad(model(x).sum(), x)
    with handle.no_sync():
        model(batch(2)).square().mean().backward()
    summed = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    torch.autograd.grad(model(x).sum(), x)
    found = [torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), summed, strict=True)]
    return found, torch.equal(before, flatten(model.parameters())), zero.driver.steps_in_backward


def test_autograd_grad_leaves_gradients_alone():
    for found, still, driven in run(2, untouched, timeout=60):
        assert all(found) and len(found) == 7 and still and driven


def broken_off(listened):
    """Fail in the backward of one rank, before or after the first bucket has left, with gradients
    that had added up; then go on."""
    model = Turning()
    handle = data_parallel(model, sharded(one_adamw(model)), **(SMALL if listened else {}))
    for i in range(2):
        model(batch(i)).square().mean().backward()
    with handle.no_sync():
        model(batch(2)).square().mean().backward()
    summed = [p.grad.clone() for p in model.parameters()]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("in backward")

    if dist.get_rank() == 0:
        model.layers[2].register_forward_hook(lambda module, args, output: Fails.apply(output))
    messages = [caught(lambda: model(batch(3)).square().mean().backward()) for _ in range(2)]
    handle.leave()
    kept = [
        p.grad is not None and (listened or torch.allclose(p.grad, grad))
        for p, grad in zip(model.layers[0].parameters(), summed[:2], strict=True)
    ]
    return messages, kept


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("listened", [False, True])
def test_a_backward_that_broke_off_is_told_in_the_next_forward(size, listened):
    ranks = run(size, broken_off, listened, timeout=60)
    (first, second), kept = ranks[0]
    assert (
        "in backward" in first
        and "the last backward did not come to its end" in second
        and all(kept)
    ), ranks[0]


def adding_up_all():
    return {(how, early): adding_up(early, how) for how in HOWS for early in (False, True)}


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_have_added_up_are_told_from_those_that_come(size):
    for rank in run(size, adding_up_all):
        for name, worst in rank.items():
            assert worst < 1e-9, name


class Turning(nn.Module):
    """Layers whose order changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5)).double()

    def forward(self, x, first=0):
        for k in range(5):
            x = self.layers[(first + k) % 5](x).tanh()
        return x


def listened_to():
    """How many parameters are listened to: all while the order is not known, then one for each bucket."""
    one, other = Turning(), Turning()
    for model in (one, other):
        model.layers[0].requires_grad_(False)
    handle, seen = data_parallel(other, sharded(one_adamw(other)), bucket_cap_mb=0.0025), []
    for i in by_hand(one, 6):
        if i == 3:
            for model in (one, other):
                model.layers[0].requires_grad_(True)
        seen.append(len(handle.reducer.listeners))
        for model in (one, other):
            model(batch(i)).square().mean().backward()
        seen += [len(handle.reducer.listeners), len(handle.step_plan.shard.plan.buckets)]
    worst = float((flatten(one.parameters()) - flatten(other.parameters())).abs().max())
    handle.detach()
    return seen, worst, len(handle.reducer.listeners)


def test_one_parameter_of_each_bucket_is_listened_to():
    for seen, worst, left in run(2, listened_to):
        before, after, buckets = seen[::3], seen[1::3], seen[2::3]
        assert (
            before[0] == 8 and after == buckets and 1 < buckets[0] < 8 and before[1:3] == after[:2]
        ), seen
        assert buckets[-1] > buckets[0] and worst < 1e-9 and left == 0, (seen, worst, left)


class Hidden(nn.Module):
    """Two layers, and an output in which nobody finds a tensor; the first may be left out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 12).double(), nn.Linear(12, 12).double()

    def forward(self, x, both=True):
        return Output(self.b(self.a(x) if both else x))


def unheard():
    model = Hidden()
    data_parallel(model, zero := sharded(one_adamw(model)))

    def go():
        for i in range(4):
            model(batch(i), both=i < 2 or dist.get_rank() != 1).value.square().mean().backward()
            zero.step()

    return caught(go)


def test_a_lack_that_no_hook_reports_is_an_error_in_step():
    messages = run(2, unheard, timeout=30)
    assert (
        "no gradient in this backward, but did before" in messages[1]
        and "rank 1 failed" in messages[0]
    ), messages


def waited_for():
    """How many buckets have come when nothing, a bias that is not there, and the first weight have been read."""
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(6))).double()
    handle = data_parallel(model, sharded(one_adamw(model)), hidden=True, bucket_cap_mb=0.001)
    for i in range(3):
        model(batch(i)).square().mean().backward()

    def came():
        return sum(work.done for work in handle.arriving.works)

    def guarded():
        return [type(layer._parameters) is not dict for layer in model]

    seen = [came()]
    assert model[0].bias is None
    seen.append(came())
    assert model[0].weight is not None
    return [*seen, came()], guarded(), len(handle.arriving.works)


def test_a_read_waits_for_no_more_than_its_own_parameter():
    for (before, none, one), guarded, count in run(2, waited_for):
        assert count == 6 and none == before and one == before + 1 < count, (
            before,
            none,
            one,
            count,
        )
        assert guarded == [False] + [True] * 5


def detached(early):
    one, other = network(), network()
    wrapped, optim, zero = (
        DDP(one),
        AdamW(one.parameters(), lr=1e-2, weight_decay=0.1),
        sharded(one_adamw(other)),
    )

    def go(steps, model):
        for i in steps:
            for m in (wrapped, model):
                m(batch(i)).square().mean().backward()
            if model is not other:
                zero.step()
                zero.zero_grad()
            optim.step()
            optim.zero_grad()

    with data_parallel(other, zero, interleaved=early, hidden=early, **SMALL):
        go(range(3), other)
    assert not zero.driver.steps_in_backward and all(
        type(m._parameters) is dict for m in other.modules()
    )
    go(range(3, 5), DDP(other))
    handle = data_parallel(other, zero, interleaved=early, hidden=early, **SMALL)
    go(range(5, 8), other)
    handle.detach()
    handle.detach()
    go(range(8, 10), DDP(other))
    assert replicas(other)
    return float((flatten(one.parameters()) - flatten(other.parameters())).abs().max())


def detached_both():
    return detached(False), detached(True)


def test_detach_leaves_a_plain_module_and_optimizer():
    for size in (1, 2):
        for worst in run(size, detached_both):
            assert max(worst) < 1e-9


def unpickled(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def by_loading(model):
    """Load, which copies into the parameters that are on their way: what comes afterwards must not overwrite it."""
    state = network().state_dict()
    with torch.no_grad():
        for value in state.values():
            value.mul_(2).add_(1)
    model.load_state_dict(state)
    return model(batch(50))


def by_setting(model):
    with torch.no_grad():
        for module in (model[0], model[4]):
            module.weight.fill_(3.0)
    return model(batch(50))


def by_casting(model):
    model.float()
    out = model(batch(50).float()).double()
    model.double()
    return out


READS = {
    "state_dict": lambda m: flatten(m.state_dict().values()),
    "parameters": lambda m: flatten(m.parameters()),
    "one of parameters": lambda m: next(iter(m.parameters())),
    "last of parameters": lambda m: list(m.parameters())[-1],
    "named_parameters": lambda m: flatten(p for _, p in m.named_parameters()),
    "get_parameter": lambda m: m.get_parameter("2.weight"),
    "weight": lambda m: m[0].weight,
    "bias": lambda m: m[4].bias,
    "deepcopy": lambda m: flatten(copy.deepcopy(m).parameters()),
    "pickle": lambda m: flatten(unpickled(saved(m)).parameters()),
    "pickled state": lambda m: flatten(unpickled(saved(m.state_dict())).values()),
    "forward": lambda m: m(batch(50)),
    "part": lambda m: m[2](batch(50, width=40)),
    "load_state_dict": by_loading,
    "set": by_setting,
    "cast": by_casting,
    "functional_call": lambda m: torch.func.functional_call(
        m, {"0.bias": torch.ones(40).double()}, (batch(50),)
    ),
    "grad of input": lambda m: torch.autograd.grad(m(x := batch(50).requires_grad_()).sum(), x)[0],
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "apply": lambda m: m.apply(lambda x: None)[3].weight,
    "children": lambda m: flatten(p for c in m.children() for p in c.parameters()),
    "repeated": lambda m: flatten([*m.parameters(), *m.parameters()]),
}


def reading(name, hidden, early, evaluates):
    model = network()
    zero = sharded(one_adamw(model))
    data_parallel(model, zero, hidden=hidden, interleaved=early, **SMALL)
    for i in range(2):
        model(batch(i)).square().mean().backward()
    if evaluates:
        model.eval()
    with torch.no_grad() if evaluates else contextlib.nullcontext():
        seen = READS[name](model).detach().clone()
    return seen, flatten(model.parameters())


def reads():
    wrong = []
    for name in READS:
        for early in (False, True):
            evaluates = early and name != "grad of input"
            (a, b), (c, d) = (reading(name, hidden, early, evaluates) for hidden in (False, True))
            if not (torch.equal(a, c) and torch.equal(b, d)):
                wrong.append((name, early))
    return wrong


def test_no_read_is_stale():
    assert run(2, reads) == [[]] * 2


def one_reads(early):
    """Rank 0 reads what the others do not, and they meet it elsewhere."""
    model = network()
    data_parallel(model, sharded(one_adamw(model)), interleaved=early, hidden=True, **SMALL)
    for i in range(4):
        model(batch(i)).square().mean().backward()
        if dist.get_rank() == i % 3:
            saved(model.state_dict())
        dist.barrier()
        order = list(model) if dist.get_rank() else reversed(list(model))
        for layer in order:
            list(layer.parameters())
    return replicas(model)


@pytest.mark.parametrize("early", [False, True])
def test_one_rank_may_read_alone(early):
    assert all(run(3, one_reads, early, timeout=30))


def left_out():
    out = []
    for calls in (True, False):
        model = network()
        zero = sharded(one_adamw(model))
        data_parallel(model, zero, **SMALL)
        for i in range(4):
            model(batch(i)).square().mean().backward()
            if calls:
                zero.step()
            if calls:
                zero.zero_grad()
        out.append(flatten(model.parameters()))
    return torch.equal(*out)


def test_step_may_be_left_out():
    assert all(run(2, left_out))


def chain(layers=12, width=64):
    torch.manual_seed(9)
    return nn.Sequential(*(nn.Linear(width, width + (i == -1)) for i in range(layers)))


class Opposite(nn.Sequential):
    """Runs its modules from the last to the first."""

    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


def living(early, opposite):
    model = Opposite(*reversed(chain())) if opposite else chain()
    zero = sharded(one_adamw(model))
    handle = data_parallel(model, zero, interleaved=early, hidden=False, bucket_cap_mb=0.016, lag=1)
    params, most, plans = list(model.parameters()), [0] * 5, [handle.step_plan.shard.plan]
    step = 0

    def look(param):
        most[step] = max(most[step], sum(p.grad is not None for p in params))

    for p in params:
        p.register_post_accumulate_grad_hook(look)
    for step in range(5):
        model(batch(step, width=64, dtype=torch.float32)).square().mean().backward()
        plans.append(handle.step_plan.shard.plan)
    return most, len(params), [a is not b for a, b in itertools.pairwise(plans)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("opposite", [False, True])
def test_gradients_live_for_a_bucket(early, opposite):
    for most, count, changes in run(2, living, early, opposite):
        assert max(most[1:]) <= 4, "a bucket of weights, and the biases that wait for theirs"
        assert most[0] > count / 2 if opposite else most[0] <= 4, (
            "in the first iteration, those that come out of turn wait"
        )
        assert changes == [
            opposite,
            False,
            False,
            False,
            False,
        ], "plans are made anew for them alone"


def first_peak(early):
    def train():
        model = nn.Sequential(*(nn.Linear(1400, 1400) for _ in range(20)))
        data_parallel(
            model,
            sharded([{"params": model.parameters(), "optimizer_class": SGD}]),
            interleaved=early,
        )
        model(torch.ones(1, 1400)).sum().backward()

    return peak_bytes(torch.device("cpu"), train) / (20 * 1401 * 1400 * 4)


@measures_memory
@pytest.mark.parametrize("early", [False, True])
def test_the_first_iteration_does_not_hold_all_gradients(early, monkeypatch):
    monkeypatch.setenv(
        "ZERO_NB_MEMORY", "0"
    )  # the system counts a page of shared memory in every process that has read it
    for peak in run_afresh(4, "test_parallel.first_peak", early):
        # parameters; a quarter of averages, of what is stepped, and, up to five of twenty, of gradients on their way
        assert 1.25 < peak < 1.85, "gradients that wait for the end would make it 2 at least"


def vocabulary(pieces, early):
    def train():
        model = nn.Linear(2000, 4800, bias=False)
        data_parallel(
            model,
            sharded(one_adamw(model)),
            interleaved=early,
            cut_mb=model.weight.nbytes / 2**20 / pieces,
        )
        for _ in range(4):
            model(torch.ones(1, 2000)).sum().backward()

    return peak_bytes(torch.device("cpu"), train) / (2000 * 4800 * 4)


@measures_memory
@pytest.mark.usefixtures("small_pool", "way")
@pytest.mark.parametrize("early,least", [(False, 3.5), (True, 3.0)])
def test_a_gradient_that_is_cut_in_a_few_pieces_is_reduced_where_it_lies(early, least):
    for peak in run_afresh(2, "test_parallel.vocabulary", 4, early):
        # a parameter, its gradient, half of two moments, and, if steps come at the end, of an average
        assert least <= peak < least + 0.7, (
            "messages bring 6 MB for each of four pieces; a copy of the gradient would be another"
            " 38 MB"
        )


NETWORK = {"reduce_scatter": "RS", "all_gather": "AG"}


def uneven_chain():
    torch.manual_seed(9)
    sizes = [12, 40, 56, 24, 72, 8, 4]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def traffic(setup):
    model, group = uneven_chain(), record()
    zero = sharded(one_adamw(model), group)
    handle, logs = data_parallel(model, zero, bucket_cap_mb=0.002, **setup), []
    for i in range(5):
        model(batch(i, dtype=torch.float32)).square().mean().backward()
        zero.step()
        list(model.parameters())
        logs.append(list(group.log.collectives()))
        wire = group.log.wire
        group.log.clear()
    sizes = (
        [bucket.nbytes for bucket in handle.step_plan.shard.plan.buckets]
        if hasattr(handle.step_plan.shard.plan.buckets[0], "nbytes")
        else [bucket.numel * 4 for bucket in handle.step_plan.shard.plan.buckets]
    )
    assert len(set(sizes)) == len(sizes) > 2, "buckets are told apart by their size"
    seen = [
        tuple(f"{sizes.index(e.bytes)}:{NETWORK.get(e.kind, e.kind)}" for e in log)
        for log in logs[2:]
    ]
    return seen, handle.schedule.collectives, wire, sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", PARALLEL)
def test_traffic_is_that_of_ddp_in_the_order_of_the_schedule(mode):
    size = 3
    ranks = run(size, traffic, PARALLEL[mode])
    for seen, planned, *_ in ranks:
        assert all(order == planned == ranks[0][1] for order in seen)
    assert (
        sum(wire for _, _, wire, _ in ranks) == 2 * (size - 1) * ranks[0][3]
    )  # parts are rounded to 16 elements, so ranks differ a little


def bad():
    rank, out = dist.get_rank(), {}

    def ask(name, f):
        out[name] = caught(f)

    def made(model=None, **setup):
        model = model or network()
        return data_parallel(model, sharded(one_adamw(model)), **setup)

    ask("ddp", lambda: data_parallel(wrapped := DDP(network()), sharded(one_adamw(wrapped))))
    ask("plain optimizer", lambda: data_parallel(model := network(), AdamW(model.parameters())))
    ask("not a module", lambda: data_parallel([1], sharded(one_adamw(network()))))
    ask(
        "missing",
        lambda: data_parallel(model := network(), sharded([adamw(list(model.parameters())[:3])])),
    )
    ask(
        "strange",
        lambda: data_parallel(
            model := network(),
            sharded([adamw([*model.parameters(), nn.Parameter(torch.ones(3, 4))])]),
        ),
    )
    ask("unknown", lambda: made(bucket_cap=3))
    ask("apart", lambda: made(bucket_cap_mb=1.0 + rank))
    ask("negative cap", lambda: made(bucket_cap_mb=-1.0))
    ask("cap", lambda: made(bucket_cap_mb="big"))
    ask("cut", lambda: made(cut_mb=0.0))
    ask("lag", lambda: made(lag=-1))
    ask("lag of a float", lambda: made(lag=1.5))
    ask("buffers", lambda: made(buffers="none"))
    ask("clip", lambda: made(max_grad_norm=-1.0))
    ask("judges", lambda: made(interleaved=True, max_grad_norm=1.0))
    ask("scaler", lambda: made(scaler=3))
    model = network()
    zero = sharded(one_adamw(model))
    data_parallel(model, zero)
    ask("twice", lambda: data_parallel(model, zero))
    ask("other optimizer", lambda: data_parallel(model, sharded(one_adamw(model))))
    ask("closure", lambda: zero.step(found_inf=1))
    ask("add", lambda: zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    model(batch(0)).square().mean().backward()
    assert replicas(model)
    return out


WORDS = {
    "ddp": "TypeError.*plain model.*module",
    "plain optimizer": "TypeError.*ZeroRedundancyOptimizer, got AdamW",
    "not a module": "TypeError.*Module, got list",
    "missing": "ValueError.*'3.weight'",
    "strange": r"ValueError.*\(3, 4\)",
    "unknown": "TypeError.*bucket_cap",
    "apart": "rank",
    "negative cap": "ValueError.*bucket_cap_mb",
    "cap": "bucket_cap_mb",
    "cut": "ValueError.*cut_mb",
    "lag": "ValueError.*lag",
    "lag of a float": "(Type|Value)Error.*lag",
    "buffers": "ValueError.*'none'",
    "clip": "ValueError.*max_grad_norm",
    "judges": "ValueError.*interleaved",
    "scaler": "TypeError.*scaler.*got",
    "twice": "RuntimeError.*detach",
    "other optimizer": "RuntimeError.*detach",
    "closure": "TypeError.*found_inf",
    "add": "RuntimeError.*overlapped",
}


def test_bad_input_is_an_error_on_every_rank():
    ranks = run(2, bad, timeout=60)
    for name, words in WORDS.items():
        for rank in ranks:
            assert rank[name] and re.search(words, rank[name], re.S), (name, rank[name])


class Trap(nn.Module):
    """Fails in forward or in backward when told to."""

    def __init__(self):
        super().__init__()
        self.inside, self.where = network(), ""

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("caught in forward")
        out = self.inside[0](x)
        if self.where == "backward":
            out.register_hook(self.spring)
        return self.inside[1:](out)

    def spring(self, grad):
        raise ValueError("caught in backward")


def trapped(where, setup, at, nodes=False):
    model = Trap()
    data_parallel(
        model, sharded(one_adamw(model), two_level(2) if nodes else None), **SMALL, **setup
    )

    def go():
        for i in range(4):
            model.where = where if i == at and dist.get_rank() == 1 else ""
            model(batch(i)).square().mean().backward()
        return list(model.parameters())

    return caught(go)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["zero2", "zero2-hidden-interleaved"])
def test_a_rank_that_raises_is_named_by_the_others(mode, where, at):
    for size, nodes in ((3, False), (4, True)):
        messages = run(size, trapped, where, PARALLEL[mode], at, nodes, timeout=30)
        assert messages.pop(1) == f"ValueError: caught in {where}"
        for message in messages:
            assert "rank 1 failed with" in message, message  # and it ends soon


def twice_differentiated():
    model = network()
    data_parallel(model, sharded(one_adamw(model)), **SMALL)
    return caught(lambda: model(batch(0)).square().mean().backward(create_graph=True))


def differentiated_by_one():
    model = network()
    data_parallel(model, sharded(one_adamw(model)), **SMALL)
    return caught(
        lambda: [
            model(batch(step))
            .square()
            .mean()
            .backward(create_graph=step == 1 and dist.get_rank() == 1)
            for step in range(3)
        ]
    )


def wholly_recomputed(reentrant):
    one, other = network(), network()
    wrapped, optim, zero, worst = (
        DDP(one),
        AdamW(one.parameters(), lr=1e-2, weight_decay=0.1),
        sharded(one_adamw(other)),
        0.0,
    )
    data_parallel(other, zero, **SMALL)
    for step in range(4):
        wrapped(batch(step)).square().mean().backward()
        checkpoint(
            other, batch(step).requires_grad_(), use_reentrant=reentrant
        ).square().mean().backward()
        optim.step()
        optim.zero_grad()
        worst = max(
            worst, (flatten(one.parameters()) - flatten(other.parameters())).abs().max().item()
        )
    return worst, replicas(other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_module_may_be_recomputed_as_a_whole(reentrant):
    for worst, same in run(2, wholly_recomputed, reentrant):
        assert worst < 1e-12 and same


def scheduled():
    model = network()
    zero = sharded(one_adamw(model))
    data_parallel(model, zero, **SMALL)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            model(batch(step)).square().mean().backward()
            scheduler.step()
    return [str(w.message) for w in warned], zero.param_groups[0]["lr"]


def test_a_scheduler_does_not_miss_the_step_that_is_left_out():
    for warned, lr in run(2, scheduled):
        assert not warned and lr == 1e-2 / 8


def left_after_an_error():
    """One rank leaves the block by an exception; the other is not in one, and waits for nobody."""
    model = network()
    handle = data_parallel(model, zero := sharded(one_adamw(model)), **SMALL)

    def go():
        with handle if dist.get_rank() == 1 else contextlib.nullcontext():
            for step in range(3):
                model(batch(step)).square().mean().backward()
            if dist.get_rank() == 1:
                raise KeyError("in the loop")

    return caught(go), not zero.driver.steps_in_backward, caught(lambda: [model(batch(9))])


def test_the_block_ends_at_once_on_a_rank_that_raises_in_it():
    assert run(2, left_after_an_error, timeout=30) == [
        (None, False, None),
        ("KeyError: 'in the loop'", True, None),
    ]


def called_twice():
    model = Recomputed(True)
    data_parallel(model, sharded(one_adamw(model)), **SMALL)

    def go():
        model(batch(0)).sum().backward()
        (model(batch(0)) + model(batch(1))).sum().backward()

    return caught(go)


def test_what_is_recomputed_twice_is_refused():
    for message in run(2, called_twice):
        assert "two gradients in one backward" in message, message


def test_double_backward_is_refused():
    for message in run(2, twice_differentiated):
        assert message.startswith("RuntimeError") and "create_graph=True" in message, message
    for message in run(2, differentiated_by_one, timeout=30):
        assert "create_graph=True" in message, message


def long():
    model = network()
    zero = sharded(muon_adamw(model))
    data_parallel(model, zero, interleaved=True, **SMALL)
    for i in range(300):
        model(batch(i)).square().mean().backward()
    return replicas(model)


@pytest.mark.usefixtures("way")
def test_hundreds_of_iterations_without_a_hang():
    assert all(run(3, long, timeout=90))


def set_by_hand():
    """A first step with gradients that were set by hand, and one after backward."""
    torch.manual_seed(0)
    model, plain = network(), network()
    data_parallel(model, zero := sharded(model.parameters()))
    optimizer = AdamW(plain.parameters(), lr=1e-2)
    for p in (*model.parameters(), *plain.parameters()):
        p.grad = torch.ones_like(p)
    zero.step()
    optimizer.step()
    return largest_gap(flatten(model), flatten(plain))


def test_gradients_that_were_set_by_hand_are_stepped_before_any_backward():
    assert max(run(2, set_by_hand)) < 1e-12
