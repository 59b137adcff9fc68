"""The main job on tiny models, with real ranks."""

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.devices import cuda
from common.errors import caught
from common.jobs import TINY
from common.starter import ALONE
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from zero_nb.apps import loop
from zero_nb.apps.checkpoints import read_checkpoint, save_checkpoint
from zero_nb.apps.config import MODES, TrainConfig
from zero_nb.apps.gpt import GPT, TransformerBlock, generate
from zero_nb.apps.loop import train_rank
from zero_nb.apps.results import measured
from zero_nb.apps.resume import configured
from zero_nb.apps.sides import RankReport, Side, choose_mode, make_optimizer
from zero_nb.apps.text import PLAIN_BYTES
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.shared_file import available

FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "rounds": 2}.items()]
STATE = "state, zero_nb / plain DDP"


def launched(n, *flags):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={n}",
        "-m",
        "zero_nb.apps.train",
        *flags,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run the main job as `make train` does."""
    out = tmp_path_factory.mktemp("job")
    return out, launched(2, *FLAGS, f"--out={out}")


@pytest.mark.daily
def test_leaves_its_files(job):
    out, process = job
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint.pt",
        "curve.png",
        "modes.png",
        "report.json",
        "samples.txt",
    ]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    samples = (out / "samples.txt").read_text().split("\n\n----\n\n")
    assert len(samples) == 4 and any(
        sample.startswith("class ") and len(sample) >= 14 for sample in samples
    )


def test_report(job):
    numbers = json.loads((job[0] / "report.json").read_text())
    assert numbers["world size"] == 2 and len(numbers["bytes by rank"]) == 2
    assert (numbers["options"]["steps"], numbers["options"]["out"]) == (6, str(job[0]))
    assert (numbers["options"]["mode"], numbers["mode"]) == ("auto", "zero2")
    assert (
        list(numbers["losses"]["zero_nb"])
        == list(numbers["losses"]["plain DDP"])
        == ["1", "2", "3", "4", "5", "6"]
    )
    assert list(numbers["held-out losses"]["zero_nb"]) == ["3", "6"]
    assert (
        numbers["largest parameter difference"] < 1e-5 and numbers["largest loss difference"] < 1e-5
    )
    assert math.isfinite(numbers["step time, zero_nb / plain DDP"]["median"])
    assert not any("optimizer step" in name for name in numbers)  # it is inside backward
    for sides in numbers["bytes by rank"]:
        assert (
            sides["zero_nb"]["parameters"]
            >= 4 * numbers["parameters"]
            == sides["plain DDP"]["parameters"]
        )
        assert (
            8 * numbers["parameters"]
            <= sides["plain DDP"]["optimizer state"]
            < 8.1 * numbers["parameters"] + 1000
        )
    together = sum(sides["zero_nb"]["optimizer state"] for sides in numbers["bytes by rank"])
    assert (
        8 * numbers["parameters"] < together <= sides["plain DDP"]["optimizer state"]
    )  # neighbours share their step counts


def test_all_modes_are_beside_plain_ddp(job):
    rows = json.loads((job[0] / "report.json").read_text())["modes"]
    assert [row["mode"] for row in rows] == ["ddp", *MODES]
    plain = rows[0]
    assert plain["loss_difference"] == plain["parameter_difference"] == 0 and plain["sent"] > 0
    for row in rows[1:]:
        state = row["held"]["optimizer state"] / plain["held"]["optimizer state"]
        assert state == pytest.approx(0.5, abs=0.03)
        assert row["loss_difference"] < 1e-4 and row["parameter_difference"] < 1e-3
        # small parameters are padded in buckets
        assert row["sent"] / plain["sent"] == pytest.approx(
            1.5 if row["mode"] == "zero1" else 1, abs=0.1
        )
    assert rows[-1]["held"]["gradients"] == 0 < plain["held"]["gradients"]
    assert (job[0] / "modes.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"\n{mode} " in job[1].stdout for mode in MODES)


def test_output_is_lines(job):
    text = job[1].stdout
    assert "\r" not in text and "\x1b" not in text
    assert [line.split()[:4] for line in text.splitlines() if " of 6 " in line] == [
        ["step", step, "of", "6"] for step in ("3", "6")
    ]
    assert text.count("mode: zero2, the smallest that clips") == 1  # two ranks that share memory
    assert text.count("MiB on each rank") == 1 and "largest parameter difference: " in text
    assert "zero_nb" not in job[1].stderr  # no warning that comes from this package


RUN_MODULE = (
    ALONE
    + """
import runpy
runpy.run_module("zero_nb.apps.train", run_name="__main__", alter_sys=True)
"""
)
AGENT = (
    ALONE
    + """
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
import os
from zero_nb.apps.train import run_rank
options = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"]
config, *_ = config_from_args(parse_args([*options, "a script"]))
config.start_method = "fork" # ranks that have imported torch; see common.forking_agent
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
elastic_launch(config, run_rank)(sys.argv[1:])
"""
)


def test_one_process_without_a_launcher(starter, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoint-7.pt").write_bytes(b"of a training before")
    flags = (*FLAGS, "--steps=2", "--no-compare", f"--out={out}")
    [ended] = starter.run(RUN_MODULE, tmp_path, 1, flags, seconds=120)
    assert ended.code == 0, ended.stderr
    assert f"{out} has checkpoint-7.pt of an earlier training" in ended.stderr
    assert not (out / "checkpoint-7.pt").exists()
    assert "Exception ignored" not in ended.stderr and "Traceback" not in ended.stderr
    assert STATE not in json.loads((out / "report.json").read_text())


def test_unknown_option_under_torchrun(starter, tmp_path):
    [ended] = starter.run(AGENT, tmp_path, 1, ("--stepz=3",), seconds=120)
    assert ended.code == 1 and "ChildFailedError" in ended.stderr, ended
    assert ended.stderr.count("zero_nb.apps.train: error: unrecognized arguments: --stepz=3") == 1


# --- resuming -------------------------------------------------------------------------------------
# ------------------------------------------


def tensors(value, path=""):
    """Flatten a checkpoint to comparable leaves."""
    if isinstance(value, torch.Tensor):
        return {path: value.tolist()}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else None
    )
    if items is None:
        return {path: value}
    return {leaf: v for key, inner in items for leaf, v in tensors(inner, f"{path}/{key}").items()}


OPTIMIZERS = {
    "adamw": "",
    "adam": "",
    "sgd": "",
    "rmsprop": "",
    "adagrad": "",
    "muon+adamw": "momentum=0.9",
    "nadam": "betas=(0.9, 0.9)",
    "torch.optim.Adafactor": "",
    "common.optimizers.SignSGD": "beta=0.5",
}  # name: arguments
ROUGH = {  # what last bits of gradients become
    "muon+adamw": 1e-3,  # Muon orthogonalizes in bfloat16
    "common.optimizers.SignSGD": 1e-2,  # the sign of a number near zero
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_equals_uninterrupted(optimizer, tmp_path):
    chosen = {"optimizer": optimizer, "optimizer_args": OPTIMIZERS[optimizer]}
    tiny = TINY | chosen | {"horizon": 6}
    run(2, train_rank, configured({**tiny, "out": str(tmp_path / "whole")}))
    run(2, train_rank, configured({**tiny, "steps": 3, "out": str(tmp_path / "broken")}))
    more = {"resume": True, "steps": 6, "optimizer": optimizer, "out": str(tmp_path / "broken")}
    broken = run(2, train_rank, configured(more))
    whole, again = (
        read_checkpoint(str(tmp_path / name), optimizer) for name in ("whole", "broken")
    )
    for what in ("step", "model", "optimizer", "schedule"):
        assert tensors(whole[what]) == tensors(again[what]), what
    for what in ("losses", "held_out"):
        assert whole[what]["zero_nb"] == again[what]["zero_nb"], what
        # it went on from the sharded side's weights, whose norm was a sum in another order
        near = pytest.approx(again[what]["plain DDP"], abs=ROUGH.get(optimizer, 1e-5))
        assert whole[what]["plain DDP"] == near, what
    # plain DDP with the plain optimizer started from the same file
    differs = measured(broken)["largest parameter difference"]
    assert differs < ROUGH.get(optimizer, 1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_resumes_on_another_number_of_ranks(ranks, tmp_path):
    run(2, train_rank, configured({**TINY, "out": str(tmp_path)}))
    reports = run(ranks, train_rank, configured({"resume": True, "steps": 9, "out": str(tmp_path)}))
    numbers = measured(reports)
    assert numbers["largest parameter difference"] < 1e-5 and list(
        numbers["losses"]["zero_nb"]
    ) == list(range(1, 10))
    assert (
        max(report.memory["zero_nb"]["optimizer state"] for report in reports)
        < (1.3 / ranks) * reports[0].memory["plain DDP"]["optimizer state"] + 500
    )


def losses_in_lives(folder, mode, *lives):
    clip = 0.0 if mode == "zero2-interleaved" else 1.0
    chosen = {
        **TINY,
        "mode": mode,
        "clip": clip,
        "compare": False,
        "horizon": 6,
        "out": str(folder),
    }
    del chosen["batch"]
    for ranks, steps in lives:
        given = {**chosen, "steps": steps, "auto_resume": True, "global_batch": 6}
        reports = run(ranks, train_rank, configured(given))
    return reports[0].losses["zero_nb"]


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_resumes_to_the_bit(mode, tmp_path):
    whole = losses_in_lives(tmp_path / "whole", mode, (3, 6))
    assert losses_in_lives(tmp_path / "broken", mode, (3, 2), (3, 6)) == whole


def counted(config):
    """Train, and note the batches that a model sees and how often each of its blocks runs for one."""
    rows, blocks = [], []
    see, run_block = Side.loss, TransformerBlock.forward

    def loss(side, module, batch):
        rows.append(len(batch))
        return see(side, module, batch)

    def forward(block, *args):
        blocks.append(torch.is_grad_enabled())
        return run_block(block, *args)

    Side.loss, TransformerBlock.forward = loss, forward
    try:
        report = train_rank(config)
    finally:
        Side.loss, TransformerBlock.forward = see, run_block
    return report, rows, sum(blocks)


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", MODES)
def test_accumulating_and_recomputing_change_no_step(mode, tmp_path):
    clip = 0.0 if mode == "zero2-interleaved" else 1.0
    chosen = {**TINY, "mode": mode, "clip": clip, "global_batch": 8, "out": str(tmp_path)}
    del chosen["batch"]
    first, rows, blocks = run(2, counted, configured(chosen))[0]
    whole = first.losses["zero_nb"]
    more = {"accumulate": 2, "checkpoint_activations": True}
    ranks = run(2, counted, configured({**chosen, **more}))
    reports = [report for report, *_ in ranks]
    assert 2 not in rows and 2 in ranks[0][1]
    assert ranks[0][2] > 2.5 * blocks  # forward, and again in backward, for halves
    parts = reports[0].losses
    assert max(abs(whole[step] - parts["zero_nb"][step]) for step in whole) < 1e-5
    assert max(abs(whole[step] - parts["plain DDP"][step]) for step in whole) < 1e-5
    assert measured(reports)["tokens per step"] == 8 * TINY["block"]
    if mode == "zero1":
        odd = configured({**chosen, "global_batch": 10, "accumulate": 2})
        with pytest.raises(ValueError, match="got 10 for 2 ranks and 2; 12 would do"):
            run(2, train_rank, odd)


def test_a_checkpoint_goes_on_in_another_mode(tmp_path):
    whole = losses_in_lives(tmp_path / "whole", "zero1", (2, 6))
    losses_in_lives(tmp_path / "other", "zero1", (2, 3))
    other = losses_in_lives(tmp_path / "other", "zero2", (2, 6))
    assert max(abs(whole[step] - other[step]) for step in whole) < 1e-5


def test_auto_takes_what_suits_the_machine(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    alone, two = SimpleNamespace(size=1), SimpleNamespace(size=2)
    auto = TrainConfig()
    assert choose_mode(TrainConfig(mode="zero1"), cpu, two) == ("zero1", "as --mode says")
    assert choose_mode(auto, cpu, alone)[0] == "zero1"
    assert choose_mode(auto, gpu, two)[0] == "zero2"
    if available():
        assert choose_mode(auto, cpu, two)[1].startswith("the smallest that clips, and")
        words = choose_mode(TrainConfig(clip=0), cpu, two)[1]
        assert "smallest" not in words and "larger than zero2-interleaved" in words
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    assert choose_mode(auto, cpu, two)[0] == "zero1-overlap"
    monkeypatch.delenv("ZERO_NB_MEMORY")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert choose_mode(auto, cpu, two)[0] == "zero1-overlap"


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_class_of_the_users_and_muon_resume_in_every_mode(mode, tmp_path):
    clip = 0.0 if mode == "zero2-interleaved" else 1.0
    chosen = {**TINY, "mode": mode, "clip": clip, "horizon": 6, "rounds": 0}
    for optimizer in ("muon+adamw", "common.optimizers.SignSGD"):
        out = {"out": str(tmp_path / optimizer), "optimizer": optimizer}
        whole = run(2, train_rank, configured({**chosen, **out}))
        assert measured(whole)["largest loss difference"] < ROUGH[optimizer]
        run(2, train_rank, configured({**chosen, **out, "steps": 3}))
        again = run(2, train_rank, configured({**out, "resume": True, "steps": 6}))
        assert again[0].losses["zero_nb"] == whole[0].losses["zero_nb"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_class_of_the_users_whose_state_comes_late_goes_on(kind, tmp_path):
    late = {"optimizer": "common.optimizers.LateState", "checkpoint": kind, "save_every": 1}
    chosen = {**TINY, **late, "horizon": 6, "mode": "zero1"}
    whole = run(2, train_rank, configured({**chosen, "out": str(tmp_path / "whole")}))
    out = {"out": str(tmp_path / "broken")}
    run(2, train_rank, configured({**chosen, **out, "steps": 1}))
    for how, steps in (("resume", 3), ("auto_resume", 5), ("resume", 6)):
        given = {**late, **out, how: True} if how == "resume" else {**chosen, **out, how: True}
        again = run(2, train_rank, configured({**given, "steps": steps}))
    assert again[0].losses == whole[0].losses


def test_a_state_of_a_users_class_that_does_not_fit_is_refused_on_every_rank(tmp_path):
    chosen = {**TINY, "optimizer": "common.optimizers.LateState", "out": str(tmp_path)}
    run(1, train_rank, configured({**chosen, "steps": 4, "compare": False}))
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path)
    groups = saved["optimizer"]["param_groups"]
    given = {"resume": True, "optimizer": chosen["optimizer"], "out": str(tmp_path), "steps": 6}
    for wrong, words in (
        ({"state": {}}, "optimizer lacks 'param_groups'"),
        ({"state": {}, "param_groups": groups[:1]}, "must have 2 items, got 1"),
        ({"state": {}, "param_groups": [{**g, "params": [0]} for g in groups]}, "must have"),
    ):
        torch.save({**saved, "optimizer": wrong}, path)
        with pytest.raises(ValueError, match=f"cannot be continued: .*{words}"):
            configured(given)
    torch.save({**saved, "optimizer": {"state": {0: 1}, "param_groups": groups}}, path)
    for said in run(2, lambda: caught(lambda: train_rank(configured(given)))):
        assert said == "TypeError: the state of parameter 0 must be a dict, got int"


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_steps_float32_copies_and_resumes_in_every_mode(mode, tmp_path):
    chosen = {**TINY, "mode": mode, "clip": 0.0, "dtype": "bfloat16", "horizon": 6}
    whole = run(2, train_rank, configured({**chosen, "out": str(tmp_path / "whole")}))
    assert measured(whole)["largest loss difference"] == 0
    assert measured(whole)["largest parameter difference"] == 0
    for report in whole:
        ours = report.memory["zero_nb"]["float32 masters"]
        theirs = report.memory["plain DDP"]["float32 masters"]
        assert theirs == 4 * report.parameters and ours == pytest.approx(theirs / 2, rel=0.05)
        assert report.memory["plain DDP"]["parameters"] == 2 * report.parameters
    out = {"out": str(tmp_path / "broken")}
    run(2, train_rank, configured({**chosen, **out, "steps": 3}))
    again = run(2, train_rank, configured({**out, "resume": True, "steps": 6}))
    assert again[0].losses == whole[0].losses
    with pytest.raises(ValueError, match=r"--dtype is bfloat16 in .*, got float32"):
        configured({**out, "resume": True, "dtype": "float32"})


def test_bfloat16_with_two_classes_learns_as_float32_does(tmp_path):
    chosen = {**TINY, "steps": 30, "eval_every": 30, "optimizer": "muon+adamw", "compare": False}
    ends = [
        run(2, train_rank, configured({**chosen, "dtype": dtype, "out": str(tmp_path / dtype)}))
        for dtype in ("float32", "bfloat16")
    ]
    losses = [reports[0].held_out["zero_nb"][30] for reports in ends]
    assert losses[0] < 5 and losses[1] == pytest.approx(losses[0], abs=0.02)


def test_another_optimizer_does_not_go_on(job, tmp_path):
    for choice, words in (
        ({"optimizer": "muon+adamw"}, r"--optimizer is adamw in .*, got muon\+adamw; leave it"),
        ({"optimizer_args": "eps=1e-6"}, r"--optimizer-args is  in .*, got eps=1e-6"),
    ):
        with pytest.raises(ValueError, match=words):
            configured({"resume": True, "out": str(job[0]), **choice})
    own = {**TINY, "optimizer": "common.optimizers.SignSGD", "compare": False}
    run(2, train_rank, configured({**own, "out": str(tmp_path)}))
    with pytest.raises(ValueError, match="imported only where you name it; say so again"):
        configured({"resume": True, "out": str(tmp_path)})


def test_a_class_that_cannot_be_sharded_is_refused_on_every_rank(tmp_path):
    def refused(config):
        try:
            train_rank(config)
        except ValueError as error:
            return str(error)

    coupled = {"optimizer": "common.optimizers.NormedSGD", "out": str(tmp_path)}
    for mode in ("zero1", "zero2"):
        config = configured({**TINY, **coupled, "mode": mode})
        assert all("NormedSGD" in str(words) for words in run(2, refused, config))


def dies_at_step_5(step, *rest, take=loop._take):
    if step == 5:
        raise OSError("the power is gone")
    take(step, *rest)


def test_a_periodic_checkpoint_continues_to_the_same_end(tmp_path, monkeypatch):
    config = configured({**TINY, "compare": False, "out": str(tmp_path)})

    monkeypatch.setattr(loop, "_take", dies_at_step_5)
    with pytest.raises(OSError, match="power"):
        run(2, train_rank, config)
    monkeypatch.undo()
    assert read_checkpoint(str(tmp_path))["step"] == 4
    again = configured({"resume": True, "out": str(tmp_path)})
    assert (again.steps, again.horizon) == (6, 6)
    assert list(run(2, train_rank, again)[0].losses["zero_nb"]) == [1, 2, 3, 4, 5, 6]
    assert (
        configured({"resume": True, "out": str(tmp_path)}).steps == 12
    )  # complete now: as far again


def compiled_in_every_mode(chosen, out):
    """Train in each mode with compiled blocks; give the reports and how many codes a block has."""
    reports = {}
    for mode in MODES:
        config = configured({**chosen, "mode": mode, "compile": True, "out": f"{out}/{mode}"})
        reports[mode] = train_rank(config)
    return reports, len(_debug_get_cache_entry_list(TransformerBlock.forward.__code__))


def test_compiled_blocks_train_in_every_mode(tmp_path):
    chosen = {**TINY, "layers": 1, "clip": 0.0, "steps": 4, "sample": 2}
    plain = run(2, train_rank, configured({**chosen, "out": str(tmp_path / "plain")}))[0]
    for reports, codes in run(2, compiled_in_every_mode, chosen, str(tmp_path), timeout=500):
        assert codes >= 1
        for report in reports.values():
            assert report.losses["zero_nb"] == report.losses["plain DDP"]
            assert report.apart == (0, 0)
            assert report.losses["zero_nb"] == pytest.approx(plain.losses["zero_nb"], abs=1e-4)
    resumed = configured({"resume": True, "steps": 5, "out": str(tmp_path / "zero2")})
    assert resumed.compile and not replace(resumed, compile=False).compile


def test_a_rank_that_cannot_compile_stops_all(tmp_path, monkeypatch):
    config = configured({**TINY, "compile": True, "compare": False, "out": str(tmp_path)})

    def refused():
        import torch._inductor.config

        if Group().group_rank == 1:  # rank 0 may find what earlier tests have compiled
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
            torch._inductor.config.cpp.cxx = ("/nowhere/c++",)
        try:
            train_rank(config)
        except RuntimeError as error:
            return str(error)

    assert all("--compile needs" in words for words in run(2, refused, timeout=300))


def logged_steps(folder, kind):
    """Give the steps and the losses in a log, as a reader of it sees them."""
    if kind == "csv":
        head, *rows = csv.reader((folder / "log.csv").read_text().splitlines())
        assert head == ["step", "loss", "ms", "tokens/s", "MiB"]
        return {int(row[0]): float(row[1]) for row in rows}, [row[0] for row in rows]
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("loss")
    return {event.step: event.value for event in found}, [str(event.step) for event in found]


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_log_goes_on_without_a_step_twice(kind, tmp_path, monkeypatch):
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    chosen = {**TINY, "log_steps": kind, "compare": False, "out": str(tmp_path)}

    monkeypatch.setattr(loop, "_take", dies_at_step_5)
    with pytest.raises(OSError, match="power"):
        run(2, train_rank, configured(chosen))
    monkeypatch.undo()
    assert logged_steps(tmp_path, kind)[1] == ["1", "2", "3", "4", "5"]
    again = run(2, train_rank, configured({"resume": True, "out": str(tmp_path)}))
    losses, steps = logged_steps(tmp_path, kind)
    assert steps == ["1", "2", "3", "4", "5", "6"]
    assert losses == pytest.approx(again[0].losses["zero_nb"], abs=1e-6)
    run(2, train_rank, configured({**chosen, "steps": 2}))  # begins, and so does its log
    assert logged_steps(tmp_path, kind)[1] == ["1", "2"]


def test_a_log_without_its_package_is_refused_on_every_rank(tmp_path):
    config = configured({**TINY, "log_steps": "tensorboard", "out": str(tmp_path)})

    def refused():
        sys.modules["torch.utils.tensorboard"] = None  # as if it were not installed
        try:
            train_rank(config)
        except ImportError as error:
            return str(error)

    assert all("pip install tensorboard" in words for words in run(2, refused))


def test_the_plain_optimizer_reads_the_checkpoint(job):
    state = read_checkpoint(str(job[0]))
    config = TrainConfig(**state["config"])
    model = GPT(config.layers, config.width, config.heads)
    model.load_state_dict(state["model"])
    optimizer = make_optimizer(config, model, sharded=False)
    optimizer.load_state_dict(state["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in state["optimizer"]["param_groups"]
    ]
    assert all(optimizer.state[p]["exp_avg"].abs().max() > 0 for p in model.parameters())


def test_what_cannot_be_resumed(job, tmp_path):
    out = str(job[0])
    with pytest.raises(
        ValueError, match=r"--resume needs a checkpoint, and there is no .*; train without"
    ):
        configured({"resume": True, "out": str(tmp_path)})
    with pytest.raises(ValueError, match=r"--width is 32 in .*got 64"):
        configured({"resume": True, "out": out, "width": 64})
    with pytest.raises(ValueError, match=r"--lr is 0.0 in .*got 0.1"):
        configured({"resume": True, "out": out, "lr": 0.1})
    with pytest.raises(ValueError, match=r"--steps must be more than the 6 .*got 6"):
        configured({"resume": True, "out": out, "steps": 6})
    whole = (job[0] / "checkpoint.pt").read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2]):
        Path(tmp_path, "checkpoint.pt").write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, or no checkpoint"):
            configured({"resume": True, "out": str(tmp_path)})
    torch.save({"weights": 1}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="not a checkpoint of this program"):
        configured({"resume": True, "out": str(tmp_path)})


def test_a_save_that_fails_leaves_the_checkpoint_before_it(job, tmp_path, monkeypatch):
    side = Side.__new__(Side)
    side.config = TrainConfig(out=str(tmp_path))
    side.vocabulary = PLAIN_BYTES
    side.model = side.optimizer = side.schedule = torch.nn.Linear(1, 1)
    report = RankReport(0, 1, "cpu", 1, 1, {}, {}, {})
    save_checkpoint(side, report, 1, Group())

    def half(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(side, report, 2, Group())
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 1


def test_ranks_that_disagree_all_stop(tmp_path):
    config = TrainConfig(**TINY, out=str(tmp_path))

    def other_clip():
        try:
            train_rank(replace(config, clip=1.0 + Group().group_rank))
        except ValueError as error:
            return str(error)

    messages = run(2, other_clip)
    assert all("--clip 1.0" in message and "--clip 2.0" in message for message in messages)


def test_a_checkpoint_that_one_rank_cannot_read_stops_all(tmp_path):
    config = TrainConfig(**TINY, resume=True)

    def only_rank_0():
        Path(tmp_path, "0").mkdir(exist_ok=True)
        try:
            train_rank(replace(config, out=str(tmp_path / str(Group().group_rank))))
        except ValueError as error:
            return str(error)

    assert all("--resume needs a checkpoint" in message for message in run(2, only_rank_0))


def test_writing_stays_inside_the_block():
    model = GPT(1, 16, 2)
    assert generate(model, ["ab", "c"], 20, 4, seed=3) == generate(
        model, ["ab", "c"], 20, 4, seed=3
    )
    assert generate(model, [], 20, 4, seed=3) == generate(model, ["a"], 0, 4, seed=3) == []


@cuda
def test_on_gpus(tmp_path):
    process = launched(torch.cuda.device_count(), *FLAGS, f"--out={tmp_path}")
    assert process.returncode == 0, process.stderr
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["device"] != "cpu" and numbers["largest loss difference"] < 0.05
