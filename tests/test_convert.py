"""Checkpoints from any format to any other: training after the way round equals training without it, in
little memory, and nothing damaged or foreign passes."""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from common.saving import RECIPES, Evil, begin, check, inputs, limit_of, parameters, same, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.files import read_records
from zero_nb.checkpoint.formats import describe_checkpoint, format_of, read_weights
from zero_nb.checkpoint.full import load_full_state_dict
from zero_nb.checkpoint.saved_tensors import Part, SavedTensor, replace_tensors, stamp_of
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.state_entry import MASTER

DEEPSPEED = Path(__file__).parent / "deepspeed"
TARGETS = {
    "full": "out.pt",
    "safetensors": "out.safetensors",
    "sharded": "out",
    "deepspeed": "deepspeed",
}


def content(path):
    """Give all of a checkpoint, by name and in memory."""
    found = describe_checkpoint(path)
    whole = replace_tensors(
        (found.optimizer, found.model), lambda _, v: v.read() if isinstance(v, SavedTensor) else v
    )
    optimizer, model = whole
    names = found.names
    state = {names[i]: values for i, values in optimizer["state"].items()}
    groups = [
        {k: v for k, v in g.items() if k not in ("params", "step")}
        for g in optimizer["param_groups"]
    ]
    return state, groups, model


def save(folder, recipe, mode):
    attached = begin(recipe, mode)
    train(attached, inputs(recipe, 1))
    save_sharded(folder, attached.call, attached.optimizer, 3)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def load(folder, recipe, mode):
    attached = begin(recipe, mode)
    load_sharded(folder, attached.call, attached.optimizer)
    train(attached, inputs(recipe, 2))
    return parameters(attached)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", RECIPES)
def test_every_class_goes_on_after_a_way_through_the_formats(folder, name):
    recipe = RECIPES[name]
    [wanted, *_] = run(2, save, folder / "begin", recipe, "zero2")
    convert_checkpoint(folder / "begin", folder / "a.safetensors")
    convert_checkpoint(folder / "a.safetensors", folder / "b", ranks=3)
    same(content(folder / "begin"), content(folder / "b"))
    for got in run(2, load, folder / "b", recipe, "zero1-overlap"):
        check(wanted, got, limit_of(recipe))


@pytest.mark.turns(4)
@pytest.mark.parametrize("ranks", [*itertools.product((1, 2, 3, 4), repeat=2)], ids=str)
def test_folders_are_cut_for_any_number_of_ranks(folder, ranks):
    convert_checkpoint(DEEPSPEED / "fp32", folder / "first", ranks=ranks[0])
    convert_checkpoint(folder / "first", folder / "second", ranks=ranks[1])
    assert len([*(folder / "second").glob("*.distcp")]) == ranks[1]
    same(content(DEEPSPEED / "fp32"), content(folder / "second"))
    convert_checkpoint(folder / "second", folder / "third", "deepspeed", ranks=ranks[0])
    same(content(folder / "third"), content(folder / "first"))


@pytest.mark.turns(4)
@pytest.mark.parametrize("ways", [*itertools.permutations(TARGETS, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nothing_is_lost_between_any_two_formats(folder, dtype, ways):
    model = folder / "model.safetensors"
    convert_checkpoint(DEEPSPEED / dtype, model)
    source = folder / f"from-{TARGETS[ways[0]]}"
    target = folder / TARGETS[ways[1]]
    convert_checkpoint(DEEPSPEED / dtype, source, ways[0], ranks=2)
    weights = model if ways[0] == "full" else None  # which has none
    convert_checkpoint(source, target, ways[1], ranks=3, model=weights, key_by="name")
    assert format_of(target) == ways[1] == verify_checkpoint(target).format
    wanted = content(DEEPSPEED / dtype)
    got = content(target)
    same(wanted[:2], got[:2])
    if ways[1] != "full":
        same(wanted[2], got[2])


class Net(nn.Module):
    """The model of tests/deepspeed/train.py."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 3, bias=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def go_on(path, rank=0, ranks=1):
    """Go on from DeepSpeed's third step as tests/deepspeed/train.py does."""
    torch.manual_seed(3)
    model = Net()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(n, named[n]) for n in ("a.weight", "b.weight")]},
        {"params": [("a.bias", named["a.bias"])]},
    ]
    weights = read_weights(DEEPSPEED / "fp32")
    model.load_state_dict({name: weight.read() for name, weight in weights.items()})
    call = model
    if ranks > 1:
        optimizer = ZeroRedundancyOptimizer(groups, AdamW, lr=1.0)
        load_full_state_dict(optimizer, path)
        call = DDP(model)
    else:
        optimizer = AdamW(groups, lr=1.0)
        optimizer.load_state_dict(torch.load(path))
    for step in (3, 4):
        batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        call(batch[rank::ranks]).backward()
        optimizer.step()
    return {name: w.detach() for name, w in model.state_dict().items()}


def go_on_here(path):
    return go_on(path, torch.distributed.get_rank(), torch.distributed.get_world_size())


def test_a_run_of_deepspeed_goes_on_unsharded_and_on_other_ranks(folder):
    wanted = torch.load(DEEPSPEED / "fp32" / "after.pt")
    convert_checkpoint(DEEPSPEED / "fp32", folder / "out.pt")
    for got in (go_on(folder / "out.pt"), *run(2, go_on_here, folder / "out.pt")):
        for name in wanted:  # Adam divides by the root of the square of a mean: few roundings
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-7)
    before = read_weights(DEEPSPEED / "fp32")["a.weight"].read()
    assert (before - wanted["a.weight"]).abs().max() > 1e-3  # it did go on


def test_copies_of_deepspeeds_weights_in_32_bits_are_master_copies():
    found = describe_checkpoint(DEEPSPEED / "bf16")
    for i, name in enumerate(found.names):
        copy = found.optimizer["state"][i][MASTER].read()
        weight = found.model[name].read()
        assert weight.dtype == torch.bfloat16 and torch.equal(copy.bfloat16(), weight)
        assert not torch.equal(copy, weight.float())
    assert MASTER not in describe_checkpoint(DEEPSPEED / "fp32").optimizer["state"][0]


def tensor_of(path, value, cuts, dtype=torch.float32):
    """Write boxes of a tensor into files of their own, in memory of many forms."""
    parts = []
    for number, (offsets, sizes) in enumerate(cuts):
        box = value
        for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, first, size)
        turned = box.permute(*reversed(range(box.dim()))).clone(
            memory_format=torch.contiguous_format
        )
        file = path / f"{number}"
        file.write_bytes(b"x" * number + turned.reshape(-1).view(torch.uint8).numpy().tobytes())
        stride = tuple(reversed(turned.stride()))
        with open(file, "rb") as opened:
            stamp = stamp_of(opened)
        parts.append(Part(file, number, tuple(offsets), tuple(sizes), stride, stamp))
    return SavedTensor(value.dtype, tuple(value.shape), tuple(parts))


def test_reading_makes_up_no_devices(monkeypatch):
    """Where there is no GPU, torch's mode for tensors without elements makes a build for GPUs believe in
    some: after the next backward, no forked process can run one."""

    def refuse():
        pytest.fail("CUDA devices were made up")

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", refuse)
    assert describe_checkpoint(DEEPSPEED / "fp32").optimizer["state"]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    cut=st.integers(0, 7),
    limit=st.sampled_from([4, 40, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_slabs_put_boxes_of_any_form_together(folder, shape, dim, cut, limit, dtype):
    value = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    dim = dim % len(shape)
    cut = min(cut, shape[dim])
    boxes = []
    for first, size in ((0, cut), (cut, shape[dim] - cut)):
        if size:
            offsets = [0] * len(shape)
            offsets[dim] = first
            boxes.append((offsets, [*shape[:dim], size, *shape[dim + 1 :]]))
    saved = tensor_of(folder, value, boxes)
    found = [(first, slab.clone()) for first, slab in saved.slabs(limit)]
    assert torch.equal(torch.cat([slab for _, slab in found]).view(shape), value)
    assert [first for first, _ in found] == [
        *itertools.accumulate((len(slab) for _, slab in found[:-1]), initial=0)
    ]
    assert max(slab.nbytes for _, slab in found) <= max(limit, dtype.itemsize)
    if len(boxes) == 2:
        lacking = SavedTensor(dtype, saved.shape, saved.parts[:1])
        with pytest.raises(ValueError, match="elements"):
            lacking.read()


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Give a checkpoint of each format, and what is in it."""
    parent = tmp_path_factory.mktemp("samples")
    for form, name in TARGETS.items():
        convert_checkpoint(DEEPSPEED / "fp32", parent / name, form, ranks=2, key_by="name")
    return parent


@settings(
    deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    form=st.sampled_from([*TARGETS]),
    which=st.integers(0, 10),
    where=st.floats(0, 1, exclude_max=True),
    change=st.sampled_from(["cut", "flip", "drop"]),
    bit=st.integers(0, 7),
)
def test_damage_is_an_error_or_does_not_matter(folder, samples, form, which, where, change, bit):
    shutil.rmtree(folder / "x", ignore_errors=True)
    (folder / "x").mkdir()
    source = folder / "x" / TARGETS[form]
    copy = shutil.copytree if (samples / source.name).is_dir() else shutil.copy
    copy(samples / source.name, source)
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    path = files[which % len(files)]
    data = path.read_bytes()
    at = int(where * len(data))
    path.write_bytes(
        {
            "cut": data[:at],
            "flip": data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :],
            "drop": data[:at] + data[at + 1 :],
        }[change]
    )
    target = folder / "x" / "again.pt"
    try:
        convert_checkpoint(source, target, key_by="name")
    except ValueError:
        assert not target.exists()
    else:
        same(content(samples / "out.pt")[:2], content(target)[:2])
    assert not [*(folder / "x").glob(".*")]


@pytest.mark.parametrize("form", ["safetensors", "full"])
def test_a_flipped_bit_where_a_file_describes_itself(folder, samples, form):
    """The header of safetensors; the directory at the end of an archive, byte for byte."""
    good = samples / TARGETS[form]
    data = bytearray(good.read_bytes())
    header = int.from_bytes(data[:8], "little")
    path = folder / good.name
    accepted = 0
    for at in range(8, 8 + header, 3) if form == "safetensors" else range(-700, 0):
        data[at] ^= 1 << at % 7
        path.write_bytes(data)
        data[at] ^= 1 << at % 7
        try:
            verify_checkpoint(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            same(content(path)[:2], content(good)[:2])
            accepted += 1
    assert form == "full" or not accepted  # dates and versions in an archive mean nothing


def test_a_flipped_bit_in_how_a_record_is_kept(folder, samples):
    """Torch reads a record that seems to be compressed, or a folder, as whatever was in memory before."""
    good = samples / TARGETS["full"]
    data = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        entry = archive.start_dir
        names = [info.filename for info in archive.infolist()]
    path = folder / good.name
    for name in names:
        flags_and_method = range(entry + 8, entry + 12)
        letters = range(entry + 46, entry + 46 + len(name))
        assert data[letters.start : letters.stop] == name.encode()
        bits = itertools.product([*flags_and_method, *letters[-3:]], range(8))
        for at, bit in [*bits, (entry + 38, 4)]:  # the last says that it is a folder
            data[at] ^= 1 << bit
            path.write_bytes(data)
            data[at] ^= 1 << bit
            with pytest.raises(ValueError, match=re.escape(str(path))):
                read_records(path)
        entry += 46 + sum(struct.unpack_from("<HHH", data, entry + 28))


def test_no_code_of_a_foreign_file_is_run(folder):
    shutil.copytree(DEEPSPEED / "fp32", folder / "ds")
    rank = folder / "ds" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Evil(folder / "made")}, rank)
    torch.save({"state": {0: Evil(folder / "made")}, "param_groups": []}, folder / "evil.pt")
    for path in (folder / "ds", folder / "evil.pt"):
        with pytest.raises(ValueError, match="cannot be read"):
            convert_checkpoint(path, folder / "out.pt")
    assert sorted(p.name for p in folder.iterdir()) == ["ds", "evil.pt"]


def test_what_is_missing_or_does_not_fit_is_said(folder):
    ds = shutil.copytree(DEEPSPEED / "fp32", folder / "ds")
    inside = ds / "global_step3"
    (inside / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(folder / "away")
    with pytest.raises(ValueError, match=r"has 1 files of ranks and was written by 2"):
        describe_checkpoint(ds)
    (folder / "away").rename(inside / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"it has those of \[0, 2\]"):
        describe_checkpoint(ds)
    shutil.copy(
        inside / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        inside / "zero_pp_rank_1_mp_rank_01_optim_states.pt",
    )
    with pytest.raises(ValueError, match="tensor parallelism"):
        describe_checkpoint(ds)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    (folder / "weights.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="no state of an optimizer"):
        describe_checkpoint(folder / "weights.safetensors")
    other = {
        name: torch.zeros(weight.shape).t()
        for name, weight in read_weights(DEEPSPEED / "fp32").items()
        if len(weight.shape) < 3
    }
    torch.save(other, folder / "other.pt")
    with pytest.raises(ValueError, match="are those of another model"):
        convert_checkpoint(DEEPSPEED / "fp32", folder / "out", model=folder / "other.pt")
    assert not (folder / "out").exists()


def test_what_is_no_plain_tensor_or_no_state_is_refused_by_its_place(folder):
    """The view of the memory of a conjugate was taken for the tensor."""
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    groups = [{"params": [0], "lr": 1.0}]
    for value, words in (
        (conjugate, "is a conjugate view"),
        (conjugate.imag, "is a negative view"),
        (torch.eye(2).to_sparse(), "is of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "is on the meta device"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is quantized"),
    ):
        torch.save({"state": {0: {"exp_avg": value}}, "param_groups": groups}, folder / "odd.pt")
        with pytest.raises(
            ValueError, match=rf"odd.pt .* at \['state'\]\[0\]\['exp_avg'\] .*{words}"
        ):
            convert_checkpoint(folder / "odd.pt", folder / "out.pt")
    for state in (None, 5):
        torch.save({"state": {0: state}, "param_groups": groups}, folder / "odd.pt")
        with pytest.raises(ValueError, match=f"odd.pt: the state of 0 must be a dict, got {state}"):
            verify_checkpoint(folder / "odd.pt")
    torch.save({"state": {}, "param_groups": groups}, folder / "odd.pt")
    with open(folder / "odd.pt", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"odd.pt .*bytes follow its end"):
        verify_checkpoint(folder / "odd.pt")
    assert not (folder / "out.pt").exists()


def edited(path, change):
    data = torch.load(path, weights_only=False)
    change(data)
    torch.save(data, path)


RANKS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]


def other_files_of_ranks(inside):
    """Give what may happen to a folder of DeepSpeed's, and what is said of it."""
    one, two = (inside / name for name in RANKS)
    model = inside / "mp_rank_00_model_states.pt"
    latest = inside.parent / "latest"

    def swap():
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)

    def state(path, change):
        edited(path, lambda data: change(data["optimizer_state_dict"]["base_optimizer_state"]))

    def rename(data):
        shapes = data["param_shapes"][0]
        shapes["strange"] = shapes.pop("a.weight")

    return [
        (swap, "differs between the ranks' files and the model's"),
        (lambda: shutil.copy(one, two), "differs between the ranks' files and the model's"),
        (lambda: shutil.copy(one, inside / f"bf16_{two.name}"), "remove one save's"),
        (
            lambda: state(one, lambda base: base["state"][0].pop("exp_avg")),
            "'exp_avg' of the state",
        ),
        (lambda: state(two, lambda base: base["state"][1].update(step=9)), "'step' of the state"),
        (
            lambda: state(two, lambda base: base["param_groups"][1].update(lr=9)),
            "'lr' of param group",
        ),
        (lambda: edited(model, rename), "'strange' has shape .* None in the module"),
        (
            lambda: edited(model, lambda data: data["param_shapes"][0].popitem()),
            "has 1 parameters in",
        ),
        (lambda: latest.write_text("global_step9"), "latest must name a folder in"),
        (lambda: latest.write_text("../ds/global_step3"), "latest must name a folder in"),
        (lambda: latest.write_bytes(b"\xff\xfe"), "latest cannot be read"),
    ]


def test_files_of_deepspeed_that_are_not_of_one_save_are_refused(folder, samples):
    ds = folder / "ds"
    count = len(other_files_of_ranks(ds / "global_step3"))
    for number in range(count):
        shutil.copytree(samples / "deepspeed", ds)
        damage, words = other_files_of_ranks(ds / "global_step3")[number]
        damage()
        with pytest.raises(ValueError, match=words):
            verify_checkpoint(ds)
        shutil.rmtree(ds)


@pytest.mark.parametrize("lacks", ["a.weight", "b.weight"])
def test_deepspeed_takes_no_group_in_which_a_parameter_was_never_stepped(folder, lacks):
    model = Net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    for name, p in model.named_parameters():
        p.grad = None if name == lacks else torch.ones_like(p)
    optimizer.step()
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, folder / "source.pt")
    with pytest.raises(ValueError, match=f"'{lacks}' has no state where others"):
        convert_checkpoint(folder / "source.pt", folder / "ds", "deepspeed")
    assert not (folder / "ds").exists()


def test_names_that_are_there_twice_or_are_none_are_refused(folder):
    path = folder / "source.pt"
    for names, words in (
        (["a", "a"], "has name 'a' 2 times"),
        (["a", "c"], "has name 'c' 2 times"),  # in two groups
        (["a"], "a list of 2 texts"),
        (["a", "b", "d"], "a list of 2 texts"),
        ([0, 1], "a list of 2 texts"),
        ("ab", "a list of 2 texts"),
        (None, "a list of 2 texts"),
    ):
        groups = [
            {"params": [0, 1], "param_names": names},
            {"params": [2], "param_names": ["c"]},
        ]
        torch.save({"state": {0: {"x": 1}}, "param_groups": groups}, path)
        with pytest.raises(ValueError, match=words):
            convert_checkpoint(path, folder / "out.pt", key_by="name")
    groups = [{"params": [7, 5]}]  # torch counts from 0, others need not
    torch.save({"state": {5: {"x": 1}, "all": {"x": 2}}, "param_groups": groups}, path)
    with pytest.raises(ValueError, match="names must be 2 different texts"):
        convert_checkpoint(path, folder / "out.pt", names="ab")
    convert_checkpoint(path, folder / "out.pt", names=["a", "b"], key_by="name")
    assert torch.load(folder / "out.pt")["state"] == {"b": {"x": 1}, "all": {"x": 2}}


def sgd_without_state(folder):
    model = Net()
    save_sharded(
        folder / "sgd", model, ZeroRedundancyOptimizer(model.named_parameters(), SGD, lr=1.0)
    )


def load_sgd_without_state(path):
    model = Net()
    zero = ZeroRedundancyOptimizer(model.named_parameters(), SGD, lr=2.0)
    load_sharded(path, model, zero)
    assert zero.param_groups[0]["lr"] == 1.0


def test_a_folder_of_an_optimizer_without_state_is_described_and_rewritten(folder):
    run(2, sgd_without_state, folder)
    convert_checkpoint(folder / "sgd", folder / "out.pt")
    assert torch.load(folder / "out.pt")["state"] == {}
    convert_checkpoint(folder / "sgd", folder / "cut", ranks=3)
    run(2, load_sgd_without_state, folder / "cut")


@pytest.mark.parametrize("form", [*TARGETS])
def test_what_is_written_is_on_the_disk_and_no_other_job_takes_it(folder, monkeypatch, form):
    flushed = set()
    fsync = os.fsync
    target = folder / TARGETS[form]
    others = []

    def advance(nbytes):
        if not others:
            others.append(form)
            if form in ("full", "safetensors"):  # another job writes the same file meanwhile
                convert_checkpoint(DEEPSPEED / "fp32", target)

    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(os.fstat(fd).st_ino), fsync(fd)))
    convert_checkpoint(DEEPSPEED / "fp32", target, form, ranks=2, advance=advance)
    written = [target, *target.rglob("*")]
    assert [path for path in written if path.stat().st_ino not in flushed] == []
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in written if path.is_file()} == {0o666 & ~umask}
    verify_checkpoint(target)


def limited(parent, form):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(OSError) as raised:
        convert_checkpoint(DEEPSPEED / "fp32", parent / TARGETS[form], form, check=False)
    return raised.value.errno, raised.value.filename, [path.name for path in parent.iterdir()]


@pytest.mark.parametrize("form", [*TARGETS])
def test_the_error_of_the_disk_is_what_the_disk_said(folder, form):
    assert run(1, limited, folder, form) == [(errno.EFBIG, str(folder / TARGETS[form]), [])]


@pytest.mark.parametrize("form", [*TARGETS])
@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch, form, after):
    calls = itertools.count()
    read = SavedTensor.read_box

    def failing(self, *args):  # where elements are on their way to the new files
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(self, *args)

    convert_checkpoint(DEEPSPEED / "fp32", folder / "source.safetensors")
    monkeypatch.setattr(SavedTensor, "read_box", failing)
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(folder / "source.safetensors", folder / TARGETS[form], form, check=False)
    assert [p.name for p in folder.iterdir()] == ["source.safetensors"]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux tells what is mapped")
def test_a_conversion_maps_no_file(folder):
    model = nn.Sequential(*[nn.Linear(50, 50) for _ in range(10)])
    torch.save(
        {"model": model.state_dict(), "o": AdamW(model.named_parameters()).state_dict()},
        folder / "a.pt",
    )
    mapped = []
    convert_checkpoint(
        folder / "a.pt",
        folder / "b",
        advance=lambda _: mapped.append(Path("/proc/self/maps").read_text().count("a.pt")),
    )
    assert len(mapped) >= 20 and max(mapped) == 0


def peak_of_a_conversion(source, target, form):
    """Give how much a process's own memory (anonymous, MiB) grew at most while it converted."""

    def own():
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if "RssAnon" in line).split()[1])

    most = [own()]
    convert_checkpoint(
        source, target, form, ranks=2, check=False, advance=lambda _: most.append(own())
    )
    return (max(most) - most[0]) / 1024


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="Linux tells what memory is whose"
)
def test_a_conversion_needs_the_memory_of_a_few_slabs(folder):
    model = nn.Linear(6000, 6000, bias=False)
    optimizer = SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones(6000, 6000)
    optimizer.step()
    optimizer.state[model.weight]["other"] = torch.ones(6000, 6000)
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, folder / "source.pt")  # 412 MiB
    run(
        1, lambda: convert_checkpoint(DEEPSPEED / "fp32", folder / "first")
    )  # imports what it needs
    for form in ("full", "safetensors", "sharded", "deepspeed"):
        target = folder / TARGETS[form]
        [grown] = run(1, peak_of_a_conversion, folder / "source.pt", target, form)
        assert grown < 200, (form, grown)  # a slab of 64 MiB, its copy, and what torch.save holds
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)


def torchs_own(folder):
    """Save with torch's class and with DCP from FSDP2, without anything of ours; give what each had."""
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 5))
    theirs = TorchZero(plain.parameters(), AdamW, lr=1e-2)
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    theirs.step()
    theirs.consolidate_state_dict(0)
    model = fully_shard(
        nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 5)), reshard_after_forward=False
    )
    first, *others = model.parameters()
    optimizer = AdamW([{"params": [first], "weight_decay": 0.1}, {"params": others}], lr=1e-2)
    model(torch.ones(3, 12)).sum().backward()
    optimizer.step()
    parts = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save({"app": parts}, checkpoint_id=folder / "fsdp")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    parts["optim"] = get_optimizer_state_dict(model, optimizer, options=flat)
    dcp.save(parts, checkpoint_id=folder / "flat")
    whole = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    if torch.distributed.get_rank() == 0:
        torch.save({"net": plain.state_dict(), "opt": theirs.state_dict()}, folder / "theirs.pt")
        return theirs.state_dict()["state"], whole["state"]
    return None


def test_files_that_others_wrote_are_read(folder):
    [found, _] = run(2, torchs_own, folder)
    for state, source in zip(found, ("theirs.pt", "fsdp"), strict=True):
        form = verify_checkpoint(folder / source).format
        convert_checkpoint(
            folder / source, folder / f"{form}.pt", key_by="index" if form == "full" else "name"
        )
        got = torch.load(folder / f"{form}.pt")
        same(dict(state), got["state"])
    assert len(read_weights(folder / "theirs.pt")) == len(read_weights(folder / "fsdp")) == 4
    same(content(folder / "fsdp"), content(folder / "flat"))
    with pytest.raises(ValueError, match=r"which are 'app\.optim'"):
        describe_checkpoint(folder / "fsdp", "optim")
    plain = AdamW(nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 5)).parameters(), lr=1.0)
    plain.load_state_dict(torch.load(folder / "full.pt"))
    assert plain.param_groups[0]["lr"] == 1e-2
