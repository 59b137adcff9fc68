"""Cells of the tables "who reads and writes what" (tests/test_who_reads.py) that no other file tests: each
mode beside plain DDP."""

import copy
import random
import threading

import pytest
import torch
from common import caught_error, flatten, largest_gap
from common.modes import average_gradients
from common.optimizers import drop_last_parameter
from common.overlapping import HIDDEN, MODES, Blocks, attach, plainly
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

DRIVEN = MODES + HIDDEN


def made(mode, module, kind=AdamW, *, attached=(), **options):
    """Give what is called, its optimizer, and what takes its steps, of plain DDP or a mode."""
    if mode == "DDP":
        ddp = DDP(module, bucket_cap_mb=0.0003)
        return ddp, kind(module.parameters(), lr=0.05, **options), None
    zero = ZeroRedundancyOptimizer(module.parameters(), kind, lr=0.05, **options)
    call, handle = attach(mode, module, zero, **dict(attached))
    return call, zero, handle


def others_write(module):
    """Write parameters in every way: each on its own, at once, in part, past autograd, by a load."""

    def in_place():
        for p in module.parameters():
            p.mul_(0.9)

    def through_data():
        for p in module.parameters():
            p.data.mul_(0.9)

    def other_memory():
        for p in module.parameters():
            p.data = p.data * 0.9

    return {
        "in place": in_place,
        "at once": lambda: torch._foreach_clamp_max_([*module.parameters()], 0.1),
        "one element": lambda: module.layers[2].bias[:1].fill_(1.0),
        "through data": through_data,
        "other memory": other_memory,
        "loaded": lambda: module.load_state_dict(
            {name: value / 2 for name, value in module.state_dict().items()}
        ),
    }


PLACEMENTS = ({}, {"parameters_as_bucket_view": True}, {"shard": "whole"})


def written_before_step():
    """Write parameters between backward and step in every way; how far a sharded step is from DDP's after each."""

    def trained(mode, **options):
        module = Blocks()
        call, optimizer, _ = made(mode, module, **options)
        writes = others_write(module)
        found = {}
        for step, name in enumerate(["", *writes]):
            plainly(call, step)
            if name:
                with torch.no_grad():
                    writes[name]()
            optimizer.step()
            optimizer.zero_grad()
            found[name] = flatten(module)
        return found

    wanted = trained("DDP")
    for placement in PLACEMENTS:
        found = trained("step", **placement)
        yield from (
            (placement, name, largest_gap(wanted[name], params)) for name, params in found.items()
        )


@pytest.mark.usefixtures("way")
def test_what_is_written_before_step_counts_as_in_torch():
    for gaps in run(2, lambda: [*written_before_step()]):
        assert len(gaps) == 21 and [found for found in gaps if found[-1] >= 1e-12] == []


def in_a_thread(module, zero):
    found = []
    thread = threading.Thread(target=lambda: found.append(flatten(module)))
    thread.start()
    thread.join()
    return found[0]


def past_the_modules(module, zero):
    zero.wait_for_driver()
    return flatten(p for group in zero.param_groups for p in group["params"])


def evaluated(module, zero):
    """Read by a forward of each layer; give the parameters that it has computed with."""
    with torch.no_grad():
        eye = torch.eye(6, dtype=torch.float64)
        biases = [layer(0 * eye[0]) for layer in module.layers]
        weights = [
            layer(eye).T - bias[:, None] for layer, bias in zip(module.layers, biases, strict=True)
        ]
    return torch.cat([t.flatten() for pair in zip(weights, biases, strict=True) for t in pair])


READERS = {
    "list": lambda module, zero: flatten(module),
    "state_dict": lambda module, zero: flatten(module.state_dict().values()),
    "copy": lambda module, zero: flatten(copy.deepcopy(module)),
    "thread": in_a_thread,
    "groups": past_the_modules,
    "forward": evaluated,
}


def read_by_all(mode):
    """Read parameters right after backward and right after step, in turn by each reader; how far what
    was read is from what DDP has then, or after its step where backward takes it."""
    plain, module = Blocks(), Blocks()
    theirs, optimizer, _ = made("DDP", plain)
    ours, zero, _ = made(mode, module)
    gaps = {}
    for step, name in enumerate([*READERS, *reversed(READERS)]):
        for call in (theirs, ours):
            plainly(call, step)
        if mode != "step":
            optimizer.step()
        gaps[name, step, "backward"] = largest_gap(READERS[name](module, zero), flatten(plain))
        if mode == "step":
            optimizer.step()
        zero.step()
        gaps[name, step, "step"] = largest_gap(READERS[name](module, zero), flatten(plain))
        for each in (optimizer, zero):
            each.zero_grad()
    return gaps


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_parameters_are_those_of_ddp_to_every_reader(mode):
    for gaps in run(2, read_by_all, mode):
        assert {read: gap for read, gap in gaps.items() if gap >= 1e-9} == {}


def with_writing_hooks(mode, when):
    """Write each parameter in a hook on its gradient, or all of them after each step; give them at the end."""
    module = Blocks()
    call, optimizer, _ = made(mode, module)

    @torch.no_grad()
    def shrink(param):
        param.mul_(0.9)

    for p in module.parameters():
        if when == "gradient":
            p.register_post_accumulate_grad_hook(shrink)
    if when == "step":
        optimizer.register_step_post_hook(lambda *_: [*map(shrink, module.parameters())] and None)
    for step in range(4):
        plainly(call, step)
        optimizer.step()
        optimizer.zero_grad()
    return flatten(module)


class Unknown(SGD):
    """A class that is tried on tensors of its own before it is trusted."""

    def step(self, closure=None):
        return super().step(closure)


def drawn_while_attached(mode):
    before = torch.get_rng_state(), random.getstate()
    made(mode, Blocks(), Unknown, momentum=0.9)
    return torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_hooks_write_parameters_as_with_ddp_and_an_unknown_class_draws_nothing(mode):
    def compared():
        gaps = [
            largest_gap(with_writing_hooks("DDP", when), with_writing_hooks(mode, when))
            for when in ("gradient", "step")
        ]
        return gaps, drawn_while_attached(mode)

    for gaps, unchanged in run(2, compared):
        assert max(gaps) < 1e-12 and unchanged


def loaded_between(mode):
    """Load an older state between backward and step; the count of steps in it, after it and after a step more."""
    module = Blocks()
    call, zero, _ = made(mode, module)
    saved = []
    for step in range(5):
        plainly(call, step)
        if step == 3:
            zero.load_state_dict(saved[0])
        zero.step()
        zero.zero_grad()
        if step in (1, 3, 4):
            zero.consolidate_state_dict(to=None)
            saved.append(copy.deepcopy(zero.state_dict()))
    return [float(state["state"][0]["step"]) for state in saved]


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_a_state_that_is_loaded_between_backward_and_step_is_that_after_the_step(mode):
    for counts in run(2, loaded_between, mode):
        assert counts == ([2, 3, 4] if mode == "step" else [2, 2, 3])


class Detaching(nn.Module):
    """Reads the weight of its last layer before the others, and past its gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))

    def forward(self, x):
        x = self.layers[0](x).tanh() @ self.layers[-1].weight.detach()
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x


def detaching(mode):
    """Give the error of backward, if there is one, and how far parameters are from DDP's."""
    plain, module = Detaching(), Detaching()
    pairs = [made("DDP", plain), made(mode, module)]
    for step in range(4):
        for call, optimizer, _ in pairs:
            if error := caught_error(lambda call=call, step=step: plainly(call, step)):
                return error
            optimizer.step()
            optimizer.zero_grad()
    return largest_gap(flatten(plain), flatten(module))


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_what_backward_reads_past_a_gradient_is_right_or_an_error(mode):
    """A bucket whose gradients are there is stepped during an interleaved backward, which reads its
    weight once more: autograd compares the versions of what a graph has saved."""
    for found in run(2, detaching, mode):
        if "interleaved" in mode:
            assert found[0] == "RuntimeError" and "modified by an inplace operation" in found[1]
        else:
            assert found < 1e-12


def averages_changed(mode):
    """Change in one step of three what a hook of the user's has left; then add up in `no_sync` alone."""

    def one_away(module, zero):
        module.layers[0].bias.grad = None

    def another(module, zero):
        module.layers[0].bias.grad = torch.ones(6, dtype=torch.float64)

    found = {}
    for change in (one_away, another, lambda module, zero: zero.zero_grad()):
        module = Blocks()
        call, zero, _ = made(mode, module, attached={"hook": average_gradients})
        said = []
        for step in range(3):
            plainly(call, step)
            if step == 1:
                change(module, zero)
            said.append(caught_error(zero.step))
            zero.zero_grad()
        with call.no_sync():
            plainly(call, 3)
        found[change.__name__] = [*said, caught_error(zero.step)]
    return found


@pytest.mark.parametrize("mode", MODES[:2])
def test_averages_of_a_hook_that_are_taken_away_or_not_averaged_are_an_error(mode):
    for found in run(2, averages_changed, mode):
        for name, (first, changed, third, added) in found.items():
            assert first is None and third is None, (name, found[name])
            assert changed and "changed or taken away after backward()" in changed[1], name
            assert added and "did not come through DDP's hook" in added[1], name


def with_hooks(mode, before):
    """Clamp gradients in hooks that are put on `before` the handle is made or after it, and halve
    what was added up; give the parameters."""
    module = Blocks()

    def clamp(p):
        p.grad.clamp_(-0.02, 0.02)

    def put_on():
        for p in [*module.parameters()][::3]:
            p.register_post_accumulate_grad_hook(clamp)

    if before:
        put_on()
    call, optimizer, handle = made(mode, module)
    if not before:
        put_on()
    for step in range(4):
        with (handle or call).no_sync():
            plainly(call, step + 10)
        for p in module.parameters():
            p.grad.mul_(0.5)
        plainly(call, step)
        optimizer.step()
        optimizer.zero_grad()
    return flatten(module)


def hooked(mode):
    found = [largest_gap(with_hooks("DDP", False), with_hooks(mode, False))]
    if "hidden" in mode:
        return *found, caught_error(lambda: with_hooks(mode, True))
    return *found, largest_gap(with_hooks("DDP", True), with_hooks(mode, True))


@pytest.mark.parametrize("mode", DRIVEN[2:])
def test_hooks_read_and_change_what_is_added_up_as_with_ddp(mode):
    for after, before in run(2, hooked, mode):
        assert after < 1e-12
        if "hidden" in mode:
            assert before[0] == "ValueError" and "has a hook, which may read it" in before[1]
        else:
            assert before < 1e-12


def in_a_list(zero):
    zero.param_groups[0]["betas"][0] = 0.5


def deep_inside(zero):
    zero.param_groups[0]["more"][0]["of a class"][1] = 2.0


def in_a_tensor_of_a_tuple(zero):
    zero.param_groups[0]["several"][1].fill_(2.0)


def of_another_group(zero):
    zero.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})


WRITES = {  # options, and what is said where backward has stepped
    in_a_list: "betas changed after backward()",
    deep_inside: "more changed after backward()",
    in_a_tensor_of_a_tuple: "several changed after backward()",
    of_another_group: "while the step is overlapped",
}


def of_more_parameters(zero):
    params = zero.param_groups[0]["params"]
    zero.param_groups[0]["params"] = [*params, nn.Parameter(torch.ones(3, dtype=torch.float64))]


REFUSED = "add_param_group()"  # what is to be called instead, in all modes


class Own(AdamW):
    """Is not torch's, and so may read any option."""


def with_options(mode):
    """Write options of a class of the user's between backward and step; what is said then, and how far
    parameters are from DDP's. And edit the parameters of a group, and put them back."""
    plain, module = Blocks(), Blocks()
    pairs = [made("DDP", plain, Own), made(mode, module, Own)]
    for _, optimizer, _ in pairs:
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        optimizer.param_groups[0]["more"] = [{"of a class": [1.0, 1.0]}]
        optimizer.param_groups[0]["several"] = (0, torch.ones(1))
    said = {}
    for step, write in enumerate(WRITES):
        for call, optimizer, _ in pairs:
            plainly(call, step)
            error = caught_error(lambda write=write, optimizer=optimizer: write(optimizer))
            said[write] = error or caught_error(optimizer.step)
            optimizer.zero_grad()
    gap = largest_gap(flatten(plain), flatten(module))
    edited = []
    for edit in (drop_last_parameter, of_more_parameters):
        call, zero, _ = pairs[1]
        plainly(call, len(edited))
        before = zero.param_groups[0]["params"]
        edit(zero)
        edited.append(caught_error(zero.step))
        zero.param_groups[0]["params"] = before
        zero.zero_grad()
    plainly(call, 9)
    return gap, [said[write] for write in WRITES], edited, caught_error(zero.step)


def edited_and_never_stepped(mode):
    """Edit a group in a loop that does not call step; what the next forward says."""
    module = Blocks()
    call, zero, handle = made(mode, module)
    plainly(call, 0)
    drop_last_parameter(zero)
    said = caught_error(lambda: plainly(call, 1))
    handle.wait()
    return said


@pytest.mark.parametrize("mode", DRIVEN)
def test_a_group_that_is_edited_is_an_error_where_step_is_not_called(mode):
    for kind, words in run(2, edited_and_never_stepped, mode):
        assert kind == "RuntimeError" and REFUSED in words


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_groups_and_options_are_those_of_the_step(mode):
    for gap, said, edited, after in run(2, with_options, mode):
        assert all(kind == "RuntimeError" and REFUSED in words for kind, words in edited)
        assert after is None
        if mode == "step":
            assert gap < 1e-12 and said == [None] * len(WRITES)
            continue
        for (kind, words), wanted in zip(said, WRITES.values(), strict=True):
            assert kind == "RuntimeError" and wanted in words


def tied(mode):
    """Name a parameter in options, and read the model between backward and step; how far it is from DDP's."""
    plain, module = Blocks(), Blocks()
    for call, optimizer, _ in (made("DDP", plain), made(mode, module)):
        weight = optimizer.param_groups[0]["params"][0]
        optimizer.param_groups[0]["tied"] = weight
        optimizer.param_groups[0]["several"] = {"tied": [weight]}
        for step in range(3):
            plainly(call, step)
            flatten(call)
            optimizer.step()
            optimizer.zero_grad()
    return largest_gap(flatten(plain), flatten(module))


@pytest.mark.parametrize("mode", ["step", *DRIVEN])
def test_options_may_name_parameters(mode):
    assert all(gap < 1e-12 for gap in run(2, tied, mode))


def norms(mode):
    """Keep the norm of each step, and read all of them at the end; DDP's, and how far parameters are apart."""
    plain, module = Blocks(), Blocks()
    theirs, optimizer, _ = made("DDP", plain)
    ours, zero, handle = made(mode, module, attached={"max_grad_norm": 0.05})
    kept_norms = []
    wanted = []
    for step in range(4):
        plainly(theirs, step)
        wanted.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        plainly(ours, step)
        kept_norms.append(handle.grad_norm)
        for each in (optimizer, zero):
            each.step()
            each.zero_grad()
    return (
        [norm.item() for norm in kept_norms],
        wanted,
        largest_gap(flatten(plain), flatten(module)),
    )


@pytest.mark.parametrize("mode", [mode for mode in DRIVEN if "interleaved" not in mode])
def test_norms_are_those_of_ddp_and_stay_what_they_were(mode):
    for found, wanted, gap in run(2, norms, mode):
        assert found == pytest.approx(wanted, abs=1e-12) and len({*wanted}) == 4 and gap < 1e-12


def refused(mode):
    options = {"max_grad_norm": 1.0, "norm_type": 2.0}, {"scaler": torch.amp.GradScaler("cpu")}
    said = [
        caught_error(lambda given=given: made(mode, Blocks(), attached=given)) for given in options
    ]
    return said


@pytest.mark.parametrize("mode", [mode for mode in DRIVEN if "interleaved" in mode])
def test_what_needs_all_gradients_is_refused_where_buckets_are_stepped_before(mode):
    for said in run(2, refused, mode):
        for kind, words in said:
            assert kind == "ValueError" and "use interleaved=False" in words
