"""Functions of tests in programs that have done nothing before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

measures_memory = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or torch.__version__ < (2, 10),
    reason=(
        "asks Linux how much memory a process has had; before torch 2.10, what torch.save has"
        " written stays until Python collects garbage"
    ),
)


def run_afresh(n, name, *cases):
    """Run a function of a test module on n ranks forked from a program that has done nothing before, once
    with each of some arguments: memory is asked for as it would be in a user's job."""
    module, function = name.split(".")
    code = (
        f"import json, {module}\nfrom zero_nb import run\nprint(json.dumps([run({n},"
        f" {module}.{function}, case) for case in {cases!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
