"""The step inside DDP's backward: what is refused, and ranks that fail."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from common.ddp_training import (
    CAP,
    Net,
    apart,
    backward,
    batch,
    network,
    sharded,
    twice,
    unsharded,
)
from common.modes import MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.backward.torch_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def wrapped_too_early():
    """Thaw a layer that was frozen when DDP was made."""
    model = network()
    model.last.requires_grad_(False)
    ours = DDP(model, bucket_cap_mb=CAP)
    zero = sharded("adamw", ours, False)
    overlap(ours, zero)
    for step in range(3):
        backward(ours, step)
    model.last.requires_grad_(True)
    error = caught_error(lambda: backward(ours, 3))
    return error, sum(len(optim.state) for optim in zero.local.by_class.values())


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_that_ddp_does_not_reduce_is_named_and_the_state_stays(size):
    for (kind, message), states in run(size, wrapped_too_early):
        assert (
            kind in ("ValueError", "RuntimeError")
            and "does not reduce its gradient" in message
            and states
        )


class Refusing(torch.autograd.Function):
    """Raises in backward on the last rank, at a step."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("no gradient here")
        return gradient, None


class Faulty(Net):
    """A model that fails where it is told to."""

    def forward(self, x, where=""):
        if where == "forward":
            raise ArithmeticError("no forward here")
        x = self.first(x).tanh()
        for i, layer in enumerate(self.middle):
            x = Refusing.apply(x + layer(x).tanh(), where == f"backward {i}")
        return self.last(x)


def failing_at(where, step, interleaved, nodes=False):
    """Let one rank fail; every rank's error, and how long it took to come."""
    torch.manual_seed(0)
    model = DDP(Faulty().double(), bucket_cap_mb=CAP)
    zero = sharded("sgd", model, False, process_group=two_level(2) if nodes else None)
    mine, now = dist.get_rank() == dist.get_world_size() - 1, 0

    def hook(state, bucket):
        if where == "hook" and mine and now == step:
            raise ArithmeticError("no hook here")
        return default_hooks.allreduce_hook(None, bucket)

    if where == "step":
        for optim in zero.local.by_class.values():
            optim.register_step_pre_hook(lambda *_: 1 / 0 if mine and now == step else None)
    overlap(model, zero, hook=hook if where == "hook" else None, interleaved=interleaved)
    begin = time.monotonic()
    try:
        for now in range(step + 3):
            model(batch(now), where if mine and now == step else "").square().mean().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin


FAULTS = [
    ("forward", "no forward here"),
    ("backward 3", "no gradient here"),
    ("backward 0", "no gradient here"),
    ("hook", "no hook here"),
    ("step", "division by zero"),
]


@pytest.mark.turns(5)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("where,word", FAULTS, ids=[where for where, _ in FAULTS])
def test_a_rank_that_fails_ends_all_of_them_with_an_error_that_names_it(where, word):
    """In the first iteration, in which state moves, and in a later one, while buckets arrive."""
    for size, *how in (
        (2, 0, False),
        (3, 1, True),
        (3, 4, True),
        (2, 4, False),
        (4, 0, True, True),
        (4, 4, False, True),
    ):
        found = run(size, failing_at, where, *how, timeout=60, group_timeout=30)
        assert word in found[-1][1], found
        for kind, message, seconds in found[:-1]:
            assert (
                kind in ("RuntimeError", "ZeroDivisionError")
                and f"rank {size - 1}" in message
                and seconds < 20
            ), found


def skipping(mode, size_of_nodes):
    """Skip the batches whose forward fails on all ranks; how far the model is from one that DDP trained so."""
    torch.manual_seed(0)
    groups = two_level(size_of_nodes) if size_of_nodes else None
    plain = DDP(Faulty().double())
    adamw = unsharded("adamw", plain, False)
    ours = MODES[mode].attach(
        Faulty().double(),
        lambda model: sharded("adamw", model, False, process_group=groups),
    )
    skipped = []
    for model, optimizer in ((plain, adamw), (ours.call, ours.optimizer)):
        for step in range(6):
            optimizer.zero_grad()
            where = "forward" if step in (0, 2, 3) else ""
            try:
                model(batch(step), where).square().mean().backward()
            except ArithmeticError:
                skipped.append(step)
                continue
            optimizer.step()
    pairs = zip(plain.parameters(), ours.call.parameters(), strict=True)
    return skipped, max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_fails_on_all_ranks_can_be_skipped(mode):
    for size, nodes in ((1, 0), (2, 0), (4, 2)):
        for skipped, gap in run(size, skipping, mode, nodes, timeout=60):
            assert skipped == [0, 2, 3] * 2 and gap < 1e-12, (size, skipped, gap)


def refusals():
    """Every argument that cannot work, with the answer to it."""
    model = DDP(network(), bucket_cap_mb=CAP)
    params, extra = list(model.parameters()), nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def zero(given=params, **more):
        return ZeroRedundancyOptimizer(given, SGD, lr=0.1, **more)

    taken, halves = zero(), (dist.new_group([0]), dist.new_group([1]))
    idle = dict.fromkeys(("step", "wait", "detach"), lambda *_: None)
    taken.attach(SimpleNamespace(steps_in_backward=True, **idle))
    hooked = DDP(network())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    ours, inner, mine = zero(), default_hooks.allreduce_hook, halves[dist.get_rank()]
    calls = [
        lambda: overlap(model.module, ours),
        lambda: overlap(model, SGD(params, lr=0.1)),
        lambda: overlap(model, ours, hook="mean"),
        lambda: overlap(model, ours, interleaved=True, max_grad_norm=1.0),
        lambda: overlap(model, ours, interleaved=True, scaler=torch.amp.GradScaler("cpu")),
        lambda: overlap(model, ours, lag=-1),
        lambda: overlap(model, ours, max_grad_norm=0),
        lambda: overlap(model, taken),
        lambda: overlap(model, zero(params[1:])),
        lambda: overlap(model, zero([*params, extra])),
        lambda: overlap(model, zero(process_group=mine)),
        lambda: overlap(hooked, zero(hooked.parameters())),
        lambda: overlap(model, ours, interleaved=dist.get_rank() == 0),
        lambda: overlap(model, ours, max_grad_norm=1.0 + dist.get_rank()),
        lambda: overlap(model, ours, hook=[twice, powerSGD_hook.powerSGD_hook][dist.get_rank()]),
        lambda: hook_with_zero_step(inner, model.module, ours),
        lambda: hook_with_zero_step_interleaved("mean", model, ours),
    ]
    found = [caught_error(call) for call in calls]
    assert (
        not ours.driver.steps_in_backward and caught_error(lambda: overlap(model, ours)) is None
    )  # nothing was left behind
    return found


REFUSED = [
    ("TypeError", "DistributedDataParallel, got Net"),
    ("TypeError", "zero_nb's"),
    ("TypeError", "'mean'"),
    ("ValueError", "interleaved=False"),
    ("ValueError", "interleaved=False"),
    ("ValueError", "-1"),
    ("ValueError", "above 0, got 0"),
    ("RuntimeError", "overlapped already"),
    ("ValueError", "first.weight of the model is not in the optimizer"),
    ("ValueError", "(3,) of the optimizer is not in the model"),
    ("ValueError", "make both with the same ranks"),
    ("RuntimeError", "a comm hook already, allreduce_hook"),
    ("ValueError", "disagree"),
    ("ValueError", "max_grad_norm=2.0"),
    ("ValueError", "by powerSGD_hook"),
    ("TypeError", "DistributedDataParallel, got Net"),
    ("TypeError", "'mean'"),
]


def test_what_cannot_work_is_refused_on_every_rank_and_leaves_nothing_behind():
    for rank in run(2, refusals):
        for (kind, word), found in zip(REFUSED, rank, strict=True):
            assert found and found[0] == kind and word in found[1], (word, found)


def left_to_others(how):
    """Give an optimizer what DDP is told to leave out, or to reduce later; and then what it may have."""
    model = network(torch.float32)  # all that DDP can delay
    names = ["last.weight", "last.bias"]
    options = {"bucket_cap_mb": CAP}
    if how == "ignored":
        DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    else:
        options["delay_all_reduce_named_params"] = [(n, model.get_parameter(n)) for n in names]
        options["param_to_hook_all_reduce"] = model.first.weight
        options["bucket_cap_mb"] = 1  # torch 2.11 takes it for a number of bytes here, a whole one
    ours = DDP(model, **options)
    found = caught_error(lambda: overlap(ours, sharded("sgd", ours, False)))
    rest = [p for name, p in model.named_parameters() if name not in names]
    overlap(ours, ZeroRedundancyOptimizer(rest, SGD, lr=0.1))
    backward(ours, 0)
    return found, [p.grad is not None for p in model.last.parameters()]


@pytest.mark.parametrize("how", ["ignored", "delayed"])
def test_what_ddp_leaves_out_is_refused_when_the_step_is_overlapped(how):
    for (kind, message), others in run(2, left_to_others, how):
        assert (
            kind == "ValueError" and "last.weight is in the optimizer, and DDP ignores" in message
        )
        assert others == [True, True]


def misuse():
    """Call step() where it cannot mean what it says."""
    model = DDP(network(), bucket_cap_mb=CAP)
    zero = sharded("adamw", model, False)
    hook = hook_with_zero_step(default_hooks.allreduce_hook, model, zero)
    backward(model, 0)
    found = [caught_error(zero.step)]  # the hook was not registered
    zero.zero_grad()
    model.register_comm_hook(None, hook)
    for step in range(2):
        backward(model, step)
    found.append(caught_error(zero.step))  # two steps
    with model.no_sync():
        backward(model, 2)
    found += [
        caught_error(zero.step),
        caught_error(lambda: zero.step(grad_scaler=None)),
        caught_error(lambda: zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})),
    ]
    backward(model, 3)
    zero.param_groups[0]["lr"] *= 2
    found.append(caught_error(zero.step))  # after which the next one has nothing to say of this one
    backward(model, 4)
    return [*found, caught_error(zero.step), apart(model)]


def test_a_step_that_does_not_mean_what_it_says_is_an_error():
    words = [
        ("RuntimeError", "register the hook"),
        ("RuntimeError", "backward() has taken 2 steps"),
        ("RuntimeError", "no_sync"),
        ("TypeError", "grad_scaler"),
        ("RuntimeError", "while the step is overlapped"),
        ("RuntimeError", "lr changed after backward"),
    ]
    for rank in run(2, misuse):
        assert rank[6:] == [None, 0.0]
        for (kind, word), found in zip(words, rank[:6], strict=True):
            assert found and found[0] == kind and word in found[1], (word, found)


def test_a_layer_with_sparse_gradients_is_refused_on_every_rank():
    def attached():
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        ddp = DDP(model)
        said = caught_error(lambda: overlap(ddp, zero))
        model[0].weight.requires_grad_(False)
        wrapped = DDP(model)
        with overlap(wrapped, zero):
            wrapped(torch.tensor([1, 2])).sum().backward()
        return said, apart(model)

    for (kind, text), gap in run(2, attached):
        assert kind == "ValueError" and text.startswith("0 has sparse gradients") and gap == 0
        assert "use sparse=False in this layer" in text


def wrong_things():
    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    plain = SGD(model.parameters(), lr=0.1)
    calls = (
        lambda: overlap(model, optimizer=zero),
        lambda: overlap(DDP(model), optimizer=plain),
        lambda: ZeroRedundancyOptimizer(model.parameters(), plain),
    )
    return [caught_error(call) for call in calls]


def test_what_is_of_the_wrong_kind_is_called_as_the_user_calls_it():
    words = (
        "ddp must be a DistributedDataParallel, got Linear; wrap the module in DDP, or call data_par",
        "optimizer must be zero_nb's ZeroRedundancyOptimizer, got SGD",
        "optimizer_class must be a class such as torch.optim.AdamW, got an object of SGD; pass its op",
    )
    for found in run(2, wrong_things):
        assert [kind for kind, _ in found] == ["TypeError"] * 3
        for (_, message), start in zip(found, words, strict=True):
            assert message.startswith(start) and "\n" not in message
