"""What `run` returns and prints, and the magic in real kernels."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist
from common.launching import alive, rank
from common.waiting import wait_for

from zero_nb.comm.launch import run
from zero_nb.comm.outcomes import serialize
from zero_nb.comm.world import World

pytestmark = pytest.mark.usefixtures("nothing_left")


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


def test_run_in_a_thread_of_a_pool():
    """As `asyncio.to_thread` does; the pool's threads are the caller's, and a rank has others of its own."""

    def ranks():
        with ThreadPoolExecutor(1) as own:
            return own.submit(dist.get_rank).result()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, 2, ranks).result() == [0, 1]


def loads(rank_of):
    """Be a rank that starts a process of its own."""
    loader = torch.utils.data.DataLoader([rank_of()], num_workers=1, multiprocessing_context="fork")
    return [batch.item() for batch in loader]


def test_run_in_a_worker_of_a_pool_of_processes():
    """Such a worker may start no processes; its ranks may."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(run, (2, loads, rank)) == [[0], [1]]
        assert pool.apply(_is_daemon)  # as before


def _is_daemon():
    return multiprocessing.current_process().daemon


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "60"])
def test_a_time_limit_that_makes_no_sense_is_refused(seconds):
    for name in ("timeout", "group_timeout"):
        with pytest.raises(ValueError, match=f"^{name} must be a positive number of seconds"):
            run(1, rank, **{name: seconds})


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


# the magic, in real kernels


def notebook(*cells):
    from nbformat.v4 import new_code_cell, new_notebook

    return new_notebook(cells=[new_code_cell(cell) for cell in cells])


CELLS = (
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


def execute(path, folder):
    """Run nbconvert on a notebook, whose cells may fail."""
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
    no_ports = ["--KernelManager.transport=ipc", f"--KernelManager.ip={folder / 'kernel'}"]
    subprocess.run([*command, *no_ports], check=True, timeout=120, capture_output=True)


def check_errors(outputs):
    """Each cell that is wrong shows its own error, without the lines that run it."""
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


def test_nbconvert_executes_it(tmp_path):
    import nbformat

    path = tmp_path / "small.ipynb"
    nbformat.write(notebook(*CELLS), path)
    execute(path, tmp_path)
    nb = nbformat.read(path, 4)
    outputs = [cell.outputs for cell in nb.cells]
    streams = ["".join(o.text for o in out if o.output_type == "stream") for out in outputs]
    assert streams[1] == "[rank0] one\n[rank0] two\n[rank1] one\n[rank1] late\n[rank1] two\n"
    assert outputs[1][-1].data["text/plain"] == "[44, 45]" and outputs[2] == [] and outputs[4] == []
    assert outputs[3][0].data["text/plain"] == "[(0, 20), (1, 20)]"
    assert "unrecognized arguments: --bogus" in streams[5] + str(outputs[5])
    check_errors(outputs)
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
