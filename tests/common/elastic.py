"""An elastic job on one machine: an agent of torchrun for each rank, and blows that kill some of them."""

import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.run import config_from_args, parse_args

from zero_nb.apps.train import run_rank

from .agents import forking_agent
from .waiting import stop

BEGUN = re.compile(r"ranks: (\d+), steps taken before: (\d+)")
STEP = re.compile(r"step +(\d+) of \d+")
SECONDS = "keep_alive_interval=1,keep_alive_max_attempt=12,join_timeout=120"


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent is gone; on Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Give the processes that a process has started and that have not been waited for."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def kill(*pids: int) -> None:
    """Send SIGKILL to processes that may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def serve_store() -> tuple[int, int]:
    """Fork a process that keeps the agents' store, and give its id and port.

    In this process the store's thread would look up the names of those who call while agents are
    forked: one that is forked meanwhile waits forever for the C library's lock (4 of 34 tries)."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            die_with_parent()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writer, b"%d\n" % store.port)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        return pid, int(file.readline())


@dataclass
class Life:
    """What happens between two starts of the ranks."""

    ranks: int
    first: int  # steps taken before
    reached: int  # step of the last line that rank 0 printed


@dataclass(frozen=True)
class Blow:
    """Something that happens to a job."""

    kind: str  # "rank", "save", "start", "agent" or "grow"
    steps: int = 0  # after how many steps of a life
    wait: float = 0.0  # seconds after that


@dataclass
class Struck:
    """A blow as it happened."""

    kind: str
    ranks: int  # before
    step: int  # that rank 0 had printed
    saved: int  # of the checkpoint that was there
    in_save: bool  # whether half a file was left behind
    begun: int  # lives before it


@dataclass
class ElasticJob:
    """Agents of torchrun that train together; `strike` kills some, and `finish` waits for the end."""

    folder: Path  # for logs, and for what the training leaves, in "out"
    flags: Sequence[str]  # of the training
    nnodes: str = "3:4"
    fork: bool = False  # agents and ranks are copies of this process, which has imported torch
    seconds: float = 300.0  # without any line of rank 0 before it is given up
    last_call: int = 5  # seconds for which enough agents wait for one more
    lives: list[Life] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store, self.port = serve_store()
        self.agents: dict[int, Any] = {}  # by process id, which also orders the ranks
        self.codes: list[int] = []  # exit codes of agents that ended by themselves
        self.started = 0
        self.read: dict[Path, int] = {}  # bytes of each log that were looked at
        self.out = self.folder / "out"

    def __enter__(self) -> "ElasticJob":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.agents, self.store]:
            kill(*children(pid), pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def start(self, count: int = 1) -> None:
        """Start agents, each of one rank."""
        for _ in range(count):
            log = self.folder / f"agent-{self.started}.log"
            arguments = ["--nproc-per-node=1", f"--nnodes={self.nnodes}", "--max-restarts=100"]
            arguments += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
            arguments += [
                f"--rdzv-conf=is_host=0,last_call_timeout={self.last_call},{SECONDS}",
                "--rdzv-id=job",
                "--local-addr=127.0.0.1",
            ]
            arguments += ["--monitor-interval=0.05", "-m", "zero_nb.apps.train"]
            arguments += [*self.flags, f"--out={self.out}", "--auto-resume"]
            start = self._fork if self.fork else self._spawn
            self.agents[start(arguments, log)] = None
            self.started += 1

    def _environ(self) -> dict[str, str]:
        # without the second variable torch's agents that stay go on asking the store of one that is gone
        return {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    def _spawn(self, arguments: list[str], log: Path) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env={**os.environ, **self._environ()},
                preexec_fn=die_with_parent,
            )
        process.returncode = 0  # so that only this object waits for it
        return process.pid

    def _fork(self, arguments: list[str], log: Path) -> int:
        if pid := os.fork():
            return pid
        die_with_parent()
        _be_agent(arguments, log, self._environ())

    def poll(self) -> Life | None:
        """Read what the ranks have printed, and give the present life."""
        for log in sorted(self.folder.glob("agent-*.log")):
            text = log.read_bytes()
            end = text.rfind(b"\n") + 1
            for line in text[self.read.get(log, 0) : end].decode(errors="replace").splitlines():
                if found := BEGUN.search(line):
                    ranks, first = map(int, found.groups())
                    self.lives.append(Life(ranks, first, first))
                elif self.lives and (found := STEP.search(line)):
                    self.lives[-1].reached = int(found[1])
            self.read[log] = end
        for pid in [*self.agents]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.agents[pid]
                self.codes.append(os.waitstatus_to_exitcode(status))
        return self.lives[-1] if self.lives else None

    def wait(self, reached: Callable[[Life | None], Any], pause: float = 0.01) -> None:
        """Wait until something is true of the present life."""
        end = time.monotonic() + self.seconds
        while not reached(life := self.poll()):
            if any(self.codes) or not self.agents:
                raise AssertionError(f"agents ended, with {self.codes}: {self.tail()}")
            if time.monotonic() > end:
                self._log_stacks()
                raise AssertionError(f"nothing happened; last seen: {life}: {self.tail()}")
            time.sleep(pause)

    def _log_stacks(self) -> None:
        """Let forked agents that live write into their logs what they are at."""
        for pid in self.agents if self.fork else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1)

    def tail(self) -> str:
        """Give the end of each log, for errors."""
        logs = sorted(self.folder.glob("agent-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def strike(self, blow: Blow, saved: Callable[[], int], chance: Random) -> None:
        """Let something happen to the job, at its moment, and wait until the ranks have started again."""
        life = self.lives[-1]
        self.wait(lambda now: now.reached >= life.first + blow.steps)
        time.sleep(blow.wait)
        there = saved()  # before the lives are counted: one that begins later finds it
        self.poll()
        count = len(self.lives)
        last = self.lives[-1]
        before = Struck(blow.kind, last.ranks, last.reached, there, False, count)
        if blow.kind == "grow":
            self.start()
        elif blow.kind == "agent":
            self._kill_agent(chance)
        elif blow.kind == "save":
            self._kill_in_save(before)
        else:
            kill(*children(chance.choice([*self.agents])))
        if blow.kind == "start":
            self._kill_at_start(chance)
        self.struck.append(before)
        wanted = {"grow": 1, "agent": -1}.get(blow.kind, 0) + before.ranks
        self.wait(lambda _: len(self.lives) > count and self.lives[-1].ranks == wanted)

    def _kill_agent(self, chance: Random) -> None:
        pid = chance.choice([*self.agents])
        kill(*children(pid), pid)
        os.waitpid(pid, 0)
        del self.agents[pid]

    def _kill_at_start(self, chance: Random) -> None:
        """Kill one more rank, of those that are started next, before it can have taken a step."""
        old = {rank for pid in self.agents for rank in children(pid)}
        new: set[int] = set()
        while len(new) < len(self.agents):
            self.poll()
            new = {rank for pid in self.agents for rank in children(pid)} - old
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 1))
        kill(chance.choice(sorted(new)))

    def _kill_in_save(self, struck: Struck) -> None:
        """Kill rank 0 when it has begun to write a file and has not ended, at the next save or a later one."""
        half = lambda: {*self.out.glob(".checkpoint.pt.*.tmp")}
        while not struck.in_save:
            old = half()
            self.wait(lambda _, old=old: half() - old, 0.0005)
            (rank,) = children(min(self.agents))
            stop(rank)
            struck.in_save = bool(half() - old)
            os.kill(rank, signal.SIGKILL if struck.in_save else signal.SIGCONT)
        struck.step = self.poll().reached

    def finish(self) -> None:
        """Wait until all agents have ended well."""
        self.wait(lambda _: not self.agents)
        assert not any(self.codes), (self.codes, self.tail())

    def history(self) -> list[tuple[int, int, int]]:  # first step, last step, ranks
        """Give on how many ranks each step was taken that counts in the end."""
        ends = [life.first for life in self.lives[1:]] + [self.lives[-1].reached]
        return [
            (life.first, end, life.ranks)
            for life, end in zip(self.lives, ends, strict=True)
            if end > life.first
        ]

    def report(self) -> dict[str, Any]:
        """Give what happened, as plain values."""
        return {"lives": [*map(asdict, self.lives)], "struck": [*map(asdict, self.struck)]}


def _be_agent(arguments: list[str], log: Path, environ: dict[str, str]) -> NoReturn:
    """Be an agent of torchrun that forks its rank."""
    code = 1
    try:
        os.environ.update(environ)
        torch.set_num_threads(1)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd in (1, 2):
            os.dup2(file, fd)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        given = parse_args(arguments)
        config, _, _ = config_from_args(given)
        forking_agent(config, run_rank)(given.training_script_args)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)
