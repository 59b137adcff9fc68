"""Properties of bucket plans, for random parameter lists and many ranks."""

import pickle
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from common.counting import calls
from common.param_lists import by_row, damaged, param_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.plan.balancing import balanced, by_group, mixed, newton_schulz
from zero_nb.plan.bucket import Bucket, Slot
from zero_nb.plan.bucket_plan import BucketPlan
from zero_nb.plan.filling import MIB, fill_like_ddp
from zero_nb.plan.packing import adopt, pack
from zero_nb.plan.policies import even, greedy
from zero_nb.plan.shards import ShardPlan, Span, _canonical
from zero_nb.plan.specs import ParamSpec, ParamTable

quick = settings(max_examples=80, deadline=None)
worlds = st.one_of(st.integers(1, 9), st.sampled_from([64, 1000]))
leaves = [
    even,
    partial(even, align=4),
    by_row,
    greedy,
    balanced,
    partial(balanced, cost=newton_schulz),
]
policies = st.sampled_from(
    [
        *leaves,
        mixed,
        partial(mixed, choose=by_group(greedy, even, partial(balanced, cost=newton_schulz))),
    ]
)
options = st.fixed_dictionaries(
    {
        "bucket_cap_mb": st.sampled_from([64 / MIB, 1000 / MIB, 25.0]),
        "first_bucket_mb": st.sampled_from([16 / MIB, 1.0]),
        "by_group": st.booleans(),
        "align": st.sampled_from([1, 4]),
        "cut": st.booleans(),
        "equal": st.booleans(),
    }
)


def small(specs):
    """Leave out giants, whose thousands of tiny buckets would only take time."""
    return tuple(p for p in specs if p.numel < 20_000)


@quick
@given(param_lists(), worlds, policies, options)
def test_every_element_has_one_place_and_parts_cover_buckets(specs, world_size, policy, chosen):
    specs = small(specs)
    plan = pack(specs, world_size, policy=policy, **chosen)
    assert plan.shard_plan.params == specs and plan.shard_plan.loads == plan.loads
    for bucket in plan.buckets:
        assert (
            bucket.slots
            and bucket.bounds[0] == 0
            and bucket.bounds[-1] == bucket.numel
            and len(bucket.bounds) == world_size + 1
        )
        assert {(specs[s.param].dtype, specs[s.param].device) for s in bucket.slots} == {
            (bucket.dtype, bucket.device)
        }
        assert not chosen["by_group"] or {specs[s.param].group for s in bucket.slots} == {
            bucket.group
        }
        assert (
            sum(s.numel for r in range(world_size) for s in bucket.slots_of(r))
            == bucket.numel - bucket.padding
        )
        for r in {0, world_size // 2, world_size - 1}:
            start, stop = bucket.part(r)
            assert (stop - start) % chosen["align"] == 0
            assert all(start <= s.offset and s.offset + s.numel <= stop for s in bucket.slots_of(r))
            assert bucket.spans(r) == tuple(
                Span(s.param, s.start, s.stop) for s in bucket.slots_of(r)
            )
        assert bucket.equal or not chosen["equal"]


@quick
@given(param_lists(6), worlds, policies, options, st.data())
def test_a_bucket_plan_finds_owners_as_its_shard_plan_does(specs, world_size, policy, chosen, data):
    plan = pack(small(specs), world_size, policy=policy, **chosen)
    listed, ranks = plan.shard_plan, {0, world_size // 2, world_size - 1}
    for rank in ranks:
        assert _canonical(plan.spans(rank)) == listed.spans(rank)
    for i, spec in [(i, spec) for i, spec in enumerate(plan.params) if spec.numel]:
        start = data.draw(st.integers(0, spec.numel - 1))
        span = Span(i, start, data.draw(st.integers(start + 1, spec.numel)))
        found, wanted = list(plan.owners_of(span)), list(listed.owners_of(span))
        assert [s.start for _, s in found] == sorted(s.start for _, s in found), "in order"
        assert all(s.numel > 0 for _, s in found)
        assert joined(found) == joined(wanted)
        assert sum(s.numel for _, s in found) == span.numel * spec.trainable
        for place in plan.places_of(span):
            bucket = plan.buckets[plan.bucket_of(i, max(start, place.slot.start))]
            assert place.slot in bucket.slots and place.bounds == bucket.bounds
            parts = list(place.owners_of(place.slot.span))
            for rank in ranks:
                assert place.spans(rank) == tuple(s for r, s in parts if r == rank)


def joined(found):
    """Join neighbouring parts of one owner."""
    ranks = {rank for rank, _ in found}
    return {rank: _canonical([s for owner, s in found if owner == rank]) for rank in ranks}


@quick
@given(
    param_lists(devices=st.sampled_from(["cpu", "my device", ' a | "b"', "x|y", "\u2028"])),
    worlds,
    policies,
    options,
)
def test_bucket_plans_are_read_back(specs, world_size, policy, chosen):
    plan = pack(small(specs), world_size, policy=policy, **chosen)
    for again in (
        BucketPlan.from_json(plan.to_json()),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert again == plan and hash(again) == hash(plan) and again.digest == plan.digest
    assert plan == pack(small(specs), world_size, policy=policy, **chosen)


@quick
@given(param_lists(), worlds, options)
def test_even_buckets_have_equal_parts_a_limit_and_padding_only_at_ends(specs, world_size, chosen):
    plan = pack(small(specs), world_size, **chosen)
    unit = world_size * chosen["align"]
    for bucket in plan.buckets:
        assert bucket.equal and bucket.padding < unit
        used = sum(s.numel for s in bucket.slots) * specs_size(plan, bucket)
        one = len(bucket.slots) == 1
        assert used <= max(chosen["bucket_cap_mb"] * MIB, unit * specs_size(plan, bucket)) or (
            one and not chosen["cut"]
        )
        last = bucket.slots[-1]
        if one and last.stop < plan.params[last.param].numel:
            assert bucket.padding == 0
    assert max(plan.loads) <= sum(b.numel // world_size for b in plan.buckets)


def specs_size(plan, bucket):
    return plan.params[bucket.slots[0].param].itemsize


@quick
@given(param_lists())
def test_buckets_are_filled_to_their_limit_and_the_first_closes_early(specs):
    specs = [replace(p, dtype="float32") for p in specs if p.trainable and 0 < p.nbytes <= 500]
    filled = [
        [specs[s.param].nbytes for s in b.slots]
        for b in pack(specs, 1, bucket_cap_mb=1000 / MIB, first_bucket_mb=200 / MIB).buckets
    ]
    for i, (mine, following) in enumerate(pairwise(filled)):
        assert sum(mine) <= 1000 and (
            sum(mine) + following[0] > 1000 or (i == 0 and sum(mine) >= 200 > sum(mine[:-1]))
        )
    assert not filled or sum(filled[0][:-1]) < 200


@quick
@given(param_lists(), worlds, options, st.randoms(use_true_random=False))
def test_buckets_come_in_the_order_in_which_gradients_complete_them(
    specs, world_size, chosen, random
):
    specs = small(specs)
    order = list(range(len(specs)))
    random.shuffle(order)
    arrived = {i: when for when, i in enumerate(order)}
    for plan, when in (
        (pack(specs, world_size, order=order, **chosen), arrived),
        (pack(specs, world_size, **chosen), {i: -i for i in order}),
    ):
        complete = [max(when[s.param] for s in bucket.slots) for bucket in plan.buckets]
        assert complete == sorted(complete)
        for bucket in plan.buckets:
            times = [when[s.param] for s in bucket.slots]
            assert times == sorted(times)


@quick
@given(param_lists(), worlds, st.sampled_from(leaves), st.data())
def test_adopted_buckets_are_kept(specs, world_size, policy, data):
    specs = tuple(p for p in small(specs) if p.dtype == "float32" and p.trainable)
    order = data.draw(st.permutations(range(len(specs))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(specs)), max_size=4)))
    theirs = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(specs)], strict=True)]
    plan = adopt(specs, world_size, theirs, policy=policy)
    want = [[i for i in bucket if specs[i].numel] for bucket in theirs]
    found = [
        [*dict.fromkeys(s.param for s in b.slots)] for b in plan.buckets
    ]  # `by_row` may cut one in two
    assert [sorted(b) for b in found] == [sorted(b) for b in want if b]
    if policy is even:
        assert found == [b for b in want if b]


@quick
@given(param_lists(), worlds)
def test_whole_policies_keep_parameters_whole_and_balance_over_all_buckets(specs, world_size):
    specs = small(specs)
    plan = pack(specs, world_size, policy=balanced, bucket_cap_mb=1000 / MIB)
    assert all(
        len(plan.shard_plan.owners(i)) == bool(p.trainable and p.numel) for i, p in enumerate(specs)
    )
    assert plan.loads == balanced(specs, world_size).loads


@quick
@given(
    param_lists(),
    st.sampled_from(
        [(16 / MIB, 4 / MIB), (100 / MIB, 100 / MIB), (25.0, 1.0), (4000 / MIB, 64 / MIB)]
    ),
)
def test_ddp_buckets_are_those_of_torch(specs, limits):
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    mine = [i for i, p in reversed(list(enumerate(specs))) if p.trainable and p.numel]
    if not mine:
        return
    tensors = [
        torch.empty(specs[i].shape, dtype=getattr(torch, specs[i].dtype), device="meta")
        for i in mine
    ]
    theirs, _ = dist._compute_bucket_assignment_by_size(
        tensors, [int(limits[1] * MIB), int(limits[0] * MIB)], [False] * len(mine)
    )
    found = fill_like_ddp(specs, *limits)
    assert sorted([mine[k] for k in bucket] for bucket in theirs) == sorted(found)


def test_a_hundred_thousand_parameters():
    specs = [ParamSpec(f"p{i}", (i % 700 + 1,)) for i in range(100_000)]
    assert (
        pack(specs, 1024).imbalance < 1.001 and pack(specs, 1024, policy=greedy).imbalance < 1.001
    )


@settings(max_examples=300, deadline=None)
@given(param_lists(5), st.sampled_from(leaves), st.booleans(), st.integers(0, 2**32))
def test_a_bucket_plan_is_built_exactly_if_every_element_has_one_place(
    specs, policy, by_group, seed
):
    specs, rng = tuple(p for p in specs if p.numel <= 200), random.Random(seed)
    packed = pack(specs, 2, policy=policy, bucket_cap_mb=64 / MIB, by_group=by_group)
    if not packed.buckets:
        return
    k = rng.randrange(len(packed.buckets))
    old = packed.buckets[k]
    bucket = Bucket(
        old.dtype, old.device, old.group, tuple(damaged(rng, list(old.slots))), old.bounds
    )
    buckets = (*packed.buckets[:k], bucket, *packed.buckets[k + 1 :])
    placed = sorted((s.param, e) for b in buckets for s in b.slots for e in range(s.start, s.stop))
    once = placed == [(i, e) for i, p in enumerate(specs) if p.trainable for e in range(p.numel)]
    ends = [0, *(s.offset + s.stop - s.start for s in bucket.slots)]
    apart = (
        all(
            s.start < s.stop and s.offset >= end for s, end in zip(bucket.slots, ends, strict=False)
        )
        and ends[-1] <= bucket.numel
    )
    same = once and all(
        specs[s.param].dtype == bucket.dtype and bucket.group in (None, specs[s.param].group)
        for s in bucket.slots
    )
    if apart and same:
        assert BucketPlan(specs, 2, buckets).buckets == buckets
    else:
        with pytest.raises(
            ValueError,
            match=r"has no slot|needs a parameter|holds one kind|must start at or after"
            r"|has exactly one place",
        ):
            BucketPlan(specs, 2, buckets)


@pytest.mark.parametrize("policy", [even, greedy, balanced, partial(mixed, choose=by_group(even))])
def test_the_work_of_packing_is_a_few_calls_for_each_parameter_whatever_the_ranks(policy):
    specs = [ParamSpec(f"p{i}", (8,)) for i in range(4000)]
    found = [
        calls(
            lambda n=n: pack(specs, n, policy=policy, bucket_cap_mb=1.0, order=range(4000)).digest
        )
        / 4000
        for n in (1, 8, 250)
    ]
    assert max(found) < 30, found


def test_a_giant_is_cut_without_padding_inside_and_not_cut_when_told():
    giant = [ParamSpec("giant", (50_000_017,), "bfloat16"), ParamSpec("after", (3,), "bfloat16")]
    plan = pack(giant, 8, align=128)
    assert [b.padding for b in plan.buckets if b.slots[0].param == 0][:-1] == [0] * (
        len(plan.buckets) - 2
    )
    assert all(b.nbytes <= 25 * MIB for b in plan.buckets) and all(
        b.bounds.step % 128 == 0 for b in plan.buckets
    )
    assert [len(b.slots) for b in pack(giant, 8, cut=False).buckets] == [1, 1]
    whole = pack(giant, 8, policy=greedy)
    assert [b.spans(0) for b in whole.buckets if b.slots[0].param == 0] == [
        (Span(0, 0, 50_000_017),)
    ]


def test_nothing_to_train_is_a_plan_without_buckets():
    plan = pack([ParamSpec("frozen", (4,), trainable=False), ParamSpec("empty", (0, 3))], 4)
    assert plan.buckets == () and plan.loads == (0, 0, 0, 0) and plan.imbalance == 1
    assert (
        pack([], 2).shard_plan == ShardPlan((), ((), ()))
        and "0 buckets" in pack([], 2)._repr_html_()
    )


def test_equal_partials_share_buckets():
    specs = [ParamSpec(f"p{i}", (4, 4)) for i in range(6)]
    plan = pack(
        specs, 2, policy=partial(mixed, choose=lambda spec: partial(balanced, cost=newton_schulz))
    )
    assert len(plan.buckets) == 1 and len(plan.buckets[0].slots) == 6


two = (ParamSpec("weight", (7,)), ParamSpec("bias", (2,)))
half = (ParamSpec("weight", (7,)), ParamSpec("half", (2,), "bfloat16"))


def bucket(*slots, bounds=(0, 5, 10), dtype="float32", group=None):
    return Bucket(dtype, "cpu", group, slots, bounds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(two, 0), "world_size must be an integer >= 1, got 0"),
        (lambda: pack(two, 2, bucket_cap_mb=0), "bucket_cap_mb must be above 0"),
        (lambda: pack(two, 2, bucket_cap_mb="25"), "bucket_cap_mb must be above 0"),
        (lambda: pack(two, 2, first_bucket_mb=-1), "first_bucket_mb must be above 0"),
        (lambda: pack(two, 2, policy="greedi"), "did you mean 'greedy'"),
        (lambda: pack(two, 2, order=[0]), "missing ['bias']"),
        (lambda: pack(two, 2, order=[0, 1, 1]), "order must name each trainable parameter once"),
        (lambda: pack(two, 2, order=[0, 1, 2]), "index below 2"),
        (lambda: pack([*two, two[0]], 2), "are both called 'weight'"),
        (
            lambda: pack(two, 2, policy=lambda specs, world_size, loads: even(specs[:1], 2)),
            "was asked for 2 parameters",
        ),
        (lambda: adopt(half, 2, [[0, 1]]), "mixes bfloat16 on cpu and float32 on cpu"),
        (lambda: adopt(two, 2, [[0]]), "'bias' (2 elements) is placed as []"),
        (
            lambda: adopt(two, 2, [[0, 1], [1]]),
            "every element of every trainable parameter has exactly one place",
        ),
        (
            lambda: BucketPlan(two, 2, (bucket(Slot(0, 0, 6, 0), Slot(1, 0, 2, 6)),)),
            "'weight' (7 elements) is placed as [(0, 6)]",
        ),
        (
            lambda: BucketPlan(two, 2, (bucket(Slot(0, 0, 7, 0), Slot(1, 0, 2, 6)),)),
            "must start at or after 7",
        ),
        (lambda: BucketPlan(two, 2, (bucket(Slot(0, 0, 7, 0), Slot(1, 0, 2, 9)),)), "end by 10"),
        (
            lambda: BucketPlan(two, 2, (bucket(Slot(0, 0, 7, 0), Slot(1, 0, 2, 7)), bucket())),
            "bucket 1 has no slot",
        ),
        (
            lambda: BucketPlan(two, 3, (bucket(Slot(0, 0, 7, 0), Slot(1, 0, 2, 7)),)),
            "is cut for 2 ranks, the plan for 3",
        ),
        (
            lambda: BucketPlan(half, 2, (bucket(Slot(0, 0, 7, 0), Slot(1, 0, 2, 7)),)),
            "a bucket holds one kind",
        ),
        (
            lambda: BucketPlan(two, 2, (bucket(Slot(0, 0, 7, 0), Slot(1, 0, 2, 7), group=1),)),
            "a bucket holds one kind",
        ),
        *[
            (
                lambda text=text: BucketPlan.from_json(text),
                "a BucketPlan in JSON is an object of lists of lines",
            )
            for text in ("[]", "3", '{"ranks": 2}')
        ],
        (
            lambda: BucketPlan.from_json("x"),
            "a BucketPlan is read from the JSON that `to_json` wrote",
        ),
        (
            lambda: BucketPlan.from_fields({"ranks": ["2"], "shard": ["0"]}),
            "lines of a BucketPlan begin with param, ranks, bucket, got 'shard'",
        ),
        *[
            (
                lambda line=line: BucketPlan.from_fields(
                    {"param": ['float32[4] cpu group 0 "w"'], "ranks": ["2"], "bucket": [line]}
                ),
                "a bucket is written as",
            )
            for line in (
                "float32 cpu group any | 0@0 | 0 each",
                "float32 my cpu group any | 0@0 | 2 each",
                "float32 cpu group x | 0@0 | 2 each",
                "float32 cpu group any | 0 | 2 each",
                "float32 cpu group any | 0@0 | two",
                "float32 cpu group any | 0@0 | ",
            )
        ],
        (lambda: bucket(bounds=(0, 5, 4)), "never fall"),
        (lambda: bucket(bounds=(1, 5)), "bounds must start at 0"),
        (lambda: bucket(bounds=(0,)), "one more number than there are ranks"),
    ],
)
def test_bad_input_has_one_clear_error(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@quick
@given(param_lists(), worlds, policies)
def test_a_plan_by_columns_is_the_plan_of_its_tuples(specs, world_size, policy):
    plan = pack(
        specs := small(specs),
        world_size,
        policy=policy,
        order=range(len(specs)),
        bucket_cap_mb=1000 / MIB,
    )
    plain = BucketPlan(
        specs, world_size, tuple(replace(b, slots=tuple(b.slots)) for b in plan.buckets)
    )
    for other in (plain, BucketPlan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert (
            other == plan
            and plan == other
            and hash(other) == hash(plan)
            and other.mark == plan.mark
            and other.digest == plan.digest
        )
    assert (
        plan.params == tuple(specs) == tuple(plan.params)
        and plan.params[1:] == tuple(specs)[1:]
        and repr(plan.params) == repr(tuple(specs))
    )
    assert (
        plan.mark
        != pack(
            specs, world_size + 1, policy=policy, order=range(len(specs)), bucket_cap_mb=1000 / MIB
        ).mark
    )


def test_a_column_is_read_as_a_tuple():
    slots = (
        pack([ParamSpec(f"p{i}", (i,)) for i in range(1, 5)], 2, order=range(4)).buckets[0].slots
    )
    assert (
        slots[-1] == slots[3] == Slot(3, 0, 4, 6)
        and slots[::2] == (slots[0], slots[2])
        and next(reversed(slots)) == slots[3]
    )
    assert slots != (*slots, slots[0]) and slots != [*slots] and slots != 4
    with pytest.raises(IndexError):
        slots[4]
    with pytest.raises(ValueError, match="must be text"):
        ParamTable(["w", 3], (ParamSpec("w", (2,)),), [0, 0])
