"""Callers that are killed, processes that must not live on, strangers that connect, checkpoints that are not trusted."""
import getpass
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from zero_nb.launch import run

ROOT = Path(__file__).parent.parent


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def marked(mark: str) -> dict[int, str]:
    """Find the processes that have a word in the environment they were started with; their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid(): continue
        try:
            if mark.encode() in (entry / "environ").read_bytes(): found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError: pass
    return found


# ---- L3: nothing lives on ----

def kill_callers(kind: str, seed: int, kills: int, at_once: int) -> None:
    """Start callers of `run`, or of a torchrun cell, and kill each at a random moment of its life."""
    from zero_nb import launch
    rng = random.Random(seed)
    starts = "import subprocess\nfor new in (False, True): subprocess.Popen(['sleep', '600'], start_new_session=new)\n"

    def work():
        exec(starts)
        dist.barrier()
        time.sleep(0.1)

    def caller() -> int:
        pid = os.fork()
        if pid: return pid
        try: launch.run(2, work) if kind == "run" else launch.World(2).run(starts)
        finally: os._exit(0)

    launch._warm()
    began = time.monotonic()
    os.waitpid(caller(), 0)
    life, deadlines, started, killed = time.monotonic() - began, dict[int, float](), 0, 0
    while started < kills or deadlines:
        if started < kills and len(deadlines) < at_once:
            pid = caller()
            deadlines[pid] = time.monotonic() + life * rng.random()
            started += 1
        for pid in [pid for pid, end in deadlines.items() if time.monotonic() > end]:
            os.kill(pid, 9)
            killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
            del deadlines[pid]
        time.sleep(0.001)
    assert killed > kills // 4, f"only {killed} were still alive"


@pytest.mark.parametrize("kind, kills, at_once", [("run", 44, 4), ("torchrun", 6, 3)])
def test_L3_a_killed_caller_leaves_no_process_and_no_folder(kind, kills, at_once, tmp_path):
    mark = f"zero_nb_test_{os.getpid()}_{kind}_{time.time_ns()}"
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_faults_launch as t; t.kill_callers({kind!r}, 17, {kills}, {at_once})"
    env = dict(os.environ, TMPDIR=str(tmp_path), ZERO_NB_MARK=mark, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], env=env, timeout=240, check=True)
    wait_for(lambda: not marked(mark), 30)
    assert [name for name in os.listdir(tmp_path) if name != f"torchinductor_{getpass.getuser()}"] == [] # torch's own cache


@pytest.mark.parametrize("end", ["return", "raise", "die", "hang"])
def test_L3_what_a_rank_starts_ends_with_it(end, tmp_path):
    def f():
        procs = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
        (tmp_path / str(dist.get_rank())).write_text(json.dumps([proc.pid for proc in procs]))
        dist.barrier()
        if end == "raise": raise ValueError("no")
        if end == "die": os.kill(os.getpid(), 9)
        if end == "hang": time.sleep(600)

    error = {"raise": ValueError, "die": RuntimeError, "hang": TimeoutError}.get(end)
    if error is None: run(2, f)
    else:
        with pytest.raises(error): run(2, f, timeout=3)
    pids = [pid for rank in range(2) for pid in json.loads((tmp_path / str(rank)).read_text())]
    assert len(pids) == 4 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("end", ["return", "raise", "hang"])
def test_L3_a_process_that_was_reaped_is_never_signalled(end, tmp_path, monkeypatch):
    """Its number may be another process's by now. Who signals must be the parent of a process that it has not asked for its exit code."""
    log = tmp_path / "signals"
    log.touch()
    for name in ("kill", "killpg"):
        send = getattr(os, name)
        def noted(pid, number, send=send):
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                own = True
            except ChildProcessError: own = pid == 0
            with open(log, "a") as file: file.write(f"{own} {pid} {number}\n")
            send(pid, number)
        monkeypatch.setattr(os, name, noted)

    def f():
        if end == "raise" and dist.get_rank() == 1: raise ValueError("no")
        if end == "hang": time.sleep(600)

    if end == "return": run(2, f)
    else:
        with pytest.raises((ValueError, TimeoutError)): run(2, f, timeout=2)
    signals = log.read_text().splitlines()
    assert all(line.startswith("True") for line in signals), signals
    assert end == "return" or signals
