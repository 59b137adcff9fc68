"""Two network namespaces joined by a link: two machines, as far as a network can tell."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .ports import free_port

SIDES = ("a", "b")
FIRST = "10.77.0.1"  # address of the first one
SCRIPT = Path(__file__).parents[2] / "nbs" / "benchmark" / "two_machines.sh"


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


def missing() -> str:  # "" if they can be made
    """Say why this machine has no namespaces for us."""
    if not shutil.which("ip"):
        return "there is no `ip` (Debian's package iproute2)"
    name = f"zero-nb-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.SubprocessError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextmanager
def two_machines(
    rate: str = "",  # of the link, as tc writes it ("1gbit"); "": as fast as it goes
) -> Iterator[list[str]]:  # names of the namespaces
    """Make two namespaces whose only link is one between them, and remove them at the end."""
    names = [f"zero-nb-{os.getpid()}-{side}" for side in SIDES]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        peer = ["type", "veth", "peer", "name", "link-b", "netns", names[1]]
        _ip("link", "add", "link-a", "netns", names[0], *peer)
        for i, (name, side) in enumerate(zip(names, SIDES, strict=True)):
            _ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"link-{side}")
            _ip("-n", name, "link", "set", f"link-{side}", "up")
            if rate:
                shape = (
                    f"tc qdisc add dev link-{side} root tbf rate {rate} burst 256kb latency 50ms"
                )
                _ip("netns", "exec", name, *shape.split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def run_on_two_machines(
    program: Sequence[str],  # arguments of Python
    per_side: int,  # ranks on each machine
    timeout: float,  # seconds
    **env: str,
) -> list[str]:  # what each rank printed
    """Run a program as one job on both machines; raises `AssertionError` if a rank fails."""
    with two_machines() as names:
        shared = {
            "MASTER_ADDR": FIRST,
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(2 * per_side),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        ranks = []
        for rank in range(2 * per_side):
            side = rank // per_side
            own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": f"link-{SIDES[side]}"}
            command = ["ip", "netns", "exec", names[side], sys.executable, *program]
            ranks.append(_started(command, {**shared, **own, **env}))
        return _said(ranks, timeout)


def benchmark_on_two_machines(
    per_side: int,  # ranks on each machine
    flags: Sequence[str],  # of zero_nb.apps.bench
    timeout: float,  # seconds
    rate: str = "",  # as for `two_machines`
) -> str:  # what the first machine printed
    """Run the benchmark as its script runs it on two machines."""
    with two_machines(rate) as names:
        env = {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MASTER_PORT": str(free_port()),
            "ZERO_NB_MEMORY": "0",  # they share one memory, which machines do not
        }
        machines = []
        for node, name in enumerate(names):
            script = [str(SCRIPT), FIRST, str(node), f"link-{SIDES[node]}", str(per_side)]
            machines.append(_started(["ip", "netns", "exec", name, *script, *flags], env))
        return _said(machines, timeout)[0]


def set_link(names: Sequence[str], state: str) -> None:
    """Cut the link between the machines ("down"), or join it again ("up")."""
    _ip("-n", names[0], "link", "set", "link-a", state)


def start_agent(
    names: Sequence[str],  # of the namespaces
    side: int,  # 0 or 1
    port: int,  # of the rendezvous, on the first machine
    folder: Path,  # this machine's; its output is added to "log"
    flags: Sequence[str],  # of zero_nb.apps.train
) -> subprocess.Popen[bytes]:
    """Start torchrun with one rank on one machine, which works in a folder of its own."""
    conf = f"is_host={1 - side},keep_alive_interval=1,keep_alive_max_attempt=12,join_timeout=120"
    command = ["ip", "netns", "exec", names[side], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint={FIRST}:{port}", f"--rdzv-conf={conf}", "--rdzv-id=job"]
    command += [f"--local-addr=10.77.0.{side + 1}", "--monitor-interval=0.1"]
    own = {"GLOO_SOCKET_IFNAME": f"link-{SIDES[side]}", "ZERO_NB_MEMORY": "0"}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            [*command, "-m", "zero_nb.apps.train", *flags],
            cwd=folder,
            env={**os.environ, **own, **paths},
            stdout=log,
            stderr=log,
        )


def _started(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **env}, text=True, **pipes)


def _said(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    """Wait for processes, and give what they printed; raises `AssertionError` if one fails."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in said]


def sent_bytes() -> int:
    """Count what this side has sent over the link."""
    link = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def torchrun_on_two_machines(
    script: Path,  # and its flags, the same on both
    flags: Sequence[str],
    per_side: int,  # ranks on each machine
    timeout: float,  # seconds
    rate: str = "",  # as for `two_machines`
) -> list[str]:  # what each machine printed
    """Run a script with torchrun on both machines, which meet by the c10d rendezvous."""
    with two_machines(rate) as names:
        port = free_port()
        agents = []
        for node, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes=2", f"--nproc-per-node={per_side}", "--rdzv-backend=c10d"]
            command += [f"--rdzv-endpoint={FIRST}:{port}", f"--rdzv-conf=is_host={1 - node}"]
            command += ["--rdzv-id=job", f"--local-addr=10.77.0.{node + 1}", str(script), *flags]
            env = {
                "GLOO_SOCKET_IFNAME": f"link-{SIDES[node]}",
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "ZERO_NB_MEMORY": "0",  # they share one memory, which machines do not
            }
            agents.append(_started(command, env))
        return _said(agents, timeout)
