"""How the ranks of the main job meet after torchrun has started them again."""

import os
from datetime import timedelta

import torch.distributed as dist
from common import free_port

from zero_nb.apps.resume import store_of_this_start
from zero_nb.comm.launch import run


def starts(port):
    """Meet in the store of an agent, three times, where this rank's agent counts otherwise than the
    other's; before the third time a rank has come that is gone since."""
    rank = dist.get_rank()
    agents = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = []
    for start in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start + 5 * rank)
        dist.barrier()
        if start == 2 and rank == 0:
            agents.set("rank 1", "one that is gone")
        with store_of_this_start(timedelta(seconds=20)) as place:
            place["store"].set(f"from {rank}", str(start))
            found.append(place["store"].get(f"from {1 - rank}").decode())
        dist.barrier()
    return found


def test_each_start_has_keys_of_its_own_whatever_the_agents_count():
    assert run(2, starts, free_port()) == [["0", "1", "2"]] * 2
