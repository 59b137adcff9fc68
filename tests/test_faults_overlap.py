"""Steps beside backward: reads of the host, unused parameters, a backward that fails, what is written between."""

import copy
import random
import threading
import warnings
from functools import partialmethod
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten
from common.overlapping import (
    HIDDEN,
    MODES,
    Blocks,
    Sums,
    attach,
    backward_of,
    data,
    plainly,
    trained,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.rules import ELEMENTWISE

# ---- M9: reads of the host ----


def reads_of_the_host(mode):
    """Count what a step with a scaler reads from the device: the scale, and whether all is finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module, counts, real = (
        Blocks(),
        {},
        {
            name: getattr(torch.Tensor, name)
            for name in ("item", "tolist", "__bool__", "__float__", "__int__")
        },
    )
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
    model, _ = attach(mode, module, zero, scaler=scaler)

    def counting(name, tensor):
        counts[name] = counts.get(name, 0) + 1
        return real[name](tensor)

    for step in range(5):
        if step >= 3:
            for name in real:
                setattr(
                    torch.Tensor,
                    name,
                    partialmethod(lambda tensor, name: counting(name, tensor), name),
                )  # in this process alone
        loss = scaler.scale(plain_loss(model, step))
        loss.backward()
        for name in real:
            setattr(torch.Tensor, name, real[name])
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    return counts, len(zero.shards[0].buckets)


def plain_loss(model, step):
    return model(data(step)).square().mean()


@pytest.mark.parametrize("mode", ["overlap", "parallel", "parallel hidden"])
def test_M9_a_scale_is_read_once_a_step(mode):
    """In two steps, of many buckets."""
    for counts, buckets in run(2, reads_of_the_host, mode):
        assert buckets > 3 and counts == {"item": 2, "__bool__": 2}


# ---- find_unused_parameters: one vector for all ----


def look_for_unused(mode, module, zero, group):
    """Give the model to call, and what steps inside its backward."""
    interleaved = "interleaved" in mode
    looks = {"bucket_cap_mb": 0.0005, "find_unused_parameters": True}
    if mode.startswith("parallel"):
        return module, data_parallel(module, zero, interleaved=interleaved, **looks)
    model = DDP(module, process_group=group, **looks)
    return model, overlap(model, zero, interleaved=interleaved)


def asked(mode):
    """Note what an iteration sends, and how many reductions had started when the host read which
    parameters have a gradient."""
    group, module, reads = record(), Blocks(), []
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=0.05)
    model, handle = look_for_unused(mode, module, zero, group)
    uses = [(0, 1, 2, 3, 4), (0, 2, 4), (1 + dist.get_rank(), 4), (4, 0), (3,), (0, 4)]
    read, found = torch.Tensor.tolist, []
    for layers in uses:
        with group.recording() as log:

            def tolist(tensor):
                if tensor.dtype == torch.float32:
                    reads.append(sum(e.kind == "reduce_scatter" for e in log.events))
                return read(tensor)

            torch.Tensor.tolist = tolist  # in this process alone
            before = [p.detach().clone() for p in module.parameters()]
            model(data(0), layers).square().mean().backward()
            torch.Tensor.tolist = read
            if mode == "parallel":
                handle.wait()
        sent = [
            (e.kind, e.bytes) for e in log.events if e.parent is None and e.dtype == "float32"
        ]  # DDP's own flags are int32
        scatters = sum(e.kind == "reduce_scatter" for e in log.events)
        stepped = [
            not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)
        ]
        found.append((sent, scatters, list(reads), stepped))
        reads.clear()
    return found


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_find_unused_asks_once_for_all_buckets_when_the_last_has_arrived(mode):
    ranks = run(2, asked, mode)
    assert [sent for sent, *_ in ranks[0]] == [sent for sent, *_ in ranks[1]]
    for found in ranks:
        wanted = [
            {0, 1, 2, 3, 4},
            {0, 2, 4},
            {1, 2, 4},
            {0, 4},
            {3},
            {0, 4},
        ]  # layers that are stepped: used on some rank
        for (sent, scatters, reads, stepped), layers in zip(found, wanted, strict=True):
            assert sent == [("all_reduce", 10 * 4)] and reads == [scatters] and scatters >= 3
            assert {i // 2 for i, moved in enumerate(stepped) if moved} == layers


@pytest.mark.parametrize("mode", ["overlap-interleaved", "parallel-interleaved"])
def test_find_unused_asks_with_each_bucket_where_it_is_stepped_before_the_last_has_arrived(mode):
    for found in run(2, asked, mode):
        for sent, scatters, _, stepped in found[3:]:  # when buckets are known
            assert (
                len(sent) == scatters >= 3
                and sum(size for _, size in sent) == 10 * 4
                and all(stepped[i] == stepped[i + 1] for i in range(0, 10, 2))
            )
        assert [{i // 2 for i, moved in enumerate(stepped) if moved} for *_, stepped in found] == [
            {*range(5)},
            {0, 2, 4},
            {1, 2, 4},
            {0, 4},
            {3},
            {0, 4},
        ]


# ---- a backward that fails ----


class OutOfMemory(torch.autograd.Function):
    """Raises in forward or in backward, where it is told to."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            raise torch.OutOfMemoryError("no memory for activations")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            raise torch.OutOfMemoryError("no memory for gradients")
        return grad, None


class Hungry(Blocks):
    """Runs out of memory where it is told to."""

    def forward(self, x, where=""):
        return OutOfMemory.apply(super().forward(x), where)


def skipping(mode, where):
    """Skip a batch on which a rank runs out of memory, as loops of plain training do."""
    module = Hungry()
    model, handle = attach(mode, module, ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05))
    seen = []
    for step in range(4):
        error = caught_error(
            lambda: (
                model(data(step), where if step == 2 and dist.get_rank() == 1 else "")
                .square()
                .mean()
                .backward()
            )
        )
        if error:
            seen.append((step, *error))
        if error and error[0] == "RuntimeError":
            break
    handle.leave()
    return seen


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_a_batch_that_fails_cannot_be_skipped_and_every_rank_says_why(mode, where):
    """The rank that failed sees its own error, and then that it cannot go on; the others see which
    rank failed, and with what."""
    others, mine = run(2, skipping, mode, where, timeout=60)
    assert [(step, kind) for step, kind, _ in others] == [
        (2, "RuntimeError")
    ] and "rank 1" in others[0][2]
    if where == "forward":
        assert "OutOfMemoryError" in others[0][2]
    assert mine[0][:2] == (2, "OutOfMemoryError") and mine[1][:2] == (3, "RuntimeError")


@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_a_backward_that_fails_does_not_wait_in_a_destructor(mode, monkeypatch):
    """Ranks are told of it in a thread of its own, which the next forward waits for."""
    threads = []
    monkeypatch.setattr(
        import_module("zero_nb.backward.watch"),
        "fail",
        lambda groups, error: threads.append((threading.current_thread(), str(error))),
    )
    with simulate(2) as group:
        module = Hungry()
        model, _ = attach(
            mode, module, ZeroRedundancyOptimizer(module.parameters(), SGD, group, lr=0.05), group
        )
        x = torch.ones(1, 6, dtype=torch.float64)
        model(x).sum().backward()
        with pytest.raises(torch.OutOfMemoryError, match="gradients"):
            model(x, "backward").sum().backward()
        caught_error(lambda: model(x))
    tellers = [thread for thread, words in threads if "did not come to its end; look" in words]
    assert tellers and not any(
        thread is threading.main_thread() or thread.is_alive() for thread in tellers
    )


# ---- what the table of readers and writers shows ----


def between(mode, when):
    """Set the learning rate by hand where many loops do: before forward, before step, after step;
    give the error, and how far the parameters went."""
    module, zero, model, handle = trained(mode)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.5) if when == "scheduler" else None
    error = None
    for step in range(3):
        if when == "before forward":
            zero.param_groups[0]["lr"] = 2.0**-step
        backward_of(model)
        if when == "before step":
            zero.param_groups[0]["lr"] = 2.0**-step
        error = error or caught_error(zero.step)
        if when == "after step":
            zero.param_groups[0]["lr"] = 2.0**-step
        if scheduler:
            scheduler.step()
        zero.zero_grad()
    handle.wait()
    return error, flatten(module)[0].item()


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_options_that_are_changed_between_backward_and_step_are_an_error(mode):
    """The step that `backward` took did not see them: it would be that of the iteration before, silently."""
    cases = ["before forward", "before step", "after step", "scheduler"]
    for (_, first), (late, _), (_, after), (_, scheduled) in run(
        2, lambda: [between(mode, when) for when in cases]
    ):
        assert (
            first == 1 - (1 + 0.5 + 0.25)
            and after == 1 - (0.125 + 1 + 0.5)
            and scheduled == 1 - 0.125 * 1.75
        )
        assert late and late[0] == "RuntimeError" and "lr changed after backward()" in late[1]


def written_in_backward(mode):
    """Write the learning rate in a hook on the gradient that comes last; give the error of backward."""
    module = Blocks()
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
    model, _ = attach(mode, module, zero)
    for step in range(3):  # in the first ones, nothing may be stepped before backward is over
        plain_loss(model, step).backward()
        zero.step()
        zero.zero_grad()
    first = next(module.parameters())
    first.register_hook(lambda gradient: zero.param_groups[0].update(lr=0.01))
    return caught_error(lambda: plain_loss(model, 3).backward())


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_options_that_are_written_while_backward_runs_are_an_error(mode):
    """Some buckets may have been stepped with the old ones, and the new ones would be lost."""
    for kind, words in run(2, written_in_backward, mode):
        assert kind == "RuntimeError"
        assert "lr changed while the step was taken" in words


def left_out(cap, before):
    """Leave out a layer after some iterations; give the error."""
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x, count):
            for layer in self.layers[3 - count :]:
                x = layer(x)
            return x

    model = DDP(Some(), bucket_cap_mb=cap)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    overlap(model, zero)
    for count in (3,) * before + (2,):
        error = caught_error(lambda count=count: model(torch.ones(1, 3), count).sum().backward())
        error = error or caught_error(zero.step)
        zero.zero_grad()
    return error


@pytest.mark.parametrize(("cap", "before"), [(25, 0), (25, 3), (1e-6, 0), (1e-6, 3)])
def test_a_layer_that_is_left_out_is_an_error_that_names_ddps_option(cap, before):
    for kind, words in run(2, left_out, cap, before):
        assert kind in ("RuntimeError", "ValueError")
        assert "find_unused_parameters=True" in words


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_a_learning_rate_in_a_tensor_may_be_changed_after_step(mode):
    def both():
        module, found = Sums(torch.float32), []
        zero = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, lr=torch.tensor(0.125), foreach=False
        )
        model, _ = attach(mode, module, zero)
        for when in ("after", "between"):
            backward_of(model)
            if when == "between":
                zero.param_groups[0]["lr"].fill_(0.25)
            found.append(caught_error(zero.step))
            zero.param_groups[0]["lr"].fill_(0.5)
        return found

    for after, between_them in run(2, both):
        assert after is None and between_them and "lr changed" in between_them[1]


class Dropping(nn.Module):
    """Draws random numbers in forward, and again where a part is computed again in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (
            nn.Linear(6, 8, dtype=torch.float64),
            nn.Linear(8, 2, dtype=torch.float64),
        )
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def forward(self, x):
        x = checkpoint(
            lambda x: nn.functional.dropout(self.first(x).tanh(), 0.5), x, use_reentrant=False
        )
        return self.last(nn.functional.dropout(self.norm(x), 0.5))


def drawn(mode):
    """Train with random numbers; give the differences from plain DDP, of parameters and buffers,
    and whether as many numbers were drawn."""
    found = []
    for way in ("plain", mode):
        module = Dropping()
        torch.manual_seed(7 + dist.get_rank())
        random.seed(7)
        if way == "plain":
            model, optimizer = DDP(module), SGD(module.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1, momentum=0.9)
            model, _ = attach(way, module, optimizer)
        for step in range(4):
            plainly(model, step)
            optimizer.step()
            optimizer.zero_grad()
        if way != "plain":
            optimizer.wait_for_driver()
        found.append(
            (
                flatten(module),
                torch.cat([b.double().flatten() for b in module.buffers()]),
                torch.get_rng_state(),
                random.getstate(),
            )
        )
    (one, ones, *theirs), (other, others, *here) = found
    return (
        (one - other).abs().max().item(),
        (ones - others).abs().max().item(),
        torch.equal(theirs[0], here[0]) and theirs[1] == here[1],
    )


@pytest.mark.parametrize("mode", ["step", *MODES, *HIDDEN])
def test_random_numbers_and_buffers_are_those_of_ddp(mode):
    for params, buffers, same in run(2, drawn, mode):
        assert params < 1e-12 and buffers < 1e-12 and same


def saved_between(mode):
    """Save between backward and step, and after step, beside what plain training saves after its step."""
    plain, module = DDP(Blocks()), Blocks()
    optimizer, zero = (
        kind(m.parameters(), *more, lr=0.05, momentum=0.9)
        for kind, m, more in ((SGD, plain, ()), (ZeroRedundancyOptimizer, module, (SGD,)))
    )
    model, _ = attach(mode, module, zero)
    for step in range(4):
        for m in (plain, model):
            plainly(m, step)
        zero.consolidate_state_dict(to=None)
        between_them = copy.deepcopy((module.state_dict(), zero.state_dict()))
        for o in (optimizer, zero):
            o.step()
        optimizer.zero_grad()
    zero.consolidate_state_dict(to=None)
    after = module.state_dict(), zero.state_dict()
    theirs = plain.module.state_dict(), optimizer.state_dict()

    def far(one, other):
        states = [
            (s["momentum_buffer"], other[1]["state"][i]["momentum_buffer"])
            for i, s in one[1]["state"].items()
        ]
        return max(
            (a - b).abs().max().item()
            for a, b in [*states, *((one[0][k], other[0][k]) for k in one[0])]
        )

    return far(between_them, after), far(after, theirs)


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_what_is_saved_between_backward_and_step_is_the_step_whole(mode):
    for between_them, theirs in run(2, saved_between, mode):
        assert between_them == 0.0 and theirs < 1e-12


def hooked(mode):
    """Clip in a hook of the optimizer's, before the step, and count in one after it."""
    module, zero, model, handle = trained(mode)
    counts = []
    zero.register_step_post_hook(lambda *_: counts.append(flatten(module)[0].item()))
    backward_of(model)
    zero.step()
    pre = zero.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(module.parameters(), 1.0) and None
    )
    backward_of(model)
    error = caught_error(zero.step)
    pre.remove()
    handle.leave()
    return counts, error


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_hooks_of_the_optimizers_step_run_after_it(mode):
    for counts, error in run(2, hooked, mode):
        assert counts == [0.875] and error and "max_grad_norm=" in error[1]


# ---- what a first step shows ----


class CountsCalls(torch.optim.SGD):
    """Counts the calls of its step in its groups; `where_used`: only in groups that have gradients."""

    where_used = False

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["calls"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            used = any(p.grad is not None for p in group["params"])
            group["calls"] += used or not self.where_used
        return super().step(closure)


class CountsWhereUsed(CountsCalls):
    where_used = True


def skipped_first(mode, infinite):
    """Count the calls of a class whose first steps a scaler skips."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    zero = ZeroRedundancyOptimizer(
        module.parameters(), CountsCalls, lr=0.1, shard="whole", bucket_cap_mb=0.01
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if mode == "overlap":
        model = DDP(module, bucket_cap_mb=0.01)
        overlap(model, zero, scaler=scaler)
    else:
        model = module
        data_parallel(module, zero, scaler=scaler, bucket_cap_mb=0.01)
    for step in range(6):
        data = torch.ones(4, 64) * (float("inf") if step < infinite else 1.0)
        scaler.scale(model(data).square().mean()).backward()
        scaler.step(zero)
        scaler.update()
    return zero.local.by_class[CountsCalls].param_groups[0]["calls"]


@pytest.mark.parametrize("infinite", [0, 1, 3])
@pytest.mark.parametrize("mode", ["overlap", "data_parallel"])
def test_a_class_that_counts_is_seen_after_steps_that_a_scaler_skipped(mode, infinite):
    assert run(2, skipped_first, mode, infinite) == [6 - infinite] * 2


def seen_by_one():
    """Step a class of which only one of two ranks owns something."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    params = list(module.parameters())
    groups = [{"params": params[:1], "optimizer_class": CountsWhereUsed}, {"params": params[1:]}]
    zero = ZeroRedundancyOptimizer(groups, SGD, lr=0.1, bucket_cap_mb=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = data_parallel(module, zero, interleaved=True, bucket_cap_mb=0.01)
        for _ in range(4):
            module(torch.ones(4, 64)).square().mean().backward()
            zero.step()
    return handle.engine.steps_per_bucket


def test_all_ranks_step_at_once_if_a_class_counts_on_one():
    assert run(2, seen_by_one) == [False] * 2


class FusedSGD(SGD):
    """A class that is not known, with the attribute that torch's clears in the first step."""

    def __init__(self, params, **options):
        super().__init__(params, fused=True, **options)


OF_ONE = [
    *((getattr(torch.optim, name), {}) for name in sorted(ELEMENTWISE | {"Adafactor"})),
    *((kind, {"fused": True}) for kind in (SGD, torch.optim.Adagrad, torch.optim.AdamW)),
    (FusedSGD, {}),
]


def stepped_by_one(mode, kind, options):
    """Train beside unsharded classes a parameter that one of two ranks owns, the only one of its
    class; give what differs, and whether buckets were stepped one by one."""
    module, plain = (Mixed().double() for _ in range(2))
    groups = [{"params": [module.scale], "optimizer_class": kind, "lr": 0.01, **options}]
    zero = ZeroRedundancyOptimizer(
        [*groups, {"params": module.matrices.parameters()}], torch.optim.Muon, lr=0.01
    )
    optimizers = [
        kind([plain.scale], lr=0.01, **options),
        torch.optim.Muon(plain.matrices.parameters(), lr=0.01),
    ]
    handle, model = attach_interleaved(mode, module, zero)
    for _ in range(4):
        for one, steps in ((model, [zero]), (plain, optimizers)):
            one(torch.ones(2, 16).double()).backward()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
    worst = float((flatten(module) - flatten(plain)).abs().max())
    return worst, handle.engine.steps_per_bucket


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, data):
        return self.matrices(data).square().mean() * self.scale.sum()


def attach_interleaved(mode, module, zero):
    if mode == "data_parallel":
        return data_parallel(module, zero, interleaved=True, bucket_cap_mb=0.001), module
    model = DDP(module, bucket_cap_mb=0.001)
    return overlap(model, zero, interleaved=True), model


def all_stepped_by_one(mode):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*counts its steps")
        return [stepped_by_one(mode, *case) for case in OF_ONE]


@pytest.mark.parametrize("mode", ["overlap", "data_parallel"])
def test_classes_of_which_one_rank_owns_nothing_step_bucket_by_bucket_on_all(mode):
    for rank in run(2, all_stepped_by_one, mode):
        wrong = [
            case
            for case, (worst, by_bucket) in zip(OF_ONE, rank, strict=True)
            if worst > 1e-9 or not by_bucket
        ]
        assert wrong == []


# ---- whose hook it is ----


def whose_hook():
    model = DDP(nn.Linear(4, 4))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    states = []

    def hook(state, bucket):
        states.append(state)
        return default_hooks.allreduce_hook(None, bucket)

    found = []
    for state in ("first", None):
        handle = overlap(model, zero, hook=hook, state=state)
        (registered, _), *_ = model._comm_hooks
        found.append(registered.overlap is handle)
        model(torch.ones(1, 4)).sum().backward()
        handle.detach()
        found.append(registered.overlap is None)
    return found, states


def test_a_hook_knows_its_overlap_and_no_state_of_an_earlier_one():
    assert run(2, whose_hook) == [([True] * 4, ["first", None])] * 2
