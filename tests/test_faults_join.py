"""Join: what the review found, each under its own name."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught_error, free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, lr_scheduler

from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm import agreement, group_store
from zero_nb.comm import store as store_module
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.join import event_feed, event_log
from zero_nb.join.event_feed import EventFeed, EventStore
from zero_nb.join.event_log import EventLog
from zero_nb.join.failure_detection import explain_wait
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- gradients after a block ----


def two_blocks(zero_first, to_none):
    """Two blocks with the loop that everybody writes; the first gradient of the second block, and
    what each block leaves in .grad."""
    rank = dist.get_rank()
    model = DDP(nn.Linear(5, 5, bias=False))
    optimizer = SGD(model.parameters(), lr=0.0)
    first, left = [], []
    for _ in range(2):
        gradients = []
        with Join([model, optimizer]):
            for _ in range((3, 5)[rank]):
                if zero_first:
                    optimizer.zero_grad(set_to_none=to_none)
                model(torch.full((1, 5), 50.0)).sum().backward()
                gradients.append(model.module.weight.grad[0, 0].item())
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad(set_to_none=to_none)
        first.append(gradients[0])
        grad = model.module.weight.grad
        left.append(None if grad is None else grad[0, 0].item())
    return first, left


@pytest.mark.parametrize(
    ("zero_first", "to_none", "left"),
    [(False, True, None), (False, False, 0.0), (True, True, 25.0)],
)
def test_join_leaves_the_gradient_that_the_loop_of_the_last_joiner_leaves(
    zero_first, to_none, left
):
    for first, after in run(2, two_blocks, zero_first, to_none):
        assert first == [50.0, 50.0] and after == [left] * 2


def adds_up(counts, no_sync):
    """Add up gradients over three iterations, in synchronised backwards or without, over the end of a block."""
    rank, seen = dist.get_rank(), []
    model = DDP(nn.Linear(2, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        with Join([model, optimizer]):
            for k in range(counts[rank]):
                x = torch.full((1, 2), 10.0**k)
                if no_sync and (k + 1) % 3:
                    with model.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
    model(torch.zeros(1, 2)).sum().backward()
    seen.append(model.module.weight.grad[0, 0].item())
    return seen


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (2, 5), (0, 2)], ids=str)
def test_gradients_that_add_up_are_those_of_one_process(counts, no_sync):
    """Each batch counts for half of its value, on which rank and in which block it may be."""
    wanted = 2 * sum(10.0**k / 2 for n in counts for k in range(n))
    assert run(2, adds_up, counts, no_sync) == [[wanted]] * 2


def discarded(how):
    """One rank runs out of data in the middle of an accumulation that the others then throw away."""
    rank, net = dist.get_rank(), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.0)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=1.0)
    if how == "parallel":
        model, joinable = net, data_parallel(net, optimizer)
    else:
        model = joinable = DDP(net)
    if how == "overlap":
        overlap(model, optimizer)
    with Join([joinable, optimizer]):
        for k in range((1, 3)[rank]):
            if k == 1:
                optimizer.zero_grad()  # as after gradients that are not finite
            if k < 2:
                with joinable.no_sync():
                    model(torch.full((1, 2), 10.0**k)).sum().backward()
            else:
                model(torch.full((1, 2), 10.0**k)).sum().backward()
                optimizer.step()
    return net.weight[0, 0].item()


@pytest.mark.parametrize("how", ["ddp", "overlap", "parallel"])
def test_gradients_that_others_discard_are_discarded(how):
    assert run(2, discarded, how) == [-55.0] * 2


class Wrapped:
    """An output in which tensors are not found, so that its backward is not heard there."""

    def __init__(self, value):
        self.value = value


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return Wrapped(self.layer(x))


def untraced():
    rank, model = dist.get_rank(), DDP(Hidden())
    optimizer = SGD(model.parameters(), lr=0.0)
    gradients = []
    for _ in range(2):
        with Join([model, optimizer]):
            for _ in range((1, 3)[rank]):
                out = model(torch.full((1, 2), 50.0))
                optimizer.zero_grad()
                out.value.sum().backward()
                gradients.append(model.module.layer.weight.grad[0, 0].item())
                optimizer.step()
    return gradients


def test_zero_grad_between_forward_and_a_backward_that_the_output_does_not_tell_of():
    assert run(2, untraced) == [[50.0] * 2, [50.0, 25.0, 25.0] * 2]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))

    def forward(self, x, which):
        return self.layers[which](x)


def forgets():
    """Use a layer under no_sync on a rank that then runs out of data: its next backward must not
    say that it was used."""
    rank, model = dist.get_rank(), DDP(Branches(), find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]):
        for k in range((1, 2)[rank]):
            if k == 0:
                with model.no_sync():
                    model(torch.ones(1, 2), 0).sum().backward()
            else:
                model(torch.ones(1, 2), 0).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    model(torch.ones(1, 2), 1).sum().backward()
    return [layer.weight.grad is not None for layer in model.module.layers]


def test_a_block_leaves_no_word_of_parameters_that_were_used():
    assert run(2, forgets) == [[False, True]] * 2


def entered_again():
    """Enter a block again whose backward has failed on all ranks."""
    rank, model = dist.get_rank(), DDP(nn.Linear(2, 1, bias=False), find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.0)
    block = Join([model, optimizer])

    def bad(gradient):
        raise KeyError("mine")

    def fails():
        with block:
            out = model(torch.ones(1, 2))
            out.register_hook(bad)
            out.sum().backward()

    error = caught_error(fails)
    model.reducer._reset_state()  # torch's own way out of a backward that failed
    optimizer.zero_grad()
    with block:
        for _ in range((1, 3)[rank]):
            model(torch.full((1, 2), 50.0)).sum().backward()
            left = model.module.weight.grad[0, 0].item()
            optimizer.step()
            optimizer.zero_grad()
    return (
        error[0],
        left,
        block.attendance.batches,
        model._join_config.enable,
        len(model._forward_hooks),
    )


def test_a_block_may_be_entered_again_after_an_error():
    ranks = run(2, entered_again, timeout=40)
    assert [rank[0] for rank in ranks] == ["KeyError"] * 2 and [rank[1] for rank in ranks] == [
        50.0,
        25.0,
    ]
    assert all(rank[2:] == ((1, 3), False, 0) for rank in ranks)


def sends_statistics(counts):
    """End a block in the middle of an accumulation on some ranks; what all ranks send before the
    next forward is the same."""
    rank, net = dist.get_rank(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    zero = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    handle = data_parallel(net, zero)
    with Join([handle]):
        for k in range(counts[rank]):
            with nullcontext() if k % 2 else handle.no_sync():
                net(torch.randn(3, 2)).sum().backward()
    for _ in range(2):
        net(torch.randn(3, 2)).sum().backward()
    return handle.buffers.due


@pytest.mark.parametrize("counts", [(1, 4), (3, 2)], ids=str)
def test_statistics_are_sent_after_a_block_that_ended_in_the_middle_of_an_accumulation(counts):
    assert run(2, sends_statistics, counts, timeout=40) == [True] * 2


def writes(kind, how, counts):
    """Change gradients in a way that leaves no version behind."""
    rank, net = dist.get_rank(), nn.Linear(3, 2)
    model = DDP(net)
    made = {
        "zero": lambda: ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1),
        "fused": lambda: AdamW(net.parameters(), fused=True),
    }
    optimizer = made.get(kind, lambda: SGD(net.parameters(), lr=0.1))()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scaler")
    clip = (
        {"before_step": lambda optimizer: nn.utils.clip_grad_norm_(net.parameters(), 1.0)}
        if how == "clipping"
        else {}
    )

    def train():
        with Join([model, optimizer], policy="stop" if how == "stopped" else None, **clip):
            for _ in range(counts[rank]):
                scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
                if how in ("clamp", "clipping", "stopped"):
                    for p in net.parameters():
                        p.grad.data.clamp_(-0.01, 0.01)
                scaler.step(optimizer)
                scaler.update()
                if how == "zero":
                    for p in net.parameters():
                        p.grad.data.zero_()
                else:
                    optimizer.zero_grad()

    return caught_error(train)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("plain", "scaler"),
        ("fused", "scaler"),
        ("zero", "scaler"),
        ("plain", "clamp"),
        ("zero", "zero"),
        ("zero", "clipping"),
    ],
)
@pytest.mark.filterwarnings("ignore:gradients change")
def test_gradients_that_are_written_without_a_version_are_an_error(kind, how):
    for error in run(2, writes, kind, how, (2, 5)):
        assert error and "gradients were changed between" in error[1], error


def test_gradients_may_be_written_where_no_rank_goes_on_without_data():
    assert (
        run(2, writes, "plain", "clamp", (3, 3))
        == run(2, writes, "plain", "stopped", (2, 5))
        == [None] * 2
    )


# ---- M7 / H6: what a block asks of the store ----


class Counted:
    """A store that counts requests and bytes, also those of its connections."""

    def __init__(self, store, log=None):
        self.store, self.log = store, Counter() if log is None else log

    def clone(self):
        return Counted(self.store.clone(), self.log)

    def __getattr__(self, name):
        method = getattr(self.store, name)
        if name not in (
            "set",
            "get",
            "check",
            "add",
            "compare_set",
            "delete_key",
            "wait",
            "multi_get",
            "multi_set",
        ):
            return method

        def counted(*args):
            out = method(*args)
            self.log[name] += 1
            self.log["events"] += "/event/" in str(args[0])
            self.log["bytes"] += sum(
                len(value) for value in (*args[1:], out) if isinstance(value, (str, bytes))
            )
            return out

        return counted

    @property
    def requests(self):
        return sum(count for name, count in self.log.items() if name not in ("events", "bytes"))


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


class Participant:
    """A rank that is driven in this process, with its own log on a store of all."""

    def __init__(self, store, size, rank):
        self.counted = Counted(store)
        self.group = SimpleNamespace(
            size=size,
            group_rank=rank,
            global_rank=rank,
            ranks=range(size),
            store=self.counted,
            process_group=None,
            _wire=SimpleNamespace(turn=0, met=True, life=""),
            _state=SimpleNamespace(ended=""),
        )
        self.log = EventLog(EventStore(self.group, "many"))
        self.asked = 0

    def requests(self):
        """Count requests since the last call."""
        now, before = self.counted.requests, self.asked
        self.asked = now
        return now - before


def many(monkeypatch, size, leave):
    """Drive a block of `size` ranks by hand; `leave`: the iteration in which each rank leaves.
    Requests by what they are for, and bytes at the end."""
    for module in (store_module, event_feed, event_log):
        monkeypatch.setattr(module, "_store", lambda group: group.store)
    for module in (agreement, group_store):
        monkeypatch.setattr(module, "_has_no_peers", lambda group: False)
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
    for module in (store_module, event_feed, event_log):
        monkeypatch.setattr(module, "_store", lambda group: group.store)
    for module in (agreement, group_store):
        monkeypatch.setattr(module, "_has_no_peers", lambda group: False)
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


# ---- notes that no rank has written ----


class Alone(Participant):
    """One of four ranks, on a store that others have written to."""

    def __init__(self, monkeypatch):
        for module in (store_module, event_feed, event_log):
            monkeypatch.setattr(module, "_store", lambda group: group.store)
        for module in (agreement, group_store):
            monkeypatch.setattr(module, "_has_no_peers", lambda group: False)
        super().__init__(dist.HashStore(), 4, 2)


READERS = {
    "event/0": EventLog.next,
    "announcer": EventLog.answer,
    "most": EventLog.depart,
    "oldest": explain_wait,
    "relay/0": lambda log: log.feed.join_tree(4, 0),
}
GOOD = {
    "event/0": [0, 0, "step", 0, {}],
    "announcer": [1, 0],
    "most": [1, 0],
    "oldest": [0],
    "relay/0": [0, ""],
}
WRONG = [
    "x",
    "7",
    "{}",
    "null",
    "[]",
    '["a", "b"]',
    "[true, 1]",
    "[1, 2, 3, 4, 5, 6]",
    "[[",
    b"\xff\xfe",
]


@pytest.mark.parametrize("key", READERS)
def test_a_note_that_no_rank_has_written_is_named(monkeypatch, key):
    for wrong in WRONG:
        rank = Alone(monkeypatch)
        rank.log.feed.waiting_since = time.monotonic() - 2
        rank.counted.store.set(rank.log.store.full_key(key), wrong)
        with pytest.raises(
            RuntimeError, match=f"rank 2 cannot go on with the note '{key}' of its Join block"
        ):
            READERS[key](rank.log)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("event/0", [1, 0, "step", 0, {}]),
        ("event/0", [0, -2, "step", 0, {}]),
        ("event/0", [0, 0, "backward", 0, {}]),
        ("event/0", [0, 0, "forward", 0, {"ranks": 1, "rebuild": True}]),
        ("announcer", [4, 0]),
        ("announcer", [-1, 0]),
        ("announcer", [0, -1]),
        ("most", [7, 0]),
    ],
    ids=str,
)
def test_values_that_no_rank_writes_are_named(monkeypatch, key, wrong):
    rank = Alone(monkeypatch)
    rank.log.store.put(key, json.dumps(wrong))
    with pytest.raises(RuntimeError, match=f"rank 2 cannot go on with the note '{key}'"):
        READERS[key](rank.log)


def test_what_no_rank_has_said_is_not_an_error_of_the_reader(monkeypatch):
    rank = Alone(monkeypatch)
    for wrong in WRONG:
        rank.counted.store.set(rank.log.store.full_key("failed"), wrong)
        assert "rank 2 cannot go on with the note 'failed'" in rank.log.failure()


def damages(key, wrong, late=0):
    """Write to the board of a block that runs, as a foreign program might. `late`: how many
    interruptions of each rank come after the event; the rank that wrote then announces none."""
    rank, model = dist.get_rank(), DDP(nn.Linear(2, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    block = Join([model, optimizer])
    missed = []

    def interrupt(number, said):
        missed.append(number)
        if len(missed) > late:
            EventFeed.interrupt(block.session.log.feed, number, said)

    def train():
        with block:
            block.session.log.feed.interrupt = interrupt
            for k in range((1, 100_000)[rank]):
                if rank == 1 and k == 3:
                    block.session.log.store.put(key, wrong)
                    if late:
                        time.sleep(4)
                        raise RuntimeError("the collective was aborted")
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    return caught_error(train)


@pytest.mark.parametrize(
    ("key", "wrong"), [("announcer", "x"), ("announcer", "[9, 9]"), ("failed", "x")]
)
def test_a_damaged_note_ends_the_block_on_all_ranks(key, wrong):
    for kind, words in run(2, damages, key, wrong, timeout=60):
        assert kind in ("RuntimeError", "DamagedNote") and f"'{key}'" in words, words


@pytest.mark.parametrize(("key", "wrong"), [("announcer", "[9, 9]"), ("failed", "x")])
def test_a_rank_is_freed_though_an_event_comes_first(key, wrong):
    """The rank follows that event, and waits for one more that never comes."""
    for kind, words in run(2, damages, key, wrong, 3, timeout=60):
        assert kind in ("RuntimeError", "DamagedNote") and f"'{key}'" in words, words


# ---- what is sent at the end, and who is trusted ----


class Callable:
    """A factor that remembers what it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, epoch):
        self.asked += 1
        return 0.9**epoch


SCHEDULERS = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, Callable()),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def schedules(kind, counts):
    model = DDP(nn.Linear(2, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    with Join([model, optimizer, scheduler]):
        for _ in range(counts[dist.get_rank()]):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
    after = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        after.append(optimizer.param_groups[0]["lr"])
    return after


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_are_sent_as_plain_values(kind):
    assert (
        len(
            {
                str(rank)
                for rank in [*run(2, schedules, kind, (1, 4)), *run(2, schedules, kind, (4, 4))]
            }
        )
        == 1
    )


class Opened:
    """Does something when it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def opens():
    model = DDP(nn.Linear(2, 1))
    scheduler = SimpleNamespace(state_dict=lambda: {"at": Opened()}, load_state_dict=print)

    def enter():
        with Join([model, scheduler]):
            pass

    return caught_error(enter)


def test_a_state_that_would_be_unpickled_as_code_is_refused(capfd):
    for kind, words in run(2, opens):
        assert kind == "TypeError" and "joinable 1, a SimpleNamespace" in words
    assert "unpickled" not in capfd.readouterr().out


# ---- a rank that is killed ----


def train_until_killed(port, rank, n, how, pipe):
    """Train; rank 2 kills itself in its fourth iteration. What this rank is told, and after how long."""
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, n, rank == 0, wait_for_workers=False),
        rank=rank,
        world_size=n,
    )
    net = nn.Linear(2, 1)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    if how == "parallel":
        model, joinable = net, data_parallel(net, optimizer)
    else:
        model = joinable = DDP(net)
    last = []

    def train():
        with Join([joinable, optimizer]):
            for k in range((2, 9, 9)[rank]):
                if rank == 2 and k == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                last[:] = [time.monotonic()]
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    pipe.send((caught_error(train), time.monotonic() - last[0]))
    pipe.recv()
    os._exit(0)


@pytest.mark.parametrize(("how", "memory"), [("ddp", "1"), ("parallel", "1"), ("parallel", "0")])
def test_a_rank_that_is_killed_in_a_block_is_named_by_all_others(monkeypatch, how, memory):
    monkeypatch.setenv("ZERO_NB_MEMORY", memory)
    fork, port = multiprocessing.get_context("fork"), free_port()
    pipes = [fork.Pipe() for _ in range(3)]
    ranks = [
        fork.Process(target=train_until_killed, args=(port, rank, 3, how, pipes[rank][1]))
        for rank in range(3)
    ]
    try:
        for each in ranks:
            each.start()
        for pipe, _ in pipes[:2]:
            assert pipe.poll(60), "all ranks hear of it"
            (kind, words), seconds = pipe.recv()
            assert kind == "RuntimeError" and "rank 2" in words and seconds < 30, words
    finally:
        for each in ranks:
            each.kill()
            each.join()


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
