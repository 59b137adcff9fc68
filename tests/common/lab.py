"""A JupyterLab on the notebooks of a folder, and a page that shows one of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "ZERO_NB_TEST_LAB"  # an environment variable that all processes of a JupyterLab inherit


def notebook(*sources: str) -> str:
    """Give the file of a notebook of code cells."""
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": source,
        }
        for i, source in enumerate(sources)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


@dataclass(frozen=True)
class Lab:
    """A server that runs."""

    folder: Path  # of its notebooks
    port: int

    def open(self, page: Any, name: str) -> None:
        """Show a notebook, and wait until its kernel can be asked."""
        page.goto(f"http://127.0.0.1:{self.port}/lab/tree/{name}?token=lab&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        # before there is a kernel the indicator says "idle" too, and running a cell then opens the
        # dialog that asks for one
        status = page.locator("#jp-main-statusbar", has_text="Python 3 (ipykernel) | Idle")
        status.wait_for(timeout=60_000)

    def saved(self, page: Any, name: str) -> list[dict]:
        """Save a notebook as Ctrl+S does; give its code cells."""
        page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
        cells = json.loads((self.folder / name).read_text(encoding="utf-8"))["cells"]
        return [cell for cell in cells if cell["cell_type"] == "code"]

    def processes(self) -> list[list[str]]:
        """Give the command lines of all processes that this server and its kernels have started and that live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                mine = process.environ().get(MARK) == str(self.folder)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.cmdline())
        return found


def _command(folder: Path, port: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=lab",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]


@contextmanager
def jupyterlab(folder: Path) -> Iterator[Lab]:
    """Run a JupyterLab for the notebooks in a folder, with settings of its own; it trusts what they show,
    as after `make lab`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own = folder.parent / f"{folder.name}-jupyter"
    own.mkdir()
    env = {
        **os.environ,
        **{f"JUPYTER_{kind}_DIR": str(own / kind) for kind in ("CONFIG", "DATA", "RUNTIME")},
        MARK: str(folder),
    }
    trust = [sys.executable, "-m", "jupyter", "trust", *map(str, folder.glob("*.ipynb"))]
    subprocess.run(trust, env=env, check=True, capture_output=True)
    with open(own / "log", "wb") as log:
        server = subprocess.Popen(
            _command(folder, port), env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(300):
            assert server.poll() is None, (own / "log").read_text()[-2000:]
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield Lab(folder, port)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
