"""Processes that end as interpreters end, without the seconds that an interpreter takes to import torch.

`run` forks its ranks and ends them by `os._exit`. A test of what happens at the end of a program, or
of a program that is started by another, needs one that runs to the end of its main module. `Starter`
keeps one process that has imported torch and the package, and forks it for each rank.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = """
import gc, json, os, signal, sys, time
import torch, torch._dynamo, torch.distributed as dist, torch.utils.data
import torch.nn.parallel, zero_nb, zero_nb.comm.recording
torch.set_num_threads(1)
gc.collect()
gc.freeze() # what is imported: an interpreter that ends would look at all of it, for 0.9 s

for line in sys.stdin:
    job = json.loads(line)
    pids = []
    for rank, (stdout, stderr) in enumerate(job["files"]):
        if not (pid := os.fork()):
            break
        pids.append(pid)
    else:
        codes, deadline = {}, time.monotonic() + job["seconds"]
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
            time.sleep(0.005)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)
        continue
    break
else:
    os._exit(0)
# From here on this is a rank.
for fd, path in ((0, os.devnull), (1, stdout), (2, stderr)):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), fd)
os.environ.update(job["environ"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
sys.argv = ["-c", *job["arguments"]]
exec(compile(job["code"], "<program>", "exec"))
"""

ALONE = """
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    del os.environ[name]
"""  # what a program begins with that is no rank, but a launcher of ranks or a job of one process


@dataclass(frozen=True)
class Ended:
    """How a rank's process ended."""

    code: (
        int | None
    )  # of its exit; negative: the signal that killed it; None: it was killed when time was up
    stdout: str
    stderr: str


class Starter:
    """Runs programs on ranks, each in a copy of one process that has imported torch and the package."""

    def __init__(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZERO_NB")}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def run(
        self,
        code: str,  # a program; `rank`, `torch` and `dist` are there, no process group is
        folder: Path,  # an empty one for what the ranks write
        size: int = 2,  # ranks
        arguments: tuple[str, ...] = (),  # sys.argv[1:] of each
        seconds: float = 60.0,  # after which all are killed
        **environ: str,  # more variables of their environment
    ) -> list[Ended]:  # in rank order
        """Run a program on ranks, and wait until all of their processes have ended.

        The ranks see this process's variables that begin with ZERO_NB as they are now.
        """
        ours = {k: v for k, v in os.environ.items() if k.startswith("ZERO_NB")}
        files = [
            [str(folder / f"{name} of {r}") for name in ("stdout", "stderr")] for r in range(size)
        ]
        job: dict[str, Any] = {
            "code": code,
            "files": files,
            "seconds": seconds,
            "arguments": arguments,
            "environ": {"WORLD_SIZE": str(size), **ours, **environ},
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        texts = [[Path(path).read_text() for path in pair] for pair in files]
        return [Ended(code, *pair) for code, pair in zip(codes, texts, strict=True)]

    def stop(self) -> None:
        """End the process that is forked."""
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
