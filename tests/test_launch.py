"""Ranks that fail, hang, die, and callers that do."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from common.waiting import wait_for
from torch.nn.parallel import DistributedDataParallel

from zero_nb.comm import launch
from zero_nb.comm.launch import run
from zero_nb.comm.outcomes import RankTraceback, serialize
from zero_nb.comm.rank_process import _backend
from zero_nb.comm.world import World

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves a child, a thread, an open file or a process group."""
    me = psutil.Process()
    launch._warm()
    children = set(me.children(recursive=True))  # other files may share a process for their ranks
    before, files = threading.active_count(), len(me.open_files())
    yield
    assert [
        child
        for child in me.children(recursive=True)
        if child not in children and "resource_tracker" not in " ".join(child.cmdline())
    ] == []
    assert (threading.active_count(), len(me.open_files())) == (before, files)
    assert not dist.is_initialized() and "RANK" not in os.environ


def rank():
    return dist.get_rank()


# run: values


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values_come_in_rank_order(n):
    assert run(n, lambda: (time.sleep(0.02 * (n - rank())), rank(), dist.get_world_size())[1:]) == [
        (i, n) for i in range(n)
    ]


def test_arguments_and_closures():
    lock = threading.Lock()  # nothing that pickles
    assert run(2, lambda a, *, b: (a, b, lock.acquire(blocking=False), rank()), 1, b=2) == [
        (1, 2, True, 0),
        (1, 2, True, 1),
    ]


def test_nested_tensors_keep_dtype_and_sharing():
    def f():
        base = torch.arange(6, dtype=torch.bfloat16)
        return {"a": [base, base[2:]], "b": (torch.nn.Parameter(torch.ones(2)), None, "x")}

    for value in run(2, f):
        base, tail = value["a"]
        assert (
            base.dtype == torch.bfloat16
            and base.untyped_storage().data_ptr() == tail.untyped_storage().data_ptr()
        )
        assert value["b"][0].requires_grad


def test_large_values_do_not_block():
    values = run(3, lambda: torch.full((2_000_000,), float(rank())))
    assert [value[-1].item() for value in values] == [0, 1, 2]


def test_environment_is_torchruns():
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"

    def f():
        return (
            [os.environ[name] for name in names],
            torch.get_num_threads(),
            sys.stdin.read(),
            torch.cuda.is_available(),
        )

    assert run(2, f) == [(["0", "0", "2", "2"], 1, "", False), (["1", "1", "2", "2"], 1, "", False)]


def test_after_the_caller_has_used_many_threads():
    threads = torch.get_num_threads()

    def work():
        x = torch.randn(600, 600, requires_grad=True)
        (x @ x).sum().backward()
        return tuple(x.grad.shape)

    torch.set_num_threads(4)
    try:
        assert run(2, work) == [work(), (600, 600)] == run(2, work)
    finally:
        torch.set_num_threads(threads)


def test_run_in_a_thread():
    got = []
    thread = threading.Thread(target=lambda: got.extend(run(2, rank)))
    thread.start()
    thread.join(60)
    assert got == [0, 1]


def test_ranks_may_fork_and_start_processes():
    def f():
        loader = torch.utils.data.DataLoader(
            list(range(4)), num_workers=1, multiprocessing_context="fork"
        )
        return int(sum(loader)), os.system("exit 3") >> 8

    assert run(2, f) == [(6, 3)] * 2


def test_ranks_do_not_collect_the_callers_garbage():
    class Cycle:
        def __init__(self):
            self.me, self.home = self, os.getpid()

        def __del__(self):
            if os.getpid() != self.home:
                os._exit(9)

    def f():
        return gc.collect() >= 0 and gc.isenabled()

    for _ in range(3):
        Cycle()
        assert run(2, f) == [True, True] and gc.isenabled()


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    def f():
        (tmp_path / str(rank())).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        return rank()

    def pids():
        return [int(path.read_text()) for path in tmp_path.iterdir()]

    assert run(2, f) == [0, 1] and len(pids()) == 2
    wait_for(lambda: not any(alive(pid) for pid in pids()))
    with pytest.raises(TimeoutError):
        run(2, lambda: (f(), time.sleep(600)), timeout=2)
    wait_for(lambda: not any(alive(pid) for pid in pids()))


def writes_later(path):
    """Leave a thread that writes a file, and a pool whose thread waits for work."""

    def write():
        time.sleep(0.5)
        path.write_text("written")

    threading.Thread(target=write).start()
    ThreadPoolExecutor(1).submit(int).result()


def test_a_rank_ends_when_its_threads_have(tmp_path):
    start = time.monotonic()
    run(1, writes_later, tmp_path / "forked")
    assert (tmp_path / "forked").read_text() == "written"
    world = World(1)
    world.run(
        "def f():\n    time.sleep(0.5)\n    open(path, 'w').write('written')\n"
        "import threading, time\nthreading.Thread(target=f).start()",
        serialize({"path": str(tmp_path / "kept")}),
    )
    world.stop()
    assert (tmp_path / "kept").read_text() == "written"
    assert time.monotonic() - start < 30


def test_ranks_do_not_destroy_the_callers_stores():
    """A `TCPStore` in a reference cycle, found by a rank's collector, has crashed ranks at any line."""
    for _ in range(5):
        store = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        store.append(store)
        del store
        assert run(2, gc.collect) is not None
    gc.collect()


# run: output


def said(text):
    """Leave out what older gloo says of its connections."""
    return re.sub(r"^(\[rank\d\] )?\[Gloo\].*\n", "", text, flags=re.MULTILINE)


def test_output_comes_by_rank(capfd):
    def f():
        time.sleep(0.05 * (2 - rank()))
        print("out")
        print("err", file=sys.stderr)
        os.write(1, b"from C\n")
        sys.stdout.write("no newline")

    run(3, f)
    text = "".join(
        f"[rank{i}] {line}\n" for i in range(3) for line in ("out", "err", "from C", "no newline")
    )
    out, err = capfd.readouterr()
    assert (said(out), err) == (text, "")


def test_output_before_a_death_is_shown(capfd):
    def f():
        print("last words")
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 died without a word: it was killed by SIGSEGV"
    ):
        run(2, f)
    out = capfd.readouterr().out
    assert "[rank1] last words\n" in out and "[rank1] Fatal Python error: Segmentation fault" in out


def test_capture_off(capfd):
    run(1, lambda: print("straight"), capture=False)
    assert said(capfd.readouterr().out) == "straight\n"


# run: failures


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
        (Odd(1, 2), RuntimeError, r"rank 1: .*Odd: 1 and 2"),
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


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


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


# the magic, in real kernels


def notebook(*cells):
    from nbformat.v4 import new_code_cell, new_notebook

    return new_notebook(cells=[new_code_cell(cell) for cell in cells])


def test_nbconvert_executes_it(tmp_path):
    import nbformat

    nb = notebook(
        "%load_ext zero_nb.comm.launch\ndef twice(x): return 2 * x\nclass Point: x = 4\nbase = 20",
        "%%torchrun --nproc 2 --keep --push twice Point base\n#| slow\nimport torch.distributed as"
        " dist, time\nrank = dist.get_rank()\nprint('one')\nprint('late') if rank else"
        " time.sleep(0.3)\nprint('two')\ntwice(base) + Point.x + rank",
        "%%torchrun --keep --out both\nrank, base",
        "assert both == [(0, 20), (1, 20)]; both",
        "%%torchrun --keep\nrank = 5",
        "%%torchrun --keep --bogus\n1",
        "%%torchrun --keep --nproc 3\n1",
        "%%torchrun --keep\n1 +",
        "%%torchrun --keep --push nothing\n1",
        "%%torchrun --keep\ndef f():\n    if dist.get_rank() == 1: raise KeyError('no')\n   "
        " dist.barrier()\nf()",
        "%%torchrun --keep\n1",
        "%torchrun_stop",
    )
    path = tmp_path / "small.ipynb"
    nbformat.write(nb, path)
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--to=notebook",
        "--inplace",
        "--execute",
        "--allow-errors",
        str(path),
    ]
    no_ports = ["--KernelManager.transport=ipc", f"--KernelManager.ip={tmp_path / 'kernel'}"]
    subprocess.run([*command, *no_ports], check=True, timeout=120, capture_output=True)
    nb = nbformat.read(path, 4)
    outputs = [cell.outputs for cell in nb.cells]
    streams = ["".join(o.text for o in out if o.output_type == "stream") for out in outputs]
    assert streams[1] == "[rank0] one\n[rank0] two\n[rank1] one\n[rank1] late\n[rank1] two\n"
    assert outputs[1][-1].data["text/plain"] == "[44, 45]" and outputs[2] == [] and outputs[4] == []
    assert outputs[3][0].data["text/plain"] == "[(0, 20), (1, 20)]"
    assert "unrecognized arguments: --bogus" in streams[5] + str(outputs[5])
    errors = {
        i: "\n".join(o.traceback)
        for i, out in enumerate(outputs)
        for o in out
        if o.output_type == "error"
        if i != 5
    }
    assert sorted(errors) == [6, 7, 8, 9, 10]
    assert (
        errors[6].startswith("ValueError: the kept world was started with 2 ranks")
        and "SyntaxError" in errors[7]
        and "nothing" in errors[8]
    )
    lines = errors[9].splitlines()
    assert (
        '  File "<In [10]>", line 3, in f' in lines
        and "    if dist.get_rank() == 1: raise KeyError('no')" in lines
    )
    assert "run_cell_magic" not in errors[9] and lines[-2:] == [
        "KeyError: 'no'",
        "The kept world is gone, with its variables; the next --keep starts another.",
    ]
    assert "--nproc must say how many ranks" in errors[10]
    nbformat.validate(nb)


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_a_kernel_that_is_stopped(how, tmp_path, manager):
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute("%load_ext zero_nb.comm.launch")
        client.execute(
            "%%torchrun --nproc 2 --keep\nimport os, time\nopen(os.environ['RANK'],"
            " 'w').write('x')\ntime.sleep(600)"
        )
        wait_for(lambda: all((tmp_path / name).exists() for name in "01"))
        kernel = psutil.Process(manager.provisioner.pid)
        family = kernel.children(recursive=True)
        assert len(family) >= 3
        if how == "interrupt":
            manager.interrupt_kernel()
            reply = client.execute_interactive(
                "1 + 1", timeout=60, output_hook=lambda message: None
            )
            assert reply["content"]["status"] in ("ok", "aborted") and kernel.is_running()
        else:
            kernel.kill()
        wait_for(lambda: not any(alive(process.pid) for process in family))
    finally:
        client.stop_channels()
