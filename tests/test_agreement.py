"""Agreement against every way to disagree."""

import multiprocessing
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught, caught_error, free_port

from zero_nb.comm.agreement import agree, agreeing
from zero_nb.comm.ending import fail
from zero_nb.comm.groups import (
    Group,
)
from zero_nb.comm.launch import run
from zero_nb.comm.payloads import gather_bytes


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("who", [0, 1])
def test_one_ranks_error_is_everybodys(size, who):
    def fails():
        g = Group()

        def work():
            with agreeing(g, "the work"):
                if g.group_rank == who:
                    raise KeyError("lost")

        return caught_error(work), caught_error(
            lambda: agree(g, "more work", ["the same"])
        )  # and the group is usable afterwards

    for rank, (error, after) in enumerate(run(size, fails)):
        assert error[0] == "KeyError" and "lost" in error[1] and after is None
        assert rank == who or f"rank {who} failed at the work" in error[1]


def test_an_error_that_has_no_builtin_name_is_a_runtime_error_elsewhere():
    class Odd(Exception):
        pass

    def fails():
        g = Group()
        return caught_error(
            lambda: agree(g, "the work", [], Odd("odd") if g.group_rank == 0 else None)
        )

    assert [kind for kind, _ in run(2, fails)] == ["Odd", "RuntimeError"]


def test_the_first_line_that_differs_is_named():
    def differs():
        g = Group()
        lines = [f"layer {i}" for i in range(2000)]
        if g.group_rank == 2:
            lines[1500] = "layer of another kind"
        return caught_error(lambda: agree(g, "the model", lines))

    for kind, message in run(3, differs):
        assert (
            kind == "ValueError"
            and "rank 0 has 'layer 1500', rank 2 has 'layer of another kind'" in message
        )


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_does_not_come_is_named(gone):
    def waits():
        dist.barrier()
        g = Group(dist.new_group(timeout=timedelta(seconds=3)))
        dist.barrier()  # all are here, so that only the one that leaves can be late
        if g.group_rank == gone:
            return None
        return caught_error(lambda: agree(g, "the work", []))

    for rank, error in enumerate(run(3, waits)):
        assert (
            error is None
            if rank == gone
            else error[0] == "RuntimeError" and f"rank {gone} did not arrive within 3 s" in error[1]
        )


def test_a_group_of_one_needs_nothing():
    assert not dist.is_initialized() and "RANK" not in os.environ
    g, x = Group(), torch.arange(3.0)
    for call in (g.all_reduce, g.all_gather, g.reduce_scatter):
        call(x, async_op=True).wait()
    assert (g.ranks, g.size, g.group_rank, g.global_rank, x.tolist()) == ((0,), 1, 0, 0, [0, 1, 2])
    assert [bytes(b) for b in gather_bytes(g, bytearray(b"abc"), 0)] == [b"abc"]
    with pytest.raises(ZeroDivisionError), agreeing(g, "a division"):
        1 / 0


def test_the_store_does_not_grow_with_agreements():
    def keys():
        g = Group()
        store = dist.distributed_c10d._get_process_group_store(g.process_group)
        for i in range(3):
            agree(g, "the work", [str(i)])
        dist.barrier()
        before = store.num_keys()
        dist.barrier()
        for i in range(10):
            agree(g, "the work", [str(i)])
        assert caught_error(lambda: agree(g, "the work", [str(g.group_rank)]))[0] == "ValueError"
        for i in range(2):
            agree(g, "the work", [str(i)])
        dist.barrier()
        return store.num_keys() - before

    assert run(3, keys) == [0, 0, 0]


def test_threads_agree_at_the_same_time(tmp_path):
    """Two threads of a rank wait for each other's peers; the store, which they share, serves both."""

    def meet(rank, port):
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        groups = [Group(dist.new_group()) for _ in range(2)]
        dist.barrier()

        def work(i):
            if i != rank:
                time.sleep(0.5)
            groups[i].all_reduce(torch.ones(3))

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        os._exit(any(thread.is_alive() for thread in threads))

    port = free_port()
    ranks = [
        multiprocessing.get_context("fork").Process(target=meet, args=(rank, port))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0, 0]


def test_ranks_that_agree_on_different_things_are_told_so():
    def differ():
        g = Group()
        return caught_error(lambda: agree(g, "loading" if g.group_rank else "saving", []))

    for kind, message in run(2, differ):
        assert kind == "ValueError" and "'saving'" in message and "'loading'" in message


def nested(where):
    """Let rank 1 fail before, in or after an agreement that others take part in, inside a block that agrees."""
    group = Group()

    def fails(here):
        if here == where and group.group_rank == 1:
            raise LookupError(here)

    def both():
        with agreeing(group, "the outer block"):
            fails("before")
            with agreeing(group, "the inner block"):
                fails("inside")
            fails("after")

    said = [caught(both), caught(both)]
    agree(group, "what comes next")  # all ranks have agreed as often
    return said


@pytest.mark.parametrize("where", ["before", "inside", "after", "nowhere"])
def test_a_block_that_agrees_may_be_in_one_that_does(where):
    block = "the inner block" if where == "inside" else "the outer block"
    heard = f"LookupError: rank 1 failed at {block}: {where}"
    expected = [heard, f"LookupError: {where}", heard]
    if where == "nowhere":
        expected = [None] * 3
    assert run(3, nested, where, timeout=60) == [[text] * 2 for text in expected]


@pytest.mark.parametrize("given", [None, "ranks", [], [None]])
def test_what_is_no_group_is_one_clear_error(given):
    for call in (
        lambda: agree(given, "the work"),
        lambda: agreeing(given, "the work").__enter__(),
        lambda: fail(given, ValueError("lost")),
    ):
        with pytest.raises(TypeError, match=r"group must be a zero_nb\.Group, got"):
            call()
