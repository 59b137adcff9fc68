"""What the benchmark counts, and what it does with times; no test looks at a time that was measured."""

import csv
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_nb.apps import bench, measuring
from zero_nb.apps.counting import Counts, Makings, count_rank, counts, make_rank, state_bytes
from zero_nb.apps.measuring import Options, _time_variants, measure, profiles
from zero_nb.apps.ratios import Spread, paired
from zero_nb.apps.reports import BenchmarkReport, merged, strays
from zero_nb.apps.tables import HEADS, SAVE_HEADS, cells, rows, summary, write_report
from zero_nb.apps.targets import Target, verdicts
from zero_nb.apps.turns import Launch, Turn, _link_bytes, _rounded, time_rank, trace_rank
from zero_nb.apps.variants import _LARGE, VARIANTS, Variant
from zero_nb.apps.workloads import benchmark_models
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.shared_file import available
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

EARLY = ("zero1-overlap", "zero2", "zero2-interleaved")  # step inside backward
REFERENCES = ("ddp", "ddp-gradview")
OURS = [name for name, v in VARIANTS.items() if not v.package]
TIMES = {"ddp": (1.0, 2.0, 4.0), "torch": (2.0, 4.0, 4.0), "zero1": (0.5, 1.0, 2.0)}
LAUNCH = Launch(
    "gpt",
    4,
    TIMES,
    {name: tuple(t / 10 for t in times) for name, times in TIMES.items()},
    dict.fromkeys(TIMES, 2.5),
    {"ddp": (3.0,), "zero1": (2.0, 1.0, 4.0)},
    {"ddp": 400, "zero1": 100},
)
COUNTS = (
    Counts("gpt", "ddp", 4, 4_000_000, 100, 300, 0, 3, 0),
    Counts("gpt", "zero1", 4, 1_000_000, 60, Fraction(400, 3), Fraction(100, 3), 4, 1),
    Counts("gpt", "deepspeed", 4, 900, None, None, None, None, None),
)
REPORT = BenchmarkReport(
    {"torch": "2.13"},
    False,
    (LAUNCH,),
    COUNTS,
    Makings(10, 8, (1.0, 2.0), (2.0, 4.0), (3.0, 3.0), (30.0, 60.0)),
    {"fairscale": "not installed"},
)


@pytest.fixture(scope="module", params=[1, 2, 3])
def world(request):
    """Count all models and all variants that need no other package, at one world size."""
    quick, n = benchmark_models(quick=True), request.param

    def all_of_it():
        return {(m, v): count_rank(v, quick[m], torch.device("cpu")) for m in quick for v in OURS}

    ranks = run(n, all_of_it)
    return n, {
        key: counts(key[1], quick[key[0]], [rank[key] for rank in ranks]) for key in ranks[0]
    }


def planned_state(model, view, n):
    """Give the largest state of any rank from the optimizer's own plan: two moments for each
    element, a step count for each tensor that is stepped."""

    def of_rank():
        zero = ZeroRedundancyOptimizer(
            model.made("cpu").parameters(), torch.optim.AdamW, parameters_as_bucket_view=view, lr=1
        )
        return [shard.plan for shard in zero.shards]

    plans = run(n, of_rank)[0]
    buckets = [bucket for plan in plans for bucket in plan.buckets]

    def of(rank):
        owned = [bucket.slots_of(rank) for bucket in buckets]
        elements = sum(slot.numel for slots in owned for slot in slots)
        tensors = sum(
            len(slots) if n == 1 and not view else bool(slots) for slots in owned
        )  # neighbours in a bucket are one tensor
        return 8 * elements + 4 * tensors

    return max(map(of, range(n))), len(buckets)


@pytest.mark.turns(3)
def test_state_is_what_the_plan_says(world):
    n, found = world
    for name, model in benchmark_models(quick=True).items():
        elements, count = sum(model.sizes), len(model.sizes)
        assert found[name, "ddp"].state == found[name, "control"].state == 8 * elements + 4 * count
        for variant, view in (("zero1", False), ("zero1-view", True)):
            state, buckets = planned_state(model, view, n)
            assert found[name, variant].state == state
            assert state <= found[name, "ddp"].state / n * 1.001 + 65_536
            assert found[name, variant].step_collectives == (buckets if n > 1 else 0)
        assert found[name, "fsdp2"].state >= 8 * elements / n
        dealt = max(size for size in model.sizes if size < _LARGE)  # a rank has it whole
        assert found[name, "floor"].state <= 8 * (elements / n + count + dealt) + 4 * count


def test_wire_is_known_in_advance(world):
    n, found = world
    for name, model in benchmark_models(quick=True).items():
        once = Fraction((n - 1) * 4 * sum(model.sizes), n)
        assert found[name, "ddp"].wire == found[name, "control"].wire == 2 * once
        assert (
            found[name, "ddp"].step_wire
            == found[name, "floor"].wire
            == found[name, "floor"].collectives
            == 0
        )
        assert found[name, "torch"].wire == 3 * once and found[name, "torch"].step_wire == once
        assert found[name, "torch-view"].wire == 3 * once
        assert found[name, "torch"].step_collectives == len(model.sizes)
        for variant in ("zero1", "zero1-view"):  # a bucket is padded to a multiple of the ranks
            assert (
                once
                <= found[name, variant].step_wire
                <= once + 4 * n * found[name, variant].step_collectives
            )
            assert found[name, variant].wire - found[name, variant].step_wire == 2 * once
        for variant in EARLY:
            assert found[name, variant].wire == 2 * once and found[name, variant].step_wire == 0
        assert (
            2 * once <= found[name, "fsdp2"].wire <= 1.25 * 2 * once
        )  # it pads the rows of every parameter


def test_full_size_models_are_those_of_the_issue():
    full = benchmark_models()
    assert {name: len(m.sizes) for name, m in full.items()} == {
        "linear": 40,
        "gpt": 38,
        "small": 1000,
    }
    assert [sum(m.sizes) for m in full.values()] == [80_040_000, 29_938_560, 528_000]
    assert max(full["gpt"].sizes) / sum(full["gpt"].sizes) > 0.64
    assert full.keys() == benchmark_models(quick=True).keys()


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", benchmark_models())
def test_every_variant_trains_the_same_model(name):
    variants = tuple(v for v in OURS if v != "floor")
    model = benchmark_models(quick=True)[name]

    def train():
        return {v: time_rank(v, model, torch.device("cpu")) for v in variants}

    ranks = run(2, train)
    for rank in ranks:
        for variant in variants:
            turn = rank[variant]
            assert turn.loss == pytest.approx(rank["ddp"].loss, rel=1e-5), variant
            inside = variant.removesuffix("-messages") in EARLY
            assert len(turn.iteration) == 4 and len(turn.step) == (0 if inside else 2)
            assert turn.first > 0 and (turn.resident is None or turn.resident > 0)
    launch = Launch.of(name, {v: [[rank[v] for rank in ranks]] for v in variants})
    first, second = (rank["zero1"].iteration for rank in ranks)
    slowest = statistics.median(max(pair) for pair in zip(first, second, strict=True))
    assert launch.iteration["zero1"] == _rounded([slowest])
    assert strays(BenchmarkReport({}, True, (launch,))) == {}


def test_a_variant_by_messages_leaves_the_way_of_the_others_alone(monkeypatch):
    """As under torchrun, where all variants are in the same processes."""
    for before in (None, "1"):
        if before:
            monkeypatch.setenv("ZERO_NB_MEMORY", before)

        def ways():
            found = []
            for name in ("zero2", "zero2-messages", "zero2"):
                groups = []
                make = VARIANTS[name].make

                def noted(module, group, lr, make=make, groups=groups):
                    groups.append(Group(group))
                    return make(module, group, lr)

                with pytest.MonkeyPatch.context() as patch:
                    variant = replace(VARIANTS[name], make=noted)
                    patch.setitem(VARIANTS, name, variant)
                    time_rank(name, benchmark_models(True)["linear"], torch.device("cpu"))
                found.append(groups[0]._traffic.transports[0] is not None)
            return found, os.environ.get("ZERO_NB_MEMORY")

        if available():
            assert run(2, ways) == [([True, False, True], before)] * 2


def test_turns_rotate():
    order = []

    def ranks(n, f, name, model, device):
        order.append(name)
        return [Turn(1.0, (2.0,), (), 3.0, None)] * n

    options = Options(rounds=4, quick=True)
    model = benchmark_models(True)["small"]
    found = _time_variants(options, ranks, model, 2, ["ddp", "b", "c"], lambda line: None)
    assert [name[0] for name in order] == [*"dbcbcdcdbdbc"]
    assert found.world_size == 2 and found.iteration["b"] == (2.0,) * 4 and not found.step
    assert found.resident == {"ddp": None, "b": None, "c": None} and set(found.link.values()) == {
        None
    }


def test_what_an_interface_sends_is_counted(monkeypatch):
    """The loopback here; between machines the one that joins them."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = benchmark_models(True)["linear"]
    turns = run(2, time_rank, "zero2-messages", model, torch.device("cpu"))
    found = Launch.of("linear", {"zero2": [turns]}).link["zero2"]
    assert found >= 2 * 4 * sum(model.sizes)  # both ranks send all of it once
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert _link_bytes() is None


def test_ratios():
    found = paired([1, 2, 3, 400], [2, 2, 2, 2])
    assert (
        found.median == 1.25
        and found.low == pytest.approx(0.65)
        and found.high == pytest.approx(140.45)
    )
    assert paired([3], [2]) == Spread(1.5, 1.5, 1.5)
    drift = [1.1**i for i in range(40)]
    assert paired([0.8 * t for t in drift], drift).median == pytest.approx(
        0.8
    )  # the machine became 40 times slower meanwhile
    assert statistics.mean(drift[20:]) / statistics.mean(drift[:20]) > 6
    for pair in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="same rounds"):
            paired(*pair)


def test_ratios_of_a_report_are_within_one_launch():
    assert REPORT.ratio("iteration", "gpt", 4, "zero1").median == 0.5
    assert REPORT.ratio("step", "gpt", 4, "zero1", "torch").median == pytest.approx(0.25)
    assert REPORT.ratio("step", "gpt", 4, "ddp", "zero1").median == pytest.approx(2)
    assert (
        REPORT.ratio("step", "gpt", 2, "zero1") is None
        and REPORT.ratio("step", "gpt", 4, "zero1", "fsdp2") is None
    )
    apart = replace(
        REPORT,
        launches=(
            replace(LAUNCH, iteration={"ddp": (1.0,), "zero1": (1.0,)}),
            replace(LAUNCH, iteration={"ddp": (9.0,), "torch": (9.0,)}),
        ),
    )
    assert (
        apart.ratio("iteration", "gpt", 4, "zero1", "torch") is None
    )  # not even through the reference
    assert apart.ratio("iteration", "gpt", 4, "torch").median == 1
    again = replace(
        REPORT,
        launches=(
            *apart.launches,
            replace(LAUNCH, iteration={"ddp": (2.0, 2.0), "zero1": (4.0, 6.0)}),
            replace(LAUNCH, world_size=2),
        ),
    )
    assert again.ratio("iteration", "gpt", 4, "zero1").median == 2  # of 1, 2 and 3, in two launches


def test_the_reference_is_ddp_at_its_best():
    times = {"ddp": (4.0, 4.0), "ddp-gradview": (2.0, 3.0), "zero1": (2.0, 3.0)}
    memory = {"ddp": 200, "ddp-gradview": 300, "zero1": 100}
    both = replace(LAUNCH, iteration=times, step=times, resident=memory)
    report = replace(REPORT, launches=(both,))
    assert both.best == "ddp-gradview" and LAUNCH.best == "ddp"
    assert both.ratio("iteration", "zero1").median == 1
    assert report.ratio("step", "gpt", 4, "ddp").median == pytest.approx((2 + 4 / 3) / 2)
    assert report.ratio("iteration", "gpt", 4, "zero1", "ddp").median == 0.625
    assert report.lowest("resident", "gpt", 4) == 200
    found = {row["variant"]: row for row in rows(report)}
    assert found["zero1"]["resident / better ddp"] == 0.5
    assert cells(found["ddp-gradview"])[3:5] == ["1", "1"]
    assert cells(found["ddp"])[3] == "1.67 (1.40 to 1.93)"


def test_json_is_exact():
    again = BenchmarkReport.from_json(REPORT.to_json())
    assert (
        again == REPORT
        and isinstance(again.counts[1].wire, Fraction)
        and isinstance(again.counts[0].wire, int)
    )
    assert again.count("gpt", 4, "deepspeed").wire is None and again.count("gpt", 2) is None
    assert BenchmarkReport.from_json(BenchmarkReport({}, True).to_json()) == BenchmarkReport(
        {}, True
    )


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"machine": {}}', REPORT.to_json().replace('"step_wire"', '"steps"')]
)
def test_other_reports_are_refused(text):
    with pytest.raises(ValueError, match="not a report of this version"):
        BenchmarkReport.from_json(text)


def test_targets():
    met = {words: (value, answer) for words, _, value, answer in verdicts(REPORT)}
    answers = [answer for _, answer in met.values()]
    assert (answers.count("yes"), answers.count("not measured")) == (5, len(answers) - 5)
    assert met["step, zero1 / torch: gpt, 4 ranks"] == ("0.25", "yes")
    assert met["constructor, zero1 / AdamW: 10,000 parameters"] == ("2", "yes")
    assert met["constructor, zero1 / torch: 10,000 parameters, 1,024 ranks"] == (
        "0.075",
        "yes",
    )
    heavy = replace(REPORT, counts=(COUNTS[0], replace(COUNTS[1], state=1_001_000 + 65_537)))
    assert (
        verdicts(heavy)[0][3] == "no"
        and verdicts(
            replace(heavy, counts=(COUNTS[0], replace(COUNTS[1], state=1_001_000 + 65_536)))
        )[0][3]
        == "yes"
    )
    assert (
        Target("", 1.0, lambda report: 1.0).met(REPORT) == "yes"
        and Target("", 1.0, lambda report: 1.01).met(REPORT) == "no"
    )
    peaks = replace(REPORT, counts=tuple(replace(c, model="linear") for c in COUNTS))
    assert {words: (value, answer) for words, _, value, answer in verdicts(peaks)}[
        "peak, zero1 / ddp: linear, 4 ranks"
    ] == ("0.6", "yes")
    iteration = {"ddp": (1.0,), "zero2": (0.7,), "zero2-messages": (0.96,)}
    quicker = replace(LAUNCH, iteration=iteration, first={"zero2": (1.4,)}, resident={})
    found = {words: rest for words, _, *rest in verdicts(replace(REPORT, launches=(quicker,)))}
    assert found["iteration, zero2: gpt, 4 ranks"] == ["0.7", "yes"]
    assert found["iteration, zero2-messages: gpt, 4 ranks"] == ["0.96", "no"]
    assert found["first iteration / later ones, zero2: worst of all models and ranks"] == [
        "2",
        "no",
    ]
    memory = {"ddp": 400, "ddp-gradview": 300, "zero2": 150}
    lighter = replace(REPORT, launches=(replace(LAUNCH, model="linear", resident=memory),))
    found = {words: rest for words, _, *rest in verdicts(lighter)}
    assert found["resident, zero2: linear, 4 ranks"] == ["0.5", "yes"]


def test_each_head_of_a_ratio_says_of_what():
    """Two columns with one head, such as "/ better ddp", can only be told apart by their places."""
    short = [head.strip() for head in summary(REPORT).splitlines()[0].split("|")[2:-1]]
    for heads in (HEADS, SAVE_HEADS, short):
        assert len(set(heads)) == len(heads) and all(head == head.strip() for head in heads)
        ratios = [head for head in heads if "/" in head]
        assert len(ratios) >= 3 and all(re.fullmatch(r"\w.* / \w.*", head) for head in ratios)
    assert all("/" in head for head in short)


@pytest.mark.parametrize("folder", ["", "checkpoints", "two_machines"])
def test_stored_tables_are_made_of_the_stored_report(folder, tmp_path):
    stored = Path(__file__).parents[1] / "nbs/benchmark" / folder
    report = BenchmarkReport.from_json((stored / "report.json").read_text(encoding="utf-8"))
    write_report(report, tmp_path)
    for name in ("table.csv", "table.md"):
        assert (stored / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_rows_and_files(tmp_path):
    lines = {row["variant"]: row for row in rows(REPORT)}
    assert list(lines) == ["ddp", "zero1", "torch", "deepspeed"]
    assert (
        lines["zero1"]["state / fair share"] == 1
        and lines["zero1"]["peak / better ddp"] == 0.6
        and lines["zero1"]["resident / better ddp"] == 0.25
        and lines["zero1"]["first / later"] == 2
        and lines["torch"]["state"] is None
    )
    assert (
        lines["zero1"]["wire / ddp"] == pytest.approx(400 / 900)
        and lines["deepspeed"]["wire / ddp"] is None
    )
    assert cells(lines["zero1"])[3:7] == [
        "0.50 (0.50 to 0.50)",
        "0.50 (0.50 to 0.50)",
        "0.25 (0.25 to 0.45)",
        "2.00",
    ]
    assert all(len(cells(row)) == len(HEADS) for row in lines.values())
    assert cells(lines["ddp"])[3] == cells(lines["torch"])[5] == "1"
    folder = tmp_path / "a" / "b"
    names = write_report(REPORT, folder)
    assert (
        sorted(names)
        == sorted(path.name for path in folder.iterdir())
        == ["figure.png", "figure.svg", "report.json", "table.csv", "table.md"]
    )
    assert BenchmarkReport.from_json((folder / "report.json").read_text()) == REPORT
    with open(folder / "table.csv", newline="") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == list(lines)
    text = (folder / "table.md").read_text()
    assert "left out: fairscale (not installed)" in text and "| 0.65 | 0.25 | yes |" in text
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert write_report(replace(REPORT, launches=()), folder) == [
        "report.json",
        "table.csv",
        "table.md",
    ]


def test_reports_are_added(tmp_path, capsys):
    flags = [
        "--quick",
        "--ranks",
        "1",
        "--variants",
        "zero1",
        "--parts",
        "counts",
        "--out",
        str(tmp_path),
    ]
    bench.run_benchmark([*flags, "--model", "small", "--add"])  # nothing is there yet
    bench.run_benchmark([*flags, "--model", "linear", "--add"])
    found = BenchmarkReport.from_json((tmp_path / "report.json").read_text())
    assert [(c.model, c.variant) for c in found.counts] == [
        (model, name) for model in ("small", "linear") for name in (*REFERENCES, "zero1")
    ]
    bench.run_benchmark([*flags, "--model", "gpt"])
    assert {
        c.model for c in BenchmarkReport.from_json((tmp_path / "report.json").read_text()).counts
    } == {"gpt"}
    (tmp_path / "report.json").write_text(
        replace(found, machine=found.machine | {"torch": "1.0"}).to_json()
    )
    capsys.readouterr()
    with pytest.raises(SystemExit):
        bench.run_benchmark([*flags, "--model", "small", "--add"])
    with pytest.raises(SystemExit):
        bench.run_benchmark([*[f for f in flags if f != "--quick"], "--model", "small", "--add"])
    first, second = capsys.readouterr().err.splitlines()
    assert (
        "these differ in torch;" in first and "these differ in torch, size of the models;" in second
    )


def test_what_was_measured_before_an_interruption_is_kept(tmp_path, monkeypatch):
    flags = ["--quick", "--variants", "zero1", "--parts", "counts", "--out", str(tmp_path)]
    bench.run_benchmark([*flags, "--model", "gpt", "--ranks", "1"])
    count = count_rank

    def stop(name, model, device):
        if model.name == "small" and dist.get_world_size() == 2:
            raise KeyboardInterrupt
        return count(name, model, device)

    monkeypatch.setattr(measuring, "count_rank", stop)
    for flag, kept in (
        (["--add"], ["gpt 1", "linear 1", "linear 2", "small 1"]),
        ([], ["linear 1", "linear 2", "small 1"]),
    ):
        with pytest.raises(BaseException, match="rank"):
            bench.run_benchmark([*flags, *flag, "--model", "linear", "small", "--ranks", "1", "2"])
        found = BenchmarkReport.from_json((tmp_path / "report.json").read_text())
        assert [f"{c.model} {c.world_size}" for c in found.counts if c.variant == "zero1"] == kept
    assert not [*tmp_path.glob("*.new")]


@pytest.mark.parametrize("in_use", [False, True])
def test_a_gpu_is_named_by_a_rank_unless_cuda_is_in_use(monkeypatch, in_use):
    ask = lambda device=None: "a GPU"
    started = []

    def run_one(n, f, *args, backend):
        started.append((n, f, args, backend))
        return [f(*args)]

    monkeypatch.setattr(measuring, "run", run_one)
    monkeypatch.setattr(torch.cuda, "get_device_name", ask)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = measuring.machine(Options(device="cuda", ranks=(1,)))
    assert (found["gpu"], found["backend"]) == ("a GPU", "nccl")
    assert started == ([] if in_use else [(1, ask, (), "cpu:gloo,cuda:nccl")])


def test_profiles_are_drawn_of_the_variants_that_were_named(tmp_path, capsys):
    (tmp_path / "report.json").write_text("a report that is there")
    bench.run_benchmark(
        [
            "--quick",
            "--model",
            "linear",
            "--ranks",
            "2",
            "--variants",
            "zero1-overlap",
            "zero1",
            "--parts",
            "profiles",
            "--out",
            str(tmp_path),
        ]
    )
    assert (tmp_path / "report.json").read_text() == "a report that is there"
    names = ["profile-linear-2-zero1-overlap.svg", "profile-linear-2-zero1.svg"]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == names and ", ".join(
        names
    ) in capsys.readouterr().out.replace("\n", " ")
    for name in names:
        assert (tmp_path / name).read_text().count("<title>") > 5
    assert profiles(Options(("linear",), (1,), ("zero1-overlap",), 1, True)) == {}
    found = run(
        2,
        lambda: trace_rank("zero1-overlap", benchmark_models(True)["linear"], torch.device("cpu")),
    )
    assert all({"step", "compute"} <= {s.kind for s in rank} for rank in found)


def test_merging_replaces_what_was_measured_again():
    new = BenchmarkReport(
        REPORT.machine,
        False,
        (replace(LAUNCH, losses={}), replace(LAUNCH, world_size=2)),
        (replace(COUNTS[1], state=5),),
        None,
        {"x": "y"},
    )
    both = merged(REPORT, new)
    assert (
        both.launches == new.launches
        and both.count("gpt", 4, "zero1").state == 5
        and both.count("gpt", 4) == COUNTS[0]
        and len(both.counts) == 3
    )
    assert both.makings == REPORT.makings and both.left_out == {
        "fairscale": "not installed",
        "x": "y",
    }


def test_strays():
    off = replace(LAUNCH, losses={"ddp": 2.5, "zero1": 2.502, "torch": float("nan"), "floor": 9.0})
    assert list(strays(replace(REPORT, launches=(off,)))) == ["zero1", "torch"]


def test_measure_leaves_out_peers_that_do_not_work_and_no_others(monkeypatch):
    def broken(module, group, lr):
        raise OSError("no such library\nlibpeer.so")

    monkeypatch.setitem(VARIANTS, "absent", Variant("absent", "", broken, package="no_such_peer"))
    monkeypatch.setitem(VARIANTS, "broken", Variant("broken", "", broken, package="json"))
    said, options = (
        [],
        Options(("small",), (1,), ("absent", "broken"), 1, True, parts=("times", "counts")),
    )
    found = measure(options, say=said.append)
    assert found.left_out == {
        "absent": "no_such_peer is not installed: pip install no_such_peer",
        "broken": "OSError: libpeer.so",
    }
    assert [c.variant for c in found.counts] == list(REFERENCES) and [
        list(launch.step) for launch in found.launches
    ] == [list(REFERENCES)]
    assert len(said) == 4 and found.makings is None
    saves = replace(options, parts=("checkpoints",), models=())
    assert measure(saves).left_out == {}  # it compares no variants, so it leaves none out
    monkeypatch.setitem(VARIANTS, "broken", Variant("broken", "", broken))
    with pytest.raises(OSError, match=r"libpeer\.so"):
        measure(options)


def test_makings():
    found = run(1, make_rank, 20, 64, 2)[0]
    assert (found.parameters, found.world_size) == (20, 64)
    assert all(len(getattr(found, f.name)) == 2 for f in fields(found)[2:])


def test_state_bytes_of_any_state():
    p = nn.Parameter(torch.zeros(10))
    state = {
        p: {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(10),
            "half": torch.zeros(3, dtype=torch.bfloat16),
            "lr": 0.1,
            "none": None,
        }
    }
    assert state_bytes(state.values()) == 4 + 40 + 6 and state_bytes([]) == 0


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--variants", "zero1", "torhc"], "there is no variant 'torhc', did you mean 'torch'?"),
        (["--model", "linera"], "did you mean 'linear'?"),
        (["--model", "resnet50"], "there is no model 'resnet50'; known: linear, gpt, small"),
        (["--parts", "time"], "did you mean 'times'?"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--rounds", "many"], "invalid int value: 'many'"),
        (["--ranks", "2", "-1"], "--ranks must be at least 1, got -1"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--out", __file__], "--out must be a folder"),
        (["--round", "3"], "unrecognized arguments"),
        (["--variants"], "expected at least one argument"),
    ],
)
def test_command_refuses(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        bench.run_benchmark(argv)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and words in err and out == "" and len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_command_needs_gpus_for_cuda(capsys):
    with pytest.raises(SystemExit):
        bench.run_benchmark(["--device", "cuda"])
    assert (
        "--device cuda needs a GPU for each of 4 ranks, and torch sees 0" in capsys.readouterr().err
    )


def test_command_runs_under_torchrun(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "zero_nb.apps.bench",
    ]
    flags = [
        "--quick",
        "--model",
        "small",
        "--variants",
        "zero1",
        "--parts",
        "counts",
        "times",
        "--rounds",
        "2",
        "--out",
        tmp_path / "out",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=100, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.count("the optimizers") == 1
    found = BenchmarkReport.from_json((tmp_path / "out" / "report.json").read_text())
    assert [(c.variant, c.world_size) for c in found.counts] == [
        (name, 2) for name in (*REFERENCES, "zero1")
    ]
    assert (
        found.counts[0].wire == 4 * sum(benchmark_models(True)["small"].sizes)
        and len(found.launches[0].step["zero1"]) == 2
    )


def test_the_stored_report_is_of_the_full_models_and_exact():
    path = Path(__file__).parents[1] / "nbs" / "benchmark" / "report.json"
    found = BenchmarkReport.from_json(path.read_text())
    assert not found.quick and not strays(found) and path.stat().st_size < 200_000
    assert json.loads(found.to_json()) == json.loads(path.read_text())
    for model in benchmark_models().values():
        for n in (1, 2, 4):
            full, ours, torchs = (
                found.count(model.name, n, name) for name in ("ddp", "zero1", "torch")
            )
            assert full.wire == Fraction(
                2 * (n - 1) * 4 * sum(model.sizes), n
            ) and full.state == 8 * sum(model.sizes) + 4 * len(model.sizes)
            assert ours.state <= full.state / n * 1.001 + 65_536 and torchs.wire == 1.5 * full.wire
            assert found.ratio("step", model.name, n, "zero1", "torch")
