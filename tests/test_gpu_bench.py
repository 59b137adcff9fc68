"""The benchmark on one GPU, tried on a CPU with a shrunk model; no test looks at a time."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from zero_nb.apps import gpu_bench
from zero_nb.apps.gpu_bench import (
    GPU_PARTS,
    GROUPS,
    GpuPeak,
    GpuReport,
    GpuRun,
    HostTurns,
    gpu_machine,
    gpu_peaks,
    host_turns,
    pretended_group,
    run_gpu_benchmark,
)
from zero_nb.apps.gpu_turns import GPU_WAYS, GpuTurns, gpu_model, take_turns
from zero_nb.comm.launch import run

CPU = torch.device("cpu")
EARLY = {"zero1-overlap", "zero2", "zero2-interleaved", "zero2-hidden"}
ON_FAKES = ("zero1-overlap", "zero2-hidden", "zero2", "zero2-interleaved", "zero2-hidden", "fsdp2")


def quick(batch=2, length=16):
    return gpu_model("gpt2-small", batch, length, quick=True)


def turns_of(dtype):
    said = []
    ways = tuple(GPU_WAYS)
    turns = take_turns(quick(), dtype, ways, 2, CPU, said.append)
    return turns, [line.rsplit(": ")[-1] for line in said]


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_all_ways_take_turns_and_learn_the_same(dtype, gap):
    ((turns, order),) = run(1, turns_of, dtype)
    ways = list(GPU_WAYS)
    assert order == [*ways, *ways[1:], ways[0]]  # the first changes
    for times in (turns.iteration, turns.host):
        assert list(times) == ways and {len(found) for found in times.values()} == {2}
    assert set(turns.step) == set(ways) - EARLY
    assert set(turns.loss) == set(turns.peak) == set(ways)
    assert max(turns.loss.values()) - min(turns.loss.values()) < gap
    assert turns.ratio("iteration", "ddp", "ddp").median == 1


def hosted(kind, ways, size):
    found = host_turns(quick(1), "float32", (kind, size), ways, 2, CPU)
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("kind", GROUPS)
def test_a_rank_of_many_takes_turns_alone(kind, size):
    """Hidden parameters that are still on their way must leave nothing that refuses the next way."""
    names = [way for way in GPU_WAYS if "torch" not in way] if kind == GROUPS[0] else ON_FAKES
    ways = tuple(dict.fromkeys(("zero2-hidden", *names)))
    found = hosted(kind, ways, size)
    assert (found.group, found.world_size) == (kind, size)
    for times in (found.host, found.whole):
        assert set(times) == set(ways) and {len(t) for t in times.values()} == {2}
    assert found.ratio("zero2-hidden", "zero2-hidden").median == 1


@pytest.mark.parametrize("kind", GROUPS)
def test_a_pretended_group_is_gone_after_an_error(kind):
    with pytest.raises(KeyError, match="mine"), pretended_group(kind, 4) as group:
        assert (dist.get_world_size(group), dist.get_rank(group)) == (4, 0)
        raise KeyError("mine")
    assert not dist.is_initialized()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_predicted_by_a_sum(dtype):
    model = quick(1, 16)
    found = {peak.way: peak for peak in gpu_peaks(model, dtype, 8, CPU)}
    itemsize = 4 if dtype == "float32" else 2
    weights = sum(model.sizes) * itemsize
    assert not dist.is_initialized()
    for peak in found.values():
        assert peak.predicted == peak.planned + peak.activations + peak.twice
        assert peak.twice == 2 * 512 * 64 * itemsize  # two gradients of the embedding
        assert (peak.dtype, peak.world_size, peak.measured) == (dtype, 8, 0)
    assert found["ddp"].planned >= 4 * weights
    assert found["ddp-gradview"].planned > found["zero1-gradview"].planned > found["zero2"].planned
    assert found["ddp"].planned - found["ddp-gradview"].planned == pytest.approx(weights, rel=0.01)


TURNS = GpuTurns(
    "m", "M", "float32", {"a": [1.0, 2.0]}, {"a": [0.5, 1.0]}, {}, {"a": 5}, {"a": 0.1}
)
HOST = HostTurns("m", "M", "bfloat16", 8, GROUPS[0], {"a": [1.0]}, {"a": [2.0]})
PEAK = GpuPeak("m", "M", "zero2", "float32", 8, 10, 20, 30, 61)


def test_a_report_is_read_as_it_was_written():
    full = GpuReport(gpu_machine(CPU), True, 2e12, [TURNS], [HOST], [PEAK])
    for report in (full, GpuReport({"torch": "2.13"}, False)):
        assert GpuReport.from_json(report.to_json()) == report
    assert full.memory[0].predicted == 60


def test_a_later_run_takes_the_place_of_the_parts_that_it_has():
    old = GpuReport({"date": "first"}, True, 1e9, [TURNS], [HOST], [])
    found = old.updated(GpuReport({"date": "second"}, False, None, [], [], [PEAK]))
    assert found == GpuReport({"date": "second"}, False, 1e9, [TURNS], [HOST], [PEAK])
    again = found.updated(GpuReport({"date": "third"}, False, 3e9))
    assert (again.bandwidth, again.times, again.memory) == (3e9, [TURNS], [PEAK])


REFUSED = {
    "needs a GPU, and torch sees none": ["--quick"],
    "--device cpu is for a try, with --quick": ["--device", "cpu"],
    "--rounds and --ranks must be at least 1, got --rounds 0": ["--rounds", "0"],
    "at least 1, got --rounds 5 --ranks 8 0": ["--ranks", "8", "0"],
    "invalid choice: 'gpt3'": ["--model", "gpt3"],
    "invalid choice: 'float16'": ["--dtype", "float16"],
    "invalid choice: 'counts'": ["--parts", "counts"],
}


@pytest.mark.parametrize(("words", "flags"), list(REFUSED.items()))
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    words, flags, tmp_path, capsys
):
    if "cpu" not in flags and flags != ["--quick"]:
        flags = ["--device", "cpu", "--quick", *flags]
    with pytest.raises(SystemExit) as ended:
        run_gpu_benchmark([*flags, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2 and words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


TRY = ["--device", "cpu", "--quick", "--rounds", "1", "--ranks", "2", "--model", "gpt2-small"]


def test_a_run_leaves_a_report_to_which_another_adds(tmp_path, capsys):
    flags = [*TRY, "--dtype", "float32", "--out", str(tmp_path)]

    def report():
        return GpuReport.from_json((tmp_path / "report.json").read_text(encoding="utf-8"))

    run_gpu_benchmark([*flags, "--parts", "bandwidth", "memory"])
    first = report()
    assert first.quick and first.bandwidth > 0 and (first.times, first.host) == ([], [])
    assert [peak.world_size for peak in first.memory] == [1] * 7 + [2] * 7
    run_gpu_benchmark([*flags, "--parts", "host", "--add"])
    second = report()
    assert (second.bandwidth, second.memory) == (first.bandwidth, first.memory)
    assert [turns.group for turns in second.host] == list(GROUPS)
    run_gpu_benchmark([*flags, "--parts", "bandwidth"])
    assert (report().memory, report().host) == ([], [])
    assert capsys.readouterr().out.endswith(f"in {tmp_path}: report.json\n")


def test_a_run_that_is_cut_off_keeps_what_the_report_had(tmp_path, monkeypatch):
    """With `--add`, what an earlier run has measured is not lost while a later one is under way."""
    flags = [*TRY, "--dtype", "float32", "--out", str(tmp_path)]
    run_gpu_benchmark([*flags, "--parts", "bandwidth"])

    def stop(model, dtype, world_size, *others):
        if world_size == 2:
            raise KeyboardInterrupt
        return [PEAK]

    monkeypatch.setattr(gpu_bench, "gpu_peaks", stop)
    with pytest.raises(KeyboardInterrupt):
        run_gpu_benchmark([*flags, "--parts", "memory", "--add"])
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["bandwidth"] and len(found["memory"]) == 1


def test_a_try_is_not_added_to_another_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text((text := GpuReport({}, False, 1e12).to_json()), encoding="utf-8")
    with pytest.raises(SystemExit):
        run_gpu_benchmark([*TRY, "--parts", "bandwidth", "--add", "--out", str(tmp_path)])
    assert "this run is a try with it and the report is not" in " ".join(
        capsys.readouterr().err.split()
    )
    assert path.read_text(encoding="utf-8") == text


def test_timelines_are_drawn_of_each_way(tmp_path):
    run_gpu_benchmark([*TRY, "--parts", "timelines", "--out", str(tmp_path)])
    names = {path.name for path in tmp_path.glob("timeline-*.svg")}
    assert {"timeline-zero2.svg", "timeline-fsdp2.svg"} <= names and len(names) == 7


def test_a_run_measures_all_parts_by_default():
    assert GpuRun(CPU).parts == GPU_PARTS and set(GpuRun(CPU).ranks) == {8, 64, 1024}


def test_a_later_run_keeps_what_it_has_not_measured_again():
    """`--add` with one model, dtype or world size leaves the others in the report."""
    other = replace(TURNS, model="n"), replace(HOST, world_size=64), replace(PEAK, way="zero1")
    old = GpuReport({}, True, 1e9, [TURNS, other[0]], [HOST, other[1]], [PEAK, other[2]])
    again = replace(TURNS, loss={"a": 0.2}), replace(HOST, host={}), replace(PEAK, measured=62)
    found = old.updated(GpuReport({}, True, None, *([each] for each in again)))
    assert found.times == [other[0], again[0]]
    assert found.host == [other[1], again[1]]
    assert found.memory == [other[2], again[2]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": {**gpu_machine(CPU), "gpu": "another"}}, "the same GPU"),
        ({"machine": {**gpu_machine(CPU), "torch": "1.0"}}, "torch"),
        ({"times": [{"model": "m"}]}, "no report of"),
        ({"launches": []}, "no report of"),
    ],
)
def test_a_report_of_another_machine_or_program_is_not_added_to(change, words, tmp_path, capsys):
    path = tmp_path / "report.json"
    content = json.loads(GpuReport(gpu_machine(CPU), True, 1e12).to_json())
    path.write_text(text := json.dumps(content | change), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        run_gpu_benchmark([*TRY, "--parts", "bandwidth", "--add", "--out", str(tmp_path)])
    assert ended.value.code == 2 and words in " ".join(capsys.readouterr().err.split())
    assert path.read_text(encoding="utf-8") == text
