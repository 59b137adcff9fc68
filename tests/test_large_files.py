"""Files larger than the machine's memory, which have holes and so take no room on the disk."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import AdamW

from zero_nb.apps import cli
from zero_nb.checkpoint import full, slab_writers
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.files import records_in
from zero_nb.checkpoint.formats import encode, header_checksum, read_header
from zero_nb.checkpoint.saved_tensors import SavedTensor
from zero_nb.checkpoint.skeleton import SkeletonFile, TensorForm, unbacked

_MODE = Path("/proc/sys/vm/overcommit_memory")
large = pytest.mark.skipif(
    not _MODE.is_file() or _MODE.read_text().strip() == "2",
    reason="only Linux maps more than its memory, where it is not forbidden to",
)


def more_than_memory():
    """Give four times what the machine has, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 4 * 1024 * sum(int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal"))


def enlarge(path, nbytes):
    try:
        os.truncate(path, nbytes)
    except OSError as error:
        pytest.skip(f"no file of {nbytes} bytes can be made here: {error}")


@large
def test_tensors_without_memory_may_be_larger_than_it():
    count = more_than_memory() // 4
    made = unbacked({0: TensorForm(torch.float32, (count,), (1,))})[0]
    made[-1] = 7.0
    assert made.numel() == count and (made[0], made[-1]) == (0.0, 7.0)


@large
def test_a_file_of_safetensors_larger_than_memory_can_be_inspected(folder, capsys):
    weight = nn.Parameter(torch.zeros(1))
    group = {**AdamW([weight]).state_dict()["param_groups"][0], "param_names": ["weight"]}
    value = SavedTensor(torch.float32, (more_than_memory() // 4,), ())
    tensors = {}
    content = {"optimizer": {"state": {0: {"exp_avg": value}}, "param_groups": [group]}}
    metadata = {"zero_nb": json.dumps(encode(content, tensors)), "crc32": "{}"}
    metadata["header_crc32"] = header_checksum(tensors, metadata)
    entry = {"dtype": "F32", "shape": value.shape, "data_offsets": [0, value.nbytes]}
    header = json.dumps({"__metadata__": metadata, **dict.fromkeys(tensors, entry)}).encode()
    path = folder / "large.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    enlarge(path, 8 + len(header) + value.nbytes)
    assert cli.main(["ckpt", "inspect", str(path)]) in (0, None)
    assert f"{value.nbytes / 2**20:,.1f} MiB" in capsys.readouterr().out
    enlarge(path, 8 + len(header) + value.nbytes - 4)
    with pytest.raises(ValueError, match="is no file of safetensors, or it is damaged"):
        read_header(path)


@large
def test_a_folder_with_a_file_larger_than_memory_can_be_checked_and_read(folder):
    state = {"state.weight.exp_avg": torch.arange(6.0), "state.weight.step": torch.tensor(3.0)}
    groups = {"param_groups.weight.lr": 0.1}
    dcp.save({"optimizer": {**state, **groups}}, checkpoint_id=folder / "made", no_dist=True)
    [file] = (folder / "made").glob("*.distcp")
    enlarge(file, more_than_memory())
    verify_checkpoint(folder / "made")
    convert_checkpoint(folder / "made", folder / "made.pt")
    loaded = torch.load(folder / "made.pt", weights_only=True)
    assert loaded["state"][0]["exp_avg"].tolist() == state["state.weight.exp_avg"].tolist()


@large
def test_a_full_file_larger_than_memory_is_read(folder, monkeypatch):
    form = TensorForm(torch.float32, (more_than_memory() // 4,), (1,))
    holes = unbacked({0: form})
    content = {"state": {0: {"exp_avg": holes[0]}}, "param_groups": []}
    skeleton = SkeletonFile(folder / "full.pt", content, holes)
    skeleton.write(0, form.nbytes - 4, torch.tensor([7.0]).view(torch.uint8))
    skeleton.close()
    find = lambda file, path, part: records_in(file, path)  # without reading all of it
    monkeypatch.setattr(full, "checked_records", find)
    found = full.read_full(folder / "full.pt")["state"][0]["exp_avg"]
    assert (found.shape, found[-2:].tolist()) == (form.shape, [0.0, 7.0])


def test_an_error_for_want_of_memory_names_the_target(folder, monkeypatch):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = AdamW([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "source.pt")

    def no_memory(forms):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(slab_writers, "unbacked", no_memory)
    with pytest.raises(OSError, match=r"target\.pt") as raised:
        convert_checkpoint(folder / "source.pt", folder / "target.pt")
    assert raised.value.errno == errno.ENOMEM and not (folder / "target.pt").exists()
