"""What reads gradients after a backward that has stepped: clipping, scalers, loops of every day."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, run_each
from common.modes import average_gradients
from common.overlapping import (
    HALVES,
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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.backward.stepped_gradients import unstepped_grad
from zero_nb.checkpoint.full import full_state_dict
from zero_nb.comm.launch import run
from zero_nb.comm.simulation import simulate
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def unscale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def of_each(act, together=list):
    """Give a line that does something with each parameter that has a gradient."""
    return lambda model, optimizer: together(
        act(p) for p in model.parameters() if p.grad is not None
    )


LINES = {  # of the loop that everybody writes, between backward and step
    "clip_grad_norm_": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_norm_ inf": lambda model, optimizer: nn.utils.clip_grad_norm_(
        model.parameters(), 1e-3, norm_type=float("inf")
    ),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(
        model.parameters(), 1e-3
    ),
    "get_total_norm": of_each(lambda p: p.grad, lambda grads: nn.utils.get_total_norm([*grads])),
    "norms": of_each(lambda p: p.grad.norm() ** 2, sum),
    "norms of data": of_each(lambda p: p.grad.data.norm(2).item()),
    "norms of detached": of_each(lambda p: p.grad.detach().norm()),
    "isnan": of_each(lambda p: p.grad.isnan().any(), any),
    "isfinite": of_each(lambda p: torch.isfinite(p.grad).all(), all),
    "divide": of_each(lambda p: p.grad.div_(1024)),
    "noise": of_each(lambda p: p.grad.add_(torch.randn_like(p))),
    "foreach": of_each(
        lambda p: p.grad, lambda grads: torch._foreach_mul_([*grads] or [torch.ones(1)], 0.5)
    ),
    "flatten": of_each(
        lambda p: p.grad.flatten(), lambda flat: torch.cat([*flat] or [torch.ones(1)])
    ),
    "clone": of_each(lambda p: p.grad.clone()),
    "numpy": of_each(lambda p: p.grad.cpu().numpy()),
    "numpy itself": of_each(lambda p: p.grad.numpy()),
    "tolist": of_each(lambda p: p.grad.tolist()),
    "data": of_each(lambda p: setattr(p.grad, "data", torch.zeros_like(p))),
    "all_reduce": of_each(lambda p: dist.all_reduce(p.grad)),
    "unscale_": unscale,
}


def after_backward(mode, **options):
    """Give what each line says in the first iteration, or in a later one, and how far the parameters went."""
    said = {}
    for name, line in LINES.items():
        _, zero, model, handle = trained(mode, **options)
        for late in (False, True):
            backward_of(model)
            said[name, late] = caught_error(
                lambda line=line, model=model, zero=zero: line(model, zero)
            )
            zero.zero_grad()
            for _ in range(2):
                backward_of(model)  # the loop goes on
            zero.zero_grad()
        handle.leave()
    return said


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_what_reads_gradients_after_backward_is_told_what_to_write(mode):
    for found in run(2, after_backward, mode):
        for line, error in found.items():
            assert error and error[0] == "RuntimeError" and "max_grad_norm=" in error[1], (
                line,
                error,
            )


def test_H4_it_is_told_also_where_the_norm_is_clipped_already():
    for found in run(2, after_backward, "overlap", max_grad_norm=1.0):
        assert all(found.values())


def without_reading(module, zero):
    module.weights[0].grad = None


def with_zeros(module, zero):
    module.weights[0].grad.zero_()


def with_others(module, zero):
    module.weights[0].grad = torch.ones_like(module.weights[0])


def with_none(module, zero):
    zero.zero_grad()


def changed(mode):
    """Take gradients away before `step`, or put others there, early and late; in a plain loop each
    has another step, or none."""
    said = []
    for change in (without_reading, with_zeros, with_others, with_none):
        module, zero, model, handle = trained(mode)
        for _ in range(3):
            backward_of(model)
            change(module, zero)
            said.append(caught_error(zero.step))
            zero.zero_grad()
            zero.step()  # without a gradient
        handle.leave()
    return said


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_gradients_that_are_taken_away_or_put_there_are_an_error_of_step(mode):
    for found in run(2, changed, mode):
        assert all(
            error and "gradients were changed or taken away after backward()" in error[1]
            for error in found
        ), found


def skipped(mode):
    """Leave out a step, as loops do that skip a batch; never call it, or once after several backwards."""
    said = []
    for called in ((False, False, False), (False, False, True), (True, False, True)):
        _, zero, model, handle = trained(mode)
        for calls in called:
            said.append(caught_error(lambda: backward_of(model)))
            said.append(calls and caught_error(zero.step))
            zero.zero_grad()
        handle.leave()
    return said


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_a_step_that_is_left_out_was_taken_and_the_next_call_says_so(mode):
    for found in run(2, skipped, mode):
        words = [
            error and error[1].partition(" since step() was last called")[0] for error in found
        ]
        assert words[:6] == [None, False] * 3
        assert words[6:12] == [None, False, None, False, None, "backward() has taken 3 steps"]
        assert words[12:17] == [None, None, None, False, "backward() has taken a step"]


def skipped_where_not_finite(mode, ranks, which):
    """Run the loop that leaves out steps of a loss that is not finite; on some ranks only it is not."""
    _, zero, model, _ = trained(mode)
    found = []
    for number in range(5):
        bad = number == which and dist.get_rank() in ranks
        loss = model(torch.full((), math.inf if bad else 1.0)).square()
        found.append(caught_error(loss.backward))
        if found[-1] is None and loss.isfinite():
            zero.step()
        zero.zero_grad()
        if found[-1]:
            break
    return found


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_a_loop_that_skips_what_is_not_finite_is_told_on_every_rank(mode, ranks, which):
    for found in run(2, skipped_where_not_finite, mode, ranks, which):
        assert found[:-1] == [None] * (which + 1)
        assert "backward() has taken a step since step() was last called" in found[-1][1], found


def never_called(mode, infinite):
    """Run a loop that calls no `step`, with parameters that are infinite as they were at first, and then, if
    asked for, with a loss that is not; how many backwards there are until it is told."""
    module = Sums(torch.float32)
    module.mask = nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
    if mode.startswith("parallel"):  # DDP cannot send it over gloo
        module.small = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2), requires_grad=False)
    with torch.no_grad():
        module.weights[1][0] = -math.inf
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.125)
    model, handle = attach(mode, module, zero)
    for number in range(1, 10):
        loss = model(torch.full((), math.inf if number == infinite else 1.0))
        if error := caught_error(loss.backward):
            return number, error[1]
        zero.zero_grad()
    handle.leave()
    return number, ""


@pytest.mark.parametrize("infinite", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_a_loop_that_calls_no_step_is_told_when_parameters_are_infinite(mode, infinite):
    last, words = {0: (9, ""), 1: (2, "not finite"), 2: (3, "not finite"), 3: (5, "not finite")}[
        infinite
    ]
    for number, said in run(2, never_called, mode, infinite):
        assert number == last and words in said, (number, said)


def rolled_back(mode):
    """Go back to the state before a bad batch, which is loaded instead of a call of `step`."""
    module, zero, model, handle = trained(mode)
    for scale in (1.0, 2.0, 1e6, 3.0, 4.0):
        saved = copy.deepcopy((module.state_dict(), full_state_dict(zero, to=None)))
        model(torch.tensor(scale)).backward()
        if scale == 1e6:
            module.load_state_dict(saved[0])
            zero.load_state_dict(saved[1])
        else:
            zero.step()
        zero.zero_grad()
    handle.leave()
    return flatten(module).unique().tolist()


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_a_loop_that_loads_the_state_before_a_bad_loss_goes_on_from_there(mode):
    assert run(2, rolled_back, mode) == [[1 - 0.125 * (1 + 2 + 3 + 4)]] * 2


def left_out_on_one(mode):
    """Leave out the first call of `step` on one rank, and stay when the next one is refused."""
    _, zero, model, _ = trained(mode, process_group=dist.new_group())
    said = []
    for number in range(3):
        said.append(caught_error(lambda: backward_of(model)))
        if number or dist.get_rank() == 0:
            said.append(caught_error(zero.step))
        zero.zero_grad()
        if any(said):
            break
    dist.barrier()  # over the default group: nobody leaves before both have an error
    return [words for _, words in filter(None, said)]


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_H4_a_call_of_step_that_one_rank_refuses_is_told_to_the_others(mode):
    for words in run(2, left_out_on_one, mode, timeout=50):
        assert "backward() has taken 2 steps" in words[0], words


def clipped_in_halves(dtype):
    """Clip a large gradient to a small norm, as torch does."""
    model, clipped = Sums(dtype), Sums(dtype)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    attach("overlap", model, zero, max_grad_norm=2.0**-10)[0](
        torch.tensor(2.0**14, dtype=dtype)
    ).backward()
    clipped(torch.tensor(2.0**14, dtype=dtype)).backward()
    scale = 2.0**-10 / (2.0**14 * flatten(clipped).numel() ** 0.5)
    for p in clipped.parameters():
        p.data.sub_(p.grad.float() * scale)
    return flatten(model), flatten(clipped)


@pytest.mark.parametrize("dtype", HALVES)
def test_H3_a_norm_is_clipped_by_a_number_that_half_precision_does_not_have(dtype):
    for mine, wanted in run(2, clipped_in_halves, dtype):
        assert torch.equal(mine, wanted)


def scaler_without(mode):
    """Run the loop of torch's examples, with a scaler that `overlap` does not know, or knows."""
    found = []
    for known in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        _, zero, model, handle = trained(mode, **({"scaler": scaler} if known else {}))
        scaler.scale(model(torch.ones(()))).backward()
        found.append(caught_error(lambda: scaler.step(zero)))
        zero.zero_grad()
        handle.leave()
    _, zero, model, handle = trained(
        mode, scaler=(scaler := torch.amp.GradScaler("cpu", init_scale=4.0))
    )
    scaler.scale(model(torch.ones(()))).backward()
    scaler.unscale_(zero)
    return [*found, caught_error(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))]


@pytest.mark.parametrize("mode", ["overlap", "parallel", "parallel hidden"])
def test_H4_a_scaler_that_is_not_given_is_told_and_one_that_is_given_works(mode):
    for without, given, clip in run(2, scaler_without, mode):
        assert (
            without
            and "scaler=" in without[1]
            and given is None
            and clip
            and "max_grad_norm=" in clip[1]
        )


@pytest.mark.parametrize("mode", MODES[:2])
def test_H4_averages_that_a_hook_of_the_users_left_may_be_read_but_not_changed(mode):
    def both():
        _, zero, model, _ = trained(mode, hook=average_gradients)
        found = []
        for clip in (None, 1e-3):
            backward_of(model)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            found += [norm.item(), caught_error(zero.step)]
            zero.zero_grad(set_to_none=False)
        backward_of(model)
        return [*found, caught_error(zero.step)]

    for norm, nothing, again, error, last in run(2, both):
        assert norm == again == pytest.approx(411**0.5) and nothing is None and last is None
        assert error and error[0] == "RuntimeError" and "max_grad_norm=" in error[1]


def in_parts(model, step):
    with model.no_sync():
        plainly(model, step + 100)
    plainly(model, step)


def evaluated(model, step):
    with torch.no_grad():
        model(data(step + 200))
    plainly(model, step)


def unused(model, step):
    model(data(step), range(5) if step % 3 == 0 else (step % 5, 2)).square().mean().backward()


def twice(model, step):
    """Run backward again through one graph: DDP hears of the first."""
    loss = model(data(step)).square().mean()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def frozen(model, step):
    model.get_submodule("module.layers.1" if isinstance(model, DDP) else "layers.1").requires_grad_(
        step not in (2, 3)
    )
    plainly(model, step)


def copied(model, step):
    module = model.module if isinstance(model, DDP) else model.model
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(p.grad is None or step == 0 for p in other.parameters())
    torch.save(module.state_dict(), io.BytesIO())
    module.to("cpu").double().requires_grad_(True)
    plainly(model, step)


LOOPS = {
    "plain": plainly,
    "no_sync": in_parts,
    "no_grad": evaluated,
    "unused": unused,
    "grad": twice,
    "frozen": frozen,
    "copied": copied,
}


class Both:
    """The model to call, with the `no_sync` of what steps."""

    def __init__(self, model, handle):
        self.model, self.no_sync = model, getattr(model, "no_sync", None) or handle.no_sync

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args):
        return self.model(*args)


def goes_on(mode, loop, clears):
    """Train beside plain DDP without a word about gradients; give the largest difference."""
    find = {"find_unused_parameters": True} if loop in ("unused", "frozen") else {}
    plain, module = DDP(Blocks(), bucket_cap_mb=0.0005, **find), Blocks()
    optimizer, zero, worst = (
        SGD(plain.parameters(), lr=0.05),
        ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05),
        0.0,
    )
    if mode.startswith("parallel"):
        handle = data_parallel(
            module, zero, interleaved="interleaved" in mode, bucket_cap_mb=0.0005, **find
        )
        ours = Both(module, handle)
    else:
        ours = DDP(
            module,
            bucket_cap_mb=0.0005,
            gradient_as_bucket_view=loop in ("plain", "unused"),
            **find,
        )
        handle = overlap(ours, zero, interleaved="interleaved" in mode)
    for step in range(8):
        if step == 6:
            handle.detach()
        LOOPS[loop](plain, step)
        optimizer.step()
        optimizer.zero_grad()
        LOOPS[loop](ours, step)
        if step >= 6:
            zero.step()
        if step >= 6 and mode.startswith("parallel"):
            break  # a plain module does not average
        if clears != "never" or step >= 6:
            zero.zero_grad(set_to_none=clears == "to none")
        if clears == "to zero" and step < 6:  # zeros only where a parameter may be unused
            found = [g for p in module.parameters() if (g := unstepped_grad(p)) is not None]
            assert not any(grad.any() for grad in found) and bool(find) == bool(found)
        worst = max(worst, (flatten(plain) - flatten(module)).abs().max().item())
    return worst


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", MODES)
def test_H4_what_never_looks_at_gradients_goes_on(mode):
    """With zero_grad of both kinds, and without."""
    cases = set(itertools.product(LOOPS, ["never", "to none", "to zero"]))
    cases.remove(("frozen", "to zero"))  # torch.optim steps what is frozen and has zeros
    found = run_each(2, goes_on, {case: (mode, *case) for case in cases})
    assert {case: ranks for case, ranks in found.items() if max(ranks) >= 1e-12} == {}


def freeze(model, how):
    """Freeze a layer, and leave it a gradient: zeros, what `no_sync` adds up, or that of a step."""
    if how == "added up":
        with model.no_sync():
            plainly(model, 2)
    layers = model.module.layers if isinstance(model, DDP) else model.model.layers
    layers[1].requires_grad_(False)
    if how == "left":
        for p in model.parameters():
            p.grad = None if p.requires_grad else p.grad


def kept_when_frozen(mode, how):
    """Give what is said of a gradient that a frozen layer has; clear it, and go on beside DDP."""
    find = {"find_unused_parameters": True}
    plain, module = DDP(Blocks(), bucket_cap_mb=0.0005, **find), Blocks()
    optimizer = SGD(plain.parameters(), lr=0.05, momentum=0.9)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05, momentum=0.9)
    if mode.startswith("parallel"):
        ours = Both(module, attach(mode, module, zero, **find)[1])
    else:
        ours = DDP(module, bucket_cap_mb=0.0005, **find)
        overlap(ours, zero, interleaved="interleaved" in mode)
    for step in range(5):
        if step == 2:
            freeze(ours, how)
            error = caught_error(lambda: plainly(ours, 2))
            if how == "added up":  # DDP fails where that is cleared
                return error, 0.0
            freeze(plain, how)
            zero.zero_grad()
            optimizer.zero_grad()
        for model, optim in ((plain, optimizer), (ours, zero)):
            plainly(model, step)
            optim.step()
            if how != "left" or step != 1:
                optim.zero_grad(set_to_none=how != "zeros" or step > 1)
    return error, (flatten(plain) - flatten(module)).abs().max().item()


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_a_frozen_parameter_keeps_is_refused_before_anything_is_sent(mode):
    """torch.optim would step it: zeros of zero_grad, what was added up, what was stepped before."""
    cases = {how: (mode, how) for how in ("zeros", "added up", "left")}
    for how, ranks in run_each(2, kept_when_frozen, cases).items():
        for (kind, message), gap in ranks:
            assert kind == "RuntimeError" and "is frozen and still has a gradient" in message, how
            assert "parameter 2" in message and gap < 1e-12, (how, gap)


def zeroed_and_frozen(interleaved, how):
    """Zero gradients, freeze a layer whose parameters all get one until then, and go on."""
    plain, module = DDP(Blocks(), bucket_cap_mb=0.0005, find_unused_parameters=True), Blocks()
    optimizer = SGD(plain.parameters(), lr=0.05, momentum=0.9)
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05, momentum=0.9)
    data_parallel(module, zero, interleaved=interleaved, bucket_cap_mb=0.0005)
    for step in range(6):
        for model, optim in ((plain, optimizer), (module, zero)):
            optim.zero_grad(set_to_none=False)
            if step == 3:
                layer = (model.module if isinstance(model, DDP) else model).layers[1]
                layer.requires_grad_(False)
                if how == "cleared":
                    layer.zero_grad()
                if how == "cast":  # the marker is converted, and still has zeros
                    model.float().double()
            error = caught_error(lambda model=model, step=step: plainly(model, step))
            if error:
                return error
            optim.step()
    return (flatten(plain) - flatten(module)).abs().max().item()


def test_zeros_of_a_frozen_parameter_are_refused_where_all_get_gradients():
    """torch.optim steps on by momentum; backward does not average, and would leave the layer as it is."""
    hows = ("left", "cleared", "cast")
    cases = {(il, how): (il, how) for il in (False, True) for how in hows}
    for (_, how), ranks in run_each(2, zeroed_and_frozen, cases).items():
        for found in ranks:
            if how == "cleared":
                assert found < 1e-12
            else:
                assert found[0] == "RuntimeError" and "is frozen and still has" in found[1], how
                assert "parameter 2" in found[1]


def through_a_part(mode):
    """Call layers of the module and not the module, two at a time before their two backwards, and
    never clear gradients."""
    module, plain = Blocks(), Blocks()
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
    data_parallel(
        module,
        zero,
        interleaved="interleaved" in mode,
        bucket_cap_mb=0.0005,
        find_unused_parameters=True,
        hidden=False,
    )
    for step in range(6):
        uses = [0, 1, 2, 3, 4] if step < 3 else [step - 3, 4]
        for model in (plain, module):
            x = data(step)
            for i in uses:
                x = x + model.layers[i](x).tanh()
            x.square().mean().backward()
        for p in plain.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.data.sub_(p.grad / dist.get_world_size(), alpha=0.05)
            p.grad = None
    return (flatten(plain) - flatten(module)).abs().max().item()


def twice_before_backward(mode):
    _, _, model, handle = trained(mode, find_unused_parameters=True)
    for _ in range(4):
        losses = [model(torch.tensor(1.0)) for _ in range(2)]
        for loss in losses:
            loss.backward()
    handle.wait()
    return set(flatten(model).tolist())


def test_H4_markers_give_way_where_no_forward_of_the_module_takes_them_away():
    for found in run(2, lambda: [through_a_part(mode) for mode in MODES[2:]]):
        assert max(found) < 1e-12, found
    for found in run(2, lambda: [twice_before_backward(mode) for mode in MODES[2:]]):
        assert found == [{1 - 8 * 0.125}] * 2


def compiled_again(mode, backend):
    """Compile, and compile anew for another shape while markers are in the place of gradients."""
    plain, module = DDP(Blocks()), Blocks()
    optimizer, zero = (
        SGD(plain.parameters(), lr=0.05),
        ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05),
    )
    ours, _ = attach(mode, module, zero, bucket_cap_mb=25)
    ours, worst = torch.compile(ours, backend=backend), 0.0
    for step in range(6):
        for model in (plain, ours):
            model(data(step)[: 3 if step in (0, 1, 4) else 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, (flatten(plain) - flatten(module)).abs().max().item())
    return worst


@pytest.mark.turns(2)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["overlap", "parallel"])
def test_H4_a_compiled_model_goes_on(mode, backend):
    assert max(run(2, compiled_again, mode, backend)) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_H4_markers_have_no_memory_and_are_made_once(mode):
    """One for each parameter that was stepped, the same in every iteration; none where a parameter
    had no gradient on any rank."""
    with simulate(1) as group:
        module, marks = Blocks(), []
        zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.05)
        if mode.startswith("parallel"):
            model, handle = attach(mode, module, zero, find_unused_parameters=True)
        else:
            handle = overlap(
                model := DDP(module, process_group=group, find_unused_parameters=True),
                zero,
                interleaved="interleaved" in mode,
            )
        for _ in range(4):
            model(torch.ones(1, 6, dtype=torch.float64), (0, 2)).sum().backward()
            marks.append([p.grad for p in module.parameters()])
        handle.detach()
    assert [[mark is not None for mark in step] for step in marks] == [
        [True, True, False, False, True, True, False, False, False, False]
    ] * 4
    assert all(one is other for one, other in zip(marks[0], marks[-1], strict=True))
    assert all(
        mark.shape == p.shape and mark.dtype == p.dtype and mark.data_ptr() == 0
        for p, mark in zip(module.parameters(), marks[-1], strict=True)
        if mark is not None
    )
    assert all(p.grad is None for p in module.parameters())
