"""Checkpoints of which the end is missing: what the error says of sizes and parameters."""

import re

import pytest
import torch
from common.saving import check
from common.sharded_saving import content, stepped

from zero_nb.checkpoint.convert import verify_checkpoint
from zero_nb.checkpoint.formats import describe_checkpoint, read_weights
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
        with pytest.raises(ValueError, match="is no file of torch.save, or not as it was written"):
            describe_checkpoint(folder / name)
