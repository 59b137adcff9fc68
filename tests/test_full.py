"""The full state dict in memory and in a file: from every mode and class, to and from other optimizers,
and what is left of a file after whatever may happen to it."""

import errno
import os
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught
from common.modes import MODES
from common.saving import (
    RECIPES,
    Evil,
    Recipe,
    begin,
    check,
    inputs,
    kill_again_and_again,
    limit_of,
    parameters,
    train,
    two_layers,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from zero_nb.checkpoint.files import check_file, read_records
from zero_nb.checkpoint.full import (
    full_optim_state_dict,
    full_state_dict,
    load_full_state_dict,
    read_full,
    shard_full_optim_state_dict,
)
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def equal(one, other):
    """Tell whether two state dicts are the same, bits, types and order of keys."""
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(a == b and equal(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def save(folder, recipe, mode):
    """Train, save in every way, and train on."""
    attached = begin(recipe, mode)
    train(attached, inputs(recipe, 1))
    zero = attached.optimizer
    full_state_dict(zero, folder / "last.pt")
    whole = full_state_dict(zero, None)
    last = full_state_dict(zero, zero.group.size - 1)
    zero.consolidate_state_dict(0)
    if zero.rank == 0:
        assert equal(whole, zero.state_dict())
        torch.save([p.detach() for p in attached.call.parameters()], folder / "model.pt")
    assert (last is not None) == (zero.rank == zero.world_size - 1)
    assert last is None or equal(whole, last)
    train(attached, inputs(recipe, 2))
    return whole, parameters(attached)


def load(folder, recipe, mode):
    attached = begin(recipe, mode)
    load_full_state_dict(attached.optimizer, folder / "last.pt")
    with torch.no_grad():
        for p, q in zip(attached.call.parameters(), torch.load(folder / "model.pt"), strict=True):
            p.copy_(q)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def round_trip(folder, recipe, modes, ranks):
    wholes, [wanted, *_] = zip(*run(ranks[0], save, folder, recipe, modes[0]), strict=True)
    check_file(folder / "last.pt")
    for whole in wholes:
        assert equal(whole, torch.load(folder / "last.pt"))
    for got in run(ranks[1], load, folder, recipe, modes[1]):
        check(wanted, got, limit_of(recipe))


@pytest.mark.turns(3)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on_from_a_file_on_other_ranks(folder, mode):
    round_trip(folder, RECIPES["AdamW"], (mode, mode), (2, 3))


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", RECIPES)
def test_every_class_goes_on_from_a_file_in_another_mode(folder, name):
    round_trip(folder, RECIPES[name], ("zero2", "zero1-overlap"), (3, 2))


@pytest.mark.turns(2)
@pytest.mark.parametrize("ranks", [(1, 2), (1, 4), (2, 1), (3, 4), (4, 1), (4, 3)], ids=str)
def test_muon_and_adamw_go_on_at_any_world_size(folder, ranks):
    round_trip(folder, RECIPES["Muon and AdamW"], ("zero1", "zero1"), ranks)


def test_of_two_levels_one_node_writes(folder):
    round_trip(folder, Recipe(levels=True), ("zero1", "zero2"), (4, 4))


def others(folder, kind, seed):
    """Train with an optimizer of another make, go on from the file, and back again."""
    recipe = RECIPES["AdamW"]
    model = recipe.model()
    other = kind(model)
    other.load_state_dict(torch.load(folder / "last.pt", weights_only=True))
    with torch.no_grad():
        for p, q in zip(model.parameters(), torch.load(folder / "model.pt"), strict=True):
            p.copy_(q)
    for x in inputs(recipe, seed):
        other.zero_grad()
        model(x).square().mean().backward()
        other.step()
    if isinstance(other, TorchZero):
        other.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            torch.save(other.state_dict(), folder / "last.pt")
            torch.save([p.detach() for p in model.parameters()], folder / "model.pt")
    return [p.detach() for p in model.parameters()]


def plain(model):
    return AdamW(model.parameters(), lr=1.0)


def torchs(model):
    return TorchZero(model.parameters(), AdamW, lr=1.0)


@pytest.mark.turns(3)
@pytest.mark.parametrize("mode", MODES)
def test_unsharded_optimizers_and_torchs_class_go_on_and_back(folder, mode):
    recipe = RECIPES["AdamW"]
    [(_, wanted), *_] = run(2, save, folder, recipe, mode)
    check(wanted, others(folder, plain, 2))
    [got, *_] = run(2, others, folder, torchs, 2)
    check(wanted, got)
    on = others(folder, plain, 2)  # from what torch's class saved
    for here in run(3, load, folder, recipe, mode):
        check(on, here)


class Odd(AdamW):
    """An optimizer with values of every form: none, a flag, numbers, a list of tensors, one of another shape."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.update({"flag": True, "none": None, "count": 3, "rate": -0.0, "name": "x"})
            state["history"] = [p.detach().clone(), torch.ones(2)]
            state["turned"] = torch.arange(6.0).reshape(2, 3).t()
            state["wide"] = torch.ones(3).expand(2, 3)
            state["empty"] = torch.empty(0, 4)
            state["bits"] = torch.tensor([True, False])


def odd(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    zero = ZeroRedundancyOptimizer(
        model.named_parameters(),
        Odd,
        shard="whole",
        trust_optimizer_class=True,
        lr=torch.tensor(0.1),
    )
    zero.param_groups[0]["note"] = {"nested": [torch.arange(3), (1, 2.0)]}
    model(torch.ones(1, 5)).sum().backward()
    zero.step()
    full_state_dict(zero, path, "name")
    return full_state_dict(zero, None, "name")


def test_values_of_every_form_arrive(folder):
    for whole in run(3, odd, folder / "odd.pt"):
        found = read_full(folder / "odd.pt")
        assert [*found["state"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert found["param_groups"][0]["params"] == [*found["state"]]
        assert equal(whole, found)
        state = found["state"]["1.weight"]
        assert state["flag"] is True and state["none"] is None and str(state["rate"]) == "-0.0"
        assert len(state["history"]) == 2 and state["turned"].stride() == (1, 3)


def in_little_memory(path):
    model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(20)])
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()

    def peak(to):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        found = full_state_dict(zero, to)
        del found
        return memory("VmHWM") - before

    return peak(path), peak(0)


def memory(what):  # MiB
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if what in s)
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux tells the peak")
def test_a_file_takes_a_bounded_buffer_and_ranks_that_send_take_less(folder):
    state = 20 * 1001 * 1000 * 8 / 2**20
    (file, whole), *rest = run(2, in_little_memory, folder / "last.pt")
    assert file < 64 and whole < state + 64, (file, whole, state)
    assert all(peak < 64 for peaks in rest for peak in peaks), rest


def bad_to(zero):
    return [
        caught(lambda to=to: full_state_dict(zero, to))
        for to in (5, -1, 1.5, "/nowhere/last.pt", "/proc/last.pt", "/")
    ] + [
        caught(lambda: full_state_dict(zero, 0, "names")),
        caught(lambda: full_state_dict(zero, 0, "name")),
        caught(lambda: full_state_dict(AdamW(two_layers().parameters()))),
    ]


def stepped(**options):
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    return zero


def other_forms():
    zero = stepped()
    if zero.rank == 1:
        for state in zero.optim.state.values():
            state["exp_avg"] = state["exp_avg"].float()
    return [caught(lambda: full_state_dict(zero)), caught(lambda: zero.consolidate_state_dict(1))]


def test_parts_of_other_dtypes_are_an_error_on_every_rank():
    for said in run(3, other_forms):
        assert all("'exp_avg'" in s and "torch.float32" in s for s in said), said


def other_arguments():
    zero = stepped()
    rank = zero.rank
    return [
        caught(lambda: full_state_dict(zero, rank)),
        caught(lambda: full_state_dict(zero, 0, ["index", "names"][rank])),
        caught(lambda: full_state_dict(zero, [0, "last.pt"][rank])),
        caught(lambda: full_optim_state_dict([two_layers(), nn.Linear(2, 2)][rank], zero)),
    ]


def test_arguments_of_one_rank_alone_are_errors_on_every_rank():
    words = ["to=0, key_by=index", "'names'", "to=last.pt", "none of the model's"]
    for said in run(2, other_arguments):
        assert all(w in (s or "") for w, s in zip(words, said, strict=True)), said


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(folder):
    (folder / "files").mkdir()
    (folder / "last.pt").symlink_to("files/1.pt")
    full_state_dict(stepped(), folder / "last.pt")
    assert (folder / "last.pt").is_symlink() and len(torch.load(folder / "files" / "1.pt")) == 2


def test_bad_arguments_are_errors_on_every_rank():
    for said in run(2, lambda: bad_to(stepped())):
        words = ["0 to 1", "0 to 1", "a rank of the group", "No such file", "", "folder"]
        words += ["'index' or 'name'", "named_parameters()", "ZeroRedundancyOptimizer"]
        assert all(w in s for w, s in zip(words, said, strict=True)), said


def failing_disk(path, name, error, after):
    """Save, and save again while the disk of one rank fails; then again when it does not."""
    zero = stepped()
    full_state_dict(zero, path)
    before = path.read_bytes()
    zero.step()
    real = getattr(os, name)
    calls = []

    def fails(*args):
        calls.append(args)
        if len(calls) > after:
            raise error
        return real(*args)

    setattr(os, name, fails)
    try:
        said = caught(lambda: full_state_dict(zero, path))
    finally:
        setattr(os, name, real)
    dist.barrier()
    same = path.read_bytes() == before
    left = [file.name for file in path.parent.iterdir()]
    dist.barrier()
    full_state_dict(zero, path)
    return said, same, left, int(torch.load(path)["state"][0]["step"])


@pytest.mark.parametrize(
    "name, error, after",
    [
        ("pwrite", OSError(errno.ENOSPC, "No space left on device"), 0),
        ("pwrite", OSError(errno.ENOSPC, "No space left on device"), 3),
        ("pwrite", MemoryError("no memory"), 1),
        ("fsync", OSError(errno.EIO, "Input/output error"), 0),
        ("replace", FileExistsError(errno.EEXIST, "File exists"), 0),  # a file system without it
        ("replace", PermissionError(errno.EPERM, "Operation not permitted"), 0),
    ],
    ids=str,
)
def test_a_failing_disk_is_an_error_on_every_rank_and_leaves_the_old_file(
    folder, name, error, after
):
    for said, same, left, step in run(3, failing_disk, folder / "last.pt", name, error, after):
        assert str(error) in said and same and left == ["last.pt"] and step == 2, said


def full_disk(path):
    zero = stepped()
    free = shutil.disk_usage
    shutil.disk_usage = lambda folder: free(folder)._replace(free=1000)
    try:
        return caught(lambda: full_state_dict(zero, path))
    finally:
        shutil.disk_usage = free


def test_a_full_disk_is_found_before_anything_is_sent(folder):
    for said in run(2, full_disk, folder / "last.pt"):
        assert "takes 10,688 bytes and 1,000 bytes are free" in said
        assert str(folder / "last.pt") in said and ".tmp" not in said
    assert not [*folder.iterdir()]


def versions(path, count):
    """Save one version after the other; each has its number in all elements."""
    zero = stepped()
    first = read_version(path) + 1 if path.exists() else 0
    for number in range(first, first + count):
        for state in zero.optim.state.values():
            state["exp_avg"].fill_(number)
            state["exp_avg_sq"].fill_(number)
        full_state_dict(zero, path)


def read_version(path):
    check_file(path)
    values = [v for s in read_full(path)["state"].values() for k, v in s.items() if k != "step"]
    numbers = torch.cat([v.flatten() for v in values]).unique()
    assert len(numbers) == 1
    return int(numbers)


def test_the_last_whole_file_survives_kills_at_random_moments(folder):
    path = folder / "last.pt"
    versions(path, 1)
    newest = 0
    for found in kill_again_and_again(
        lambda: versions(path, 10**6), folder, lambda: read_version(path)
    ):
        assert found >= newest
        newest = found
        assert len([*folder.iterdir()]) <= 2
    assert newest >= 10
    versions(path, 1)
    assert [file.name for file in folder.iterdir()] == ["last.pt"]


def two_jobs(path, times):
    job = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][job]
    zero = stepped(process_group=group)
    for _ in range(times):
        full_state_dict(zero, path)
        dist.barrier(group)
        if dist.get_rank(group) == 0:
            assert whole_form(path)
    dist.barrier()
    return [file.name for file in path.parent.iterdir()]


def whole_form(path):
    check_file(path)
    return sorted(read_full(path)["state"]) == [0, 1, 2, 3]


def test_two_jobs_write_to_one_file(folder):
    for names in run(4, two_jobs, folder / "last.pt", 20):
        assert names == ["last.pt"]


def sample(folder):
    """Write a file like those of training, without ranks."""
    zero = stepped()
    path = folder / "sample.pt"
    full_state_dict(zero, path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = sample(tmp_path_factory.mktemp("saved"))
    return path.read_bytes(), torch.load(path)


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("zero"), st.floats(0, 1, exclude_max=True), st.integers(1, 600)),
    st.tuples(st.just("insert"), st.floats(0, 1, exclude_max=True), st.integers(1, 5)),
    st.tuples(st.just("drop"), st.floats(0, 1, exclude_max=True), st.integers(1, 5)),
)


def damaged(data, damage):
    kind, where, amount = damage
    at = int(where * len(data))
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << amount]) + data[at + 1 :]
    if kind == "zero":
        return data[:at] + bytes(len(data[at : at + amount])) + data[at + amount :]
    if kind == "insert":
        return data[:at] + b"x" * amount + data[at:]
    return data[:at] + data[at + amount :]


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damage=DAMAGE)
@example(damage=("cut", 0.0, 0))
@example(
    damage=("flip", 0.10601619113253592, 6)
)  # the first record is listed beyond the file's end
@example(
    damage=("flip", 0.9974900871454541, 0)
)  # zipfile takes the archive for one of several disks
def test_damage_is_an_error_or_does_not_matter(folder, saved, damage):
    data, state = saved
    path = folder / "damaged.pt"
    path.write_bytes(damaged(data, damage))

    def refused(part):
        try:
            found = read_full(path, part)
        except ValueError as error:
            assert "damaged.pt" in str(error)
            return True
        assert part != (0, 1) or equal(found, state)
        return False

    # four ranks look at a quarter each, and see together what one sees that looks at all
    assert refused((0, 1)) == (True in {refused((number, 4)) for number in range(4)})


def test_every_flipped_byte_of_a_tensor_is_found_and_named(folder, saved):
    data, state = saved
    path = folder / "flipped.pt"
    path.write_bytes(data)
    names = [f"['state'][{i}][{key!r}]" for i, values in state["state"].items() for key in values]
    records = read_records(path)
    for number, name in enumerate(names):
        record = records[f"data/{number}"]
        at = record.offset + record.nbytes // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        with pytest.raises(ValueError, match="is damaged") as error:
            read_full(path)
        assert name in str(error.value)


def foreign(state):
    """Give state dicts that do not fit, by name."""
    [group] = state["param_groups"]

    def entry(**values):
        return {**state, "state": {**state["state"], 1: {**state["state"][1], **values}}}

    return {
        "older": {"version": 0, "optimizer": state},
        "list": [state],
        "no groups": {"state": state["state"]},
        "fewer": {**state, "param_groups": [{**group, "params": [0, 1, 2]}]},
        "two groups": {**state, "param_groups": [group, group]},
        "renamed": entry(exp_avg_squared=torch.ones(33)) | {"param_groups": [{}]},
        "shape": entry(exp_avg=torch.ones(7)),
        "stranger": {**state, "state": {**state["state"], 9: {"step": 1}}},
        "text": {**state, "state": "exp_avg"},
        "groups by name": {**state, "param_groups": {"all": group}},
        "no params": {**state, "param_groups": [{"lr": 1.0}]},
        "nothing": {**state, "state": {0: None}},
        "a number": {**state, "state": {0: 5}},
    }


def load_foreign(folder, names):
    zero = stepped()
    before = full_state_dict(zero, None)
    found = {}
    for name in names:
        found[name] = caught(lambda name=name: load_full_state_dict(zero, folder / f"{name}.pt"))
    return found, equal(before, full_state_dict(zero, None))


def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(folder, saved):
    states = foreign(saved[1])
    for name, state in states.items():
        torch.save(state, folder / f"{name}.pt")
    (folder / "empty.pt").write_bytes(b"")
    shutil.make_archive(str(folder / "archive"), "zip", folder, "empty.pt")
    (folder / "archive.zip").rename(folder / "archive.pt")
    (folder / "longer.pt").write_bytes(saved[0] + b"more")
    names = [*states, "empty", "archive", "longer", "not there"]
    for found, same in run(2, load_foreign, folder, names):
        assert same
        for name, said in found.items():
            error = "FileNotFoundError" if name == "not there" else "ValueError"
            assert said.startswith(error) and str(folder / f"{name}.pt") in said, said
        assert "No such file" in found["not there"] and "has no data.pkl" in found["archive"]


def test_no_code_of_a_file_is_run(folder):
    torch.save({"state": {0: Evil(folder / "made")}, "param_groups": []}, folder / "evil.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        read_full(folder / "evil.pt")
    assert not (folder / "made").exists()


class Net(nn.Module):
    """Parameters that are shared, frozen and of several groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.still = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.still(self.inner(self.embed(tokens)).tanh()))

    def groups(self, turned):
        first = {"params": [self.embed.weight], "lr": 1e-2}
        second = {"params": [*self.inner.parameters()], "lr": 3e-3, "weight_decay": 0.2}
        third = {"params": [*self.still.parameters()], "lr": 5e-3}
        return [third, first, second] if turned else [first, second, third]


def net_steps(model, optimizer, seed):
    for i in range(3):
        optimizer.zero_grad()
        tokens = torch.arange(8).remainder(11) + (i + seed) % 3
        nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def net_save(folder, kind, sharded, by_name):
    model = Net()
    groups = model.groups(False)
    optimizer = ZeroRedundancyOptimizer(groups, kind) if sharded else kind(groups)
    net_steps(model, optimizer, 0)
    full = full_optim_state_dict(model, optimizer, model.groups(False), by_name)
    if full:
        torch.save({"model": model.state_dict(), "optim": full}, folder / "net.pt")
    return bool(full), net_steps(model, optimizer, 1)


def net_load(folder, kind, sharded):
    model = Net()
    groups = model.groups(True)
    optimizer = ZeroRedundancyOptimizer(groups, kind, lr=1.0) if sharded else kind(groups, lr=1.0)
    saved = torch.load(folder / "net.pt")
    model.load_state_dict(saved["model"])
    full = shard_full_optim_state_dict(saved["optim"], model, model.groups(True))
    optimizer.load_state_dict(full)
    lrs = [group["lr"] for group in optimizer.param_groups]
    return lrs, net_steps(model, optimizer, 1)


@pytest.mark.turns(3)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [Adam, SGD])
@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)], ids=str)
def test_fsdps_functions_move_groups_in_any_order(folder, ways, kind, by_name):
    saved = run(3, net_save, folder, kind, ways[0], by_name)
    assert [full for full, _ in saved] == [True, False, False]
    for lrs, got in run(2, net_load, folder, kind, ways[1]):
        assert lrs == [5e-3, 1e-2, 3e-3]
        check(saved[0][1], got, 1e-6)


def test_fsdps_functions_refuse_groups_that_do_not_fit():
    model = Net()
    optimizer = AdamW(model.groups(False))
    net_steps(model, optimizer, 0)
    full = full_optim_state_dict(model, optimizer, model.groups(False), True)
    two = model.groups(False)[:2]
    merged = [{"params": [p for g in two for p in g["params"]]}, model.groups(False)[2]]
    for what, words in (
        (lambda: full_optim_state_dict(Net(), optimizer), "none of the model's"),
        (lambda: full_optim_state_dict(model, optimizer, two), "optim_input has param groups"),
        (
            lambda: shard_full_optim_state_dict(full, model, two),
            "2 param groups and the state dict 3",
        ),
        (lambda: shard_full_optim_state_dict(full, model, [*merged, two[0]]), "no counterpart"),
        (lambda: shard_full_optim_state_dict(full, Net(), two), "none of the model's"),
        (
            lambda: shard_full_optim_state_dict(optimizer.state_dict(), model, model.groups(True)),
            "param group 0 has 2 parameters and that of the state dict 1",
        ),
        (
            lambda: shard_full_optim_state_dict({"param_groups": []}, model),
            "must be a full optimizer state dict",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            what()


WRAPPERS = {
    "DDP": lambda model: DistributedDataParallel(model),
    "compiled, in DDP": lambda model: DistributedDataParallel(torch.compile(model)),
    "DDP, compiled": lambda model: torch.compile(DistributedDataParallel(model)),
}


def wrapped_and_bare(folder, wrap):
    """Save state by the names of a wrapped model, load it by those of the bare one, and back."""
    found = []
    for first, second in ((wrap, lambda model: model), (lambda model: model, wrap)):
        optimizers = []
        for change in (first, second):
            model = Net()
            named = change(model).named_parameters()
            optimizers.append(ZeroRedundancyOptimizer(named, AdamW, lr=0.1))
            if change is first:
                net_steps(model, optimizers[0], 0)
        full_state_dict(optimizers[0], folder / "full.pt", key_by="name")
        load_full_state_dict(optimizers[1], folder / "full.pt")
        both = [full_state_dict(optimizer, to=None)["state"] for optimizer in optimizers]
        found.append(equal(*both))
    return found


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_may_differ_by_what_wraps_the_model(folder, wrap):
    assert run(2, wrapped_and_bare, folder, wrap) == [[True, True]] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_state_dict_is_a_copy(sharded):
    model = Net()
    lr = torch.tensor(1e-2)
    optimizer = AdamW(model.parameters(), lr)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=lr)
    net_steps(model, optimizer, 0)
    full = full_optim_state_dict(model, optimizer)
    wanted = deepcopy(full)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    net_steps(model, optimizer, 0)
    assert full["param_groups"][0]["lr"] == wanted["param_groups"][0]["lr"]
    for index, values in wanted["state"].items():
        assert all(full["state"][index][key].equal(value) for key, value in values.items())
