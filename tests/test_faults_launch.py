"""Callers that are killed, processes that must not live on, strangers that connect, checkpoints
that are not trusted."""

import contextlib
import copy
import getpass
import json
import multiprocessing
import os
import pickle
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common.sampling import SEED
from common.waiting import wait_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_nb import Join, ZeroRedundancyOptimizer
from zero_nb.apps.config import TrainConfig
from zero_nb.apps.loop import train_rank
from zero_nb.apps.resume import configured
from zero_nb.comm import reaper
from zero_nb.comm.launch import run
from zero_nb.comm.world import World, _Handshakes

ROOT = Path(__file__).parent.parent


def marked(mark: str) -> dict[int, str]:
    """Find the processes that have a word in the environment they were started with; their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
        except OSError:
            pass
    return found


# ---- L3: nothing lives on ----


def kill_callers(kind: str, seed: int, kills: int, at_once: int) -> None:
    """Start callers of `run`, or of a torchrun cell, and kill each at a random moment of its life."""
    from zero_nb.comm import launch

    rng = random.Random(seed)
    starts = (
        "import subprocess\nfor new in (False, True): subprocess.Popen(['sleep', '600'],"
        " start_new_session=new)\n"
    )

    def work():
        exec(starts)
        dist.barrier()
        time.sleep(0.1)

    def caller() -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            launch.run(2, work) if kind == "run" else World(2).run(starts)
        finally:
            os._exit(0)

    launch._warm()
    began = time.monotonic()
    os.waitpid(caller(), 0)
    life, deadlines, started, killed = time.monotonic() - began, dict[int, float](), 0, 0
    while (killed < kills and started < 4 * kills) or deadlines:
        if killed + len(deadlines) < kills and len(deadlines) < at_once and started < 4 * kills:
            pid = caller()
            deadlines[pid] = time.monotonic() + life * rng.random()
            started += 1
        for pid in [pid for pid, end in deadlines.items() if time.monotonic() > end]:
            os.kill(pid, 9)
            killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
            del deadlines[pid]
        time.sleep(0.001)
    assert killed == kills, f"of {started} only {killed} were still alive"


# a world takes seconds to start: other moments each day, and all 50 where all tests run
WORLDS = 50 if os.environ.get("ZERO_NB_ALL") else 6


@pytest.mark.parametrize("kind, kills, at_once", [("run", 50, 4), ("torchrun", WORLDS, 3)])
def test_L3_a_killed_caller_leaves_no_process_and_no_folder(kind, kills, at_once, tmp_path):
    mark = f"zero_nb_test_{os.getpid()}_{kind}_{time.time_ns()}"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_faults_launch"
        f" as t; t.kill_callers({kind!r}, {SEED}, {kills}, {at_once})"
    )
    env = dict(
        os.environ, TMPDIR=str(tmp_path), ZERO_NB_MARK=mark, PYTHONPATH=os.pathsep.join(sys.path)
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        timeout=240 if kills < 50 or kind == "run" else 900,
        check=True,
    )
    wait_for(lambda: not marked(mark), 30)
    assert [
        name for name in os.listdir(tmp_path) if name != f"torchinductor_{getpass.getuser()}"
    ] == []  # torch's own cache


@pytest.mark.parametrize("end", ["return", "raise", "die", "hang"])
def test_L3_what_a_rank_starts_ends_with_it(end, tmp_path):
    def f():
        procs = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
        (tmp_path / str(dist.get_rank())).write_text(json.dumps([proc.pid for proc in procs]))
        dist.barrier()
        if end == "raise":
            raise ValueError("no")
        if end == "die":
            os.kill(os.getpid(), 9)
        if end == "hang":
            time.sleep(600)

    error = {"raise": ValueError, "die": RuntimeError, "hang": TimeoutError}.get(end)
    if error is None:
        run(2, f)
    else:
        with pytest.raises(error):
            run(2, f, timeout=3)
    pids = [pid for rank in range(2) for pid in json.loads((tmp_path / str(rank)).read_text())]
    assert len(pids) == 4 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


NOTES_SIGNALS = """
import os
def note(send):
    def noted(pid, number):
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            own = True
        except ChildProcessError:
            own = pid == 0
        with open(LOG, "a") as file:
            file.write(f"{own} {pid} {number}\\n")
        send(pid, number)
    return noted
os.kill, os.killpg = note(os.kill), note(os.killpg)
"""  # whether the sender is the parent of a process that it has not asked for its exit code


@pytest.fixture
def signals(tmp_path, monkeypatch):
    """Give a function that reads which signals this process and those forked from it have sent."""
    log = tmp_path / "signals"
    log.touch()
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, getattr(os, name))
    exec(NOTES_SIGNALS.replace("LOG", repr(str(log))), {})
    return lambda: log.read_text().splitlines()


@pytest.mark.parametrize("end", ["return", "raise", "hang"])
def test_L3_a_process_that_was_reaped_is_never_signalled(end, signals):
    """Its number may be another process's by now."""

    def f():
        if end == "raise" and dist.get_rank() == 1:
            raise ValueError("no")
        if end == "hang":
            time.sleep(600)

    if end == "return":
        run(2, f)
    else:
        with pytest.raises((ValueError, TimeoutError)):
            run(2, f, timeout=2)
    assert all(line.startswith("True") for line in signals()), signals()
    assert end == "return" or signals()


@pytest.mark.parametrize("end", ["stop", "kill", "die"])
def test_L3_a_world_never_signals_a_process_that_was_reaped(end, signals, tmp_path, monkeypatch):
    """The process that ends torchrun is another interpreter, which notes what it signals too."""
    start = subprocess.Popen
    notes = NOTES_SIGNALS.replace("LOG", repr(str(tmp_path / "signals")))

    def noting(command, **options):
        at = command.index("-c") + 1
        return start([*command[:at], notes + command[at], *command[at + 1 :]], **options)

    monkeypatch.setattr(reaper.subprocess, "Popen", noting)
    world = World(2)
    monkeypatch.setattr(reaper.subprocess, "Popen", start)
    world.run(
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    )
    if end == "die":
        with pytest.raises(RuntimeError, match="died"):
            world.run("if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)")
    before = len(signals())
    world.stop() if end == "stop" else world.kill()
    world.kill()  # a second time, when all is gone
    assert all(line.startswith("True") for line in signals()), signals()
    assert signals() and (end == "die" or len(signals()) > before)


# ---- L5: checkpoints are not trusted ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Give a checkpoint of this program."""
    folder = str(tmp_path_factory.mktemp("own"))
    sizes = {
        "layers": 1,
        "width": 8,
        "heads": 2,
        "block": 16,
        "vocabulary": 256,
        "batch": 1,
        "steps": 2,
        "eval_every": 2,
        "save_every": 2,
        "sample": 0,
    }
    run(1, train_rank, TrainConfig(**sizes, compare=False, out=folder))
    return torch.load(Path(folder, "checkpoint.pt"), weights_only=True)


def resumed(state, folder: Path, **given):
    folder.mkdir(parents=True, exist_ok=True)
    if state is not None:
        torch.save(state, folder / "checkpoint.pt")
    return configured({"resume": True, "out": str(folder), **given})


def test_L5_a_checkpoint_names_no_folder(checkpoint, tmp_path, monkeypatch):
    foreign = copy.deepcopy(checkpoint)
    foreign["config"]["out"] = str(tmp_path / "elsewhere")
    assert resumed(foreign, tmp_path / "here").out == str(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    resumed(foreign, tmp_path / "runs" / "train")
    assert configured({"resume": True}).out == TrainConfig().out == "runs/train"
    foreign["config"]["data"] = str(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"was trained on --data .*elsewhere; say so again"):
        resumed(foreign, tmp_path / "here")
    assert resumed(foreign, tmp_path / "here", data="mine").data == "mine"
    assert not (tmp_path / "elsewhere").exists()


def leaves(value, path=()):
    """Give the path of every item of nested dicts, lists and tuples."""
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, inner in pairs:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def changed(value, path, change):
    """Copy nested values, with one item changed; tensors are shared."""
    if not path:
        return change(value)
    if isinstance(value, dict):
        out = {
            key: changed(inner, path[1:], change) if key == path[0] else inner
            for key, inner in value.items()
        }
        return {key: inner for key, inner in out.items() if inner is not DROPPED}
    out = [
        changed(inner, path[1:], change) if i == path[0] else inner for i, inner in enumerate(value)
    ]
    return type(value)(inner for inner in out if inner is not DROPPED)


DROPPED = object()


def test_L5_every_missing_and_every_strange_item_is_a_value_error(checkpoint, tmp_path):
    rng, wrong, cases = (
        random.Random(5),
        [None, "text", [], {}, torch.ones(2, 3), {"x": 1}, True, b"x"],
        0,
    )
    for path in leaves(checkpoint):
        old = checkpoint
        for key in path:
            old = old[key]
        optional = len(path) > 1 and path[0] in ("losses", "held_out")  # other steps are as good
        changes = [] if optional else [lambda value: DROPPED]
        changes += [
            lambda old, value=value: value
            for value in rng.sample([value for value in wrong if type(value) is not type(old)], 2)
        ]
        if isinstance(old, torch.Tensor):
            changes += [lambda old: old.bfloat16(), lambda old: old.reshape(1, *old.shape)]
        if isinstance(old, dict) and path != ("losses",) and path != ("held_out",):
            changes.append(lambda old: {**old, "strange": 1})
        for change in changes:
            state = changed(checkpoint, path, change)
            with pytest.raises(
                ValueError, match=r"checkpoint\.pt (cannot be continued: |was trained on --data )"
            ):
                resumed(state, tmp_path)
            cases += 1
    with pytest.raises(ValueError, match="'strange', which does not belong there"):
        resumed({**checkpoint, "strange": 1}, tmp_path)
    lacks = changed(checkpoint, ("config", "width"), lambda value: DROPPED)
    with pytest.raises(
        ValueError,
        match=r"checkpoint\.pt cannot be continued: config lacks 'width'; to begin anew, move it away",
    ):
        resumed(lacks, tmp_path)
    assert cases > 200
    assert resumed(checkpoint, tmp_path).steps == 4


@pytest.mark.parametrize(
    "config",
    [
        {"layers": 10**9},
        {"width": 4000, "heads": 1},
        {"steps": -1},
        {"optimizer": "sgd"},
        {"optimizer": "os.system"},
        {"lr": float("nan")},
    ],
    ids=str,
)
def test_L5_options_that_do_not_fit_are_a_value_error(config, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be continued: "):
        resumed({**checkpoint, "config": checkpoint["config"] | config}, tmp_path)


def test_L5_a_damaged_file_is_a_value_error(checkpoint, tmp_path):
    rng = random.Random(6)
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    for _ in range(60):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else whole)
        for _ in range(rng.randrange(1, 20)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "checkpoint.pt").write_bytes(damaged)
        try:
            assert resumed(None, tmp_path).out == str(tmp_path)  # only numbers have changed
        except ValueError as error:
            assert "checkpoint.pt" in str(error)

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    for state in (Harm(), {**checkpoint, "step": Harm()}, 3, [], None):
        torch.save(state, tmp_path / "checkpoint.pt")
        with pytest.raises(ValueError, match=r"checkpoint\.pt"):
            resumed(None, tmp_path)
    assert not (tmp_path / "harm").exists()


# ---- L11 and pickles: strangers that connect ----


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data  # as multiprocessing's connections write it


def test_L11_strangers_keep_no_rank_waiting_and_are_never_unpickled(tmp_path, monkeypatch):
    strangers, create, bomb = [], socket.create_server, pickle.dumps(Bomb(tmp_path / "harm"))
    says = (
        [b""] * 20
        + [b"\0", b"\0\0\0\x40half"]
        + [
            frame(bomb),
            frame(b"0" * 64) + frame(bomb),
            frame(b"x" * 100),
            b"y" * 104 + frame(bomb),
            bomb * 3,
        ]
    )

    def visited(*args, **kwargs):
        server = create(*args, **kwargs)
        for words in says:
            strangers.append(socket.create_connection(server.getsockname()))
            strangers[-1].sendall(words)
        return server

    monkeypatch.setattr(socket, "create_server", visited)
    began = time.monotonic()
    world = World(2)
    took = time.monotonic() - began
    try:
        assert world.run("import os; int(os.environ['RANK'])", timeout=60) == [0, 1]
    finally:
        world.stop()
    for sock in strangers:
        sock.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""  # told nothing
        sock.close()
    assert not (tmp_path / "harm").exists()
    assert took < 60  # one after the other would be 5 s for each


def test_L11_a_wrong_greeting_is_closed_at_once(monkeypatch):
    monkeypatch.setattr(_Handshakes, "patience", 1e6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        handshakes = _Handshakes(server, b"token")
        silent, wrong = (socket.create_connection(server.getsockname()) for _ in range(2))
        wrong.sendall(b"0" * 1000)
        wrong.settimeout(60)
        for _ in range(10):
            assert handshakes.next(0.05) == []
        assert len(handshakes.waiting) == 1  # the silent one
        with contextlib.suppress(ConnectionResetError):
            assert wrong.recv(1) == b""
        many = [socket.create_connection(server.getsockname()) for _ in range(100)]
        for _ in many:
            handshakes.next(0.05)
        assert len(handshakes.waiting) == 64
        handshakes.close()
        for sock in (silent, wrong, *many):
            sock.close()


def test_L11_a_rank_unpickles_nothing_from_a_stranger_at_its_callers_port(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "harm"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = json.dumps([server.getsockname()[1], "token", [str(tmp_path / "log")], "gloo"])
        env = dict(os.environ, ZERO_NB_WORLD=world, RANK="0", PYTHONPATH=os.pathsep.join(sys.path))
        rank = subprocess.Popen(
            [sys.executable, "-c", "from zero_nb.comm.world import serve; serve()"],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        server.settimeout(60)
        conn, _ = server.accept()
        conn.sendall(b"0" * 32 + frame(bomb) * 3)
        _, err = rank.communicate(timeout=60)
        said = conn.recv(10_000)
        conn.close()
    assert rank.returncode == 1 and "another one listens at port" in err and b"token" not in said
    assert not (tmp_path / "harm").exists()


# ---- L10: the store of run ----


def store_growth(iterations: tuple[int, int]) -> int:
    """Train in a `Join` block; give the bytes by which the file grows in which the ranks of `run` meet."""
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    model = DistributedDataParallel(nn.Linear(4, 4))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    before = os.stat(store.path).st_size
    with Join([model, zero]):
        for _ in range(iterations[dist.get_rank()]):
            zero.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            zero.step()
    return os.stat(store.path).st_size - before


def test_L10_the_store_of_run_grows_only_while_a_rank_has_no_data():
    """A `FileStore` keeps what is deleted, and every rank reads all of it."""
    few, many, uneven = (
        max(run(2, store_growth, iterations)) for iterations in ((20, 20), (320, 320), (20, 320))
    )
    assert many < few + 1000 and uneven < few + 300 * 600, (few, many, uneven)


# ---- programs end quietly ----

SESSION = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_nb import Join, ZeroRedundancyOptimizer, data_parallel, overlap
from zero_nb.comm.groups import Group
from zero_nb.comm.subgroups import clone
if not dist.is_torchelastic_launched(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else: dist.init_process_group("gloo")

kept = []
for way in ("step", "overlap", "data_parallel"):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if way != "data_parallel": model = DistributedDataParallel(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    attach = {"overlap": overlap, "data_parallel": data_parallel}.get(way)
    kept += [model, zero, attach(model, zero) if attach else None]
    for _ in range(3):
        zero.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        zero.step()
    kept.append(model(torch.randn(4, 8))) # and no backward

group = Group()
kept += [clone(group), group.all_reduce(torch.ones(10), async_op=True), group.all_gather(torch.ones(10), async_op=True)]
print("the end")
"""


@pytest.mark.turns(2)
@pytest.mark.parametrize("way", ["interactive", "torchrun"])
def test_quiet_end_of_a_program_that_destroys_no_group(way, tmp_path):
    """What lives at the end of a process, works nobody waited for included, has destructors; none
    of them may complain, or wait."""
    env = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(sys.path),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        PYTHONWARNINGS="ignore",
    )
    (tmp_path / "session.py").write_text(SESSION)
    command = (
        ["-q", "-i"]
        if way == "interactive"
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "session.py"]
    )
    process = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=env,
        input=SESSION,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0 and process.stdout.count("the end") == (
        1 if way == "interactive" else 2
    ), process.stderr
    lines = process.stderr.replace(">>> ", "").replace("... ", "").splitlines()
    assert [
        line
        for line in lines
        if line.strip() and "destroy_process_group() was not called" not in line
    ] == [], process.stderr  # that is torch's


SLOW = """
import subprocess, sys, time
sys.path.append(sys.argv.pop(1))
import reaper

class Slow(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        time.sleep(0.5)

reaper.subprocess.Popen = Slow
reaper._main()
"""


def test_the_exit_code_of_a_program_that_ends_at_once_arrives(tmp_path):
    """The program ends before the reaper goes on."""
    ours, theirs = multiprocessing.Pipe()
    folder = str(Path(reaper.__file__).parent)
    arguments = [folder, str(theirs.fileno()), str(os.getpid()), str(tmp_path / "output")]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SLOW, *arguments, "false"], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    found = reaper.Reaper(ours, process.pid)
    try:
        assert found.code(0, seconds=10) == 1
    finally:
        found.end()
        process.returncode = 0
