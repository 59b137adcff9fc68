"""What a rank knows of its store without asking: whether it is there, and that it must not wait for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from common import free_port
from common.waiting import wait_for
from test_gone_ranks import BEGIN

from zero_nb.comm import store as stores
from zero_nb.comm.launch import run

HEARD = """
from zero_nb.comm import watcher
from zero_nb.comm.ending import fail
watcher._GLOO_SECONDS = 600.0
group = Group()
agree(group, "the model")
dist.barrier()
if rank == 0:
    fail(group, ValueError("no more data"))
    time.sleep(12 if end == "stays" else 2)
    leave()
time.sleep(1)
watching = group._state.watcher
looks = [watching._look()]
if end == "stays": # another thread of this rank's is inside the store, and holds it
    store = dist.distributed_c10d._get_default_store()
    threading.Thread(target=lambda: store.get("never"), daemon=True).start()
    time.sleep(0.5)
else:
    while not watching.link.has_ended(): time.sleep(0.1)
begin = time.monotonic()
looks.append(watching._look())
print(looks, group._state.ended, time.monotonic() - begin < 8, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("end", ["killed", "exits", "stays"])
def test_a_rank_that_has_heard_of_a_failure_is_freed_whatever_the_store_does(
    end, starter, tmp_path
):
    store = f"tcp://127.0.0.1:{free_port()}"
    arguments = (str(Path(__file__).parent), store, "", end)
    _, *others = starter.run(BEGIN + HEARD, tmp_path, 3, arguments, 20.0)
    for ended in others:
        assert ended.stdout == "[True, False] aborted True\n", ended


HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(120)
"""


@pytest.fixture
def hosted():
    """Give a process that hosts a store, and a store that asks it."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        yield host, dist.TCPStore("127.0.0.1", int(host.stdout.readline()))
    finally:
        host.kill()
        host.wait()


def test_a_store_whose_process_ends_in_good_order_or_is_killed_with_a_request_unread(hosted):
    host, store = hosted
    link = stores._StoreLink(dist.PrefixStore("a", store))
    assert link.files and not link.has_ended()
    host.send_signal(signal.SIGSTOP)
    store.set("key", "unread")
    time.sleep(0.2)
    assert not link.has_ended()
    host.kill()  # the system resets the connection
    wait_for(link.has_ended, seconds=10)
    with pytest.raises(dist.DistError):
        store.get("key")
    assert link.has_ended()  # also when somebody has asked


def test_a_file_that_has_taken_the_number_of_a_connection_is_none(hosted):
    _, store = hosted
    link = stores._StoreLink(store)
    (number,) = link.files
    kept = os.dup(number)
    with open(os.devnull) as other:
        os.dup2(other.fileno(), number)
    assert link.has_ended()
    os.dup2(kept, number)
    os.close(kept)
    assert not link.has_ended()


def no_links():
    """Look for connections to stores of other kinds."""
    stores_here = dist.HashStore(), dist.distributed_c10d._get_default_store()
    return [stores._StoreLink(store).has_ended() for store in stores_here]


def test_a_store_that_is_no_process_is_there():
    assert run(2, no_links) == [[False, False]] * 2
