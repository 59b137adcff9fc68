"""What a rank knows of its store without asking: whether it is there, and that it must not wait for it."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from common import free_port
from common.waiting import stop, wait_for
from test_gone_ranks import BEGIN

from zero_nb.checkpoint.async_save import SaveOutcome, Saving
from zero_nb.comm import group_store
from zero_nb.comm import store as stores
from zero_nb.comm.group_store import _has_aborted, _note_aborted
from zero_nb.comm.launch import run

HEARD = """
from zero_nb.comm import watcher
from zero_nb.comm.ending import fail
watcher._GLOO_SECONDS = 600.0
group = Group()
agree(group, "the model")
dist.barrier()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    fail(group, ValueError("no more data"))
    while store.add("ranks that heard", 0) < 2: time.sleep(0.1)
    time.sleep(12 if end == "stays" else 0)
    leave()
watching = group._ending.watcher
while not watching.heard:
    time.sleep(0.1)
    looks = [watching._look()]
store.add("ranks that heard", 1)
if end == "stays": # another thread of this rank's is inside the store, and holds it
    threading.Thread(target=lambda: store.get("never"), daemon=True).start()
    time.sleep(0.5)
else:
    while not watching.link.has_ended(): time.sleep(0.1)
begin = time.monotonic()
looks.append(watching._look())
print(looks, group._ending.ended, time.monotonic() - begin < 8, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("end", ["killed", "exits", "stays"])
def test_a_rank_that_has_heard_of_a_failure_is_freed_whatever_the_store_does(
    end, starter, tmp_path
):
    store = f"tcp://127.0.0.1:{free_port()}"
    arguments = (str(Path(__file__).parent), store, "", end)
    _, *others = starter.run(BEGIN + HEARD, tmp_path, 3, arguments, 60.0)
    for ended in others:
        said = ended.stdout.splitlines()[-1:]  # gloo of torch 2.9 writes to it, too
        assert said == ["[True, False] aborted True"], ended


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
    stop(host.pid)
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


def group_on(store, monkeypatch):
    """Give what stands for rank 1 of a group of two that has agreed on something, and has this store."""
    monkeypatch.setattr(stores, "_store", lambda group: store)
    monkeypatch.setattr(group_store, "_has_no_peers", lambda group: False)
    life = SimpleNamespace(met=True, name="a")
    agreements = SimpleNamespace(life=life, turn=1, silent=False)
    return SimpleNamespace(
        group_rank=1, size=2, global_rank=1, ranks=(0, 1), _agreements=agreements
    )


def test_a_rank_waits_a_second_for_the_store_to_have_its_note_before_it_closes_connections(
    hosted, monkeypatch
):
    host, store = hosted
    group = group_on(store, monkeypatch)
    stop(host.pid)
    begin = time.monotonic()
    _note_aborted(group)
    waited = time.monotonic() - begin
    host.send_signal(signal.SIGCONT)
    assert waited > 0.9
    wait_for(lambda: _has_aborted(group, 1), seconds=10)


def test_a_rank_that_has_written_its_part_goes_on_when_the_store_has_the_note(
    hosted, monkeypatch, tmp_path
):
    host, store = hosted
    group = group_on(store, monkeypatch)
    saving = Saving(tmp_path / "1", group, lambda: "the part", lambda parts: None, ExitStack())
    stop(host.pid)
    saving.start()
    went_on = saving._done.wait(1.0)
    host.send_signal(signal.SIGCONT)
    saving.join()
    assert not went_on and saving._notes.see("1") == "the part"
    assert saving._outcome == SaveOutcome(tmp_path / "1")


def refuse_to_start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize("near", [True, False])
def test_a_rank_without_threads_notes_that_it_lives_on_in_a_store_of_this_machine(
    near, hosted, monkeypatch
):
    _, store = hosted
    group = group_on(store, monkeypatch)
    monkeypatch.setattr(stores, "_is_near", lambda host: near)
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    _note_aborted(group)
    assert store.check(["za/aborted/1"]) == near


def test_a_rank_without_threads_asks_a_store_on_another_machine_without_a_limit(
    hosted, monkeypatch
):
    group = group_on(hosted[1], monkeypatch)
    monkeypatch.setattr(stores, "_timeout", lambda group: timedelta(seconds=1))
    monkeypatch.setattr(stores, "_is_near", lambda host: False)
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    notes = group_store.GroupStore(group, "example")
    notes.put("a", "note")
    assert notes.see("a") == "note"


def no_links():
    """Look for connections to stores of other kinds."""
    stores_here = dist.HashStore(), dist.distributed_c10d._get_default_store()
    return [stores._StoreLink(store).has_ended() for store in stores_here]


def test_a_store_that_is_no_process_is_there():
    assert run(2, no_links) == [[False, False]] * 2
