"""What the benchmark counts of ways to save and to load; no test looks at a time that was measured."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from test_bench import REPORT

from zero_nb.apps import bench
from zero_nb.apps.reports import BenchmarkReport, merged
from zero_nb.apps.save_turns import WAYS, Checkpoints, SaveTurn
from zero_nb.apps.tables import save_cells, write_report
from zero_nb.apps.targets import verdicts
from zero_nb.apps.workloads import benchmark_models

TURNS = {  # two rounds of one rank, the first call before them
    "iteration": (None, 2.0, 1.0),
    "torch-file": (8.0,),
    "sharded": (None, 1.0, 2.0),
    "fsdp2": (None, 2.0, 2.0),
}


def turns(slower, risen):
    """What a rank found that takes longer than another one by a factor."""
    return [
        SaveTurn(way, second and second * slower, risen)
        for way, seconds in TURNS.items()
        for second in seconds
    ], 100


def test_turns_of_saving_are_those_of_the_slowest_rank():
    found = Checkpoints.of("linear", [turns(1, 5 << 20), turns(2, 7 << 20), turns(1, None)])
    assert found.world_size == 3 and found.state == 300
    assert found.seconds["sharded"] == (2.0, 4.0) and found.seconds["torch-file"] == (16.0,)
    assert found.first_rank["sharded"] == 5 << 20 and found.other_ranks["sharded"] == 7 << 20
    assert found.ratio("sharded", "iteration").median == (2 / 4 + 4 / 2) / 2
    assert found.ratio("sharded", "torch-file").median == 2 / 16  # the round that both have
    assert found.ratio("sharded", "memory") is None
    rounds = [0, 3]  # in which a slow way has its turns, of four
    longer = {"sharded": tuple(float(i) for i in range(1, 5)), "torch-file": (10.0, 20.0)}
    thin = replace(found, seconds=longer).ratio("torch-file", "sharded")
    assert thin.median == statistics.median(
        t / (i + 1) for t, i in zip((10, 20), rounds, strict=True)
    )


def test_saving_in_a_report(tmp_path):
    two, four = (
        replace(Checkpoints.of("linear", [turns(1, 7 << 20)]), world_size=n) for n in (2, 4)
    )
    report = replace(REPORT, checkpoints=(two, replace(four, first_rank={"file": 128 << 20})))
    assert BenchmarkReport.from_json(report.to_json()) == report
    assert BenchmarkReport.from_json(REPORT.to_json().replace(', "checkpoints": []', "")) == REPORT
    new = replace(REPORT, checkpoints=(replace(two, state=1),))
    assert merged(report, new).checkpoints == (report.checkpoints[1], new.checkpoints[0])
    met = {words: (value, answer) for words, _, value, answer in verdicts(report)}
    assert met["save, sharded / torch-file: linear, worst of 2 and 4 ranks"] == ("0.125", "no")
    assert met["save, sharded / fsdp2: linear, worst of 2 and 4 ranks"] == ("0.75", "yes")
    assert met["save, async / iteration: linear, worst of 2 and 4 ranks"][1] == "not measured"
    assert met["memory of a save, file / 64 MiB"] == ("2", "no")
    lines = {line[2]: line for line in save_cells(report) if line[1] == "2"}
    assert lines["save_sharded (`sharded`)"][3:7] == ["1.25", "8.0", "0.75 (0.55 to 0.95)", "7"]
    write_report(report, tmp_path)
    assert "| save_sharded (`sharded`) | 1.25 | 8.0 |" in (tmp_path / "table.md").read_text()


def test_ways_to_save_and_load_are_measured(tmp_path):
    flags = ["--quick", "--model", "linear", "--ranks", "2", "--rounds", "1"]
    bench.run_benchmark([*flags, "--parts", "checkpoints", "--out", str(tmp_path)])
    [found] = BenchmarkReport.from_json((tmp_path / "report.json").read_text()).checkpoints
    assert sorted(found.seconds) == sorted(WAYS) and found.world_size == 2
    assert all(len(times) == 1 and times[0] > 0 for times in found.seconds.values())
    elements = sum(benchmark_models(quick=True)["linear"].sizes)
    assert 8 * elements <= found.state <= 8 * elements + 100
    if sys.platform == "linux":
        assert all(risen is not None for risen in found.first_rank.values())


def test_the_stored_report_of_saving_is_of_the_full_model_and_exact():
    path = Path(__file__).parents[1] / "nbs" / "benchmark" / "checkpoints" / "report.json"
    found = BenchmarkReport.from_json(path.read_text())
    assert not found.quick and json.loads(found.to_json()) == json.loads(path.read_text())
    for n in (2, 4):
        saving = found.saving("linear", n)
        elements = sum(benchmark_models()["linear"].sizes)
        assert 8 * elements <= saving.state <= 8 * elements + 1000
        assert sorted(saving.seconds) == sorted(WAYS)
