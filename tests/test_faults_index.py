"""Every entry of the review of faults has a test of its name, or a sentence that says why it cannot have one."""

import ast
import json
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRIES = [
    f"{kind}{i}"
    for kind, last in (("C", 2), ("H", 7), ("M", 11), ("L", 12))
    for i in range(1, last + 1)
]
UNTESTED: dict[
    str, tuple[str, str]
] = {}  # entry: notebook, a sentence of it that says why no test is possible


@cache
def tests() -> set[str]:
    """Give the names of all test functions."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").glob("test_*.py")
    ]
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_fault_of_the_review_has_a_test(entry):
    named = [name for name in tests() if name.startswith(f"test_{entry}_")]
    if entry not in UNTESTED:
        assert named, f"no test is named test_{entry}_..."
        return
    notebook, sentence = UNTESTED[entry]
    cells = json.loads((ROOT / "nbs" / notebook).read_text(encoding="utf-8"))["cells"]
    assert not named and any(
        sentence in "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )
