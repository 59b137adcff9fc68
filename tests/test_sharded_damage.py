"""Sharded checkpoints: what is left of one after whatever may happen to its files, and how a box of a file is read."""

import io
import json
import math
import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.commands import refused
from common.errors import caught
from common.saving import Evil, check
from common.sharded_saving import content, stepped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from zero_nb.checkpoint import checksums
from zero_nb.checkpoint import folder as checkpoint_folder
from zero_nb.checkpoint.checksums import PartOfFile, read_stored
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.files import read_records, records_in
from zero_nb.checkpoint.folder import (
    MANIFEST,
    TABLE,
    FolderReader,
    as_json,
    check_folder,
    describe_files,
    describe_table,
    read_manifest,
    read_table,
    sealed,
)
from zero_nb.checkpoint.formats import describe_checkpoint
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.checkpoint.skeleton import StoredTensor, read_box
from zero_nb.comm.launch import run


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


@pytest.mark.parametrize("size", [b"Infinity", b"1e999", b"[" * 100_000])
def test_a_manifest_without_sense_is_damaged(folder, saved, size):
    lay(folder / "one", saved)
    other = saved[MANIFEST].replace(b'"files": {', b'"files": {"a": ' + size + b", ")
    lay(folder / "one", {MANIFEST: other})
    with pytest.raises(ValueError, match="is damaged"):
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


MIXTURES = {
    "a file of another save": ("one", {"__0_0.distcp": "two/__0_0.distcp"}),
    "a file of another rank": ("cut", {"__2_0.distcp": "cut/__3_0.distcp"}),
    "what lists the files": ("one", {name: f"two/{name}" for name in (MANIFEST, TABLE)}),
}


def test_files_of_another_save_or_rank_are_refused(folder, capsys):
    """Each of them has the size that it should have, and is whole."""

    def refusals(name):
        load = lambda: load_sharded(folder / name, *stepped())
        return [caught(load), caught(lambda: verify_checkpoint(folder / name))]

    model, zero = stepped()
    for step, name in enumerate(("one", "two")):
        save_sharded(folder / name, model, zero, step)
        zero.step()
    convert_checkpoint(folder / "one", folder / "cut", ranks=6)
    for name, (whole, copies) in MIXTURES.items():
        before = {path.name: path.read_bytes() for path in (folder / whole).iterdir()}
        lay(folder / name, before | {to: (folder / of).read_bytes() for to, of in copies.items()})
        for path in (folder / name).iterdir():
            assert path.name == MANIFEST or path.stat().st_size == len(before[path.name]), path
        status, told, _ = refused(capsys, "ckpt", "verify", str(folder / name))
        assert status == 2
        for words in (told, caught(lambda: describe_checkpoint(folder / name))):
            assert "it may be of another checkpoint, or of another rank" in words, name
    for found in zip(*run(2, lambda: [*map(refusals, MIXTURES)]), strict=True):
        assert all("ValueError" in words for ranks in found for words in ranks), found
    with pytest.warns(UserWarning, match="what lists the files is damaged"):  # of the same step
        assert newest_checkpoint(folder).name == "two"


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


@pytest.mark.parametrize("byte", [*range(4), 6, 7, 8, 9, 26, 27, 28, 29, 30])
def test_a_header_before_a_record_is_compared_with_its_copy(folder, saved, byte):
    """Its signature, flags, method, lengths and name."""
    lay(folder, saved)
    for info in read_table(folder).storage_data.values():
        data = bytearray(saved[info.relative_path])
        data[info.offset + byte] ^= 1
        lay(folder, {info.relative_path: bytes(data)})
        with pytest.raises(ValueError, match="is damaged"):
            check_folder(folder)
        lay(folder, saved)


def test_a_table_of_contents_runs_no_code(folder, saved):
    lay(folder / "one", saved | {".metadata": pickle.dumps(Evil(folder / "made"))})
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
    torch.save(Evil(folder / "made"), evil)
    (folder / "one" / info.relative_path).write_bytes(saved[info.relative_path] + evil.read_bytes())
    info.offset = len(saved[info.relative_path])
    info.length = evil.stat().st_size
    (folder / "one" / ".metadata").write_bytes(pickle.dumps(table))
    files = describe_files(folder / "one", table.storage_data.values())
    files[TABLE] = describe_table(folder / "one")
    lay(folder / "one", manifest_with(saved, files=as_json(files)))
    with pytest.raises(
        ValueError, match=r"cannot be read: \S+ in \S+: it holds an object of \S+mkdir"
    ):
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

    class Subclasses:
        def __reduce__(self):
            return getattr, (torch.Size, "__subclasses__")

    (folder / "one" / ".metadata").write_bytes(pickle.dumps(Subclasses()))
    with pytest.raises(ValueError, match="has nothing of"):
        read_table(folder / "one")


def test_a_manifest_names_no_file_elsewhere(folder, saved):
    files = json.loads(saved[MANIFEST])["files"] | {"../secret": {"nbytes": 0, "crc32": ""}}
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
    (folder / "step-5" / "__0_0.distcp").write_bytes(b"cut off")  # older than what is given
    assert newest_checkpoint(folder).name == "step-12"


def test_what_is_passed_over_for_an_older_checkpoint_is_named_with_the_reason(folder, saved):
    for step in (3, 5, 7, 9):
        lay(folder / f"step-{step}", saved | manifest_with(saved, step=step))
    lay(folder / "step-3", {"__0_0.distcp": b"cut off"})
    lay(folder / "step-7", {"__0_0.distcp": b"cut off"})
    for damage, reason in (
        ({MANIFEST: b"{"}, "manifest.json is damaged (JSONDecodeError"),
        (manifest_with(saved, step=float("inf")), "is damaged: its manifest.json says no step"),
        (manifest_with(saved, format=1), "manifest.json has format 1, and this version reads 2"),
    ):
        lay(folder / "step-9", damage)
        with pytest.warns(UserWarning) as told:
            assert newest_checkpoint(folder).name == "step-5"
        [words] = [str(warning.message) for warning in told]
        assert reason in words and words.index("step-9") < words.index("step-7 is damaged: __0_0")
        assert words.endswith(f"Going on from {folder / 'step-5'}") and "step-3" not in words
        assert told[0].filename == __file__


@pytest.mark.parametrize("damage", ["format 1", "format 99", "cut off", "no manifest's sense"])
def test_a_job_whose_checkpoints_cannot_be_used_is_told_so(folder, saved, damage):
    """Otherwise it would begin at step 1, and say nothing."""
    files, reason = {
        "format 1": (manifest_with(saved, format=1), "has format 1, and this version reads 2"),
        "format 99": (manifest_with(saved, format=99), "has format 99, and this version reads 2"),
        "cut off": ({"__0_0.distcp": saved["__0_0.distcp"][:-9]}, "__0_0.distcp should have"),
        "no manifest's sense": ({MANIFEST: b""}, "is damaged (JSONDecodeError"),
    }[damage]
    for name in ("one", "two"):
        lay(folder / name, saved | files)
    with pytest.raises(ValueError, match=f"no checkpoint in {folder} can be used: ") as error:
        newest_checkpoint(folder)
    words = str(error.value)
    assert words.count(reason) == 2 and "one" in words and "two" in words
    assert "to begin anew, move them away or name another folder" in words


def test_what_is_no_checkpoint_is_passed_over_silently(folder, saved, recwarn):
    assert newest_checkpoint(folder / "nothing") is None
    assert newest_checkpoint(folder) is None
    lay(
        folder / f".step-9.{'0' * 32}.tmp", saved
    )  # a save that was killed before its folder had a name
    lay(folder / "by-dcp", {name: data for name, data in saved.items() if name != MANIFEST})
    lay(folder / "site", {MANIFEST: b'{"name": "of a web page"}'})
    (folder / "log.txt").touch()
    assert newest_checkpoint(folder) is None
    lay(folder / "one", saved)
    assert newest_checkpoint(folder).name == "one"
    assert not recwarn


def test_a_box_is_read_as_torch_reads_it(tmp_path):
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
        path = tmp_path / "box"
        path.write_bytes(buffer.getvalue())
        mine = read_box(buffer, records_in(buffer, name))
        theirs = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        whole = tensor.layout != torch.strided or name in ("parameter", "conjugate")
        assert isinstance(mine, StoredTensor) != whole, name
        if whole:
            assert repr(mine) == repr(theirs), name
            continue
        same = (mine.view.dtype, mine.view.stride()) == (theirs.dtype, theirs.stride())
        assert same and mine.view.shape == theirs.shape, name
        places = [torch.zeros_like(theirs)]
        if theirs.dim() > 1:
            places.append(torch.zeros_like(theirs).transpose(0, 1).contiguous().transpose(0, 1))
        if not theirs.is_complex() and theirs.itemsize > 1:
            places.append(torch.zeros_like(theirs, dtype=torch.float64))
        for place in places:
            with open(path, "rb", buffering=0) as file:
                read_stored(mine.view, file, mine.record.offset, place)
            assert repr(place.to(theirs.dtype)) == repr(theirs), name


def test_a_box_takes_few_reads(folder, saved, monkeypatch):
    """A file system on a network answers each of them, however short."""
    reads = []

    class Counted(PartOfFile):
        def readinto(self, buffer):
            reads.append(len(buffer))
            return super().readinto(buffer)

    lay(folder, saved)
    monkeypatch.setattr(checkpoint_folder, "PartOfFile", Counted)
    check_folder(folder)
    boxes = len(read_table(folder).storage_data)
    assert 0 < len(reads) <= 25 * boxes


def test_a_file_that_gives_a_few_bytes_at_a_time_is_read_whole(folder, saved, monkeypatch):
    """As the system may, for one call."""

    class Slow(PartOfFile):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:7])

    lay(folder, saved)
    monkeypatch.setattr(checkpoint_folder, "PartOfFile", Slow)
    check_folder(folder)


@pytest.mark.parametrize("offset, length", [(-64, 0), (-64, 64), (0, -(10**6)), (10**6, 0)])
def test_a_box_that_is_not_in_its_file_is_damage(folder, saved, offset, length):
    """As a table of contents may say that has no manifest to be compared with, like DCP's own."""
    lay(folder, {name: data for name, data in saved.items() if name != MANIFEST})
    table = read_table(folder)
    first = next(iter(table.storage_data.values()))
    first.offset += offset
    first.length += length
    (folder / TABLE).write_bytes(pickle.dumps(table))
    with pytest.raises(ValueError, match=r"is damaged: \S+ has \d+ bytes, and \S+ would lie from"):
        describe_checkpoint(folder)


@st.composite
def views(draw):
    """How a tensor in a file is cut and turned, and in which order its place lies."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    turned = draw(st.permutations(range(len(shape))))
    spans = [
        slice(first, draw(st.integers(first, size)), draw(st.integers(1, 2)))
        for size in (shape[dim] for dim in turned)
        for first in [draw(st.integers(0, size))]
    ]
    order = draw(st.permutations(range(len(shape))))
    dtypes = st.sampled_from([torch.bool, torch.int16, torch.float32, torch.complex64])
    return shape, turned, tuple(spans), order, draw(dtypes), draw(st.booleans())


@given(views(), st.integers(8, 40), st.integers(1, 40))
def test_any_view_of_a_file_is_read_as_from_memory(view, limit, together):
    """Whole or with gaps, in any order, to a place of any order; through buffers of a few bytes."""
    shape, turned, spans, order, dtype, cast = view
    numbers = torch.arange(math.prod(shape)).to(dtype)
    wanted = numbers.view(shape).permute(turned)[spans]
    stored = torch.empty_like(numbers, device="meta").view(shape).permute(turned)[spans]
    ordered = [wanted.shape[dim] for dim in order]
    place = torch.zeros(ordered, dtype=torch.promote_types(dtype, torch.float64) if cast else dtype)
    place = place.permute([order.index(dim) for dim in range(len(order))])
    with (
        tempfile.NamedTemporaryFile(buffering=0) as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        file.write(b"head" + numbers.numpy().tobytes())
        patch.setattr(checksums, "MESSAGE", limit)
        patch.setattr(checksums, "_RUN_BYTES", together)
        read_stored(stored, file, 4, place)
    assert torch.equal(place.to(dtype), wanted)


@pytest.mark.parametrize("value", [{"a": 1}, pytest, [torch.ones(2)]], ids=str)
def test_a_box_without_a_tensor_is_refused(value):
    buffer = io.BytesIO()
    if value is pytest:  # a pickle that would import something
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'false'\ntR.")
            archive.writestr("archive/version", b"3\n")
    else:
        torch.save(value, buffer)
    with pytest.raises((TypeError, pickle.UnpicklingError, RuntimeError)):
        read_box(buffer, records_in(buffer, "box"))


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
        with pytest.raises(ValueError, match="not all there"):
            read_box(short, records_in(short, "box"))


def test_a_tensor_that_has_no_room_is_the_error_that_is_raised(tmp_path):
    """Closing the file, which a view in the traceback still used, raised another one in its place."""
    path = tmp_path / "box"
    torch.save(torch.ones(4), path)
    index = SimpleNamespace(fqn="weight")
    item = SimpleNamespace(type="tensor", storage_index=index, storage_offsets=(0,), lengths=(4,))
    planner = SimpleNamespace(resolve_tensor=lambda item: torch.empty(3))
    reader = object.__new__(FolderReader)
    room = r"weight: \(4,\) was saved, and there is room for \(3,\)"
    place = SimpleNamespace(offset=0, length=path.stat().st_size)
    with pytest.raises(ValueError, match=room), open(path, "rb", buffering=0) as file:
        reader._read_item(file, place, item, planner)


@pytest.mark.parametrize("mode", (0o000, 0o300, 0o400), ids=oct)
def test_a_parent_that_may_not_be_read_is_an_error_and_no_new_beginning(mode):
    def search(parent):
        if os.geteuid() == 0:  # root may read everything
            os.seteuid(65534)
        return caught(lambda: newest_checkpoint(parent)), caught(
            lambda: newest_checkpoint(parent / "run")
        )

    with tempfile.TemporaryDirectory() as name:
        parent = Path(name) / "checkpoints"
        parent.mkdir()
        if os.geteuid() == 0:
            os.chmod(name, 0o755)
            os.chown(parent, 65534, -1)
        parent.chmod(mode)
        said, inside = run(1, search, parent)[0]
        parent.chmod(0o700)
    assert said.startswith("PermissionError") and str(parent) in said
    assert (inside is None) == (mode == 0o300)  # it is not there yet, or nobody can tell
