"""Join: what the review found about a block's requests to the store, each under its own name."""

import os

import pytest
import torch
import torch.distributed as dist
from common import caught_error, free_port
from common.join_participants import Counted, Participant, take_stores_of_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.comm import store as store_module
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.join import event_feed, event_log
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- M7 / H6 ----


def asked_in_blocks(port, counts, norm, by, policy):
    """Train twice over a TCPStore; requests of this rank in each iteration, all and those for
    events, and the latter in the last block."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, n, rank == 0, wait_for_workers=False),
        rank=rank,
        world_size=n,
    )
    store = Counted(store_module._store(Group()))
    store_module._store = event_feed._store = event_log._store = lambda group: store
    model = DDP(nn.Sequential(nn.Linear(4, 4), *([nn.BatchNorm1d(4)] if norm else [])))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    per_block = []
    for _ in range(2):
        before = store.log["events"]
        with Join([model, optimizer], divide_by=by, policy=policy):
            per_iteration = []
            for _ in range(counts[rank]):
                start = store.requests, store.log["events"]
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                per_iteration.append((store.requests - start[0], store.log["events"] - start[1]))
        per_block.append(store.log["events"] - before)
    dist.barrier()
    return per_iteration, per_block[-1]


@pytest.mark.parametrize(
    ("by", "norm", "policy"),
    [
        ("world_size", False, "shadow"),
        ("samples", False, "shadow"),
        ("active", True, "shadow"),
        ("world_size", False, "raise"),
        ("samples", False, "stop"),
    ],
)
def test_M7_an_iteration_in_which_all_ranks_have_data_asks_nothing(by, norm, policy):
    for per_iteration, _ in run(2, asked_in_blocks, free_port(), (12, 12), norm, by, policy):
        assert per_iteration[:-1] == [(0, 0)] * 11  # in the last one the other rank may have left


def test_M7_only_one_rank_announces_and_only_if_a_rank_has_no_data():
    ranks = run(4, asked_in_blocks, free_port(), (40, 0, 40, 40), False, "world_size", "shadow")
    asked = [
        per_iteration[2:-1] for per_iteration, _ in ranks
    ]  # the first ones may come before the announcer is asked, the last after a rank has left
    announcer = max(
        range(4), key=lambda rank: len(asked[rank]) and sum(events for _, events in asked[rank])
    )
    assert all(
        each == [(0, 0)] * 37 for rank, each in enumerate(asked) if rank not in (1, announcer)
    )
    assert [events for _, events in asked[announcer]] == [
        2
    ] * 37  # the other requests are those of its thread, by time
    assert ranks[1][1] == 2 * 40 + 1  # it reads each event once, and the end


def in_a_tree(port, counts, fails):
    """Train on ranks that pass events on, each to one other."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, n, rank == 0, wait_for_workers=False),
        rank=rank,
        world_size=n,
    )
    event_feed.FAN_OUT = 1
    model = DDP(nn.Linear(2, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.module.weight.fill_(0.0)
    block, sources = Join([model, optimizer]), []

    def train():
        for _ in range(2):
            with block:
                for k in range(counts[rank]):
                    if fails and k == 2:
                        raise KeyError("mine")
                    model(torch.full((1, 2), 10.0**k)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            sources.append(type(block.session.log.feed.source).__name__)

    error = caught_error(train)
    return error, sources, model.module.weight[0, 0].item()


def test_M7_ranks_without_data_pass_events_on():
    ranks = run(4, in_a_tree, free_port(), (1, 5, 0, 0), False, timeout=40)
    assert all(error is None for error, *_ in ranks)
    for block in range(2):
        assert sorted(sources[block] for _, sources, _ in ranks) == ["EventStore"] + ["Relay"] * 3
    assert all(weight == -2 * (2 * 1 + 10 + 100 + 1000 + 10000) / 4 for _, _, weight in ranks)


def test_M7_errors_are_passed_on():
    ranks = run(4, in_a_tree, free_port(), (1, 5, 0, 0), True, timeout=40)
    assert ranks[1][0][0] == "KeyError" and all(
        "rank 1 left the Join block after 2 iterations: KeyError" in rank[0][1]
        for rank in (ranks[0], *ranks[2:])
    )


def many(monkeypatch, size, leave):
    """Drive a block of `size` ranks by hand; `leave`: the iteration in which each rank leaves.
    Requests by what they are for, and bytes at the end."""
    take_stores_of_groups(monkeypatch)
    store = dist.HashStore()
    ranks = [Participant(store, size, rank) for rank in range(size)]
    iterating, departing, following, heard = [], [], [], [0] * size
    for k in range(max(leave) + 1):
        for rank in ranks:
            if leave[rank.log.group_rank] == k:
                rank.requests()
                rank.log.depart()
                departing.append(rank.requests())
        for rank in ranks:  # what its thread does when it is woken
            if rank.log.has_data and rank.log.store.see(f"wake/{rank.log.group_rank}") is not None:
                rank.log.store.remove(f"wake/{rank.log.group_rank}")
                rank.log.answer()
            rank.requests()
        for rank in ranks:
            if leave[rank.log.group_rank] <= k:
                continue
            for what in ("hook", "step"):
                rank.log.append(0, what, k, {})
        iterating.append([rank.requests() for rank in ranks])
        for rank in ranks:
            if leave[rank.log.group_rank] > k:
                continue
            while rank.log.number < 2 * min(k + 1, max(leave)):
                assert (
                    rank.log.next().number
                    == heard[rank.log.group_rank] + 2 * leave[rank.log.group_rank]
                )
                heard[rank.log.group_rank] += 1
            following.append(rank.requests())
    for rank in ranks:
        assert rank.log.next() is None
    ends = sum(rank.counted.log["bytes"] for rank in ranks)
    for rank in ranks:
        rank.log.clear()
    assert store.num_keys() <= 1, "a store of its own counts as one key"
    return iterating, departing, following, ends


def test_M7_requests_do_not_grow_with_the_number_of_ranks(monkeypatch):
    """One in eight ranks has no data after two iterations, and then one after the other leaves:
    counted at 8, 64 and 1,024 ranks."""
    seen = {}
    for size in (8, 64, 1024):
        leave = [2 if rank % 8 == 3 else 6 for rank in range(size)]
        iterating, departing, following, _ = many(monkeypatch, size, leave)
        assert all(sum(each) == 0 for each in iterating[:2])  # nobody has left
        assert all(
            sorted(each)[-2:] == [0, 2] for each in iterating[2:6]
        )  # one rank announces two events, in two requests
        seen[size] = set(following), sorted(set(departing))[:2], sum(departing) / size
    assert len({str(each[0]) for each in seen.values()}) == 1 and max(seen[1024][0]) <= 2
    assert all(mean < 16 for *_, mean in seen.values()), seen


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_M7_ranks_that_leave_one_after_the_other(monkeypatch, order):
    """Each announcer leaves in turn, which is where finding the next one would cost most."""
    for size in (8, 64, 256):
        leave = list(range(size)) if order == "rising" else list(reversed(range(size)))
        iterating, departing, following, _ = many(monkeypatch, size, leave)
        assert all(sum(each) <= 2 for each in iterating)
        assert sum(departing) <= 20 * size and max(following) <= 2


@pytest.mark.parametrize("moment", ["claim", "put", "add", "rank_with_data"])
def test_ranks_that_leave_at_the_same_time_read_what_the_other_did(monkeypatch, moment):
    """The last events of a rank need not wait for others; another rank leaves with fewer at any moment between."""
    take_stores_of_groups(monkeypatch)
    store = dist.HashStore()
    few, many = (Participant(store, 2, rank).log for rank in range(2))
    for log, count in ((few, 1), (many, 3)):
        for k in range(count):
            log.append(0, "step", k, {})
    there = few.election if moment == "rank_with_data" else few.store
    request = getattr(there, moment)

    def late(*args):
        setattr(there, moment, request)
        if moment == "claim":
            request(*args)
        many.depart()
        return request(*args)

    setattr(there, moment, late)
    few.depart()
    many.answer()
    assert few.store.see("event/3") is not None, "the end is behind the last event of all ranks"
    assert [few.next().number, few.next().number, few.next(), many.next()] == [1, 2, None, None]


def test_M7_the_end_of_a_block_moves_a_few_bytes_for_each_rank(monkeypatch):
    per_rank = [many(monkeypatch, size, [1] * size)[3] / size for size in (8, 64, 512)]
    assert max(per_rank) < 1.5 * min(per_rank) and max(per_rank) < 500, per_rank


def grows(counts):
    """Train in two blocks on a store that is a file; by how many bytes the second block has made it longer."""
    rank, store = dist.get_rank(), store_module._store(Group())
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    model = DDP(nn.Linear(2, 2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    for _ in range(2):
        dist.barrier()
        before = os.path.getsize(store.path)
        with Join([model, optimizer]):
            for _ in range(counts[rank]):
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()
        dist.barrier()
    return os.path.getsize(store.path) - before


def test_L10_a_store_that_is_a_file_grows_only_while_a_rank_has_no_data():
    short, long = (run(2, grows, (n, n))[0] for n in (20, 200))
    assert long < short + 1000 and long < 10_000
    assert run(2, grows, (197, 200))[0] < long + 3 * 2 * 500
