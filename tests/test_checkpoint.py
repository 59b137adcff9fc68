"""Sharded and full state dicts: what `torch.distributed.checkpoint` writes from every mode and class,
and reads at any number of ranks, beside the run that was not interrupted."""

import copy
import io
import itertools
import math
import pickle
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common import caught, network, run_each
from common.modes import MODES
from common.saving import (
    RECIPES,
    Recipe,
    begin,
    check,
    convolutions,
    inputs,
    limit_of,
    parameters,
    train,
    two_layers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.objects import dump
from zero_nb.comm.objects import load as load_object
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.tensor_shard import TensorShard, boxes


def parts(attached):
    return {
        "model": get_model_state_dict(attached.call),
        "optimizer": get_optimizer_state_dict(attached.call, attached.optimizer),
    }


def save(folder, recipe, mode, kind):
    attached = begin(recipe, mode, kind)
    train(attached, inputs(recipe, 1))
    dcp.save(parts(attached), checkpoint_id=folder)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def load(folder, recipe, mode, kind):
    attached = begin(recipe, mode, kind)
    found = parts(attached)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(attached.call, found["model"])
    set_optimizer_state_dict(attached.call, attached.optimizer, found["optimizer"])
    train(attached, inputs(recipe, 2))
    return parameters(attached)


@pytest.mark.turns(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [(2, 4), (4, 2)], ids=str)
def test_every_mode_resumes_on_other_ranks(folder, mode, ranks):
    recipe = RECIPES["AdamW"]
    [wanted, *_] = run(ranks[0], save, folder, recipe, mode, "sharded")
    for got in run(ranks[1], load, folder, recipe, mode, "sharded"):
        check(wanted, got)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("modes", [("zero1", "zero2"), ("zero1-overlap", "zero1")], ids=str)
def test_every_class_resumes_in_another_mode(folder, name, modes):
    recipe = RECIPES[name]
    # a rank's bfloat16 gradients are rounded before they are added
    [wanted, *_] = run(4, save, folder, recipe, modes[0], "sharded")
    for got in run(2, load, folder, recipe, modes[1], "sharded"):
        check(wanted, got, limit_of(recipe))


@pytest.mark.parametrize("kinds", [("full", "sharded"), ("sharded", "full")], ids=str)
def test_full_and_sharded_read_each_other(folder, kinds):
    recipe = RECIPES["Muon and AdamW"]
    [wanted, *_] = run(2, save, folder, recipe, "zero1", kinds[0])
    for got in run(4, load, folder, recipe, "zero1", kinds[1]):
        check(wanted, got)


def test_two_levels_write_each_part_once(folder):
    levels = Recipe(levels=True)
    [wanted, *_] = run(4, save, folder, levels, "zero1", "sharded")
    for got in run(2, load, folder, RECIPES["AdamW"], "zero2", "sharded"):
        check(wanted, got)


def fsdp(recipe):
    model = recipe.model()
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer)
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=1e-2)


def fsdp_steps(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]


def fsdp_save(folder, recipe):
    model, optimizer = fsdp(recipe)
    fsdp_steps(model, optimizer, inputs(recipe, 1))
    found = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(found, checkpoint_id=folder)
    return fsdp_steps(model, optimizer, inputs(recipe, 2))


def fsdp_load(folder, recipe):
    model, optimizer = fsdp(recipe)
    found = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(model, found["model"])
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    return fsdp_steps(model, optimizer, inputs(recipe, 2))


def test_a_checkpoint_of_fsdp2_goes_on_here_and_back(folder):
    recipe = Recipe(model=two_layers)
    [wanted, *_] = run(2, fsdp_save, folder, recipe)
    for got in run(3, load, folder, recipe, "zero1", "sharded"):
        check(wanted, got)
    with tempfile.TemporaryDirectory() as other:
        [wanted, *_] = run(3, save, other, recipe, "zero2", "sharded")
        for got in run(2, fsdp_load, other, recipe):
            check(wanted, got)


def save_while_training(folder, recipe):
    attached = begin(recipe, "zero1-overlap", "sharded")
    train(attached, inputs(recipe, 1))
    writing = dcp.async_save(parts(attached), checkpoint_id=folder)
    train(attached, inputs(recipe, 2))
    writing.result()
    return parameters(attached)


def test_training_goes_on_while_a_checkpoint_is_written(folder):
    recipe = RECIPES["AdamW"]
    [wanted, *_] = run(2, save_while_training, folder, recipe)
    for got in run(3, load, folder, recipe, "zero1", "sharded"):
        check(wanted, got)


def tensors_of(state):
    """Give the tensors of a state dict's state, nested or flat."""
    values = state["state"].values() if "state" in state else [state]
    return [v for each in values for v in each.values() if isinstance(v, torch.Tensor) and v.dim()]


def taken(kind):
    """What `get_optimizer_state_dict` gives for each choice of options."""
    recipe = RECIPES["AdamW"]
    attached = begin(recipe, "zero1", kind)
    train(attached, inputs(recipe, 1))
    found = {}
    for choice in itertools.product((False, True), repeat=3):
        options = StateDictOptions(
            full_state_dict=choice[0],
            cpu_offload=choice[1],
            flatten_optimizer_state_dict=choice[2],
        )
        state = get_optimizer_state_dict(attached.call, attached.optimizer, options=options)
        tensors = tensors_of(state)
        kinds = {type(tensor).__name__ for tensor in tensors}
        found[choice] = (kinds, sum(t.numel() for t in tensors), sorted(state)[:1])
    return found


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_options_of_torch_give_what_they_say(kind):
    first, second = run(2, taken, kind)
    whole = 2 * sum(p.numel() for p in network().parameters())
    for (full, offload, flat), found in first.items():
        whole_tensors = full or kind == "full"
        key = "param_groups.0.bias.amsgrad" if flat else "param_groups"
        assert found == ({"Tensor" if whole_tensors else "TensorShard"}, whole, [key])
        # to save memory, torch gives a whole state on the CPU to rank 0 alone
        assert second[full, offload, flat] == ((set(), 0, []) if full and offload else found)


def set_again(recipe, kind, mode, options, strict=True):
    """Train, take the state with some options, and go on from it in another optimizer."""
    attached = begin(recipe, mode, kind)
    train(attached, inputs(recipe, 1))
    weights = [p.detach().clone() for p in attached.call.parameters()]
    how = replace(options, broadcast_from_rank0=False, cpu_offload=options.broadcast_from_rank0)
    state = get_optimizer_state_dict(attached.call, attached.optimizer, options=how)
    state = copy.deepcopy(state)
    train(attached, inputs(recipe, 2))
    other = begin(recipe, mode, kind)
    train(other, inputs(recipe, 4))
    with torch.no_grad():
        for p, q in zip(other.call.parameters(), weights, strict=True):
            p.copy_(q)
    if not strict and "state" in state:  # a parameter that was not there when it was saved
        del state["state"]["0.bias"]
    load = lambda: set_optimizer_state_dict(other.call, other.optimizer, state, options=options)
    if said := caught(load):
        return said
    train(other, inputs(recipe, 2))
    return parameters(attached), parameters(other)


SETS = {
    "parts": StateDictOptions(),
    "flat parts": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole": StateDictOptions(full_state_dict=True),
    "whole, from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}
HOW = [("full", "zero2"), ("sharded", "zero1"), ("sharded", "zero1-overlap")]


def test_every_class_is_set_with_every_option_of_torch():
    cases = {
        (name, kind, mode, how): (RECIPES[name], kind, mode, options)
        for i, name in enumerate(RECIPES)
        for j, (how, options) in enumerate(SETS.items())
        for kind, mode in [HOW[(i + j) % len(HOW)]]
    }
    for (name, *_), ranks in run_each(3, set_again, cases).items():
        for wanted, got in ranks:
            check(wanted, got, limit_of(RECIPES[name]))


def test_what_torch_cannot_set_is_an_error_on_every_rank():
    recipe = RECIPES["AdamW"]
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    cases = {
        # torch cannot put a flat whole state together, for FSDP2 neither
        "flat": (recipe, "sharded", "zero1", flat),
        "missing": (recipe, "full", "zero1", StateDictOptions(), False),
        "not strict": (recipe, "full", "zero1", StateDictOptions(strict=False), False),
    }
    found = run_each(2, set_again, cases)
    assert all(isinstance(said, str) for said in found["flat"])
    assert all(
        "Missing optimizer state for parameter '0.bias'" in said for said in found["missing"]
    )
    assert all(len(pair) == 2 for pair in found["not strict"])  # it is set without
    flat = replace(flat, broadcast_from_rank0=True)
    assert all(isinstance(said, str) for said in run(2, set_again, recipe, "full", "zero1", flat))


def test_the_state_of_a_parameter_has_keys_and_no_values():
    zero = RECIPES["Muon and AdamW"].optimizer(network())
    keys = {p.dim(): [*zero.state[p]] for p in zero.params()}
    assert keys == {2: ["momentum_buffer"], 1: ["step", "exp_avg", "exp_avg_sq"]}
    weight = zero.params()[0]
    assert weight not in zero.state and not zero.state
    with pytest.raises(KeyError, match="take it from state_dict"):
        zero.state[weight]["momentum_buffer"]
    with pytest.raises(KeyError, match="no parameter of this optimizer"):
        zero.state[torch.zeros(3)]


def plain_and_full():
    """What each rank's `state_dict()` of type "full" gives to an unsharded optimizer."""
    recipe = RECIPES["AdamW"]
    attached = begin(recipe, "zero2", "full")
    train(attached, inputs(recipe, 1))
    saved = attached.optimizer.state_dict()
    module = recipe.model()
    module.load_state_dict({k: v.clone() for k, v in attached.call.state_dict().items()})
    plain = AdamW(module.parameters(), lr=1e-2)
    plain.load_state_dict(saved)
    train(attached, inputs(recipe, 2))
    for x in inputs(recipe, 2):
        plain.zero_grad()
        module(x).square().mean().backward()
        plain.step()
    check(parameters(attached), [p.detach() for p in module.parameters()])
    return attached.optimizer.state_dict_type


def asked_alone():
    """What one rank gets from `state_dict()` of type "full" when the others do not call it."""
    attached = begin(RECIPES["AdamW"], "zero1", "full")
    optimizer, rank = attached.optimizer, Group().group_rank
    found = []
    for to in (0, 1, None):  # Lightning consolidates to rank 0, and then asks that rank alone
        train(attached, inputs(RECIPES["AdamW"], 1))
        with optimizer.giving_state_dicts("consolidated"):
            optimizer.consolidate_state_dict(0)  # rank 0 has it, but does not go on without rank 1
        wanted = optimizer.state_dict()
        train(attached, inputs(RECIPES["AdamW"], 1))
        optimizer.consolidate_state_dict(to)
        with optimizer.giving_state_dicts("consolidated"):
            optimizer.consolidate_state_dict(0)  # and rank 1 keeps what it has
        got = optimizer.state_dict() if rank == (to or 0) else None
        found.append(
            got and [got["state"][0]["step"] - wanted["state"][0]["step"], len(got["state"])]
        )
    return found


def test_a_full_state_dict_is_an_unsharded_optimizers_on_every_rank():
    assert run(3, plain_and_full) == ["full"] * 3


def test_a_full_state_dict_is_there_on_one_rank_alone_after_a_consolidation():
    first, second = run(2, asked_alone)
    got = [len(inputs(RECIPES["AdamW"], 1)), len([*network().parameters()])]
    assert (first, second) == ([got, None, got], [None, got, None])


def shards():
    """A state dict of shards, taken and given back without a checkpoint; and what a fresh optimizer says."""
    recipe = RECIPES["AdamW"]
    attached = begin(recipe, "zero1", "sharded")
    optimizer = attached.optimizer
    fresh = optimizer.state_dict()["state"]
    untouched = [len(optimizer.optim.state), [p.grad for p in attached.call.parameters()]]
    train(attached, inputs(recipe, 1))
    state = optimizer.state_dict()
    own = {
        memory.untyped_storage().data_ptr()
        for values in state["state"].values()
        for memory in values["exp_avg"].runs
    }
    held = {v["exp_avg"].untyped_storage().data_ptr() for v in optimizer.optim.state.values()}
    optimizer.load_state_dict(state)
    train(attached, inputs(recipe, 2))
    return (
        sum(v["exp_avg"].numel() for v in fresh.values()),
        untouched,
        own == held,
        parameters(attached),
    )


def test_shards_are_taken_back_as_they_are():
    [wanted, *_] = run(2, unbroken)
    sizes = sum(p.numel() for p in network().parameters())
    for fresh, untouched, own, got in run(2, shards):
        assert fresh == sizes and untouched == [0, [None] * 7] and own
        check(wanted, got)


def unbroken():
    recipe = RECIPES["AdamW"]
    attached = begin(recipe, "zero1", "consolidated")
    train(attached, inputs(recipe, 1) + inputs(recipe, 2))
    return parameters(attached)


def bad():
    recipe = RECIPES["AdamW"]
    optimizer = recipe.optimizer(recipe.model(), state_dict_type="sharded")
    for p in optimizer.params():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    weight = next(v["exp_avg"] for v in state["state"].values())
    other = ZeroRedundancyOptimizer(recipe.model().parameters(), AdamW, shard="whole")
    before = len(other.optim.state)
    images_model = convolutions()
    images = ZeroRedundancyOptimizer(images_model.parameters(), AdamW, state_dict_type="sharded")
    whole = ZeroRedundancyOptimizer(images_model.parameters(), AdamW)
    rows = ZeroRedundancyOptimizer(
        convolutions().to(memory_format=torch.contiguous_format).parameters(), AdamW
    )
    return [
        caught(lambda: setattr(optimizer, "state_dict_type", "shard")),
        caught(lambda: recipe.optimizer(recipe.model(), state_dict_type="all")),
        caught(
            lambda: recipe.optimizer(
                recipe.model(), state_dict_type=("full", "sharded")[Group().group_rank]
            )
        ),
        caught(lambda: weight + 1),
        caught(lambda: weight.tolist()),
        caught(lambda: other.load_state_dict(state)),
        caught(lambda: rows.load_state_dict(images.state_dict())),
        caught(lambda: optimizer.consolidate_state_dict(0)),
        caught(lambda: get_optimizer_state_dict(images_model, whole)),
        str(before - len(other.optim.state)),
    ]


def test_bad_input_is_an_error_on_every_rank():
    for unknown, all_, differ, needs, listed, missing, order, *types, changed in run(2, bad):
        assert "must be one of 'consolidated', 'full', 'sharded', got 'shard'" in unknown
        assert "got 'all'" in all_ and "state_dict_type" in differ
        assert "needs all elements" in needs and listed
        assert "load it by torch.distributed.checkpoint" in missing and changed == "0"
        assert "has strides" in order and "state_dict() of this optimizer" in order
        assert "state_dict() of type 'sharded' gives parts" in types[0]
        assert "state_dict_type='sharded' (torch.distributed.checkpoint" in types[1]


def test_a_shard_is_copied_pickled_and_moved_with_its_runs_only():
    memory = torch.arange(1000.0)
    shard = TensorShard(torch.empty(5, 7), [memory[3:9], memory[20:22]], [3, 20], writes=False)
    written = pickle.dumps(shard)
    assert len(written) < 3000  # and not all that the runs are views of
    sent = load_object(dump(shard, weights_only=False), None, False)
    for other in (pickle.loads(written), sent, copy.deepcopy(shard), shard.clone()):
        assert other.shape == (5, 7) and other.starts == [3, 20] and not other.writes
        for a, b in zip(other.runs, shard.runs, strict=True):
            assert a.equal(b) and a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    assert shard.detach().runs[0].data_ptr() == shard.runs[0].data_ptr()
    assert shard.to(torch.float64).runs[1].dtype == torch.float64
    target = shard.clone().to(torch.float64)
    target.runs[0].zero_()
    target.copy_(shard)
    assert target.runs[0].equal(memory[3:9].double())
    for stranger in (torch.zeros(5, 7), TensorShard(torch.empty(5, 7), [memory[:1]] * 2, [3, 20])):
        with pytest.raises(RuntimeError, match="only a shard of the same elements"):
            target.copy_(stranger)
    with pytest.raises(RuntimeError, match="needs all elements"):
        shard.sum()
    # a file of one rank's runs would lack the others'
    with pytest.raises(
        ValueError, match="of 35 elements this rank has 8; save a state dict of type"
    ):
        torch.save({"state": [shard]}, io.BytesIO())
    buffer = io.BytesIO()
    torch.save(TensorShard.of(memory.t()), buffer)  # whole: a plain tensor
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert type(loaded) is torch.Tensor and loaded.equal(memory.t())


@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=4), turned=st.booleans())
def test_boxes_hold_a_run_and_nothing_else(data, shape, turned):
    total = math.prod(shape)
    whole = torch.arange(total, dtype=torch.float64).view(shape)
    if turned:
        order = data.draw(st.permutations(range(len(shape))))
        whole = (
            torch.empty([shape[d] for d in order])
            .permute([order.index(d) for d in range(len(shape))])
            .double()
            .copy_(whole)
        )
    flat = whole.permute(sorted(range(len(shape)), key=whole.stride, reverse=True)).reshape(-1)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=2, max_size=4)))
    runs = [flat[a:b] for a, b in itertools.pairwise(cuts)]
    shard = TensorShard(whole, runs, cuts[:-1])
    for start, stop in itertools.pairwise(cuts):
        assert shard.part(start, stop).equal(flat[start:stop])
    assert shard.part(cuts[0], cuts[-1]).equal(flat[cuts[0] : cuts[-1]])
    back = torch.full_like(whole, -1)
    for box, memory in shard.boxes():
        there = back
        for d, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            there = there.narrow(d, offset, size)
        assert there.shape == memory.shape and bool((there == -1).all())
        there.copy_(memory)
    assert int((back != -1).sum()) == cuts[-1] - cuts[0]
    assert bool(((back == whole) | (back == -1)).all())
    if total and len(shape):
        at_most = (2 * len(shape) - 1) * len(runs)
        assert len([*shard.boxes()]) <= at_most
        for start, stop in itertools.pairwise(cuts):
            assert sum(math.prod(b.sizes) for b in boxes(start, stop, shape)) == stop - start
