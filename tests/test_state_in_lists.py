"""Optimizers that keep tensors in lists and dicts: reports count them, comparisons name them, and folders
have them."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import caught, caught_error
from common.saving import same
from pytorch_optimizer import SOAP
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from zero_nb import ZeroRedundancyOptimizer, assert_parity, memory_report, run
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.convert import convert_checkpoint
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.plan.states import state_rule
from zero_nb.verify.rounding import STEP, find_difference


class Averages(torch.optim.Optimizer):
    """Two moving averages in a list, and a number and a word in a dict; `apart`: other ones on each rank."""

    def __init__(self, params, lr=0.1, apart=False):
        super().__init__(params, {"lr": lr, "apart": apart})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_one(group, p)

    def count_from_zero(self, p):
        return {"count": torch.zeros(()), "kind": "two"}

    def step_one(self, group, p):
        state = self.state[p]
        if not state:
            state["m"] = [torch.zeros_like(p), torch.zeros_like(p)]
            state["more"] = self.count_from_zero(p)
        for average, beta in zip(state["m"], (0.5, 0.9), strict=True):
            average.mul_(beta).add_(p.grad)
        if group["apart"]:
            state["m"][1].add_(dist.get_rank())
        state["more"]["count"].add_(1)
        p.sub_(state["m"][0] - 0.1 * state["m"][1], alpha=group["lr"])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12)).double()


def tensors_below(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (dict, list, tuple)):
        return []
    members = value.values() if isinstance(value, dict) else value
    return [t for member in members for t in tensors_below(member)]


def reported(kind):
    """Compare what a report says of the state with what there is, sharded and not."""
    found = []
    for sharded in (True, False):
        model = net()
        params = model.parameters()
        optimizer = ZeroRedundancyOptimizer(params, kind) if sharded else kind(params)
        for _ in range(2):
            model(torch.ones(4, 12).double()).square().mean().backward()
            optimizer.step()
        local = [*optimizer.local.by_class.values()] if sharded else [optimizer]
        there = [t.nbytes for one in local for s in one.state.values() for t in tensors_below(s)]
        row = memory_report(model, optimizer).row(dist.get_rank(), "state")
        found.append((row.held, sum(there), row.planned, row.reason))
    return found


@pytest.mark.parametrize("kind", [Averages, SOAP])
def test_a_report_counts_state_in_lists(kind):
    for found in run(2, reported, kind):
        for held, there, planned, reason in found:
            assert held == there > 0
            assert planned == held or (planned is None and reason), (planned, reason)


def test_the_planner_counts_them_or_says_that_it_cannot():
    rule = state_rule(Averages)
    assert rule is not None and state_rule(Averages)(None).per_element == 2
    with pytest.raises(ValueError, match="follow no rule known here"):
        state_rule(SOAP)


def batch(step, rank):
    seed = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 12, dtype=torch.float64, generator=seed)


def parity(kind, **options):
    return caught(
        lambda: assert_parity(
            net, (kind, options), batch, 4, 2, loss=lambda model, x: model(x).square().mean()
        )
    )


@pytest.mark.parametrize("kind", [Averages, SOAP])
def test_training_with_them_is_compared(kind):
    assert parity(kind) is None


def test_a_difference_in_one_is_named():
    said = parity(Averages, apart=True, lr=0.0)
    assert "state m[1] of 0." in said, said


@pytest.mark.parametrize(
    "mine, other, name",
    [
        ([1.0, 2.0], [1.0, 3.0], "state[1]"),
        ({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, "state['a'][0]"),
        ([1.0], [1.0, 2.0], "state[1]"),
        ("one", "two", "state"),
        (torch.ones(2), [1.0], "state"),
        ([1.0, "a", None], [1.0, "a", None], None),
    ],
    ids=str,
)
def test_values_in_containers_are_compared_one_by_one(mine, other, name):
    found = find_difference(1, "state", mine, other, STEP)
    assert (found and found.what) == name


class Lists(Averages):
    """Keeps lists in a list, empty ones too; torch gives what it loads the dtype of the parameter."""

    def count_from_zero(self, p):
        return {"count": p.new_zeros(()), "none": [], "lists": [[], [p.new_ones(3), 2, None], {}]}


def trained(kind, steps, sharded=True):
    model = net()
    params = model.named_parameters()
    optimizer = ZeroRedundancyOptimizer(params, kind) if sharded else kind(params)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 12).double()).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(optimizer):
    full = isinstance(optimizer, ZeroRedundancyOptimizer)
    return (full_state_dict(optimizer, None) if full else optimizer.state_dict())["state"]


def save_lists(folder, kind, sharded=True):
    model, optimizer = trained(kind, 3, sharded)
    save_sharded(folder / "sharded", model, optimizer)
    if sharded and kind is not Pairs:
        with optimizer.giving_state_dicts("sharded"):
            dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "dcp")
    return state_of(optimizer)


def load_lists(folder, kind, form="sharded", steps=1, sharded=True):
    model, optimizer = trained(kind, steps, sharded)
    if form == "dcp":
        with optimizer.giving_state_dicts("sharded"):
            found = get_optimizer_state_dict(model, optimizer)
            dcp.load(found, checkpoint_id=folder / "dcp")
            set_optimizer_state_dict(model, optimizer, found)
    else:
        load_sharded(folder / form, model, optimizer)
    return state_of(optimizer)


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("kind", [Lists, SOAP])
def test_folders_bring_lists_back_as_lists(folder, kind, sizes):
    [saved, *_] = run(sizes[0], save_lists, folder, kind)
    assert any(isinstance(value, list) for value in saved[0].values())
    for form in ("sharded", "dcp"):
        for found in run(sizes[1], load_lists, folder, kind, form):
            same(found, saved)


@pytest.mark.parametrize("kind", [Lists, SOAP])
def test_a_folder_of_lists_is_loaded_before_the_first_step_and_without_sharding(folder, kind):
    [saved, *_] = run(2, save_lists, folder, kind)
    for found in run(3, load_lists, folder, kind, steps=0):
        same(found, saved)
    [found] = run(1, load_lists, folder, kind, sharded=False)
    same(found, saved)


@pytest.mark.parametrize("kind", [Lists, SOAP])
def test_a_folder_of_lists_of_an_unsharded_optimizer_is_loaded_and_converted(folder, kind):
    [saved] = run(1, save_lists, folder, kind, False)
    convert_checkpoint(folder / "sharded", folder / "one.safetensors")
    convert_checkpoint(folder / "one.safetensors", folder / "again", ranks=2)
    convert_checkpoint(folder / "again", folder / "one.pt")
    same(torch.load(folder / "one.pt")["state"], saved)
    for form in ("sharded", "again"):
        for found in run(2, load_lists, folder, kind, form):
            same(found, saved)


class Pairs(Averages):
    """Keeps its averages in a tuple, and tuples in dicts and lists."""

    def count_from_zero(self, p):
        count = p.new_zeros(())
        inner = [(count, (1, None)), {"b": (p.new_ones(3), [p.new_ones(2), ()])}]
        return {"count": count, "none": (), "plain": (1, 2.0, None), "deep": (inner, True)}

    def step_one(self, group, p):
        super().step_one(group, p)
        self.state[p]["m"] = tuple(self.state[p]["m"])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 1)], ids=str)
def test_folders_bring_tuples_back_as_tuples(folder, sizes):
    [saved, *_] = run(sizes[0], save_lists, folder, Pairs)
    assert type(saved[0]["m"]) is type(saved[0]["more"]["deep"]) is tuple
    for steps in (0, 1):
        for found in run(sizes[1], load_lists, folder, Pairs, steps=steps):
            same(found, saved)
    [found] = run(1, load_lists, folder, Pairs, sharded=False)
    same(found, saved)


def test_tuples_are_tuples_after_conversions(folder):
    [saved] = run(1, save_lists, folder, Pairs, False)
    convert_checkpoint(folder / "sharded", folder / "one.safetensors")
    convert_checkpoint(folder / "one.safetensors", folder / "again", ranks=2)
    convert_checkpoint(folder / "again", folder / "one.pt")
    same(torch.load(folder / "one.pt")["state"], saved)
    for found in run(2, load_lists, folder, Pairs, "again"):
        same(found, saved)


def save_tuples_later(folder):
    model, optimizer = trained(Pairs, 3)
    with AsyncCheckpointer(model, optimizer) as checkpoints:
        checkpoints.save(folder / "sharded")
    return state_of(optimizer)


def test_a_save_while_training_goes_on_keeps_tuples(folder):
    [saved, _] = run(2, save_tuples_later, folder)
    for found in run(2, load_lists, folder, Pairs):
        same(found, saved)


def save_by_dcp(folder, form):
    model, optimizer = trained(Pairs, 3)
    with optimizer.giving_state_dicts("sharded"):
        dcp.save(given_to_dcp(form, model, optimizer), checkpoint_id=folder / form)
    return state_of(optimizer)


def given_to_dcp(form, model, optimizer):
    if form == "plain":
        return {"optimizer": optimizer.state_dict()}
    options = StateDictOptions(cpu_offload=form == "offloaded")
    return {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def load_by_dcp(folder, form, steps):
    model, optimizer = trained(Pairs, steps)
    with optimizer.giving_state_dicts("sharded"):
        found = given_to_dcp(form, model, optimizer)
        dcp.load(found, checkpoint_id=folder / form)
        if form == "plain":
            optimizer.load_state_dict(found["optimizer"])
        else:
            options = StateDictOptions(cpu_offload=form == "offloaded")
            set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)
    loaded = state_of(optimizer)
    optimizer.step()  # a class may look for its tuples
    return loaded


@pytest.mark.parametrize("form", ["plain", "named", "offloaded"])
@pytest.mark.parametrize("sizes", [(1, 2), (3, 2)], ids=str)
def test_tuples_are_tuples_after_dcp(folder, sizes, form):
    [saved, *_] = run(sizes[0], save_by_dcp, folder, form)
    assert type(saved[0]["m"]) is type(saved[0]["more"]["deep"]) is tuple
    for steps in (0, 1):
        for found in run(sizes[1], load_by_dcp, folder, form, steps):
            same(found, saved)


class Sets(Averages):
    """Keeps a set in a tuple."""

    def count_from_zero(self, p):
        return {"count": p.new_zeros(()), "seen": (p.new_zeros(2), {1, 2})}


def test_a_set_is_refused_on_all_ranks(folder):
    for kind, words in run(2, caught_error, lambda: save_lists(folder, Sets)):
        assert kind == "TypeError" and "state 'more' of parameter 0 is or has a set" in words, words
    assert not [*folder.iterdir()]


class Words(torch.optim.Optimizer):
    """Keeps words, and float32 tensors beside bfloat16 parameters, in lists and dicts, under keys of two types."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                third = torch.full_like(p, 1 / 3, dtype=torch.float32)
                kept = {
                    "kind": "two",
                    7: 0,
                    "m": [third, "a"],
                    "d": {"q": third.clone(), "of": ("b",)},
                }
                self.state[p] = self.state[p] or kept
                p.sub_(p.grad, alpha=group["lr"])


def words_after(change):
    """Give the state that an optimizer and a plain one have after a change and another step."""
    found = []
    for make in (Words, lambda params: ZeroRedundancyOptimizer(params, Words)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
        optimizer = make(model.parameters())
        for number in range(2):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                change(model, optimizer)
        kept = getattr(optimizer, "local", None)
        optims = [optimizer] if kept is None else kept.by_class.values()
        found.append([state for optim in optims for state in optim.state.values()])
    return found


def freeze(model, optimizer):
    model[0].weight.requires_grad_(False)


def load(model, optimizer):
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.load_state_dict(full_state_dict(optimizer, None))


@pytest.mark.parametrize("change", [freeze, load])
def test_words_stay_what_they_are_and_so_do_dtypes_where_nothing_is_loaded(change):
    for plain, ours in run(2, words_after, change):
        for state in ours:
            wanted = plain[0]
            assert (state["kind"], state[7], state["m"][1]) == ("two", 0, "a")
            assert state["d"]["of"] == ("b",)
            for value, given in (
                (state["m"][0], wanted["m"][0]),
                (state["d"]["q"], wanted["d"]["q"]),
            ):
                rounded = given.bfloat16() if change is load else given  # as torch.optim loads
                assert value.dtype == rounded.dtype and value.flatten()[0] == rounded.flatten()[0]


def folder_of_words(folder):
    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), Words)
    model(torch.ones(2, 4)).sum().backward()
    zero.step()
    save_sharded(folder / "words", model, zero)
    load_sharded(folder / "words", model, zero)
    return [
        (state["kind"], state[7])
        for optim in zero.local.by_class.values()
        for state in optim.state.values()
    ]


def test_a_folder_has_words_and_keys_of_several_types(folder):
    assert run(2, folder_of_words, folder) == [[("two", 0)]] * 2


BIG = 2**53 + 1  # which no float has


class Seeds(Averages):
    """Keeps integers and truth values, in tensors and not, beside floats."""

    def step_one(self, group, p):
        state = self.state[p]
        if not state:
            state["seed"] = torch.tensor(BIG)
            state["seen"] = torch.zeros_like(p, dtype=torch.bool)
            state["table"] = [torch.full_like(p, BIG, dtype=torch.int64), torch.tensor(True), BIG]
            state["more"] = {"flag": False, "bits": (torch.ones(3, dtype=torch.uint8), 1)}
            state["mean"] = torch.zeros_like(p)
        state["seed"].add_(1)
        state["seen"].logical_or_(p.grad > 0)
        state["table"][0].bitwise_xor_(state["seed"])
        state["mean"].add_(p.grad)
        p.sub_(state["mean"] * (state["table"][0] % 3 + state["seen"]), alpha=group["lr"])


def seeds(dtype, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12)).to(dtype)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), Seeds)
    step_seeds(model, optimizer, steps)
    return model, optimizer


def step_seeds(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 12, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def save_seeds(folder, dtype):
    """Give what is saved, and what it becomes after two more steps."""
    model, optimizer = seeds(dtype, 2)
    save_sharded(folder / "sharded", model, optimizer)
    full_state_dict(optimizer, folder / "full.pt")
    torch.save(model.state_dict(), folder / "model.pt")
    saved = state_of(optimizer)
    step_seeds(model, optimizer, 2)
    return saved, state_of(optimizer), model.state_dict()


def load_seeds(folder, dtype, form):
    model, optimizer = seeds(dtype, 1)
    if form == "full.pt":
        model.load_state_dict(torch.load(folder / "model.pt"))
        load_full_state_dict(optimizer, folder / form)
    else:
        load_sharded(folder / form, model, optimizer)
    loaded = state_of(optimizer)
    step_seeds(model, optimizer, 2)
    return loaded, state_of(optimizer), model.state_dict()


@pytest.mark.parametrize("form", ["sharded", "full.pt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_and_truth_values_are_loaded_as_they_are(folder, dtype, form):
    """Torch makes floats of them: `torch.optim` casts all tensors to the parameter's dtype."""
    [saved, *_] = run(2, save_seeds, folder, dtype)
    assert saved[0][0]["seed"].dtype == torch.int64 and saved[0][0]["seed"] == BIG + 2
    for found in run(3, load_seeds, folder, dtype, form):
        same(found, saved)


def load_frozen(folder):
    model, optimizer = seeds(torch.float32, 1)
    model.requires_grad_(False)
    load_sharded(folder / "sharded", model, optimizer)
    model.requires_grad_(True)
    step_seeds(model, optimizer, 2)
    return state_of(optimizer)


def test_those_of_frozen_parameters_too(folder):
    [(_, later, _), _] = run(2, save_seeds, folder, torch.float32)
    for found in run(2, load_frozen, folder):
        same(found, later)
