"""With `hidden=True`, other threads read parameters, and somebody assigns to them, while they are on their way."""

import os
import re
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.optim import SGD

from zero_nb.backward.arriving import NanUntilArrived
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.ending import abort
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.optim.iteration import Iteration
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

STEPS = 40


def trained(reads, **setup):
    """Train beside a thread that calls a function of the model all the time; give parameters and its trouble."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    handle = data_parallel(model, zero, bucket_cap_mb=0.002, **setup)
    over, trouble = threading.Event(), []

    def read():
        while not over.is_set():
            trouble.extend(filter(None, [caught(lambda: reads(model))]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for _ in range(STEPS):
        model(torch.ones(2, 8)).square().mean().backward()
        zero.step()
        handle.wait()
    over.set()
    thread.join()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), trouble


def beside(reads):
    ours, trouble = trained(reads, hidden=True)
    theirs, _ = trained(lambda model: over_soon(), hidden=False)
    return torch.equal(ours, theirs), trouble


def over_soon():
    threading.Event().wait(0.01)


def by_one(model):
    for p in model.parameters():
        p.detach()


@pytest.mark.parametrize("reads", [by_one, nn.Module.state_dict])
def test_a_thread_may_read_the_model_while_backward_returns(reads):
    assert run(2, beside, reads) == [(True, [])] * 2


def early_return(kind, method):
    """Wait in another thread while the end of the only gather is in a method; tell whether that wait returned first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    handle = data_parallel(model, zero, hidden=True)
    original = getattr(kind, method)
    early = []

    def while_another_waits(*args):
        other = threading.Thread(target=handle.wait)
        other.start()
        other.join(0.5)  # it cannot return; if it could, it would do so at once
        early.append(not other.is_alive())
        return original(*args)

    with mock.patch.object(kind, method, while_another_waits):
        model(torch.ones(2, 8)).square().mean().backward()
        handle.wait()
    return early


@pytest.mark.parametrize(
    ("kind", "method"), [(NanUntilArrived, "end"), (Iteration, "record_versions")]
)
def test_no_thread_returns_before_parameters_and_their_versions_are_there(kind, method):
    assert run(2, early_return, kind, method) == [[False]] * 2


def assigned(how):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    handle = data_parallel(model, zero, hidden=True)
    params = [*model.parameters()]
    model(torch.ones(2, 8)).square().mean().backward()
    how(params)
    said = caught(handle.wait)
    handle.detach()
    return said, [bool(p.isnan().any()) for p in params]


def swaps(params):
    one, _, other, _ = params
    kept = one.data
    one.data = other.data
    other.data = kept


def puts_in(params):
    vector_to_parameters(torch.zeros(144), params)


@pytest.mark.parametrize("how", [swaps, puts_in])
def test_who_assigns_memory_before_parameters_are_there_is_told(how):
    for said, nan in run(2, assigned, how):
        assert re.match(r"RuntimeError.* of shape \(.*call handle.wait\(\) before", said), said
        assert not any(nan)


def assigned_on_rank_0():
    """Assign to one parameter of many on rank 0; give what each rank is told, and what rank 0 can read then."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    handle = data_parallel(model, zero, hidden=True, bucket_cap_mb=0.002)
    params = [*model.parameters()]
    model(torch.ones(2, 16)).square().mean().backward()
    if dist.get_rank():
        return [caught(handle.detach)]
    params[8].data = torch.zeros(16, 16)
    told = [caught(handle.wait), caught(handle.wait), caught(model.state_dict)]
    return [*told, caught(handle.detach), [p.isnan().any().item() for p in params]]


def test_who_assigns_on_one_rank_is_told_once_and_keeps_the_other_parameters():
    (said, *later, end, nan), (peer,) = run(2, assigned_on_rank_0, timeout=60)
    assert re.match(r"RuntimeError.* of shape \(16, 16\) was given other memory", said), said
    assert not any(later) and not any(nan)
    for error in (peer, end):
        assert "rank 0 failed with RuntimeError: " in error and "other memory" in error, error


WRITES = {
    "clamp_ of one": lambda w, one: one.clamp_(0, 0.5),
    "copy_ to one": lambda w, one: one.copy_(torch.tensor([0.25])),
    "zero_": lambda w, one: w.zero_(),
    "init": lambda w, one: nn.init.eye_(w),
    "element": lambda w, one: w.__setitem__((0, 1), 0.5),
    "mask": lambda w, one: w.__setitem__(torch.eye(8, dtype=torch.bool), 0.0),
    "index_fill_": lambda w, one: w.index_fill_(0, torch.tensor([0]), 0.0),
    "fill_diagonal_": lambda w, one: w.fill_diagonal_(0.0),
    "foreach": lambda w, one: torch._foreach_zero_([w, one]),
    "set_": lambda w, one: w.set_(torch.eye(8)),
}


def small(**setup):
    """Make a model whose last bias has one element, its optimizer, and the handle; each parameter travels alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    return model, zero, data_parallel(model, zero, hidden=True, bucket_cap_mb=1e-5, **setup)


def written(**setup):
    """Write through references between steps, each in its own way; give what is said, and what is NaN then."""
    model, zero, handle = small(**setup)
    w = model[1].weight
    one = model[2].bias
    found = {}
    for name, write in WRITES.items():
        model(torch.ones(2, 8)).square().mean().backward()
        zero.step()
        with torch.no_grad():
            write(w, one)
        said = caught(handle.wait) or ""
        nan = any(p.isnan().any().item() for p in model.parameters())
        found[name] = (said, caught(handle.wait), nan)
    handle.detach()
    return found


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("setup", [{}, {"interleaved": True}, {"cut_mb": 1e-4}], ids=str)
def test_what_is_written_to_a_parameter_on_its_way_is_an_error(setup):
    for found in run(2, written, **setup):
        for name, (said, again, nan) in found.items():
            how = "was given other memory" if name == "set_" else "was written in place"
            assert how in said and "call handle.wait() before" in said, (name, said)
            assert again is None and not nan, name


def written_after_one_has_read():
    """All write the same, after rank 0 has read it through its module."""
    model, zero, handle = small()
    w = model[1].weight
    model(torch.ones(2, 8)).square().mean().backward()
    zero.step()
    if dist.get_rank() == 0:
        model[1].weight.norm()
    with torch.no_grad():
        w.zero_()
    return [caught(handle.wait), caught(handle.detach)]


def test_a_write_that_only_one_rank_loses_is_an_error_on_all():
    (mine, end), (theirs, _) = run(2, written_after_one_has_read, timeout=60)
    assert mine is None and "rank 1 failed with RuntimeError: " in end, (mine, end)
    assert "was written in place" in theirs and "was written in place" in end


def rightly_written(interleaved, dtype):
    """Write through modules, and after a wait; give the difference from a model that does not hide."""
    found = []
    for hidden in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)).to(dtype)
        master = None if dtype == torch.float32 else torch.float32
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3, master_dtype=master)
        options = {"bucket_cap_mb": 1e-5, "cut_mb": 1e-4, "interleaved": interleaved}
        handle = data_parallel(model, zero, hidden=hidden, **options)
        one = model[2].bias
        for step in range(4):
            model(torch.ones(2, 8, dtype=dtype)).square().mean().backward()
            zero.step()
            with torch.no_grad():
                model[1].weight.mul_(0.9)
                model[0].weight.fill_diagonal_(0.5)
                if step == 2:
                    handle.wait()
                    one.clamp_(0, 0.1)
        handle.detach()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.equal(*found)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=str
)  # the second: with copies
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_written_through_a_module_or_after_a_wait_is_there(interleaved, dtype):
    assert all(run(2, rightly_written, interleaved, dtype))


def loaded_while_some_arrive():
    """Load other weights when the first layers have arrived, and step once more."""
    found = []
    for hidden in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).bfloat16()
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3, master_dtype=torch.float32)
        data_parallel(model, zero, hidden=hidden, bucket_cap_mb=1e-5)
        for step in range(3):
            model(torch.ones(2, 8).bfloat16()).square().mean().backward()
            zero.step()
            zero.zero_grad()
            if step == 1:
                others = {key: torch.full_like(v, 0.05) for key, v in shapes().items()}
                model.load_state_dict(others)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.equal(*found), found[0].max().item()


def shapes():
    """Give what the state dict has, without a look at parameters on their way."""
    return {f"{i}.{key}": v for i in range(3) for key, v in nn.Linear(8, 8).state_dict().items()}


def test_weights_that_are_loaded_while_some_arrive_are_stepped():
    for same, largest in run(2, loaded_while_some_arrive):
        assert same and largest < 0.06


def written_before_a_fork():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    handle = data_parallel(model, zero, hidden=True, bucket_cap_mb=1e-5)
    held = model[1].weight
    model(torch.ones(2, 8)).square().mean().backward()
    zero.step()
    with torch.no_grad():
        held.zero_()
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    return caught(handle.wait), caught(handle.wait)


def test_a_fork_leaves_the_error_of_a_write_to_the_next_wait():
    for said, again in run(2, written_before_a_fork):
        assert "was written in place while it was on its way" in said and again is None


def forks_with_some_that_failed():
    """Train four models whose parameters are on their way, end the groups of two, and fork."""
    made = []
    for _ in range(4):
        model = nn.Linear(8, 8)
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, Group(dist.new_group()), lr=0.1)
        handle = data_parallel(model, zero, hidden=True)
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            zero.step()
        made.append((model, handle))
    for _, handle in made[::3]:
        abort(handle.optimizer.group)
    if not (pid := os.fork()):
        os._exit(sum(caught(lambda m=m: m.weight.sum()) is not None for m, _ in made))
    unread = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return unread, [caught(handle.wait) is not None for _, handle in made]


def test_parameters_arrive_before_a_fork_though_others_never_do():
    for unread, failed in run(2, forks_with_some_that_failed):
        assert unread <= sum(failed) and failed[1:3] == [False, False]


class Rows(nn.Module):
    """Has rows of one tensor as its parameters, or clones of them."""

    def __init__(self, clones):
        super().__init__()
        rows = torch.arange(12.0).reshape(3, 4).unbind()
        self.rows = nn.ParameterList([row.clone() if clones else row for row in rows])

    def forward(self, x):
        return sum((x * row).sum() for row in self.rows)


def hidden_rows(clones):
    model = Rows(clones)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    return caught(lambda: data_parallel(model, zero, hidden=True))


def hidden_beside_frozen():
    model = Rows(False)
    model.rows[0].requires_grad_(False)
    zero = ZeroRedundancyOptimizer([*model.rows[1:]], SGD, lr=0.1)
    return caught(lambda: data_parallel(model, zero, hidden=True))


def test_a_version_counter_that_a_frozen_parameter_has_as_well_is_refused():
    for said in run(2, hidden_beside_frozen):
        assert "hidden=True needs a version counter for each parameter" in said


def test_parameters_with_one_version_counter_cannot_be_on_their_way():
    assert run(2, hidden_rows, True) == [None] * 2
    for said in run(2, hidden_rows, False):
        assert said.startswith(
            "ValueError: hidden=True needs a version counter for each parameter, to see what is"
            " written to one, and 3 of them have one together, as views of one tensor do"
        )


def test_complex_stand_ins_are_NaN_in_both_parts_and_all_have_memory_of_their_own():
    params = [torch.ones(3, dtype=torch.complex64) for _ in range(3)] + [torch.ones(2)]
    absent = NanUntilArrived(params, {id(p): i for i, p in enumerate(params)})
    absent.begin()
    assert all(p.real.isnan().all() and p.imag.isnan().all() for p in params[:3])
    assert params[3].isnan().all() and len({p.data_ptr() for p in params}) == 4
    absent.end(3)
    assert all(p.eq(1).all() for p in params)


def layouts():
    """Give the strides of a channels-last weight's marker, and of its zeros."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3)
    handle = data_parallel(model, zero, hidden=True)
    model(torch.ones(1, 3, 8, 8)).square().mean().backward()
    strides = model.weight.grad.stride()
    handle.wait()
    return strides == model.weight.stride()


def test_what_stands_for_a_gradient_has_the_layout_of_its_parameter():
    assert run(2, layouts) == [True] * 2
