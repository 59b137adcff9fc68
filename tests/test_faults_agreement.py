"""Agreement under faults: hostile text in the store, errors of every type, old lives of a group, stores that die."""

import builtins
import importlib
import re
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import caught_error, free_port

from zero_nb import (
    Group,
    ZeroRedundancyOptimizer,
    agree,
    agreeing,
    get_global_rank,
    get_group_rank,
    two_level,
)
from zero_nb.comm.calls import Parts
from zero_nb.comm.ending import abort, destroy, fail
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list, gather_object
from zero_nb.comm.ranks import Ranks
from zero_nb.comm.store import _Notes, _read, _reported, _store
from zero_nb.comm.subgroups import clone, split

# ---- C1, L1: what other ranks post is text, never code ----


class exec(
    Exception
):  # the name of a builtin function, which agreement at cfde325 looked up and called
    """An error of a user's own, whose name means something else to Python."""


class exit(ValueError):
    pass


class Whole(Exception):
    """An error that cannot be made from its words alone."""

    def __init__(self, code: int, *, path: str):
        super().__init__(f"code {code} in {path}")


def fails_with(make):
    g = Group()

    def work():
        with agreeing(g, "the work"):
            if g.group_rank == 1:
                raise make()

    after = lambda: agree(g, "more work", ["the same"])  # the group is usable afterwards
    return caught_error(work), caught_error(after)


def decoding():
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def grouped():
    return vars(builtins)["ExceptionGroup"](
        "two things", [KeyError("lost"), OSError(28, "No space left on device")]
    )


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: exec("open('/tmp/zero_nb_owned', 'w')"), "RuntimeError", "exec: open("),
        (lambda: exit("2"), "RuntimeError", "exit: 2"),
        (lambda: Whole(3, path="a.bin"), "RuntimeError", "Whole: code 3 in a.bin"),
        (
            decoding,
            "RuntimeError",
            (
                "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid"
                " start byte"
            ),
        ),
        pytest.param(
            grouped,
            "RuntimeError",
            "ExceptionGroup: two things (2 sub-exceptions): KeyError: 'lost'; OSError: [Errno 28]"
            " No space left on device",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="the type is of Python 3.11"
            ),
        ),
        (lambda: KeyError("lost"), "KeyError", "lost"),
        (lambda: FileNotFoundError(2, "No such file", "a.bin"), "FileNotFoundError", "'a.bin'"),
        (lambda: NotImplementedError("not yet"), "NotImplementedError", "not yet"),
        (lambda: IndexError("far"), "IndexError", "far"),
    ],
)
def test_L1_errors_of_every_type_arrive_whole(make, kind, words):
    for rank, (error, after) in enumerate(run(3, fails_with, make)):
        assert after is None
        if rank == 1:
            assert error == (type(make()).__name__, str(make()))
        else:
            assert (
                error[0] == kind and "rank 1 failed at the work: " in error[1] and words in error[1]
            )


def test_C1_an_errors_name_is_not_called(tmp_path):
    def crafted():
        g, error = Group(), exec(f"open({str(tmp_path / 'owned')!r}, 'w').write('x')")
        error.told = True  # at cfde325: the words are sent as they are
        return caught_error(lambda: agree(g, "the work", [], error if g.group_rank == 1 else None))

    kinds = [error[0] for error in run(2, crafted)]
    assert not (tmp_path / "owned").exists() and kinds == ["RuntimeError", "exec"]


def test_C1_bytes_and_numbers_that_no_rank_has_written_are_an_error():
    """Of another program, which writes to the group's store."""
    said = []
    for asked in (lambda n: n.set_first("key", "mine"), lambda n: n.raise_to("key", 5)):
        [error] = run(1, lambda asked=asked: strange_notes(asked))
        said.append(error)
    assert [kind for kind, _ in said] == ["RuntimeError"] * 2
    assert all("holds, under 'key', what no rank has written" in words for _, words in said)


def strange_notes(asked):
    notes = _Notes(Group())
    notes._store = mock.Mock(compare_set=lambda *_: b"\xff no number")
    return caught_error(lambda: asked(notes))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "null",
        '["exec", 1]',
        "{" * 100_000,
        "[" * 100_000,
        "\udcff",
        "no JSON",
        '{"failed": ["eval", "1"]}',
        "[1]",
    ],
)
def test_C1_text_that_no_rank_has_written_is_an_error(text):
    with pytest.raises(RuntimeError, match="another program writes to the store") as error:
        _read(text, str, str)
    assert len(str(error.value)) < 500
    assert (
        type(_reported("exec", "x"))
        is type(_reported("__import__", "x"))
        is type(_reported([], "x"))
        is RuntimeError
    )


# ---- groups of some ranks, on the server of the job ----


def several_groups(port):
    """Agree in groups that share ranks, nest, and lie side by side, on one TCPStore; what each rank hears."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, 6, rank == 0), rank=rank, world_size=6
    )
    whole = Group()
    part = split(whole, [[0, 3, 5], [1, 4]])  # rank 2 is in none of them
    inner = split(part, [[0, 2], [1]] if part.size == 3 else [[1], [0]]) if part else None
    nodes, twin = two_level(3), clone(part) if part else None
    if part:
        for i in range(part.size):
            agree(part, f"turn {i}", [str(part.ranks)])

    def work(group, what, fails=(), odd=()):
        if group is None:
            return None
        with agreeing(group, what, lambda: [str(rank in odd)]):
            if rank in fails:
                raise KeyError(f"lost {rank}")

    calls = [
        lambda: work(part, "the part", fails=[3]),
        lambda: work(inner, "inside", odd=[5]),
        lambda: work(twin, "the twin", odd=[4]),
        lambda: work(nodes, "the nodes", fails=[4]),
        lambda: work(nodes, "the nodes again", odd=[2]),
        lambda: work(whole, "the whole", odd=[5]),
    ]
    return [caught_error(call) for call in calls], [
        caught_error(partial(work, group, "at last")) for group in (part, inner, twin, nodes, whole)
    ]


def test_groups_of_some_ranks_agree_apart_on_one_server():
    port = free_port()

    def differ(what, first, other):
        return (
            f"ranks disagree on {what}: rank {first} has 'False', rank {other} has 'True'; do the"
            " same on every rank"
        )

    for rank, (heard, after) in enumerate(run(6, several_groups, port, timeout=60)):
        part, inside, twin, nodes, again, whole = (error and error[1] for error in heard)
        assert after == [None] * 5, "every group is usable afterwards"
        assert part == {
            0: repr("rank 3 failed at the part: 'lost 3'"),
            5: repr("rank 3 failed at the part: 'lost 3'"),
            3: "'lost 3'",
        }.get(rank)
        assert inside == (differ("inside", 0, 5) if rank in (0, 5) else None) and twin == (
            differ("the twin", 1, 4) if rank in (1, 4) else None
        )
        assert nodes == (
            "'lost 4'" if rank == 4 else repr("rank 4 failed at the nodes: 'lost 4'")
        ) and whole == differ("the whole", 0, 5)
        assert again == differ("the nodes again", 0, 2), "both nodes agree at once"


def made_apart():
    """Make groups where torch has made others on some ranks only, and in the place of groups that
    were destroyed; sums, and names left in the store."""
    dist.new_group([1, 2])
    sums, whole = [], Group()
    store = dist.distributed_c10d._get_process_group_store(whole.process_group)
    for _ in range(3):
        twin, x = clone(whole), torch.ones(1)
        twin.all_reduce(x)
        sums.append(x.item())
        destroy(twin)
        dist.new_group([0, 1])
    dist.barrier()
    return sums, [key for key in store.list_keys() if "named" in key]


def test_ranks_that_have_made_other_groups_meet_in_a_new_one():
    assert run(3, made_apart, timeout=30) == [([3.0] * 3, [])] * 3


# ---- L6: what is made on the CPU stays there ----


def test_L6_abort_frees_a_thread_whatever_the_default_device():
    def stuck():
        group, said = Group(dist.new_group()), []
        group.all_reduce(x := torch.ones(1))
        dist.barrier()
        if dist.get_rank() == 1:
            thread = threading.Thread(
                target=lambda: said.append(caught_error(lambda: group.recv(x, 0)))
            )
            thread.start()
            while not said and thread.is_alive() and time.monotonic() - begin < 30:
                torch.set_default_device("meta")
                abort(group)
                torch.set_default_device(None)
                thread.join(1)
        dist.barrier()
        return said

    begin = time.monotonic()
    ((kind, words),) = run(2, stuck, timeout=60)[1]
    assert kind == "RuntimeError" and "receiving 1 float32 from group rank 0 failed" in words


# ---- texts that callers match ----


def test_ranks_that_are_not_in_a_group_are_told_in_torchs_words():
    def strange():
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            return None
        calls = [
            lambda: get_global_rank(pair, 5),
            lambda: get_group_rank(pair, 2),
            lambda: broadcast_object_list([1], src=2, group=pair),
            lambda: broadcast_object_list([1], group_src=7, group=pair),
            lambda: gather_object(1, None, dst=2, group=pair),
        ]
        theirs = [
            lambda: dist.get_global_rank(pair, 5),
            lambda: dist.get_group_rank(pair, 2),
            lambda: dist.broadcast_object_list([1], src=2, group=pair),
            lambda: dist.get_global_rank(pair, 7),
            lambda: dist.get_group_rank(pair, 2),
        ]
        return [caught_error(call) for call in calls], [caught_error(call) for call in theirs]

    first, second, _ = run(3, strange)
    for ours, theirs in (first, second):
        for (kind, words), (their_kind, their_words) in zip(ours, theirs, strict=True):
            told = re.match(r"(Group|Global) rank \d is not part of group", their_words)
            assert kind == their_kind == "ValueError" and told and told[0] in words


# ---- L12: texts are short, however many ranks there are ----


def test_L12_a_group_of_many_ranks_describes_itself_in_a_line():
    from zero_nb.comm.simulation import simulate

    with simulate(16_384, 3) as pg:
        text = repr(Ranks(pg))
    assert len(text) < 200 and "3 of 16384" in text and "0, 1, 2" in text and "16383" in text
    assert repr(Ranks()) == "Ranks(group_rank=0 of 1, global ranks [0])"


def test_L12_sizes_of_many_ranks_that_do_not_fit_are_told_in_a_line():
    """The error has the first sizes: all 16,384 would be 49,152 characters."""
    from zero_nb.comm.simulation import simulate

    unequal = [rank % 7 + 1 for rank in range(16_384)]
    with simulate(16_384, 3) as pg:
        group = Group(pg)
        for call in (
            lambda: group.reduce_scatter(torch.ones(5), unequal),
            lambda: group.reduce_scatter(torch.ones(5), unequal[:-1]),
            lambda: group.all_gather(torch.ones(5), Parts.of(unequal)),
            lambda: group.gather(torch.ones(5), 0, unequal),
        ):
            with pytest.raises(ValueError, match="sizes must be 16384 numbers") as raised:
                call()
            assert len(str(raised.value)) < 300, len(str(raised.value))


# ---- H5: errors travel where the backend does not let them ----


def one_fails(host_waits, kind):
    from nccl_like import nccl_like, synchronize

    g = nccl_like(host_waits=host_waits, connect=True)
    for _ in range(2):
        g.all_reduce(
            torch.ones(4)
        )  # compared, so that the ranks go into the third without waiting for each other
    if g.group_rank == 1:
        fail(g, ArithmeticError("the loss is not a number"))
        return caught_error(lambda: g.all_reduce(torch.ones(4)))
    if kind == "async":
        work = g.all_reduce(torch.ones(4), async_op=True)
        return caught_error(work.wait)
    if host_waits:
        return caught_error(lambda: g.all_reduce(torch.ones(4)))
    g.all_reduce(torch.ones(4))  # returns at once, as with NCCL
    synchronize()  # sits here until the communicator is aborted, and raises nothing
    return caught_error(lambda: g.all_reduce(torch.ones(4)))


@pytest.mark.parametrize(("host_waits", "kind"), [(True, "sync"), (True, "async"), (False, "sync")])
def test_H5_peers_that_sit_in_a_kernel_hear_why_a_rank_failed(host_waits, kind):
    first, second, third = run(3, one_fails, host_waits, kind, timeout=40)
    assert second[0] == "RuntimeError"
    for name, words in (first, third):
        assert (
            name == "RuntimeError"
            and "rank 1 failed with ArithmeticError: the loss is not a number" in words
        )
    if host_waits:
        assert "all_reduce of 4 float32" in first[1]


def waits_for_one_that_goes_on(through_torch):
    """Rank 0 fails; rank 2, which waits for it, catches the error and does something else; give how
    rank 1, which waits for rank 2, ends, and when."""
    group = Group()
    group.all_reduce(torch.ones(1))
    agree(group, "the model")
    begin = time.monotonic()
    if group.group_rank == 0:
        time.sleep(0.5)  # the others wait by then
        fail(group, ArithmeticError("the loss is not a number"))
        return None
    if group.group_rank == 2:
        said = caught_error(lambda: group.recv(torch.ones(1), 0))
        _store(group).wait(["rank 1 has ended"], timedelta(seconds=60))
        return said
    receive = (lambda x: dist.recv(x, 2)) if through_torch else (lambda x: group.recv(x, 2))
    said = caught_error(lambda: receive(torch.ones(1)))
    _store(group).set("rank 1 has ended", "")
    return said, time.monotonic() - begin


@pytest.mark.parametrize("through_torch", (False, True))
def test_a_rank_hears_of_a_failure_though_it_waits_for_a_rank_that_lives(
    through_torch, monkeypatch
):
    monkeypatch.setattr("zero_nb.comm.watcher._GLOO_SECONDS", 0.5)
    _, (error, seconds), third = run(3, waits_for_one_that_goes_on, through_torch, timeout=100)
    reason = "rank 0 failed with ArithmeticError: the loss is not a number"
    assert error[0] == third[0] == "RuntimeError"
    assert reason in third[1]
    assert through_torch or reason in error[1]
    assert seconds < 20  # not at once, and before rank 2 comes


def watchers(end):
    from nccl_like import nccl_like

    def count():
        return sum(thread.name == "zero_nb watcher" for thread in threading.enumerate())

    plain = Group()
    plain.all_reduce(torch.ones(1))
    seen = [count()]
    g = nccl_like(host_waits=True, connect=True)
    seen.append(count())
    g.all_reduce(torch.ones(1))
    Group(g.process_group).all_reduce(torch.ones(2))
    seen.append(count())
    end(g)
    deadline = time.monotonic() + 20
    while count() and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*seen, count()]


@pytest.mark.parametrize(
    "end",
    [abort, destroy, lambda g: dist.destroy_process_group(g.process_group)],
    ids=["abort", "destroy", "torch"],
)
def test_H5_a_group_has_one_watcher_where_it_needs_one_and_it_ends_with_the_group(end):
    assert run(2, watchers, end) == [[0, 0, 1, 0]] * 2


def test_H5_a_destructor_hands_its_news_to_a_thread(monkeypatch):
    watch, ending = (
        importlib.import_module(f"zero_nb.{name}") for name in ("backward.watch", "comm.ending")
    )
    came, by = threading.Event(), []

    def noting(groups, error):
        by.append((threading.current_thread() is threading.main_thread(), str(error)))
        came.set()

    for module in (watch, ending):
        monkeypatch.setattr(module, "fail", noting)
    end = watch.BackwardEnd(lambda: None, Group())
    del end
    assert came.wait(20) and by == [
        (False, "backward() did not come to its end; look at the output of this rank")
    ]


# ---- a rank that fails later ----


def fails_after_agreeing():
    """Let rank 1 leave an agreement and fail while rank 0, slow, is between two looks at the store."""
    g = clone(Group())  # ranks wait for each other in the job's own group
    agree(g, "the first agreement")
    if g.group_rank == 1:
        dist.barrier()
        said = caught_error(lambda: agree(g, "more"))
        fail(g, KeyError("later"))
        dist.barrier()
        return said
    real, looks = _Notes.there, []

    def slow(notes, key):
        found = real(notes, key)
        if key.endswith("/ok") and not looks:
            looks.append(key)
            dist.barrier()
            dist.barrier()
        return found

    _Notes.there = slow
    said = caught_error(lambda: agree(g, "more"))
    assert looks
    return said, caught_error(lambda: agree(g, "even more"))


def test_a_rank_that_fails_after_an_agreement_does_not_undo_it():
    (during, after), other = run(2, fails_after_agreeing, timeout=30)
    assert during is other is None
    assert after[0] == "RuntimeError" and "rank 1 failed with KeyError" in after[1]


# ---- a rank that fails before the first agreement ----


def fails_before(who, late, first_use):
    """Let ranks fail before their group has agreed on anything, and the others use it; what they hear."""
    store = _store(Group())
    rank = dist.get_rank()
    dist.barrier()
    if rank in who:
        if late:
            store.wait(["used"])
            time.sleep(0.2)  # they wait for this rank now
        fail(Group(), FileNotFoundError(f"no data on rank {rank}"))
        store.set(f"failed {rank}", "")
        return None
    if late:
        store.set("used", "")
    else:
        store.wait([f"failed {other}" for other in who])
    return caught_error(first_use)


def makes_optimizer():
    ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.AdamW)


@pytest.mark.parametrize("late", [False, True], ids=["fails first", "fails while they wait"])
@pytest.mark.parametrize("who", [(0,), (2,), (1, 2), (0, 1)])
def test_H5_ranks_hear_of_one_that_fails_before_their_first_agreement(who, late):
    said = run(3, fails_before, who, late, makes_optimizer, timeout=60)
    for rank in {0, 1, 2}.difference(who):
        assert said[rank][0] == "RuntimeError" and any(
            f"rank {other} failed with FileNotFoundError: no data on rank {other}" in said[rank][1]
            for other in who
        ), said


def test_H5_a_first_collective_ends_with_the_words_of_a_rank_that_failed_before_it():
    first_use = lambda: Group().all_reduce(torch.ones(3))
    (kind, words), _, _ = run(3, fails_before, (1, 2), False, first_use, timeout=60)
    assert kind == "RuntimeError" and "no data on rank" in words and "all_reduce of 3" in words


def fails_in_several():
    """Let rank 3 fail in groups that torch has made, and that have not agreed on anything."""
    rows, columns = ([dist.new_group(ranks) for ranks in every] for every in ROWS_AND_COLUMNS)
    row, column = divmod(dist.get_rank(), 2)
    groups = [Group(rows[row]), Group(columns[column])]
    dist.barrier()
    if dist.get_rank() == 3:
        return fail(groups, ValueError("no data"))
    return [caught_error(lambda g=g: agree(g, "the work")) for g in groups if 3 in g.ranks]


ROWS_AND_COLUMNS = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


def test_H5_the_ranks_of_each_group_hear_of_one_that_fails_before_any_agreement():
    none, by_column, by_row, _ = run(4, fails_in_several, timeout=60)
    assert none == []
    for ((kind, words),) in (by_column, by_row):
        assert kind == "RuntimeError" and "rank 3 failed with ValueError: no data" in words


def tries_again(folder, early, silent):
    """Make a group three times on one store; rank 1 fails before the first agreement of two, and
    comes late to the third."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    for name in ("arrivals", "agreement"):  # they need no backend
        module = importlib.import_module(f"zero_nb.comm.{name}")
        module._has_no_peers = lambda group: group.size == 1
    store = dist.FileStore(str(folder / "store"), 3)
    heard = []
    for attempt in range(3):
        dist.init_process_group("fake", store=store, rank=rank, world_size=3)
        if attempt < 2 and rank == 1:
            if not early:
                store.wait([f"comes {attempt}"])
                time.sleep(0.2)  # others wait
            fail(Group(), ValueError(f"attempt {attempt}"))
            store.set(f"failed {attempt}", "")
        elif attempt < 2 and not silent:
            if early:
                store.wait([f"failed {attempt}"])
            store.set(f"comes {attempt}", "")
            heard.append(caught_error(lambda: agree(Group(), "the work")))
        elif attempt == 2:
            if rank == (2 if silent else 1):
                time.sleep(1.5)  # longer than ranks doubt what they find
            heard.append(caught_error(lambda: agree(Group(), "the work")))
        store.set(f"done {attempt} {rank}", "")
        store.wait([f"done {attempt} {other}" for other in range(3)])
        dist.destroy_process_group()
    return heard


@pytest.mark.parametrize("early", [False, True], ids=["fails later", "fails first"])
def test_L2_a_group_made_anew_hears_only_its_own_words_in_its_first_agreement(tmp_path, early):
    first, failed, third = run(3, tries_again, tmp_path, early, False, timeout=60)
    assert failed == [None]
    for *others, last in (first, third):
        for attempt, (kind, words) in enumerate(others):
            assert kind == "RuntimeError"
            assert f"rank 1 failed with ValueError: attempt {attempt}, while" in words
        assert len(others) == 2 and last is None


def test_L2_a_rank_takes_back_what_was_read_by_no_other(tmp_path):
    assert run(3, tries_again, tmp_path, True, True, timeout=60) == [[None]] * 3


def one_more_number():
    """Rank 0 gives up first and closes its connections; rank 2 comes when rank 1 has told of that."""
    group = clone(Group(), timeout=timedelta(seconds=8))
    group.all_reduce(torch.ones(4))
    rank = group.group_rank
    if rank == 0:
        backend = group.process_group._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timedelta(seconds=1))
    notes = _Notes(group, group._agreements.life.name)
    while rank == 2 and not notes.peek("failed"):
        time.sleep(0.05)  # `run` ends it after a minute
    return caught_error(lambda: group.all_reduce(torch.ones(4 + (rank == 1))))


def test_a_rank_that_waits_elsewhere_is_named_though_others_gave_up_before():
    for kind, words in run(3, one_more_number, timeout=60):
        assert kind == "RuntimeError" and "all_reduce of 5 float32" in words
