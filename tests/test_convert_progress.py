"""The step, what was saved as `extra`, and what else a script has saved go with a checkpoint from format
to format."""

from itertools import permutations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common.sharded_saving import stepped_linear

from zero_nb import load_sharded, newest_checkpoint, save_sharded
from zero_nb.checkpoint.contents import find_others, find_weights
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.folder import read_manifest

ENDS = {"sharded": "", "safetensors": ".safetensors", "deepspeed": ""}


@pytest.fixture
def trained():
    return stepped_linear()


@pytest.mark.parametrize("extra", [None, {"epoch": 3, "state": {"param_groups": [1.5, None]}}])
@pytest.mark.parametrize("ways", [*permutations(ENDS)])
def test_step_and_extra_are_kept_by_all_formats_that_have_a_place_for_them(
    folder, trained, ways, extra
):
    save_sharded(folder / "step-7", *trained, step=7, extra=extra)
    path = folder / "step-7"
    for number, form in enumerate([*ways, "sharded"]):
        target = folder / f"{number}{ENDS[form]}"
        convert_checkpoint(path, target, form)
        verify_checkpoint(target)
        path = target
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["extra"]) == (7, extra)
    save_sharded(folder / "step-6", *trained, step=6)
    assert read_manifest(newest_checkpoint(folder))["step"] == 7
    assert load_sharded(path, *trained) == extra
    assert [p.name for p in folder.glob("*/global_step*")] == ["global_step7"]


@pytest.mark.parametrize(("step", "kept"), [(3, 3), (4.0, 4), ("five", 0), (float("nan"), 0)])
def test_a_script_may_keep_a_step_in_its_file(folder, trained, step, kept):
    model, adamw = trained
    content = {"model": model.state_dict(), "optimizer": adamw.state_dict(), "step": step}
    torch.save(content, folder / "a.pt")
    convert_checkpoint(folder / "a.pt", folder / "s")
    convert_checkpoint(folder / "a.pt", folder / "d", "deepspeed")
    assert read_manifest(folder / "s")["step"] == kept
    assert (folder / "d" / f"global_step{kept}").is_dir()


PLAIN = {"epoch": 3, "best": 0.5, "run": {"name": "a", "losses": [1.5, 1.0]}, "step": 7}
NOT_JSON = {"rng": torch.get_rng_state(), "args": {"betas": (0.9, 0.99)}}


def script_file(folder, trained):
    model, adamw = trained
    ema = {name: value + 1 for name, value in model.state_dict().items()}
    content = {"model": model.state_dict(), "ema": ema, **PLAIN}
    return content | {"optimizer": adamw.state_dict(), **NOT_JSON}


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("ways", [*permutations(ENDS)])
def test_other_keys_of_a_script_become_extra_and_what_json_does_not_keep_is_named(
    folder, trained, ways, form
):
    content = script_file(folder, trained)
    path = folder / "theirs"
    left_out = ["ema", *NOT_JSON]
    if form == "full":
        torch.save(content | {"by_rank": {0: "a"}}, path)
        left_out.append("by_rank")  # a number is no key in JSON, and DCP makes a text of it
    else:
        dcp.save(content, checkpoint_id=path, no_dist=True)
    for number, way in enumerate([*ways, "sharded"]):
        target = folder / f"{number}{ENDS[way]}"
        assert sorted(convert_checkpoint(path, target, way)) == sorted(left_out), way
        left_out = []
        path = target
    assert load_sharded(path, *trained) == PLAIN
    assert read_manifest(path)["step"] == 7


def test_a_file_has_the_state_alone_and_what_it_lacks_is_named(folder, trained):
    torch.save(script_file(folder, trained), folder / "theirs.pt")
    left_out = convert_checkpoint(folder / "theirs.pt", folder / "a.pt")
    assert sorted(left_out) == sorted(["ema", *PLAIN, *NOT_JSON])
    assert {*torch.load(folder / "a.pt")} == {"state", "param_groups"}
    assert convert_checkpoint(folder / "a.pt", folder / "b.pt") == []
    save_sharded(folder / "step-7", *trained, step=7, extra=[1])
    assert convert_checkpoint(folder / "step-7", folder / "c.pt") == ["step", "extra"]


@pytest.mark.parametrize("extra", ["words", 5, {"x": 1}])
def test_a_key_of_a_script_that_is_called_extra_is_one_of_several(folder, trained, extra):
    others = {"extra": extra, "epoch": 3}
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | others, folder / "theirs.pt")
    assert convert_checkpoint(folder / "theirs.pt", folder / "ours", "sharded") == []
    assert load_sharded(folder / "ours", *trained) == others


def test_extra_that_json_does_not_keep_is_named(folder, trained):
    """DeepSpeed's client state may have anything, also beside what its files have themselves."""
    save_sharded(folder / "ours", *trained)
    convert_checkpoint(folder / "ours", folder / "ds", "deepspeed")
    [path] = folder.glob("ds/*/mp_rank_00_model_states.pt")
    content = torch.load(path)
    torch.save({**content, "extra": (1, 2), "epoch": 3}, path)
    assert convert_checkpoint(folder / "ds", folder / "a") == ["extra", "epoch"]
    torch.save({**content, "lr_scheduler": {"last": 3}, "epoch": 3}, path)
    assert convert_checkpoint(folder / "ds", folder / "b") == []
    assert load_sharded(folder / "b", *trained) == {"lr_scheduler": {"last": 3}, "epoch": 3}


@pytest.mark.parametrize(
    "content, key, others",
    [
        ({"state": {}, "param_groups": []}, None, {}),
        ({"a": {"state": {}, "param_groups": []}, "b": 1}, None, {"b": 1}),
        ({"run": {"o": {"state": {}, "param_groups": []}, "b": 1}, "c": 2}, None, {"run.b": 1, "c": 2}),
        ({"g": {"state": {}, "param_groups": []}, "d": {"state": {}, "param_groups": [1]}}, "d",
         {"g": {"state": {}, "param_groups": []}}),
    ],
)  # fmt: skip
def test_what_lies_beside_a_state_dict_is_found_at_any_depth(content, key, others):
    assert find_others(content, key, find_weights(content)) == others


def test_keys_that_read_the_same_when_joined_are_all_kept(folder, trained):
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    more = {"train.optimizer": 5, "train.epoch": 4, "": {"": 6}, ".": 7}
    more |= {"['3']": "brackets", 3: "int", "3": "text"}
    torch.save({"train": {**state, "epoch": 3}, **more}, folder / "theirs.pt")
    assert convert_checkpoint(folder / "theirs.pt", folder / "ours") == []
    kept = load_sharded(folder / "ours", *trained)
    same = {"train.epoch": 3, "['train.epoch']": 4, "train.optimizer": 5}
    same |= {"['3']": "brackets", "3": "int", "[\"['3']\"]": "text"}
    assert kept == same | {"": {"": 6}, ".": 7}


def test_a_key_beside_the_way_to_a_state_dict_is_another_one(folder, trained):
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"train": 5, "train.a": {"": state}, "epoch": 3}, folder / "theirs.pt")
    assert convert_checkpoint(folder / "theirs.pt", folder / "ours") == []
    assert load_sharded(folder / "ours", *trained) == {"train": 5, "epoch": 3}


def test_of_two_state_dicts_whose_keys_read_the_same_none_is_taken(folder, trained):
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    twice = {"train": state, "train.optimizer": optimizer.state_dict(), "ema": {"o": state}}
    torch.save(twice, folder / "theirs.pt")
    words = "theirs.pt holds two state dicts under keys that both read 'train.optimizer'; rename"
    for key in (None, "train.optimizer"):
        with pytest.raises(ValueError, match=words):
            convert_checkpoint(folder / "theirs.pt", folder / "ours", key=key)
    assert not (folder / "ours").exists()
    convert_checkpoint(folder / "theirs.pt", folder / "ours.pt", key="ema.o.optimizer")
