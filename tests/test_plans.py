"""Bad plans of every module, and random ones of every size."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.plan.balancing import balanced, mixed
from zero_nb.plan.bucket import Bucket, Slot
from zero_nb.plan.bucket_plan import BucketPlan
from zero_nb.plan.comparison import compare
from zero_nb.plan.estimates import estimate
from zero_nb.plan.filling import fill_like_ddp
from zero_nb.plan.fitting import fewest_ranks
from zero_nb.plan.packing import adopt, pack
from zero_nb.plan.policies import even, greedy
from zero_nb.plan.schedule import Schedule
from zero_nb.plan.shards import ShardPlan
from zero_nb.plan.span_moves import moves
from zero_nb.plan.specs import ParamSpec

two = (ParamSpec("weight", (7,)), ParamSpec("bias", (2,)))


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 100, 10_000, 100_000]),
    st.sampled_from([1, 3, 257, 4096]),
    st.sampled_from([even, greedy, balanced]),
)
def test_long_lists_of_parameters(seed, count, world_size, policy):
    rng = random.Random(seed)
    specs = [
        ParamSpec(
            f"p{i}",
            (rng.choice((0, 1, 7, 64, 4096, rng.randrange(10**6))),),
            trainable=rng.random() < 0.9,
        )
        for i in range(count)
    ]
    plan = policy(specs, world_size)
    total, largest = (
        sum(p.numel for p in specs if p.trainable),
        max((p.numel for p in specs if p.trainable), default=0),
    )
    assert sum(plan.loads) == total and max(plan.loads) <= total / world_size + (
        1 if policy is even else largest
    )
    other = even(specs, max(1, world_size // 2))
    stay = sum(m.numel for m in moves(plan, other))
    assert stay <= total and moves(other, other) == ()
    if count <= 10_000:
        assert ShardPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(two, 2, align=0), "align must be an integer >= 1"),
        (lambda: pack(two, 2, align=-4), "align must be an integer >= 1"),
        (
            lambda: BucketPlan(
                two, 1, (Bucket("float32", "cpu", None, (Slot(-1, 0, 2, 0),), (0, 2)),)
            ),
            "needs a parameter from 0 to 1",
        ),
        (
            lambda: adopt(two, 2, [[0, 1, 7]]),
            "buckets must hold indices of trainable parameters, below 2, got [7]",
        ),
        (lambda: adopt(two, 2, [[-1, 0]]), "got [-1]"),
        (
            lambda: adopt(
                (*two, ParamSpec("f", (2,), trainable=False)), 2, [[0, 1, 2]], policy="greedy"
            ),
            "got [2]",
        ),
        (lambda: BucketPlan.from_fields({"nonsense": [""]}), "begin with param, ranks and bucket"),
        (
            lambda: BucketPlan.from_fields({"ranks": ["2"], "bucket": ["what"]}),
            "a bucket is written as",
        ),
        (lambda: Schedule.parse("backward"), "a line of a schedule is written as"),
        (lambda: Schedule.parse("0:GRAD 0:RS"), "a line of a schedule is written as"),
        (
            lambda: estimate(two, world_size=8, replicas=0),
            "replicas must divide world_size, got 0 and 8",
        ),
        (
            lambda: estimate(two, __import__("torch").optim.LBFGS),
            "LBFGS cannot step a matrix by itself",
        ),
    ],
)
def test_findings(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([ParamSpec("w", (2,)), torch.zeros(3)], "a Tensor at index 1"),
        (None, "NoneType"),
        (torch.nn.Linear(2, 2), "Linear"),
    ],
)
@pytest.mark.parametrize("plan", [even, greedy, balanced, mixed, pack, fill_like_ddp])
def test_what_are_no_specs_is_named(plan, given, named):
    ranks = () if plan is fill_like_ddp else (2,)
    with pytest.raises(TypeError, match=f"must hold a ParamSpec for each parameter, got {named}"):
        plan(given, *ranks)


def test_parameters_may_come_one_by_one():
    assert pack(iter(two), 2) == pack(two, 2)


def test_a_model_may_be_read_once_by_what_makes_several_estimates():
    specs = [ParamSpec(f"w{i}", (1000, 1000)) for i in range(4)]
    assert compare(iter(specs)) == compare(specs)
    assert fewest_ranks(iter(specs), memory="40MB") == fewest_ranks(specs, memory="40MB") == 5


@pytest.mark.parametrize("methods", ["zero1", 3])
def test_methods_that_are_no_list_are_one_clear_error(methods):
    with pytest.raises(TypeError, match="methods must be a list of methods"):
        compare("gpt2", "adamw", 8, methods)


def test_an_estimate_that_was_not_made_is_named():
    found = compare("gpt2", "adamw", 8, ["ddp", "zero1"])
    assert found["zero1"].method == "zero1"
    with pytest.raises(KeyError, match="'zero2' was not compared; take one of ddp, zero1"):
        found["zero2"]
