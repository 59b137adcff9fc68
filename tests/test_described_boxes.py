"""A box with one plain tensor is described without torch's mode for tensors without elements, and as with it."""

import pytest
import torch
from common import caught_error
from common.sharded_saving import stepped_linear

from zero_nb import save_sharded
from zero_nb.checkpoint import saved_tensors
from zero_nb.checkpoint.contents import describe_folder
from zero_nb.checkpoint.convert import convert_checkpoint
from zero_nb.checkpoint.folder import read_table
from zero_nb.checkpoint.saved_tensors import load_saved

WHOLE = torch.arange(24.0).view(4, 6)
TENSORS = {
    "plain": WHOLE,
    "transposed": WHOLE.t(),
    "a view": WHOLE[1:, 2],
    "expanded": WHOLE[0, :1].expand(3),
    "a count": torch.tensor(3),
    "empty": torch.ones(0, 3),
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": WHOLE.bfloat16(),
    "complex": torch.view_as_complex(WHOLE.view(4, 3, 2)),
    "bool": WHOLE > 3,
    "another dtype": WHOLE.view(torch.int32),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "parameter": torch.nn.Parameter(WHOLE),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "negative": torch.ones(3, dtype=torch.complex64).conj().imag,
    "quantized": torch.quantize_per_tensor(WHOLE, 0.1, 0, torch.qint8),
    "sparse": WHOLE.to_sparse(),
    "on meta": WHOLE.to("meta"),
    "a list": [WHOLE, 3],
    "a number": 0.5,
}


def described(path):
    with open(path, "rb") as file:
        return load_saved(file, path, (100, path.stat().st_size - 200))


@pytest.mark.parametrize("name", TENSORS)
def test_a_box_is_described_as_by_torchs_loader(tmp_path, monkeypatch, name):
    path = tmp_path / "boxes"
    torch.save(TENSORS[name], tmp_path / "box")
    path.write_bytes(bytes(100) + (tmp_path / "box").read_bytes() + bytes(100))
    monkeypatch.setattr(saved_tensors, "_stored_tensor", lambda file, records: None)
    wanted = [caught_error(lambda: described(path))] if name in REFUSED else described(path)
    monkeypatch.undo()
    found = [caught_error(lambda: described(path))] if name in REFUSED else described(path)
    assert found == wanted
    if isinstance(found, saved_tensors.SavedTensor):
        assert torch.equal(found.read(), TENSORS[name])


REFUSED = ("conjugate", "negative", "quantized", "sparse", "on meta")


def test_no_plain_box_of_a_folder_enters_torchs_mode(folder, monkeypatch):
    save_sharded(folder / "ours", *stepped_linear())
    convert_checkpoint(folder / "ours", folder / "four", ranks=4)
    entered = []
    real = saved_tensors._without_elements
    monkeypatch.setattr(saved_tensors, "_without_elements", lambda: entered.append(1) or real())
    describe_folder(folder / "four", None)
    table = read_table(folder / "four")
    forms = [table.state_dict_metadata[index.fqn] for index in table.storage_data]
    plain = [form for form in forms if not hasattr(form, "size")]
    assert len(entered) == len(plain) < len(forms)
