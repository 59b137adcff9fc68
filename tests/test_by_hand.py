"""The file that a reader of start/01_by_hand types, as torchrun runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHAPTER = ROOT / "nbs" / "start" / "01_by_hand.ipynb"


def sources(kind: str) -> list[str]:
    notebook = json.loads(CHAPTER.read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def typed() -> list[str]:
    """Give the cells that belong to the file."""
    return [source for source in sources("code") if source.startswith("# by_hand.py\n")]


def last_line() -> str:
    """Give the line that the text asks the reader to add."""
    prose = "\n".join(sources("markdown"))
    (found,) = set(re.findall(r"`(main\(.+?\))`", prose))
    return found


def lines_of(source: str) -> int:
    lines = (line.strip() for line in source.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def test_the_file_imports_torch_only_and_is_as_short_as_the_page_says():
    roots = set(re.findall(r"^(?:from|import) (\w+)", "\n".join(typed()), re.M))
    assert roots == {"functools", "torch"}
    harness = ("def make_model", "class DataParallel", "def train")
    zero = [source for source in typed() if not any(word in source for word in harness)]
    both = sum(map(lines_of, zero)), sum(map(lines_of, typed()))
    said = sources("markdown")[0]
    assert f"{both[0]} of its {both[1]} lines are ZeRO" in said, both
    assert f"> ZeRO-1 and ZeRO-2 in {both[0]} lines on" in said
    why = (CHAPTER.parent / "00_why.ipynb").read_text(encoding="utf-8")
    assert f"all: {both[0]} lines for both stages" in why and f': \\"{both[0]} lines' in why
    assert both[0] <= 120 and len(sources("code")) + len(sources("markdown")) <= 40


@pytest.mark.turns(2)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_file_trains_as_ddp_does(world_size, tmp_path):
    script = tmp_path / "by_hand.py"
    script.write_text("\n\n\n".join([*typed(), last_line()]) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(world_size), str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        cwd=tmp_path,
    )
    report = done.stdout + done.stderr[-5000:]
    assert done.returncode == 0, report
    said = dict(re.findall(r"^(\w+) differs from DDP by \[(.+)\]$", done.stdout, re.M))
    assert list(said) == ["DataParallel", "Zero1", "Zero2"], report
    for numbers in said.values():
        gaps = [float(number) for number in numbers.split(", ")]
        assert gaps == [gaps[0]] * world_size  # all ranks agree
        # two terms have one sum; three are rounded in another order than DDP's
        assert gaps[0] == 0.0 if world_size == 2 else gaps[0] < 1e-6
