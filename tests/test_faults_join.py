"""Join: what the review found about notes that no rank has written, states that are sent, and ranks that are killed."""

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught_error, free_port
from common.join_participants import Participant, take_stores_of_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, lr_scheduler

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.ending import fail
from zero_nb.comm.group_store import waiting_elsewhere
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.join import failure_detection
from zero_nb.join.event_feed import EventFeed, EventStore
from zero_nb.join.event_log import EventLog
from zero_nb.join.failure_detection import explain_wait
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- notes that no rank has written ----


class Alone(Participant):
    """One of four ranks, on a store that others have written to."""

    def __init__(self, monkeypatch):
        take_stores_of_groups(monkeypatch)
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


def hears_why(left, announces):
    """Let rank 0 fail, out of data or not, and give what rank 1 is told that waits for an event: if it
    looks for last words before there are some, and after."""
    group = Group()
    log = EventLog(EventStore(group, "example"))
    if log.group_rank == 0:
        if announces:
            log.store.put("announcer", "[0, 0]")
        if left:
            log.election.record_departure(0)
        fail(group, ArithmeticError("the loss is not a number; see row 17"))
        return log.store.wait("done", lambda: False)
    while not waiting_elsewhere(group):
        time.sleep(0.01)
    log.feed.waiting_since = time.monotonic() - 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure_detection, "_last_words", lambda group: "")
        early = explain_wait(log)
    said = explain_wait(log)
    log.store.put("done", "1")
    return early, said


@pytest.mark.parametrize(("left", "announces"), [(True, True), (False, True), (False, False)])
def test_a_rank_that_waits_for_an_event_is_told_the_last_words_of_any_rank(left, announces):
    early, said = run(2, hears_why, left, announces)[1]
    assert early == ""
    assert said == "rank 0 failed with ArithmeticError: the loss is not a number; see row 17"


def refuses_and_takes_its_time(kind, counts):
    """Write gradients on rank 1 after the step was taken inside backward, and leave the block late."""
    net = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    model = net if kind == "data_parallel" else DDP(net)
    handle = data_parallel(net, zero) if kind == "data_parallel" else overlap(model, zero)
    with Join([handle if kind == "data_parallel" else model, zero]):
        for i in range(counts[dist.get_rank()]):
            model(torch.ones(2, 4)).sum().backward()
            if i == 1 and dist.get_rank() == 1:
                net.weight.grad = torch.ones_like(net.weight)
            try:
                zero.step()
            except RuntimeError:
                time.sleep(3)  # as one that writes a report
                raise


@pytest.mark.parametrize("counts", [(1, 4), (4, 4)])
@pytest.mark.parametrize("kind", ["overlap", "data_parallel"])
def test_a_rank_that_refuses_a_step_reads_its_own_error_as_its_own(kind, counts):
    first, second = run(2, caught_error, partial(refuses_and_takes_its_time, kind, counts))
    assert second[1].startswith("gradients were changed or taken away"), second
    assert "rank 1 " in first[1] and "gradients were changed or taken away" in first[1], first
