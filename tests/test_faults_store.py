"""Agreement as the store sees it: many ranks simulated in one process, counted requests and bytes,
random histories on one store."""

import importlib
import random
import socket
import threading
from collections import Counter
from datetime import timedelta
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import free_port
from common.modes import MODES
from torch import nn
from torch.optim import AdamW

from zero_nb.comm import agreement, arrivals
from zero_nb.comm import store as store_module
from zero_nb.comm.agreement import _Agreement, _steps_of, agree
from zero_nb.comm.arrivals import _leave_words, _missing
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.ranks import Ranks, _Agreements, _Ending
from zero_nb.comm.store import _Notes
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Counting:
    """A store that counts what one rank asks of it: requests by kind, and bytes as TCPStore sends them."""

    def __init__(self, inner, prefix):
        self.inner, self.requests, self.bytes = inner, [], 0
        self.prefix = prefix

    def _count(self, kind, *texts, reply):
        self.requests.append(kind)
        self.bytes += 1 + sum(8 + len(text) for text in texts) + reply

    def set(self, key, text):
        self._count("set", self.prefix + key, text, reply=0)
        self.inner.set(key, text)

    def add(self, key, amount):
        self._count("add", self.prefix + key, "", reply=8)  # the amount is a number of 8 bytes
        return self.inner.add(key, amount)

    def check(self, keys):
        self._count("check", *(self.prefix + key for key in keys), reply=9)
        return self.inner.check(keys)

    def compare_set(self, key, expected, desired):
        found = self.inner.compare_set(key, expected, desired)
        self._count("compare_set", self.prefix + key, expected, desired, reply=8 + len(found))
        return found

    def delete_key(self, key):
        self._count("delete_key", self.prefix + key, reply=8)
        return self.inner.delete_key(key)


PREFIX = "/default_pg/0//"  # what torch puts before the keys of the default group
OF_A_GROUP = (
    PREFIX + 40 * "0" + "//"
)  # before those of any other, which has a name of 40 characters


class ProcessGroup:
    """What a simulated rank has in the place of torch's: a name in this process."""


class Simulated(Ranks):
    """A rank of a group of many, all in this process."""

    def __init__(
        self,
        ranks: tuple[int, ...],  # of the group; one tuple for all, or 16,384 ranks take 2 GB
        group_rank: int,  # of this rank
        store: dist.Store,  # of all ranks
        prefix: str = PREFIX,  # before the group's keys
    ):
        self.ranks = ranks
        self.size = len(ranks)
        self.group_rank = group_rank
        self.process_group = ProcessGroup()
        self._agreements = _Agreements()
        self._ending = _Ending()
        self.store = Counting(store, prefix)


@pytest.fixture
def clock(monkeypatch):
    """Make a clock that goes when ranks sleep."""
    now = SimpleNamespace(seconds=0.0, limit=30.0)
    monkeypatch.setattr(store_module, "_store", lambda group: group.store)
    for module in (arrivals, agreement):
        monkeypatch.setattr(module, "_has_no_peers", lambda group: False)
    for module in (store_module, arrivals, agreement):
        monkeypatch.setattr(module, "_timeout", lambda group: timedelta(seconds=now.limit))
    for module in (store_module, agreement):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def play(clock, ranks, calls, order=None, until=None):
    """Let ranks agree on what `calls` gives each, side by side; give what each raised, or "ok", or
    "" if it was stopped at `until` seconds."""
    outcomes = [""] * len(ranks)
    running = {}
    for i in order or range(len(ranks)):
        if calls[i] is not None:
            running[i] = (0.0, _steps_of(_Agreement(ranks[i], *calls[i])))
    while running and (until is None or clock.seconds < until):
        begin = clock.seconds
        for i, (wake, steps) in list(running.items()):
            if wake > begin:
                continue
            try:
                running[i] = (begin + next(steps), steps)
            except StopIteration:
                outcomes[i] = "ok"
            except Exception as error:
                outcomes[i] = f"{type(error).__name__}: {error}"
            if outcomes[i]:
                del running[i]
        if running:
            clock.seconds = max(begin + 1e-5, min(wake for wake, _ in running.values()))
    return outcomes


def make(size, store, prefix=PREFIX):
    ranks = tuple(range(size))
    return [Simulated(ranks, rank, store, prefix) for rank in ranks]


def taken(ranks):
    """Give the requests of each rank since the last call, and the bytes of all."""
    out, nbytes = (
        [Counter(rank.store.requests) for rank in ranks],
        sum(rank.store.bytes for rank in ranks),
    )
    for rank in ranks:
        rank.store.requests, rank.store.bytes = [], 0
    return out, nbytes


# ---- H6 ----


@pytest.mark.parametrize("size", [8, 1024, 16_384])
def test_H6_requests_of_an_agreement_do_not_depend_on_the_number_of_ranks(clock, size):
    ranks = make(size, dist.HashStore())
    assert play(clock, ranks, [("the first", ["a line"], None)] * size) == ["ok"] * size
    first, nbytes = taken(ranks)
    assert (
        Counter(sum(asked.values()) for asked in first[1:]).most_common(1)[0][0] == 3
        and nbytes < 215 * size
    )
    for turn in range(1, 3):
        what = ("making ZeroRedundancyOptimizer", ["a line", "another"], None)
        assert play(clock, ranks, [what] * size) == ["ok"] * size
        asked, nbytes = taken(ranks)
        ordinary = Counter({"add": 1, "check": 1})
        special = [a for a in asked if a != ordinary]
        assert len(special) <= size // 8 and max(sum(a.values()) for a in special) <= 16
        assert (
            sum(sum(a.values()) for a in asked) <= 2.29 * size + 8 and nbytes < 130 * size + 1000
        ), turn


def asked_of_the_store(turns):
    """Give the requests of this rank in agreements, but for looks whether something is there yet."""
    g, asked = Group(), []
    store = store_module._store(g)
    agree(g, "the first")

    class Noting:
        def __getattr__(self, name):
            if name == "check" or not callable(found := getattr(store, name)):
                return getattr(store, name)

            def request(*args):
                if args[1:] != ("\0", "\0"):
                    asked.append(name)
                return found(*args)

            return request

    store_module._store = lambda group: Noting()
    for _ in range(turns):
        agree(g, "the work", ["a line"])
    return len(asked) / turns


def test_H6_no_rank_asks_more_when_there_are_more_ranks():
    few, many = run(2, asked_of_the_store, 10), run(7, asked_of_the_store, 10)
    assert (
        max(many) <= 9 and sum(many) / 7 < sum(few) / 2
    )  # each adds once, and one decides and clears


AGREEMENTS = {  # of each mode's way to begin: calls that all ranks make, and how often they agree
    "zero1": {"make": 1, "load": 1, "attach": 0, "first": 1, "second": 0, "third": 0},
    # DDP makes its buckets anew in the second iteration
    "zero1-overlap": {"make": 1, "load": 1, "attach": 1, "first": 2, "second": 1, "third": 0},
    "zero1-overlap, interleaved": {
        "make": 1,
        "load": 1,
        "attach": 1,
        "first": 2,
        "second": 1,
        "third": 0,
    },
    "zero2": {"make": 1, "load": 1, "attach": 1, "first": 1, "second": 0, "third": 0},
    "zero2-interleaved": {"make": 1, "load": 1, "attach": 1, "first": 1, "second": 0, "third": 0},
}


def agreements(mode):
    """Give how often this rank agrees with the others in each call of a training that begins."""
    group, module, turns = Group(), nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), {}

    def note(what, before):
        turns[what] = group._agreements.turn - before
        return group._agreements.turn

    def make(_):
        zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=0.1)
        now = note("make", 0)
        groups = [{**zero.param_groups[0], "params": [*range(8)]}]
        zero.load_state_dict({"state": {}, "param_groups": groups})
        note("load", now)
        return zero

    made = MODES[mode].attach(module, make)
    now = note("attach", turns["make"] + turns["load"])
    for iteration in ("first", "second", "third"):
        made.call(torch.ones(2, 16)).sum().backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        now = note(iteration, now)
    return turns


@pytest.mark.parametrize("mode", AGREEMENTS)
def test_H6_agreements_of_a_training_that_begins(mode):
    assert run(2, agreements, mode) == [AGREEMENTS[mode]] * 2


# the constructor's agreement, load_state_dict's, one to attach, and the first iteration's two
BEGINS = ("making", "loading", "attaching", "a plan", "the first step")


def load_of_the_store(clock, size, total, agreements):
    """Give the requests and bytes of what all groups of one size agree on."""
    ranks = make(size, dist.HashStore(), PREFIX if size == total else OF_A_GROUP)
    for what in agreements:
        assert set(play(clock, ranks, [(what, [], None)] * size)) == {"ok"}
    asked, nbytes = taken(ranks)
    groups = total // size  # which are alike
    return groups * sum(sum(a.values()) for a in asked), groups * nbytes


@pytest.mark.parametrize(
    ("agreements", "requests", "nbytes"),
    [
        ({16_384: BEGINS}, 12.2, 602),  # a rank; 12.15 and 599.3 were counted, 9.82 MB in all
        # two_level: what is arranged, the names of the groups, and the first meeting in each
        ({16_384: ("rows", "names"), 8: ("a group",), 2048: ("a group",)}, 12.25, 919),
        # 12.18 and 915.7, 15.0 MB in all
    ],
)
def test_H6_a_job_of_16384_ranks_stays_within_its_budget(clock, agreements, requests, nbytes):
    """With the most agreements until the first step is over, which two levels make together, and where
    two levels are made; what that costs a TCPStore is measured in comm/05."""
    total = 16_384
    begins = [
        [mode[what] for what in ("make", "load", "attach", "first")] for mode in AGREEMENTS.values()
    ]
    assert max(begins, key=sum) == [1, 1, 1, 2]
    loads = [load_of_the_store(clock, size, total, what) for size, what in agreements.items()]
    asked, moved = map(sum, zip(*loads, strict=True))
    assert asked <= requests * total and moved <= nbytes * total, (asked / total, moved / total)


@pytest.mark.parametrize("size", [2, 8, 300])
def test_H6_the_store_does_not_grow(clock, size):
    store = dist.HashStore()
    ranks, keys = make(size, store), []
    for turn in range(12):
        odd = turn % 4 if turn < 9 else 0
        calls = [
            (
                "the work",
                [str(odd == 1 and rank == 1)],
                ValueError("no") if odd == 2 and rank == size - 1 else None,
            )
            for rank in range(size)
        ]
        outcomes = play(clock, ranks, calls)
        assert all((outcome == "ok") == (odd not in (1, 2)) for outcome in outcomes)
        keys.append(store.num_keys())
    assert keys[3] == keys[7] == keys[10] == keys[11]


# ---- every outcome is everybody's ----


def test_a_text_that_no_rank_can_have_written_is_told_to_all(clock):
    """Ranks differ, and what the first one has left is no text when another one compares."""
    ranks = make(4, dist.HashStore())
    left = ranks[0].store.set
    ranks[0].store.set = lambda key, text: left(key, "zz" if key.endswith("/text") else text)
    outcomes = play(clock, ranks, [("the work", [str(rank == 3)], None) for rank in range(4)])
    assert all("rank 0 cannot have written" in outcome for outcome in outcomes), outcomes
    assert clock.seconds < clock.limit / 2


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_end_alike_on_all_ranks(clock, seed):
    chance = random.Random(seed)
    size = chance.choice([2, 3, 16, 17, 40, 257])
    ranks = make(size, dist.HashStore())
    for turn in range(6):
        fault = chance.choice(["", "", "differ", "fail", "fail", "both"])
        who = set(chance.sample(range(size), chance.randint(1, min(4, size))))
        calls = [[f"turn {turn}", ["line"], None] for _ in range(size)]
        for r in who if fault in ("differ", "both") else ():
            calls[r][1] = ["odd"]
        if fault in ("fail", "both"):
            calls[min(who)][2] = KeyError(f"lost {min(who)}")
        outcomes = play(clock, ranks, calls, order=chance.sample(range(size), size))
        if not fault or (fault == "differ" and len(who) == size):
            assert outcomes == ["ok"] * size
        elif fault == "differ":
            assert (
                len(set(outcomes)) == 1
                and outcomes[0].startswith("ValueError: ranks disagree on")
                and "'odd'" in outcomes[0]
            )
        else:
            assert outcomes[min(who)] == f"KeyError: 'lost {min(who)}'"
            assert {o for r, o in enumerate(outcomes) if r != min(who)} == {
                f"KeyError: \"rank {min(who)} failed at turn {turn}: 'lost {min(who)}'\""
            }


@pytest.mark.parametrize(
    ("size", "late"),
    [
        (2, [1]),
        (3, [0]),
        (40, [17]),
        (40, [0, 16, 39]),
        (300, list(range(50, 120))),
        (1024, [1000]),
    ],
)
def test_late_ranks_are_named_after_few_requests(clock, size, late):
    ranks = make(size, dist.HashStore())
    play(clock, ranks, [("the first", [], None)] * size)
    taken(ranks)
    outcomes = play(
        clock, ranks, [None if rank in late else ("the second", [], None) for rank in range(size)]
    )
    named = (
        f"rank {late[0]} did"
        if len(late) == 1
        else f"ranks {', '.join(map(str, late[:8]))}{' and more' if len(late) > 8 else ''} did"
    )
    for rank, outcome in enumerate(outcomes):
        assert (
            (outcome == "")
            if rank in late
            else outcome.startswith(f"RuntimeError: {named} not arrive within 30 s")
        )
    taken(ranks)
    assert (
        list(islice(_missing(_Notes(ranks[0], ranks[0]._agreements.life.name), 1, size), 9))
        == late[:9]
    )
    assert len(ranks[0].store.requests) <= 9 + 4  # levels
    outcomes = play(
        clock, ranks, [("the second", [], None) if rank in late else None for rank in range(size)]
    )
    assert all(
        "did not arrive within 30 s" in outcomes[rank] for rank in late
    )  # no rank goes on where the others have given up


# ---- L2: a new life on the same store ----


def old_call(chance, turn):
    line = [chance.choice("ab")] if chance.random() < 0.1 else ["a"]
    return f"old {turn}", line, OSError("old") if chance.random() < 0.05 else None


def live_and_stop(clock, chance, size, store):
    """Let ranks meet a few times, and stop them at any moment; some leave a note that they have failed."""
    ranks = make(size, store)
    for turn in range(chance.randint(0, 3)):
        calls = [old_call(chance, turn) for _ in range(size)]
        if chance.random() < 0.5:
            calls[chance.choice([0, chance.randrange(size)])] = None
        clock.limit = chance.choice([0.5, 30])
        play(
            clock,
            ranks,
            calls,
            order=chance.sample(range(size), size),
            until=clock.seconds + chance.choice([1e-4, 0.02, 1, 100]),
        )
    for rank in ranks:
        if chance.random() < 0.3:
            _leave_words(rank, "old words")


@pytest.mark.parametrize("seed", range(200))
def test_L2_a_new_life_hears_nothing_of_the_old(clock, seed):
    """Groups are made anew on one store, whatever the ranks of the one before were doing when they were stopped."""
    chance, store = random.Random(seed), dist.HashStore()
    size = chance.choice([2, 3, 17, 40])
    for _ in range(4):
        live_and_stop(clock, chance, size, store)
    clock.limit, ranks = 30.0, make(size, store)
    for turn in range(3):
        assert (
            play(
                clock,
                ranks,
                [(f"new {turn}", ["a"], None)] * size,
                order=chance.sample(range(size), size),
            )
            == ["ok"] * size
        )
    outcomes = play(
        clock, ranks, [("new", [], OSError("new") if rank == 1 else None) for rank in range(size)]
    )
    assert outcomes[1] == "OSError: new" and all(
        o == "OSError: rank 1 failed at new: new" for r, o in enumerate(outcomes) if r != 1
    )


def again(store_of):
    """Make the job's group twice on one store; the first one ends with an error that rank 1 leaves to the others."""
    from zero_nb.comm.ending import fail

    rank, heard = dist.get_rank(), []
    dist.barrier()  # all have met
    dist.destroy_process_group()
    store = store_of(rank)
    for life in range(2):
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        g = Group()
        agreement._has_no_peers = arrivals._has_no_peers = lambda group: (
            group.size == 1
        )  # this backend sends nothing, so that it meets again on any store; agreement needs none
        try:
            agree(g, f"life {life}")
        except Exception as error:
            heard.append(str(error))
        if life == 0 and rank == 1:
            fail(g, ArithmeticError("the loss is not a number"))
        if life == 1:
            if rank == 0:
                agreement.time.sleep(0.3)  # longer than ranks wait before they listen to last words
            try:
                agree(g, "the second")
            except Exception as error:
                heard.append(str(error))
        dist.destroy_process_group()
    if rank == 1:
        store.set("done", "")
        return heard
    try:
        store.wait(["done"], timedelta(seconds=60))  # a TCPStore is hosted by rank 0
    except RuntimeError as error:
        raise AssertionError(f"rank 1 did not come to its end; rank 0 has heard {heard}") from error
    return heard


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_L2_a_group_made_anew_on_the_same_store_hears_no_old_words(tmp_path, kind):
    port = free_port()

    def store_of(rank):
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        if kind == "file":
            return dist.FileStore(str(tmp_path / "store"), 2)
        return dist.TCPStore("127.0.0.1", port, 2, rank == 0)

    assert run(2, again, store_of) == [[], []]


def look_late(path):
    """Agree in two groups made one after the other; rank 1 looks around in the first one when rank 0
    is in the second."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    rank, real = dist.get_rank(), agreement._Agreement._look_around
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    agreement._has_no_peers = arrivals._has_no_peers = lambda group: group.size == 1

    def late(self, waited):
        agreement.time.sleep(1.5)
        real(self, waited)

    agreement._Agreement._look_around = late if rank else real
    for life in range(2):
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        agreement.time.sleep(0.5 * (1 - rank))  # rank 1 waits
        agree(Group(), f"life {life}")
        dist.destroy_process_group()
        agreement._Agreement._look_around = real
    return agreement.time.sleep(0.5)


def test_a_rank_that_looks_late_stays_in_the_group_that_has_agreed(tmp_path):
    """It took the first group for an older one, and the ranks disagreed on what comes next."""
    assert run(2, look_late, str(tmp_path / "store"), timeout=40) == [None, None]


def passed_on(server, port):
    """Give the socket of a proxy for one connection, and what ends the passing on of bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    cut = threading.Event()

    def pump(source, target):
        while data := source.recv(4096):
            if not cut.is_set():
                target.sendall(data)

    def serve():
        ours, _ = listener.accept()
        theirs = socket.create_connection((server, port))
        threading.Thread(target=pump, args=(theirs, ours), daemon=True).start()
        pump(ours, theirs)

    threading.Thread(target=serve, daemon=True).start()
    return listener, cut


def test_a_store_behind_a_cut_network_is_given_up(monkeypatch):
    """Torch waits for the answer to these requests without a limit, until TCP gives up after a quarter of an hour."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener, cut = passed_on("127.0.0.1", server.port)
    client = dist.TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False)
    group = SimpleNamespace(global_rank=1, process_group=ProcessGroup(), _agreements=_Agreements())
    monkeypatch.setattr(store_module, "_store", lambda group: dist.PrefixStore("x", client))
    monkeypatch.setattr(store_module, "_timeout", lambda group: timedelta(seconds=0.5))
    monkeypatch.setattr(store_module, "_is_near", lambda host: False)
    notes = _Notes(group)
    notes.set("key", "value")
    assert notes.peek("key") == "value"
    cut.set()
    with pytest.raises(RuntimeError, match=r"rank 1 cannot reach .*no answer within 0.5 seconds"):
        notes.peek("key")
    with pytest.raises(RuntimeError, match="left a request without an answer before"):
        notes.add("number")


def test_addresses_of_this_machine_are_near():
    assert store_module._is_near("localhost") and store_module._is_near("127.0.0.1")
    assert not store_module._is_near("192.0.2.1")  # of no machine, by RFC 5737
