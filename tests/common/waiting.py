"""Waiting for a condition."""

import os
import signal
import time
from pathlib import Path


def wait_for(condition, seconds=60, pause=0.02):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)
    return value


def stop(pid):
    """Stop a process, and return when all its threads stand still: until then they still answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    state = lambda thread: (thread / "stat").read_text().rpartition(")")[2].split()[0]
    wait_for(lambda: all(state(thread) in "TZ" for thread in threads.iterdir()), pause=0.0002)
