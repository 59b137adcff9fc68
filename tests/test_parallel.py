"""`data_parallel` trains as DDP does, whatever is asked of it in between."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten, network
from common.models import Output, normed
from common.modes import SMALL
from common.parallel_training import batch, one_adamw, replicas, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.stepped_gradients import SteppedGradient
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


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


def iterate(models, optimizers, steps):
    for i in steps:
        for model in models:
            model(batch(i)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def moved(early):
    """Bring the state from an unsharded AdamW and back to one, in the middle."""
    one, other = network(), network()
    wrapped, optim = DDP(one), AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
    iterate([wrapped], [optim], range(3))
    other.load_state_dict(one.state_dict())
    zero = sharded(one_adamw(other))
    data_parallel(other, zero, interleaved=early, hidden=early, **SMALL)
    first = copy.deepcopy(optim.state_dict())
    zero.load_state_dict(copy.deepcopy(first))
    iterate([wrapped, other], [optim], range(3, 6))
    # while parameters are on their way, and the buckets are planned
    zero.load_state_dict(copy.deepcopy(optim.state_dict()))
    iterate([wrapped, other], [optim], range(6, 9))
    zero.consolidate_state_dict(to=None)
    third = network()
    third.load_state_dict(other.state_dict())
    plain = AdamW(third.parameters(), lr=1e-2, weight_decay=0.1)
    plain.load_state_dict(zero.state_dict())
    again = DDP(third)
    iterate([wrapped, other, again], [optim, plain], range(9, 11))
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


def copied(early):
    """Train a copy of a model that is trained, made while its parameters may be on their way."""
    models, optimizers = [network()], []
    for i in (0, 3):
        optimizers.append(sharded(one_adamw(models[-1])))
        data_parallel(models[-1], optimizers[-1], interleaved=early, hidden=early, **SMALL)
        iterate(models, optimizers, range(i, i + 3))
        models.append(copy.deepcopy(models[-1]))
    one = network()
    wrapped = DDP(one)
    iterate([wrapped], [AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)], range(3))
    iterate([wrapped], [AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)], range(3, 6))
    return float((flatten(one.parameters()) - flatten(models[1].parameters())).abs().max())


def copied_both():
    return copied(False), copied(True)


def test_a_copy_of_a_trained_model_is_trained_as_any_other():
    for rank in run(2, copied_both):
        assert max(rank) < 1e-9


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


def idle_for_long(early, to_none):
    """Rank 0 has no backward in two iterations running, and each iteration has a rate of its own."""
    one, other = network(), network()
    wrapped, optim = DDP(one), SGD(one.parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(other.parameters(), SGD, lr=0.1)
    data_parallel(other, zero, interleaved=early, find_unused_parameters=True, **SMALL)
    for i in range(6):
        works = dist.get_rank() or i in (1, 4)
        (wrapped(batch(i)).square().mean() * bool(works)).backward()
        loss = other(batch(i)).square().mean()
        if works:
            loss.backward()
        for optimizer in (optim, zero):
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            optimizer.param_groups[0]["lr"] *= 0.9
    return float((flatten(one.parameters()) - flatten(other.parameters())).abs().max())


def idle_for_long_in_all_ways():
    return [idle_for_long(early, to_none) for early in (False, True) for to_none in (True, False)]


def test_a_rank_without_any_gradient_takes_part_in_steps_that_follow_each_other():
    for worst in run(2, idle_for_long_in_all_ways, timeout=60):
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


def untouched(by_params=False):
    """Differentiate by an input, or by parameters with hooks, which leaves all gradients alone that
    have added up."""
    model = network()
    for p in model.parameters() if by_params else ():
        p.register_post_accumulate_grad_hook(lambda p: None)
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
    torch.autograd.grad(model(x).sum(), [x, *model.parameters()] if by_params else x)
    found = [torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), summed, strict=True)]
    return found, torch.equal(before, flatten(model.parameters())), zero.driver.steps_in_backward


def test_autograd_grad_leaves_gradients_alone():
    for by_params in (False, True):
        for found, still, driven in run(2, untouched, by_params, timeout=60):
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


class Buffered(nn.Module):
    """A linear layer, with buffers that each forward changes."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(12, 4).double()
        flat = torch.arange(16.0) + dist.get_rank()
        views = {
            "views": (flat, flat[:8], flat.view(4, 4)[1:3]),
            "transposed": (flat.view(4, 4).t(), flat[::2], flat),
            "conjugated": (torch.polar(flat, flat).conj(), torch.polar(flat, flat)),
            "negated": (torch.polar(flat, flat).conj().imag,),
        }
        for i, view in enumerate(views[kind]):
            self.register_buffer(f"view{i}", view)

    def forward(self, x):
        self.view0.add_(1 + dist.get_rank())
        return self.inner(x)


@pytest.mark.parametrize("kind", ["views", "transposed", "conjugated", "negated"])
def test_buffers_that_are_views_are_those_of_ddp(kind):
    def training():
        one, other = Buffered(kind), Buffered(kind)
        wrapped, optim = DDP(one), AdamW(one.parameters(), lr=1e-2)
        zero = sharded(one_adamw(other))
        data_parallel(other, zero, **SMALL)
        for i in range(3):
            for call, optimizer in ((wrapped, optim), (other, zero)):
                optimizer.zero_grad()
                call(batch(i)).square().mean().backward()
                optimizer.step()
        return [
            torch.equal(b.resolve_conj(), a.resolve_conj())
            for a, b in zip(one.buffers(), other.buffers(), strict=True)
        ]

    assert all(all(found) for found in run(2, training))


def test_buffers_that_share_memory_are_averaged_once():
    def averaged():
        model = nn.Linear(12, 4).double()
        flat = torch.full((8,), 2.0 * dist.get_rank())
        model.register_buffer("whole", flat)
        model.register_buffer("part", flat[2:6])
        data_parallel(model, sharded(one_adamw(model)), buffers="average")
        flat.fill_(2.0 * dist.get_rank())  # they were the first rank's
        model(batch(0)).sum().backward()
        return flat.tolist()

    assert run(2, averaged) == [[1.0] * 8] * 2
