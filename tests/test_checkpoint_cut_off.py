"""Checkpoints of which the end is missing: what the error says of sizes and parameters."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common.saving import check
from common.sharded_saving import content, stepped, stepped_linear
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import AdamW

from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.folder import MANIFEST, TABLE, read_table
from zero_nb.checkpoint.formats import (
    describe_checkpoint,
    import_safetensors,
    read_header,
    read_weights,
)
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded

READERS = (describe_checkpoint, read_weights, verify_checkpoint)


def cut(path, nbytes):
    """Keep the first bytes of a file."""
    path.write_bytes(path.read_bytes()[:nbytes])
    assert path.stat().st_size == nbytes


@pytest.mark.parametrize("kept", [0, 3, 700, -9, -1])
def test_a_file_of_torch_save_that_was_cut_off_gives_its_size(folder, kept):
    path = folder / "a.pt"
    model, zero = stepped()
    full_state_dict(zero, to=path)
    nbytes = kept if kept >= 0 else path.stat().st_size + kept
    cut(path, nbytes)
    before = content(model, zero)
    words = re.escape(
        f"{path} was cut off at {nbytes} bytes, or damaged; use the checkpoint before"
    )
    for read in (*READERS, lambda path: load_full_state_dict(zero, path)):
        with pytest.raises(ValueError, match=words):
            read(path)
    check(before, content(model, zero))


def test_a_whole_archive_of_another_program_was_not_cut_off(folder):
    (folder / "text.pt").write_text("PKZIP is a program")
    torch.save({"weight": torch.ones(2)}, folder / "more.pt")
    with open(folder / "more.pt", "ab") as file:
        file.write(b"and more")
    for name in ("text.pt", "more.pt"):
        with pytest.raises(ValueError, match=r"is no file of torch\.save, or not as it was"):
            describe_checkpoint(folder / name)


@pytest.mark.parametrize("own", [True, False])
def test_a_file_of_safetensors_names_the_first_tensor_that_is_not_whole(folder, own):
    path = folder / "a.safetensors"
    if own:
        model, adamw = stepped_linear()
        torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, folder / "a.pt")
        convert_checkpoint(folder / "a.pt", path)
    else:
        weights = {name: torch.ones(100) for name in ("first", "second", "third")}
        import_safetensors().torch.save_file(weights, path)
    places = {name: tensor.parts[0].offset for name, tensor in read_header(path)[0].items()}
    last = path.stat().st_size
    for name in sorted(places, key=places.get, reverse=True):
        cut(path, places[name] + 1)
        words = f"should have {last} bytes and has {places[name] + 1}, so {name} is not whole; use"
        for read in READERS:
            with pytest.raises(ValueError, match=f"{re.escape(str(path))} was cut off: it {words}"):
                read(path)
    cut(path, 20)
    with pytest.raises(ValueError, match="was cut off at 20 bytes, or damaged: its header should"):
        read_weights(path)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_data_file_of_a_folder_names_a_parameter_that_is_not_whole(folder, manifest):
    path = folder / "one"
    model, zero = stepped()
    save_sharded(path, model, zero, 5)
    boxes = [*read_table(path).storage_data.items()]
    [data] = path.glob("*.distcp")
    last = data.stat().st_size
    if not manifest:
        (path / MANIFEST).unlink()
    for index, place in sorted(boxes, key=lambda box: -box[1].offset):
        kept = place.offset + place.length - 1
        cut(data, kept)
        words = f"should have {last} bytes and has {kept}, so {index.fqn} is not whole"
        if not manifest:
            words = rf"has {kept} bytes, and \S+ would lie from \d+ to \d+"
        with pytest.raises(ValueError, match=f"{path} is damaged: {data.name} {words}; use the"):
            verify_checkpoint(path)
        if manifest:
            with pytest.raises(ValueError, match=words):
                load_sharded(path, model, zero)
    (path / TABLE).write_bytes(bytes((path / TABLE).stat().st_size))
    with pytest.raises(ValueError, match=f"has {kept}; use the" if manifest else "cannot be read"):
        verify_checkpoint(path)


def test_a_folder_of_torch_is_told_how_it_can_be_loaded(folder):
    model, zero = stepped()
    weights, state = get_state_dict(model, AdamW(model.parameters()))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "torch")
    for convert in ("convert_checkpoint(folder, new_folder)", "zero-nb ckpt convert", "dcp.load"):
        with pytest.raises(ValueError, match=re.escape(convert)):
            load_sharded(folder / "torch", model, zero)
    convert_checkpoint(folder / "torch", folder / "ours")
    load_sharded(folder / "ours", model, zero)
    (folder / "torch" / TABLE).unlink()
    with pytest.raises(ValueError, match="no complete checkpoint") as caught:
        load_sharded(folder / "torch", model, zero)
    assert "convert" not in str(caught.value)
