"""Properties of where optimizer state is kept, and of what moves when a plan changes; no process is needed."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import torch
from common.param_lists import by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.optim.load_state import freeze_state
from zero_nb.optim.state_entry import StateEntry
from zero_nb.optim.state_message import pack_entries, unpack_entries
from zero_nb.optim.state_plan import StatePlan, stepped_by
from zero_nb.plan.balancing import balanced
from zero_nb.plan.packing import pack
from zero_nb.plan.policies import even
from zero_nb.plan.shards import Span
from zero_nb.plan.span_moves import moves, moves_of
from zero_nb.plan.specs import ParamSpec

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=6)
POLICIES = st.sampled_from([even, balanced, by_row])


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
        unsharded=False,
        merges=[policy is not balanced] * len(sizes),
        master_dtype=None,
        group=SimpleNamespace(size=ranks, group_rank=group_rank),
    )


def elements(found):
    """Give the single elements of moves, by source, destination and parameter."""
    out = defaultdict(set)
    for move in found:
        _, start, stop = move.span
        assert not out[move.source, move.destination, move.span.param] & set(range(start, stop))
        out[move.source, move.destination, move.span.param] |= set(range(start, stop))
    return dict(out)


def moved(old, new):
    """Check that senders and receivers agree and that every span is moved whole; the moves of all ranks."""
    mine = [moves_of(rank, old, new) for rank in range(old.world_size)]
    sent = [move for found in mine for moves in found.sends.values() for move in moves]
    received = [move for found in mine for moves in found.receives.values() for move in moves]
    assert elements(sent) == elements(received)
    for rank, found in enumerate(mine):
        assert list(found.sends) == list(old.spans(rank))
        assert list(found.receives) == list(new.spans(rank))
    return sent


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=SIZES, ranks=st.integers(1, 5))
def test_state_goes_where_the_plans_say(data, sizes, ranks):
    caps = st.sampled_from([0.00005, 0.0002, 1.0])  # MiB: 13, 52 elements, all
    old, new = (shard_of(sizes, (), ranks, data.draw(POLICIES), data.draw(caps)) for _ in range(2))
    found = moved(StatePlan(ranks, [old], {}), StatePlan(ranks, [new], {}))
    planned = moves(old.plan.shard_plan, new.plan.shard_plan)
    travels = [move for move in found if move.source != move.destination]
    assert elements(travels) == elements(planned)
    assert sum(move.numel for move in found) == sum(sizes), "each element once"


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=SIZES, ranks=st.integers(1, 5))
def test_state_is_kept_while_a_parameter_is_frozen_and_moves_when_it_thaws(data, sizes, ranks):
    """Train all, freeze some, freeze others: the state of each element is in one place throughout."""
    frozen = st.sets(st.integers(0, len(sizes) - 1))
    shards = [
        shard_of(sizes, stage, ranks, data.draw(POLICIES), data.draw(st.sampled_from([0.0001, 1])))
        for stage in ((), data.draw(frozen), data.draw(frozen))
    ]
    everything = {(i, e) for i, size in enumerate(sizes) for e in range(size)}
    before = StatePlan(ranks, shards[:1], {})
    for new in shards[1:]:
        found = moved(before, StatePlan(ranks, [new], {}))
        assert {move.span.param for move in found} == {i for i in stepped_by(new) if sizes[i]}
        before = StatePlan(ranks, [new], before.places_without(stepped_by(new)))
        held = [span for rank in range(ranks) for span in before.spans(rank)]
        single = [(index, e) for index, start, stop in held for e in range(start, stop)]
        assert len(single) == len(everything) and set(single) == everything


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=SIZES, ranks=st.integers(1, 5))
def test_several_shards_become_one(data, sizes, ranks):
    cut = data.draw(st.integers(0, len(sizes)))
    policy = data.draw(POLICIES)
    parts = [shard_of(part, (), ranks, policy, 0.0001) for part in (sizes[:cut], sizes[cut:])]
    parts[1].first = cut
    one = shard_of(sizes, (), ranks, data.draw(POLICIES), 1.0)
    found = moved(StatePlan(ranks, parts, {}), StatePlan(ranks, [one], {}))
    assert sum(move.numel for move in found) == sum(sizes), "each element once"


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
            for place in mine.places[index]
            for owner, (_, start, stop) in place.owners_of(Span(index, 0, sizes[index]))
            if owner == rank
        ]
        for entry in mine.entries:
            [(index, start, stop)] = entry.spans
            values = entry.values["exp_avg"]
            whole = state[index]["exp_avg"]
            assert torch.equal(values, whole if entry.whole else whole[start:stop])


DTYPES = st.sampled_from(
    (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    )
)


class Numbers(NamedTuple):
    """A tensor that is not made yet."""

    dtype: torch.dtype
    values: list[int]
    shape: tuple[int, ...]
    turned: bool = False

    def made(self):
        made = torch.tensor(self.values, dtype=torch.float32).to(self.dtype).view(self.shape)
        return made.t() if self.turned else made


@st.composite
def numbers(draw, *shape, turned=False):
    size = math.prod(shape)
    values = draw(st.lists(st.integers(0, 100), min_size=size, max_size=size))
    return Numbers(draw(DTYPES), values, shape, turned)


@st.composite
def rows(draw):
    """Say what is in a row of the table, of spans or of a whole parameter, or of none."""
    kind = draw(st.sampled_from(["part", "whole", "common"]))
    values, spans = {}, []
    if kind == "part":
        lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        spans = [Span(i, 3, 3 + length) for i, length in enumerate(lengths)]
        keys = draw(st.sets(st.sampled_from(["exp_avg", "exp_avg_sq", 7])))
        values = {key: draw(numbers(sum(lengths))) for key in keys}
    if kind == "whole":
        spans = [Span(5, 0, 6)]
        values = {"momentum": draw(numbers(2, 3)), "row": draw(numbers(3))}
        values["turned"] = draw(numbers(3, 2, turned=True))
        values["nested"] = {"parts": [draw(numbers(2))]}
    values |= draw(
        st.fixed_dictionaries(
            {}, optional={"step": numbers(), "name": st.text(), "none": st.none()}
        )
    )
    return spans, kind != "part", values


def with_tensors(value):
    if isinstance(value, Numbers):
        return value.made()
    if isinstance(value, dict):
        return {key: with_tensors(v) for key, v in value.items()}
    return [with_tensors(v) for v in value] if isinstance(value, list) else value


def told(value):
    """Give a value in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), [str(v) for v in value.flatten().tolist()]
    if isinstance(value, dict):
        return [(key, told(v)) for key, v in value.items()]
    return [told(v) for v in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(given_rows=st.lists(rows(), max_size=6))
def test_rows_travel_without_loss(given_rows):
    entries = [StateEntry(spans, whole, with_tensors(v)) for spans, whole, v in given_rows]
    message = pack_entries(entries)
    want = [entry for entry in entries if entry.values]
    assert bool(len(message)) == bool(want)
    got = [*unpack_entries(message)]
    assert [(e.spans, e.whole, told(e.values)) for e in got] == [
        (e.spans, e.whole, told(e.values)) for e in want
    ]


def test_what_is_no_view_of_the_message_has_memory_of_its_own():
    """A checkpoint of a view would hold the whole message."""
    entry = StateEntry(
        [Span(0, 0, 4)], True, {"momentum": torch.ones(2, 2), "step": torch.ones(())}
    )
    message = pack_entries([entry, StateEntry([Span(1, 0, 999)], False, {"m": torch.ones(999)})])
    values = next(unpack_entries(message)).values
    assert {k: v.untyped_storage().nbytes() for k, v in values.items()} == {
        "momentum": 16,
        "step": 4,
    }


def test_a_message_is_hardly_larger_than_its_elements():
    """However many parameters there are: each costs a few numbers."""
    entries = [
        StateEntry([Span(i, 0, 64)], False, {"m": torch.ones(64), "step": torch.tensor(1.0)})
        for i in range(1000)
    ]
    assert len(pack_entries(entries)) < 1000 * (65 * 4 + 5 * 8) + 4096
