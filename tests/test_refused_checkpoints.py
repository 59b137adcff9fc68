"""Damaged, mixed and foreign files: each load refuses on every rank, names the file, and changes nothing."""

import shutil
from copy import deepcopy

import pytest
import torch
from common import caught
from common.saving import damage, same
from torch import nn
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, run
from zero_nb.checkpoint import sharded
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.folder import MANIFEST
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded

SHARD, TABLE = "__1_0.distcp", ".metadata"
WEIGHT = "optimizer.state.0.weight.exp_avg"


def stepped(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=0.1)
    model(torch.ones(2, 30)).sum().backward()
    zero.step()
    return model, zero


def save_both(parent, name, seed):
    model, zero = stepped(seed)
    save_sharded(parent / name, model, zero, 5)
    full_state_dict(zero, parent / f"{name}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two saves of two ranks, of the same step and sizes, and one of three ranks."""
    parent = tmp_path_factory.mktemp("saved")
    for size, name, seed in ((2, "one", 0), (2, "two", 1), (3, "three", 0)):
        run(size, save_both, parent, name, seed)
    return parent


def content(model, zero):
    return [model.state_dict(), full_state_dict(zero, None)]


def replace(path, old, new):
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


def exchange(folder):
    paths = [folder / name for name in ("__0_0.distcp", SHARD)]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


# what is done to the folder of a save, beside others; and the file that errors name
DAMAGE = {
    "truncated": (lambda d, _: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:9999]), SHARD),
    "empty": (lambda d, _: (d / SHARD).write_bytes(b""), SHARD),
    "one bit flipped": (lambda d, _: damage(d / SHARD), SHARD),
    "another dtype": (lambda d, _: replace(d / SHARD, b"FloatStorage", b"HalfStorages"), SHARD),
    "the table's dtype": (lambda d, _: replace(d / TABLE, b"float32", b"float64"), TABLE),
    "a missing shard": (lambda d, _: (d / SHARD).unlink(), SHARD),
    "an extra shard": (lambda d, _: shutil.copy(d / SHARD, d / "__2_0.distcp"), "__2_0.distcp"),
    "a shard of three ranks": (
        lambda d, others: shutil.copy(others / "three/__2_0.distcp", d),
        "__2_0.distcp",
    ),
    "a shard of another save": (lambda d, others: shutil.copy(others / "two" / SHARD, d), SHARD),
    "shards of each other": (lambda d, _: exchange(d), "__0_0.distcp"),
    "the table of another save": (lambda d, others: shutil.copy(others / "two" / TABLE, d), TABLE),
    "no table": (lambda d, _: (d / TABLE).unlink(), TABLE),
    "no manifest": (lambda d, _: (d / MANIFEST).unlink(), MANIFEST),
}


def refused(load):
    """Give what a load says, and whether model and optimizer are what they were."""
    model, zero = stepped(3)
    before = deepcopy(content(model, zero))
    words = caught(lambda: load(model, zero))
    try:
        same(before, content(model, zero))
    except AssertionError:
        return words, "changed"
    return words, "as it was"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_on_every_rank_by_the_name_of_the_file(folder, saved, damage):
    shutil.copytree(saved / "one", folder / "bad")
    change, name = DAMAGE[damage]
    change(folder / "bad", saved)
    for words, state in run(3, refused, lambda *into: load_sharded(folder / "bad", *into)):
        assert words and "ValueError" in words and str(folder / "bad") in words, words
        assert name in words and state == "as it was", words
    if damage != "no manifest":  # a folder of DCP has none
        for check in (verify_checkpoint, lambda bad: convert_checkpoint(bad, folder / "c.pt")):
            assert name in (caught(lambda check=check: check(folder / "bad")) or "")
        assert not (folder / "c.pt").exists()
        if damage not in ("one bit flipped", "another dtype"):  # which reading the tensors finds
            with pytest.raises(ValueError, match="can be used"):
                newest_checkpoint(folder)


FILE = {
    "truncated": lambda path, _: path.write_bytes(path.read_bytes()[:999]),
    "empty": lambda path, _: path.write_bytes(b""),
    "one bit flipped": lambda path, _: damage(path),
    "another dtype": lambda path, _: replace(path, b"FloatStorage", b"HalfStorages"),
    "a file of the model": lambda path, _: torch.save(stepped()[0].state_dict(), path),
    "no checkpoint": lambda path, _: path.write_text("the learning rate was too high"),
}


@pytest.mark.parametrize("damage", FILE)
def test_a_damaged_file_is_refused_on_every_rank_by_its_name(folder, saved, damage):
    shutil.copy(saved / "one.pt", folder / "bad.pt")
    FILE[damage](folder / "bad.pt", saved)
    load = lambda model, zero: load_full_state_dict(zero, folder / "bad.pt")
    for words, state in run(3, refused, load):
        assert words and "ValueError" in words and state == "as it was"
        assert str(folder / "bad.pt") in words, words


WRONG = {
    "integers": lambda box: box.view(torch.int32),
    "double": lambda box: box.double(),
    "bfloat16": lambda box: box.bfloat16(),
    "flat": lambda box: box.reshape(-1),
    "turned": lambda box: box.t().contiguous(),
    "cut": lambda box: box[:1].clone(),
}


def save_wrong(parent, change):
    """Save a box that is not what the table says, with checksums that fit."""
    write = sharded.write_part

    def write_wrong(planned, read):
        def wrong(item):
            found = read(item)
            return change(found) if item.index.fqn == WEIGHT else found

        return write(planned, wrong)

    sharded.write_part = write_wrong
    save_sharded(parent / "bad", *stepped(), 5)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("listed", [True, False], ids=["manifest", "none"])
def test_a_box_that_is_not_what_the_table_says_is_refused(folder, kind, listed):
    run(2, save_wrong, folder, WRONG[kind])
    if not listed:  # a folder of DCP
        (folder / "bad" / MANIFEST).unlink()
    else:
        for words, state in run(2, refused, lambda *into: load_sharded(folder / "bad", *into)):
            assert words and "ValueError" in words and state == "as it was"
            assert WEIGHT in words and ".distcp" in words and str(folder / "bad") in words, words
    for check in (True, False):
        found = caught(lambda: convert_checkpoint(folder / "bad", folder / "c.pt", check=check))
        assert found and "ValueError" in found and WEIGHT in found, found
        assert not (folder / "c.pt").exists()
    assert WEIGHT in (caught(lambda: verify_checkpoint(folder / "bad")) or "")
