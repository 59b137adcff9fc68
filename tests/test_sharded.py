"""Sharded checkpoints: folders that are complete or not there, from any number of ranks to any other,
and what is left of one after whatever may happen to it."""

import errno
import io
import itertools
import json
import math
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import caught
from common.modes import MODES
from common.saving import (
    RECIPES,
    begin,
    check,
    half,
    inputs,
    kill_again_and_again,
    parameters,
    train,
    two_layers,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.checkpoint import sharded
from zero_nb.checkpoint.files import new_folder, read_records, records_in
from zero_nb.checkpoint.folder import (
    MANIFEST,
    FolderReader,
    check_folder,
    read_box,
    read_manifest,
    read_table,
    sealed,
    table_checksum,
)
from zero_nb.checkpoint.sharded import load_sharded, newest_checkpoint, save_sharded, tight
from zero_nb.comm import relays
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def save(folder, recipe, mode):
    attached = begin(recipe, mode)
    train(attached, inputs(recipe, 1))
    save_sharded(folder, attached.call, attached.optimizer, 3, {"seen": [3, 0.5, None]})
    assert attached.optimizer.state_dict_type == "consolidated"
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def load(folder, recipe, mode, machines):
    relays._host = lambda: f"{dist.get_rank() % machines:08}"
    attached = begin(recipe, mode)
    assert load_sharded(folder, attached.call, attached.optimizer) == {"seen": [3, 0.5, None]}
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def round_trip(folder, recipe, modes, ranks, machines=1):
    limit = 0.02 if recipe.model is half else 1e-12  # gradients are rounded before they are added
    [wanted, *_] = run(ranks[0], save, folder, recipe, modes[0])
    assert read_manifest(folder)["world_size"] == ranks[0]
    for got in run(ranks[1], load, folder, recipe, modes[1], machines):
        check(wanted, got, limit)


@pytest.mark.parametrize("ranks", [*itertools.product((1, 2, 3, 4), repeat=2)], ids=str)
def test_any_number_of_ranks_goes_on_at_any_other(folder, ranks):
    round_trip(folder / "one", RECIPES["Muon and AdamW"], ("zero1", "zero1"), ranks)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on_in_the_next_one(folder, mode):
    modes = [*MODES]
    other = modes[(modes.index(mode) + 1) % len(modes)]
    round_trip(folder / "one", RECIPES["AdamW"], (mode, other), (2, 3), machines=2)


@pytest.mark.parametrize("name", RECIPES)
def test_every_class_goes_on(folder, name):
    round_trip(folder / "one", RECIPES[name], ("zero2", "zero1-overlap"), (3, 2), machines=2)


def reads(folder, machines, views, moves=False):
    """Load a model of which a part is not trained, and count the elements of it that are read."""
    rank = dist.get_rank()
    relays._host = lambda: f"{rank % machines:08}"

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # by columns
        model[2].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, ZeroRedundancyOptimizer(trained, AdamW, parameters_as_bucket_view=views)

    def step(model, zero):
        model(torch.ones(4, 20)).square().mean().backward()
        zero.step()

    model, zero = make(0)
    step(model, zero)
    save_sharded(folder, model, zero)
    again, other = make(1)
    if moves and rank == 0:  # its buckets are not where its parameters are
        again[0].bias.data = again[0].bias.data.clone()
    read = dict[str, int]()
    real = FolderReader._read_item

    def counting(reader, box, item, planner):
        name = item.dest_index.fqn
        if item.type != LoadItemType.BYTE_IO:
            read[name] = read.get(name, 0) + math.prod(item.lengths)
        real(reader, box, item, planner)

    FolderReader._read_item = counting
    load_sharded(folder, again, other)
    same = again.state_dict()
    assert all(torch.equal(value, same[key]) for key, value in model.state_dict().items())
    of_model = {key: n for key, n in read.items() if key.startswith("model.")}
    whole = {f"model.{key}": value.numel() for key, value in same.items()}
    owned = sum(len(run) for bucket in other.shards[0].buckets for run in bucket.mine)
    trained = [f"model.{n}" for n, p in again.named_parameters() if p.requires_grad]
    return of_model, whole, trained, owned


@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
def test_on_several_machines_a_rank_reads_the_parameters_it_owns(folder, views):
    every = run(3, reads, folder / "one", 3, views)
    _, whole, trained, _ = every[0]
    total = {name: sum(read.get(name, 0) for read, *_ in every) for name in whole}
    for name, numel in whole.items():
        assert total[name] == (numel if name in trained else 3 * numel), name
    for read, _, _, owned in every:
        assert (
            sum(read.get(name, 0) for name in trained) == owned < 0.4 * sum(map(whole.get, trained))
        )


def without_room(folder):
    """Let rank 1 have no memory for what the others send."""
    rank = dist.get_rank()
    relays._host = lambda: f"{rank:08}"
    model, zero = stepped()
    save_sharded(folder, model, zero)
    if rank == 1:
        sharded.gather_parameters = lambda shards: [][1]
    return caught(lambda: load_sharded(folder, model, zero))


def test_a_gather_that_fails_on_one_rank_ends_the_group(folder):
    first, second, third = run(3, without_room, folder / "one", timeout=60)
    assert second == "IndexError: list index out of range"
    assert all("rank 1 failed with IndexError" in said for said in (first, third))


@pytest.mark.parametrize(("machines", "moves"), [(1, False), (3, True)])
def test_on_one_machine_or_where_one_rank_has_moved_parameters_each_reads_all(
    folder, machines, moves
):
    for read, whole, *_ in run(3, reads, folder / "one", machines, False, moves):
        assert read == whole


def two_steps(folder, loads, model, optimizer):
    """Load or do not, take two steps, and save if nothing was loaded."""
    if loads:
        load_sharded(folder, model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    if not loads:
        save_sharded(folder, model, optimizer, 2)


def many_small(folder):
    """Save what lies in buckets, and count what is copied for it, but for single numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(20)])
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, parameters_as_bucket_view=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    copied = []
    real = torch.Tensor.clone
    torch.Tensor.clone = lambda tensor, **options: copied.append(tensor) or real(tensor, **options)
    try:
        save_sharded(folder, model, zero)
    finally:
        torch.Tensor.clone = real
    return sum(tensor.dim() > 0 for tensor in copied)


def test_nothing_is_copied_for_a_save(folder):
    assert run(2, many_small, folder / "one") == [0, 0]


class Joins(TorchDispatchMode):
    """Counts the elements that `torch.cat` copies."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.elements += found.numel()
        return found


def loaded_twice(folder):
    """Load into an optimizer without state, and into the same one after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(20)])
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)

    def step():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()

    def state():
        zero.consolidate_state_dict(to=None)
        return [value["exp_avg"] for value in zero.state_dict()["state"].values()]

    step()
    save_sharded(folder, model, zero)
    saved = state()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    for _ in range(2):
        with Joins() as joins:
            load_sharded(folder, model, zero)
        assert joins.elements == 0
        assert all(map(torch.equal, saved, state()))
        step()
        assert not any(map(torch.equal, saved, state()))


def test_nothing_is_copied_for_a_load(folder):
    run(2, loaded_twice, folder / "one")


def memory_of_a_load(folder):
    model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)])
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    zero.step()
    save_sharded(folder, model, zero)
    load_sharded(folder, model, zero)  # loads the code that it runs
    return peak_bytes(torch.device("cpu"), lambda: load_sharded(folder, model, zero))


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_a_load_holds_a_few_boxes_at_a_time(folder):
    assert run(1, memory_of_a_load, folder / "one")[0] < 30e6  # of 120, in boxes of 4


def given_twice():
    """Load one state dict, of the state to come, twice: a user may have kept it to begin anew."""
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, state_dict_type="sharded")
    kept = zero.state_dict()
    for _ in range(2):
        zero.load_state_dict(kept)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        now = zero.state_dict()["state"]
        runs = [run for value in now.values() for run in value["exp_avg"].runs]
        assert all(run.allclose(torch.full_like(run, 0.1)) for run in runs)


def test_a_state_dict_that_the_user_has_is_copied():
    run(2, given_twice)


def test_a_tight_tensor_is_the_same_memory_and_nothing_else():
    memory = torch.arange(240.0)
    images = memory[24:144].view(2, 5, 4, 3).permute(0, 3, 1, 2)  # channels last
    for value in (memory[3:9], images, memory[7], memory[9:9], memory[::2][1:2]):
        found = tight(value)
        assert found.equal(value) and found.stride() == value.stride()
        assert found.untyped_storage().nbytes() == value.nbytes
        found.mul_(-1)
        assert found.equal(value)
    with_gaps = memory[::2]
    assert tight(with_gaps).data_ptr() == with_gaps.data_ptr()


def fsdp(folder, loads):
    model = two_layers()
    fully_shard(model)
    two_steps(folder, loads, model, AdamW(model.parameters(), lr=1e-2))
    return [p.full_tensor().detach() for p in model.parameters()]


def ours(folder, loads):
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    two_steps(folder, loads, model, zero)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ways", [(fsdp, ours), (ours, fsdp)], ids=["to ours", "to FSDP2"])
def test_checkpoints_of_fsdp2_and_ours_are_alike(folder, ways):
    run(2, ways[0], folder / "one", False)
    [wanted, *_] = run(2, ways[1], folder / "one", True)
    run(3, ways[1], folder / "two", False)  # its own
    [again, *_] = run(2, ways[0], folder / "two", True)
    check(wanted, again)


def stepped():
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    return model, zero


def content(model, zero):
    zero.consolidate_state_dict(None)
    state = zero.state_dict()["state"]
    values = [v for s in state.values() for v in s.values()]
    return [v.double().clone() for v in [*model.state_dict().values(), *values]]


def write_failing(parent, name, error, after):
    """Save, and save again while the disk of the first rank fails; then again when it does not."""
    model, zero = stepped()
    save_sharded(parent / "first", model, zero, 1)
    real = getattr(os, name)
    calls = []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) > after and dist.get_rank() == 0:
            raise error
        return real(*args, **options)

    setattr(os, name, fails)
    try:
        said = caught(lambda: save_sharded(parent / "second", model, zero, 2))
    finally:
        setattr(os, name, real)
    dist.barrier()
    left = sorted(path.name for path in parent.iterdir())
    dist.barrier()
    save_sharded(parent / "second", model, zero, 2)
    check_folder(parent / "first")
    return said, left, newest_checkpoint(parent).name


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize(
    "name, error",
    [
        ("fsync", OSError(errno.ENOSPC, "No space left on device")),
        ("rename", OSError(errno.EPERM, "Operation not permitted")),
    ],
    ids=str,
)
def test_a_failing_disk_is_an_error_on_every_rank_and_leaves_what_was(folder, name, error, after):
    # torch renames its file of metadata by pathlib, which before Python 3.11 keeps the real function
    if name == "rename" and after > (sys.version_info >= (3, 11)):
        pytest.skip("nothing is renamed so often")
    for said, left, newest in run(2, write_failing, folder, name, error, after):
        assert str(error) in (said or ""), said
        assert left == ["first"] and newest == "second"


def bad_calls(parent):
    model, zero = stepped()
    save_sharded(parent / "one", model, zero)
    rank = dist.get_rank()
    return [
        caught(lambda: save_sharded(parent / "one", model, zero)),
        caught(lambda: save_sharded(parent / f"rank{rank}", model, zero)),
        caught(lambda: save_sharded(parent / "two", model, zero, extra={1: 2})),
        caught(lambda: save_sharded(parent / "two", model, zero, extra=float("nan"))),
        caught(lambda: save_sharded(parent / "two", model, zero, extra=[model] * rank)),
        caught(lambda: load_sharded(parent / "two", model, zero)),
        caught(lambda: save_sharded("/proc/one", model, zero)),
        caught(lambda: save_with_sparse_buffer(parent / "two")),
    ]


def save_with_sparse_buffer(path):
    model, zero = stepped()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    save_sharded(path, model, zero)


def test_bad_calls_are_errors_on_every_rank(folder):
    words = ["folder of its own", "rank0", "JSON", "", "", "no complete checkpoint", "Error"]
    words += ["mask of the model has layout torch.sparse_coo"]
    for said in run(2, bad_calls, folder):
        assert all(w in (s or "") and s for w, s in zip(words, said, strict=True)), said
    assert [path.name for path in folder.iterdir()] == ["one"]


def hooked(parent):
    """Let hooks on the state dict of rank 1 fail, at a save and at a load."""
    model, zero = stepped()
    save_sharded(parent / "one", model, zero)

    def fails(*given):
        raise LookupError("no such table")

    hooks = []
    if dist.get_rank() == 1:
        hooks.append(zero.register_state_dict_pre_hook(fails))
        hooks.append(zero.register_load_state_dict_pre_hook(fails))
    said = [
        caught(lambda: save_sharded(parent / "two", model, zero)),
        caught(lambda: load_sharded(parent / "one", model, zero)),
    ]
    for hook in hooks:
        hook.remove()
    load_sharded(parent / "one", model, zero)
    return said


def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(folder):
    theirs, own = run(2, hooked, folder, timeout=60)
    assert own == ["LookupError: no such table"] * 2
    assert theirs == [
        f"LookupError: rank 1 failed at {what}: no such table"
        for what in ("reading the optimizer's state", "load_state_dict")
    ]
    assert [path.name for path in folder.iterdir()] == ["one"]


def unseen(parent):
    """Let rank 1 write to a disk of its own."""
    model, zero = stepped()
    real = dcp.FileSystemWriter
    if dist.get_rank() == 1:
        dcp.FileSystemWriter = lambda path: real(parent / "elsewhere" / path.name)
    try:
        return caught(lambda: save_sharded(parent / "one", model, zero))
    finally:
        dcp.FileSystemWriter = real


def test_ranks_without_a_file_system_in_common_are_told(folder):
    for said in run(2, unseen, folder):
        assert "not" in said and not (folder / "one").exists()


def mismatched(parent, makers):
    found = []
    for make in makers:
        model = make()
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
        before = content(model, zero)
        found.append(caught(lambda m=model, z=zero: load_sharded(parent / "one", m, z)))
        check(before, content(model, zero), 0)
    return found


def wider():
    return nn.Sequential(nn.Linear(12, 34), nn.Tanh(), nn.Linear(34, 7)).double()


def deeper():
    return nn.Sequential(*two_layers(), nn.Linear(7, 7).double())


def test_a_model_that_does_not_fit_is_an_error_on_every_rank_and_stays_as_it_was(folder):
    run(2, lambda: save_sharded(folder / "one", *stepped()))
    for wide, deep in run(3, mismatched, folder, [wider, deeper]):
        assert "(33, 12), the parameter has (34, 12)" in wide and "0.weight" in wide, wide
        assert "lacks ['3.bias', '3.weight']" in deep, deep


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    parent = tmp_path_factory.mktemp("saved")
    run(2, lambda: save_sharded(parent / "one", *stepped(), 5))
    return {path.name: path.read_bytes() for path in (parent / "one").iterdir()}


def lay(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def manifest_with(saved, **changes):
    """Give a manifest that says something else, as if it had been written so."""
    content = {**json.loads(saved[MANIFEST]), **changes}
    del content["crc32"]
    return {MANIFEST: json.dumps(sealed(content)).encode()}


def test_a_manifest_that_says_something_else_is_damaged(folder, saved):
    lay(folder / "one", saved)
    step = str(read_manifest(folder / "one")["step"]).encode()
    other = saved[MANIFEST].replace(b'"step": ' + step, b'"step": 1' + step)
    assert other != saved[MANIFEST]
    lay(folder / "one", {MANIFEST: other})
    with pytest.raises(ValueError, match="is not as it was written; use the checkpoint before it"):
        read_manifest(folder / "one")


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(["__0_0.distcp", "__1_0.distcp", ".metadata", MANIFEST]),
    where=st.floats(0, 1, exclude_max=True),
    change=st.sampled_from(["cut", "flip", "drop"]),
    bit=st.integers(0, 7),
)
def test_damage_is_an_error_or_does_not_matter(folder, saved, name, where, change, bit):
    data = saved[name]
    at = int(where * len(data))
    damaged = {
        "cut": data[:at],
        "flip": data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :],
        "drop": data[:at] + data[at + 1 :],
    }[change]
    lay(folder / "one", {**saved, name: damaged})
    model, zero = stepped()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    try:
        load_sharded(folder / "one", model, zero)
    except ValueError as error:
        assert str(folder / "one") in str(error)
        assert not any(p.any() for p in model.parameters())
    else:
        check(content(*stepped()), content(model, zero))


def test_damage_names_the_tensor(folder, saved):
    lay(folder / "one", saved)
    table = read_table(folder / "one")
    named = set()
    for index, info in table.storage_data.items():
        data = bytearray(saved[info.relative_path])
        box = folder / "box"
        box.write_bytes(data[info.offset : info.offset + info.length])
        records = read_records(box)
        record = records.get("data/0", records["data.pkl"])
        data[info.offset + record.offset + record.nbytes // 2] ^= 255
        lay(folder / "one", {info.relative_path: bytes(data)})
        with pytest.raises(ValueError, match="is damaged") as error:
            check_folder(folder / "one")
        named.add(index.fqn in str(error.value))
        lay(folder / "one", saved)
    assert named == {True}


def test_a_table_of_contents_runs_no_code(folder, saved):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "made"),)

    lay(folder / "one", saved | {".metadata": pickle.dumps(Evil())})
    with pytest.raises(ValueError, match="a table of contents has no"):
        read_table(folder / "one")
    lay(folder / "one", saved)
    model, zero = stepped()
    table = read_table(folder / "one")
    [index] = [i for i in table.storage_data if i.fqn == "optimizer.param_groups.0.weight.lr"] or [
        next(i for i in table.storage_data if i.fqn.endswith("lr"))
    ]
    info = table.storage_data[index]
    evil = Path(folder, "evil")
    torch.save(Evil(), evil)
    (folder / "one" / info.relative_path).write_bytes(saved[info.relative_path] + evil.read_bytes())
    info.offset = len(saved[info.relative_path])
    info.length = evil.stat().st_size
    (folder / "one" / ".metadata").write_bytes(pickle.dumps(table))
    names = json.loads(saved[MANIFEST])["files"]
    sizes = {name: (folder / "one" / name).stat().st_size for name in names}
    crc = table_checksum(folder / "one")
    lay(folder / "one", manifest_with(saved, files=sizes, table_crc32=crc))
    with pytest.raises(ValueError, match="is not as it was written"):
        load_sharded(folder / "one", model, zero)
    assert not (folder / "made").exists()


def test_a_table_may_name_members_of_enumerations_and_nothing_else(folder, saved, monkeypatch):
    lay(folder / "one", saved)
    table = read_table(folder / "one")
    by_name = lambda member, protocol: (
        getattr,
        (type(member), member.name),
    )  # as Python 3.11.2 does
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    (folder / "one" / ".metadata").write_bytes(pickle.dumps(table))
    assert read_table(folder / "one") == table

    class Evil:
        def __reduce__(self):
            return getattr, (torch.Size, "__subclasses__")

    (folder / "one" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="has nothing of"):
        read_table(folder / "one")


def test_a_manifest_names_no_file_elsewhere(folder, saved):
    files = json.loads(saved[MANIFEST])["files"] | {"../secret": 0}
    lay(folder / "one", saved | manifest_with(saved, files=files))
    with pytest.raises(ValueError, match="in another folder"):
        read_manifest(folder / "one")
    lay(folder / "one", manifest_with(saved, format=99))
    with pytest.raises(ValueError, match="has format 99"):
        read_manifest(folder / "one")


def test_the_newest_complete_one_is_found_whatever_the_clock_said(folder, saved):
    for step, when in ((5, 2_000_000_000), (12, 1_000_000_000), (9, 1_900_000_000)):
        lay(folder / f"step-{step}", saved | manifest_with(saved, step=step))
        os.utime(folder / f"step-{step}", (when, when))
    assert newest_checkpoint(folder).name == "step-12"
    (folder / "step-12" / "__0_0.distcp").write_bytes(b"cut off")
    assert newest_checkpoint(folder).name == "step-9"
    (folder / "step-9" / MANIFEST).write_text("{")
    assert newest_checkpoint(folder).name == "step-5"
    (folder / "step-5" / MANIFEST).unlink()
    assert newest_checkpoint(folder) is None
    assert newest_checkpoint(folder / "nothing") is None


def save_on_and_on(parent):
    model, zero = stepped()
    for step in itertools.count(int(newest_checkpoint(parent).name) + 1):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
        save_sharded(parent / str(step), model, zero, step)


def test_kills_at_random_moments_leave_complete_checkpoints(folder):
    save_sharded(folder / "0", *stepped(), 0)
    newest = 0
    for found in kill_again_and_again(
        lambda: save_on_and_on(folder), folder, lambda: int(newest_checkpoint(folder).name)
    ):
        check_folder(folder / str(found))
        assert found >= newest
        newest = found
        assert len([*folder.glob(".*")]) <= 2  # a folder and its lock
    assert newest >= 10
    model, zero = stepped()
    load_sharded(folder / str(newest), model, zero)
    assert all((p == newest).all() for p in model.parameters())
    with new_folder(folder / "next") as beside:
        assert {path.stem for path in folder.glob(".*")} == {beside.stem}


def test_a_folder_of_a_job_that_lives_is_left_alone(folder):
    with new_folder(folder / "one") as one:
        (one / "part").write_text("x")
        with new_folder(folder / "two") as two:
            assert one.is_dir() and two.is_dir()
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == [
        "one",
        "one/part",
        "two",
    ]


def in_groups(parent):
    """Two jobs in one: ranks 0 and 2, and ranks 1 and 3, each with a checkpoint of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    folder = parent / f"of-{rank % 2}"

    def make():
        torch.manual_seed(rank % 2)
        model = two_layers()
        with torch.no_grad():
            model[0].bias += rank % 2
        return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, mine, lr=1e-2)

    def step(model, zero):
        model(torch.ones(4, 12, dtype=torch.float64)).square().mean().backward()
        zero.step()
        zero.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model, zero = make()
    step(model, zero)
    save_sharded(folder, model, zero, 1, extra=rank % 2, process_group=mine)
    wanted = step(model, zero)
    again, other = make()
    extra = load_sharded(folder, again, other, process_group=mine)
    return extra, wanted, step(again, other), read_manifest(folder)["world_size"]


def test_groups_of_ranks_save_and_load_on_their_own(folder):
    for rank, (extra, wanted, got, size) in enumerate(run(4, in_groups, folder)):
        assert (extra, size) == (rank % 2, 2)
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_a_box_is_read_as_torch_reads_it():
    base = torch.arange(24.0)
    tensors = {
        **{str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.float16, torch.uint16)},
        **{str(d): torch.ones(2, 2).to(d) for d in (torch.float8_e5m2, torch.bfloat16, torch.bool)},
        "transposed": base.view(4, 6).t(),
        "channels_last": base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "part": base[3:9:2],
        "number": torch.tensor(3, dtype=torch.int32),
        "complex": torch.view_as_complex(base.view(12, 2)),
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    for name, tensor in tensors.items():
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        box = buffer.getbuffer()
        records = records_in(io.BytesIO(box), name)
        mine = read_box(box, records)
        theirs = torch.load(io.BytesIO(box), weights_only=True)
        same = (mine.dtype, mine.shape, mine.layout) == (theirs.dtype, theirs.shape, theirs.layout)
        assert same and (mine.is_sparse or mine.stride() == theirs.stride()), name
        assert repr(mine.detach().resolve_conj()) == repr(theirs.detach().resolve_conj()), name
        plain = tensor.layout == torch.strided and tensor.numel()
        if plain and name not in ("parameter", "conjugate"):
            before = bytes(mine.untyped_storage())
            at = records["data/0"]
            for i in range(at.offset, at.offset + at.nbytes):
                box[i] ^= 1
            assert bytes(mine.untyped_storage()) != before, name  # it was not copied


@pytest.mark.parametrize("value", [{"a": 1}, pytest, [torch.ones(2)]], ids=str)
def test_a_box_without_a_tensor_is_refused(value):
    buffer = io.BytesIO()
    if value is pytest:  # a pickle that would import something
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'false'\ntR.")
            archive.writestr("archive/version", b"3\n")
    else:
        torch.save(value, buffer)
    box = buffer.getbuffer()
    with pytest.raises((TypeError, pickle.UnpicklingError, RuntimeError)):
        read_box(box, records_in(io.BytesIO(box), "box"))


def test_a_box_whose_numbers_are_missing_is_refused():
    """torch.Tensor.set_ makes room for what a storage lacks, and would give what is there by chance."""
    for numel in (0, 2):
        buffer = io.BytesIO()
        torch.save(torch.ones(4), buffer)
        short = io.BytesIO()
        with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(short, "w") as archive:
            for info in whole.infolist():
                data = whole.read(info)
                if info.filename.endswith("data/0"):
                    data = data[: 4 * numel]
                archive.writestr(info.filename, data)
        box = short.getbuffer()
        with pytest.raises(ValueError, match="not all there"):
            read_box(box, records_in(io.BytesIO(box), "box"))


def test_a_tensor_that_has_no_room_is_the_error_that_is_raised():
    """Closing the file, which a view in the traceback still used, raised another one in its place."""
    buffer = io.BytesIO()
    torch.save(torch.ones(4), buffer)
    index = SimpleNamespace(fqn="weight")
    item = SimpleNamespace(type="tensor", storage_index=index, storage_offsets=(0,), lengths=(4,))
    planner = SimpleNamespace(resolve_tensor=lambda item: torch.empty(3))
    reader = object.__new__(FolderReader)
    room = r"weight: \(4,\) was saved, and there is room for \(3,\)"
    data = memoryview(bytearray(buffer.getbuffer()))
    with pytest.raises(ValueError, match=room), data as box:
        reader._read_item(box, item, planner)
