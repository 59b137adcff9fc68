"""Ranks that die with children, callers that are interrupted, and answers that cross questions."""

import multiprocessing
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from common.launching import alive
from common.waiting import stop

from zero_nb.comm.launch import run
from zero_nb.comm.outcomes import Outcome, _gather_outcomes, serialize
from zero_nb.comm.world import World

pytestmark = pytest.mark.usefixtures("nothing_left")

DIES = """
import multiprocessing, os, time
import torch.distributed as dist
if dist.get_rank() == 1:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    os._exit(3)
dist.barrier()
"""  # its child holds all its connections open


@pytest.mark.parametrize("way", ["run", "torchrun"])
def test_a_rank_that_dies_is_missed_though_its_child_lives(way):
    world = World(2) if way == "torchrun" else None
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died .* it ended with exit code 3"):
        if world is None:
            run(2, exec, DIES, {}, timeout=60)
        else:
            world.run(DIES, timeout=60)


def test_an_outcome_that_crosses_the_question_leaves_no_answer_behind():
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(2)), strict=True)
    theirs[0].send(Outcome(0, "raised", "the same"))

    def show():  # takes its time
        if show in todo:
            todo.remove(show)
            theirs[1].send(Outcome(1, "raised", "the same"))
            time.sleep(0.5)

    def listen():
        assert theirs[1].recv() == "where"
        theirs[1].send(Outcome(1, "was running"))

    todo = [show]
    listener = threading.Thread(target=listen)
    listener.start()
    found = _gather_outcomes(ours, None, show)
    listener.join()
    assert [(o.rank, o.did) for o in found] == [(0, "raised"), (1, "raised")]
    assert not ours[0].poll() and not ours[1].poll()


@contextmanager
def interrupted(seconds):
    """Interrupt this thread, as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_cell_that_is_interrupted_on_its_way_to_the_ranks_ends_the_world():
    world = World(2)
    pids = [pid for _, pid in world.ranks]
    large = serialize({"x": bytes(64 << 20)})
    stop(pids[1])  # so that its connection fills up
    with interrupted(1.0):
        world.run("'first'", pushed=large)
    assert not world.ranks and not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="has been stopped"):
        world.run("'second'")


def test_a_world_that_is_interrupted_while_it_stops_is_gone():
    world = World(2)
    world.run("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()")
    pids = [pid for _, pid in world.ranks]
    with interrupted(1.0):
        world.stop()
    assert not world.ranks and not any(map(alive, [*pids, world.agent.pid]))
