"""Training after a round trip equals training without it: classes, formats, modes and world sizes, every
two of them together.

The whole product has 19 classes and options in place of `RECIPES`' 9, and 89,376 cases. A day's sample
has half of the classes, and every pair of values of two axes at least once; it is another one
tomorrow, and `ZERO_NB_SEED` gives the sample of an earlier day again."""

import itertools
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import largest_gap, run_each
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
KINDS = RECIPES | OTHERS


def axes(recipes):
    return ([*recipes], [*FORMATS], [*MODES], [*MODES], [1, 2, 3, 4], [1, 2, 3, 4])


def limit(case):
    """Give how far apart the parameters, or their master copies, may be: a step on another number of ranks
    adds in another order."""
    name, _, _, _, ranks, others = case
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
    """Run cases by the number of ranks that they need, each number in one launch."""
    found = {}
    for size in (1, 2, 3, 4):
        mine = {name: args for name, (ranks, *args) in cases.items() if ranks == size}
        found |= run_each(size, call, mine, timeout=300) if mine else {}
    return found


@pytest.mark.turns(2)
@pytest.mark.parametrize("recipes", [RECIPES, OTHERS], ids=["some classes", "the others"])
def test_training_after_a_round_trip_equals_training_without_it(folder, recipes):
    print(f"ZERO_NB_SEED={SEED}")
    cases = {case: folder / str(i) for i, case in enumerate(covering(axes(recipes), Random(SEED)))}
    assert 63 <= len(cases) < 130
    saved = in_launches(
        save,
        {case: (case[4], path, KINDS[case[0]], case[1], case[2]) for case, path in cases.items()},
    )
    for case, path in cases.items():
        if case[1] == "safetensors":
            convert_checkpoint(path, f"{path}.safetensors")
            path.rename(f"{path}.before")
            convert_checkpoint(f"{path}.safetensors", path, ranks=case[5])
    loaded = in_launches(
        load,
        {case: (case[5], path, KINDS[case[0]], case[1], case[3]) for case, path in cases.items()},
    )
    for case in cases:
        [wanted, *others] = saved[case]
        for got in (*others, *loaded[case]):
            worst = max(largest_gap(a, b) for a, b in zip(wanted, got, strict=True))
            assert worst <= limit(case), (case, worst)


@pytest.mark.parametrize("ranks", [2, 3])
def test_lost_master_copies_are_further_apart_than_right_ones_may_be(folder, ranks):
    """From a file of 2 ranks: copies that come back, that are made of the parameters, that were rounded."""
    path = folder / "one"
    [wanted, _] = run(2, save, path, KINDS["master copies"], "full", "zero1")
    most = limit(("master copies", "full", "zero1", "zero1", 2, ranks))
    for change, right in ((dict, True), (drop_copy, False), (round_copy, False)):
        for got in run(ranks, load_otherwise, path, change):
            worst = max(largest_gap(a, b) for a, b in zip(wanted, got, strict=True))
            assert (worst <= most) == right, (change, worst)
            assert right or worst > 2 * limit_of(KINDS["master copies"]), (change, worst)


def test_a_sample_has_all_pairs():
    whole = axes(RECIPES)
    cases = covering(whole, Random(1))
    assert cases == covering(whole, Random(1)) != covering(whole, Random(2))
    seen = set().union(*map(pairs, cases))
    sizes = [len(axis) for axis in whole]
    assert len(seen) == sum(a * b for a, b in itertools.combinations(sizes, 2))
