"""Schedules: what holds for any number of buckets, and every error."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.plan.packing import pack
from zero_nb.plan.schedule import (
    METHODS,
    OPS,
    Event,
    Schedule,
    clock,
    make_schedule,
    order,
    peak,
    play,
)
from zero_nb.plan.specs import ParamSpec

quick = settings(max_examples=100, deadline=None)
any_schedule = st.builds(
    make_schedule,
    st.integers(0, 12),
    st.sampled_from(list(METHODS)),
    lag=st.integers(0, 5),
    hidden=st.booleans(),
)


@quick
@given(any_schedule)
def test_schedules_are_read_back_from_their_text(schedule):
    assert Schedule.parse(str(schedule)) == schedule and hash(
        Schedule.parse(str(schedule))
    ) == hash(schedule)


@quick
@given(st.integers(0, 12), st.sampled_from(list(METHODS)), st.integers(0, 5), st.booleans())
def test_every_bucket_lives_once_and_in_order(count, method, lag, hidden):
    events = make_schedule(count, method, lag=lag, hidden=hidden).events
    how = METHODS[method]
    life = [
        "GRAD",
        how.reduce,
        "STEP",
        *["FREE"] * (how.frees == "stepped"),
        *["AG"] * how.gather,
        "FWD",
    ]
    for i in range(count):
        assert [e.op for e in events if e.bucket == i] == life
    assert [e.bucket for e in events if e.op == how.reduce] == list(range(count))
    assert sum(e.op == "SYNC" for e in events) == (not hidden)
    if not how.interleaved:
        assert all(e.phase == "step" for e in events if e.op == "STEP")


@quick
@given(
    st.integers(1, 12),
    st.sampled_from(list(METHODS)),
    st.integers(0, 5),
    st.booleans(),
    st.lists(st.floats(0, 5), min_size=6, max_size=6),
)
def test_play_waits_for_what_it_must(count, method, lag, hidden, prices):
    cost = dict(zip(("GRAD", "FWD", "STEP", "AR", "RS", "AG"), prices, strict=True))
    bars = play(make_schedule(count, method, lag=lag, hidden=hidden), lambda e: cost[e.op])
    at = {(b.event.op, b.event.bucket): b for b in bars}
    for lane in (True, False):
        line = [b for b in bars if b.event.network is lane]
        assert all(a.stop <= b.start for a, b in pairwise(line))
    for i in range(count):
        assert at["STEP", i].start >= at[METHODS[method].reduce, i].stop >= at["GRAD", i].stop
        if METHODS[method].gather:
            assert (
                at["FWD", i].start >= at["AG", i].stop and at["AG", i].start >= at["STEP", i].stop
            )
    total = sum(b.stop - b.start for b in bars)
    end = max(b.stop for b in bars)
    for lane in (True, False):
        busy = sum(b.stop - b.start for b in bars if b.event.network is lane)
        assert busy <= end + 1e-9 <= total + 2e-9


@quick
@given(
    st.integers(0, 12),
    st.sampled_from(list(METHODS)),
    st.integers(0, 5),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_order_and_the_clock_say_what_schedules_and_play_say(count, method, lag, hidden, seed):
    rng = random.Random(seed)
    costs = {op: [rng.random() for _ in range(count)] for op in OPS} | {
        "FREE": [0.0] * count,
        "SYNC": [0.0],
    }
    schedule = make_schedule(count, method, lag=lag, hidden=hidden)
    steps = [
        step for steps in order(count, method, lag=lag, hidden=hidden).values() for step in steps
    ]
    assert steps == [(e.op, e.bucket) for e in schedule.events]
    assert [*clock(steps, costs)] == [
        bar[1:] for bar in play(schedule, lambda e: costs[e.op][e.bucket])
    ]
    assert peak(steps, range(1, count + 1)) == peak(schedule, range(1, count + 1))


@quick
@given(st.lists(st.integers(1, 100), min_size=1, max_size=10), st.integers(0, 4))
def test_freeing_keeps_lag_plus_one_buckets(sizes, lag):
    found = peak(make_schedule(len(sizes), "zero2-interleaved", lag=lag), sizes)
    windows = [sum(sizes[i : i + lag + 1]) for i in range(len(sizes))]
    assert found == max(windows)
    assert peak(make_schedule(len(sizes), "zero1-overlap, interleaved", lag=lag), sizes) == sum(
        sizes
    )


def test_a_plan_gives_the_number_of_buckets():
    plan = pack(
        [ParamSpec(f"p{i}", (512, 512)) for i in range(5)], 2, bucket_cap_mb=1, first_bucket_mb=1
    )
    assert make_schedule(plan, "zero1-overlap") == make_schedule(len(plan.buckets), "zero1-overlap")


def test_hidden_gathers_are_read_in_the_order_in_which_they_arrive():
    events = make_schedule(4, "zero1-overlap", hidden=True).events
    assert (
        [e.bucket for e in events if e.op == "AG"]
        == [e.bucket for e in events if e.op == "FWD"]
        == [3, 2, 1, 0]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: make_schedule(2, "zero1-overlp"),
            "unknown method 'zero1-overlp', did you mean 'zero1-overlap'",
        ),
        (
            lambda: make_schedule(2, "qqq"),
            "choose one of 'ddp', 'zero1', 'zero1-overlap', 'zero1-overlap, interleaved', 'zero2',",
        ),
        (
            lambda: make_schedule(2, "zero2-interleaved", lag=-1),
            "must be integers >= 0, got -1 and 2",
        ),
        (lambda: make_schedule(-1), "must be integers >= 0, got 1 and -1"),
        (
            lambda: make_schedule(2, "zero2-interleaved", lag=1.5),
            "must be integers >= 0, got 1.5 and 2",
        ),
        (lambda: order(True), "must be integers >= 0, got 1 and True"),
        (
            lambda: play(make_schedule(2), lambda e: -0.1 if e.op == "STEP" else 1.0),
            "STEP of bucket 0 must take seconds >= 0, got -0.1",
        ),
        (
            lambda: play(make_schedule(2), lambda e: math.nan if e.op == "AG" else 1.0),
            "AG of bucket 0 must take seconds >= 0, got nan",
        ),
        (lambda: play(make_schedule(2), lambda e: math.inf), "must take seconds >= 0, got inf"),
        (lambda: Schedule.parse("backward: 0:RS"), "0:RS comes after nothing"),
        (lambda: Schedule.parse("backward: 0:GRAD 0:STEP"), "0:STEP comes after GRAD"),
        (lambda: Schedule.parse("backward: 0:GRAD 0:RS 0:AG"), "0:AG comes after REDUCE"),
        (lambda: Schedule.parse("backward: 0:GRAD 0:RS 0:FREE"), "0:FREE comes after REDUCE"),
        (lambda: Schedule.parse("backward: 0:GRAD 0:RS 0:AR"), "0:AR comes after REDUCE"),
        (lambda: Schedule.parse("backward: 0:GRAD 0:GRAD"), "each at most once"),
        (lambda: Schedule((Event("step", "WAIT", 0),)), "unknown operation 'WAIT'"),
    ],
)
def test_bad_input_has_one_clear_error(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_without_gathers_nothing_is_hidden():
    plain, hidden = (make_schedule(4, "ddp", hidden=hidden).events for hidden in (False, True))
    assert hidden == tuple(event for event in plain if event.op != "SYNC")
