"""What a report of the benchmark says of its parts: of which day and commit each is, by which limits it
is judged, and that all machines measure the same."""

import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

from common.ports import free_port

from zero_nb.apps.counting import Counts, Makings
from zero_nb.apps.measuring import Options, machine
from zero_nb.apps.reports import BenchmarkReport, merged
from zero_nb.apps.tables import making_cells, measured_cells
from zero_nb.apps.targets import verdicts
from zero_nb.apps.turns import Launch

TIMES = {"ddp": (1.0, 2.0), "zero1": (0.5, 1.0)}
LAUNCH = Launch("gpt", 4, TIMES, TIMES, dict.fromkeys(TIMES, 2.5), {}, {})
COUNTS = (
    Counts("gpt", "ddp", 4, 4_000_000, 100, 300, 0, 3, 0),
    Counts("gpt", "zero1", 4, 1_000_000, 60, Fraction(400, 3), Fraction(100, 3), 4, 1),
)
MADE = Makings(10, 8, (1.0, 2.0), (2.0, 4.0), (3.0, 3.0), (30.0, 60.0), overlap=(2.0, 6.0))
REPORT = BenchmarkReport({"torch": "2.13", "date": "2026-01-01"}, False, (LAUNCH,), COUNTS, MADE)


def at(date, commit):
    """Give when, and of which commit, something was measured."""
    return {"date": date, "commit": commit}


def test_each_part_keeps_its_own_date_and_commit():
    first = replace(REPORT, machine=REPORT.machine | at("2026-01-01", "aaaa"))
    again = replace(LAUNCH, world_size=2), (replace(COUNTS[1], state=5),)
    machine = first.machine | at("2026-02-02", "bbbb")
    both = merged(first, BenchmarkReport(machine, False, again[:1], again[1]))
    old, new = at("2026-01-01", "aaaa"), at("2026-02-02", "bbbb")
    found = {part: both.measured.pop(part) for part in list(both.measured) if "counts" not in part}
    assert found == {"times: gpt, 4": old, "constructors": old, "times: gpt, 2": new}
    assert both.measured.pop("counts: gpt, 4, zero1") == new
    assert set(map(str, both.measured.values())) == {str(old)}
    assert BenchmarkReport.from_json(both.to_json()) == both


def test_what_an_older_report_does_not_say_is_not_made_up():
    both = merged(REPORT, BenchmarkReport(REPORT.machine | at("now", "c"), False))
    dates = {measured["date"] for measured in both.measured.values()}
    commits = {measured["commit"] for measured in both.measured.values()}
    assert (dates, commits) == ({"by 2026-01-01"}, {"not recorded"})


def test_a_report_between_machines_is_judged_by_limits_between_machines():
    between = replace(REPORT, machine=REPORT.machine | {"machines": "2"})
    times = {"ddp": (1.0,), "zero2": (0.9,), "zero1-overlap": (1.01,)}
    between = replace(between, launches=(replace(LAUNCH, iteration=times),))
    found = {words: rest for words, *rest in verdicts(between)}
    assert all("between machines" in words for words in found)
    where = "worst of all models and ranks"
    assert found[f"iteration between machines, zero2: {where}"] == ["1", "0.9", "yes"]
    assert found[f"iteration between machines, zero1-overlap: {where}"] == ["1", "1.01", "no"]


def test_a_report_lists_its_parts_and_constructors():
    report = replace(REPORT, machine=REPORT.machine | at("2026-01-01", "aaaa"))
    [line] = measured_cells(report)
    assert line == ["2026-01-01", "aaaa", "times: gpt, 4; counts: gpt, 4; constructors"]
    words = "zero_nb and overlap, one of two ranks, of a model in DDP"
    assert making_cells(report)[-1] == [words, "2.50 (2.10 to 2.90)"]
    found = {words: rest for words, *rest in verdicts(report)}
    assert found["making and attaching, overlap / AdamW: 10,000 parameters"] == ["3", "2.5", "yes"]
    what = "making and attaching, data_parallel / AdamW: 10,000 parameters"
    assert found[what][-1] == "not measured"


def test_a_machine_tells_the_commit():
    assert machine(Options(quick=True))["commit"].strip()


def test_machines_with_different_flags_stop_before_anything_is_measured(tmp_path):
    port = free_port()
    jobs = []
    for node in range(2):
        launcher = f"--nnodes=2 --node-rank={node} --nproc-per-node=1 --master-addr=127.0.0.1"
        flags = f"--quick --model small --parts times --variants zero1 --rounds {node + 1}"
        command = [sys.executable, "-m", "torch.distributed.run", *launcher.split()]
        command += [f"--master-port={port}", "-m", "zero_nb.apps.bench", *flags.split()]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command += ["--out", str(tmp_path)]
        jobs.append(subprocess.Popen(command, env=env, cwd=tmp_path, **pipes))
    try:
        said = [job.communicate(timeout=100)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert all(job.returncode for job in jobs)
    assert all("ValueError" in text and "--rounds: 1" in text for text in said), said
    assert not any("timing" in text for text in said) and not any(tmp_path.iterdir())


def test_what_was_left_out_once_and_runs_now_is_not_left_out():
    left_out = {"zero1": "it did not work", "fairscale": "not installed"}
    machine = {"name": "here"}
    old = BenchmarkReport(machine, False, (), (), None, left_out)
    for new in (
        BenchmarkReport(machine, False, (), COUNTS, None, {"torch": "why"}),
        BenchmarkReport(machine, False, (LAUNCH,), (), None, {"torch": "why"}),
    ):
        assert merged(old, new).left_out == {"fairscale": "not installed", "torch": "why"}
