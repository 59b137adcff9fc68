"""Properties of plans, for random parameter lists and many ranks."""

import json
import math
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from common.counting import calls
from common.param_lists import damaged, param_lists
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero_nb.plan.balancing import (
    POLICIES,
    balanced,
    by_group,
    checked,
    find_policy,
    mixed,
    newton_schulz,
)
from zero_nb.plan.grids import Grid, GridPlan
from zero_nb.plan.policies import even, greedy
from zero_nb.plan.shards import ShardPlan, Span, spread
from zero_nb.plan.span_moves import Move, moves, moves_of
from zero_nb.plan.specs import ParamSpec

quick = settings(max_examples=60, deadline=None)


worlds = st.one_of(st.integers(1, 9), st.sampled_from([64, 1000, 4096]))
policies = st.sampled_from(
    [
        greedy,
        even,
        balanced,
        mixed,
        partial(even, align=16),
        partial(balanced, cost=newton_schulz),
        partial(mixed, choose=by_group(even, partial(balanced, cost=newton_schulz), greedy)),
    ]
)


def elements(plan: ShardPlan) -> dict:
    """Map every element of the smaller parameters to its owner."""
    return {
        (p.name, e): r
        for i, p in enumerate(plan.params)
        if p.numel <= 13_000
        for r, s in plan.owners(i)
        for e in range(s.start, s.stop)
    }


@quick
@given(param_lists(), worlds, policies)
def test_every_trainable_element_has_one_owner_and_nothing_else_has(specs, world_size, policy):
    plan = policy(specs, world_size)
    assert plan.params == specs and plan.world_size == world_size
    assert sum(plan.loads) == sum(p.numel for p in specs if p.trainable)
    seen = sorted((s.param, s.start, s.stop) for shard in plan.shards for s in shard)
    for i, p in enumerate(specs):
        mine = [(a, b) for j, a, b in seen if j == i]
        assert [a for a, _ in mine] + [p.numel] * bool(mine) == [0] * bool(mine) + [
            b for _, b in mine
        ]
        assert bool(mine) == bool(p.trainable and p.numel)
        assert [s for _, s in plan.owners(i)] == [Span(i, a, b) for a, b in mine]
        assert plan.by_param[i] == (plan.owners(i)[0][0] if len(mine) == 1 else plan.owners(i))


@quick
@given(param_lists(devices=st.text(min_size=1, max_size=5)), worlds, policies)
def test_plans_are_read_back_from_json(specs, world_size, policy):
    plan = policy(specs, world_size)
    for again in (
        ShardPlan.from_json(plan.to_json()),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert again == plan and hash(again) == hash(plan) and again.digest == plan.digest
        assert again.by_param == plan.by_param
    json.loads(plan.to_json())


@quick
@given(param_lists(), worlds, st.sampled_from([1, 16]))
def test_even_cuts_the_row_into_equal_runs(specs, world_size, align):
    specs = [p for p in specs if p.numel <= 13_000]
    plan, at = even(specs, world_size, align=align), 0
    each = -(-sum(p.numel for p in specs if p.trainable) // world_size)
    each += -each % align
    for i, spec in enumerate(specs):
        owned = [r for r, s in plan.owners(i) for _ in range(s.start, s.stop)]
        assert (
            owned == [(at + e) // each for e in range(len(owned))]
            and len(owned) == spec.numel * spec.trainable
        )
        at += len(owned)


@settings(max_examples=300, deadline=None)
@given(param_lists(6), st.integers(1, 4), st.integers(0, 2**32))
@example((ParamSpec("", (), "float32"),), 1, 2131)  # an empty span beside another one
def test_a_plan_is_built_exactly_if_every_element_has_one_owner(specs, world_size, seed):
    specs, rng = tuple(p for p in specs if p.numel <= 200), random.Random(seed)
    spans = [
        Span(i, e, min(e + 3, p.numel))
        for i, p in enumerate(specs)
        if p.trainable
        for e in range(0, p.numel, 3)
    ]
    if not spans:
        return
    for _ in range(rng.randrange(3)):
        spans = damaged(rng, spans) or spans
    shards = [[] for _ in range(world_size)]
    for s in spans:
        rng.choice(shards).append(s)
    counts = {(i, e): 0 for i, p in enumerate(specs) if p.trainable for e in range(p.numel)}
    for s in spans:
        for e in range(s.start, s.stop):
            counts[s.param, e] = counts.get((s.param, e), 0) + 1
    fits = (
        all(s.start < s.stop for s in spans)
        and len(counts) == sum(p.numel for p in specs if p.trainable)
        and set(counts.values()) == {1}
    )
    if fits:
        plan = ShardPlan(specs, shards)
        assert plan == ShardPlan(specs, [shard[::-1] for shard in shards])
        assert all(
            (a.param, a.stop) != (b.param, b.start) and a < b
            for shard in plan.shards
            for a, b in pairwise(shard)
        )
    else:
        with pytest.raises(ValueError, match=r"a span needs|is owned by"):
            ShardPlan(specs, shards)


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 0), (0, 9)],
        [(0, 5), (5, 5), (5, 9)],
        [(0, 9), (9, 9)],
        [(0, 0), (0, 5), (5, 9)],
        [(0, 5), (5, 5), (5, 5), (5, 9)],
        [(0, 5), (5, 3), (3, 5), (5, 9)],
    ],
)
def test_an_empty_or_reversed_span_is_refused_wherever_it_lies(pairs):
    shard = [Span(0, *pair) for pair in pairs]
    with pytest.raises(ValueError, match="a span needs 0 <= start < stop"):
        ShardPlan((ParamSpec("w", (9,), "float32"),), [shard])


@quick
@given(param_lists(), worlds)
def test_no_plan_is_worse_than_its_bound(specs, world_size):
    numels = [p.numel for p in specs if p.trainable]
    total, largest = sum(numels), max(numels, default=0)
    assert max(even(specs, world_size).loads) == -(-total // world_size)
    assert max(even(specs, world_size, align=16).loads) < total / world_size + 16
    assert max(greedy(specs, world_size).loads) <= total / world_size + largest
    one_group = tuple(replace(p, group=0) for p in specs)
    assert max(balanced(specs, world_size).loads) <= max(greedy(one_group, world_size).loads)
    costs = [newton_schulz(p) for p in specs if p.trainable]
    assert max(balanced(specs, world_size, cost=newton_schulz).weigh(newton_schulz)) <= sum(
        costs
    ) / world_size + max(costs, default=0)


@quick
@given(param_lists(), worlds, st.data())
def test_even_fills_up_to_one_level(specs, world_size, data):
    held = data.draw(st.lists(st.integers(0, 60), min_size=world_size, max_size=world_size))
    new, total = (
        even(specs, world_size, loads=held).loads,
        sum(p.numel for p in specs if p.trainable),
    )
    low, high = 0, max(held) + total  # the lowest level at which there is room for all
    while low < high:
        low, high = (
            (low, mid)
            if sum(max(0, (mid := (low + high) // 2) - h) for h in held) >= total
            else (mid + 1, high)
        )
    assert all(n == 0 or h + n <= low for h, n in zip(held, new, strict=True)) and sum(new) == total


@quick
@given(
    param_lists(16),
    param_lists(16),
    st.integers(1, 9),
    st.integers(1, 9),
    policies,
    policies,
    st.data(),
)
def test_moves_turn_one_plan_into_the_other_and_move_nothing_twice(
    specs, extra, before, after, first, second, data
):
    keep = [p for p in specs if data.draw(st.booleans(), label=f"keep {p.name!r}")]
    added = [p for p in extra if p.name not in {q.name for q in specs}]
    later = tuple(
        replace(p, trainable=data.draw(st.booleans()), group=data.draw(st.integers(0, 2)))
        for p in [*added, *keep]
    )
    old, new = first(specs, before), second(later, after)
    owner, want, moved = elements(old), elements(new), set()
    for m in moves(old, new):
        name = new.params[m.span.param].name
        assert m.source != m.destination and m.numel > 0
        if new.params[m.span.param].numel > 13_000:
            continue
        for e in range(m.span.start, m.span.stop):
            assert (name, e) not in moved and owner[name, e] == m.source
            moved.add((name, e))
            owner[name, e] = m.destination
    assert {key: owner[key] for key in want if key in owner} == {
        key: r for key, r in want.items() if key in owner
    }
    assert moves(new, new) == ()


@quick
@given(param_lists(), st.integers(1, 9), st.integers(1, 9), policies, policies)
def test_a_rank_finds_its_own_moves(specs, before, after, first, second):
    old, new = first(specs, before), second(specs, after)
    found = moves(old, new)
    for rank in range(max(before, after)):
        mine = moves_of(rank, old, new)
        sent = [move for moves in mine.sends.values() for move in moves]
        received = [move for moves in mine.receives.values() for move in moves]
        kept = [move for move in received if move.source == rank]
        assert [m for m in sent if m.destination != rank] == [m for m in found if m.source == rank]
        assert [m for m in received if m.source != rank] == [
            m for m in found if m.destination == rank
        ]
        assert kept == [move for move in sent if move.destination == rank]
        for span, moves_in in mine.receives.items():
            assert sum(move.numel for move in moves_in) == span.numel, "all of it comes"


def test_a_rank_of_many_finds_its_moves_without_the_list_of_all():
    specs = [ParamSpec(f"p{i}", (64, 1 + i % 9)) for i in range(500)]
    few, many = (
        max(
            calls(partial(moves_of, rank, even(specs, ranks), balanced(specs, ranks)))
            for rank in (0, 1, ranks // 2, ranks - 1)
        )
        for ranks in (8, 1024)
    )
    assert many < few / 8, "a rank of 1,024 has about one span, a rank of 8 has sixty"


def held(plan, rank):
    """Give the elements that a rank needs under a plan: parameter and number of each."""
    if rank >= plan.world_size:
        return set()
    spans = plan.spans(rank)
    return {(plan.params[s.param].name, e) for s in spans for e in range(s.start, s.stop)}


def check_sources(found, params, before, node):
    """Each move comes from the nearest rank that has sent least, and brings what is not there; give
    what every rank gets."""
    got, sent = [set() for _ in before], [0] * len(before)
    for m in found:
        run = {(params[m.span.param].name, e) for e in range(m.span.start, m.span.stop)}
        assert (
            run
            and run <= before[m.source]
            and not run & (got[m.destination] | before[m.destination])
        )
        could = [r for r in range(len(before)) if run <= before[r]]
        best = [r for r in could if r // node == m.destination // node] or could
        assert m.source in best and sent[m.source] == min(sent[r] for r in best)
        got[m.destination] |= run
        sent[m.source] += m.numel
    return got


@quick
@given(
    param_lists(12),
    *[st.integers(1, 5)] * 4,
    policies,
    policies,
    st.sampled_from([None, 1, 2, 3, 8]),
    st.randoms(use_true_random=False),
)
def test_moves_between_grids_give_every_rank_what_it_needs_from_the_nearest(
    specs, shard, replicate, shard_2, replicate_2, first, second, per_node, rng
):
    specs = tuple(p for p in specs if p.numel <= 13_000)
    later = tuple(rng.sample(specs, len(specs)))
    old, new = (
        GridPlan(first(specs, shard), Grid(shard, replicate)),
        GridPlan(second(later, shard_2), Grid(shard_2, replicate_2)),
    )
    ranks, node = range(max(old.world_size, new.world_size)), per_node or min(shard, shard_2)

    before, after = ([held(plan, rank) for rank in ranks] for plan in (old, new))
    found = moves(old, new, per_node=per_node)
    got = check_sources(found, later, before, node)
    assert all(
        got[r] == after[r] - before[r] for r in ranks
    )  # applied, the new plan; and nothing needless
    assert moves(new, new) == () and [(m.span, m.destination) for m in found] == sorted(
        (m.span, m.destination) for m in found
    )


@quick
@given(param_lists(), st.integers(1, 9), st.integers(1, 9), policies)
def test_a_plan_is_a_grid_of_one_row(specs, before, after, policy):
    old, new = policy(specs, before), even(specs, after)
    assert (
        moves(old, new)
        == moves(GridPlan(old, Grid(before)), new)
        == moves(old, GridPlan(new, Grid(after)), per_node=1)
    )


@quick
@given(
    param_lists(devices=st.text(min_size=1, max_size=5)),
    st.integers(1, 6),
    st.integers(1, 6),
    policies,
)
def test_grid_plans_are_read_back_and_their_rows_hold_everything(specs, shard, replicate, policy):
    plan = GridPlan(policy(specs, shard), Grid(shard, replicate))
    for again in (
        GridPlan.from_json(plan.to_json()),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert (
            again == plan
            and hash(again) == hash(plan)
            and again.digest == plan.digest != plan.plan.digest
        )
    assert (
        len(plan.loads) == plan.world_size == shard * replicate
        and plan.imbalance == plan.plan.imbalance
    )
    for i, p in enumerate(specs):
        assert sum(s.numel for _, s in plan.owners(i)) == replicate * p.numel * p.trainable
        assert all(s in plan.spans(rank) for rank, s in plan.owners(i))
    assert f"{replicate} rows" in repr(plan) and "<table>" in plan._repr_html_()


def test_moves_for_many_machines():
    specs = [ParamSpec(f"p{i}", (4096, 1 + i % 9)) for i in range(300)]
    old, new = (GridPlan(even(specs, 8), Grid(8, rows)) for rows in (256, 512))
    found = moves(old, new)
    assert {m.destination for m in found} == {*range(2048, 4096)}
    assert sum(m.numel for m in found) == 256 * sum(p.numel for p in specs)
    sent = [0] * 2048
    for m in found:
        sent[m.source] += m.numel
    assert max(sent) - min(sent) <= max(old.loads)


def torch_partition(specs, world_size):
    """Let torch's own code share out these sizes."""
    torch = pytest.importorskip("torch")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    tensors = [torch.nn.Parameter(torch.empty(p.shape, device="meta")) for p in specs]
    groups = sorted({p.group for p in specs})
    zero.world_size, zero._partition_parameters_cache = world_size, []
    zero.param_groups = [
        {"params": [t for t, p in zip(tensors, specs, strict=True) if p.group == g]} for g in groups
    ]
    index = {id(t): i for i, t in enumerate(tensors)}
    return [
        sorted(index[id(t)] for group in rank for t in group["params"])
        for rank in zero._partition_parameters()
    ]


@settings(max_examples=25, deadline=None)
@given(param_lists(), st.integers(1, 12))
def test_greedy_agrees_with_torch(specs, world_size):
    specs = tuple(replace(p, trainable=True) for p in specs)
    partition = torch_partition(specs, world_size) if specs else [[]] * world_size
    theirs = [[i for i in rank if specs[i].numel] for rank in partition]
    assert [
        sorted({s.param for s in shard}) for shard in greedy(specs, world_size).shards
    ] == theirs


def test_the_hash_seed_changes_nothing_and_torch_is_not_imported():
    code = """
import sys
from functools import partial
from zero_nb.plan.balancing import *
from zero_nb.plan.policies import *
from zero_nb.plan.specs import *
from zero_nb.plan.packing import pack
specs = [ParamSpec(f"layer{i}.{kind}", shape, dtype, "cpu", i % 3, i % 7 > 0) for i in range(40)
         for kind, shape, dtype in (("weight", (i, 7), "float32"), ("bias", (i % 5,), "bfloat16"))]
both = partial(mixed, choose=by_group(even, partial(balanced, cost=newton_schulz)))
print([f(specs, 5).digest for f in (greedy, even, balanced, mixed, both)])
print([pack(specs, 5, policy=f, by_group=True).digest for f in (even, "balanced", both)])
assert "torch" not in sys.modules
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(said) == 1


@pytest.mark.parametrize("policy", [even, greedy, balanced])
def test_a_hundred_thousand_parameters_on_many_ranks(policy):
    specs = [ParamSpec(f"p{i}", (i % 700 + 1,)) for i in range(100_000)]
    plan = policy(specs, 4096)
    assert plan.imbalance < 1.01 and sum(plan.loads) == sum(p.numel for p in specs)


@pytest.mark.parametrize(("policy", "most"), [(even, 4), (greedy, 9), (balanced, 9)])
def test_the_work_of_a_plan_is_a_few_calls_for_each_parameter_whatever_the_ranks(policy, most):
    specs = [ParamSpec(f"p{i}", (8,)) for i in range(4000)]
    assert all(calls(lambda n=n: policy(specs, n)) < most * len(specs) for n in (1, 8, 250))


def test_even_is_within_a_thousandth_where_ranks_have_a_thousand_elements():
    specs = [ParamSpec("a", (4096, 1000)), ParamSpec("b", (7,))]
    assert all(even(specs, n).imbalance <= 1.001 for n in (1, 2, 3, 64, 1000, 4096))
    assert all(
        even(specs, n, align=16).imbalance <= 1.001 for n in (1, 2, 3, 64, 255)
    )  # 1,000 units of 16 a rank


def test_refinement_never_hurts_and_finds_what_longest_first_misses():
    specs = [ParamSpec(f"p{i}", (n,)) for i, n in enumerate((5, 5, 4, 4, 3, 3, 3))]
    assert max(balanced(specs, 3, rounds=0).loads) == 11 and balanced(specs, 3).loads == (9, 9, 9)


def test_a_grid_has_rows_that_shard_and_columns_that_replicate():
    grid = Grid(4, 3)
    assert sorted(sum(grid.rows, ())) == sorted(sum(grid.columns, ())) == list(range(12))
    assert all(
        grid.place(rank) == (r, k) for r, row in enumerate(grid.rows) for k, rank in enumerate(row)
    )


tiny = ParamSpec("weight", (4, 2)), ParamSpec("bias", (2,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: even(tiny, 0), "world_size must be an integer >= 1, got 0"),
        (lambda: greedy(tiny, -1), "world_size must be an integer >= 1, got -1"),
        (lambda: balanced(tiny, 1.5), "world_size must be an integer >= 1, got 1.5"),
        (lambda: even(tiny, True), "world_size must be an integer >= 1, got True"),
        (lambda: ShardPlan(tiny, ()), "world_size must be an integer >= 1, got 0"),
        (lambda: even(tiny, 2, align=0), "align must be an integer >= 1"),
        (lambda: even(tiny, 2, loads=[1]), "loads must hold 2 numbers"),
        (lambda: greedy(tiny, 2, loads=[1, -1]), "loads must hold 2 numbers"),
        (lambda: ParamSpec("w", (4, -2)), "a shape holds integers >= 0"),
        (lambda: ParamSpec("w", (4.0,)), "a shape holds integers >= 0"),
        (lambda: ParamSpec("w", 4), "a shape holds integers >= 0"),
        (lambda: ParamSpec("w", (4,), "bfloat61"), "did you mean bfloat16"),
        (lambda: even([*tiny, tiny[0]], 2), "parameters 0 and 2 are both called 'weight'"),
        (lambda: find_policy("evn"), "did you mean 'even'"),
        (lambda: find_policy("zzz"), "choose one of greedy, even, balanced, mixed"),
        (lambda: ShardPlan(tiny, ((Span(0, 0, 8),),)), "element 0 is owned by no rank"),
        (
            lambda: ShardPlan(tiny, ((Span(0, 0, 8), Span(1, 0, 2)), (Span(1, 1, 2),))),
            "element 1 is owned by group_rank 1 and another",
        ),
        (
            lambda: ShardPlan(tiny, ((Span(0, 0, 9), Span(1, 0, 2)),)),
            "element 8 is owned by group_rank 0, and does not exist",
        ),
        (
            lambda: ShardPlan((ParamSpec("f", (2,), trainable=False),), ((Span(0, 0, 2),),)),
            "frozen",
        ),
        (lambda: ShardPlan(tiny, ((Span(2, 0, 1),),)), "a parameter below 2"),
        (lambda: ShardPlan(tiny, ((Span(0, 3, 3),),)), "0 <= start < stop"),
        (lambda: ShardPlan(tiny, ((Span(-1, -1, 2),),)), "a span needs 0 <= start < stop"),
        (
            lambda: ShardPlan(tiny, ((Span(0, 0, 8), Span(1, 0, 2)), (Span(0, 0, 8),))),
            "element 0 is owned by group_rank 1 and another",
        ),
        (
            lambda: ShardPlan(tiny, ((Span(0, 0, 4), Span(1, 0, 2)), (Span(0, 0, 8),))),
            "element 0 is owned by group_rank 1 and another",
        ),
        (
            lambda: ShardPlan(tiny, ((Span(0, 0, 8), Span(1, 0, 2)), (Span(0, 6, 8),))),
            "element 6 is owned by group_rank 1 and another",
        ),
        (
            lambda: checked(lambda specs, world_size, loads: even(specs[1:], 2), tiny, 2, None),
            "was asked for 2 parameters over 2 ranks",
        ),
        (
            lambda: moves(even(tiny, 2), even([ParamSpec("weight", (2, 4))], 2)),
            "parameter 'weight' has shape",
        ),
        (lambda: ShardPlan.from_fields({"param": ["nonsense"]}), "a parameter is written as"),
        (lambda: ShardPlan.from_fields({"shard": ["0"]}), "a span is written as"),
        (
            lambda: GridPlan(even(tiny, 2), Grid(3, 2)),
            "the plan must be one of 3 ranks, a row of the grid, got one of 2",
        ),
        (
            lambda: GridPlan(even(tiny, 2), Grid(2, 2)).spans(4),
            "global_rank must lie in 0 to 3, got 4",
        ),
        (
            lambda: GridPlan.from_json(even(tiny, 2).to_json()),
            "a GridPlan has one line such as 'rows 2', got []",
        ),
        (
            lambda: GridPlan.from_fields({**even(tiny, 2).fields(), "rows": ["two"]}),
            "a GridPlan has one line such as 'rows 2', got ['two']",
        ),
        (
            lambda: ShardPlan.from_fields({**even(tiny, 2).fields(), "rows": ["2"]}),
            "lines of a ShardPlan begin with param, shard, got 'rows'",
        ),
        (
            lambda: moves(even(tiny, 2), even(tiny, 3), per_node=0),
            "per_node must be an integer >= 1 (ranks), got 0",
        ),
        (lambda: ParamSpec(3, (2,)), "the name of a parameter must be text, got 3"),
        (
            lambda: ParamSpec("w", (2,), group="0"),
            "group must be the index of a param group, an integer >= 0, got '0'",
        ),
        (lambda: ParamSpec("w", (2,), group=True), "group must be"),
        (lambda: ParamSpec("w", (2,), group=-1), "group must be"),
        (lambda: ParamSpec("w", (2,), device=0), "a device is text such as 'cuda', got 0"),
        (lambda: ParamSpec("w", (2,), device=""), "a device is text"),
        (lambda: ParamSpec("w", (2,), trainable=None), "trainable must be True or False, got None"),
        (lambda: ParamSpec("w", (2,), 32), "unknown dtype 32"),
        (
            lambda: even(tiny, 2, loads=[math.nan, 1]),
            "loads must hold 2 numbers >= 0, one for each rank, got nan",
        ),
        (lambda: greedy(tiny, 2, loads=[1, math.nan]), "got nan"),
        (lambda: balanced(tiny, 2, loads=[1, math.inf]), "got inf"),
        (lambda: mixed(tiny, 2, loads=[-1, math.nan]), "got -1"),
        (lambda: even(tiny, 2, loads=["1", 2]), "got '1'"),
        (
            lambda: balanced(tiny, 2, cost=lambda spec: -spec.numel),
            "the cost of a parameter must be a number >= 0, got -8 for 'weight'",
        ),
        (lambda: balanced(tiny, 2, cost=lambda spec: math.nan), "got nan for 'weight'"),
        *[
            (
                lambda kind=kind, text=text: kind.from_json(text),
                f"a {kind.__name__} in JSON is an object of lists of lines",
            )
            for kind in (ShardPlan, GridPlan)
            for text in ("[]", "3", "null", '"x"', '{"param": "x"}', '{"shard": [1]}')
        ],
        (
            lambda: ShardPlan.from_json("{"),
            "a ShardPlan is read from the JSON that `to_json` wrote",
        ),
        (lambda: Grid(0), "world_size must be an integer >= 1"),
        (lambda: Grid(2, 2).place(4), "global_rank must lie in 0 to 3"),
    ],
)
def test_bad_input_has_one_clear_error(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_a_policy_must_return_a_plan():
    with pytest.raises(TypeError, match="must return a ShardPlan, got list"):
        checked(lambda specs, world_size, loads: [], tiny, 2, None)


def test_small_things():
    assert find_policy(even) is even and set(POLICIES) == {
        "greedy",
        "even",
        "balanced",
        "mixed",
    }
    assert spread([0, 0]) == 1 and spread([2, 1]) == pytest.approx(4 / 3)
    assert Move(0, 1, Span(0, 2, 5)).numel == 3
    assert even((), 3).loads == (0, 0, 0) and even((), 3).imbalance == 1
    assert "16 ranks" in even(tiny, 16)._repr_html_()
