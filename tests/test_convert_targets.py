"""Where a converted checkpoint goes: never over what is there, and what is said of it."""

import errno
import os

import pytest
import torch
from common.sharded_saving import stepped_linear
from test_ckpt import called
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, load_full_state_dict, save_sharded
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint


def refused(capsys, *words):
    with pytest.raises(SystemExit):
        called(capsys, *words)
    return capsys.readouterr().err


@pytest.fixture
def trained():
    return stepped_linear()


@pytest.fixture
def source(folder, trained):
    model, adamw = trained
    content = {"model": model.state_dict(), "optimizer": adamw.state_dict(), "epoch": 3}
    torch.save(content, folder / "a.pt")
    return folder / "a.pt"


def test_a_checkpoint_is_not_written_over_itself_or_another(folder, source):
    before = source.read_bytes()
    (folder / "link.pt").symlink_to(source)
    os.link(source, folder / "hard.pt")
    (folder / "other.pt").write_text("mine")
    (folder / "other").mkdir()
    for name in ("a.pt", "link.pt", "hard.pt"):
        with pytest.raises(FileExistsError, match="is what is read") as raised:
            convert_checkpoint(source, folder / name, key_by="name")
        assert raised.value.errno == errno.EEXIST
    for name in ("other.pt", "other"):
        with pytest.raises(FileExistsError, match="is there already; give it another name"):
            convert_checkpoint(source, folder / name, check=False)
    with pytest.raises(FileExistsError, match="is what is read"):
        convert_checkpoint(source, folder / "other.pt", model=folder / "other.pt")
    assert source.read_bytes() == before and (folder / "other.pt").read_text() == "mine"


@pytest.mark.parametrize("command", ["convert", "merge", "reshard"])
def test_no_command_writes_over_what_is_there(folder, source, trained, capsys, command):
    save_sharded(folder / "s", *trained)
    target = folder / ("there" if command == "reshard" else "there.pt")
    more = ["--ranks", 2] if command == "reshard" else []
    called(capsys, command, folder / "s", target, *more)
    words = "the target is there already"
    assert words in refused(capsys, command, folder / "s", target, *more)


def test_folders_above_a_target_are_made(folder, source):
    for name in ("a/b/c.pt", "d/e/f.safetensors", "g/h/i"):
        convert_checkpoint(source, folder / name)
        assert (folder / name).exists()


def test_names_that_a_checkpoint_has_are_not_replaced(folder, source):
    convert_checkpoint(source, folder / "same.pt", names=["weight", "bias"], key_by="name")
    words = "has 'weight' where names has 'bias'; leave names out"
    with pytest.raises(ValueError, match=words):
        convert_checkpoint(source, folder / "other.pt", names=["bias", "weight"])
    assert not (folder / "other.pt").exists()


@pytest.mark.parametrize("ranks", ["2", 2.0, 0, True])
def test_ranks_are_a_whole_number(folder, source, ranks):
    with pytest.raises(ValueError, match="ranks must be an int, at least 1"):
        convert_checkpoint(source, folder / "s", ranks=ranks)


def test_what_is_said_of_the_weights_goes_by_the_format(folder, source, trained, capsys):
    save_sharded(folder / "s", *trained)
    alone = "it has the optimizer's state alone"
    convert = ("convert", folder / "s")
    assert alone not in called(capsys, *convert, folder / "t.pt", "--format", "sharded")
    assert alone in called(capsys, *convert, folder / "t", "--format", "full")
    assert alone in called(capsys, *convert, folder / "t.bin")


def test_a_folder_may_have_a_dot_in_its_name(folder, source, trained, capsys):
    save_sharded(folder / "step.1", *trained)
    called(capsys, "reshard", folder / "step.1", folder / "step.2", "--ranks", 2)
    assert (folder / "step.2" / "__1_0.distcp").exists()
    words = refused(capsys, "reshard", folder / "step.1", folder / "a.ckpt", "--ranks", 2)
    assert "must be a folder" in words
    words = refused(capsys, "merge", folder / "step.1", folder / "step.3")
    assert "must be one file" in words
    called(capsys, "merge", folder / "step.1", folder / "m.ckpt")


def test_a_table_that_names_a_file_that_is_not_there_is_damaged(folder, trained):
    """Without a manifest a flipped bit in the table was a `FileNotFoundError`."""
    save_sharded(folder / "one", *trained)
    (folder / "one" / "manifest.json").unlink()
    table = folder / "one" / ".metadata"
    table.write_bytes(table.read_bytes().replace(b"__0_0.distcp", b"__0_1.distcp"))
    with pytest.raises(ValueError, match=r"names '__0_1\.distcp', which is not there"):
        verify_checkpoint(folder / "one")


def test_states_by_rank_of_an_early_fairscale_are_refused(folder, trained):
    model, adamw = trained
    state, [group] = adamw.state_dict().values()
    parts = [{0: state[0]}, {0: state[1]}]
    groups = [{**group, "params": [0]}] * 2
    early = {"state": parts, "param_groups": groups, "partition": [(0, 1), (1, 2)]}
    torch.save(early, folder / "early.pt")
    with pytest.raises(ValueError, match=r"'state', a dict by parameter, .* got .*'partition'"):
        convert_checkpoint(folder / "early.pt", folder / "out.pt")
    with pytest.raises(ValueError, match="'state' of a state dict must be a dict by parameter"):
        load_full_state_dict(
            ZeroRedundancyOptimizer(model.parameters(), AdamW), folder / "early.pt"
        )
    assert [path.name for path in folder.iterdir()] == ["early.pt"]
