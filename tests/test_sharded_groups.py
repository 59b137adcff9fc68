"""A folder is loaded by an optimizer whose param groups divide its parameters otherwise."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from common import caught_error, run_each
from common.modes import MODES
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon

from zero_nb import (
    AsyncCheckpointer,
    ZeroRedundancyOptimizer,
    convert_checkpoint,
    full_state_dict,
    load_sharded,
    run,
    save_sharded,
    two_level,
)

DIVISIONS = {
    "one": [["0.weight", "0.bias", "1.weight", "1.bias"]],
    "two": [["1.bias", "0.bias"], ["0.weight", "1.weight"]],
    "layers": [["1.weight", "1.bias"], [], ["0.bias", "0.weight"]],
    "first": [["0.weight", "0.bias"]],
}


def make_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).to(dtype)


def groups_of(model, division, options=({},) * 4):
    named = dict(model.named_parameters())
    members = [{"params": [named[name] for name in names]} for names in DIVISIONS[division]]
    return [{**group, **more} for group, more in zip(members, options, strict=False)]


def train(model, optimizer, steps):
    for i in steps:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1) * (i + 1) + p.detach() / 3
        optimizer.step()


def values(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def saves(folder, division, way="saved", dtype=torch.float64, master=None):
    model = make_model(dtype=dtype)
    groups = groups_of(model, division)
    zero = ZeroRedundancyOptimizer(groups, AdamW, lr=0.01, weight_decay=0.1, master_dtype=master)
    train(model, zero, range(3))
    if way == "async":
        with AsyncCheckpointer(model, zero) as checkpointer:
            checkpointer.save(folder)
    else:
        save_sharded(folder, model, zero)
    full = full_state_dict(zero, None)
    names = [name for each in DIVISIONS[division] for name in each]
    state = {name: full["state"][i] for i, name in enumerate(names)}
    return values(model), state


def by_hand(saved, division, steps, fused=True):
    """Train a plain optimizer with these groups whose state was set by hand."""
    start, state = copy.deepcopy(saved)
    model = make_model(1)
    nn.utils.vector_to_parameters(start, model.parameters())
    adamw = AdamW(groups_of(model, division), lr=0.01, weight_decay=0.1, fused=fused)
    names = [name for each in DIVISIONS[division] for name in each]
    own = {i: state[name] for i, name in enumerate(names)}
    adamw.load_state_dict({"state": own, "param_groups": adamw.state_dict()["param_groups"]})
    train(model, adamw, steps)
    return values(model)


def loads(folder, division, sharded, options):
    model = make_model(1)
    groups = groups_of(model, division)
    if options.pop("levels", False):
        options["process_group"] = two_level(2)
    options |= {"lr": 1.0, "weight_decay": 0.5}
    made = ZeroRedundancyOptimizer if sharded else (lambda groups, kind, **o: kind(groups, **o))
    optimizer = made(groups, AdamW, **options)
    load_sharded(folder, model, optimizer)
    held = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups if g["params"]]
    train(model, optimizer, range(3, 6))
    return held, values(model)


@pytest.mark.parametrize("way", ["saved", "async"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (2, 3), (3, 1)], ids=str)
def test_training_goes_on_as_that_of_a_plain_optimizer_with_these_groups(folder, sizes, way):
    for before, after in (("one", "two"), ("two", "one"), ("two", "layers")):
        saved = run(sizes[0], saves, folder / before / after, before, way)[0]
        wants = {True: by_hand(saved, after, range(3, 6))}
        wants[False] = by_hand(saved, after, range(3, 6), None)  # as torch's class chooses
        for sharded, options in ((True, {}), (False, {}), (True, {"bucket_cap_mb": 1e-4})):
            got = run(sizes[1], loads, folder / before / after, after, sharded, options)
            for held, found in got:
                assert set(held) == {(0.01, 0.1)}
                near = (
                    1e-15 if sharded and sizes[1] > 1 else 0
                )  # fused kernels round ends otherwise
                torch.testing.assert_close(found, wants[sharded], rtol=0, atol=near)


def test_two_levels_regroup(folder):
    saved = run(2, saves, folder / "s", "one")[0]
    for _, found in run(4, loads, folder / "s", "layers", True, {"levels": True}):
        assert torch.equal(found, by_hand(saved, "layers", range(3, 6)))


def loads_low(folder):
    model = make_model(1, torch.bfloat16)
    groups = groups_of(model, "two")
    zero = ZeroRedundancyOptimizer(groups, AdamW, master_dtype=torch.float32)
    load_sharded(folder, model, zero)
    train(model, zero, range(3, 6))
    return values(model)


def goes_on_low(folder):
    saves(folder, "one", dtype=torch.bfloat16, master=torch.float32)
    model = make_model(1, torch.bfloat16)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, master_dtype=torch.float32)
    load_sharded(folder, model, zero)
    train(model, zero, range(3, 6))
    return values(model)


def test_master_copies_go_to_the_new_groups(folder):
    want = run(2, goes_on_low, folder / "s")[0]
    assert all(torch.equal(found, want) for found in run(3, loads_low, folder / "s"))


def regroups(folder, before, after, told, ours):
    """Save one division with options, load it into another, and say what came of it."""
    model = make_model()
    zero = ZeroRedundancyOptimizer(groups_of(model, before, told), AdamW, lr=0.1)
    train(model, zero, range(1))
    name = f"{before}-{after}-{len(told)}{len(ours)}"
    save_sharded(folder / name, model, zero)
    other = make_model(1)
    mine = ZeroRedundancyOptimizer(groups_of(other, after, ours), AdamW, lr=0.5)
    start = values(other)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = caught_error(lambda: load_sharded(folder / name, other, mine))
    words = [(str(w.message), w.filename) for w in warned if "saved as one" in str(w.message)]
    kept = torch.equal(start, values(other)) and not full_state_dict(mine, None)["state"]
    return said, kept, [{**g, "params": 0} for g in mine.param_groups], words


def test_options_that_differ_are_refused_and_others_are_those_that_were_saved(folder):
    rate = [{"lr": torch.tensor(0.25), "initial_lr": 0.5, "tag": {"a": [1]}}]
    cases = {
        "differ": ("two", "one", [{"lr": 0.1}, {"lr": 0.2}], [{}]),
        "absent": ("two", "one", [{"tag": 1}, {}], [{}]),
        "number": ("two", "one", [{"weight_decay": 0}, {"weight_decay": 0.0}], [{}]),
        "tensor": ("two", "one", [*rate, *rate], [{}]),
        "split": ("one", "layers", rate, [{"weight_decay": 0.3}, {"lr": 7.0}, {}]),
        "fewer": ("one", "first", [{}], [{}]),
        "more": ("first", "one", [{}], [{}]),
    }
    found = {name: run(2, regroups, folder / name, *case) for name, case in cases.items()}
    for name, words in (
        ("differ", ["one 'lr'", "'0.bias' with 0.1 and '0.weight' with 0.2", "of their own"]),
        ("absent", ["one 'tag'", "with 1 and '0.weight' with nothing"]),
        ("fewer", ["lacks nothing and has ['1.bias', '1.weight'] besides"]),
        ("more", ["lacks ['1.bias', '1.weight'] and has nothing besides", "add_param_group"]),
    ):
        for (kind, text), kept, *_ in found[name]:
            assert kind == "ValueError" and kept and all(w in text for w in words), (name, text)
    for _, _, [group], _ in found["number"]:
        assert group["weight_decay"] == 0
    for _, _, [group], _ in found["tensor"]:
        assert group["lr"].item() == 0.25 and group["tag"] == {"a": [1]}
    for rank, (said, _, groups, warned) in enumerate(found["split"]):
        assert said is None and [g["initial_lr"] for g in (groups[0], groups[2])] == [0.5] * 2
        assert groups[1]["lr"] == 7.0 and "initial_lr" not in groups[1]
        assert groups[0]["lr"] is not groups[2]["lr"] and groups[2]["lr"].item() == 0.25
        assert groups[0]["tag"] is not groups[2]["tag"]
        assert len(warned) == (rank == 0) and all(
            "both get its weight_decay" in w for w, _ in warned
        )
        assert all(file == __file__ for _, file in warned)


def moves_to_another_class(folder):
    model = make_model()
    named = dict(model.named_parameters())

    def optimizer(matrices):
        rest = [p for name, p in named.items() if name not in matrices]
        of = {"optimizer_class": Muon, "params": [named[name] for name in matrices]}
        return ZeroRedundancyOptimizer([of, {"params": rest}], AdamW, lr=0.01)

    zero = optimizer(["0.weight", "1.weight"])
    train(model, zero, range(1))
    save_sharded(folder / "s", model, zero)
    alone = {"params": [named["1.weight"]]}
    rest = {"params": [named["0.bias"], named["1.bias"]]}
    of = {"optimizer_class": Muon, "params": [named["0.weight"]]}
    apart = ZeroRedundancyOptimizer([of, alone, rest], AdamW, lr=0.01)
    into = optimizer(["0.weight"])
    found = [caught_error(lambda z=z: load_sharded(folder / "s", model, z)) for z in (into, apart)]
    halves = [{**of, "params": [named[name]]} for name in ("1.weight", "0.weight")]
    again = ZeroRedundancyOptimizer([rest, *halves], AdamW, lr=0.01)
    load_sharded(folder / "s", model, again)
    train(model, again, range(1, 2))
    return found


def test_a_parameter_that_moves_to_another_class_is_refused(folder):
    for mixed, apart in run(2, moves_to_another_class, folder):
        assert mixed[0] == apart[0] == "ValueError"
        assert "param group 1 must have one" in mixed[1] and "'1.weight' with" in mixed[1]
        assert "no 'betas'" in apart[1] and "same optimizer class" in apart[1]


def descend(call, optimizer, steps, dtype=torch.float64, whole=False):
    """Train on this rank's rows of what one process sees, or on all of them."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    for i in steps:
        torch.manual_seed(i)
        x = torch.randn(12, 5, dtype=dtype)
        optimizer.zero_grad()
        call(x if whole else x[rank::size]).square().mean().backward()
        optimizer.step()


def set_apart(groups):
    for i, group in enumerate(groups):
        group["lr"] *= i + 1
        group["weight_decay"] = 0.1 * i


def descends_alone(division):
    """Train plain optimizers, the second one with these groups and the state of the first."""
    model = make_model()
    first = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    descend(model, first, range(3))
    second = AdamW(groups_of(model, division), lr=0.01, weight_decay=0.1)
    second.state.update(first.state)
    set_apart(second.param_groups)
    descend(model, second, range(3, 6))
    return values(model)


def attached_in(mode, model, division, master=None, **options):
    def sharded(_):
        groups = groups_of(model, division)
        return ZeroRedundancyOptimizer(groups, AdamW, master_dtype=master, **options)

    return MODES[mode].attach(model, sharded)


def saves_in(folder, mode):
    attached = attached_in(mode, make_model(), "one", lr=0.01, weight_decay=0.1)
    descend(attached.call, attached.optimizer, range(3))
    save_sharded(folder, attached.call, attached.optimizer)


def loads_in(folder, mode, division):
    model = make_model(1)
    attached = attached_in(mode, model, division, lr=1.0, weight_decay=0.5)
    load_sharded(folder, attached.call, attached.optimizer)
    set_apart(attached.optimizer.param_groups)
    descend(attached.call, attached.optimizer, range(3, 6))
    return values(model)


@pytest.mark.turns(3)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_regroups_what_the_mode_before_has_saved(folder, mode):
    modes = [*MODES]
    run(2, saves_in, folder / "s", modes[modes.index(mode) - 1])
    for division in ("two", "layers"):
        for found in run(3, loads_in, folder / "s", mode, division):
            torch.testing.assert_close(found, descends_alone(division), rtol=0, atol=1e-14)


def saves_by_fsdp2(folder):
    model = make_model()
    fully_shard(model[0])
    fully_shard(model)
    adamw = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    descend(model, adamw, range(3))
    saved = {"model": get_model_state_dict(model)}
    dcp.save({**saved, "optimizer": get_optimizer_state_dict(model, adamw)}, checkpoint_id=folder)


def test_converted_folders_are_regrouped(folder):
    run(2, saves_by_fsdp2, folder / "fsdp2")
    convert_checkpoint(folder / "fsdp2", folder / "dcp", ranks=3)
    convert_checkpoint(folder / "fsdp2", folder / "a.safetensors")
    convert_checkpoint(folder / "a.safetensors", folder / "safetensors")
    for source in ("dcp", "safetensors"):
        cases = {d: (folder / source, "zero2-interleaved", d) for d in ("two", "layers")}
        for division, found in run_each(2, loads_in, cases).items():
            for one in found:
                torch.testing.assert_close(one, descends_alone(division), rtol=0, atol=1e-14)


def low_in(folder, mode, division, saving=False):
    """Train in bfloat16 with float32 masters, all ranks on the same rows: one rank has the same gradients."""
    model = make_model(0 if saving else 1, torch.bfloat16)
    attached = attached_in(mode, model, division, torch.float32, lr=0.01)
    if not saving:
        load_sharded(folder, attached.call, attached.optimizer)
        set_apart(attached.optimizer.param_groups)
    descend(attached.call, attached.optimizer, range(3), torch.bfloat16, True)
    if saving:
        save_sharded(folder, attached.call, attached.optimizer)
    return values(model)


def test_masters_of_other_ranks_are_regrouped_from_deepspeeds_files_too(folder):
    run(4, low_in, folder / "s", "zero2", "one", True)
    convert_checkpoint(folder / "s", folder / "deepspeed", "deepspeed", ranks=3)
    convert_checkpoint(folder / "deepspeed", folder / "c", ranks=3)
    for division in ("two", "layers"):
        [want] = run(1, low_in, folder / "s", "zero1", division)
        cases = {
            (n, m): (folder / n, m, division) for n in "sc" for m in ("zero1-overlap", "zero2")
        }
        for found in run_each(2, low_in, cases).values():
            assert all(torch.equal(one, want) for one in found)
