"""Properties of where optimizer state is kept, and of what moves when a plan changes; no process is needed."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.optim.state import find_owners, freeze_state, state_places
from zero_nb.plan.buckets import pack
from zero_nb.plan.sharder import ParamSpec, balanced, even, moves, runs

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=6)
POLICIES = st.sampled_from([even, balanced, runs])


def shard_of(sizes, frozen, ranks, policy, bucket_cap_mb, group_rank=0):
    """Give what of a shard tells where its state is."""
    params = [
        ParamSpec(f"p{i}", (size,), trainable=i not in frozen) for i, size in enumerate(sizes)
    ]
    plan = pack(
        params,
        ranks,
        policy=policy,
        bucket_cap_mb=bucket_cap_mb,
        cut=False,
        order=range(len(sizes)),
        align=4,
        pad=False,
    )
    return SimpleNamespace(
        plan=plan,
        params=[torch.zeros(size) for size in sizes],
        first=0,
        alone=False,
        merges=[policy is not balanced] * len(sizes),
        master_dtype=None,
        group=SimpleNamespace(size=ranks, group_rank=group_rank),
    )


def elements(triples):
    """Give the single elements of (source, destination, span) that change their rank."""
    found = defaultdict(set)
    for source, destination, index, start, stop in triples:
        if source != destination:
            found[source, destination, index] |= set(range(start, stop))
    return dict(found)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=SIZES, ranks=st.integers(1, 5))
def test_state_goes_where_the_plans_say(data, sizes, ranks):
    caps = st.sampled_from([0.00005, 0.0002, 1.0])  # MB: 13, 52 elements, all
    old, new = (shard_of(sizes, (), ranks, data.draw(POLICIES), data.draw(caps)) for _ in range(2))
    before, after = state_places(old), state_places(new)
    routed = [
        (source, destination, index, low, high)
        for index, size in enumerate(sizes)
        for source, start, stop, _ in find_owners(before[index], 0, size)
        for destination, low, high, _ in find_owners(after[index], start, stop)
    ]
    planned = [
        (move.source, move.destination, move.span.param, move.span.start, move.span.stop)
        for move in moves(old.plan.shard_plan, new.plan.shard_plan)
    ]
    assert elements(routed) == elements(planned)
    assert sum(high - low for *_, low, high in routed) == sum(sizes), "each element once"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=SIZES, ranks=st.integers(1, 5))
def test_all_ranks_know_where_frozen_state_is(data, sizes, ranks):
    frozen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    policy = data.draw(POLICIES)
    state = {i: {"exp_avg": torch.arange(float(n)), "step": 3} for i, n in enumerate(sizes)}
    kept = []
    for rank in range(ranks):
        shard = shard_of(sizes, frozen, ranks, policy, 1.0, rank)
        kept.append(freeze_state([shard], state))
    assert all(one.places == kept[0].places for one in kept)
    assert kept[0].places.keys() == frozen
    for rank, mine in enumerate(kept):
        held = [entry.spans[0] for entry in mine.entries if not entry.empty]
        assert held == [
            (index, start, stop)
            for index in sorted(frozen)
            for owner, start, stop, _ in find_owners(mine.places[index], 0, sizes[index])
            if owner == rank
        ]
        for entry in mine.entries:
            [(index, start, stop)] = entry.spans
            values = entry.values["exp_avg"]
            whole = state[index]["exp_avg"]
            assert torch.equal(values, whole if entry.whole else whole[start:stop])
