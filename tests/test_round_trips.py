"""Training after a round trip equals training without it: classes, formats, modes and world sizes.

`ZERO_NB_ALL` runs each of 23 classes in each format from each world size to each: 2,208 round trips from
552 checkpoints. Their modes take turns; each class, and each format, goes from every mode to every mode.
So do the two ways to move a collective: a class has both, each in half of the checkpoints, and the other one
when as many days have passed as there are modes.
Otherwise a day's sample has half of the classes, and every pair of values of two axes at least once; it is
another one tomorrow, and `ZERO_NB_SEED` gives the sample of an earlier day again. A failure gives the text
of its case, which `ZERO_NB_CASE` runs alone."""

import itertools
import os
from collections import Counter
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import largest_gap, run_each, take_way
from common.modes import MODES
from common.sampling import SEED, covering, pairs
from common.saving import RECIPES, Recipe, begin, half, inputs, limit_of, parameters, train
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adam,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.convert import convert_checkpoint
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run


def save_weights(path, attached):
    if dist.get_rank() == 0:
        state = attached.call.state_dict()
        torch.save({k.removeprefix("module."): v for k, v in state.items()}, f"{path}.weights")


def load_weights(path, attached):
    set_model_state_dict(attached.call, torch.load(f"{path}.weights"))


def save_consolidated(path, attached):
    to = attached.optimizer.world_size - 1
    attached.optimizer.consolidate_state_dict(to)
    if attached.optimizer.rank == to:
        torch.save(attached.optimizer.state_dict(), path)
    save_weights(path, attached)


def load_consolidated(path, attached):
    load_weights(path, attached)
    attached.optimizer.load_state_dict(torch.load(path))


def save_full(path, attached):
    full_state_dict(attached.optimizer, path)
    save_weights(path, attached)


def load_full(path, attached):
    load_full_state_dict(attached.optimizer, path)
    load_weights(path, attached)


def save_folder(path, attached):
    save_sharded(path, attached.call, attached.optimizer)


def load_folder(path, attached):
    load_sharded(path, attached.call, attached.optimizer)


def save_async(path, attached):  # the caller trains on
    AsyncCheckpointer(attached.call, attached.optimizer).save(path)


def parts(attached):
    with attached.optimizer.giving_state_dicts("sharded"):
        return {
            "model": get_model_state_dict(attached.call),
            "optimizer": get_optimizer_state_dict(attached.call, attached.optimizer),
        }


def save_dcp(path, attached):
    dcp.save(parts(attached), checkpoint_id=path)


def load_dcp(path, attached):
    found = parts(attached)
    dcp.load(found, checkpoint_id=path)
    with attached.optimizer.giving_state_dicts("sharded"):
        set_model_state_dict(attached.call, found["model"])
        set_optimizer_state_dict(attached.call, attached.optimizer, found["optimizer"])


FORMATS = {
    "consolidated": (save_consolidated, load_consolidated),
    "full": (save_full, load_full),
    "sharded": (save_folder, load_folder),
    "async": (save_async, load_folder),
    "dcp": (save_dcp, load_dcp),
    "safetensors": (save_folder, load_folder),  # converted in between
}
OTHERS = {  # the other classes of torch.optim that may be sharded
    kind.__name__: Recipe(kind)
    for kind in (Adadelta, Adam, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop)
}
OTHERS["SGD without state"] = Recipe(SGD, options=(("lr", 0.1),))
OTHERS["two levels"] = Recipe(levels=True)  # where the number of ranks is even
THIRD_PARTY = {  # of pytorch_optimizer; SOAP and Shampoo keep matrices, SOAP in lists
    "Lion": Recipe("Lion", options=(("lr", 1e-3),)),
    "SOAP": Recipe("SOAP", options=(("lr", 1e-3), ("precondition_frequency", 4))),
    "Shampoo": Recipe("Shampoo", options=(("lr", 1e-3),)),
    "AdEMAMix": Recipe("AdEMAMix", options=(("lr", 1e-3),)),
}
OTHERS |= THIRD_PARTY
KINDS = RECIPES | OTHERS


SIZES = (1, 2, 3, 4)
WAYS = ("memory", "messages")  # for `take_way`


def axes(recipes):
    return ([*recipes], [*FORMATS], [*MODES], [*MODES], [*SIZES], [*SIZES], [*WAYS])


def text(case):
    return "/".join(map(str, case))


def case_of(words):
    """Give the case of a text."""
    *names, ranks, others, way = words.split("/")
    return (*names, int(ranks), int(others), way)


def whole(name, seed=SEED):
    """Give all formats and world sizes of a class. A checkpoint is saved once for four cases; the modes that
    follow one mode take turns, and so do the ways to move."""
    number = [*KINDS].index(name)
    modes = [*MODES]
    loads = Counter()
    cases = []
    for i, (form, ranks) in enumerate(itertools.product(FORMATS, SIZES)):
        mode = modes[(i + number + seed) % len(modes)]
        way = WAYS[(i + i // len(SIZES) + number + seed // len(modes)) % len(WAYS)]
        for others in SIZES:
            other = modes[(loads[mode] + number + seed) % len(modes)]
            loads[mode] += 1
            cases.append((name, form, mode, other, ranks, others, way))
    return cases


def samples():
    """Give functions that choose cases, by the name of a test."""
    if chosen := os.environ.get("ZERO_NB_CASE"):
        return {chosen: lambda: [case_of(chosen)]}
    if os.environ.get("ZERO_NB_ALL"):
        return {name: lambda name=name: whole(name) for name in KINDS}
    return {
        "some classes": lambda: covering(axes(RECIPES), Random(SEED)),
        "the others": lambda: covering(axes(OTHERS), Random(SEED)),
    }


SAMPLES = samples()


def limit(case):
    """Give how far apart the parameters, or their master copies, may be: a step on another number of ranks
    adds in another order."""
    name, _, _, _, ranks, others, _ = case
    if KINDS[name].model is half:  # all ranks have the same gradients, and a sum of 2 or 4 is exact
        return 0.0 if ranks == others or 3 not in (ranks, others) else limit_of(KINDS[name])
    return 1e-10 if name == "NAdam" else 1e-12  # it keeps a product in float32


def save(path, recipe, form, mode):
    attached = begin(recipe, mode)
    train(attached, inputs(recipe, 1))
    FORMATS[form][0](path, attached)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def load(path, recipe, form, mode):
    attached = begin(recipe, mode)
    train(attached, inputs(recipe, 3, 1))  # what it has before is not what it goes on with
    FORMATS[form][1](path, attached)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def load_otherwise(path, change):
    """Go on from a full state dict whose master copies are changed."""
    recipe = KINDS["master copies"]
    attached = begin(recipe, "zero1")
    state = torch.load(path)
    for values in state["state"].values():
        change(values)
    attached.optimizer.load_state_dict(state)
    load_weights(path, attached)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def drop_copy(values):
    del values["master_param"]


def round_copy(values):
    values["master_param"] = values["master_param"].bfloat16().float()


def in_launches(call, cases):
    """Run cases by the number of ranks and the way to move that they need, those of both in one launch."""
    found = {}
    for size, way in itertools.product(SIZES, WAYS):
        mine = {name: args for name, (needs, *args) in cases.items() if needs == (size, way)}
        with pytest.MonkeyPatch.context() as patch:
            take_way(patch, way)
            found |= run_each(size, call, mine, timeout=300) if mine else {}
    return found


def saving(case):
    """Give what the cases of one checkpoint have in common."""
    name, form, mode, _, ranks, _, way = case
    return name, form, mode, ranks, way


def converted(path, ranks):
    """Give a folder for a number of ranks that is made of safetensors."""
    between = path.with_name(f"{path.name}.safetensors")
    if not between.exists():
        convert_checkpoint(path, between)
    target = path.with_name(f"{path.name} for {ranks}")
    if not target.exists():  # two cases may go on from it, in two modes
        convert_checkpoint(between, target, ranks=ranks)
    return target


def gaps(folder, cases):
    """Save each checkpoint once, and go on from it in each of its cases; gives how far apart the parameters
    are from those of a training that went on."""
    firsts = {saving(case): case for case in reversed(cases)}  # by whose names errors go
    places = {key: folder / str(i) for i, key in enumerate(firsts)}
    calls = {}
    for (name, form, mode, *needs), case in firsts.items():
        calls[text(case)] = (tuple(needs), places[saving(case)], KINDS[name], form, mode)
    saved = in_launches(save, calls)
    calls = {}
    for case in cases:
        name, form, _, mode, _, *needs = case
        path = places[saving(case)]
        path = converted(path, needs[0]) if form == "safetensors" else path
        calls[text(case)] = (tuple(needs), path, KINDS[name], form, mode)
    loaded = in_launches(load, calls)
    found = {}
    for case in cases:
        [wanted, *others] = saved[text(firsts[saving(case)])]
        found[case] = max(
            largest_gap(a, b)
            for got in (*others, *loaded[text(case)])
            for a, b in zip(wanted, got, strict=True)
        )
    return found


@pytest.mark.turns(2)
@pytest.mark.parametrize("sample", SAMPLES)
def test_training_after_a_round_trip_equals_training_without_it(folder, sample):
    print(f"ZERO_NB_SEED={SEED}; ZERO_NB_CASE=... of a case that is named here runs it alone")
    cases = SAMPLES[sample]()
    if THIRD_PARTY.keys() & {name for name, *_ in cases}:
        pytest.importorskip("pytorch_optimizer")  # before ranks are forked
    wrong = {text(k): gap for k, gap in gaps(folder, cases).items() if not gap <= limit(k)}
    assert not wrong, f"ZERO_NB_CASE='{next(iter(wrong))}' runs the first of these alone"


@pytest.mark.parametrize("ranks", [2, 3])
def test_lost_master_copies_are_further_apart_than_right_ones_may_be(folder, ranks):
    """From a file of 2 ranks: copies that come back, that are made of the parameters, that were rounded."""
    path = folder / "one"
    [wanted, _] = run(2, save, path, KINDS["master copies"], "full", "zero1")
    most = limit(("master copies", "full", "zero1", "zero1", 2, ranks, "memory"))
    for change, right in ((dict, True), (drop_copy, False), (round_copy, False)):
        for got in run(ranks, load_otherwise, path, change):
            worst = max(largest_gap(a, b) for a, b in zip(wanted, got, strict=True))
            assert (worst <= most) == right, (change, worst)
            assert right or worst > 2 * limit_of(KINDS["master copies"]), (change, worst)


@pytest.mark.parametrize("recipes", [RECIPES, OTHERS], ids=["some classes", "the others"])
def test_a_sample_has_all_pairs(recipes):
    values = axes(recipes)
    cases = covering(values, Random(1))
    assert 63 <= len(cases) < 130
    assert cases == covering(values, Random(1)) != covering(values, Random(2))
    seen = set().union(*map(pairs, cases))
    sizes = [len(axis) for axis in values]
    assert len(seen) == sum(a * b for a, b in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("seed", [0, 3, 739_947])
def test_the_whole_has_all_classes_formats_and_sizes_and_all_pairs_of_modes(seed):
    cases = [case for name in KINDS for case in whole(name, seed)]
    names, forms, modes, _, sizes, _, _ = axes(KINDS)
    assert (
        len(names) == 23 and len(cases) == 23 * 6 * 16 and len({*map(saving, cases)}) == 23 * 6 * 4
    )
    assert all(case_of(text(case)) == case for case in cases)
    places = {(name, form, ranks, others) for name, form, _, _, ranks, others, _ in cases}
    assert places == {*itertools.product(names, forms, sizes, sizes)}
    for i, axis in enumerate((names, forms)):
        assert {(case[i], *case[2:4]) for case in cases} == {*itertools.product(axis, modes, modes)}
    assert {(case[0], case[1], case[-1]) for case in cases} == {
        *itertools.product(names, forms, WAYS)
    }
    later = [case for name in KINDS for case in whole(name, seed + len(modes))]
    assert all(case[-1] != other[-1] for case, other in zip(cases, later, strict=True))
    counts = [len(axis) for axis in axes(KINDS)]
    seen = set().union(*map(pairs, cases))
    assert len(seen) == sum(a * b for a, b in itertools.combinations(counts, 2))
