"""What the main job reports of a training whose numbers stop being numbers."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from common.jobs import TINY

from zero_nb.apps import train
from zero_nb.apps.config import MODES, TrainConfig
from zero_nb.apps.gpt import GPT
from zero_nb.apps.loop import train_rank
from zero_nb.apps.modes import ModeRow, _tenths, compare_modes, mode_cells, mode_table
from zero_nb.apps.results import _paired, measured, memory_table
from zero_nb.apps.sides import MEMORY_KINDS, PLAIN, RankReport, Side
from zero_nb.apps.text import read_corpus
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

DIFFERENCES = (
    "largest parameter difference",
    "largest relative parameter difference",
    "largest loss difference",
)


def broken_after(step, modes, monkeypatch):
    """Let a weight far behind the first be NaN after a step, in these modes."""
    train = Side.train

    def broken(side, batch):
        found = train(side, batch)
        if side.schedule.last_epoch == step and side.mode in modes:
            side.model.blocks[-1].down.weight.data[0, 0] = math.nan
        return found

    monkeypatch.setattr(Side, "train", broken)


@pytest.mark.parametrize(
    ("modes", "first"),
    [
        (("zero2",), {"zero_nb": 5}),
        ((PLAIN,), {"plain DDP": 5}),
        (("zero2", PLAIN), {"plain DDP": 5, "zero_nb": 5}),
        ((), None),
    ],
)
def test_a_side_that_is_not_finite_is_not_taken_for_the_other(modes, first, tmp_path, monkeypatch):
    broken_after(4, modes, monkeypatch)
    reports = run(2, train_rank, TrainConfig(**TINY, mode="zero2", out=str(tmp_path)))
    numbers = json.loads(json.dumps(measured(reports)))
    assert all(math.isnan(numbers[what]) == bool(modes) for what in DIFFERENCES)
    assert numbers.get("first step whose loss is not finite") == first
    table = memory_table(reports)
    assert table.count("difference: nan") == (3 if modes else 0)
    for side in first or {}:
        assert f"5 of {side}" in table


def test_one_rank_whose_parameters_are_not_finite_is_seen(tmp_path):
    reports = run(2, train_rank, TrainConfig(**TINY, out=str(tmp_path)))
    reports[1].apart = (math.nan, math.nan)
    numbers = measured(reports)
    assert [math.isnan(numbers[what]) for what in DIFFERENCES] == [True, True, False]


def test_a_mode_that_is_not_finite_is_told_from_the_others(monkeypatch):
    broken_after(2, ("zero1",), monkeypatch)
    config = TrainConfig(**{**TINY, "rounds": 2})
    compared = (config, read_corpus(), torch.device("cpu"))
    rows, _ = run(2, lambda: compare_modes(*compared, Group()))
    assert [row.mode for row in rows] == [PLAIN, *MODES]
    found = {row.mode: (row.loss_difference, row.parameter_difference) for row in rows}
    assert [mode for mode, gaps in found.items() if all(map(math.isnan, gaps))] == ["zero1"]
    assert all(gap < 1e-3 for mode, gaps in found.items() if mode != "zero1" for gap in gaps)
    memory, costs = (line for line in mode_table(rows).splitlines() if line.startswith("zero1 "))
    assert costs.split()[-2:] == ["nan", "nan"] and "nan" not in memory


@pytest.mark.parametrize("planned", [2**30, None])
def test_the_table_of_modes_fits_a_terminal_and_names_each_column_once(planned):
    kinds = dict.fromkeys(MEMORY_KINDS.values(), 2**30)
    row = ModeRow("", kinds, dict.fromkeys(kinds, planned), (0.1, 10.25, 20.5), 2**30, 1e-3, 2e-3)
    rows = [replace(row, mode=mode) for mode in (PLAIN, *MODES)]
    lines = mode_table(rows).splitlines()
    assert max(map(len, lines)) <= 120
    assert ("(?: no plan)" in lines[0]) == (planned is None)
    heads = mode_cells(rows)[0]
    assert len(heads) == len({*heads}) and all("  " not in head for head in heads)


def test_a_report_says_how_it_was_made(tmp_path):
    config = TrainConfig(**{**TINY, "eval_every": 6}, lr=3e-3, compare=False, out=str(tmp_path))
    train.leave(run(2, train_rank, config), config)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["options"] == asdict(config)
    assert TrainConfig(**report["options"]) == config
    assert report["options"]["mode"] == "auto" and report["mode"] in MODES  # asked for, and taken


STORED = Path(__file__).parents[1] / "nbs/benchmark/train/report.json"


def bytes_of_all_modes():
    """Give what is counted, and not timed, of each mode with the default options."""
    config = TrainConfig(rounds=1)  # tokens are bytes here, for a model that knows more
    rows = compare_modes(config, read_corpus(), torch.device("cpu"), Group())
    return [(row.mode, row.held, row.planned, row.sent) for row in rows]


def test_the_stored_run_counts_what_a_run_counts_now():
    rows = json.loads(STORED.read_text(encoding="utf-8"))["modes"]
    stored = [(row["mode"], row["held"], row["planned"], row["sent"]) for row in rows]
    assert run(2, bytes_of_all_modes, timeout=300)[0] == stored


def test_the_stored_run_is_one_with_the_default_options():
    default = TrainConfig()
    report = json.loads(STORED.read_text(encoding="utf-8"))
    assert report["options"] == {**asdict(default), "out": "nbs/benchmark/train"}
    ranks = report["world size"]
    assert ranks == len(report["bytes by rank"]) == 2
    windows = default.global_batch or default.batch * ranks * default.accumulate
    assert report["tokens per step"] == windows * default.block
    steps = [str(step + 1) for step in range(default.steps)]
    evaluated = [step for step in steps if int(step) % default.eval_every == 0]
    assert {*report["losses"]} == {"zero_nb", "plain DDP"} == {*report["held-out losses"]}
    assert all([*losses] == steps for losses in report["losses"].values())
    assert all([*losses] == evaluated for losses in report["held-out losses"].values())
    assert [row["mode"] for row in report["modes"]] == ["ddp", *MODES]
    sizes = default.layers, default.width, default.heads
    model = GPT(*sizes, vocabulary=default.vocabulary)
    assert report["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_tenths_of_few_ratios_lie_among_them(count):
    ratios = [1.0 + 0.25 * i * i for i in range(count)]
    low, median, high = _tenths(ratios)
    assert min(ratios) <= low <= median <= high <= max(ratios)
    seconds = {"zero_nb": [(ratio, ratio) for ratio in ratios], "plain DDP": [(1.0, 1.0)] * count}
    report = RankReport(0, 1, "cpu", 1, 1, {}, {}, seconds)
    found = _paired([report], 0)
    assert min(ratios) <= found["lowest tenth below"] <= found["median"]
    assert found["median"] <= found["highest tenth above"] <= max(ratios)
