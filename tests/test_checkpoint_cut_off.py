"""Checkpoints of which the end is missing: what the error says of sizes and parameters."""

import re

import pytest
import torch
from common.saving import check
from common.sharded_saving import content, stepped, stepped_linear

from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.formats import (
    describe_checkpoint,
    import_safetensors,
    read_header,
    read_weights,
)
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict

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
    words = re.escape(f"{path} was cut off at {nbytes} bytes, or damaged; use the checkpoint before")
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
