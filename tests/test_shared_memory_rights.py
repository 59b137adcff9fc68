"""Who may share memory with whom: users, containers, small files, ranks that cannot."""

import logging
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common.shared_files import files, refuse_memory, through

from zero_nb.comm import agreement, meeting, ranks, shared_file, shared_memory, transport
from zero_nb.comm import store as store_module
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")


def logged():
    """Give a list that gets each line which this process writes to the log from now on."""
    logs = []
    handler = logging.Handler()
    handler.emit = lambda entry: logs.append(entry.getMessage())
    logging.getLogger("zero_nb").addHandler(handler)
    logging.getLogger("zero_nb").setLevel("INFO")
    return logs


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_rank_that_may_not_is_enough(who):
    def mixed():
        logs = logged()
        if dist.get_rank() == who:
            os.environ["ZERO_NB_MEMORY"] = "0"
        g, x = Group(), torch.ones(12)
        for _ in range(2):
            g.reduce_scatter(x)
            g.all_gather(x)
        return through(g), x.tolist(), [text for text in logs if "sends messages" in text]

    first, *others = run(3, mixed)
    assert first[:2] == (None, [9.0] * 12) and others == [(None, [9.0] * 12, [])] * 2
    assert len(first[2]) == 1 and f"rank {who}: ZERO_NB_MEMORY=0 forbids it" in first[2][0]


REASONS = {
    "elsewhere": "it does not see the /dev/shm that rank ",
    "other file": "did not open /dev/shm/",
    "other user": "it does not see the /dev/shm that rank ",
    "no memory": "No space left on device",
    "bad setting": "ZERO_NB_MEMORY_MB must be a number of MiB, 1 or more, got 'many'",
}  # what the log says


@pytest.mark.parametrize("how", REASONS)
def test_ranks_that_cannot_share_send_messages_and_say_so_once(how):
    """Another machine, one that looks alike and is not, a user who may not open the file, no
    memory, and a setting that is no number."""

    def apart():
        if dist.get_rank() == 1:
            if how == "elsewhere":
                shared_memory._place = lambda _: "there"
            if how == "other file":
                shared_file._open_locked = lambda path, byte: shared_file.os.memfd_create(
                    "elsewhere"
                )
            if how == "other user":
                shared_memory.os.geteuid = lambda: 65533
            if how == "no memory":
                shared_memory.os.posix_fallocate = refuse_memory
            if how == "bad setting":
                os.environ["ZERO_NB_MEMORY_MB"] = "many"
        shared_file._OPEN_TIMEOUT = 0.5
        logs, g, x = logged(), Group(), torch.ones(12)
        g.reduce_scatter(x)
        sums = x[4 * g.group_rank].item()
        g.all_gather(x)
        return through(g), sums, files(), [text for text in logs if "sends messages" in text]

    (*first, said), *others = run(3, apart)
    assert (first, others) == ([None, 3.0, []], [(None, 3.0, [], [])] * 2)
    assert len(said) == 1 and "sends messages; shared memory cannot be used: rank " in said[0]
    assert REASONS[how] in said[0]


def test_the_file_is_this_users_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    fd = shared_file._open_locked(tmp_path / "own", 5)
    assert os.fstat(fd).st_mode & 0o777 == 0o600 and os.fstat(fd).st_size == 0
    os.close(fd)
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o666)
    with pytest.raises(PermissionError, match="alone"):
        shared_file._open_locked(tmp_path / "open", 5)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="symbolic"):
        shared_file._open_locked(tmp_path / "link", 5)


def slow_to_look():
    """Open a file on two ranks of which one takes its time after its first lock."""
    real = os.fstat

    def slow(fd):
        time.sleep(0.3)
        return real(fd)

    os.fstat = slow if dist.get_rank() else real
    try:
        fd, locks = shared_file.open_together(f"slow {os.getppid()}", dist.get_rank(), range(2))
    finally:
        os.fstat = real
    same = [None, None]
    dist.all_gather_object(same, os.fstat(fd).st_ino)
    return same[0] == same[1] and shared_file._locked(fd, locks + 1 - dist.get_rank())


def test_a_rank_that_is_slow_to_look_at_the_file_has_the_same_file():
    assert run(2, slow_to_look, timeout=30) == [True, True]


def files_of_failed_meetings():
    """Wait for a rank that does not come, and for a file that is another user's; count open files."""
    with mock.patch.multiple(shared_file, _OPEN_TIMEOUT=0.05):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                shared_file.open_together(f"alone {os.getpid()}", 0, range(2))
            with (
                mock.patch.object(os, "geteuid", lambda: 12345),
                pytest.raises(PermissionError),
            ):
                shared_file.open_together(f"other {os.getpid()}", 0, range(2))
        return len(os.listdir("/proc/self/fd")) - before


def test_a_meeting_that_fails_leaves_no_file_open():
    assert run(1, files_of_failed_meetings) == [0]


HOLDS = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(fd, fcntl.LOCK_EX, 1, 10 ** 12)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_file_that_was_left_is_removed_and_one_in_use_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    used, mine = tmp_path / "zero_nb-used", tmp_path / "zero_nb-mine"
    for path in (used, mine, tmp_path / "zero_nb-left", tmp_path / "other"):
        path.touch(0o600)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(used)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        monkeypatch.setattr(shared_file, "_NAMED", {mine.name})
        assert shared_file.remove_stale() == ["zero_nb-left"]
    finally:
        holder.kill()
        holder.wait()
    assert shared_file.remove_stale() == ["zero_nb-used"] and sorted(
        path.name for path in tmp_path.iterdir()
    ) == ["other", "zero_nb-mine"]


class CountedStore:
    """A store that counts requests and their bytes, but no look whether something is there."""

    def __init__(self, store):
        self.store, self.requests, self.bytes = store, 0, 0

    def __getattr__(self, name):
        def call(*args):
            self.requests += "\0" not in args
            self.bytes += sum(len(arg) for arg in args if isinstance(arg, str))
            return getattr(self.store, name)(*args)

        return call


def connect_on(store, size, r):
    """Let a rank look for a transport; what it found, and what that has cost on the store."""
    group = object.__new__(ranks.Ranks)
    group.group_rank, group.ranks, group.size = r, tuple(range(size)), size
    group.process_group = CountedStore(store)
    group._agreements = ranks._Agreements()
    group._ending = ranks._Ending()
    found = transport.find_transport(partial(meeting._Meeting, group))
    return found, group.process_group.requests, group.process_group.bytes


def test_H6_a_group_of_more_ranks_than_share_memory_asks_the_store_nothing(monkeypatch):
    monkeypatch.setattr(store_module, "_store", lambda group: group.process_group)
    for module in (store_module, meeting):
        monkeypatch.setattr(module, "_timeout", lambda group: timedelta(seconds=1))
    (_, said), requests, nbytes = connect_on(dist.HashStore(), 16_384, 5)
    assert said == "sends messages; shared memory cannot be used: 16384 ranks are more than 256"
    assert (requests, nbytes) == (0, 0)


def test_connecting_costs_a_few_requests_whatever_the_number_of_ranks():
    """Counted on a store, with one thread for each of 40 ranks that are on two machines: they find
    out before any of them makes a file."""
    size, store, told_of = 40, dist.HashStore(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_store", lambda group: group.process_group)
        for module in (store_module, agreement, meeting):
            patch.setattr(module, "_timeout", lambda group: timedelta(seconds=30))
        patch.setattr(
            shared_memory, "_place", lambda _: f"machine {threading.current_thread().name}"
        )
        threads = [
            threading.Thread(
                target=lambda r: told_of.append(connect_on(store, size, r)),
                args=(r,),
                name=str(r % 2),
                daemon=True,
            )
            for r in range(size)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert (
        len(told_of) == size
        and {said[0] for said, _, _ in told_of} == {None}
        and len({said for said, _, _ in told_of}) == 1
    )
    assert (
        max(requests for _, requests, _ in told_of) <= 14
        and sum(nbytes for _, _, nbytes in told_of) < 1000 * size
    )
    assert store.num_keys() <= 1 and not files()  # the store keeps one of its own
