"""`zero-nb ckpt` on checkpoints of the main job, as a user calls it."""

import json
import os
import pty
import re
from contextlib import redirect_stderr, redirect_stdout
from threading import Thread

import pytest
import torch
from common.commands import refused
from common.jobs import lives
from common.saving import damage
from common.sharded_saving import stepped_linear
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

from zero_nb.apps import cli
from zero_nb.apps.checkpoints import read_checkpoint
from zero_nb.apps.config import TrainConfig
from zero_nb.apps.gpt import GPT
from zero_nb.apps.sides import make_optimizer
from zero_nb.checkpoint.contents import newest_checkpoint
from zero_nb.checkpoint.formats import header_checksum
from zero_nb.comm.launch import run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The checkpoints of one training, as a file and as a folder of three ranks."""
    parent = tmp_path_factory.mktemp("made")
    for kind in ("full", "sharded"):
        lives(parent / kind, (3, 4), compare=False, checkpoint=kind)
    return parent


def called(capsys, *words):
    assert cli.main(["ckpt", *map(str, words)]) in (0, None)
    return capsys.readouterr().out


def same(one, other):
    assert one.keys() == other.keys()
    for param, values in one.items():
        assert values.keys() == other[param].keys()
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[param][key]))


def test_inspect_and_verify_say_what_is_there(made, capsys):
    folder, file = newest_checkpoint(made / "sharded"), made / "full" / "checkpoint.pt"
    for path, form in ((folder, "sharded"), (file, "full")):
        told = called(capsys, "inspect", path)
        assert (
            told.count(" format ") == 1
            and form in told
            and "in 2 groups" in told
            and "exp_avg_sq" in told
        )
        assert "are as they were written" in called(capsys, "verify", path)
    told = called(capsys, "inspect", folder, "--tensors")
    assert "blocks.1.down.weight" in told and "betas" in told


def test_inspect_for_programs(made, capsys):
    folder = newest_checkpoint(made / "sharded")
    found = json.loads(called(capsys, "inspect", folder, "--json", "--tensors"))
    wanted = read_checkpoint(str(made / "full"))["optimizer"]
    assert found["format"] == "sharded" and found["about"]["step"] == 4
    options = {"lr", "betas", "params"}
    for group, other in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert {k: group[k] for k in options} == {
            **{k: other[k] for k in options},
            "betas": [*other["betas"]],
        }
    by_key = {row["key"]: row for row in found["state"]}
    tensors = [state["exp_avg"] for state in wanted["state"].values()]
    assert by_key["exp_avg"]["tensors"] == len(tensors)
    assert by_key["exp_avg"]["bytes"] == sum(tensor.nbytes for tensor in tensors)
    shapes = [row["shape"] for row in found["tensors"] if row["key"] == "exp_avg"]
    assert sorted(shapes) == sorted([*tensor.shape] for tensor in tensors)
    assert "tensors" not in json.loads(
        called(capsys, "inspect", made / "full" / "checkpoint.pt", "--json")
    )


def test_merged_state_is_that_of_the_file(made, capsys, tmp_path):
    folder = newest_checkpoint(made / "sharded")
    wanted = read_checkpoint(str(made / "full"))
    told = called(capsys, "merge", folder, tmp_path / "merged.pt")
    assert "a folder or .safetensors takes the weights too" in told
    merged = torch.load(tmp_path / "merged.pt", weights_only=True)
    same(merged["state"], wanted["optimizer"]["state"])
    config = TrainConfig(**wanted["config"])
    model = GPT(config.layers, config.width, config.heads)
    make_optimizer(config, model, sharded=False).load_state_dict(merged)


def test_any_way_through_the_formats_ends_at_the_same_state(made, capsys, tmp_path):
    folder = newest_checkpoint(made / "sharded")
    called(capsys, "reshard", folder, tmp_path / "two", "--ranks", 2)
    assert len([*(tmp_path / "two").glob("*.distcp")]) == 2
    assert "are as they were written" in called(capsys, "verify", tmp_path / "two")
    called(capsys, "convert", tmp_path / "two", tmp_path / "state.safetensors", "--by", "name")
    called(capsys, "convert", tmp_path / "state.safetensors", tmp_path / "last.pt")
    wanted = read_checkpoint(str(made / "full"))["optimizer"]["state"]
    same(torch.load(tmp_path / "last.pt", weights_only=True)["state"], wanted)
    called(capsys, "convert", tmp_path / "state.safetensors", tmp_path / "four", "--ranks", 4)
    told = called(capsys, "inspect", tmp_path / "four")
    assert "14 tensors" in told  # the weights came along


def test_a_mistake_is_one_line_and_leaves_nothing(made, capsys, tmp_path):
    folder = newest_checkpoint(made / "sharded")
    lives(tmp_path / "other", (2, 2), compare=False)
    broken = newest_checkpoint(tmp_path / "other")
    damage(max(broken.glob("*.distcp")))
    for words, says in (
        (("verify", tmp_path / "nothing"), "nothing"),
        (("verify", broken), "is not as it was written"),
        (("merge", broken, tmp_path / "broken.pt"), "is not as it was written"),
        (("merge", folder, tmp_path / "to"), "the target must be one file"),
        (
            ("reshard", folder, tmp_path / "to", "--ranks", "0"),
            "must be a whole number, at least 1, got 0",
        ),
        (("inspect", folder, "--key", "optimiser"), "optimiser"),
    ):
        status, told, _ = refused(capsys, "ckpt", *map(str, words))
        assert status == 2 and says in told and "Traceback" not in told
        assert told.strip().count("\n") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]


class Foreign:
    """A class that a reader of files does not have."""


def sealed(path, structure, crc32):
    """Write a file of safetensors whose metadata has the checksum that it needs, and perhaps no sense."""
    tensors = {"a": torch.ones(2)}
    metadata = {"zero_nb": structure, "crc32": crc32}
    save_file(tensors, path, metadata | {"header_crc32": header_checksum(tensors, metadata)})


def test_what_makes_no_sense_is_one_line(capsys, tmp_path):
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    torch.save(state, tmp_path / "good.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(state | {"x": Foreign()}, tmp_path / "foreign.pt")
    state["param_groups"].append({"params": [], "x": state["param_groups"]})
    torch.save(state, tmp_path / "cycle.pt")
    deep = "[" * 100_000
    empty = '{"dict": [["state", {"dict": []}], ["param_groups", []]]}'
    for name, metadata in {
        "deep": (deep, "{}"),
        "sums": (empty, deep),
        "list": (empty, "[1]"),
    }.items():
        sealed(tmp_path / f"{name}.safetensors", *metadata)
    (tmp_path / "names").write_text("weight\nbias")  # whose last line does not end
    called(capsys, "convert", tmp_path / "good.pt", tmp_path / "out", "--names", tmp_path / "names")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "__0_0.distcp").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    for name, says in {
        "old.pt": "torch.save's format from before torch 1.6",
        "foreign.pt": f"holds an object of {__name__}.Foreign",
        "cycle.pt": "holds itself",
        "deep.safetensors": "metadata cannot be read",
        "sums.safetensors": "checksums cannot be read",
        "list.safetensors": "checksums cannot be read",
        "out": "__0_0.distcp has 0 bytes, and optimizer.",
        "pipe": "it is a device or a pipe",
    }.items():
        status, told, _ = refused(capsys, "ckpt", "verify", str(tmp_path / name))
        assert status == 2 and says in told and str(tmp_path / name) in told, told
        assert told.strip().count("\n") == 0 and "likely succeed" not in told


def on_a_terminal(commands):
    """Run commands on a terminal of this process; what each writes there."""
    os.environ.update(TERM="xterm", COLUMNS="100")
    main, other = pty.openpty()
    found = []
    with open(other, "w") as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
        for words in commands:
            read = []
            until_zero = iter(lambda: os.read(main, 1), b"\0")
            reader = Thread(target=read.extend, args=(until_zero,))
            reader.start()
            assert cli.main(["ckpt", *words]) in (0, None)
            terminal.write("\0")
            terminal.flush()
            reader.join()
            found.append(b"".join(read).decode())
    os.close(main)
    return found


def test_commands_that_take_long_show_a_bar_on_a_terminal(folder):
    model, adamw = stepped_linear()
    torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, folder / "a.pt")
    a, b, c, d = (str(folder / name) for name in ("a.pt", "b.safetensors", "c", "d.pt"))
    reshard = ["reshard", b, c, "--ranks", "3"]
    commands = [["verify", a], ["convert", a, b], reshard, ["merge", c, d]]
    [found] = run(1, on_a_terminal, commands)
    for words, shown in zip(commands, found, strict=True):
        assert "\u2501" in shown and re.search(r"m(\d[\d.,]*)/\1 ", shown), (
            words,
            shown,
        )  # to its end


def test_other_keys_are_kept_or_named(capsys, tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([("weight", weight)])
    content = {"optimizer": optimizer.state_dict(), "epoch": 3, "[rng]": torch.get_rng_state()}
    torch.save(content, tmp_path / "theirs.pt")
    assert "epoch, [rng]" in called(capsys, "inspect", tmp_path / "theirs.pt")
    told = called(capsys, "convert", tmp_path / "theirs.pt", tmp_path / "folder")
    assert "kept as extra: epoch\n" in told and "left out: [rng]; extra takes" in told
    told = called(capsys, "convert", tmp_path / "theirs.pt", tmp_path / "a.pt")
    assert "left out: epoch, [rng]; a file has no place for them" in told and "kept as" not in told
    told = called(capsys, "merge", tmp_path / "folder", tmp_path / "b.pt")
    assert "left out: extra; a file" in told
    with pytest.raises(SystemExit):
        called(capsys, "reshard", "--help")
    assert "names what it leaves out" in " ".join(capsys.readouterr().out.split())


def test_state_of_no_parameter_and_names_in_brackets(capsys, tmp_path):
    state = {0: {"exp_avg": torch.ones(2)}, "shared": {"count": 3}}
    group = {"params": [0], "param_names": ["weight"], "lr": 0.1}
    folder = tmp_path / "run [lr=0.1] :100: [/a]"
    folder.mkdir(parents=True)
    torch.save({"state": state, "param_groups": [group]}, folder / "opt.pt")
    found = json.loads(called(capsys, "inspect", folder / "opt.pt", "--json", "--tensors"))
    assert [row["parameter"] for row in found["tensors"]] == ["weight", "shared"]
    assert str(folder / "opt.pt") in called(capsys, "verify", folder / "opt.pt")
    target = folder / "other.pt"
    assert f"written: {target}" in called(capsys, "convert", folder / "opt.pt", target)
