"""Ranks that fail, hang, die, and callers that do."""

import builtins
import gc
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common.launching import alive, rank
from common.waiting import wait_for
from torch.nn.parallel import DistributedDataParallel

from zero_nb.comm import launch, magic
from zero_nb.comm import world as world_module
from zero_nb.comm.launch import run
from zero_nb.comm.outcomes import RankTraceback
from zero_nb.comm.rank_process import _backend
from zero_nb.comm.reaper import Reaper
from zero_nb.comm.world import World

pytestmark = pytest.mark.usefixtures("nothing_left")


BAD = "class Bad:\n    def __reduce__(self): return int, ('no number',)"  # when it is read


class Odd(Exception):
    """Has more arguments than it passes on, so it does not unpickle."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    "error, expected, text",
    [
        (ValueError("no"), ValueError, "no"),
        (KeyError(3), KeyError, "3"),
        (FileNotFoundError(2, "gone", "x"), FileNotFoundError, "gone"),
        (Odd(1, 2), RuntimeError, r"rank 1: .*Odd: 1 and 2$"),
        (
            Odd("shapes differ:\n  ours (3,)", 4),
            RuntimeError,
            r"Odd: shapes differ:\n  ours \(3,\) and 4$",
        ),
        (SystemExit(3), RuntimeError, "rank 1: SystemExit: 3"),
        (KeyboardInterrupt(), RuntimeError, "rank 1: KeyboardInterrupt"),
    ],
)
def test_exceptions_keep_type_and_traceback(error, expected, text, tmp_path):
    def inner():
        raise error

    def waits():
        (tmp_path / str(rank())).touch()
        dist.barrier()

    def f():
        if rank() != 1:
            waits()
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        inner()

    with pytest.raises(expected, match=text) as caught:
        run(3, f)
    assert type(caught.value) is expected
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    trace = str(cause)
    assert (
        "rank 1 of 3 raised\nTraceback" in trace
        and "raise error" in trace
        and "in inner" in trace
        and f"{os.sep}comm{os.sep}" not in trace  # no line of the modules that start ranks
    )
    assert (
        "rank 0 was running at" in trace
        and "rank 2 was running at" in trace
        and trace.count("in waits\n") == 2
    )


def noted():
    error = Odd(1, 2)
    error.__notes__ = ["my note"]  # as `add_note` does, from Python 3.11 on
    return error


def grouped():
    return builtins.ExceptionGroup("several", [ValueError("a"), Odd(1, 2)])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (noted, f"{__name__}.Odd: 1 and 2"),
        pytest.param(
            grouped,
            "ExceptionGroup: several (2 sub-exceptions)",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups"),
        ),
    ],
)
def test_an_error_is_named_by_its_class_and_message(make, says):
    def f(raising):
        if rank() in raising:
            raise make()
        raise KeyError(rank())

    with pytest.raises(RuntimeError) as caught:
        run(2, f, (0,))
    assert str(caught.value) == f"rank 0: {says}"
    with pytest.raises(KeyError) as caught:
        run(2, f, (1,))
    assert str(caught.value.__cause__).startswith(f"rank 1 raised {says}\n")


def test_a_chain_is_shown():
    def f():
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        run(1, f)
    assert "ZeroDivisionError" in str(caught.value.__cause__) and "direct cause" in str(
        caught.value.__cause__
    )


def test_all_fail_and_the_lowest_speaks():
    def f():
        raise ValueError(f"rank {rank()}")

    for _ in range(5):
        with pytest.raises(ValueError, match="rank 0") as caught:
            run(3, f)
        assert "rank 2 raised ValueError: rank 2" in str(caught.value.__cause__)


def test_the_cause_speaks_even_if_it_closes_the_group():
    def f():
        try:
            if rank() == 1:
                raise ValueError("the cause")
            dist.barrier()
        finally:
            dist.destroy_process_group()

    with pytest.raises(ValueError, match="the cause"):
        run(2, f)


@pytest.mark.parametrize(
    "end, text",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "it was killed by SIGKILL"),
        (lambda: os._exit(7), "it ended with exit code 7"),
        (lambda: os._exit(0), "it ended with exit code 0"),
        (lambda: os.abort(), "it was killed by SIGABRT"),
        (lambda: os.kill(os.getpid(), 40), r"it was killed by SIGRTMIN\+6"),
    ],
)
def test_a_rank_that_dies(end, text, capfd):
    def f():
        return dist.barrier() if rank() != 2 else end()

    with pytest.raises(RuntimeError, match=rf"rank 2 of 3 died without a word: {text}"):
        run(3, f)
    capfd.readouterr()


def test_a_rank_that_dies_before_the_group_exists(monkeypatch):
    enter = launch._enter
    monkeypatch.setattr(
        launch, "_enter", lambda *args: os._exit(5) if os.environ["RANK"] == "1" else enter(*args)
    )
    with pytest.raises(
        RuntimeError, match="rank 1 of 3 died without a word: it ended with exit code 5"
    ):
        run(3, rank)


@pytest.mark.parametrize(
    "value, name",
    [(lambda: 1, "function"), (threading.Lock(), "lock"), ([(i for i in ())], "list")],
)
def test_values_that_cannot_be_sent(value, name):
    with pytest.raises(TypeError, match=f"rank 1 returned a {name} that cannot be sent"):
        run(2, lambda: value if rank() == 1 else 0)


class Unreadable:
    """Is read in no process but the one that has written it."""

    def __reduce__(self):
        return _same_process, (os.getpid(),)


def _same_process(pid):
    if pid != os.getpid():
        raise OSError("not here")


def test_values_that_cannot_be_read():
    words = "rank 1 returned a value that its caller cannot read (OSError: not here); return num"
    with pytest.raises(TypeError, match=re.escape(words)):
        run(2, lambda: Unreadable() if rank() == 1 else 0)


def test_timeout_says_where_each_rank_is():
    def spin():
        while True:
            pass

    def f():
        if rank() == 0:
            spin()
        if rank() == 1:
            dist.recv(torch.zeros(1), 0)
        return rank()

    with pytest.raises(
        TimeoutError, match="rank 0 and rank 1 of 3 had not returned after 3 s"
    ) as caught:
        run(3, f, timeout=3)
    text = str(caught.value)
    assert (
        re.search(r"in spin\n\s+(while True:|pass)\n", text)  # whichever line it was in
        and "dist.recv(" in text
        and "rank 2 returned" in text
    )


def test_group_timeout_is_the_groups_own():
    def f():
        if rank() == 1:
            return None
        dist.barrier()

    with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
        run(2, f, group_timeout=2)


@pytest.mark.parametrize("limits", [{"group_timeout": 1e10}, {"timeout": 1e10}])
def test_a_limit_of_centuries_does_not_come_at_once(limits):
    assert run(2, lambda: dist.barrier(), **limits) == [None, None]


def test_a_rank_that_leaves_early_is_missed_by_the_others(capfd):
    def f():
        if rank() == 1:
            return dist.destroy_process_group()
        dist.barrier()

    with pytest.raises(RuntimeError, match="gloo") as caught:
        run(2, f)
    assert "rank 1 returned" in str(caught.value.__cause__)


def test_timeout_of_a_rank_that_cannot_answer():
    with pytest.raises(TimeoutError, match="in native code"):
        run(1, lambda: os.kill(os.getpid(), signal.SIGSTOP), timeout=0.5)


def test_interrupt_stops_all(tmp_path):
    started = tmp_path / "started"

    def f():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started.touch()
        time.sleep(600)

    def interrupt():
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that runs this in the background has it ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(3, f)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()


def test_a_killed_caller_leaves_no_orphan(tmp_path):
    def caller():
        def f():
            (tmp_path / str(rank())).write_text(str(os.getpid()))
            time.sleep(600)

        run(2, f)

    process = multiprocessing.get_context("fork").Process(target=caller)
    process.start()
    pids = [
        int(wait_for(lambda i=i: (tmp_path / str(i)).exists() and (tmp_path / str(i)).read_text()))
        for i in range(2)
    ]
    process.kill()
    process.join()
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(
    "n, f, options, error, text",
    [
        (0, rank, {}, ValueError, "at least 1, not 0"),
        (-1, rank, {}, ValueError, "not -1"),
        (2.0, rank, {}, ValueError, "whole number"),
        (2, "f", {}, TypeError, "f must be a function, which each rank calls, not a str"),
        (
            1000,
            rank,
            {"backend": "nccl"},
            ValueError,
            "1000 ranks need 1000 GPUs for NCCL, and this machine has",
        ),
        (1000, rank, {"backend": "NCCL"}, ValueError, "1000 ranks need 1000 GPUs for NCCL"),
        (2, rank, {"backend": "what"}, Exception, "what"),
    ],
)
def test_what_cannot_work(n, f, options, error, text):
    with pytest.raises(error, match=text):
        run(n, f, **options)


def test_not_where_cuda_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="does not survive a fork; use %%torchrun"):
        run(2, rank)


def test_not_where_there_is_no_fork(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(RuntimeError, match="this system cannot fork; use %%torchrun"):
        run(2, rank)


def test_not_inside_a_process_group():
    def f():
        return run(1, rank)

    with pytest.raises(RuntimeError, match=r"has one already; call dist\.destroy_process_group"):
        run(1, f)


def test_again_and_again():
    """A DDP object that is alive at the end has dead-locked ranks that end the ordinary way."""
    kept = []

    def f():
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        kept.append((model, torch.optim.AdamW(model.parameters())))
        model(torch.ones(2, 4)).sum().backward()
        kept[0][1].step()
        return float(model.module.weight.grad.sum())

    for i in range(30):
        assert run(2 + i % 3, f, timeout=60) == [32.0] * (2 + i % 3)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "source, error, text",
    [
        ("if rank == 1: raise ValueError('no')\ndist.barrier()", ValueError, "no"),
        (
            "import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
            RuntimeError,
            "rank 1 of 2 died without a word: it was killed by SIGKILL",
        ),
        ("while True: pass", TimeoutError, "rank 0 and rank 1 of 2 had not returned after 2 s"),
    ],
)
def test_a_world_lasts_until_a_cell_fails(source, error, text):
    world = World(2)
    path = world.files.paths[0]
    world.run(
        "import torch.distributed as dist\nclass Error(Exception): pass\nrank = dist.get_rank()"
    )
    assert world.run("rank", name="<cell>") == [0, 1]
    assert [str(value) for value in world.run("Error(rank)")] == [
        "0",
        "1",
    ]  # the class travels by value
    pids = [pid for _, pid in world.ranks]
    with pytest.raises(error, match=text):
        world.run(source, timeout=2 if error is TimeoutError else None)
    assert (
        not any(alive(pid) for pid in pids)
        and not alive(world.agent.pid)
        and not os.path.exists(path)
    )
    with pytest.raises(RuntimeError, match="has been stopped"):
        world.run("1")


def test_a_world_survives_what_all_its_ranks_do_wrong():
    world = World(2)
    try:
        world.run("import torch, torch.distributed as dist; rank = dist.get_rank()")
        own = "class Own(Exception): pass\nraise Own('no')"
        for wrong, error, text in [
            ("missing", NameError, "missing"),
            ("torch.ones(2) @ torch.ones(3)", RuntimeError, "size"),
            (own, Exception, "no"),
        ]:
            with pytest.raises(error, match=text):
                world.run(wrong, timeout=60)
            assert world.run("x = torch.ones(1); dist.all_reduce(x); x.item(), rank") == [
                (2.0, 0),
                (2.0, 1),
            ]
        with pytest.raises(ValueError, match="0"):
            world.run("raise ValueError(rank)")
        assert not world.ranks
    finally:
        world.kill()


def test_a_world_survives_values_that_its_caller_cannot_read():
    world = World(2)
    try:
        world.run(f"{BAD}\nx = 3")
        with pytest.raises(TypeError, match="rank 0 returned a value that its caller cannot read"):
            world.run("Bad()")
        assert world.run("x") == [3, 3]
    finally:
        world.kill()


def test_options_that_torchrun_takes_from_its_environment_are_not_this_machines(monkeypatch):
    for name, value in {"NNODES": "2", "MAX_RESTARTS": "2", "NPROC_PER_NODE": "3"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    world = World(2)
    assert world.run("import torch.distributed as dist; dist.get_world_size()") == [2, 2]
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died .* it ended with exit code 3"):
        world.run("import os\nif os.environ['RANK'] == '1': os._exit(3)\ndist.barrier()")


def test_a_start_that_does_not_end_is_given_up(monkeypatch):
    def sleeping(n, master_port, log, ranks):
        code = "import time; print('waiting', flush=True); time.sleep(600)"
        return Reaper.spawn([sys.executable, "-c", code], dict(os.environ), log)

    monkeypatch.setattr(world_module, "_agent", sleeping)
    monkeypatch.setattr(world_module, "_START_SECONDS", 0.5)
    words = "must start 2 ranks in 0.5 s, and ranks 0, 1 did not connect; all were stopped"
    with pytest.raises(TimeoutError, match=words):
        World(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--timeout -1", "--timeout must be a positive number of seconds, not -1; leave it out"),
        ("--timeout 0", "--timeout must be a positive number of seconds, not 0"),
        ("--timeout nan", "--timeout must be a positive number of seconds, not nan"),
        ("--timeout inf", "--timeout must be a positive number of seconds, not inf"),
        ("--out a.b", "--out must be a name that a variable can have, not 'a.b'"),
        ("--out class", "--out must be a name that a variable can have, not 'class'"),
    ],
)
def test_options_of_a_cell_are_checked_before_ranks_start(options, words, monkeypatch):
    monkeypatch.setattr(magic, "World", lambda *args: pytest.fail("ranks were started"))
    space = {"In": [""]}
    with pytest.raises(ValueError, match=words):
        magic.Torchrun(SimpleNamespace(user_ns=space)).cell(f"--nproc 2 {options}", "1")
    assert [*space] == ["In"]


def test_a_port_in_use():
    with socket.create_server(("", 0)) as taken, pytest.raises(RuntimeError, match="EADDRINUSE"):
        World(2, master_port=taken.getsockname()[1])


def test_a_rank_that_cannot_start(tmp_path, monkeypatch):
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"before its 2 ranks were ready: ImportError: .*"):
        World(2)


def test_one_gpu_a_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _backend(2, None) == "cpu:gloo,cuda:nccl" and _backend(4, "gloo") == "gloo"
    for start in (
        lambda: World(4),
        lambda: World(4, "nccl"),
        lambda: World(4, "NCCL"),
        lambda: run(4, rank, backend="cpu:gloo,cuda:nccl"),
    ):
        with pytest.raises(
            ValueError,
            match=(
                "4 ranks need 4 GPUs for NCCL, and this machine has 2; start fewer ranks, or choose"
                " the backend gloo"
            ),
        ):
            start()


CUDA_ASKED = """
import torch, traceback
asked = []
def watch(module, name, answer):
    def ask(*args, **how):
        if name != "current_accelerator" or how.get("check_available"):
            asked.append(f"{name}, from {''.join(traceback.format_stack())}")
        return answer
    setattr(module, name, ask)
for name in ("is_available", "is_current_stream_capturing", "init", "current_device"):
    watch(torch.cuda, name, False)
for name in ("is_available", "current_accelerator", "current_stream"):
    watch(torch.accelerator, name, None)
watch(torch.autograd, "backward", None)
watch(torch._C, "_cuda_getDeviceCount", 0)
torch.backends.cuda.is_built = lambda: True
from zero_nb.comm.launch import run
assert run(2, lambda x: x + 1, 3) == [4, 4]
if asked: raise SystemExit(asked[0])
"""


def test_a_process_that_forks_ranks_puts_no_cuda_in_use(starter, tmp_path):
    """After a question to the CUDA runtime, a process cannot fork ranks that use a GPU."""
    (ended,) = starter.run(CUDA_ASKED, tmp_path, size=1)
    assert ended.code == 0, ended


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_a_rank_that_cannot_use_cuda_tells_why(monkeypatch, backend):
    def refuse():
        raise getattr(torch, "AcceleratorError", RuntimeError)(
            "CUDA error: initialization error\nCUDA kernel errors might be reported later"
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(RuntimeError, match="put CUDA in use, as") as caught:
        run(1, rank, backend=backend)
    said = str(caught.value)
    assert said.endswith("torchrun (torch says: CUDA error: initialization error)"), said


def test_ranks_on_cpus_start_where_cuda_cannot_be_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: 1 / 0)
    assert run(2, rank) == [0, 1]


@pytest.mark.parametrize("free", [2, 6])
def test_a_launch_for_which_there_are_not_enough_files_leaves_none_open(free):
    run(1, int)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = max(map(int, before)) + 1 - len(before)  # the lowest free number is given first
    fillers = [os.dup(0) for _ in range(holes)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            run(4, int)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert run(2, int) == [0, 0]
