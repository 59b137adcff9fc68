"""Ranks that die with children, callers that are interrupted, and answers that cross questions."""

import pytest

from zero_nb.comm.launch import run
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
