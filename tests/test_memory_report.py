"""What ranks hold against what the plans say, in every mode, and what is in nobody's plan."""

import gc
import math
import os
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from common import caught_error, run_each
from common.modes import MODES
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon

from zero_nb import ZeroRedundancyOptimizer, estimate, memory_report, run
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.verify.memory import _LESS, UNEXPLAINED

KINDS = {
    "AdamW": (AdamW, {"lr": 1e-3}),
    "amsgrad": (AdamW, {"amsgrad": True}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "no state": (SGD, {"lr": 0.1}),
    "Adagrad": (Adagrad, {}),
    "Adafactor": (Adafactor, {}),
    "Muon and AdamW": (AdamW, {}),
    "views": (AdamW, {"parameters_as_bucket_view": True}),
    "master": (AdamW, {"master_dtype": torch.float32}),
}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = (nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 500), nn.LayerNorm(500))
    return nn.Sequential(*layers, nn.Linear(500, 7)).to(dtype)


def optimizer_of(model, name):
    kind, options = KINDS[name]
    params = list(model.parameters())
    if name == "Muon and AdamW":
        matrices = [p for p in params if p.dim() == 2]
        params = [
            {"params": matrices, "optimizer_class": Muon},
            {"params": [p for p in params if p.dim() != 2]},
        ]
    return ZeroRedundancyOptimizer(params, kind, **options)


def report_of(mode, name, steps=2):
    dtype = torch.bfloat16 if name == "master" else torch.float32
    model = network(dtype)
    attached = MODES[mode].attach(
        model, lambda m: optimizer_of(model, name), ddp={"gradient_as_bucket_view": True}
    )
    for _ in range(steps):
        attached.optimizer.zero_grad()
        attached.call(torch.ones(2, 12, dtype=dtype)).square().mean().backward()
        attached.optimizer.step()
    return memory_report(attached.call, attached.optimizer)


@pytest.mark.turns(3)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_is_what_the_plan_says_to_the_byte(size):
    cases = {
        (mode, name): (mode, name)
        for mode in MODES
        for name in KINDS
        if not (name == "views" and mode != "zero1")
    }
    for case, reports in run_each(size, report_of, cases, timeout=200).items():
        report = reports[0]
        assert all(other == report for other in reports), case
        assert report.unexplained == (), (case, report)
        assert len(report.rows) == 7 * size
        for rank in range(size):
            for category in ("state", "master", "parameters"):
                row = report.row(rank, category)
                padded = case[1] == "views" and category == "parameters"
                assert row.held == row.planned or (padded and row.reason), (case, row)
            gradients = report.row(rank, "gradients")
            assert gradients.held <= gradients.planned, (case, gradients)
        if case[1] == "master":
            assert sum(report.row(rank, "master").held for rank in range(size)) == 4 * sum(
                p.numel() for p in network().parameters()
            )


@pytest.mark.parametrize("size", [2, 3])
def test_the_plan_is_the_estimate_of_the_planner(size):
    report = run(size, report_of, "zero1", "AdamW")[0]
    for rank in range(size):
        said = estimate(network(), AdamW, size, "zero1", group_rank=rank)
        for category in ("parameters", "gradients", "state", "master", "buckets"):
            assert report.row(rank, category).planned == getattr(said, category), category
        assert report.row(rank, "gradients").held == said.gradients


def test_before_the_first_step_and_after_zero_grad():
    def at(steps):
        model = network()
        zero = optimizer_of(model, "AdamW")
        if steps:
            model(torch.ones(2, 12)).sum().backward()
            zero.step()
            zero.zero_grad()
        return memory_report(model, zero)

    before = run(2, at, 0)[0]
    assert {before.row(0, c).reason for c in ("state", "gradients")} == {"there was no step yet"}
    after = run(2, at, 1)[0]
    assert after.row(1, "gradients").held == 0
    assert "zero_grad" in after.row(1, "gradients").reason
    assert after.row(1, "state").reason == ""


def test_memory_that_is_in_no_plan_is_not_explained_away():
    def leaks(where):
        model = network()
        zero = optimizer_of(model, "AdamW")
        model(torch.ones(2, 12)).sum().backward()
        zero.step()
        if dist.get_rank() == 1:
            state = next(iter(zero.optim.state.values()))
            if where == "state":
                state["history"] = torch.zeros(100)
            if where == "gradients":
                model[0].weight.grad = torch.zeros(5000)[: 12 * 33].view(33, 12)
            if where == "buckets":
                zero.shards[0].forgotten = torch.zeros(10_000_000)
            if where == "a view":
                state["exp_avg"] = torch.zeros(200_000)[: state["exp_avg"].numel()]
        return memory_report(model, zero)

    cases = {where: (where,) for where in ("state", "gradients", "buckets", "a view")}
    for where, reports in run_each(2, leaks, cases).items():
        category = "state" if where == "a view" else where
        found = [(row.rank, row.category, row.reason) for row in reports[0].unexplained]
        assert found == [(1, category, UNEXPLAINED)], (where, reports[0])


def test_a_shared_storage_is_counted_once():
    def tied():
        model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
        model[1].weight = model[0].weight
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
        model(torch.ones(1, 50)).sum().backward()
        zero.step()
        return memory_report(model, zero)

    for rank, report in enumerate(run(2, tied)):
        assert report.row(rank, "parameters").held == 4 * 2500
        assert report.unexplained == ()


@pytest.mark.parametrize("mode", MODES)
def test_buffers_of_the_model_are_a_category_of_their_own(mode):
    def normalized():
        model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 7))
        attached = MODES[mode].attach(model, lambda m: optimizer_of(m, "AdamW"))
        for _ in range(2):
            attached.call(torch.ones(3, 12)).square().mean().backward()
            attached.optimizer.step()
        model.register_buffer("part", model[1].running_mean[:10])
        shared = memory_report(attached.call, attached.optimizer)
        model.part = torch.zeros(1000)[:10]
        return shared, memory_report(attached.call, attached.optimizer)

    for shared, view in run(2, normalized):
        assert shared.unexplained == view.unexplained == ()
        for rank in range(2):
            row = shared.row(rank, "buffers")
            assert (row.held, row.planned) == (4 * 40 + 8, 4 * 50 + 8)
            assert "share memory" in row.reason
            row = view.row(rank, "buffers")
            assert (row.held, row.planned) == (4 * 1040 + 8, 4 * 50 + 8)
            assert "views" in row.reason


def test_frozen_parameters_have_no_gradient_and_no_state():
    def frozen():
        model = network()
        model[2].requires_grad_(False)
        zero = optimizer_of(model, "AdamW")
        model(torch.ones(2, 12)).sum().backward()
        zero.step()
        return memory_report(model, zero)

    report = run(2, frozen)[0]
    assert report.unexplained == ()
    for rank in range(2):
        assert [report.row(rank, c).reason for c in ("parameters", "gradients", "state")] == [
            ""
        ] * 3


def test_a_plain_optimizer_and_a_class_that_nobody_knows():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["odd"] = torch.zeros(13)

    def plain(kind):
        model = network()
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
        return memory_report(model, optimizer)

    report = run(2, plain, AdamW)[0]
    assert report.method == "ddp" and report.unexplained == ()
    assert [report.row(rank, "state").reason for rank in range(2)] == ["", ""]
    odd = run(2, plain, Odd)[0].row(0, "state")
    assert odd.planned is None and odd.held == 8 * 13 * 4
    assert odd.reason == "the planner does not know what this class keeps"


def test_memory_of_messages_is_told_apart(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")

    def messages():
        assert os.environ["ZERO_NB_MEMORY"] == "0"
        return report_of("zero2", "AdamW")

    report = run(2, messages)[0]
    assert report.unexplained == ()
    held = report.row(0, "messages")
    assert (held.held > 0) == ("receive messages" in held.reason)


def test_a_report_is_a_table():
    report = run(2, report_of, "zero1", "AdamW")[0]
    text = report._repr_markdown_().splitlines()
    assert text[0] == "| rank | category | held | plan | why |" and text[1].count("|") == 6
    assert all(line.count("|") == 6 for line in text)
    assert "memory by rank, zero1" in str(report)


def test_what_is_no_model_is_refused_on_all_ranks():
    def wrong():
        model = network()
        zero = optimizer_of(model, "AdamW")
        given = model.parameters() if dist.get_rank() else model
        other = nn.Linear(2, 2) if dist.get_rank() else model
        return [caught_error(lambda: memory_report(model, zero)) for model in (given, other)]

    for (kind, text), (other_kind, other_text) in run(2, wrong):
        assert kind == "TypeError" and "memory_report takes a module and an optimizer" in text
        assert other_kind == "ValueError" and "are none of the Linear's" in other_text


def of_reducer(mode, view, steps):
    """Report after some steps, with gradients and without them."""
    model = network()
    attached = MODES[mode].attach(
        model, lambda m: optimizer_of(m, "AdamW"), ddp={"gradient_as_bucket_view": view}
    )
    for _ in range(steps):
        attached.call(torch.ones(2, 12)).square().mean().backward()
        attached.optimizer.step()
    reports = [memory_report(attached.call, attached.optimizer)]
    attached.optimizer.zero_grad()
    return [*reports, memory_report(attached.call, attached.optimizer)]


@pytest.mark.parametrize("view", (True, False), ids=("view", "no view"))
@pytest.mark.parametrize("mode", ("zero1", "zero1-overlap"))
def test_buckets_of_ddps_reducer_are_counted_once(mode, view):
    size = sum(p.nbytes for p in network().parameters())
    cases = {steps: (mode, view, steps) for steps in range(4)}
    for steps, reports in run_each(2, of_reducer, cases).items():
        full, empty = reports[0]
        for rank in range(2):
            for report in (full, empty):
                assert report.unexplained == (), (steps, report)
                rows = [report.row(rank, c) for c in ("gradients", "buckets")]
                assert rows[1 - view].held >= size, (steps, report)
            if view:
                assert full.row(rank, "gradients").held == empty.row(rank, "gradients").held == size


def live_tensors():
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]


def storages_of(tensors):
    """Find the memory behind tensors and their gradients: bytes by address."""
    found = {}
    for tensor in tensors:
        for one in (tensor, tensor.grad) if tensor.is_leaf else (tensor,):
            with suppress(RuntimeError):  # of a tensor that stands for another
                if one is not None and (address := one.untyped_storage().data_ptr()):
                    found[address] = one.untyped_storage().nbytes()
    return found


def beside_the_garbage_collector(mode, view, foreign):
    """Count what a training has made, by the report and by what lives in the process."""
    kept = live_tensors()  # a new tensor might take the address of one that goes
    before = storages_of(kept)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 200), nn.BatchNorm1d(200), nn.Linear(200, 300))
    ddp = {"gradient_as_bucket_view": view}
    attached = MODES[mode].attach(model, lambda _: optimizer_of(model, "AdamW"), ddp=ddp)
    counted = []
    for step in range(4):
        attached.call(torch.randn(8, 60)).square().mean().backward()
        attached.optimizer.step()
        if step % 3 == 0:
            if foreign:
                for p in model[2].parameters():
                    p.grad = torch.zeros_like(p)
            report = memory_report(attached.call, attached.optimizer)
            mine = [row.held for row in report.rows if row.rank == dist.get_rank()]
            seen = []
            for _ in range(3):  # a thread of gloo may hold for a moment what a report has received
                now = storages_of(live_tensors()).items() - before.items()
                seen.append(sum(size for _, size in now))
                time.sleep(0.1)
            counted.append((sum(mine), min(seen)))
        attached.optimizer.zero_grad()
    return counted, sum(p.nbytes for p in model.parameters())


VIEWS = {"zero1": (True, False), "zero1-overlap": (True, False)}


@pytest.mark.parametrize("mode", ["zero1", "zero1-overlap", "zero2", "zero2-interleaved"])
def test_the_report_counts_every_byte_that_the_garbage_collector_finds(mode):
    for view in VIEWS.get(mode, (False,)):
        for counted, size in run(2, beside_the_garbage_collector, mode, view, False):
            unseen = size if (mode, view) == ("zero1", False) else 0  # DDP's buckets, in C++ alone
            assert [held - seen for held, seen in counted] == [unseen] * 2, (view, counted)


def test_gradients_of_the_users_hide_no_bucket():
    for counted, _ in run(2, beside_the_garbage_collector, "zero1", True, True):
        assert [held - seen for held, seen in counted] == [0, 0], counted


def copies_of(folder):
    """Give what a report says of copies before, during and after saves, and what a rank has written."""
    model = network()
    optimizer = optimizer_of(model, "AdamW")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with AsyncCheckpointer(model, optimizer) as checkpoints:
        reports = [memory_report(model, optimizer, checkpoints)]
        saving = checkpoints.save(folder / "first", step=1)
        reports.append(memory_report(model, optimizer, checkpoints))
        saving.wait()
        reports.append(memory_report(model, optimizer, checkpoints))
    reports.append(memory_report(model, optimizer, checkpoints))
    rows = [report.row(dist.get_rank(), "copies") for report in reports]
    without = memory_report(model, optimizer).rows
    same = [row for row in reports[1].rows if row.category != "copies"]
    return rows, without == tuple(same), reports[1].unexplained, "copies" in str(reports[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_copies_of_a_checkpointer_are_counted_while_it_has_them(folder, ranks):
    found = run(ranks, copies_of, folder)
    table = FileSystemReader(folder / "first").read_metadata()
    sizes = {}
    for index, info in table.storage_data.items():
        form = table.state_dict_metadata[index.fqn]
        if hasattr(form, "size"):
            [chunk] = [c for c in form.chunks if c.offsets == (index.offset or c.offsets)]
            nbytes = math.prod(chunk.sizes) * form.properties.dtype.itemsize
            rank = int(info.relative_path.split("_")[2])
            sizes[rank] = sizes.get(rank, 0) + -(-nbytes // 64) * 64  # each begins at a multiple
    assert {*sizes} == {*range(ranks)}
    for rank, (rows, same, unexplained, shown) in enumerate(found):
        assert [row.held for row in rows] == [0, sizes[rank], sizes[rank], 0]
        assert [bool(row.reason) for row in rows] == [False, True, True, False]
        assert same and not unexplained and shown


def test_what_is_no_checkpointer_is_refused():
    model = network()
    error = caught_error(lambda: memory_report(model, AdamW(model.parameters()), "checkpoints"))
    assert error == ("TypeError", "checkpointer must be an AsyncCheckpointer, got 'checkpoints'")


class Factored(torch.optim.Optimizer):
    """Keeps a number for each row and each column of matrices, and steps empty ones."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                found = (p.grad.sum(-1), p.grad.sum(-2)) if p.dim() > 1 else (p.grad.clone(),)
                self.state[p] = {f"sum over {i}": total for i, total in enumerate(found)}
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


EMPTY = ((0, 4), (4, 0), (0, 0), (2, 0, 3))


def with_empty_matrices(kind, sharded):
    model = nn.Linear(12, 3)
    for i, shape in enumerate(EMPTY):
        model.register_parameter(f"empty{i}", nn.Parameter(torch.zeros(shape)))
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(params, kind) if sharded else kind(params)
    before = memory_report(model, optimizer)
    model(torch.ones(2, 12)).sum().backward()
    if kind is Factored:  # torch's class divides by the number of elements
        for p in (p for p in params if not p.numel()):
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return before, memory_report(model, optimizer)


@pytest.mark.parametrize("sharded", [False, True])
def test_matrices_without_elements_have_rows_or_columns(sharded):
    for before, after in run(2, with_empty_matrices, Factored, sharded):
        assert before.row(0, "state").planned == after.row(0, "state").planned
        assert [after.row(rank, "state").reason for rank in range(2)] == ["", ""]
        held = sum(after.row(rank, "state").held for rank in range(2))
        everywhere = 4 * (4 + 4 + 0 + 2 * 3)
        trained = 4 * (12 + 3 + 3)
        assert held == 2 * everywhere + (trained if sharded else 2 * trained)
    for _, after in run(2, with_empty_matrices, Adafactor, sharded):
        reason = after.row(1, "state").reason
        assert after.unexplained == () and reason == _LESS["state"]
