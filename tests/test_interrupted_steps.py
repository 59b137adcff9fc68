"""A step that Ctrl-C, or another exception that is no `Exception`, ends: no rank waits, and nothing torn is saved."""

import os
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import Interrupts, caught, flatten
from common.modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb import full_state_dict, load_sharded, reshard, save_sharded
from zero_nb.backward.arriving import NanUntilArrived
from zero_nb.checkpoint import resharding as reshard_module
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.comm import ending
from zero_nb.comm.launch import run
from zero_nb.optim import optimizer as optimizer_module
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

ROOMS = [os.sep.join(("", *parts, "")) for parts in (("zero_nb",), ("torch", "optim"))]
UNFINISHED = "did not come to its end"


class Interrupted(torch.optim.AdamW):
    """Steps, and raises after one of its calls, as if a signal arrived there."""

    left = 0  # calls until then; 0: none does
    error = KeyboardInterrupt

    def step(self, closure=None):
        loss = super().step(closure)
        Interrupted.left -= 1
        if Interrupted.left == 0:
            raise Interrupted.error
        return loss


class Second(Interrupted):
    """Another class, whose steps come after those of the first."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 4)).double()


def groups_of(module, kinds):
    """Give param groups of several classes, or of one."""
    return [{"params": layer.parameters(), "optimizer_class": k} for layer, k in kinds(module)]


ONE = lambda module: [(module, Interrupted)]
TWO = lambda module: [(module[0], Interrupted), (module[2], Second)]


def loss_of(model, step):
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return model(data.double()).pow(2).mean()


def train(model, zero, steps, closure=False, no_sync=None):
    """Train for some steps: with a closure, or with gradients that are added up."""
    for step in steps:
        zero.zero_grad()
        if no_sync is not None:
            with no_sync():
                loss_of(model, 100 + step).backward()
        loss_of(model, step).backward()
        if closure:
            zero.step(lambda: torch.zeros(()))
        else:
            zero.step()


def saves(module, zero, folder):
    """Give all ways to save, by name."""
    zero.state_dict_type = "full"
    return {
        "sharded": lambda: save_sharded(folder / "sharded", module, zero),
        "async": lambda: AsyncCheckpointer(module, zero).save(folder / "async").wait(),
        "full": lambda: full_state_dict(zero),
        "file": lambda: full_state_dict(zero, folder / "full.pt"),
        "consolidated": lambda: zero.consolidate_state_dict(None),
        "state dict": lambda: zero.state_dict(),
    }


def interrupt_a_local_step(ranks, kinds, closure, error, folder):
    """Interrupt the third step of zero1 on some ranks; give what each rank gets from it, from the
    next iteration, and from each way to save."""
    module = network()
    model = DDP(module)
    zero = ZeroRedundancyOptimizer(groups_of(module, kinds), Interrupted, lr=0.1)
    train(model, zero, range(2), closure)
    here = dist.get_rank() in ranks
    Interrupted.error = error
    Interrupted.left = int(here)  # the first class is through, the second is not
    if here:
        with pytest.raises(error):
            train(model, zero, [2], closure)
    heard = [caught(partial(train, model, zero, [3], closure)) for _ in range(2)]
    return heard, {name: caught(save) for name, save in saves(module, zero, folder).items()}


CASES = {
    "rank 0": ((0,), ONE, False, KeyboardInterrupt),
    "all ranks": ((0, 1), ONE, False, KeyboardInterrupt),
    "rank 1, closure": ((1,), ONE, True, SystemExit),
    "rank 1, two classes": ((1,), TWO, False, KeyboardInterrupt),
}


@pytest.mark.parametrize("case", CASES)
def test_no_rank_goes_on_or_waits_after_a_local_step_that_was_interrupted(way, case, tmp_path):
    ranks, kinds, closure, error = CASES[case]
    found = run(2, interrupt_a_local_step, ranks, kinds, closure, error, tmp_path, timeout=60)
    for heard, said in found:
        assert all(heard), heard
        assert all(said.values()), said
    if len(ranks) == 1:  # in a collective of the optimizer; DDP's own says less
        heard = found[1 - ranks[0]][0][0]
        assert f"rank {ranks[0]} failed with {error.__name__}" in heard
    assert os.listdir(tmp_path) == []


class Preempted(Exception):
    """What a signal handler of the user's raises."""


def stop_everywhere(error, folder):
    """Let the third step of zero1 fail in the middle on all ranks; give what each way to save says then, and after
    one more step."""
    module = network()
    model = DDP(module)
    zero = ZeroRedundancyOptimizer(module.parameters(), Interrupted, lr=0.1)
    train(model, zero, range(2))
    Interrupted.error = error
    Interrupted.left = 1
    with pytest.raises(error):
        train(model, zero, [2])
    said = {name: caught(save) for name, save in saves(module, zero, folder).items()}
    train(model, zero, [3])
    return said, {name: caught(save) for name, save in saves(module, zero, folder).items()}


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("error", (Preempted, RuntimeError))
def test_nothing_is_saved_between_a_step_that_failed_on_all_ranks_and_the_next(
    error, size, tmp_path
):
    for said, later in run(size, stop_everywhere, error, tmp_path):
        assert all(text and f"the last step {UNFINISHED}" in text for text in said.values()), said
        assert not any(later.values()), later


def stepped_alone():
    module = network()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    train(module, zero, range(2))
    return module, zero


def step_after(change, monkeypatch):
    """Interrupt a change of an optimizer that one process has; give what its next step says."""
    module, zero = stepped_alone()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reshard_module, "exchange_state", interrupting)
        change(zero)
    return caught(partial(train, module, zero, [2]))


def interrupting(*_, **__):
    raise KeyboardInterrupt


def test_no_step_follows_a_move_of_the_state_that_was_interrupted(monkeypatch):
    change = partial(reshard, shard="whole")
    [said] = run(1, step_after, change, monkeypatch)
    assert f"the last reshard() {UNFINISHED}" in said


def add_again(monkeypatch):
    """Interrupt an optimizer that takes a param group, and let it take that again, and step."""
    _, zero = stepped_alone()
    more = nn.Parameter(torch.ones(5))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer_module, "take_groups", interrupting)
        zero.add_param_group({"params": [more]})
    groups = len(zero.param_groups)
    zero.add_param_group({"params": [more]})
    more.grad = torch.ones(5)
    zero.step()
    return groups, more.tolist()


def test_a_param_group_that_was_added_in_part_is_taken_away(monkeypatch):
    [(groups, values)] = run(1, add_again, monkeypatch)
    assert groups == 1
    assert all(value < 1 for value in values)


def attached(mode, module, kind=Interrupted, group=None):
    """Attach a mode, with several buckets of the parameters."""
    make = lambda model: ZeroRedundancyOptimizer(model.named_parameters(), kind, group, lr=0.1)
    small = {"bucket_cap_mb": 0.001}
    return MODES[mode].attach(module, make, group, small, small)


def interrupt_in_backward(mode, at, accumulates, folder):
    """Interrupt a step inside backward on all ranks; give what each way to save says then."""
    module = network()
    found = attached(mode, module)
    no_sync = found.no_sync if accumulates else None
    train(found.call, found.optimizer, range(2), no_sync=no_sync)
    Interrupted.left = at
    with pytest.raises(KeyboardInterrupt):
        train(found.call, found.optimizer, [2], no_sync=no_sync)
    Interrupted.left = 0
    ways = saves(module, found.optimizer, folder)
    few = [*ways] if dist.get_world_size() == 1 else ["sharded", "async", "full"]
    return {name: caught(ways[name]) for name in few}


INSIDE = [mode for mode in MODES if mode != "zero1"]


@pytest.mark.parametrize("mode", INSIDE)
def test_nothing_is_saved_after_a_step_inside_backward_that_was_interrupted(way, mode, tmp_path):
    accumulates = "interleaved" not in mode
    at = 1 + ("zero2" in mode)  # DDP's are all stepped in one call
    for said in run(2, interrupt_in_backward, mode, at, accumulates, tmp_path, timeout=60):
        assert all(said.values()), said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_alone_saves_nothing_either(mode, tmp_path):
    [said] = run(1, interrupt_in_backward, mode, 1, False, tmp_path)
    for name, text in said.items():
        assert text is not None and f"the last step {UNFINISHED}" in text, (name, text)
    assert os.listdir(tmp_path) == []


def refuse_on_all_ranks(mode, folder):
    """Leave rank 1 with a step that did not come to its end and groups that go on; give what each way to save
    says, and whether a whole step, or a load, lets it save again."""
    module = network()
    found = attached(mode, module)
    zero = found.optimizer
    train(found.call, zero, range(2))
    save_sharded(folder / "whole", module, zero)
    said = {}
    again = []
    for makes_whole in (
        partial(train, found.call, zero, [2]),
        lambda: load_sharded(folder / "whole", module, zero),
        lambda: zero.load_state_dict(zero_state),
    ):
        zero_state = full_state_dict(zero, None)
        if dist.get_rank() == 1:
            zero.local.change.start("step")
        ways = {**saves(module, zero, folder), "reshard": lambda: reshard(zero, shard="whole")}
        said |= {name: caught(save) for name, save in ways.items()}
        makes_whole()
        again.append(caught(partial(full_state_dict, zero)))
    return said, again


@pytest.mark.parametrize("mode", ("zero1", "zero2"))
def test_what_one_rank_has_left_in_part_is_refused_on_all_of_them(mode, tmp_path):
    ranks = run(2, refuse_on_all_ranks, mode, tmp_path)
    for said, again in ranks:
        if mode != "zero1":
            del said["reshard"]
        for name, text in said.items():
            assert text is not None and f"the last step {UNFINISHED}" in text, (name, text)
        assert again == [None] * 3
    for name, text in ranks[0][0].items():
        assert "rank 1 failed" in text, (name, text)
    assert os.listdir(tmp_path) == ["whole"]


def go_on_alone(sharded, views):
    """Interrupt a local step on a rank that is alone, and go on; give the weights, and what saves say."""
    module = network()
    given = {"master_dtype": torch.float64} if views else {}
    kind = partial(ZeroRedundancyOptimizer, optimizer_class=Interrupted, **given)
    kind = partial(kind, parameters_as_bucket_view=views) if sharded else Interrupted
    optimizer = kind(module.parameters(), lr=0.1)
    train(module, optimizer, range(2))
    Interrupted.left = 1
    with suppress(KeyboardInterrupt):
        train(module, optimizer, [2])
    said = sharded and caught(optimizer.consolidate_state_dict)
    train(module, optimizer, range(3, 5))
    return flatten(module), said, sharded and caught(optimizer.consolidate_state_dict)


@pytest.mark.parametrize("views", (False, True))
def test_a_rank_alone_goes_on_as_with_torchs_class(views):
    [(plain, _, _)] = run(1, go_on_alone, False, False)
    [(ours, said, later)] = run(1, go_on_alone, True, views)
    assert torch.equal(ours, plain)
    assert f"the last step {UNFINISHED}" in said and later is None


class Raises(nn.Module):
    """Raises in a forward or in a backward, if it is told to."""

    where = ""

    def forward(self, x):
        if Raises.where == "forward":
            raise KeyboardInterrupt
        y = x * 1
        if Raises.where == "backward" and y.requires_grad:
            y.register_hook(self.interrupt)
        return y

    def interrupt(self, gradient):
        raise KeyboardInterrupt


def save_before_a_step(mode, where, folder):
    """Interrupt an iteration before anything was stepped, on all ranks; save, and give what that says."""
    module = nn.Sequential(Raises(), network(), Raises())
    found = attached(mode, module)
    train(found.call, found.optimizer, range(2))
    before = flatten(module)
    Raises.where = where
    with pytest.raises(KeyboardInterrupt):
        train(found.call, found.optimizer, [2])
    said = caught(partial(save_sharded, folder / "saved", module, found.optimizer))
    return said, torch.equal(flatten(module), before)


@pytest.mark.parametrize(
    ("size", "mode", "where"),
    [(2, "zero1", "forward"), *((1, m, w) for m in MODES for w in ("forward", "backward"))],
)
def test_an_interrupt_before_anything_was_stepped_leaves_saving_possible(
    size, mode, where, tmp_path
):
    assert run(size, save_before_a_step, mode, where, tmp_path) == [(None, True)] * size
    assert os.listdir(tmp_path) == ["saved"]


def progress(module, zero):
    """Give what tells the steps of a checkpoint: the weights of each parameter, and the counts."""
    state = full_state_dict(zero)["state"]
    return [p.detach().clone() for p in module.parameters()], [
        int(values["step"]) for values in state.values()
    ]


def interrupted(at, action):
    """Call an action, and tell whether it was interrupted at one of its lines."""
    try:
        sys.settrace(Interrupts(at, *ROOMS))
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # Python runs a line of `with` before it leaves one
    return False


def torn_saves(mode, start, stride):
    """Interrupt a third iteration at many of its lines, each time with a new model; give those after which a
    save was not refused and holds more than one step."""
    ending._SETTLE = 0.0  # there are no peers
    module = network()
    found = attached(mode, module, torch.optim.AdamW)
    train(found.call, found.optimizer, range(2))
    two = progress(module, found.optimizer)[0]
    train(found.call, found.optimizer, [2])
    three = progress(module, found.optimizer)[0]
    torn = []
    refused = 0
    for at in range(start, 100_000, stride):
        module = network()
        found = attached(mode, module, torch.optim.AdamW, dist.new_group())
        train(found.call, found.optimizer, range(2))
        if not interrupted(at, partial(train, found.call, found.optimizer, [2])):
            return torn, refused
        try:
            params, counts = progress(module, found.optimizer)
        except RuntimeError as error:
            assert UNFINISHED in str(error) or "never arrived on this rank" in str(error)
            refused += 1
            continue
        whole = [(2, two), (3, three)]
        if not any(
            counts == [n] * 4 and all(map(torch.equal, params, wanted)) for n, wanted in whole
        ):
            torn.append((at, counts))
    return None


@pytest.mark.parametrize("mode", MODES)
def test_no_line_of_an_iteration_leaves_a_checkpoint_of_two_steps(mode):
    [(torn, refused)] = run(1, torn_saves, mode, 1 + len(mode), 53)
    assert torn == [] and refused


def test_no_line_of_taking_memory_away_keeps_it():
    for at in range(1, 1000):
        layer = nn.Linear(3, 2)
        before = flatten(layer)
        params = list(layer.parameters())
        absent = NanUntilArrived(params, {id(p): place for place, p in enumerate(params)})
        stopped = interrupted(at, lambda absent=absent: (absent.begin(), absent.end(1)))
        assert absent.end(1) == [], at
        assert torch.equal(flatten(layer), before), at
        if not stopped:
            assert at > 20
            return


def half_loads(stride):
    """Interrupt a load at many of its lines; give those after which a save was not refused and is of two steps."""
    module = network()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    train(module, zero, [0])
    first = full_state_dict(zero)
    torn = []
    for at in range(1, 100_000, stride):
        module = network()
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.2)
        train(module, zero, range(2))
        if not interrupted(at, partial(zero.load_state_dict, first)):
            return torn, at
        try:
            found = full_state_dict(zero)
        except RuntimeError as error:
            assert UNFINISHED in str(error)
            continue
        told = {int(values["step"]) for values in found["state"].values()}
        told |= {{0.1: 1, 0.2: 2}[group["lr"]] for group in found["param_groups"]}
        torn += [(at, told)] * (len(told) > 1)
    return None


def test_no_line_of_a_load_leaves_a_state_of_two_checkpoints():
    [(torn, at)] = run(1, half_loads, 23)
    assert torn == [] and at > 200
