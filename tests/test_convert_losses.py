"""What a conversion may lose without a word: numbers that a format does not hold, and tensors where none are
expected."""

import itertools
import os
import zipfile
from types import SimpleNamespace

import pytest
import torch
from common.saving import same
from common.waiting import wait_for
from torch import nn
from torch.optim import Adafactor, AdamW

from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint

TARGETS = {
    "full": "out.pt",
    "safetensors": "out.safetensors",
    "sharded": "out",
    "deepspeed": "deepspeed",
}


def stepped(model, kind=AdamW, groups=None, **options):
    optimizer = kind(groups or model.named_parameters(), lr=1e-2, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def test_deepspeed_takes_nothing_that_its_files_do_not_hold(folder):
    source = folder / "source.pt"
    model = nn.Linear(3, 2)

    def state(change):
        weights, full = stepped(nn.Linear(3, 2))
        change(full)
        return weights, full

    wide = torch.zeros(2, dtype=torch.float64)
    alone = [{"params": [("weight", model.weight)]}, {"params": [("bias", model.bias)]}]
    for (weights, full), words in (
        (stepped(nn.Linear(3, 2).double()), "the weight 'weight' is of torch.float64; cast"),
        (stepped(nn.Linear(3, 2).to(torch.complex64)), "'weight' is of torch.complex64; cast"),
        (
            state(lambda full: full["state"][1].update(exp_avg=wide)),
            "state 'exp_avg' of 'bias' is of torch.float64; cast",
        ),
        (state(lambda full: full["state"].update(k=3)), "has 'k' of the optimizer as a whole"),
        (state(lambda full: full.update(k=3)), "has 'k' of the optimizer as a whole"),
        (stepped(model, Adafactor, alone), "neither a number for each element nor one for all"),
    ):
        torch.save({"model": weights, "optimizer": full}, source)
        with pytest.raises(ValueError, match=words):
            convert_checkpoint(source, folder / "ds", "deepspeed")
        assert [path.name for path in folder.iterdir()] == [source.name]


def test_a_group_of_two_dtypes_is_not_rounded_for_deepspeed(folder):
    model = nn.Sequential(nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2))
    weights, full = stepped(model)
    full["state"][2]["exp_avg"] += 1e-6
    torch.save({"model": weights, "optimizer": full}, folder / "source.pt")
    convert_checkpoint(folder / "source.pt", folder / "ds", "deepspeed", ranks=2)
    convert_checkpoint(folder / "ds", folder / "out.pt")
    got = torch.load(folder / "out.pt")["state"]
    for index, values in full["state"].items():
        assert all(got[index][key].equal(value.float()) for key, value in values.items())


@pytest.mark.parametrize("form", [*TARGETS])
def test_tensors_in_options_are_plain_in_every_format(folder, form):
    weights, full = stepped(nn.Linear(3, 2))
    numbers = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.9), torch.tensor(0.99))}
    full["param_groups"][0].update(numbers, mixed=[torch.arange(3), 1], named={"a": torch.ones(2)})
    torch.save({"model": weights, "optimizer": full}, folder / "source.pt")
    convert_checkpoint(folder / "source.pt", folder / TARGETS[form], form, ranks=2)
    verify_checkpoint(folder / TARGETS[form])
    convert_checkpoint(folder / TARGETS[form], folder / "again.pt")
    same(full, torch.load(folder / "again.pt", weights_only=True))


def test_deepspeeds_folder_of_an_optimizer_before_its_first_step(folder):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [{"params": [*layer.named_parameters(str(i))]} for i, layer in enumerate(model)]
    full = AdamW(groups).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": full}, folder / "source.pt")
    convert_checkpoint(folder / "source.pt", folder / "ds", "deepspeed")
    convert_checkpoint(folder / "ds", folder / "out.pt")
    same(full, torch.load(folder / "out.pt"))


def packed_anew(source, target, change=list):
    """Pack an archive by another program, which aligns no record, and the names in another order."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in change(old.namelist()):
            new.writestr(name, old.read(name))


@pytest.mark.parametrize("versioned", [True, False])
def test_records_are_read_where_they_are_and_not_where_torch_would_put_them(folder, versioned):
    """All numbers but those of the first record were others, and the file was called whole."""
    weights, full = stepped(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    torch.save({"model": weights, "optimizer": full}, folder / "torch.pt")
    torch.save(weights, folder / "torch weights.pt")
    torch.save(full, folder / "torch state.pt")
    kept = lambda names: [name for name in names if versioned or ".format_version" not in name]
    orders = {"plain": kept, "backwards": lambda names: kept(names)[::-1]}
    for order, change in orders.items():
        for name in ("", " weights", " state"):
            packed_anew(folder / f"torch{name}.pt", folder / f"{order}{name}.pt", change)
        same(torch.load(folder / f"{order}.pt")["optimizer"], full)
        for format, name in TARGETS.items():
            if format != "deepspeed":  # takes one step for all of a group
                target = folder / f"{order} {name}"
                convert_checkpoint(folder / f"{order}.pt", target, format)
                found = verify_checkpoint(target)
                for param, key, value in found.values():
                    assert torch.equal(value.read(), full["state"][param][key])
                assert bool(found.model) == (format != "full")
                for name, weight in found.model.items():
                    assert torch.equal(weight.read(), weights[name])
        both = folder / f"{order} both.safetensors"
        convert_checkpoint(folder / f"{order} state.pt", both, model=folder / f"{order} weights.pt")
        found = verify_checkpoint(both).model
        same({name: weight.read() for name, weight in found.items()}, dict(weights))


def test_a_storage_of_another_size_than_its_record_is_refused(folder):
    torch.save({"state": {}, "param_groups": [], "x": torch.zeros(4)}, folder / "torch.pt")
    with zipfile.ZipFile(folder / "torch.pt") as old, zipfile.ZipFile(folder / "x.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[: 12 if name.endswith("data/0") else None])
    with pytest.raises(ValueError, match=r"4 elements of torch\.float32, and its record 12 bytes"):
        verify_checkpoint(folder / "x.pt")


def two_checkpoints(path, kind):
    """Save two checkpoints of one size, in folders of their own; give the name of both."""
    name = "last.pt" if kind == "full" else "last.safetensors"
    for folder, value in (("old", 1.0), ("new", 2.0)):
        params = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(4)]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for p in params:
            p.grad = torch.full_like(p, value)
        optimizer.step()
        (path / folder).mkdir()
        torch.save(optimizer.state_dict(), path / folder / "last.pt")
        if kind == "safetensors":
            convert_checkpoint(path / folder / "last.pt", path / folder / name)
    return name


def number_anew(monkeypatch):
    """Let each look at a file give it another number, as some file systems of user space do."""
    numbers = itertools.count(1)
    look = os.fstat

    def fstat(handle):
        found = look(handle)
        names = [name for name in dir(found) if name.startswith("st_")]
        kept = {name: getattr(found, name) for name in names}
        return SimpleNamespace(**{**kept, "st_ino": next(numbers)})

    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize("how", ["as it is", "same time of writing", "numbered anew"])
@pytest.mark.parametrize("kind", ["full", "safetensors"])
def test_a_source_that_is_replaced_meanwhile_is_an_error_and_leaves_no_target(
    kind, how, tmp_path, monkeypatch
):
    """As where a job saves its next checkpoint while the last one is converted."""
    name = two_checkpoints(tmp_path, kind)
    old, new = (tmp_path / folder / name for folder in ("old", "new"))
    if how != "as it is":
        # the clock of files has gone on since
        wait_for(lambda: new.touch() or new.stat().st_ctime_ns > old.stat().st_ctime_ns)
        os.utime(new, ns=(0, old.stat().st_mtime_ns))
    if how == "numbered anew":
        number_anew(monkeypatch)

    def saves_the_next(nbytes):
        if new.exists():
            new.rename(old)

    with pytest.raises(ValueError, match="was replaced or changed after it was read first"):
        convert_checkpoint(old, tmp_path / "out.pt", advance=saves_the_next)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize("how", ["numbered anew", "linked"])
@pytest.mark.parametrize("kind", ["full", "safetensors"])
def test_a_source_that_nobody_writes_is_converted_whatever_else_happens(
    kind, how, tmp_path, monkeypatch
):
    """A backup links files, and some file systems number a file anew at each look."""
    name = two_checkpoints(tmp_path, kind)
    old = tmp_path / "old" / name
    if how == "numbered anew":
        number_anew(monkeypatch)

    def link(nbytes):
        if how == "linked" and not (tmp_path / "backup").exists():
            os.link(old, tmp_path / "backup")

    convert_checkpoint(old, tmp_path / "out.pt", advance=link)
    same(torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "old" / "last.pt"))
    assert (tmp_path / "backup").exists() == (how == "linked")
