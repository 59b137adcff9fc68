"""A folder gives back what was saved, all of it, to the model and the optimizer that it is of."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from common.sharded_saving import make, step
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.optim import SGD, AdamW

from zero_nb import (
    AsyncCheckpointer,
    ZeroRedundancyOptimizer,
    full_optim_state_dict,
    full_state_dict,
    load_full_state_dict,
    load_sharded,
    run,
    save_sharded,
    shard_full_optim_state_dict,
)
from zero_nb.checkpoint.convert import convert_checkpoint
from zero_nb.checkpoint.names import SavedEntry
from zero_nb.optim.sharded_state_dict import in_part
from zero_nb.optim.tensor_shard import TensorShard


def values_of(model):
    return [value.clone() for value in model.state_dict().values()]


def save_unlike(folder):
    model, zero = make()
    own = {"rank": dist.get_rank(), "losses": [0.5] * 100}
    said = [caught_error(lambda: save_sharded(folder / "s", model, zero, extra=own))]
    with AsyncCheckpointer(model, zero) as checkpointer:
        said.append(caught_error(lambda: checkpointer.save(folder / "a", extra=own)))
    alike = {"b": 1, "a": 2} if dist.get_rank() else {"a": 2, "b": 1}
    save_sharded(folder / "alike", model, zero, extra=alike)
    return said


def test_extra_that_differs_between_ranks_is_refused_on_all_of_them(folder):
    for said in run(3, save_unlike, folder):
        for kind, words in said:
            assert kind == "ValueError" and "ranks disagree on save_sharded" in words
            assert '"rank": 0' in words and "gather what ranks have of their own" in words
    assert [path.name for path in folder.iterdir()] == ["alike"]


def larger():
    model, _ = make()
    model.register_buffer("mean", torch.ones(2))
    model.add_module("head", nn.Linear(3, 3).requires_grad_(False))
    return model


def load_into_another(folder, sharded):
    model = larger()
    trained = [p for p in model.parameters() if p.requires_grad]
    zero = ZeroRedundancyOptimizer(trained, AdamW)
    step(model, zero)
    save_sharded(folder / "s", model, zero)
    other, found = make(seed=1, sharded=sharded)
    step(other, found)
    before = values_of(other)
    said = caught_error(lambda: load_sharded(folder / "s", other, found))
    same = all(map(torch.equal, before, values_of(other)))
    again = larger()
    zero = ZeroRedundancyOptimizer([p for p in again.parameters() if p.requires_grad], AdamW)
    load_sharded(folder / "s", again, zero)
    return said, same, all(map(torch.equal, values_of(model), values_of(again)))


@pytest.mark.parametrize("sharded", [True, False])
def test_what_the_model_does_not_have_is_refused_before_anything_is_loaded(folder, sharded):
    for (kind, words), same, again in run(2, load_into_another, folder, sharded):
        assert kind == "ValueError" and same and again
        assert "has ['head.bias', 'head.weight', 'mean'] besides" in words


class Noting(nn.Linear):
    """Has an extra state."""

    note: object = 0

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def note(folder, before, after):
    model = nn.Sequential(Noting(4, 3))
    model[0].note = before
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    save_sharded(folder / "s", model, zero)
    model[0].note = after
    load_sharded(folder / "s", model, zero)
    return model[0].note


NOTES = [
    ({"amax": 1.0}, {"amax": 2.0}),
    ({"amax": 1.0}, {}),
    ({"amax": 1.0, "steps": [1, {"a": 2}]}, {"other": 3}),
    ({"amax": 1.0}, 5),
    (5, {"amax": 1.0}),
    ([1, 2, 3], [4]),
    ([1, {"a": 1}], [1, {"a": 2}, {"b": 3}]),
    ({0: 1.5, True: {}, "a": [1, {2: 3}]}, {0: 0}),
    ({}, {"a": 1}),
]


@pytest.mark.parametrize(("before", "after"), NOTES)
def test_extra_state_comes_back_whatever_there_is_now(folder, before, after):
    assert run(2, note, folder, before, after) == [before] * 2


class Shares(SGD):
    """Keeps tensors, and an empty dict, of no parameter."""

    def step(self, closure=None):
        shared = self.state["shared"]
        shared.setdefault("basis", torch.arange(3.0))
        shared["n"] = shared.get("n", 0) + 1
        self.state["none yet"] = {}
        return super().step(closure)


def share(folder):
    model, zero = make(optimizer_class=Shares, lr=0.1, momentum=0.9)
    step(model, zero)
    save_sharded(folder / "s", model, zero)
    full_state_dict(zero, folder / "s.pt")
    found = []
    for load in (
        lambda other, zero: load_sharded(folder / "s", other, zero),
        lambda other, zero: load_full_state_dict(zero, folder / "s.pt"),
        lambda other, zero: zero.load_state_dict(torch.load(folder / "s.pt")),
    ):
        other, zero = make(seed=1, optimizer_class=Shares, lr=0.1, momentum=0.9)
        load(other, zero)
        step(other, zero)
        shared = full_state_dict(zero, None)["state"]["shared"]
        found.append((shared["n"], shared["basis"].tolist()))
    return found


def test_tensors_of_no_parameter_come_back(folder):
    for found in run(2, share, folder):
        assert found == [(2, [0.0, 1.0, 2.0])] * 3
    plain = Shares(make(sharded=False, optimizer_class=SGD)[0].parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(torch.load(folder / "s.pt"))
    assert plain.state["shared"]["n"] == 1


def test_state_under_the_name_of_a_parameter_is_not_taken_for_that_of_none():
    model, zero = make()
    step(model, zero)
    full = full_state_dict(zero)
    for key in ("0", "0.weight"):
        state = {key: full["state"][0], **{i: full["state"][i] for i in (1, 2, 3)}}
        with pytest.raises(ValueError, match=f"state of '{key}', which is in none of its groups"):
            zero.load_state_dict({**full, "state": state})


def groups_of(model, rates):
    return [{"params": [*model.parameters()], "lr": rates[0]}] + [
        {"params": [], "lr": rate} for rate in rates[1:]
    ]


def empty_groups(folder):
    model, _ = make()
    zero = ZeroRedundancyOptimizer(groups_of(model, [0.1, 0.2, 0.3]), AdamW)
    step(model, zero)
    save_sharded(folder / "s", model, zero)
    full = full_optim_state_dict(model, zero)
    found = []
    for sharded in (True, False):
        other, _ = make(seed=1)
        groups = groups_of(other, [0.4, 0.5, 0.6])
        optimizer = ZeroRedundancyOptimizer(groups, AdamW) if sharded else AdamW(groups)
        load_sharded(folder / "s", other, optimizer)
        found.append([group["lr"] for group in optimizer.param_groups])
    if full:
        full = shard_full_optim_state_dict(full, model, groups_of(model, [1, 1, 1]))
        found.append([group["lr"] for group in full["param_groups"]])
    return found


def test_groups_without_parameters_keep_their_own_options(folder):
    for found in run(2, empty_groups, folder):
        assert found and all(rates == [0.1, 0.2, 0.3] for rates in found)


META = {"scale": {0: 0.5, 1: 0.25}, "none": {}, "deep": {"a": [{}, {None: 1}], 2.5: {"b": {}}}}


class Preconditions(SGD):
    """Keeps a tensor for each dimension, by its number, as a plain optimizer may."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("pre", {dim: torch.zeros(n) for dim, n in enumerate(p.shape)})
            state.setdefault("log", {})
            state["pre"][0] += 1
        return super().step(closure)


def bring_back(folder, way, sharded):
    kind = AdamW if sharded else Preconditions
    model, optimizer = make(optimizer_class=kind, sharded=sharded, lr=0.1)
    step(model, optimizer)
    optimizer.param_groups[0].update(META)
    if way == "async":
        with AsyncCheckpointer(model, optimizer) as checkpointer:
            checkpointer.save(folder / "s")
    else:
        save_sharded(folder / "s", model, optimizer)
    source = folder / "s"
    for target in ("t.safetensors", "t", "t2") if way == "converted" else ():
        if dist.get_rank() == 0:
            convert_checkpoint(source, folder / target)
        dist.barrier()
        source = folder / target
    other, found = make(seed=1, optimizer_class=kind, sharded=sharded, lr=0.3)
    load_sharded(source, other, found)
    step(other, found)
    group = found.param_groups[0]
    states = [] if sharded else [found.state[p] for p in other.parameters()]
    pre = [{k: v.tolist() for k, v in state["pre"].items()} for state in states]
    return {key: group.get(key) for key in META}, pre, [state.get("log") for state in states]


@pytest.mark.parametrize("way", ["saved", "async", "converted"])
@pytest.mark.parametrize("sharded", [True, False])
def test_dicts_keep_their_keys_and_empty_ones_are_there(folder, way, sharded):
    if way == "converted":
        pytest.importorskip("safetensors")
    for options, pre, log in run(2, bring_back, folder, way, sharded):
        assert options == META and list(map(type, options["deep"])) == [str, float]
        if not sharded:
            ends = [{0: [2.0] * 6, 1: [0.0] * 4}, {0: [2.0] * 6}]
            assert pre[:2] == ends and log == [{}] * 4


def keys_that_json_lacks(folder):
    model, zero = make()
    said = []
    for tag in ({(1, 2): 3}, {1: "a", "1": "b"}):
        zero.param_groups[0]["tag"] = tag
        said.append(caught_error(lambda: save_sharded(folder / "s", model, zero)))
    return said


def test_keys_that_no_table_keeps_are_refused(folder):
    for (kind, words), (_, twice) in run(2, keys_that_json_lacks, folder):
        assert kind == "TypeError" and "tag must be plain, got (1, 2)" in words
        assert "param_groups.0.tag.1" in twice
    assert not [*folder.iterdir()]


def loaded_into_others(folder):
    model, zero = make()
    save_sharded(folder / "s", model, zero)
    wider, deeper, same = nn.Linear(4, 3), nn.Sequential(model, nn.Linear(3, 3)), make()[0]
    said = []
    for other, kind in ((wider, AdamW), (deeper, AdamW), (same, SGD)):
        optimizer = ZeroRedundancyOptimizer(other.parameters(), kind, lr=0.1)
        load = lambda other=other, optimizer=optimizer: load_sharded(folder / "s", other, optimizer)
        said.append(caught_error(load))
    return said


def test_a_folder_that_does_not_fit_is_named(folder):
    for said in run(2, loaded_into_others, folder):
        assert {kind for kind, _ in said} == {"ValueError"}
        assert all(text.startswith(f"{folder / 's'} cannot be loaded: ") for _, text in said)


def save_one(folder):
    model, zero = make()
    step(model, zero)
    save_sharded(folder / "s", model, zero, extra="here")
    return values_of(model), full_state_dict(zero, None)["state"]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_process_without_a_process_group_loads_without_a_warning(folder, sharded):
    saved, state = run(2, save_one, folder)[0]
    model, optimizer = make(seed=1, sharded=sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_sharded(folder / "s", model, optimizer) == "here"
        save_sharded(folder / "again", model, optimizer)
    assert all(map(torch.equal, values_of(model), saved))
    own = full_state_dict(optimizer, None) if sharded else optimizer.state_dict()
    torch.testing.assert_close(own["state"], state, rtol=0, atol=0)


# ---- what is read where ----


def own_parts():
    model = nn.Linear(4, 4, bias=False)
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    weight = model.weight.detach()
    found = in_part({"as it lies": weight, "transposed": weight.t()}, zero.shards)
    return [name for name, value in found.items() if isinstance(value, TensorShard)]


def test_a_transposed_parameter_is_not_read_in_part():
    """A hook of the model may give one; of a square matrix address, dtype and shape stay the same."""
    assert run(2, own_parts) == [["as it lies"]] * 2


@pytest.mark.parametrize(("shape", "device"), [((), "cpu"), ((2,), "meta")])
def test_a_step_count_is_read_to_the_cpu_beside_a_parameter_of_no_dimension(shape, device):
    """On a GPU torch's Adam refuses a step count that lies there; "meta" stands for the GPU."""
    form = SimpleNamespace(size=torch.Size(shape), properties=TensorProperties(torch.float32))
    room = SavedEntry("x", ("state", "scale", "step"), form).empty(
        torch.empty(shape, device="meta")
    )
    assert (room.device.type, room.shape) == (device, shape)
