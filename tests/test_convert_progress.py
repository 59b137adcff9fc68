"""The step and what was saved as `extra` go with a checkpoint from format to format."""

from itertools import permutations

import pytest
import torch
from common.sharded_saving import stepped_linear

from zero_nb import load_sharded, newest_checkpoint, save_sharded
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
