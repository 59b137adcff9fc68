"""Defects of torch's classes beside ours: the same scenario on both, so that a test here fails on
the day torch repairs one."""

import copy
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught
from common.devices import cuda
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon

from zero_nb.backward.torch_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.join.join import Join as OurJoin
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def ones(params):
    for p in params:
        p.grad = torch.ones_like(p) if p.requires_grad else None


def held(zero):
    return sum(v.numel() for s in zero.optim.state.values() for v in s.values() if v.dim())


def both(f, size=2, **options):
    """Run one scenario with torch's class and with ours; every rank's answer."""
    return tuple(run(size, f, kind, **options) for kind in (TorchZero, ZeroRedundancyOptimizer))


# ---- 1. a generator inside a group dict ----


def generator(kind):
    model = network()
    zero = kind([{"params": (p for p in model.parameters())}], SGD, lr=1.0)
    before = model[0].bias.detach().clone()
    ones(model.parameters())
    zero.step()
    return (before - model[0].bias).tolist(), len(zero.param_groups[0]["params"])


def test_1_a_generator_in_a_group_trains():
    torchs, ours = both(generator)
    assert (
        torchs == [([0.0] * 8, 0)] * 2
    )  # used up while it is checked: nothing trains, and nobody says so
    for change, count in ours:
        assert change == pytest.approx([1.0] * 8) and count == 4


# ---- 2 and 3. overlap ----

HOOKS = {
    TorchZero: (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved),
    ZeroRedundancyOptimizer: (hook_with_zero_step, hook_with_zero_step_interleaved),
}


def overlapped(kind, optimizer_class, interleaved, ranks=(0, 1), groups=1, pretend=False):
    """Give, for each of four iterations (two, where torch's may hang in the third), whether it has
    changed all parameters; or what was said."""
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return None
    model = DDP(network(), process_group=group, bucket_cap_mb=1e-4)
    params = list(model.parameters())
    given = params if groups == 1 else [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    if pretend:
        dist.get_backend = lambda *_: "nccl"  # torch's hook asks for nothing else of NCCL
    changed = []

    def trained():
        zero = kind(given, optimizer_class, group, overlap_with_ddp=True, lr=0.1)
        model.register_comm_hook(None, HOOKS[kind][interleaved](allreduce_hook, model, zero))
        for _ in range(2 if pretend else 4):
            before = [p.detach().clone() for p in params]
            model(torch.ones(2, 6)).square().mean().backward()
            zero.step()
            zero.zero_grad()
            changed.append(all(not torch.equal(a, b) for a, b in zip(before, params, strict=True)))

    return caught(trained) or changed


@pytest.mark.parametrize("interleaved", [False, True])
def test_2_overlap_trains_a_subgroup(interleaved):
    refused = run(
        4, overlapped, TorchZero, _FunctionalSGD, interleaved, (2, 3)
    )  # where it is not, the third backward never ends
    ours = run(4, overlapped, ZeroRedundancyOptimizer, SGD, interleaved, (2, 3))
    assert all("may meet hangs" in rank for rank in refused[2:])
    assert ours == [None, None, [True] * 4, [True] * 4]


@pytest.mark.parametrize("interleaved", [False, True])
def test_3_overlap_steps_from_the_first_iteration_on_gloo_and_any_class(interleaved):
    refused = run(2, overlapped, TorchZero, _FunctionalSGD, interleaved)
    assert all("may meet hangs" in rank for rank in refused)
    late = run(2, overlapped, TorchZero, _FunctionalSGD, interleaved, pretend=True, timeout=60)
    assert late == [[False, False]] * 2
    assert run(2, overlapped, ZeroRedundancyOptimizer, SGD, interleaved) == [[True] * 4] * 2


def test_3_overlap_takes_plain_classes_and_several_groups():
    """Torch's, which never comes so far on gloo, asks for a functional class and one group."""
    for kind, groups in ((AdamW, 1), (SGD, 2)):
        assert (
            run(2, overlapped, ZeroRedundancyOptimizer, kind, False, groups=groups)
            == [[True] * 4] * 2
        )


# ---- 4. Join with nothing but the optimizer, and what it leaves behind ----


def uneven(kind):
    group, p = dist.new_group(timeout=timedelta(seconds=3)), nn.Parameter(torch.zeros(4))
    zero = kind([p], SGD, group, lr=1.0)
    ones([p])

    def join():
        with Join([zero]):
            for _ in range(1 + dist.get_rank()):
                zero.step()

    message = caught(join)
    dist.barrier()
    return message is None and p.tolist(), zero._join_config.enable


def test_4_an_optimizer_may_join_alone_and_keeps_nothing_of_it():
    torchs, ours = both(uneven)
    assert [p for p, _ in torchs] == [
        False,
        False,
    ]  # a joined rank's step says that it has not joined
    assert all(left for _, left in torchs)  # two more collectives at every step, for ever
    assert ours == [([-2.0] * 4, False)] * 2


def joined(kinds, first="ddp", optimizer=None, lengths=(1, 4), group=None):
    """Train on uneven inputs with a Join and an optimizer, the optimizer first or second among the joinables."""
    join, zero = kinds
    model = DDP(network(), process_group=group)
    optimizer = (optimizer or zero)(model.parameters(), AdamW, group, lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    joinables = [j for j in (model, optimizer) if isinstance(j, Joinable)]
    with join(joinables if first == "ddp" else joinables[::-1]):
        for _ in range(lengths[dist.get_rank()]):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=data)).square().mean().backward()
            optimizer.step()
    return model, optimizer


JOINS = (Join, TorchZero), (OurJoin, ZeroRedundancyOptimizer)


def parameters(kinds, first, optimizer=None):
    group = dist.new_group(timeout=timedelta(seconds=3))
    try:
        model, _ = joined(kinds, first, optimizer, group=group)
    except RuntimeError:
        return None
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def unsharded(params, kind, group, **options):
    return kind(params, **options)


def test_4_joinables_may_come_in_any_order():
    torchs, ours = (run(2, parameters, kinds, "zero") for kinds in JOINS)
    assert None in torchs  # collectives of the two are not in the order of the ranks with data
    assert ours[0] == ours[1] == run(2, parameters, JOINS[1], "ddp")[0]


def test_4_a_rank_without_data_steps_with_the_gradients_of_the_others():
    wanted = run(2, parameters, (Join, None), "ddp", unsharded)[
        1
    ]  # whose last joiner has stepped all parameters itself
    torchs, ours = (run(2, parameters, kinds, "ddp")[0] for kinds in JOINS)
    assert ours == pytest.approx(wanted, abs=1e-6)
    assert torchs != pytest.approx(
        wanted, abs=1e-4
    )  # its part of the parameters is stepped with its own last gradients


def afterwards(kinds):
    """Count what an evaluation sends after the block, and see whether rank 0 may do one alone."""
    group = record(dist.new_group(timeout=timedelta(seconds=3)))
    model, _ = joined(kinds, group=group)
    model.require_forward_param_sync = False
    with torch.no_grad(), group.recording() as log:
        if dist.get_rank() == 0:
            model(torch.ones(1, 6))
    return len(log)


def test_4_nothing_is_sent_once_the_block_has_ended():
    torchs, ours = (run(2, afterwards, kinds) for kinds in JOINS)
    assert torchs == [2, 0]  # which the other ranks meet with whatever they send next
    assert ours == [0, 0]


class Counter(Joinable):
    """Sends one number in an iteration."""

    def __init__(self):
        super().__init__()

    def send(self):
        dist.all_reduce(torch.ones(1))

    def __call__(self):
        Join.notify_join_context(self)
        self.send()

    def join_hook(self, **kwargs):
        hook = JoinHook()
        hook.main_hook = self.send
        return hook

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)


def far_apart(kinds):
    counter, filters = Counter(), list(warnings.filters)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with kinds[0]([counter]):
            for _ in range(1005 * dist.get_rank()):
                counter()
        return (
            len([w for w in warned if "skew" in str(w.message)]),
            warnings.filters == before,
            len(filters),
        )


def test_4_warnings_come_once_and_keep_their_filters():
    torchs, ours = (run(2, far_apart, kinds) for kinds in JOINS)
    assert [same for _, same, _ in torchs] == [False, False] and [
        (n, same) for n, same, _ in ours
    ] == [(1, True), (0, True)]


# ---- 5. loading ----


def load_from_unsharded(kind):
    model = network()
    reference = AdamW(model.parameters())
    ones(model.parameters())
    reference.step()
    given = reference.state_dict()
    kept = copy.deepcopy(given)
    kind(model.parameters(), AdamW).load_state_dict(given)
    same = [
        given["state"][i] is not None and all(v.equal(kept["state"][i][k]) for k, v in s.items())
        for i, s in given["state"].items()
    ]
    return same, given["param_groups"] == kept["param_groups"]


def test_5_loading_leaves_the_callers_state_dict_alone():
    torchs, ours = both(load_from_unsharded)
    assert not any(
        all(same) for same, _ in torchs
    )  # what other ranks own becomes None, so that one dict cannot be loaded twice
    assert ours == [([True] * 4, True)] * 2


def load_wider(kind):
    """State of a float32 optimizer for bfloat16 parameters: a plain AdamW casts it."""
    wide, low = network(), network().bfloat16()
    reference = AdamW(wide.parameters())
    ones(wide.parameters())
    reference.step()
    zero, plain = kind(low.parameters(), AdamW), AdamW(low.parameters())
    for optimizer in (plain, zero):
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    dtypes = lambda optimizer: {
        str(v.dtype) for s in optimizer.state.values() for k, v in s.items() if k != "step"
    }
    return dtypes(plain), dtypes(zero.optim)


def test_5_loaded_state_has_the_parameters_dtype():
    torchs, ours = both(load_wider)
    assert torchs == [({"torch.bfloat16"}, {"torch.float32"})] * 2
    assert ours == [({"torch.bfloat16"}, {"torch.bfloat16"})] * 2


def saved_late(kind):
    """Consolidate, train on, and then save."""
    params = [nn.Parameter(torch.zeros(16, 16)) for _ in range(2)]
    zero = kind(params, AdamW)
    ones(params)
    zero.step()
    zero.consolidate_state_dict(to=0)
    zero.step()
    try:
        return [state["step"].item() for state in zero.state_dict()["state"].values()]
    except RuntimeError as error:
        return str(error)


def test_5_a_state_dict_is_of_one_step():
    torchs, ours = both(saved_late)
    assert torchs[0] == [2.0, 1.0]  # this rank's own part is no copy and has gone on
    assert all("after the last step" in message for message in ours)


def resume_on_the_gpu(kind):
    model = network().cuda()
    reference = AdamW(model.parameters(), fused=True)
    ones(model.parameters())
    reference.step()
    zero = kind(model.parameters(), AdamW, fused=True)
    zero.load_state_dict(reference.state_dict())
    ones(model.parameters())
    return caught(zero.step)


@cuda
def test_5_a_fused_optimizer_steps_on_the_gpu_after_loading():
    torchs, ours = both(resume_on_the_gpu, size=1, backend="cpu:gloo,cuda:nccl")
    assert torchs != [None]  # its step counters were put on the CPU
    assert ours == [None]


# ---- 6. a class that refuses some parameters ----


def refused(kind):
    group, start = dist.new_group(timeout=timedelta(seconds=3)), time.monotonic()
    weight, bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))

    def train():
        zero = kind([weight, bias], Muon, group)
        ones([weight, bias])
        zero.step()

    message = caught(train)
    waited = time.monotonic() - start
    dist.barrier()
    return message, waited, caught(lambda: dist.barrier(group))


def test_6_a_class_that_refuses_some_parameters_raises_on_all_ranks():
    torchs, ours = both(refused)
    (first, waited, broken), (second, _, _) = torchs  # the bias is rank 1's
    assert (
        "Muon only supports 2D" in second and "Muon" not in first and waited > 2 and broken
    )  # rank 0 waits until its group breaks
    for message, waited, broken in ours:
        assert "Muon only supports 2D" in message and waited < 3 and broken is None


# ---- 7. frozen parameters ----


def adapters(kind):
    """Step a frozen base and small trainable adapters, as in LoRA."""
    base = [nn.Parameter(torch.zeros(256, 16), requires_grad=False) for _ in range(3)]
    adapter = [nn.Parameter(torch.zeros(16, 16)) for _ in range(8)]
    zero = kind([*base, *adapter], AdamW)
    ones(adapter)
    sent = recorded(zero.step)
    return held(zero), sent


def recorded(step):
    """Count the elements that torch's broadcasts and sends of this rank carry."""
    sent, real = [], {name: getattr(dist, name) for name in ("broadcast", "isend")}

    def watch(name):
        def call(tensor, *args, **kwargs):
            sent.append(tensor.numel())
            return real[name](tensor, *args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, watch(name))
    try:
        step()
    finally:
        for name, f in real.items():
            setattr(dist, name, f)
    return sum(sent)


def test_7_frozen_parameters_are_neither_counted_nor_sent(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")  # sends are what is counted
    torchs, ours = both(adapters, size=4)
    trainable, everything = 8 * 256, 3 * 4096 + 8 * 256
    state = [s for s, _ in torchs]
    assert max(state) == 2 * trainable and sorted(state)[:3] == [
        0,
        0,
        0,
    ]  # three ranks hold a frozen matrix each, the fourth all of the state
    assert all(sent == everything for _, sent in torchs)
    state = [s for s, _ in ours]
    assert max(state) == min(state) == 2 * trainable / 4
    assert all(0 < sent <= trainable for _, sent in ours)


# ---- 8. names, mixed dtypes, torch.distributed.checkpoint ----


def named(kind):
    zero = kind(network().named_parameters(), SGD, lr=0.1)
    return zero.param_groups[0]["param_names"]


def test_8_named_parameters_are_taken():
    def torchs():
        return caught(lambda: named(TorchZero))

    assert all("TypeError" in message for message in run(2, torchs))
    assert (
        run(2, named, ZeroRedundancyOptimizer) == [["0.weight", "0.bias", "2.weight", "2.bias"]] * 2
    )


def mixed(kind):
    params = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
    ]

    def train():
        zero = kind(params, SGD, lr=1.0)
        ones(params)
        zero.step()

    return caught(train), [p.tolist() for p in params]


def test_8_mixed_dtypes_are_taken():
    torchs, ours = both(mixed)
    assert all("same dense type" in message for message, _ in torchs)
    assert ours == [(None, [[-1.0] * 3, [-1.0] * 5, [-1.0] * 2])] * 2


def checkpointed(kind):
    """Do what torch.distributed.checkpoint does to an optimizer, between zero_grad and the next backward."""
    model = network()
    zero = kind(model.parameters(), AdamW)
    ones(model.parameters())
    zero.step()
    zero.zero_grad()
    if kind is TorchZero:
        for rank in range(2):
            zero.consolidate_state_dict(rank)
    else:
        zero.consolidate_state_dict(None)
    message = caught(
        lambda: (
            sorted(get_optimizer_state_dict(model, zero)["state"])
            == ["0.bias", "0.weight", "2.bias", "2.weight"]
            or 1 / 0
        )
    )
    again = caught(lambda: get_optimizer_state_dict(model, zero))
    return message, again, {float(state["step"]) for state in zero.optim.state.values()}


def test_8_torch_distributed_checkpoint_reads_the_state_on_every_rank():
    torchs, ours = both(checkpointed)
    assert (
        "not been consolidated on this rank" in torchs[0][0] and torchs[1][0] is None
    )  # only the last rank it was brought to
    assert all(
        steps == {3.0} for *_, steps in torchs
    )  # and every look at it takes another step, with gradients of zero
    assert ours == [(None, None, {1.0})] * 2


def test_8_torch_distributed_checkpoint_writes_the_state_back():
    def there_and_back():
        model = network()
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
        ones(model.parameters())
        zero.step()
        zero.consolidate_state_dict(None)
        saved, want = get_optimizer_state_dict(model, zero), zero.state_dict()
        other = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.5)
        set_optimizer_state_dict(model, other, saved)
        other.consolidate_state_dict(None)
        got = other.state_dict()
        return got["param_groups"][0]["lr"], all(
            v.equal(got["state"][i][k]) for i, s in want["state"].items() for k, v in s.items()
        )

    assert run(2, there_and_back) == [(1e-3, True)] * 2


# ---- 9. the coalescing manager ----


def after_an_exception(torchs):
    group, x = dist.new_group(timeout=timedelta(seconds=5)), torch.ones(3)
    try:
        with _coalescing_manager(group) if torchs else coalescing_manager(group):
            (
                dist.all_reduce(x.clone(), group=group)
                if torchs
                else Group(group).all_reduce(x.clone())
            )
            raise KeyError("the user's")
    except KeyError:
        pass
    dist.all_reduce(x, group=group) if torchs else Group(group).all_reduce(x)
    return x.tolist()


def test_9_an_exception_in_a_coalescing_block_leaves_the_group_usable():
    assert (
        run(2, after_an_exception, True) == [[1.0] * 3] * 2
    )  # written down in a block that never ends: nothing is reduced, and nobody says so
    assert run(2, after_an_exception, False) == [[2.0] * 3] * 2


def other_kinds(torchs):
    group, x, y = (
        dist.new_group(timeout=timedelta(seconds=5)),
        torch.full((2,), 1.0 + dist.get_rank()),
        torch.full((2,), 1.0 + dist.get_rank()),
    )
    if not torchs:
        with coalescing_manager(group):
            Group(group).all_reduce(x)
            Group(group).broadcast(y, 1)
        return x.tolist(), y.tolist()
    with _coalescing_manager(group):
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=group)
    return x.tolist(), y.tolist()


def test_9_mixed_operations_do_not_run_as_the_first_one():
    assert (
        run(2, other_kinds, True) == [([3.0, 3.0], [3.0, 3.0])] * 2
    )  # the maximum came out as a sum
    assert (
        run(2, other_kinds, False) == [([3.0, 3.0], [2.0, 2.0])] * 2
    )  # another kind is another run


# ---- 10. what is frozen changes ----


def thawing(kind):
    """Train two of four matrices, then the two others; state elements that this rank keeps for what is trained."""
    layers, taken = [nn.Parameter(torch.zeros(16, 16)) for _ in range(4)], []
    for i, p in enumerate(layers):
        p.requires_grad_(i % 2 == 1)
    zero = kind(layers, AdamW)
    for trained in (1, 0):
        for i, p in enumerate(layers):
            p.requires_grad_(i % 2 == trained)
        ones(layers)
        zero.step()
        taken.append(
            sum(
                v.numel()
                for p, state in zero.optim.state.items()
                for v in state.values()
                if p.requires_grad and v.dim()
            )
        )
    return taken


def test_10_what_is_unfrozen_is_shared_out_anew():
    torchs, ours = both(thawing)
    assert torchs == [[0, 4 * 256], [4 * 256, 0]]  # whatever is trained, one rank does it all
    assert ours == [[2 * 256, 2 * 256]] * 2
