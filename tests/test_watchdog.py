"""What the watchdog finds of one flipped bit, in every mode, and that it finds nothing where there is nothing."""

import copy
import ctypes
import itertools

import pytest
import torch
import torch.distributed as dist
from common import caught, run_each
from common.modes import MODES, VARIANTS, Attached
from nccl_like import nccl_like
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Muon

from zero_nb import (
    Join,
    ZeroRedundancyOptimizer,
    data_parallel,
    overlap,
    record,
    run,
    two_level,
)
from zero_nb.verify.divergence import DivergenceError
from zero_nb.verify.watchdog import watch_divergence


def flip(tensor, element=0, bit=30):
    """Flip one bit, counted from the lowest one of an element in memory order, unknown to PyTorch."""
    address = tensor.data_ptr() + element * tensor.itemsize + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8


class Net(nn.Module):
    """Has matrices, vectors, a scalar, statistics that a forward updates, and a constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 40)
        self.norm = nn.BatchNorm1d(40)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.arange(40.0))

    def forward(self, x):
        x = self.norm(self.first(x) * self.mask).tanh()
        return self.last(self.middle(x)) * self.scale


def groups_of(module, name):
    params = list(module.named_parameters())
    if name == "muon":
        matrices = [p for p in params if p[1].dim() == 2]
        return [
            {"params": matrices, "optimizer_class": Muon},
            {"params": [p for p in params if p[1].dim() != 2]},
        ]
    return params


def attached(mode, optimizer="adamw", size=None, dtype=torch.float32, **options):
    """Make a model, its optimizer and what is called."""
    module = Net().to(dtype)
    zero = {"master_dtype": torch.float32} if optimizer == "masters" else {}
    shared = two_level(size) if size else None

    def make(model):
        return ZeroRedundancyOptimizer(groups_of(module, optimizer), AdamW, shared, lr=1e-3, **zero)

    return module, {**MODES, **VARIANTS}[mode].attach(module, make, **options)


def iterate(module, training, step, part=0):
    rank = dist.get_rank()
    data = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    x = torch.randn(8, 12, generator=data).to(module.scale.dtype)
    training.call(x).square().mean().backward()


def steps_of(module, training, steps, between=lambda step: None):
    """Train, and give the error with the step in which it came; `between` is called before each step's forward."""
    step = 0
    try:
        for step in range(1, steps + 1):
            training.optimizer.zero_grad()
            between(step)
            iterate(module, training, step)
            if training.handle is None:
                between(step + 0.5)
            training.optimizer.step()
    except DivergenceError as error:
        first = error.found[0]
        return step, first.kind, first.name, first.ranks, first.steps
    return None


# ---- what is flipped ----


def flip_parameter(module, training, element):
    flip(module.middle.weight, element)


def flip_gradient(module, training, element):
    flip(module.middle.weight.grad, element)


def state_of(training, key):
    """Give a state tensor of this rank, if it has one."""
    training.optimizer.wait_for_driver()
    found = [
        state[key]
        for optim in training.optimizer.local.by_class.values()
        for state in optim.state.values()
        if key in state and state[key].numel() > 1
    ]
    return found[0]


def flip_state(module, training, element):
    state = state_of(training, "exp_avg")
    flip(state, 0 if element == 0 else state.numel() - 1, bit=0)


def flip_statistics(module, training, element):
    flip(module.norm.running_var, element % 40, bit=0)


def flip_constant(module, training, element):
    flip(module.mask, element % 40, bit=0)


LAST = 40 * 40 - 1
FLIPS = {
    "parameter": (flip_parameter, "parameter", "middle.weight"),
    "gradient": (flip_gradient, "gradient", ".grad of middle.weight"),
    "state": (flip_state, "state", "exp_avg of "),
    "statistics": (flip_statistics, "buffer", "norm.running_var"),
    "constant": (flip_constant, "buffer", "mask"),
}


def flipped(mode, what, every, step, element, rank=1, optimizer="adamw", nodes=None, steps=9):
    """Train with one flipped bit on one rank before a step."""
    module, training = attached(mode, optimizer, nodes)
    watch_divergence(training.call, training.optimizer, every=every)
    at = step + 0.5 if what == "gradient" else step

    def between(now):
        if now == at and dist.get_rank() == rank:
            training.optimizer.wait_for_driver()
            FLIPS[what][0](module, training, element)

    return steps_of(module, training, steps, between)


def check_found(case, found, every, step, what, rank, size):
    """Check that all ranks have raised the same, in time, with the right name and rank."""
    assert all(one == found[0] for one in found), (case, found)
    assert found[0] is not None, f"{case}: nothing was found"
    raised, kind, name, ranks, window = found[0]
    _, expected, start = FLIPS[what]
    # where `step` is not waited for, the error comes with the next forward
    assert step <= raised < step + every, (case, found[0])
    assert raised % every == 0 and window == (raised - every + 1, raised), (case, found[0])
    assert kind == expected and name.startswith(start), (case, found[0])
    alone = kind in ("state", "buffer")
    assert ranks == ((rank,) if size > 2 or alone else (0, 1)), (case, found[0])


def places(mode, size):
    """Give what is flipped before which step, with which `every`: owned and not, first and last
    element, right before and right after a report, before state moves for the second step."""
    for what in FLIPS:
        if what == "gradient" and mode != "zero1":
            continue
        if size == 3:
            yield what, 1, 4, 0, 2
            continue
        if what != "constant":
            yield what, 3, 3, 0, 1
        if what != "statistics":
            yield what, 3, 4, LAST, 0 if what == "parameter" else 1
        yield what, 2, 2, LAST, 1  # DDP fills other buckets from the second backward on


@pytest.mark.turns(2)
@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_bit_is_found_in_time_on_all_ranks(size):
    cases = {(mode, *place): (mode, *place) for mode in MODES for place in places(mode, size)}
    for case, found in run_each(size, flipped, cases, timeout=300).items():
        _, what, every, step, _, rank = case
        check_found(case, found, every, step, what, rank, size)


@pytest.mark.turns(2)
def test_other_optimizers_and_ways_to_attach(way):
    chosen = [
        *itertools.product(MODES, [("parameter", "muon")]),
        *itertools.product(("zero1", "zero2, hidden"), [("state", "masters")]),
        *itertools.product(VARIANTS, [("parameter", "adamw")]),
    ]
    cases = {
        (mode, what, optimizer): (mode, what, 2, 4, LAST, 1, optimizer)
        for mode, (what, optimizer) in chosen
    }
    for case, found in run_each(3, flipped, cases, timeout=300).items():
        check_found(case, found, 2, 4, case[1], 1, 3)


def test_with_two_levels_ranks_of_other_nodes_are_compared():
    """Rank 3 is on the second node of two, and holds the same part of the state as rank 1."""
    modes = ("zero1", "zero1-overlap, interleaved", "zero2, hidden")
    cases = {
        (mode, what): (mode, what, 2, 4, LAST, 3, "adamw", 2)
        for mode, what in itertools.product(modes, ("parameter", "state"))
    }
    for case, found in run_each(4, flipped, cases, timeout=200).items():
        check_found(case, found, 2, 4, case[1], 3, 4)


# ---- what only some modes have ----


def average_flipped(mode, bit, in_transit):
    """Flip a bit of an average when it comes out of its reduction, or between that and its step."""
    module, training = attached(mode)
    watch = watch_divergence(training.call, training.optimizer, every=2)
    look = watch.look
    start, after = look.start_reduction, look.after_reductions

    def start_reduction(each, begin):
        def broken():
            finish = begin()

            def finish_broken():
                average = finish()
                if look.steps == 4 and each.index == 1 and dist.get_rank() == 1:
                    flip(average, 0, bit)
                return average

            return finish_broken

        return start(each, broken if in_transit else begin)

    def after_reductions(runs):
        for each in runs:
            if look.steps == 4 and each.index == 1 and dist.get_rank() == 1 and not in_transit:
                flip(each.grad_shard, 0, bit)
        after(runs)

    look.start_reduction, look.after_reductions = start_reduction, after_reductions
    return steps_of(module, training, 8)


def test_averages_of_gradients():
    """Between its reduction and its step any bit of an average is seen, with its rank; in the
    reduction, what is more than rounding."""
    modes = [mode for mode in MODES if mode != "zero1"]
    cases = {
        (m, bit, sent): (m, bit, sent) for m in modes for bit, sent in ((0, False), (30, True))
    }
    for case, found in run_each(3, average_flipped, cases, timeout=200).items():
        assert found[0] is not None and all(one == found[0] for one in found), (case, found)
        raised, kind, name, ranks, window = found[0]
        assert (raised, kind, window) == (6, "gradient", (5, 6)), (case, found[0])
        assert ranks == ((0, 1, 2) if case[2] else (1,)), (case, found[0])
        assert case[2] or name.startswith("average of "), (case, found[0])


def flipped_before_a_move(mode, how):
    """Flip a bit of state after the last step of a plan."""
    module, training = attached(mode, ddp={"find_unused_parameters": True})
    watch_divergence(training.call, training.optimizer, every=2)

    def between(step):
        if step != 5:
            return
        training.optimizer.wait_for_driver()
        if dist.get_rank() == 1:
            flip_state(module, training, LAST)
        if how == "detach":
            training.handle.detach()
        elif how == "add":
            training.optimizer.add_param_group(
                {"params": [("added", nn.Parameter(torch.zeros(3)))]}
            )
        else:
            module.first.requires_grad_(False)

    return steps_of(module, training, 8, between)


def test_state_is_looked_at_before_another_plan_moves_it():
    cases = {(mode, "freeze"): (mode, "freeze") for mode in MODES}
    cases["zero1", "add"] = ("zero1", "add")
    cases |= {(m, "detach"): (m, "detach") for m in ("zero1-overlap", "zero1-overlap, interleaved")}
    for case, found in run_each(3, flipped_before_a_move, cases).items():
        assert found[0] is not None and all(one == found[0] for one in found), (case, found)
        raised, kind, name, ranks, steps = found[0]
        assert (raised, kind, ranks, steps) == (6, "state", (1,), (5, 6)), (case, found[0])
        assert name.startswith("exp_avg of ") and name.endswith(", before step 5"), (case, name)


def frozen_flipped(mode):
    module, training = attached(mode, ddp={"find_unused_parameters": True})
    module.first.requires_grad_(False)
    watch_divergence(training.call, training.optimizer, every=2)

    def between(step):
        if step == 6 and dist.get_rank() == 2:
            flip(module.first.weight, 7)

    return steps_of(module, training, 8, between)


def test_frozen_parameters_are_compared():
    for found in run_each(3, frozen_flipped, {mode: (mode,) for mode in MODES}).values():
        assert found == [(6, "parameter", "first.weight, up to step 6", (2,), (5, 6))] * 3, found


def frozen_state_flipped(mode, optimizer, thaws):
    """Flip a bit of what rank 0 keeps of parameters that were frozen after two steps."""
    dtype = torch.bfloat16 if optimizer == "masters" else torch.float32
    options = {"ddp": {"find_unused_parameters": True}}
    module, training = attached(mode, optimizer, dtype=dtype, **options)
    watch_divergence(training.call, training.optimizer, every=4)

    def between(step):
        if step == 3:
            module.first.requires_grad_(False)
        if step == 6:
            if dist.get_rank() == 0:
                entry = training.optimizer.sharded_state.frozen.entries[0]
                flip(entry.values["master_param" if optimizer == "masters" else "exp_avg"])
            module.first.requires_grad_(thaws)

    return steps_of(module, training, 8, between)


def test_state_of_frozen_parameters_keeps_its_bits():
    cases = {(m, "adamw", thaws): (m, "adamw", thaws) for m in MODES for thaws in (False, True)}
    cases["zero1", "masters", False] = ("zero1", "masters", False)
    for case, found in run_each(3, frozen_state_flipped, cases).items():
        assert found[0] is not None and all(one == found[0] for one in found), (case, found)
        raised, kind, name, ranks, steps = found[0]
        assert (raised, kind, ranks, steps) == (8, "state", (0,), (5, 8)), (case, found[0])
        when = "before step 6" if case[2] else "up to step 8"
        assert " of first." in name and name.endswith(f", which is frozen, {when}"), (case, name)


def one_rank(mode, what):
    return flipped(mode, what, 3, 5, 0, rank=0)


def test_one_rank_looks_at_state_and_buffers():
    cases = {(mode, what): (mode, what) for mode in MODES for what in ("state", "statistics")}
    for case, found in run_each(1, one_rank, cases).items():
        check_found(case, found, 3, 5, case[1], 0, 1)


class Picture(nn.Module):
    """A convolution whose weight lies channels last, and a number."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))
        self.to(dtype)

    def forward(self, x):
        return (self.conv(x) * self.scale).mean((2, 3))


def other_forms(mode, dtype, views, name):
    module = Picture(dtype)

    def make(model):
        named = module.named_parameters()
        return ZeroRedundancyOptimizer(named, AdamW, lr=1e-3, parameters_as_bucket_view=views)

    training = MODES[mode].attach(module, make)
    watch_divergence(training.call, training.optimizer, every=3)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = None
    try:
        for step in range(1, 7):
            training.optimizer.zero_grad()
            if step == 5 and dist.get_rank() == 1:
                training.optimizer.wait_for_driver()
                flip(dict(module.named_parameters())[name], 0, 3)
            training.call(x.to(dtype)).square().mean().backward()
            training.optimizer.step()
    except DivergenceError as error:
        found = step, [(one.kind, one.name, one.ranks) for one in error.found]
    return found


def test_layouts_dtypes_and_numbers():
    cases = {
        (mode, dtype, views, name): (mode, dtype, views, name)
        for mode in ("zero1", "zero2-interleaved")
        for dtype in (torch.bfloat16, torch.float64)
        for views, name in ((mode == "zero1", "conv.weight"), (False, "scale"))
    }
    for case, found in run_each(3, other_forms, cases).items():
        assert found == [(6, [("parameter", case[3], (1,))])] * 3, (case, found)


def driven_later(calls_step):
    """Overlap the step while it is watched, then go on after backward with one group more."""
    module = Net()
    model = DDP(module)
    zero = ZeroRedundancyOptimizer(module.named_parameters(), AdamW, lr=1e-3)
    watch = watch_divergence(model, zero, every=2)
    handle = None
    added = nn.Parameter(torch.ones(100))
    step = 0
    try:
        for step in range(1, 13):
            if step == 4:
                handle = overlap(model, zero)
            if step == 8:
                handle.detach()
                zero.add_param_group({"params": [("added", added)]})
            if step > 7:
                added.grad = torch.full_like(added, step)
            if step == (5 if not calls_step else 9) and dist.get_rank() == 2:
                flip(module.middle.weight if step == 5 else added, 3, bit=20)  # all stays finite
            model(torch.ones(4, 12) * dist.get_rank()).square().mean().backward()
            if handle is None or calls_step or step > 7:
                zero.step()
            zero.zero_grad()
    except DivergenceError as error:
        return step, [(one.kind, one.name, one.ranks, one.steps) for one in error.found]
    return watch.look.steps


def test_drivers_and_groups_may_come_and_go():
    """Without a call of `step` the error comes with the next forward."""
    cases = {calls: (calls,) for calls in (True, False)}
    found = run_each(3, driven_later, cases)
    assert found[False] == [(7, [("parameter", "middle.weight", (2,), (5, 6))])] * 3
    [(step, divergences), *_] = found[True]
    assert (step, divergences[0][0], divergences[0][2:]) == (10, "parameter", ((2,), (9, 10)))
    assert found[True] == [(step, divergences)] * 3 and len(divergences) == 1


def like_nccl(hidden):
    group = nccl_like(host_waits=True, connect=True)
    module = Net()
    zero = ZeroRedundancyOptimizer(module.named_parameters(), AdamW, group, lr=1e-3)
    handle = data_parallel(module, zero, hidden=hidden, bucket_cap_mb=0.002, cut_mb=0.004)
    watch_divergence(module, zero, every=2)

    def between(step):
        if step == 4 and dist.get_rank() == 1:
            handle.wait()
            flip(module.middle.weight, LAST)

    return steps_of(module, Attached(module, zero, handle, handle), 6, between)


def test_a_backend_that_gathers_equal_parts_only():
    for found in run_each(3, like_nccl, {hidden: (hidden,) for hidden in (False, True)}).values():
        assert found == [(4, "parameter", "middle.weight", (1,), (3, 4))] * 3


# ---- no false alarm ----


def lawful(mode, optimizer="adamw"):
    """Do between steps what a user may do, and look at each step."""
    module, training = attached(mode, optimizer, ddp={"find_unused_parameters": True})
    zero = training.optimizer
    watch = watch_divergence(training.call, zero, every=1)
    average = copy.deepcopy(module)
    for step in range(1, 11):
        zero.zero_grad()
        with training.no_sync():
            iterate(module, training, step, part=1)
        iterate(module, training, step)
        zero.step()
        zero.wait_for_driver()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), module.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        if step == 2:  # all ranks change parameters and buffers
            with torch.no_grad():
                module.middle.weight.mul_(0.5)
                module.mask.add_(1)
                module.norm.reset_running_stats()
        if step == 3:
            zero.consolidate_state_dict(to=None)
            zero.load_state_dict(copy.deepcopy(zero.state_dict()))
        if step == 4:
            module.first.requires_grad_(False)
        if step == 6:
            module.first.requires_grad_(True)
        if step == 7:
            module.eval()
            with torch.no_grad():
                training.call(torch.ones(2, 12, dtype=module.scale.dtype))
            module.train()
            module(torch.randn(4, 12, dtype=module.scale.dtype))  # past DDP and its hooks
        if step == 8 and dist.get_rank() == 0:  # one rank evaluates alone
            with torch.no_grad():
                module.eval()(torch.ones(2, 12, dtype=module.scale.dtype))
            module.train()
    assert watch.look.steps == 10
    watch.detach()
    return True


def test_what_a_user_may_do_is_no_divergence():
    cases = {(mode, kind): (mode, kind) for mode in MODES for kind in ("adamw",)}
    cases |= {("zero1", "muon"): ("zero1", "muon"), ("zero2", "muon"): ("zero2", "muon")}
    run_each(2, lawful, cases, timeout=200)


class OwnStatistics(nn.Module):
    """Calls a kernel that writes buffers of this module, and has a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("var", torch.ones(40))

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.var, training=self.training)


def silently_written(mode, kind, flipped_in):
    """Train a model whose kernels write buffers without raising their version. `flipped_in`: of a forward in
    which a constant of rank 1 flips."""
    module, training = Net(), None
    if kind == "batch_norm":
        module.norm = OwnStatistics()
    else:
        observer = FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
        module.norm = observer(quant_min=0, quant_max=255)

    def make(model):
        return ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3)

    training = MODES[mode].attach(module, make)
    watch_divergence(training.call, training.optimizer, every=2)
    forwards = itertools.count(1)

    def inside(*_):
        if next(forwards) == flipped_in and dist.get_rank() == 1:
            flip(module.mask, 3, bit=0)

    module.last.register_forward_hook(inside)
    return steps_of(module, training, 8)


@pytest.mark.parametrize("kind", ["batch_norm", "fake_quantize"])
def test_buffers_that_a_kernel_writes_are_no_divergence(kind):
    modes = [mode for mode in MODES if "hidden" not in mode]
    for case, found in run_each(3, silently_written, {m: (m, kind, 0) for m in modes}).items():
        assert found == [None] * 3, (case, found)


def test_a_constant_that_flips_in_a_forward_beside_them_is_found():
    for kind in ("batch_norm", "fake_quantize"):
        for found in run(3, silently_written, "zero1", kind, 4):
            assert found == (4, "buffer", "mask", (1,), (3, 4)), (kind, found)


def joined(mode, flips, alone=False):
    """Train, then on uneven data in `Join`, then on, with a flip after rank 2 has run out of data.
    `alone`: the model is the one joinable, and rank 2 has no data at all."""
    module, training = attached(mode)
    watch = watch_divergence(training.call, training.optimizer, every=1)
    assert steps_of(module, training, 2) is None
    steps = 8 if dist.get_rank() < 2 else 0 if alone else 4
    joinables = [training.joinable] if alone else [training.joinable, training.optimizer]
    error = None
    try:
        with Join(joinables):
            for step in range(1, steps + 1):
                training.optimizer.zero_grad()
                if flips and step == 6 and dist.get_rank() == 1:
                    training.optimizer.wait_for_driver()
                    flip(module.middle.weight, 0)
                iterate(module, training, step)
                training.optimizer.step()
    except Exception as raised:
        error = str(raised)
    if not flips:
        assert error is None, error
        assert steps_of(module, training, 3) is None
        assert watch.look.steps == 13, watch.look.steps
    return error


def test_join_is_followed():
    """Ranks without data are compared as the others are, and end with them. A model whose step runs
    inside backward may be the one joinable; nothing of it then asks torch's way."""
    cases = {(mode, False): (mode, False) for mode in MODES}
    cases |= {(mode, True): (mode, False, True) for mode in ("zero1-overlap", "zero2")}
    run_each(3, joined, cases, timeout=200)
    for mode in ("zero1", "zero1-overlap, interleaved", "zero2, hidden"):
        found = run(3, joined, mode, True)
        assert all("middle.weight on rank 1" in error for error in found), (mode, found)


def written_through_data(what):
    """Write a buffer or a state tensor as no version counts it, and give the error."""
    module, training = attached("zero1")
    watch_divergence(training.call, training.optimizer, every=1)
    iterate(module, training, 1)
    training.optimizer.step()
    tensor = module.norm.running_mean if what == "buffer" else state_of(training, "exp_avg")
    tensor.data.mul_(0.5)
    iterate(module, training, 2)
    return caught(training.optimizer.step)


def test_a_write_that_no_version_counts_is_named_as_a_cause():
    cases = {what: (what,) for what in ("buffer", "state")}
    for what, found in run_each(2, written_through_data, cases).items():
        assert f"{what} " in found[0] and "a write that PyTorch counts" in found[0], found
        assert "under torch.no_grad() instead; else go back" in found[0], found


# ---- it goes as it came ----


def traces(module, training):
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in training.call.modules()]
    zero = training.optimizer
    return hooks, len(zero._optimizer_step_post_hooks), zero.monitor


def detached(mode):
    found = []
    for every in (None, 1, 3):
        module, training = attached(mode)
        before = traces(module, training)
        if every:
            watch = watch_divergence(training.call, training.optimizer, every=every)
            steps_of(module, training, 4)
            watch.detach()
            watch.detach()
            assert traces(module, training) == before
            with watch_divergence(training.call, training.optimizer):  # a second one
                pass
        else:
            steps_of(module, training, 4)
        steps_of(module, training, 3)
        training.optimizer.wait_for_driver()
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return all(torch.equal(found[0], other) for other in found)


def test_detach_leaves_no_trace_and_a_watch_changes_nothing():
    for found in run_each(2, detached, {mode: (mode,) for mode in MODES}).values():
        assert found == [True, True]


def collectives(mode, every):
    """Give what is sent in some steps, kind and bytes."""
    module = Net()
    with record() as group:

        def make(model):
            return ZeroRedundancyOptimizer(module.parameters(), AdamW, group, lr=1e-3)

        training = MODES[mode].attach(module, make, group)
        steps_of(module, training, 3)
        watch = watch_divergence(training.call, training.optimizer, every=every) if every else None
        with group.recording() as log:
            steps_of(module, training, 4)
            training.optimizer.wait_for_driver()
        if watch:
            watch.detach()
        sent = [event for event in log if event.parent is None]
        return [event.kind for event in sent], [event.bytes for event in sent]


def sent_in(mode):
    return collectives(mode, None), collectives(mode, 4)


def test_no_collective_is_added(way):
    for case, ranks in run_each(2, sent_in, {mode: (mode,) for mode in MODES}).items():
        for (kinds, plain), (watched_kinds, watched) in ranks:
            assert kinds == watched_kinds, case
            more = [b - a for a, b in zip(plain, watched, strict=True) if a != b]
            # one gather, larger by the numbers of both ranks
            assert len(more) == 1 and 0 < more[0] < 2 * 8 * 60, (case, more)
