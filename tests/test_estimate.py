"""The planner: against torch's optimizers, against real modules, and its errors."""

import argparse
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.subgroups import TwoLevel, two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.balancing import balanced
from zero_nb.plan.charts import explore
from zero_nb.plan.comparison import compare
from zero_nb.plan.estimated import PLANNED, Estimate, amount, duration
from zero_nb.plan.estimates import estimate
from zero_nb.plan.fitting import fewest_ranks, fits, parse_memory
from zero_nb.plan.machines import MACHINES, Machine
from zero_nb.plan.models import MODELS, find_model, read_shapes, specs_of
from zero_nb.plan.plan_command import add_plan_arguments, print_plan
from zero_nb.plan.specs import ParamSpec
from zero_nb.plan.states import OPTIMIZERS, State, state_rule

quick = settings(max_examples=30, deadline=None)
specs_lists = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=10
).map(
    lambda rows: tuple(
        ParamSpec(f"p{i}", (a, b), "float32", "cpu", 0, trainable)
        for i, (a, b, trainable) in enumerate(rows)
    )
)
tiny = (
    ParamSpec("weight", (64, 32)),
    ParamSpec("bias", (64,)),
    ParamSpec("frozen", (100,), trainable=False),
)
NARROW = (
    ("bfloat16", "float16"),
    ("float16", "bfloat16"),
    ("float32", "bfloat16"),
    ("float64", "float32"),
)


@pytest.mark.parametrize(
    ("name", "cls", "options"),
    [
        ("sgd", "SGD", {}),
        ("sgd-momentum", "SGD", {"momentum": 0.9}),
        ("adam", "Adam", {}),
        ("adamw", "AdamW", {}),
        ("adamw-amsgrad", "AdamW", {"amsgrad": True}),
        ("adamax", "Adamax", {}),
        ("nadam", "NAdam", {}),
        ("radam", "RAdam", {}),
        ("adagrad", "Adagrad", {}),
        ("adadelta", "Adadelta", {}),
        ("rmsprop", "RMSprop", {}),
        ("rprop", "Rprop", {}),
        ("asgd", "ASGD", {}),
        ("adafactor", "Adafactor", {}),
        ("muon", "Muon", {}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_optimizers_is_what_torch_does(name, cls, options):
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, cls):
        pytest.skip(f"this torch has no {cls}")
    spec = ParamSpec("h.0.weight", (12, 8))
    p = torch.nn.Parameter(torch.ones(12, 8))
    p.grad = torch.ones_like(p)
    optimizer = getattr(torch.optim, cls)([p], lr=1e-3, **options)
    optimizer.step()
    kept = sum(t.nbytes for t in optimizer.state[p].values() if torch.is_tensor(t))
    rule = OPTIMIZERS[name]
    assert rule.numbers(spec, spec.numel) * 4 + 4 * rule.scalars == kept
    assert state_rule(name)(spec) == state_rule(getattr(torch.optim, cls), options)(spec)
    assert estimate([spec], name, 1, "ddp").state == kept


def test_every_optimizer_of_the_table_is_tested():
    marks = test_the_table_of_optimizers_is_what_torch_does.pytestmark
    assert {row[0] for mark in marks if mark.name == "parametrize" for row in mark.args[1]} == set(
        OPTIMIZERS
    )


def test_published_models_have_the_published_numbers_of_parameters():
    totals = {
        name: sum(math.prod(shape) for shape in make().values()) for name, make in MODELS.items()
    }
    assert (
        totals["gpt2-xl"] == 1_557_611_200
        and totals["llama-3-70b"] == 70_553_706_496
        and totals["mixtral-8x7b"] == 46_702_792_704
    )


def test_a_module_is_described_without_memory_and_tied_parameters_once():
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        head = torch.nn.Linear(64, 100_000_000, bias=False, dtype=torch.bfloat16)
        model = torch.nn.Sequential(
            torch.nn.Embedding(100_000_000, 64), head, torch.nn.LayerNorm(64)
        )
        tied = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    model[2].requires_grad_(False)
    found = specs_of(model)
    assert [(p.name, p.dtype, p.trainable) for p in found] == [
        ("0.weight", "float32", True),
        ("1.weight", "bfloat16", True),
        ("2.weight", "float32", False),
        ("2.bias", "float32", False),
    ]
    assert [p.name for p in specs_of(tied)] == ["0.weight", "0.bias", "1.bias"]
    assert estimate(model, "adamw", 8).parameters == 100_000_000 * 64 * 6 + 128 * 4


@quick
@given(
    specs_lists,
    st.integers(1, 9),
    st.sampled_from(["adamw", "sgd", "nadam", "adafactor", "muon"]),
    st.sampled_from(list(PLANNED)),
)
def test_state_is_the_same_in_sum_whatever_the_stage(specs, world_size, optimizer, method):
    rule, ranks = state_rule(optimizer), range(1 if method == "ddp" else world_size)
    found = [estimate(specs, optimizer, world_size, method, group_rank=r) for r in ranks]
    scalars = sum(4 * rule(p).scalars for p in specs if p.trainable and p.numel)
    numbers = sum(4 * rule(p).numbers(p, p.numel) for p in specs if p.trainable and p.numel)
    if method in ("ddp", "torch") or (world_size, method) == (1, "zero1"):
        assert sum(e.state for e in found) == numbers + scalars
    else:  # what is cut has scalars on each side; neighbours in a bucket share theirs
        most = max((4 * rule(p).scalars for p in specs if p.trainable and p.numel), default=0)
        alone = sum(4 * rule(p).scalars for p in specs if p.trainable and p.numel and rule(p).whole)
        shared = most if scalars > alone else 0
        assert (
            numbers + alone + shared
            <= sum(e.state for e in found)
            <= numbers + scalars * (1 + world_size)
        )
    assert {e.parameters for e in found} == {sum(p.nbytes for p in specs)}
    assert all(
        e.padding >= 0 and e.wire >= 0 and e.imbalance >= 1 and e.seconds >= 0 for e in found
    )
    assert all(
        e.total == e.parameters + e.gradients + e.state + e.master + e.buckets for e in found
    )


@pytest.mark.parametrize("method", ["zero1", "zero2", "zero1-overlap", "torch"])
@pytest.mark.parametrize(
    "optimizer, policy",
    [
        ("adamw", "greedy"),
        ("adamw", "even"),
        ("sgd", "greedy"),
        ("muon", "greedy"),
        ("muon", "mixed"),
    ],
)
def test_the_fullest_rank_is_the_one_that_needs_most(optimizer, policy, method):
    """Of whole parameters the first rank's buckets are cut by a rule, as those that all ranks share."""
    for ranks in (2, 3, 4, 7):
        each = [
            estimate("gpt2", optimizer, ranks, method, policy=policy, group_rank=r).total
            for r in range(ranks)
        ]
        found = estimate("gpt2", optimizer, ranks, method, policy=policy)
        assert found.total == max(each) == each[found.group_rank]


def test_specs_that_can_be_read_once_will_do():
    specs = [ParamSpec(f"p{i}", (64, 64) if i % 3 else (1000,)) for i in range(300)]
    assert estimate((spec for spec in specs), "muon", 3) == estimate(specs, "muon", 3)


@quick
@given(specs_lists, st.integers(2, 9))
def test_traffic_of_all_ranks(specs, world_size):
    full = sum(p.nbytes for p in specs if p.trainable)
    wire = {
        method: sum(
            estimate(specs, "adamw", world_size, method, group_rank=r).wire
            for r in range(world_size)
        )
        for method in PLANNED
    }
    assert wire["ddp"] == world_size * (2 * (world_size - 1) * full // world_size)
    assert wire["torch"] - wire["ddp"] == (world_size - 1) * full
    for method in ("zero1-overlap", "zero2", "zero2-interleaved"):
        padding = estimate(specs, "adamw", world_size, method).padding
        assert wire[method] == 2 * (world_size - 1) * (full + padding)


@quick
@given(specs_lists, st.sampled_from(list(PLANNED)), st.integers(1, 60_000))
def test_fewest_ranks_is_the_first_that_fits(specs, method, memory):
    found = fewest_ranks(specs, "adamw", memory, method, most=32)
    fit = [n for n in range(1, 33) if fits(estimate(specs, "adamw", n, method), memory)]
    if found is None:
        assert 32 not in fit
    else:
        assert found in fit and found - 1 not in fit and (not fit or found <= 2 * fit[0])


def test_master_copies_are_kept_by_owners():
    specs = [ParamSpec("w", (1000,), "bfloat16"), ParamSpec("b", (8,), "float32")]
    e = estimate(specs, "adamw", 4, master_dtype="float32")
    assert (
        e.master == 256 * 4 and e.state == (256 + 8) * 8 + 2 * 4
    )  # the largest share: parts are multiples of 16, so one rank has all 8 of "b"
    assert estimate(specs, "adamw", 4, "ddp", master_dtype="float32").master == 4000


def test_machines_bound_collectives_from_below():
    machine = Machine("m", 4, 1e9, 1e9, 1e6, 1e-3, 1e5, 1e-2)
    assert machine.seconds("AG", 1e6, 1) == 0
    assert machine.seconds("AG", 1e6, 4) == pytest.approx(0.75 + 2e-3)
    assert machine.seconds("AR", 1e6, 8) == pytest.approx(2 * (0.5 * 10 + 2e-3 + 1e-2))
    for m in MACHINES.values():
        times = [m.seconds("AG", 25e6, 2**k) for k in range(10)]
        assert times == sorted(times) and m.seconds("RS", 25e6, 8) + m.seconds(
            "AG", 25e6, 8
        ) == pytest.approx(m.seconds("AR", 25e6, 8))


def test_computation_hides_communication():
    busy = estimate("gpt2", "adamw", 8, "zero1-overlap", compute=1.0)
    idle = estimate("gpt2", "adamw", 8, "zero1-overlap")
    assert max(1.0, idle.seconds) < busy.seconds < 1.0 + idle.seconds
    assert (
        estimate("gpt2", "adamw", 8, "zero1-overlap", compute=1.0, hidden=True).seconds
        < busy.seconds
    )


def test_hybrid_groups_shard_like_the_small_group_and_reduce_across():
    flat, hybrid, small = (
        estimate("gpt2", "adamw", n, "zero1-overlap", replicas=r)
        for n, r in ((64, 1), (64, 8), (8, 1))
    )
    assert (
        hybrid.state == small.state > flat.state
        and hybrid.wire > small.wire
        and hybrid.world_size == 64
    )


def sent_behind_ddp() -> tuple[int, int]:
    """Count the bytes and the collectives of a step after DDP's backward, on nodes of two ranks."""
    levels = [record(level.process_group) for level in two_level(2)]
    world = record()
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(module, process_group=world)
    zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, TwoLevel(*map(Group, levels)))
    for _ in range(3):
        for group in (world, *levels):
            group.log.clear()
        ddp(torch.ones(2, 64)).sum().backward()
        zero.step()
    logs = [group.log for group in (world, *levels)]
    return int(sum(log.wire for log in logs)), sum(sum(log.count().values()) for log in logs)


def test_two_levels_behind_ddp_send_what_is_planned():
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    said = estimate(module, "adamw", 4, "zero1", replicas=2)
    assert run(4, sent_behind_ddp) == [(said.wire, said.collectives)] * 4


def test_the_planner_is_quick_and_wide():
    for ranks in (1, 1024, 16_384):
        assert (
            estimate(
                "llama-3-70b", "adamw", ranks, "zero2-interleaved", dtype="bfloat16"
            ).world_size
            == ranks
        )


def test_tables_name_every_stage():
    found = compare(tiny, "adamw", 4)
    text, html = repr(found), found._repr_html_()
    assert (
        all(method in text and f"<td>{method}</td>" in html for method in PLANNED)
        and found["zero2-interleaved"].method == "zero2-interleaved"
    )
    assert len({len(line) for line in text.splitlines()}) == 1
    assert (
        repr(Estimate("m", "ddp", "adamw", 1, 0)).startswith("method")
        and "<table>" in Estimate("m", "ddp", "adamw", 1, 0)._repr_html_()
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24 gib", 24 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("100", 100),
        (100, 100),
        ("1e", None),
        ("0GB", None),
        ("-1GB", None),
        ("GB", None),
        ("1.2.3GB", None),
        ("24 gigs", None),
        ("", None),
        (".", None),
    ],
)
def test_memory_is_read(text, size):
    if size is not None:
        assert parse_memory(text) == size
    else:
        with pytest.raises(ValueError, match="memory must be above 0"):
            parse_memory(text)


def test_numbers_are_written():
    assert [amount(n) for n in (0, 1023, 1024, 2**20 - 1, 1_557_611_200, 20 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1024 KiB",
        "1.45 GiB",
        "20 TiB",
    ]
    assert [duration(s) for s in (2.5, 0.0345, 1e-5)] == ["2.5 s", "34.5 ms", "10 us"]


def plan(capsys, *argv):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    print_plan(parser.parse_args(list(argv)))
    return capsys.readouterr().out


def test_the_command_prints_a_table_and_what_fits(capsys):
    said = plan(capsys, "gpt2-xl", "--world-size", "8", "--optimizer", "adamw", "--memory", "16GB")
    assert (
        "1,557,611,200 parameters" in said
        and "ddp               does not fit in 16GB" in said
        and "zero1             fits in 16GB; fewest ranks that do: 4" in said
    )


def test_the_command_takes_the_dtype_in_which_gradients_are_added(capsys):
    sent = [
        plan(capsys, "gpt2", "--dtype", "bfloat16", "--method", "zero1-overlap", *more)
        for more in ((), ("--reduce-dtype", "float32"))
    ]
    assert (
        "415 MiB" in sent[0] and "623 MiB" in sent[1] and "623 MiB" not in sent[0]
    )  # 7/8 of 124 million elements, 2 + 2 and 4 + 2 bytes


def test_the_command_takes_the_capacity_of_ddps_buckets(capsys):
    said = [
        plan(capsys, "gpt2", "--method", "zero1-overlap", *more)
        for more in ((), ("--ddp-bucket-cap-mb", "1000"), ("--bucket-cap-mb", "1000"))
    ]
    assert said[0] == said[2] != said[1]


def test_the_command_returns_what_it_printed(capsys):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    found = print_plan(
        parser.parse_args(["gpt2", "--method", "zero2-interleaved", "--world-size", "4"])
    )
    assert [(e.model, e.method, e.world_size) for e in found.estimates] == [
        ("gpt2", "zero2-interleaved", 4)
    ] and repr(found) in capsys.readouterr().out


def test_the_command_takes_shapes_and_functions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(
        json.dumps({"w": [10, 4], "b": {"shape": [4], "dtype": "bfloat16", "trainable": False}})
    )
    (tmp_path / "my_models.py").write_text(
        "from zero_nb.plan.specs import ParamSpec\ndef make(): return [ParamSpec('w', (3, 5))]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "mine: 44 parameters" in plan(capsys, "--shapes", "mine.json")
    assert "15 parameters" in plan(capsys, "my_models:make")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "must hold"),
        ('{"w": 3}', "must hold"),
        ('{"w": {"size": [3]}}', "must hold"),
        ("{", "cannot be read as JSON"),
        ('{"w": [-1]}', "a shape holds integers >= 0"),
        (None, "cannot be read"),
    ],
)
def test_bad_shape_files_have_one_error(tmp_path, content, message):
    path = tmp_path / "shapes.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_shapes(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate("lama-3-8b"), "did you mean llama-3-8b"),
        (lambda: estimate("xyzzy"), "choose one of gpt2"),
        (lambda: estimate(tiny, "adamv"), "unknown optimizer 'adamv'; did you mean adam"),
        (lambda: estimate(tiny, method="zero3"), "unknown method 'zero3'"),
        (lambda: estimate(tiny, world_size=0), "world_size must be an integer >= 1"),
        (
            lambda: estimate(tiny, world_size=8, replicas=3),
            "replicas must divide world_size, got 3 and 8",
        ),
        (lambda: estimate(tiny, world_size=4, group_rank=4), "group_rank must lie in 0 to 3"),
        (lambda: estimate(tiny, machine="tablet"), "unknown machine 'tablet'"),
        (lambda: estimate(tiny, policy="evn"), "did you mean 'even'"),
        (lambda: estimate(tiny, bucket_cap_mb=-1), "bucket_cap_mb must be above 0"),
        (lambda: estimate(tiny, dtype="float3"), "unknown dtype 'float3'"),
        *[
            (
                lambda seconds=seconds: estimate(tiny, compute=seconds),
                "compute must be seconds >= 0",
            )
            for seconds in (-1.0, math.nan, math.inf, "1")
        ],
        *[
            (
                lambda n=n: fewest_ranks(tiny, replicas=n),
                f"replicas must be a whole number, at least 1, got {n!r}",
            )
            for n in (0, -1, 2.0)
        ],
        (lambda: estimate(tiny, master_dtype="fp32"), "unknown master_dtype 'fp32'"),
        (lambda: estimate(tiny, master_dtype="int32"), "unknown master_dtype 'int32'"),
        *[
            (
                lambda call=call, dtype=dtype, narrow=narrow: call(
                    tiny, dtype=dtype, master_dtype=narrow
                ),
                f"{narrow} does not take {dtype}, the dtype of",
            )
            for call in (estimate, compare, fewest_ranks)
            for dtype, narrow in NARROW
        ],
        (
            lambda: estimate(tiny, reduce_dtype="int32"),
            "unknown reduce_dtype 'int32'; did you mean float32",
        ),
        (
            lambda: Machine("m", 0, 1, 1, 1, 1, 1, 1),
            "machine 'm': per_node must be ranks >= 1, got 0",
        ),
        (
            lambda: Machine("m", 8, 1, 1, 0, 1, 1, 1),
            "machine 'm': bandwidth must be above 0, got 0",
        ),
        (lambda: Machine("m", 8, 1, 1, 1, -1, 1, 1), "machine 'm': latency must be >= 0, got -1"),
        (
            lambda: Machine("m", 8, 1, 1, 1, 1, math.nan, 1),
            "machine 'm': node_bandwidth must be above 0, got nan",
        ),
        (lambda: find_model("no_such_module:f"), "No module named"),
        (lambda: find_model(":f"), "model ':f' must name a function of a module"),
        (lambda: find_model("json:"), "model 'json:' must name a function of a module"),
        (
            lambda: find_model("json:loads"),
            "model 'json:loads' must be made by a call without arguments, which raised TypeError",
        ),
        (lambda: find_model("json:no_such_function"), "has no attribute"),
        (
            lambda: print_plan(argparse.Namespace(model=None, shapes=None)),
            "name one model, or --shapes FILE",
        ),
        (
            lambda: print_plan(argparse.Namespace(model="gpt2", shapes="x.json")),
            "name one model, or --shapes FILE",
        ),
    ],
)
def test_bad_input_has_one_clear_error(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "undefined_name.py").write_text("wide = width")
    monkeypatch.syspath_prepend(tmp_path)
    words = "model 'undefined_name:wide' must name .* raised NameError: name 'width'"
    with pytest.raises(ValueError, match=words):
        find_model("undefined_name:wide")


@pytest.mark.parametrize(("dtype", "narrow"), NARROW)
def test_the_planner_refuses_the_master_copies_that_the_optimizer_refuses(dtype, narrow):
    weight = nn.Parameter(torch.zeros(4, 2, dtype=getattr(torch, dtype)))
    with pytest.raises(ValueError, match="master_dtype must hold every value"):
        ZeroRedundancyOptimizer([weight], AdamW, master_dtype=getattr(torch, narrow))
    assert explore("gpt2", dtype="float64")  # which has no use for copies in float32


@pytest.mark.parametrize("model", [[1, 2], 3, [("w", (3, 4))]])
def test_what_is_no_model_has_one_clear_error(model):
    with pytest.raises(TypeError, match="a model is a module, or `ParamSpec`s, or one of gpt2"):
        estimate(model)


def test_an_own_state_and_policy():
    assert estimate(tiny, State(5), 1, "ddp").state == 5 * 4 * (64 * 32 + 64)
    whole = estimate(tiny, "adamw", 2, policy=balanced)
    assert whole.state == 8 * 64 * 32 + 4 and whole.imbalance > 1.9


@pytest.mark.parametrize("missing", ["torch", "torch.distributed"])
def test_the_planner_works_without(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
from zero_nb.plan.comparison import compare
from zero_nb.plan.fitting import fewest_ranks
from zero_nb.plan.models import specs_of
print(compare("gpt2", "muon", 4)["zero2-interleaved"].total, fewest_ranks("gpt2-xl", "adamw", "16GB"))
if {missing!r} != "torch":
    assert "torch" not in sys.modules
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()[1]
        == "4"
    )


@pytest.mark.parametrize("method", PLANNED)
@pytest.mark.parametrize(
    "reduce_dtype,sent,kept",
    [(None, 2, 2), ("bfloat16", 2, 2), ("float32", 4, 4), ("float16", 2, 4), ("float64", 8, 8)],
)
def test_gradients_that_are_added_in_another_dtype_cost_their_bytes(
    method, reduce_dtype, sent, kept
):
    """Two ranks, 1,024 elements, one bucket of two parameters."""
    specs = [ParamSpec("w", (924,), "bfloat16"), ParamSpec("b", (100,), "bfloat16")]
    found = estimate(specs, "adamw", 2, method, reduce_dtype=reduce_dtype)
    plain = estimate(specs, "adamw", 2, method)
    if method in ("ddp", "torch", "zero1"):
        assert found == plain
    else:
        cast = reduce_dtype not in (None, "bfloat16")
        assert plain.wire == 512 * 2 * 2 and found.wire == 512 * (sent + 2)
        kept_in_full = 2048 + 512 * kept * cast
        assert found.gradients == (kept_in_full if method == "zero1-overlap" else 512 * kept)
        adding = 1024 * sent * cast
        assert (
            found.buckets
            == {
                "zero1-overlap": max(plain.buckets, adding),
                "zero2": max(plain.buckets, 2048 + adding),
                "zero2-interleaved": plain.buckets + adding,
            }[method]
        )
        assert (found.seconds > plain.seconds) == (sent > 2)
    hybrid = [
        estimate(specs, "adamw", 4, method, replicas=2, reduce_dtype=kind).wire
        for kind in (None, reduce_dtype)
    ]
    assert hybrid[1] - hybrid[0] == (found.wire - plain.wire) + (
        0 if method in ("ddp", "torch", "zero1") else 512 * (sent - 2)
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("model", "optimizer", "ranks", "method"),
    [
        ("llama-3-8b", "muon", 8, "torch"),
        ("gpt2-xl", "muon", 15, "torch"),
        ("gpt2", "muon", 8, "zero1"),
        ("gpt2", "muon", 6, "zero2"),
        ("gpt2", "adamw", 7, "zero1"),
    ],
)
def test_the_rank_that_is_described_needs_most(model, optimizer, ranks, method, mixed):
    precision = {"dtype": "bfloat16", "master_dtype": "float32"} if mixed else {}
    every = [
        estimate(model, optimizer, ranks, method, group_rank=rank, **precision).total
        for rank in range(ranks)
    ]
    assert estimate(model, optimizer, ranks, method, **precision).total == max(every)


def test_a_step_after_backward_copies_gradients():
    small = [ParamSpec(f"p{i}", (100,)) for i in range(40)]  # in one bucket, stepped as one tensor
    gathers, part = 4 * 4000, 4 * 4000 // 2
    assert estimate(small, "adamw", 2, "zero1").buckets == part + max(gathers, part)
    assert estimate(small, "adamw", 1, "zero1").buckets == 0
    large = [ParamSpec("p", (4000,), "bfloat16")]  # in its own memory
    assert estimate(large, "adamw", 2, "zero1").buckets == 0
    copied = estimate(large, "adamw", 2, "zero1", master_dtype="float32")
    assert copied.buckets == 4 * 2000  # for the step, in float32
    assert (
        estimate(large, "adamw", 2, "zero2", master_dtype="float32").buckets < copied.buckets + 8000
    )


def test_fewer_ranks_than_a_search_by_halves_finds():
    how = {"dtype": "bfloat16", "master_dtype": "float32", "bucket_cap_mb": 6.0}
    method = "zero2-interleaved"
    needs = {n: estimate("gpt2", "muon", n, method, **how).total for n in (20, 21, 22)}
    assert needs[21] < min(needs[20], needs[22])
    assert fewest_ranks("gpt2", "muon", needs[21] + 1, method, **how) == 21
    with pytest.raises(ValueError, match="most must be at least replicas, 4, got 3"):
        fewest_ranks("gpt2", most=3, replicas=4)
